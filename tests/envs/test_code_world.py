"""The code world: problems, splits, episodes, prompts, replies."""

import asyncio
import json
import os
import string
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_processes import printed_in_two_processes

from data.code.build import build
from flowjax.envs import EnvDied, Past, Split, WorldError
from flowjax.envs.code import Code
from flowjax.envs.code.problems import OPERATIONS, PROBES, Recipe, draw, generated_problem, problem_of
from flowjax.envs.code.world import LEGAL, CodeOptions, _problem, action_of_tests, normalised
from flowjax.envs.pool import EnvPool
from flowjax.grading.code import CallCase, Check, Lines, Verdict, judge
from flowjax.grading.sandbox import Limits
from flowjax.published.worlds import PublishedCode
from flowjax.records import Task
from flowjax.run import resolve

WORLD = Code()
WITHOUT = bool(os.environ.get("FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP"))
OPTIONS = {"cpu_s": 30.0, "idle_s": 30.0, "case_cpu_s": 20.0, "allow_no_isolation": WITHOUT}
FORMATS = ("humaneval", "mbpp", "livecodebench", "deepcoder")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: str(path) for kind, path in build(tmp_path_factory.mktemp("code"), seed=3, problems=24).items()}


def task_of(index: int = 0, **options) -> Task:
    task = Code(**options).tasks("train", 0)[index]
    assert task is not None
    return task


def test_generated_solutions_pass_and_compute_what_the_statement_says():
    rng = np.random.default_rng(0)
    for _ in range(300):
        recipe = draw(rng, tuple(OPERATIONS), 3)
        names: dict = {}
        exec(recipe.program(), names)
        for x in PROBES[recipe.kind]:
            assert names["f"](x) == recipe.value(x)


def test_the_expert_solves_generated_problems_and_chance_does_not():
    env = Code(**OPTIONS).env()
    rng = np.random.default_rng(0)
    scores = []
    for index in range(15):
        task = task_of(index)
        observation = env.reset(task, 0)
        step = env.step(WORLD.expert(env))
        assert (step.terminal, step.valid, step.reward) == (True, True, 1.0)
        assert step.outcome == {"success": 1.0, "score": 1.0}
        env.reset(task, 0)
        step = env.step(WORLD.random_action(observation, rng))
        assert step.valid and step.terminal and step.reward == step.outcome["success"]
        scores.append(step.outcome["success"])
    assert np.mean(scores) < 0.3


@pytest.mark.parametrize("kind", FORMATS)
def test_solutions_in_every_format_pass_and_others_fail(files: dict[str, str], kind: str):
    rows = [json.loads(line) for line in Path(files[kind]).read_text().splitlines()]
    env = Code(path=files[kind], **OPTIONS).env()
    source = Code(path=files[kind]).tasks("train", 0)
    seen = 0
    for index in range(min(len(source), 12)):
        task = source[index]
        assert task is not None
        env.reset(task, 0)
        solution = env.problem.solution
        if kind == "livecodebench":  # comes without solutions: taken from the statement's steps
            with pytest.raises(WorldError, match="without a solution"):
                WORLD.expert(env)
            continue
        assert env.step(solution).outcome == {"success": 1.0, "score": 1.0}, solution
        assert env._verdict is not None and all(env._verdict.passed)  # the docstring's examples too
        env.reset(task, 0)
        wrong = solution.replace("return x", "return [x, None]").replace("print(x)", "print(x, None)")
        assert env.step(wrong).outcome == {"success": 0.0, "score": 0.0}
        seen += 1
    assert seen or (kind == "livecodebench" and len(rows) == 24)


