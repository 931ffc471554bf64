"""The world of the canvas: edit a workflow of operators until its run solves the problem.

Problems are exercises generated on demand, or those of files. State: problem, workflow, finished.
"""

import asyncio
import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np

from flowjax.canvas import actions
from flowjax.canvas.actions import Unreadable
from flowjax.canvas.backends import Backend
from flowjax.canvas.backends.config import BackendConfigError
from flowjax.canvas.context import Budget
from flowjax.canvas.doctor import silent_backends
from flowjax.canvas.edits import PARTS
from flowjax.canvas.operators import Operator, plain
from flowjax.canvas.operators.registry import (
    ADVERTISED,
    OperatorRegistryError,
    describe,
    load_descriptions,
    load_operators,
)
from flowjax.canvas.values import Problem, ProblemKind
from flowjax.envs import (
    History,
    Message,
    NotReady,
    Observation,
    Split,
    Style,
    World,
    WorldError,
    check_split,
    kept_answer,
    user_says,
)
from flowjax.envs.canvas import exercises, experts
from flowjax.envs.canvas.env import COUNTS, GRACE_S, OUTCOMES, CanvasEnv, failed_step
from flowjax.envs.canvas.executors import bases_of_run, open_executors, price_list, relative_prices
from flowjax.envs.canvas.experts import NAMES, Expert
from flowjax.envs.canvas.problem_files import alike, content_of, records
from flowjax.envs.canvas.texts import (
    EMPTY,
    INSTRUCTION,
    LARGEST,
    RESULT,
    RULES,
    CanvasView,
    ObservationText,
    Offer,
    drawn,
    read_action,
    result_words,
    state_words,
    worded,
)
from flowjax.envs.demonstrations import Exchange, Tasks
from flowjax.grading.sandbox import IsolationError, require_isolation
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

ANSWER_S = 20.0  # limit of a backend's answer to the check before a run
_VOCABULARY_TASKS = 1000  # enough that their lessons have all words
TASKS = 1 << 31  # length of a source of generated exercises; slice it
OFFLINE = {"kind": "flowjax.envs.canvas.offline:SimulatedSolver"}
TEACHER = {"kind": "flowjax.envs.canvas.experts:Teacher"}
# Words of compact prompts and replies, beside the names of operators.
_SIGNS = ("->", "[", "]", ",", "(", ")", "{", "}", "?", ":", "*", "done", "into", "at")
_KINDS = get_args(ProblemKind)
_STATUSES = ("=", "empty", "none", "ok", "error", "budget", "passed", "failed", "short", "long", "refused", "cut")
_IDS = tuple(f"n{number}" for number in range(1, 41))
_PLACES = tuple(f"{id}.{part}" for id in _IDS for part in PARTS)
# As prompts show them and as `prompt` takes them, then as they are inside braces.
_PHRASES = ("instructed", *exercises.PHRASES, *(f'"{word}"' for word in exercises.PHRASES))


