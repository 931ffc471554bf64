"""Options of the canvas world: keyword arguments of `make` and `tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flowjax.canvas.backends.base import Backend
from flowjax.canvas.budget import Budget
from flowjax.canvas.operators.base import Operator
from flowjax.canvas.operators.described import load_descriptions
from flowjax.canvas.operators.registry import ADVERTISED, OperatorRegistryError, load_operators
from flowjax.envs.base import WorldError
from flowjax.envs.canvas.executors import open_executors, price_list
from flowjax.envs.canvas.exercises import KINDS
from flowjax.envs.options import build_options

Expert = Literal["able", "plain"]
OFFLINE = {"kind": "flowjax.envs.canvas.offline:SimulatedSolver"}


@dataclass(frozen=True, slots=True)
class Options:
    """What can be chosen; a wrong value is a `WorldError` that names it."""

    path: str = ""  # file of problems in the published JSONL format, or folder with train.jsonl and test.jsonl
    kinds: Sequence[str] = KINDS  # of generated exercises
    turns: int = 20  # actions of an episode; keep it equal to config.env.max_turns
    operators: Sequence[str] = ()  # names of those on offer; () is every one that is advertised
    extra_operators: Sequence[str] = ()  # further ones, as package.module:Class
    descriptions: str = ""  # file in the published operator.json's format: descriptions, and operators made of them
    backends: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"offline": OFFLINE})
    default_backend: str = ""  # who answers calls that name nobody; "" is the first
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
    lenient: bool = False  # mend actions that are nearly right, as the published parser does, and count them
    hints: bool = False  # tell the next operator after each run, as the published system does
    expert: Expert = "able"  # plain: the demonstrations are of mostly simple workflows
    allow_no_isolation: bool = False  # run programs where this machine cannot isolate them

    def __post_init__(self):
        if self.expert not in get_args(Expert):
            raise WorldError(f"env.options expert={self.expert!r}: use one of {', '.join(get_args(Expert))}")
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise WorldError(f"env.options kinds={unknown[0]!r}: use some of {', '.join(KINDS)}")
        if not self.kinds:
            raise WorldError(f"env.options kinds is empty: use some of {', '.join(KINDS)}")
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
    def budget(self) -> Budget:
        """Of an episode."""
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
        """Names and prices of the backends for the policy, "" where there is one."""
        return price_list(self.backends, self.first_backend)


def read_options(options: Mapping[str, Any]) -> Options:
    """Options of keyword arguments; see `build_options`."""
    return build_options(Options, options, "the canvas")
