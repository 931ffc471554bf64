"""What every world offers, and how one is found by its dotted path."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

import numpy as np

from flowjax.records import Status, Task

if TYPE_CHECKING:
    import grain

Split = Literal["train", "held_out"]
Style = Literal["instruct", "compact"]
Context = Literal["window", "append"]  # each turn a prompt of its own, or one conversation that grows
Message = Mapping[str, str]  # {"role": ..., "content": ...}


RUN_VARIABLE = "FLOWJAX_RUN"  # environment variable that names the run's folder to processes that hold environments

ENGINES_VARIABLE = "FLOWJAX_ENGINES"  # the same for the addresses of its engines, by base model, as JSON


class WorldError(ValueError):
    """A world, or an option of one, that cannot be used; the message names it and the remedy."""


class NotReady(WorldError):
    """What a world needs is not on this machine: its files, a package or a program. The message says how to get it."""


class EnvDied(RuntimeError):
    """The environment of an episode is gone; `status` is what the episode's trajectory gets."""

    def __init__(self, message: str, status: Status):
        super().__init__(message)
        self.status: Status = status


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent may see, and the 64-bit key of the canonical state behind it.

    `view` is an instance of the world module's `View`, a frozen dataclass whose fields hold text, numbers and tuples of
    them, so that the prompt is worded from data; of a world without one it is text.
    """

    view: Any
    legal_actions: tuple[str, ...]
    state_key: int

    @property
    def text(self) -> str:
        """The view of a world whose views are text."""
        assert isinstance(self.view, str), f"{type(self.view).__name__} is worded by the world's prompt"
        return self.view


@dataclass(frozen=True, slots=True)
class Step:
    """The world's answer to one action. `outcome` names the world's `OUTCOMES`, up to date after every step."""

    observation: Observation
    reward: float
    terminal: bool
    valid: bool
    outcome: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Past:
    """An earlier turn: its view, and its action, "" where the reply named none. `turn` counts from 1."""

    turn: int
    observation: Any
    action: str


class Env(Protocol):
    """One environment. Equal task, seed and actions give equal answers, in every process."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: str) -> Step:
        """Take `action`. One that is not legal ("" stands for an unreadable reply) is answered with `valid=False`."""
        ...


class Session(Protocol):
    """An environment as an episode sees it: somewhere else, and it may die (`EnvDied`)."""

    async def reset(self, task: Task, seed: int) -> Observation: ...

    async def step(self, action: str) -> Step: ...


class World(Protocol):
    """The functions of a world module. Options are keyword arguments, the same wherever they are taken.

    Free-text actions stand among the legal ones as templates, for example `search[<words>]`.
    """

    OUTCOMES: tuple[str, ...]

    def make(self, **options: Any) -> Env: ...

    def tasks(self, split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
        """All of them with the same `Task.world`, by which a worker says what it can play."""
        ...

    def expert(self, env: Env) -> str:
        """The next action of a scripted expert that sees the true state."""
        ...

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str: ...

    def vocabulary(self, **options: Any) -> tuple[str, ...]:
        """Every word, as whitespace splits them, of compact prompts and of the replies to them."""
        ...

    def prompt(self, observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
        """The whole prompt of a turn: every turn's in window mode, the first turn's in append mode."""
        ...

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        """Append mode: what is said after an action."""
        ...

    def reply(self, action: str, style: Style) -> str:
        """How the expert words an action; `parse_action` reads it back."""
        ...

    def parse_action(self, reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
        """The action that a reply names, None where it is unreadable or not legal.

        `reference` executes what the published system would, faults included.
        """
        ...


@runtime_checkable
class Constrained(Protocol):
    """A world that can say what its replies look like."""

    def structured_outputs(self, style: Style, **options: Any) -> Mapping[str, Any]:
        """What vLLM's `structured_outputs` takes, so that it samples nothing else."""
        ...


@runtime_checkable
class Formatted(Protocol):
    """A world whose published system asks a format of valid replies, and executes the others all the same."""

    def published_format(self, reply: str) -> bool: ...


_OFFERED = (
    "make",
    "tasks",
    "expert",
    "random_action",
    "vocabulary",
    "prompt",
    "follow_up",
    "reply",
    "parse_action",
)


def load_world(module: str) -> World:
    """The world module at a dotted path.

    Raises:
        WorldError: it cannot be imported, or something that every world offers is missing.
    """
    try:
        world = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise WorldError(
            f"env.module is {module!r}, which cannot be imported ({error}): give the dotted path of a world module, "
            "for example flowjax.envs.sokoban"
        ) from error
    missing = [name for name in _OFFERED if not callable(getattr(world, name, None))]
    outcomes = getattr(world, "OUTCOMES", ())
    if not isinstance(outcomes, tuple) or "success" not in outcomes:
        missing.append('OUTCOMES (a tuple of names with "success" among them)')
    if missing:
        raise WorldError(f"env.module is {module!r}, which lacks {', '.join(missing)}: a world module offers them all")
    return cast(World, world)


def read_reply(world: World, reply: str, legal: tuple[str, ...], *, reference: bool) -> tuple[str, bool]:
    """The action that a reply names ("" for none), and whether the turn may count as valid once it is taken."""
    action = world.parse_action(reply, legal, reference=reference) or ""
    return action, not reference or not isinstance(world, Formatted) or world.published_format(reply)


def tagged_action(reply: str, legal: tuple[str, ...]) -> str | None:
    """The legal action that a reply names: in its last `<action>` pair, or as the whole of a reply without tags."""
    text = reply.lower()
    end = text.rfind("</action>")
    if end >= 0:
        start = text.rfind("<action>", 0, end)
        if start < 0:
            return None
        text = text[start + len("<action>") : end]
    elif "<action>" in text:
        return None
    action = text.strip()
    return action if action in legal else None