@pytest.mark.parametrize(
    ("shown", "public"), [("assert True", 0), ("assert f(1) == 2", 1), ("assert f(1) == 2\nassert f(4) == 5", 2)]
)
def test_of_mbpp_only_the_asserts_in_the_statement_are_public(shown: str, public: int):
    """A text counted as one case, whatever was in it: an agent was told a hidden one, or not told one that it saw."""
    rows = {"text": "Add one.", "code": "def f(x):\n    return x + 1", "test_list": [shown, "assert f(2) == 3"]}
    problem = problem_of(rows, public_tests=1)
    assert problem.statement.endswith(f"For example:\n{shown}")
    assert (problem.public, len(problem.suite.cases)) == (public, public + 1)
    assert problem_of(rows, public_tests=0).statement.endswith("must be called f.")


def test_a_problem_of_mbpp_is_the_same_with_other_tests():
    """Which assert came first decided on which side of the split a problem lay: its twin was trained on."""
    row = {"text": "Double.", "code": "def f(x):\n    return 2 * x"}
    first, other = (problem_of({**row, "test_list": tests}) for tests in (["assert f(1) == 2"], ["assert f(2) == 4"]))
    assert first.statement != other.statement and first.content == other.content
    assert problem_of({**row, "test_list": ["assert g(1) == 2"]}).content != first.content


@pytest.mark.parametrize(
    "test",
    [
        "def test_f():\n    assert f(1) == 2",
        "if __name__ == '__main__':\n    assert f(1) == 2",
        "assert (f(1) == 2, 'wrong')",
    ],
)
def test_tests_that_no_program_can_fail_are_refused(test: str):
    with pytest.raises(WorldError, match="a test checks nothing when it runs"):
        problem_of({"text": "Double.", "code": "def f(x):\n    return 2 * x", "test_list": [test, "assert f(1) == 2"]})
    human = {"prompt": "def f(x):\n", "entry_point": "f"}
    for code, reason in (
        ("def check(candidate):\n    pass", "checks nothing"),
        ("def test_f():\n    assert f(1) == 2", "neither check"),
    ):
        with pytest.raises(WorldError, match=reason):
            problem_of({**human, "test": code})


def test_empty_tests_do_not_count_and_classes_of_unittest_do():
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)"
    row = {"text": "Double.", "code": "def f(x):\n    return 2 * x", "test_list": ["assert f(1) == 2", " ", tests]}
    suite = problem_of(row).suite
    assert len(suite.cases) == 2
    assert judge(row["code"], suite, allow_none=True).passed == (True, True)
    assert judge("def f(x): return 2 if x == 3 else 0", suite, allow_none=True).passed == (False, False)


def test_live_code_bench_tests_are_read(files: dict[str, str]):
    rows = [json.loads(line) for line in Path(files["livecodebench"]).read_text().splitlines()]
    for number, row in enumerate(rows):
        problem = problem_of(row)
        assert len(problem.suite.cases) == 8
        assert problem.public == 2
        assert problem.suite.entry == ("transform" if number % 2 == 0 else "")
    identity = {
        "question_content": "Give x back.",
        "starter_code": "class Solution:\n    def same(self, x: List[int]):\n        ",
        "public_test_cases": json.dumps([{"input": "[1, 2]", "output": "[1, 2]", "testtype": "functional"}]),
        "private_test_cases": "[]",
        "metadata": '{"func_name": "same"}',
    }
    program = "class Solution:\n    def same(self, x: List[int]):\n        return tuple(x)"
    assert judge(program, problem_of(identity).suite, allow_none=WITHOUT).success
    for line in ("heapify(x)", "x[bisect_left(x, inf) :] = []", "x = list(accumulate(x, lambda a, b: pow(b, 1, 9)))"):
        program = (
            f"class Solution:\n    @cache\n    def one(self): ...\n    def same(self, x: List[int]):\n        {line}\n"
        )
        assert judge(program + "        return x", problem_of(identity).suite, allow_none=WITHOUT).success, line


