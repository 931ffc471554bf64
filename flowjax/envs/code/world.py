"""The code world: write a program that passes tests. State: the problem, the last program, attempts left.

One task is one problem; an action is a whole program. With `attempts` above 1 the agent sees its program's results on
the public tests and may hand in another one. All tests are judged in the sandbox (`flowjax.grading.code`); hidden tests
are never shown, and their expected results stay outside the program's sandbox, where it cannot read them.
"""

import ast
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from flowjax.envs import (
    EnvDied,
    History,
    Message,
    NotReady,
    Observation,
    Split,
    Step,
    Style,
    World,
    WorldError,
    check_split,
    user_says,
)
from flowjax.envs.code.problems import (
    HEAD,
    OPERATIONS,
    CodeProblem,
    Recipe,
    draw,
    generated_problem,
    open_problems,
    problem_of,
    program_words,
)
from flowjax.fields import Interval
from flowjax.grading.answers import last_answer, without_thoughts
from flowjax.grading.code import (
    CASE_CPU_S,
    JUDGE_LIMITS,
    CallCase,
    Lines,
    Suite,
    Verdict,
    fenced_blocks,
    judge,
    normal_form,
    parse_quietly,
)
from flowjax.grading.sandbox import STARTS, IsolationError, Limits, NoProcessorError, require_isolation
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

LEGAL = ("<program>",)
_TESTS = "\0tests\n"  # begins a step with tests; a program cannot hold \0, so no reply is read as one
TASKS = 1 << 31  # length of the generated task source; slice it
HELD_OUT_ONE_IN = 8  # problems of a file, by content
_MOST_UNREADABLE = 0.01  # of the rows of a file: published sets have a few
SLACK_S = 1.5  # of a step beyond the programs' own time: to start and end the sandbox, and to read results
MAX_PROGRAM_CHARACTERS = 1 << 16
INSTRUCTION = """Solve it in Python 3. Reason first if you like, then give one complete program in one ```python block;
only the last such block counts."""
_WRONG, _FAILED = "wrong", "failed"  # in compact prompts: the last program answered, or it did not


@dataclass(frozen=True, slots=True)
class CodeOptions:
    """`kinds`, `steps` and `cases` shape generated problems; `path` (and `held_out_path`) name files of real ones.

    `case_cpu_s` bounds one test and `cpu_s` all tests of one program, in seconds on a processor; `idle_s` is how long
    they may sleep. `wall_guard_s` is a limit by the clock: a program that reaches it lacked a processor, and gets no
    verdict. `public_tests` tests are shown. `allow_no_isolation` accepts machines with resource limits only.
    """

    path: str = ""
    held_out_path: str = ""
    kinds: Sequence[str] = ("int", "list", "text")
    steps: Annotated[int, Interval(at_least=1)] = 3
    cases: Annotated[int, Interval(at_least=1, at_most=100)] = 8  # there are 101 different integers to ask for
    public_tests: Annotated[int, Interval(at_least=0)] = 2
    attempts: Annotated[int, Interval(at_least=1)] = 1
    case_cpu_s: float = CASE_CPU_S
    cpu_s: float = JUDGE_LIMITS.cpu_s
    idle_s: float = JUDGE_LIMITS.idle_s
    wall_guard_s: float = JUDGE_LIMITS.wall_guard_s
    memory_mb: Annotated[int, Interval(at_least=64)] = 512
    packages: Sequence[str] = ()
    allow_no_isolation: bool = False

    def __post_init__(self):
        if missing := [folder for folder in self.packages if not Path(folder).is_dir()]:
            raise WorldError(f"env.options packages={missing[0]!r} is no folder: give those of installed packages")
        unknown = [kind for kind in self.kinds if kind not in OPERATIONS]
        if unknown or not self.kinds:
            raise WorldError(f"env.options kinds={list(self.kinds)}: give some of {', '.join(OPERATIONS)}")
        if not 0 < self.case_cpu_s <= self.cpu_s:
            raise WorldError(
                f"env.options case_cpu_s={self.case_cpu_s}, cpu_s={self.cpu_s}: one test cannot take longer than all "
                "of them; give 0 < case_cpu_s <= cpu_s"
            )
        if not self.idle_s > 0 or not self.cpu_s + self.idle_s <= self.wall_guard_s:
            raise WorldError(
                f"env.options cpu_s={self.cpu_s}, idle_s={self.idle_s}, wall_guard_s={self.wall_guard_s}: the wall "
                "clock only guards; give idle_s above 0 and wall_guard_s of cpu_s + idle_s or more (some times as much)"
            )
        if self.held_out_path and not self.path:
            raise WorldError(f"env.options held_out_path={self.held_out_path!r} needs path, the training problems")

    def limits(self) -> Limits:
        times = {name: getattr(self, name) for name in ("cpu_s", "idle_s", "wall_guard_s")}
        return replace(JUDGE_LIMITS, **times, memory_bytes=self.memory_mb << 20)


