"""Published rows as problems: kinds, golds, contexts, hidden and public tests. Its loader's defects are cases here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flowjax.envs import WorldError
from flowjax.envs.canvas import Canvas
from flowjax.envs.canvas.problem_files import KINDS, PublishedData, Record, load, records
from flowjax.grading.sandbox import Limits
from flowjax.grading.scoring import UNANSWERABLE, Scorer

DOUBLE = "def double(x):\n    return 2 * x"
WRONG = "def double(x):\n    return x * x"  # right for 2
HUMAN_EVAL = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 10\n"


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(limits=Limits(cpu_s=30.0, idle_s=30.0), case_cpu_s=20.0) as scorer:
        yield scorer


def written(folder: Path, *rows: dict[str, Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(folder: Path, *rows: dict[str, Any], **options: Any) -> PublishedData:
    return load(written(folder, *rows), **options)


def record(folder: Path, **row: Any) -> Record:
    found = read(folder, row)
    assert not found.left_out
    return found.records[0]


def row_of(source: str) -> dict[str, Any]:
    """A row of each published data set."""
    row: dict[str, Any] = {"problem": f"A problem of {source}.", "source": source, "ground_truth": "12"}
    if KINDS[source.replace("_", "")] == "code":
        row["meta"] = {"test": HUMAN_EVAL, "entry_point": "double", "task_id": f"{source}/1"}
    if source == "mathqa":
        row["meta"] = {"options": "a ) 10 , b ) 12 , c ) 14"}
    return row


def test_all_twelve_data_sets(tmp_path: Path):
    sources = [
        "gsm8k",
        "math",
        "hotpotqa",
        "squad_v2",
        "mbpp",
        "humaneval",
        "triviaqa",
        "nq",
        "mathqa",
        "aime2025",
        "apps",
        "ds1000",
    ]
    found = read(tmp_path, *map(row_of, sources))
    assert [record.source for record in found.records] == sources and not found.left_out
    kinds = {record.source: record.problem.kind for record in found.records}
    assert [source for source in sources if kinds[source] == "math"] == ["gsm8k", "math", "aime2025"]
    assert [source for source in sources if kinds[source] == "code"] == ["mbpp", "humaneval", "apps", "ds1000"]
    assert kinds["mathqa"] == "choice"


def test_fields_have_two_names(tmp_path: Path):
    assert record(tmp_path, question="2+3?", answer=5, dataset="gsm8k").gold == ("5",)
    first = load(written(tmp_path, {"question": "2+3?", "answer": "2+3=5\n#### 5"}, name="gsm8k.jsonl")).records[0]
    assert first.gold == ("5",) and first.problem.kind == "math"
    boxed = record(tmp_path, problem="Half of 1?", solution="So \\boxed{\\frac12}.", source="math")
    assert boxed.gold == ("\\frac12",)
    assert read(tmp_path, {"problem": "?", "ground_truth": "x"}, source="nq").records[0].problem.kind == "qa"
    assert record(tmp_path, problem="?", ground_truth="x", source="own", problem_type="qa").problem.kind == "qa"
    assert record(tmp_path, problem="?", ground_truth="x", source="own").problem.kind == "general"


def test_several_golds(tmp_path: Path):
    assert record(tmp_path, problem="Who?", ground_truth="A. Lee|Ann Lee", source="nq").gold == ("A. Lee", "Ann Lee")
    assert record(tmp_path, problem="Who?", answer=["A", "B"], source="nq").gold == ("A", "B")
    trivia = {"value": "Lee", "aliases": ["Ann Lee", "Lee"]}
    assert record(tmp_path, problem="Who?", answer=trivia, source="triviaqa").gold == ("Lee", "Ann Lee")
    assert record(tmp_path, problem="|x|=1", ground_truth="|x|", source="math").gold == ("|x|",)


def test_a_gold_that_holds_a_word_of_the_unanswerable_is_kept(tmp_path: Path):
    """Published: a gold in which "unknown" or "no answer" occurs is taken for unanswerable, and its row is dropped."""
    for gold in ("The Unknown Soldier", "Unknown Pleasures", "No Answer (album)"):
        assert record(tmp_path, problem="Which?", ground_truth=gold, source="hotpotqa").gold == (gold,)


@pytest.mark.parametrize("gold", ["", None, [], "unanswerable", "No answer.", {"text": []}])
def test_unanswerable_questions_are_kept_and_marked(tmp_path: Path, gold: Any):
    """Published: they are dropped without a word, though the prompts speak of them."""
    row = {"problem": "Context: ... Who?", "ground_truth": gold, "source": "squad_v2"}
    kept = read(tmp_path, row, {**row, "ground_truth": "Ann"})
    assert [record.gold for record in kept.records] == [(UNANSWERABLE,), ("Ann",)]
    assert all(UNANSWERABLE in record.problem.text for record in kept.records)  # which says nothing of either
    dropped = read(tmp_path, row, {**row, "ground_truth": "Ann"}, keep_unanswerable=False)
    assert len(dropped.records) == 1 and dropped.left_out == {"squad_v2: no answer by its gold": 1}


def test_rows_that_nobody_could_grade_are_counted(tmp_path: Path):
    found = read(
        tmp_path,
        {"problem": "2+3?", "source": "gsm8k"},
        {"problem": "Double.", "source": "apps", "ground_truth": "def double..."},
        {"problem": "Double.", "source": "apps", "meta": {"test": "this is no test"}},
        {"problem": "2+4?", "source": "gsm8k", "ground_truth": "6"},
        {"problem": "Is it?", "source": "nq", "ground_truth": True},  # no question without an answer
    )
    assert [record.row for record in found.records] == [4]
    assert found.left_out == {"gsm8k: no answer": 1, "apps: no tests that can be run": 2, "nq: no answer": 1}


def test_passages_reach_the_problem(tmp_path: Path):
    """Published: they are never passed on."""
    row = {"problem": "Who?", "ground_truth": "Ann", "source": "squad_v2"}
    assert record(tmp_path, **row, meta={"context": "Ann did."}).problem.context == "Ann did."
    assert record(tmp_path, **{**row, "problem": "Ann did. Who?"}, meta={"context": "Ann did."}).problem.context == ""
    hotpot = {"title": ["Ann", "Bob"], "sentences": [["One.", " Two."], ["Three."]]}
    assert record(tmp_path, **row, meta={"context": hotpot}).problem.context == "[Ann]\nOne. Two.\n\n[Bob]\nThree."


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    pass\n",
        "import unittest\n\nclass Empty(unittest.TestCase):\n    def test_it(self):\n        double(2)\n",
        "double(2)",
        "def helper():\n    assert double(2) == 4",
        "def test_execution(solution: str):\n    code = context.replace('[insert]', solution)\n    exec(code)\n",
    ],
)
def test_tests_that_check_nothing_are_none(tmp_path: Path, test: str):
    """Any program would pass them. The last has the form of DS-1000."""
    found = read(tmp_path, {"problem": "Double.", "source": "ds1000", "meta": {"test": test, "entry_point": "double"}})
    assert not found.records and found.left_out == {"ds1000: no tests that can be run": 1}


@pytest.mark.parametrize(
    "text", ["f(a) = a + 1. What is f(2)?", "Choose two balls.", "Find the angle (A).", "We use plan a. Next, 1+1?"]
)
def test_no_choice_is_made_of_a_letter(tmp_path: Path, text: str):
    """Published: the detector takes these for multiple choice."""
    assert record(tmp_path, problem=text, ground_truth="3", source="math").problem.kind == "math"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ground_truth": "E", "source": "mathqa", "options": "a ) 10 , b ) 12"}, "none of its options"),
        ({"ground_truth": "7", "source": "own", "choices": ["10", "12"]}, "none of its options"),
        ({"answer": 1, "source": "own", "choices": ["10", "12"]}, "none of its options"),
        ({"ground_truth": "C", "source": "mathqa", "problem": "6*2?\nA. 10\nB. 12"}, "none of its options"),
        ({"ground_truth": "b", "source": "mathqa"}, "it has no options"),
        ({"ground_truth": "B", "source": "own", "problem_type": "choice"}, "it has no options"),
    ],
)
def test_a_choice_that_nobody_can_get_right_is_left_out(tmp_path: Path, row: dict[str, Any], reason: str):
    found = read(tmp_path, {"problem": "6*2?", **row})
    assert not found.records and [each for each in found.left_out if each.endswith(reason)]


def test_choices_have_their_options(tmp_path: Path, scorer: Scorer):
    listed = record(tmp_path, problem="6*2?", ground_truth="b", source="mathqa", options="a ) 10 , b ) 12 , c ) 1 , 4")
    assert listed.problem.options == {"A": "10", "B": "12", "C": "1 , 4"}
    assert scorer.score("The answer is (B).", listed.gold, listed.problem.kind, options=listed.problem.options).correct
    in_text = record(tmp_path, problem="6*2?\nA. 10\nB. 12", ground_truth="12", source="math")
    assert in_text.problem.kind == "choice" and in_text.problem.options == {"A": "10", "B": "12"}
    named = record(tmp_path, problem="6*2?", ground_truth="B", source="own", meta={"choices": ["10", "12"]})
    assert named.problem.options == {"A": "10", "B": "12"}
    assert record(tmp_path, problem="6*2?", ground_truth="12", source="mathqa").problem.kind == "math"
    no_text = record(tmp_path, problem="6*2?", ground_truth="12", source="own", problem_type="choice")
    assert no_text.problem.kind == "math"
    unlike = record(tmp_path, problem="Ways?\nA. one\nB. two", ground_truth="7", source="math")
    assert unlike.problem.kind == "math"


@pytest.mark.parametrize(
    "meta",
    [
        {"test": HUMAN_EVAL, "entry_point": "double", "prompt": "def double(x):\n    '''Twice x.'''\n"},
        {"test": HUMAN_EVAL + "\ncheck(double)"},
        {"test": "assert double(2) == 4\nassert double(5) == 10"},
        {"test": "import math\nassert double(2) == 4, 'two'\nassert double(5) == math.floor(10.5)"},
        {"test_list": ["assert double(2) == 4", "assert double(5) == 10"]},
        {"test": "result = double(5)\nassert result == 10"},
        {"test": "for x in [2, 5]:\n    assert double(x) == x + x"},
        {"test": "def twice(x):\n    return x + x\n\nassert double(5) == twice(5)"},
        {"test": "def test_it():\n    assert double(5) == 10"},
        {"input_output": {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}},
        {
            "test": "import unittest\n\nclass TestDouble(unittest.TestCase):\n    def test_it(self):\n"
            "        self.assertEqual(double(5), 10)\n",
        },
    ],
)
def test_hidden_tests_grade_and_are_not_shown(tmp_path: Path, scorer: Scorer, meta: dict[str, Any]):
    """Published: the tests that the reward runs are given to the operator Test, and stand in its context."""
    found = record(tmp_path, problem="Double a number.", source="mbpp", meta=meta)
    assert found.problem.entry_point == "double" and found.problem.public_tests == ()
    assert "assert" not in repr(found.problem) and "10" not in repr(found.problem)
    assert found.tests is not None
    assert scorer.score(DOUBLE, found.tests, "code").correct
    assert not scorer.score(WRONG, found.tests, "code").correct


def test_programs_that_read_input(tmp_path: Path, scorer: Scorer):
    tests = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]})
    found = record(tmp_path, problem="Double.", source="apps", meta={"input_output": tests})
    assert found.problem.entry_point == "" and found.tests is not None
    assert scorer.score("print(2 * int(input()))", found.tests, "code").correct
    assert not scorer.score("print(4)", found.tests, "code").correct


def test_public_tests_are_those_of_the_row_or_of_a_file_of_their_own(tmp_path: Path):
    row = {"problem": "Double.", "source": "humaneval", "meta": {"test": HUMAN_EVAL, "entry_point": "double"}}
    row["meta"]["task_id"] = "HumanEval/7"
    shown = written(
        tmp_path,
        {"task_id": "HumanEval/6", "test": "assert other(1) == 2", "entry_point": "other"},
        {
            "task_id": "HumanEval/7",
            "test": "def check(candidate):\n    assert candidate(1) == 2",
            "entry_point": "double",
        },
        name="public.jsonl",
    )
    joined = read(tmp_path, row, {**row, "source": "mbpp"}, public_tests={"humaneval": shown}).records
    assert [record.problem.public_tests for record in joined] == [("assert double(1) == 2",), ()]
    row["meta"]["public_tests"] = ["assert double(0) == 0"]
    own = read(tmp_path, row, public_tests={"humaneval": shown}).records[0]
    assert own.problem.public_tests == ("assert double(0) == 0",)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["12", "assert f(1) == 2"]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["text", "title", "sentences", "inputs"]), x),
    max_leaves=6,
)
fields = ["problem", "ground_truth", "answer", "options", "context", "test", "test_list", "entry_point", "task_id"]
fields += ["public_tests", "input_output", "meta", "problem_type", "solution"]


@example(row={"ground_truth": 0, "context": {"title": ["A", "B"], "sentences": [True, "Said."]}}, source="gsm8k")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.dictionaries(st.sampled_from(fields), junk), source=st.sampled_from([*KINDS, "own"]))
def test_no_row_is_lost_or_crashes(tmp_path: Path, row: dict[str, Any], source: str):
    try:
        found = read(tmp_path, {"problem": "f?", **row, "source": source})
    except WorldError:
        return
    assert len(found.records) + sum(found.left_out.values()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON lines"),
        ("[1]\n", "row 1 is no object"),
        ('{"answer": 5}\n', "row 1 has no problem"),
        ('{"problem": "1 \\uD800", "answer": 5}\n', "row 1 has .*, half a surrogate pair"),
    ],
)
def test_files_that_are_no_data(tmp_path: Path, text: str, said: str):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(WorldError, match=said):
        load(path)
    with pytest.raises(WorldError, match="cannot be read"):
        load(tmp_path / "none.jsonl")
    for options in (path, tmp_path / "none.jsonl"):
        with pytest.raises(WorldError, match=f"^env.options path: {options}"):
            Canvas(path=str(options)).tasks("train", 0)


@pytest.mark.parametrize("later", [["Second?", "First?"], ["First?"]])
def test_a_file_that_has_other_problems_than_the_tasks_is_no_fault_of_a_policy(tmp_path: Path, later: list[str]):
    def written(texts: list[str]) -> None:
        rows = [{"problem": text, "answer": text[0], "source": "nq"} for text in texts]
        (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        records.cache_clear()  # as in a process of a later start, or of another machine

    written(["First?", "Second?"])
    world = Canvas(path=str(tmp_path))
    tasks = [world.tasks("held_out", 0)[index] for index in range(2)]
    env = world.env()
    assert {env.reset(task, 0).view.problem for task in tasks if task} == {"First?", "Second?"}
    written(later)
    refused = [task for task in tasks if task and task.payload["row"] == 1]
    with pytest.raises(WorldError, match=r"env\.options path: .*/test\.jsonl has not the problem .* in its place 2"):
        env.reset(refused[0], 0)