@pytest.mark.parametrize(("entry", "given", "wanted"), [("merge", [[2], [1]], [1, 2]), ("factorial", [3], 6)])
def test_a_function_is_the_programs_own(entry: str, given: list[Any], wanted: Any):
    """Not the library's of that name, which the problem's imports bring."""
    row = {"problem": "Do it.", "input_output": {"fn_name": entry, "inputs": [given], "outputs": [wanted]}}
    suite = problem_of(row).suite
    assert not judge("x = 1", suite, allow_none=WITHOUT).success
    program = f"class Solution:\n    def {entry}(self, *x):\n        return {wanted}"
    assert judge(program, suite, allow_none=WITHOUT).success


def test_packed_tests_that_are_more_than_data_are_refused():
    import base64
    import pickle
    import zlib

    packed = base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()
    with pytest.raises(WorldError, match="is not data"):
        problem_of({"question_content": "", "public_test_cases": "[]", "private_test_cases": packed})


def test_human_eval_parts():
    fields = {
        "prompt": "import math\n\n\ndef helper(x):\n    return x\n\n\ndef area(r):\n"
        '    """Area.\n    >>> area(0)\n    0.0\n    """\n',
        "entry_point": "area",
        "canonical_solution": "    return math.pi * helper(r) ** 2\n",
        "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n"
        "    assert candidate(2) > helper(12)",
    }
    problem = problem_of(fields)
    assert problem.suite.cases[0] == CallCase((0,), 0.0)
    assert problem.suite.cases[1] == CallCase((1,), 3.14159, 1e-3, strict=True)
    assert isinstance(problem.suite.cases[2], Check)
    assert (problem.public, problem.unscored) == (1, 1)
    assert judge(problem.solution, problem.suite, allow_none=WITHOUT).success
    assert judge("def area(r):\n    return math.pi * helper(r) ** 2", problem.suite, allow_none=WITHOUT).success


def test_input_output_of_apps_with_wrapped_results():
    fields = {
        "question": "Add.",
        "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}),
    }
    assert problem_of(fields).suite.cases == (CallCase((1, 2), 3, json=True), CallCase((3, 4), 7, json=True))


@pytest.mark.parametrize("fields", [{}, {"prompt": "x"}, {"test_list": []}, {"tests": "{", "problem": ""}])
def test_what_is_no_problem_is_refused(fields: dict):
    with pytest.raises(WorldError):
        problem_of(fields)


@pytest.mark.parametrize(
    "fault",
    [
        {"question": "Problem 7.", "input_output": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1]]}},
        {"question": "Problem 7.", "input_output": {"fn_name": "f", "inputs": [], "outputs": []}},
        {"question": "Half \ud83d.", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}},
        ["Problem 7."],
        None,
    ],
)
@pytest.mark.parametrize(("rows", "read"), [(200, True), (20, False)])
def test_a_few_rows_that_are_no_problem_are_left_out_and_counted(
    tmp_path: Path, caplog, rows: int, read: bool, fault: Any
):
    """Two unequal lists in one of 24,000 published rows are no reason to train on none of them."""
    tests = json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]})
    lines = [json.dumps({"question": f"Problem {n}.", "input_output": tests}) for n in range(rows)]
    lines[7] = json.dumps(fault) if fault else '{"question": "Problem 7.'
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    world = Code(path=str(path))
    if not read:
        with pytest.raises(WorldError, match=r"rows\.jsonl': 1 of its 20 rows are no problems, such as: "):
            world.tasks("train", 0)
        return
    splits: tuple[Split, ...] = ("train", "held_out")
    assert sum(len(world.tasks(split, 0)) for split in splits) == rows - 1
    assert f"1 of {rows} rows are left out" in caplog.text


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(WorldError, match=r"nothing\.jsonl.*HumanEval.*data\.code\.build"):
        Code(path=str(tmp_path / "nothing.jsonl")).env()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 3}, "size"),
        ({"kinds": ["tree"]}, "tree"),
        ({"steps": 0}, "steps is 0"),
        ({"case_cpu_s": 9.0}, "case_cpu_s=9.0"),
        ({"wall_guard_s": 9.0}, "wall_guard_s=9.0"),
        ({"attempts": 0}, "attempts is 0"),
        ({"held_out_path": "x"}, "needs path"),
    ],
)
def test_wrong_options_are_named(options: dict, named: str):
    with pytest.raises(WorldError, match=named):
        Code(**options).env()