@dataclass(frozen=True, slots=True)
class PublicTests:
    """A program's results on the public tests alone; `failed` has (case, remark) pairs."""

    passed: int
    count: int
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def wrong(self) -> bool:
        """True if a call returned a wrong result; False if it failed by errors or limits only, or by wrong output."""
        return any(remark.startswith("returned ") for _, remark in self.failed)

    def __str__(self) -> str:
        if not self.count:
            return "handed in."
        failed = [f"- {case}: {remark}" for case, remark in self.failed]
        return "\n".join([f"passed {self.passed} of {self.count} public tests.", *failed])


@dataclass(frozen=True, slots=True)
class CodeView:
    """A problem, and the last program's results, None before the first one.

    `entry` is the function that is asked for, "" for a program that reads and prints. `recipe` is None for the problems
    of a file.
    """

    question: str
    entry: str
    recipe: Recipe | None = None
    feedback: PublicTests | None = None


class Code(World):
    """Write a program that passes tests. State: the problem, the last program handed in, attempts left."""

    OUTCOMES = ("success", "score")
    Options = CodeOptions
    View = CodeView

    def env(self) -> "CodeEnv":
        """Raises:
        WorldError: the file has no problems.
        NotReady: there is no such file, or this machine cannot isolate programs.
        """
        for path in filter(None, (self.options.path, self.options.held_out_path)):
            open_problems(path)
        try:
            require_isolation(allow_none=self.options.allow_no_isolation)
        except IsolationError as error:
            raise NotReady(f"{error} with env.options allow_no_isolation=True") from error
        return CodeEnv(self.options)

    def longest_step_s(self) -> float:
        return STARTS * self.options.wall_guard_s + SLACK_S

    def most_turns(self) -> int:
        return self.options.attempts

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """Generated problems without end, or those of a file in an order that the seed fixes.

        Generated functions are split by their results, a file's problems by their text. With `held_out_path`, that
        whole file is held out, and problems that `path` shares with it are left out of training.
        """
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        options: CodeOptions = self.options
        if not options.path:
            return grain.MapDataset.range(TASKS).map(functools.partial(_generated_task, options, split, data_seed))
        file = "held_out_path" if split == "held_out" and options.held_out_path else "path"
        places = _places(split, options)
        if not places:
            raise WorldError(
                f"env.options path={options.path!r} holds no {split} problems: give more, or held_out_path"
            )
        return grain.MapDataset.source(places).shuffle(data_seed).map(functools.partial(_row_task, file))

    def instruct(self, observation: Observation, history: History) -> str:
        view: CodeView = observation.view
        parts = [view.question]
        if history and history[-1].action:
            parts.append(f"The program that you handed in last:\n```python\n{history[-1].action}\n```")
        if view.feedback:
            parts.append(f"It {view.feedback}")
        return "\n\n".join([*parts, INSTRUCTION])

    def compact(self, observation: Observation, history: History) -> str:
        """The problem in a few words, and a word for the last program's result."""
        view: CodeView = observation.view
        return " ".join([view.recipe.short() if view.recipe else view.question, *_verdict(view)])

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        """Result of the last program, or a note that there was none."""
        view: CodeView = observation.view
        if style == "compact":
            return user_says("".join(_verdict(view)) or _FAILED)
        latest = f"It {view.feedback}" if view.feedback else "There was no program in that."
        return user_says(f"{latest}\n\n{INSTRUCTION}")

    def vocabulary(self) -> tuple[str, ...]:
        if self.options.path:
            raise WorldError(
                f"env.options path={self.options.path!r}: the problems of a file have no compact wording; set "
                "env.prompt=instruct"
            )
        return (*program_words(self.options.kinds), _WRONG, _FAILED)

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        return action if style == "compact" else f"```python\n{action}\n```"

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        """The program in a reply: its last block of Python, else the content of its last `<answer>`, else the whole
        reply if that is Python that does something."""
        reply = without_thoughts(reply)
        blocks = fenced_blocks(reply)
        found = blocks[-1] if blocks else last_answer(reply)
        if found is None and _does_something(reply.strip()):
            found = reply.strip()
        return found if found and runnable(found) else None

    def expert(self, env: "CodeEnv") -> str:
        """The problem's own solution.

        Raises:
            WorldError: the data has none.
        """
        if not env.problem.solution:
            raise WorldError(
                "this problem comes without a solution, so there is nothing to imitate: take data that has them "
                "(HumanEval, MBPP, DeepCoder), or start from a base model that needs no warm start"
            )
        return env.problem.solution

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """A random short program: for a generated problem one of the kind it asks for, otherwise one that returns its
        argument."""
        view: CodeView = observation.view
        if view.recipe:
            return draw(rng, (view.recipe.kind,), len(view.recipe.steps)).program()
        return f"def {view.entry or 'main'}(*x):\n    return x[{int(rng.integers(2))}]"