@dataclass(frozen=True, slots=True)
class CanvasOptions:
    """Options of the world; a wrong value raises a `WorldError` that names it."""

    path: str = ""  # file of problems in the published JSONL format, or folder with train.jsonl and test.jsonl
    kinds: Sequence[str] = exercises.KINDS  # of generated exercises
    turns: int = 20  # actions of an episode; keep it equal to config.env.max_turns
    operators: Sequence[str] = ()  # names of those on offer; () is all advertised and extra ones
    extra_operators: Sequence[str] = ()  # further ones, as package.module:Class
    descriptions: str = ""  # file in the published operator.json's format: descriptions, and operators made of them
    backends: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"offline": OFFLINE})
    default_backend: str = ""  # answers calls that name no backend; "" is the first
    temperature: float = 0.0  # of the executor's answers
    max_new_tokens: int = 1024
    retry_new_tokens: int = 4096  # of a second try where the first reply was cut; 0 is none
    executor_seed: int = 0
    step_s: float = 8.0  # longest run after one edit; keep it under config.env.step_timeout_s
    max_nodes: int = 64  # of a workflow; here and below 0 is no limit
    max_steps: int = 200  # operators that one run may reach, loops unrolled and cached ones too
    max_calls: int = 100  # requests to backends in an episode
    max_tokens: int = 200_000  # of those requests and their answers
    max_seconds: float = 600.0  # of all runs of an episode
    max_cost: float = 0.0  # in the currency of the backends' price lists
    output_characters: int = 300  # shown of each output
    observation_characters: int = 20_000  # shown in all, the problem and the workflow too
    min_operators: int = 0  # finish is refused with fewer
    require_structure: bool = False  # finish is refused without a parallel, a conditional or a loop
    require_checker: bool = False  # finish is refused without a solver and a checker
    expert: Expert = "able"  # plain: demonstrations of mostly simple workflows; instructing: of any phrase for solvers
    packages: Sequence[str] = ()  # folders that programs may import from
    allow_no_isolation: bool = False  # run programs where this machine cannot isolate them

    def __post_init__(self):
        if missing := [folder for folder in self.packages if not Path(folder).is_dir()]:
            raise WorldError(f"env.options packages={missing[0]!r} is no folder: give those of installed packages")
        if unknown := [kind for kind in self.kinds if kind not in exercises.KINDS]:
            raise WorldError(f"env.options kinds={unknown[0]!r}: use some of {', '.join(exercises.KINDS)}")
        if not self.kinds:
            raise WorldError(f"env.options kinds is empty: use some of {', '.join(exercises.KINDS)}")
        for name, least in (
            ("turns", 1),
            ("max_new_tokens", 1),
            ("output_characters", 1),
            ("observation_characters", 4000),
            ("step_s", 1e-3),
        ):
            if not getattr(self, name) >= least:
                raise WorldError(f"env.options {name}={getattr(self, name)!r}: give at least {least}")
        limits = ("max_nodes", "max_steps", "max_calls", "max_tokens", "max_seconds", "max_cost")
        for name in (*limits, "min_operators", "temperature", "retry_new_tokens"):
            if not getattr(self, name) >= 0:
                raise WorldError(f"env.options {name}={getattr(self, name)!r}: give a number from 0 on")
        if self.default_backend and self.default_backend not in self.backends:
            known = ", ".join(self.backends)
            raise WorldError(f"env.options default_backend={self.default_backend!r}: name one of backends ({known})")

    @property
    def first_backend(self) -> str:
        return self.default_backend or next(iter(self.backends))

    @property
    def shown_characters(self) -> int:
        """Characters shown of each text of a run."""
        return min(self.output_characters, self.observation_characters // 8)

    @property
    def other_backends(self) -> tuple[str, ...]:
        """Backends that answer only calls that name them."""
        return tuple(name for name in self.backends if name != self.first_backend)

    @property
    def budget(self) -> Budget:
        """Budget of an episode."""
        spent = (self.max_calls or None, self.max_tokens or None, self.max_seconds or None, self.max_cost or None)
        return Budget(*spent, self.max_steps or None)

    def on_offer(self) -> dict[str, type[Operator]]:
        """The operators that a workflow may have, by name."""
        try:
            found = load_operators(self.extra_operators)
        except OperatorRegistryError as error:
            raise WorldError(f"env.options extra_operators: {error}") from error
        try:
            found = load_descriptions(self.descriptions, found) if self.descriptions else found
        except OperatorRegistryError as error:
            raise WorldError(f"env.options descriptions: {error}") from error
        if unknown := [name for name in self.operators if name not in found]:
            raise WorldError(f"env.options operators={unknown[0]!r}: there are {', '.join(found)}")
        extra = [name for name in found if name not in load_operators(entry_points=False)]
        names = self.operators or [*(operator.name for operator in ADVERTISED), *extra]
        return {name: found[name] for name in names}

    def open_backends(self) -> Mapping[str, Backend]:
        """The backends, shared by all environments of this process."""
        return open_executors(self.backends)

    def executors(self) -> str:
        """Names and prices of the backends for the policy, "" where there is only one."""
        return price_list(self.backends, self.first_backend)

    def executor_words(self) -> list[str]:
        """Names of the backends for a nano policy, each with its price in units of the cheapest; [] for only one."""
        prices = relative_prices(self.backends) if len(self.backends) > 1 else {}
        return [word for name, price in prices.items() for word in (f"@{name}", str(min(price, LARGEST)))]


class Canvas(World):
    """Edit a workflow of operators until its run solves the problem. State: problem, workflow, finished."""

    OUTCOMES, COUNTS = OUTCOMES, COUNTS
    STEPS_WAIT = True  # steps wait for executors
    Options = CanvasOptions
    View = CanvasView
    Environment: ClassVar[type[CanvasEnv]] = CanvasEnv

    def env(self) -> CanvasEnv:
        """Raises:
        NotReady: this machine cannot isolate the programs that workflows run, or compare formulas.
        """
        kinds = {each.get("kind") for each in self.options.backends.values()}
        may_be_formulas = self.options.path or kinds - {OFFLINE["kind"]}  # not of the simulated executor
        if may_be_formulas and importlib.util.find_spec("math_verify") is None:
            raise NotReady('answers that are formulas need math-verify: pip install -e ".[math]"')
        try:
            require_isolation(allow_none=self.options.allow_no_isolation)
        except IsolationError as error:
            raise NotReady(f"{error} with env.options allow_no_isolation=True") from error
        return self.Environment(self.options)

    def asked_bases(self) -> Mapping[str, int]:
        most: int = max(self.options.max_new_tokens, self.options.retry_new_tokens)
        return dict.fromkeys(bases_of_run(self.options.backends), most)

    def lessons(self, tasks: Tasks, rng: np.random.Generator) -> Iterator[Exchange]:
        """Requests that operators in workflows make about the tasks, with a teacher's replies."""
        return experts.lessons(tasks, rng, self._offered)

    def lesson_pieces(self) -> tuple[str, ...]:
        return experts.lesson_pieces(self.tasks("train", 0)[:_VOCABULARY_TASKS], self._offered)

    def without_engines(self) -> "Canvas":
        """The same world, in which a scripted teacher answers in place of the run's engines."""
        made = copy.copy(self)
        given = self.options.backends.items()
        backends = {name: TEACHER if each.get("kind") == "run" else each for name, each in given}
        made.options = dataclasses.replace(self.options, backends=backends)
        return made

    def obstacles(self) -> Iterator[str]:
        """Backends that do not answer, and endpoints whose answers do not follow a JSON schema."""
        try:
            found = asyncio.run(silent_backends(self.options.backends, ANSWER_S))
        except BackendConfigError as error:
            raise WorldError(f"env.options {error}") from error
        yield from (f"env.options backends: {finding.subject} {finding.text}" for finding in found)

    def longest_step_s(self) -> float:
        return self.options.step_s + GRACE_S

    def most_turns(self) -> int:
        return self.options.turns

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """Generated exercises without end, or the problems of a file. Train and held-out problems differ by content."""
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        if not self.options.path:
            generated = functools.partial(_generated_task, tuple(self.options.kinds), split, data_seed)
            return grain.MapDataset.range(TASKS).map(generated)
        packages = tuple(self.options.packages)
        file, rows = _split_rows(Path(self.options.path), split, packages)
        order = np.random.default_rng(data_seed).permutation(len(rows))
        return grain.MapDataset.range(len(rows)).map(functools.partial(_row_task, file, packages, rows, order))

    def instruct(self, observation: Observation, history: History) -> str:
        """The problem, the workflow, the result of its run, and the latest actions in the window."""
        parts = [RULES, self.worded(observation.view).whole]
        if history:
            latest = [f"Turn {past.turn}: {past.action or '(no action)'}" for past in history]
            parts.append("Your latest actions:\n" + "\n".join(latest))
        return "\n\n".join([*parts, INSTRUCTION])

    def worded(self, view: CanvasView) -> ObservationText:
        """An observation as text."""
        return worded(view, self._offer)

    @functools.cached_property
    def _offer(self) -> Offer:
        described = describe(self.options.on_offer(), hidden=True)
        return Offer(described, self.options.executors(), self.options.observation_characters)

    def compact(self, observation: Observation, history: History) -> str:
        """The executors, the problem, the workflow and the result of its run, in words of the vocabulary."""
        return " ".join(state_words(observation.view, self.options.executor_words()))

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        """The result of the last action; the conversation holds the rest."""
        view: CanvasView = observation.view
        if style == "compact":
            return user_says(" ".join(result_words(view)))
        said = self.worded(view)
        return user_says(f"## Workflow\n{said.workflow or EMPTY}{RESULT}{said.result}\n\nGive the next action.")

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        """Compact: the words of the action. Instruct: its tags."""
        understood = read_action(action)
        if isinstance(understood, Unreadable):
            return action
        return actions.show_compact(understood, spaced=True) if style == "compact" else actions.show(understood)

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        """The action in its one-line form, or with tags where one line cannot hold it. An unreadable reply is passed to
        the environment, which answers with the reason; None is an empty reply."""
        understood = read_action(reply)
        if isinstance(understood, Unreadable):
            return reply.strip() or None
        line = actions.show_compact(understood)
        return line if read_action(line) == understood else actions.show(understood)

    def answer(self, action: str, after: Observation) -> str:
        """The answer of the workflow's last run, normalised; "" where it is longer than the view shows."""
        view: CanvasView = after.view
        said = view.run.answer if view.run else ""
        if not said or len(said) > self.options.shown_characters:
            return ""
        return kept_answer(plain(said, Problem(view.problem, view.kind, options=dict(view.options))))

    def structured_outputs(self, style: Style) -> Mapping[str, Any]:
        """A grammar of valid actions for vLLM, without thinking or text before them."""
        operators, backends = self.options.on_offer(), self.options.other_backends
        return actions.schema(operators, backends, compact=style == "compact")

    def vocabulary(self) -> tuple[str, ...]:
        backends = [f"@{name}" for name in self.options.backends]
        names = [*NAMES, *self.options.on_offer(), *backends, *exercises.vocabulary()]
        return tuple(dict.fromkeys([*actions.WORDS, *_SIGNS, *_KINDS, *_STATUSES, *_PHRASES, *_IDS, *_PLACES, *names]))

    def expert(self, env: CanvasEnv) -> str:
        """The next step of the workflow that the expert of option `expert` wants for this problem; then `finish`."""
        problem, expert = env.problem, env.options.expert
        steps = experts.wanted(problem.text, problem.kind, expert, env.options.other_backends)
        action = experts.next_action(steps, env.workflow, env.run, failed_step(env.workflow, env.run))
        if expert == "plain" and action == "finish":
            return experts.habit(problem.text, env.workflow, env.options.other_backends) or action
        return action

    def draw(self, view: CanvasView, trace: Any = None) -> str:
        """The workflow as a picture, with the results of its calls."""
        return drawn(trace, self._offered) if trace else ""

    @functools.cached_property
    def _offered(self) -> dict[str, type[Operator]]:
        return self.options.on_offer()  # cached: it searches all installed packages for entry points

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """An edit of any kind, or now and then `finish`."""
        return experts.random_edit(observation.view, self.options.other_backends, rng)


def _generated_task(kinds: tuple[str, ...], split: Split, data_seed: int, index: int) -> Task:
    """The index-th exercise of a split, generated on demand."""
    made = exercises.generate(np.random.default_rng([data_seed, index]), kinds, split)
    return Task(f"canvas-{split}-{data_seed}-{index}", "canvas", index, exercises.payload(made), kind=made.source)


def _row_task(file: Path, packages: tuple[str, ...], rows: Sequence[int], order: np.ndarray, index: int) -> Task:
    row = rows[order[index]]
    record = records(str(file), packages)[row]
    payload = {"file": str(file), "row": row, "content": content_of(record)}
    payload |= {"packages": list(packages)} if packages else {}
    return Task(f"canvas-{file.stem}-{row}", "canvas", row, payload, kind=record.source)


def _split_rows(path: Path, split: Split, packages: tuple[str, ...]) -> tuple[Path, list[int]]:
    """The file of a split and its rows. A single file is split by content; a folder has a file for each split."""
    if path.is_dir():
        test = path / "test.jsonl"
        file = path / "train.jsonl" if split == "train" else test
        held_out = {alike(record) for record in records(str(test), packages)} if split == "train" else set()
        found = enumerate(records(str(file), packages))
        rows = [row for row, record in found if alike(record) not in held_out]
    else:
        file = path
        found = enumerate(records(str(file), packages))
        sides: dict[str, Split] = {}  # of rows that are alike, the first one decides
        rows = []
        for row, record in found:
            if sides.setdefault(alike(record), exercises.split_of(record.problem.text)) == split:
                rows.append(row)
    if not rows:
        raise WorldError(f"env.options path={str(path)!r} holds no {split} problems: give another file")
    return file, rows