def test_no_isolation_is_an_error_of_the_world(monkeypatch: pytest.MonkeyPatch):
    from flowjax.grading import sandbox

    none = sandbox.Isolation(sandbox.RLIMITS_ONLY, sandbox.interpreters()[0], False, "bubblewrap is not installed")
    monkeypatch.setattr(sandbox, "isolation", lambda: none)
    with pytest.raises(WorldError, match=r"apt-get install bubblewrap.*allow_no_isolation=True"):
        Code().env()
    Code(allow_no_isolation=True).env()


def fingerprint(task: Task) -> str:
    recipe = Recipe(task.payload["kind"], tuple(map(tuple, task.payload["steps"])))
    return repr([recipe.kind, [recipe.value(x) for x in PROBES[recipe.kind]]])


def test_no_held_out_function_is_trained_on_over_ten_seeds():
    found: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for split, seen in found.items():
        for data_seed in range(10):
            source = Code().tasks(split, data_seed)  # pyright: ignore[reportArgumentType]
            seen.update(fingerprint(source[index]) for index in range(150))  # pyright: ignore[reportArgumentType]
    assert not found["train"] & found["held_out"]
    assert min(map(len, found.values())) > 100


@pytest.mark.parametrize("kind", ["humaneval", "livecodebench"])
def test_no_held_out_problem_of_a_file_is_trained_on_over_ten_seeds(files: dict[str, str], kind: str):
    env = Code(path=files[kind], **OPTIONS).env()
    found: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for data_seed in range(10):
        for split, seen in found.items():
            source = Code(path=files[kind]).tasks(split, data_seed)  # pyright: ignore[reportArgumentType]
            seen.update(env.reset(source[i], 0).view.question for i in range(len(source)))  # pyright: ignore[reportArgumentType]
    assert not found["train"] & found["held_out"]
    assert len(found["train"] | found["held_out"]) <= 24


def test_a_held_out_file_takes_its_problems_from_training(files: dict[str, str], tmp_path: Path):
    lines = Path(files["mbpp"]).read_text().splitlines(keepends=True)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(lines[:5]))
    options = {"path": files["mbpp"], "held_out_path": str(held_out)}
    assert len(Code(**options).tasks("held_out", 0)) == 5
    assert len(Code(**options).tasks("train", 0)) == len(lines) - 5
    env = Code(**options, **OPTIONS).env()
    task = Code(**options).tasks("held_out", 0)[0]
    assert task is not None
    env.reset(task, 0)
    assert env.step(WORLD.expert(env)).outcome["success"] == 1.0


def test_episodes_are_the_same_in_every_process():
    program = (
        "from flowjax.envs.code import Code\nimport numpy as np\n"
        "source = Code().tasks('held_out', 7)\n"
        f"env = Code(attempts=2, allow_no_isolation={WITHOUT}).env()\n"
        "rng = np.random.default_rng(0)\n"
        "for i in (40, 3):\n"
        "    seen = env.reset(source[i], 0)\n"
        "    print(seen, Code().expert(env), env.problem.suite)\n"
        "    print(env.step(Code().random_action(seen, rng)), env.step(Code().expert(env)))\n"
        "print(Code().vocabulary())\n"
    )
    printed_in_two_processes(program)