def _verdict(view: CodeView) -> list[str]:
    return [] if view.feedback is None else [_WRONG if view.feedback.wrong else _FAILED]


def _generated_task(options: CodeOptions, split: Split, data_seed: int, index: int) -> Task:
    """The index-th problem of a split, generated when asked for."""
    recipe = draw(np.random.default_rng([data_seed, index]), options.kinds, options.steps, split)
    payload = {"kind": recipe.kind, "steps": [list(step) for step in recipe.steps]}
    return Task(f"code-{split}-{data_seed}-{index}", "code", index, payload, kind=recipe.kind)


def _row_task(file: str, place: tuple[int, int]) -> Task:
    """A problem of a file as a task: its offset there, and the hash of its content."""
    offset, content = place
    return Task(f"code-{file}-{offset}", "code", offset, {"file": file, "offset": offset, "content": f"{content:x}"})


def _places(split: Split, options: CodeOptions) -> list[tuple[int, int]]:
    """Offset and content of each problem of a split."""
    if not options.held_out_path:
        wanted, places = split == "held_out", _contents(options.path).items()
        return [(offset, content) for offset, content in places if (content % HELD_OUT_ONE_IN == 0) == wanted]
    held_out = _contents(options.held_out_path)
    if split == "held_out":
        return list(held_out.items())
    known = set(held_out.values())
    return [(offset, content) for offset, content in _contents(options.path).items() if content not in known]


@functools.lru_cache(maxsize=4)
def _contents(path: str) -> Mapping[int, int]:
    """The content of each problem of a file, by its offset. A few rows that are no problem are left out.

    Raises:
        WorldError: more than `_MOST_UNREADABLE` of them are none.
    """
    file, found, faults = open_problems(path), {}, []
    for offset in file.offsets:
        try:
            found[offset] = problem_of(file.fields(offset)).content
        except ValueError as error:  # a WorldError, or a statement with a lone surrogate
            faults.append(error)
    if len(faults) > _MOST_UNREADABLE * len(file.offsets):
        said = f"{len(faults)} of its {len(file.offsets)} rows are no problems, such as"
        raise WorldError(f"env.options path={path!r}: {said}: {faults[0]}")
    if faults:
        logging.warning("%s: %d of %d rows are left out: %s", path, len(faults), len(file.offsets), faults[0])
    return found


class CodeEnv:
    """One problem at a time."""

    def __init__(self, options: CodeOptions):
        self._options = options
        self._problem: CodeProblem | None = None
        self._recipe: Recipe | None = None
        self._program = ""
        self._left = 0
        self._verdict: Verdict | None = None
        self._checked: tuple[Any, bool] | None = None  # an agent's tests, and whether the solution passes them

    @property
    def problem(self) -> CodeProblem:
        if self._problem is None:
            raise RuntimeError("the environment has not been reset")
        return self._problem

    def reset(self, task: Task, seed: int) -> Observation:
        self._problem, self._recipe = _problem(task, self._options)
        self._program, self._left, self._verdict = "", self._options.attempts, None
        return self._observe()

    def step(self, action: str) -> Step:
        if action.startswith(_TESTS):
            return self._step_of_tests(action.removeprefix(_TESTS))
        if self._over():
            return Step(self._observe(), 0.0, True, False, self._outcome())
        if not runnable(action):
            return Step(self._observe(), 0.0, False, False, self._outcome())
        self._program, self._left = action, self._left - 1
        self._verdict = self._judged(action, self.problem.suite)
        over, outcome = self._over(), self._outcome()
        return Step(self._observe(), outcome["success"] if over else 0.0, over, True, outcome)

    def _step_of_tests(self, text: str) -> Step:
        """Run an agent's tests (`action_of_tests`) on a program and on the problem's own solution."""
        program, given = json.loads(text)
        suite = replace(self.problem.suite, cases=tuple(_case_of(x, y, self.problem.suite.entry) for x, y in given))
        tests = (self.problem.content, json.dumps(given))  # as text, since 1, 1.0 and True are equal in Python
        if self._checked is None or self._checked[0] != tests:  # the same tests may be run on several programs
            solution = self.problem.solution
            self._checked = tests, bool(solution) and self._judged(solution, suite).success
        shown = replace(self.problem, suite=suite, public=len(given))
        feedback = _feedback(shown, self._judged(program, suite)) if runnable(program) else PublicTests(0, len(given))
        outcome = {"passed": feedback.passed / len(given), "tests_valid": float(self._checked[1])}
        before = self._observe()
        return Step(replace(before, view=replace(before.view, feedback=feedback)), 0.0, False, True, outcome)

    def _judged(self, program: str, suite: Suite) -> Verdict:
        options = self._options
        try:
            return judge(
                program,
                suite,
                options.limits(),
                case_cpu_s=options.case_cpu_s,
                allow_none=options.allow_no_isolation,
                packages=options.packages,
            )
        except (NoProcessorError, OSError) as away:  # not the program's fault: the task is played again
            raise EnvDied(f"sandbox: {away}", "executor_error") from away

    def _over(self) -> bool:
        """True if the attempts are used up, or the last program passes every public test (there may be none)."""
        if self._verdict is None:
            return False
        return self._left == 0 or all(self._verdict.passed[: self.problem.public])

    def _outcome(self) -> dict[str, float]:
        if self._verdict is None:
            return {"success": 0.0, "score": 0.0}
        counted = self._verdict.passed[self.problem.unscored :]
        return {"success": float(bool(counted) and all(counted)), "score": sum(counted) / max(1, len(counted))}

    def _observe(self) -> Observation:
        problem, verdict = self.problem, self._verdict
        feedback = None if verdict is None else _feedback(problem, verdict)
        view = CodeView(_question(problem, self._recipe), problem.suite.entry, self._recipe, feedback)
        return Observation(view, LEGAL, state_key("code", problem.content, self._left, normalised(self._program)))


