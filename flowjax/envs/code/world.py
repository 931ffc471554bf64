"""The code world: write a program that passes tests. State: the problem, the last program, attempts left.

One task is one problem; an action is a whole program. With `attempts` above 1 the agent hears how its program did on
the public tests and may hand in another. All tests are judged in the sandbox (`flowjax.grading.code`); hidden ones are
never shown, and their expected results never get near the program.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import EnvDied, Message, NotReady, Observation, Past, Split, Step, Style, WorldError
from flowjax.envs.code.generated import HEAD, OPERATIONS, SHORT, Recipe, draw, words
from flowjax.envs.code.generated import problem as generated_problem
from flowjax.envs.code.problems import Problem, ProblemFile, open_problems, problem_of
from flowjax.envs.options import build_options, check_split
from flowjax.grading.code import CASE_CPU_S, JUDGE_LIMITS, Call, Lines, Suite, Verdict, judge
from flowjax.grading.code_asserts import parse_quietly
from flowjax.grading.sandbox import STARTS, IsolationError, Limits, StarvedError, require_isolation
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

OUTCOMES = ("success", "score")
LEGAL = ("<program>",)
SLACK_S = 1.5  # of a step beyond the programs' own time: starting the sandbox, ending it, reading results
TASKS = 1 << 31  # length of the generated task source; slice it
HELD_OUT_ONE_IN = 8  # problems of a file, by content
MAX_PROGRAM_CHARACTERS = 1 << 16
_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_REFERENCE_LEAST_CHARACTERS = 20
INSTRUCTION = """Solve it in Python 3. Reason first if you like, then give one complete program in one ```python block;
only the last such block counts."""
_WRONG, _FAILED = "wrong", "failed"  # what a compact prompt says of the last program: it answered, or it did not
_FEEDBACK = "\n\nYour last program: "


@dataclass(frozen=True, slots=True)
class Options:
    """`kinds`, `steps` and `cases` shape generated problems; `path` (and `held_out_path`) name files of real ones.

    `case_cpu_s` bounds one test and `cpu_s` all tests of one program, in seconds on a processor; `idle_s` is how long
    they may be asleep. `wall_guard_s` bounds what waits for a processor, which makes no verdict. `public_tests` tests
    are shown.
    `allow_no_isolation` lets programs run where there is no isolation but resource limits.
    """

    path: str = ""
    held_out_path: str = ""
    kinds: Sequence[str] = ("int", "list", "text")
    steps: int = 3
    cases: int = 8
    public_tests: int = 2
    attempts: int = 1
    case_cpu_s: float = CASE_CPU_S
    cpu_s: float = JUDGE_LIMITS.cpu_s
    idle_s: float = JUDGE_LIMITS.idle_s
    wall_guard_s: float = JUDGE_LIMITS.wall_guard_s
    memory_mb: int = 512
    packages: Sequence[str] = ()
    allow_no_isolation: bool = False

    def __post_init__(self):
        unknown = [kind for kind in self.kinds if kind not in OPERATIONS]
        if unknown or not self.kinds:
            raise WorldError(f"env.options kinds={list(self.kinds)}: give some of {', '.join(OPERATIONS)}")
        for name, least in (("steps", 1), ("cases", 1), ("public_tests", 0), ("attempts", 1), ("memory_mb", 64)):
            if getattr(self, name) < least:
                raise WorldError(f"env.options {name}={getattr(self, name)}: give {least} or more")
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
        return replace(
            JUDGE_LIMITS,
            cpu_s=self.cpu_s,
            idle_s=self.idle_s,
            wall_guard_s=self.wall_guard_s,
            memory_bytes=self.memory_mb << 20,
        )


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    return build_options(Options, options, "the code world")


class Code:
    """One problem at a time."""

    def __init__(self, options: Options):
        self._options = options
        self._problem: Problem | None = None
        self._content = 0
        self._program = ""
        self._left = 0
        self._verdict: Verdict | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("the environment has not been reset")
        return self._problem

    def reset(self, task: Task, seed: int) -> Observation:
        self._problem = _problem(task, self._options)
        self._content = self._problem.content
        self._program, self._left, self._verdict = "", self._options.attempts, None
        return self._observe()

    def step(self, action: str) -> Step:
        if self._over():
            return Step(self._observe(), 0.0, True, False, self._outcome())
        if not action.strip() or "\0" in action or len(action) > MAX_PROGRAM_CHARACTERS:
            return Step(self._observe(), 0.0, False, False, self._outcome())
        options = self._options
        self._program, self._left = action, self._left - 1
        try:
            self._verdict = judge(
                action,
                self.problem.suite,
                options.limits(),
                case_cpu_s=options.case_cpu_s,
                allow_none=options.allow_no_isolation,
                packages=options.packages,
            )
        except (StarvedError, OSError) as away:  # says nothing about the task, which is played again
            raise EnvDied(f"sandbox: {away}", "executor_error") from away
        over, outcome = self._over(), self._outcome()
        return Step(self._observe(), outcome["success"] if over else 0.0, over, True, outcome)

    def _over(self) -> bool:
        """The attempts are used up, or the last program passes every public test (of which there may be none)."""
        if self._verdict is None:
            return False
        return self._left == 0 or all(self._verdict.passed[: self.problem.public])

    def _outcome(self) -> dict[str, float]:
        if self._verdict is None:
            return {"success": 0.0, "score": 0.0}
        counted = self._verdict.passed[self.problem.unscored :]
        return {"success": float(bool(counted) and all(counted)), "score": sum(counted) / max(1, len(counted))}

    def _observe(self) -> Observation:
        key = state_key("code", self._content, self._left, normalised(self._program))
        return Observation(show(self.problem, self._verdict), LEGAL, key)


def _problem(task: Task, options: Options) -> Problem:
    if "offset" in task.payload:
        file = open_problems(getattr(options, task.payload["file"]))
        return problem_of(file.fields(task.payload["offset"]), public_tests=options.public_tests)
    recipe = Recipe(task.payload["kind"], tuple((index, number) for index, number in task.payload["steps"]))
    return generated_problem(recipe, task.seed, cases=options.cases, public=min(options.public_tests, options.cases))


def make(**options: Any) -> Code:
    """Options: see `Options`.

    Raises:
        WorldError: an option is wrong, or the file has no problems.
        NotReady: there is no such file, or this machine cannot isolate programs.
    """
    chosen = read_options(options)
    for path in filter(None, (chosen.path, chosen.held_out_path)):
        open_problems(path)
    try:
        require_isolation(allow_none=chosen.allow_no_isolation)
    except IsolationError as error:
        raise NotReady(f"{error} with env.options allow_no_isolation=True") from error
    return Code(chosen)


def longest_step_s(**options: Any) -> float:
    """What one step may take; `config.env.step_timeout_s` must not be shorter."""
    return STARTS * read_options(options).wall_guard_s + SLACK_S


class _GeneratedSource:
    """The index-th problem of a split, generated when asked for."""

    def __init__(self, split: Split, data_seed: int, options: Options):
        self._split: Split = split
        self._data_seed, self._options = data_seed, options

    def __call__(self, index: int) -> Task:
        rng = np.random.default_rng([self._data_seed, index])
        recipe = draw(rng, self._options.kinds, self._options.steps, self._split)
        payload = {"kind": recipe.kind, "steps": [list(step) for step in recipe.steps]}
        return Task(f"code-{self._split}-{self._data_seed}-{index}", "code", index, payload)


class _FileSource:
    """A problem of a file as a task: its place there."""

    def __init__(self, split: Split, file: str):
        self._split, self._file = split, file

    def __call__(self, offset: int) -> Task:
        return Task(f"code-{self._file}-{offset}", "code", offset, {"file": self._file, "offset": offset})


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Generated problems without end, or those of a file in an order that the seed fixes.

    Generated functions are split by what they compute, a file's problems by their text. With `held_out_path`, that
    whole file is held out, and what it shares with `path` is left out of training.
    """
    import grain  # imports jax, which processes that only hold environments do without

    check_split(split)
    read = read_options(options)
    if not read.path:
        return grain.MapDataset.range(TASKS).map(_GeneratedSource(split, data_seed, read))
    file = "held_out_path" if split == "held_out" and read.held_out_path else "path"
    offsets = _offsets(split, read)
    if not offsets:
        raise WorldError(f"env.options path={read.path!r} holds no {split} problems: give more, or held_out_path")
    return grain.MapDataset.source(offsets).shuffle(data_seed).map(_FileSource(split, file))


def _offsets(split: Split, options: Options) -> list[int]:
    if options.held_out_path:
        held_out = open_problems(options.held_out_path)
        if split == "held_out":
            return list(held_out.offsets)
        taken = {_content(held_out, offset) for offset in held_out.offsets}
        file = open_problems(options.path)
        return [offset for offset in file.offsets if _content(file, offset) not in taken]
    file = open_problems(options.path)
    wanted = split == "held_out"
    return [offset for offset in file.offsets if (_content(file, offset) % HELD_OUT_ONE_IN == 0) == wanted]


def _content(file: ProblemFile, offset: int) -> int:
    return problem_of(file.fields(offset)).content


def show(problem: Problem, verdict: Verdict | None) -> str:
    """The text of an observation."""
    text = _statement(problem)
    return text if verdict is None else text + _FEEDBACK + _feedback(problem, verdict)


def read(text: str) -> tuple[str, str]:
    """An observation's statement and feedback, "" where no program has been judged."""
    statement, _, feedback = text.partition(_FEEDBACK)
    return statement, feedback


def read_short(text: str) -> str:
    """The statement in a few words, "" where the problem was not generated."""
    line = next((line for line in text.splitlines() if line.startswith(SHORT)), "")
    return line.removeprefix(SHORT)


def _statement(problem: Problem) -> str:
    """The statement; for generated problems with the public tests, which files have in their statements."""
    if not problem.short or not problem.public:
        return problem.statement
    return problem.statement + "\n\nFor example:\n" + "\n".join(_case(problem.suite, i) for i in range(problem.public))


def _case(suite: Suite, number: int) -> str:
    case = suite.cases[number]
    if isinstance(case, Call):
        return f"{suite.entry}({', '.join(map(repr, case.arguments))}) returns {case.expected!r}"
    if isinstance(case, Lines):
        return f"input {case.input!r} prints {case.output!r}"
    return case.source


def _feedback(problem: Problem, verdict: Verdict) -> str:
    """How the program did on the public tests, and on nothing else."""
    passed, remarks = verdict.passed[: problem.public], verdict.remarks[: problem.public]
    if not passed:
        return "handed in."
    lines = [f"passed {sum(passed)} of {len(passed)} public tests."]
    for number, remark in enumerate(remarks):
        if remark:
            lines.append(f"- {_case(problem.suite, number)}: {remark}")
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def vocabulary(**options: Any) -> tuple[str, ...]:
    chosen = read_options(options)
    if chosen.path:
        raise WorldError(
            f"env.options path={chosen.path!r}: the problems of a file have no compact wording; set env.prompt=instruct"
        )
    return (*words(chosen.kinds), _WRONG, _FAILED)


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message. Compact: the problem in a few words, and a word for the last program's verdict."""
    statement, feedback = read(observation.text)
    if style == "compact":
        told = [read_short(observation.text), *([_verdict(feedback)] if feedback else [])]
        return [{"role": "user", "content": " ".join(told)}]
    parts = [statement]
    if history and history[-1].action:
        parts.append(f"The program that you handed in last:\n```python\n{history[-1].action}\n```")
    if feedback:
        parts.append(f"It {feedback}")
    return [{"role": "user", "content": "\n\n".join([*parts, INSTRUCTION])}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    """How the last program did, or that there was none."""
    _, feedback = read(observation.text)
    if style == "compact":
        return [{"role": "user", "content": _verdict(feedback)}]
    said = f"It {feedback}" if feedback else "There was no program in that."
    return [{"role": "user", "content": f"{said}\n\n{INSTRUCTION}"}]


def _verdict(feedback: str) -> str:
    return _WRONG if " returned " in feedback else _FAILED


def reply(action: str, style: Style) -> str:
    return action if style == "compact" else f"```python\n{action}\n```"


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The program in a reply: its last fenced block, or else what stands in its last `<answer>`, or else the whole
    reply where that is Python that does something.

    `reference`: the published rule, by which a block of under 20 characters is none and any reply that has the look of
    Python is a program.
    """
    del legal  # every program is
    blocks = [block.strip("\r\n") for block in _FENCED.findall(reply)]
    if reference:
        blocks = [block for block in blocks if len(block) >= _REFERENCE_LEAST_CHARACTERS]
    found = blocks[-1] if blocks else None
    if found is None and not reference:
        found = _answer(reply)
    if found is None:
        text = reply.strip()
        looks = re.search(r"\b(def|import|print|return)\b", text) is not None if reference else _does_something(text)
        found = text if looks else None
    if found is None or not found.strip() or "\0" in found or len(found) > MAX_PROGRAM_CHARACTERS:
        return None
    return found


def _answer(reply: str) -> str | None:
    """What stands in the last `<answer>` pair."""
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(end, 0))
    return reply[start + len("<answer>") : end].strip("\r\n") if start >= 0 else None


def _does_something(text: str) -> bool:
    """Whether a text is Python with a statement in it, not a word or a sum that happens to parse."""
    module = parse_quietly(text) if len(text) <= MAX_PROGRAM_CHARACTERS else None
    if module is None:
        return text.startswith(HEAD)  # a compact reply that went wrong is still a program that was handed in
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in module.body)


def normalised(program: str) -> bytes:
    """A program without its layout and comments; as it stands where it does not parse."""
    module = parse_quietly(program)
    try:
        text = program.strip() if module is None else ast.dump(module)
    except RecursionError:
        text = program.strip()
    return text.encode("utf-8", "surrogatepass")


def expert(env: Code) -> str:
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


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    """A random short program: for a generated problem one of the kind it asks for, otherwise one that returns its
    argument."""
    short = read_short(observation.text)
    kind = short.split()[0] if short else ""
    if kind in OPERATIONS:
        return draw(rng, (kind,), short.split().count("then") + 1).program()
    names = re.findall(r"^\s*def (\w+)\(|must be called (\w+)", observation.text, re.MULTILINE)
    name = "".join(names[-1]) if names else "main"
    return f"def {name}(*x):\n    return x[{int(rng.integers(2))}]"