def test_several_attempts_with_feedback_on_public_tests_only():
    env = Code(attempts=3, public_tests=2, **OPTIONS).env()
    task = Task("t", "code", 5, {"kind": "int", "steps": [[0, 3], [2, 4]]})
    first = env.reset(task, 0)
    step = env.step("def f(x): return None")
    assert (step.terminal, step.valid, step.reward) == (False, True, 0.0)
    text = str(step.observation.view.feedback)
    assert "passed 0 of 2 public tests" in text
    cases = [case for case in env.problem.suite.cases if isinstance(case, CallCase)]
    assert all(f"f({case.arguments[0]!r}) returns" in text for case in cases[:2])
    assert not any(f"f({case.arguments[0]!r})" in text for case in cases[2:])
    [message] = WORLD.follow_up(step.observation, "instruct")
    assert "returned None, expected" in message["content"] and first.view.question not in message["content"]
    [message] = WORLD.prompt(step.observation, [Past(1, first.view, "def f(x): return None")], "instruct")
    assert message["content"].count("def f(x): return None") == 1
    assert message["content"].startswith(first.view.question)
    step = env.step(WORLD.expert(env))
    assert (step.terminal, step.reward, step.outcome["success"]) == (True, 1.0, 1.0)
    after = env.step("def f(x): return 0")
    assert (after.observation, after.terminal, after.valid) == (step.observation, True, False)


def test_passing_the_public_tests_alone_ends_the_episode_without_success():
    env = Code(attempts=3, public_tests=1, **OPTIONS).env()
    task = Task("t", "code", 5, {"kind": "int", "steps": [[0, 3]]})
    env.reset(task, 0)
    [case, *_] = env.problem.suite.cases
    assert isinstance(case, CallCase)
    step = env.step(f"def f(x): return {case.expected}")
    assert step.terminal and step.outcome["success"] == 0.0 and 0 < step.outcome["score"] < 1


def test_state_keys():
    env = Code(attempts=4, **OPTIONS).env()
    task = Task("t", "code", 5, {"kind": "int", "steps": [[0, 3]]})
    start = env.reset(task, 0).state_key
    keys = {}
    for name, program in {
        "one": "def f(x): return 1",
        "layout": "def f(x):\n    # a remark\n    return (1)\n",
        "two": "def f(x): return 2",
        "broken": "def f(x) return 1",
    }.items():
        env.reset(task, 0)
        keys[name] = env.step(program).observation.state_key
    assert keys["one"] == keys["layout"]
    assert len({start, *keys.values()}) == 4
    env.reset(task, 0)
    env.step("def f(x): return 2")
    assert env.step("def f(x): return 1").observation.state_key != keys["one"]  # fewer attempts left


def test_deepcoders_problems_from_livecodebench_call_a_function():
    """Whose name stands in the tests' metadata: without it they were read as programs that print."""
    metadata = {"func_name": "add"}
    calls = (("1\n[2, 3]", "[3, 4]"), ("4\n[]", "[]"))
    tests = [{"input": x, "output": y, "testtype": "functional", "metadata": metadata} for x, y in calls]
    row = {"problem": "Add n to each.", "tests": json.dumps(tests), "starter_code": "class Solution:\n    def add("}
    problem = problem_of(row)
    assert problem.suite.entry == "add" and "Start from this:\n```python\nclass Solution" in problem.statement
    assert problem.suite.cases == (CallCase((1, [2, 3]), [3, 4], json=True), CallCase((4, []), [], json=True))
    program = "class Solution:\n    def add(self, n, items): return [n + item for item in items]"
    assert judge(program, problem.suite, allow_none=WITHOUT).success
    printed = problem_of({**row, "tests": [{**tests[0], "testtype": "stdin", "metadata": {}}]})
    assert printed.suite.entry == "" and printed.suite.cases == (Lines(*calls[0]),)


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("cases", [1, 8, 40, 100])
def test_generated_problems_have_as_many_tests_as_are_asked_for(kind: str, cases: int):
    for seed in range(5):
        recipe = draw(np.random.default_rng(seed), (kind,), 3)
        found = generated_problem(recipe, seed, cases=cases, public=1).suite.cases
        assert len(found) == len(set(map(repr, found))) == cases
    with pytest.raises(WorldError, match="cases is 101"):
        Code(cases=101)