def action_of_tests(program: str, tests: Sequence[tuple[Any, Any]]) -> str:
    """The action that runs an agent's tests: pairs of input (a list of arguments, or a text to be read) and result.

    The step's outcome: `passed`, the share of them that `program` passes, and `tests_valid`, 1 where the problem's own
    solution passes all. The view's feedback has the failures. It takes no attempt, and no reply can be read as it.
    """
    return _TESTS + json.dumps([program, list(tests)])


def _case_of(given: Any, wanted: Any, entry: str) -> CallCase | Lines:
    return CallCase(tuple(given), wanted, json=True) if entry else Lines(given, wanted)


def _problem(task: Task, options: CodeOptions) -> tuple[CodeProblem, Recipe | None]:
    """The problem of a task, and the recipe of one that is generated."""
    if "offset" in task.payload:
        file = open_problems(getattr(options, task.payload["file"]))
        return problem_of(file.fields(task.payload["offset"]), public_tests=options.public_tests), None
    recipe = Recipe(task.payload["kind"], tuple((index, number) for index, number in task.payload["steps"]))
    public = min(options.public_tests, options.cases)
    return generated_problem(recipe, task.seed, cases=options.cases, public=public), recipe


def _question(problem: CodeProblem, recipe: Recipe | None) -> str:
    """The statement; for generated problems also the public tests, which a file's statements contain already."""
    if recipe is None or not problem.public:
        return problem.statement
    return problem.statement + "\n\nFor example:\n" + "\n".join(_case(problem.suite, i) for i in range(problem.public))


def _feedback(problem: CodeProblem, verdict: Verdict) -> PublicTests:
    passed, remarks = verdict.passed[: problem.public], verdict.remarks[: problem.public]
    # A file's tests may hold lone surrogates, which cannot be sent as UTF-8.
    failed = ((_escaped(_case(problem.suite, number)), remark) for number, remark in enumerate(remarks) if remark)
    return PublicTests(sum(passed), len(passed), tuple(failed))


def _case(suite: Suite, number: int) -> str:
    case = suite.cases[number]
    if isinstance(case, CallCase):
        return f"{suite.entry}({', '.join(map(repr, case.arguments))}) returns {case.expected!r}"
    if isinstance(case, Lines):
        return f"input {case.input!r} prints {case.output!r}"
    return case.source


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def runnable(program: str) -> bool:
    """True for a program that the sandbox accepts."""
    return bool(program.strip()) and "\0" not in program and len(program) <= MAX_PROGRAM_CHARACTERS


def _does_something(text: str) -> bool:
    """True for Python with a statement or a call in it, and not just a word or a sum that happens to parse."""
    module = parse_quietly(text) if len(text) <= MAX_PROGRAM_CHARACTERS else None
    if module is None:
        return text.startswith(HEAD)  # a compact program with a syntax error counts as handed in, and fails
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in module.body)


def normalised(program: str) -> bytes:
    """A program without layout and comments, for the state key; unchanged where it does not parse."""
    return normal_form(program).encode("utf-8", "surrogatepass")