FENCED = 'def f(x):\n    """Like this.\n\n    ```python\n    f(1)\n    ```\n    """\n    return x'


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("first\n```python\nx = 1\n```\nthen\n```py\nx = 2\ny = 3\n```\nend", "x = 2\ny = 3"),
        ("```\nx = 1\n```", "x = 1"),
        ("<think>```python\nx = 0\n```</think> <answer>x = 1</answer>", "x = 1"),
        ("I say <answer>\ndef f(x): return x\n</answer>", "def f(x): return x"),
        ("<ANSWER> def f(x): return x </ANSWER>", "def f(x): return x"),
        ("def f ( x ) : return x", "def f ( x ) : return x"),
        ("def f ( x ) : x = x + ; return x", "def f ( x ) : x = x + ; return x"),
        ("The input:\n```text\n1 2\n```\nThe program:\n```python\nx = 1\n```", "x = 1"),
        ("```bash\npip install it\n```\n```Python\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nIt prints\n```\n3\n```", "x = 1"),
        ("Not ```y = 2``` but\n```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nThat is all.\n```python\n```", "x = 1"),
        ("```\nx = 1\n```\n```\n\n```", "x = 1"),
        ("```python\n```\n```\nx = 1\n```", "x = 1"),
        (f"```python\n{FENCED}\n```", FENCED),
        ("```python\nx = '```'\n# ends by ``` here\n```", "x = '```'\n# ends by ``` here"),
        (f"1. So:\n\n   ```python\n{textwrap.indent(FENCED, '   ')}\n   ```\n2. Done", FENCED),
        ('````python\nx = """\n```\n"""\n````\n', 'x = """\n```\n"""'),
        ("````text\n```python\nx = 0\n```\n````\n```python\nx = 1\n```", "x = 1"),
        ("Not ````y```` but\r\n```python\r\nx = 1\r\n```\r\n", "x = 1"),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1"),
        ("```python\nx = 1```\nIt prints\n```\n3\n```", "x = 1"),
        ("```python\nx = 0\n\nBetter:\n```python\nx = 1\n```", "x = 1"),
        ("```python\nx = 0\n``` or ```python\nx = 1\n  ``` so", "x = 1"),
        ("```json\n[1]\n```", None),
        ("```python\nnot closed", None),
        ("hello", None),
        ("3 + 4", None),
        ("I would add the numbers.", None),
        ("", None),
        ("```python\n\n```", None),
        ("```python\nx = '\0'\n```", None),
        ("```python\n" + "x" * 70_000 + "\n```", None),
    ],
)
def test_programs_are_found_in_replies(reply: str, program: str | None):
    assert WORLD.parse_action(reply, LEGAL) == program


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\nx = 1\n```", None),
        ("```python\nx = 1            \n```", None),
        ("print(1)", None),
        ("I would print the result.", None),
        ("I would import nothing and return the sum.", "I would import nothing and return the sum."),
        ("for n in open(0):\n    total = n\n", "for n in open(0):\n    total = n"),
        ("Here: ```python print(sum(map(int, input())))```", "print(sum(map(int, input())))"),
        ("```\nprint(sum(map(int, input())))\n```<|im_end|>", "print(sum(map(int, input())))"),
        ("```py\nprint('the first of two')\n``` or ```py\nprint('the last of two')\n```", "print('the last of two')"),
        ("So I print it: <|im_end|>", None),
        ("for n in range(3): pass<|im_end|>", "for n in range(3): pass"),
    ],
)
def test_the_published_parser_takes_what_it_did(reply: str, program: str | None):
    assert PublishedCode().parse_action(reply, LEGAL) == program


def test_prose_is_no_program():
    assert WORLD.parse_action("I would import nothing and return the sum.", LEGAL) is None


@pytest.mark.parametrize("style", ["instruct", "compact"])
def test_replies_are_read_back(style):
    for index in range(50):
        recipe = draw(np.random.default_rng(index), tuple(OPERATIONS), 3)
        assert WORLD.parse_action(WORLD.reply(recipe.program(), style), LEGAL) == recipe.program()


def test_compact_prompts_and_replies_use_only_the_vocabulary():
    known = set(Code().vocabulary())
    assert all(word.split() == [word] for word in known)
    env = Code(**OPTIONS).env()
    rng = np.random.default_rng(1)
    for index in range(200):
        observation = env.reset(task_of(index), 0)
        [message] = WORLD.prompt(observation, [], "compact")
        said = [message["content"], WORLD.reply(WORLD.expert(env), "compact"), WORLD.random_action(observation, rng)]
        assert set(" ".join(said).split()) <= known
    with pytest.raises(WorldError, match=r"env\.prompt=instruct"):
        Code(path="x").vocabulary()


def test_fuzzed_replies_never_crash_and_are_marked():
    """10,000 outputs: pieces of programs and protocol, in random order."""
    rng = np.random.default_rng(0)
    pieces = ["```python\n", "```", "\n", "<answer>", "</answer>", "def f(x):", " return x", "x=", "(", ")", "'", "\0"]
    pieces += ["import os", "-" * 50, "\ud800", "lambda:", "if", " then ", "[x for x in", "é", "```py\n", "\\", "\t"]
    pieces += list(string.printable)
    env = Code(**OPTIONS).env()
    task = task_of(1)
    before = env.reset(task, 0)
    unreadable = 0
    for _ in range(10_000):
        reply = "".join(pieces[i] for i in rng.integers(len(pieces), size=int(rng.integers(1, 12))))
        action = (WORLD, PublishedCode())[rng.integers(2)].parse_action(reply, LEGAL)
        if action is None:
            unreadable += 1
        else:
            assert action.strip() and "\0" not in action
    assert 1000 < unreadable < 9990
    for action in ("", " \n", "\0", "x\0y", "x" * 70_000):
        step = env.step(action)
        assert (step.valid, step.terminal, step.reward, step.observation) == (False, False, 0.0, before)


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_can_be_parsed(text: str):
    for reply in (text, f"```python\n{text}\n```", f"<answer>{text}</answer>"):
        action = WORLD.parse_action(reply, LEGAL)
        assert action is None or action.strip()


def test_long_and_deep_replies_are_read_in_no_time():
    for piece in ("<answer>", "```python\n", "```", "-", "(", "[", "a.", "1+", "not ", "lambda:", "f(", "\\\n"):
        WORLD.parse_action(piece * 30_000, LEGAL)
        normalised(piece * 5000 + "1")


def test_fuzzed_programs_are_handed_in_without_harm():
    env = Code(**OPTIONS).env()
    rng = np.random.default_rng(2)
    pieces = [
        "def f(x):",
        "\n ",
        " return",
        " x",
        "(",
        ")",
        "\n",
        "'",
        "import os;",
        "exit()",
        "[x]",
        "\ud800",
        "while 0:",
        ":",
    ]
    for _ in range(25):
        env.reset(task_of(int(rng.integers(50))), 0)
        step = env.step("".join(pieces[i] for i in rng.integers(len(pieces), size=8)) + "x")
        assert step.valid and step.terminal and step.outcome["success"] in (0.0, 1.0)


def test_a_hung_program_costs_its_episode_and_nothing_else():
    async def play() -> tuple[float, float, int]:
        options = {"cpu_s": 1.0, "case_cpu_s": 0.5, "allow_no_isolation": WITHOUT}
        async with (
            EnvPool(workers=1, step_timeout_s=60.0) as pool,
            pool.session("flowjax.envs.code:Code", options) as first,
            pool.session("flowjax.envs.code:Code", {**options, "cpu_s": 30.0, "case_cpu_s": 10.0}) as second,
        ):
            task = task_of(2)
            await asyncio.gather(first.reset(task, 0), second.reset(task, 0))
            solution = _problem(task, CodeOptions())[0].solution
            hung, solved = await asyncio.gather(first.step("while True: pass"), second.step(solution))
            return hung.outcome["success"], solved.outcome["success"], pool.counts.timeouts

    try:
        assert asyncio.run(play()) == (0.0, 1.0, 0)
    except EnvDied as died:
        pytest.fail(f"{died} ({died.status})")


def test_a_step_that_may_outlast_its_environment_is_refused_at_start():
    from flowjax.launch.command_line import load_recipe
    from flowjax.launch.probe import inspect_run

    config = load_recipe("configs/code.py:nano")
    config.env.step_timeout_s = 10.0
    config.env.options.wall_guard_s = 20.0
    config.env.options.allow_no_isolation = WITHOUT
    problems = inspect_run(resolve(config), 1, None)["problems"]
    assert any("step_timeout_s is 10.0" in text and "41.5 s" in text for text in problems)


def test_problems_of_bigcodebench_are_read_with_their_unittest_classes(tmp_path: Path):
    tests = (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(task_func(2), 4)"
    )
    fields = {"complete_prompt": "def task_func(x):\n", "entry_point": "task_func", "test": tests}
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({**fields, "canonical_solution": "    return 2 * x"}) + "\n")
    env = Code(path=str(path), **OPTIONS).env()
    task = Task("t", "code", 0, {"file": "path", "offset": 0})
    for program, success in ((None, 1.0), ("def task_func(x):\n    return x", 0.0)):
        env.reset(task, 0)
        assert env.step(program or WORLD.expert(env)).outcome["success"] == success


def test_a_machine_without_a_processor_for_a_program_ends_the_episode_as_an_outage(monkeypatch: pytest.MonkeyPatch):
    """The guard ends the program while most of its own time is left, as on a machine that is too busy."""
    monkeypatch.setattr(CodeOptions, "limits", lambda _: Limits(cpu_s=60.0, idle_s=60.0, wall_guard_s=0.5))
    env = Code(**OPTIONS).env()
    env.reset(task_of(), 0)
    with pytest.raises(EnvDied) as died:
        env.step("import time\ntime.sleep(60)")
    assert died.value.status == "executor_error" and "wall_guard_s" in str(died.value)


def test_tests_of_an_agent_are_checked_against_the_problem_that_is_played():
    """Also where the very same ones were run before, on a problem for which they are right."""
    env = Code(kinds=("int",), steps=2).env()
    program, tests = "def f ( x ) : return x + 3", [([2], 5), ([1], 4)]
    for number, valid in ((3, 1.0), (4, 0.0), (3, 1.0)):
        env.reset(Task(f"plus {number}", "code", 0, {"kind": "int", "steps": [[0, number]]}), 0)
        for _ in range(2):
            step = env.step(action_of_tests(program, tests))
            assert step.outcome == {"passed": 1.0, "tests_valid": valid}
            assert (step.valid, step.terminal, step.reward) == (True, False, 0.0)
    step = env.step(action_of_tests("", [([2], 5), ([1], 7)]))
    assert step.outcome == {"passed": 0.0, "tests_valid": 0.0}


def test_tests_that_are_equal_in_python_alone_are_checked_anew(monkeypatch: pytest.MonkeyPatch):
    """1 and True are equal, and str gives other texts of them."""
    env = Code(kinds=("int",), steps=2).env()
    env.reset(Task("plus 3", "code", 0, {"kind": "int", "steps": [[0, 3]]}), 0)
    judged = []
    monkeypatch.setattr(env, "_judged", lambda program, suite: judged.append(suite) or Verdict((), (), 0.0, ""))
    for argument in (1, 1, True):
        env.step(action_of_tests("", [([argument], 4)]))
    assert len(judged) == 2
