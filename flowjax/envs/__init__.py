"""Worlds that agents act in.

A world is what tasks are played in: one class for its environments, tasks, prompts and the reading of replies.
"""

import contextlib
import dataclasses
import functools
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import numpy as np

from flowjax.fields import declared_types, load_module, option_problems, with_tuples
from flowjax.grading.answers import between_tags, without_thoughts
from flowjax.records import Status, Task, state_key

if TYPE_CHECKING:
    import grain
    from ml_collections import ConfigDict

Split = Literal["train", "held_out"]
Style = Literal["instruct", "compact"]
Context = Literal["window", "append"]  # each turn has its own prompt, or one conversation grows turn by turn
Message = Mapping[str, str]  # {"role": ..., "content": ...}


RUN_VARIABLE = "FLOWJAX_RUN"  # environment variable that names the run's folder to processes that hold environments

ENGINES_VARIABLE = "FLOWJAX_ENGINES"  # the same for the addresses of its engines, by base model, as JSON


class WorldError(ValueError):
    """A world, or one of its options, cannot be used; the message names it and the remedy."""


class NotReady(WorldError):
    """Files, a package or a program that a world needs are not on this machine. The message says how to get them."""


@contextlib.contextmanager
def naming_options_of(source: str, config: "ConfigDict") -> Iterator[None]:
    """Make errors about options that a source of tasks sets itself name `env.sources.<source>.options`; options that
    all sources share stay `env.options`."""
    local = config.env.sources[source].get("options", {}) if source else ()
    try:
        yield
    except WorldError as error:
        refused = re.split(r"[:;(]", str(error))[0]  # the option, and not the remedy after it
        if not any(re.search(rf"\b{re.escape(name)}\b", refused) for name in local):
            raise
        raise type(error)(str(error).replace("env.options", f"env.sources.{source}.options")) from error


def check_characters(row: str, *texts: str) -> None:
    """Check that the texts of a row of data can be encoded. JSON can spell a lone surrogate, which UTF-8 cannot hold.

    Raises:
        WorldError: there is one.
    """
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise WorldError(f"{row} has {half!r}, half a surrogate pair and no character: correct or remove it") from error


def is_refusal(error: Exception) -> bool:
    """True for flowjax's own errors with a message for users. Others come from faults in modules of the user."""
    return isinstance(error, ValueError) and any(kind.__module__.startswith("flowjax.") for kind in type(error).__mro__)


class EnvDied(RuntimeError):
    """The environment of an episode is gone; `status` becomes that of the episode's trajectory."""

    def __init__(self, message: str, status: Status):
        super().__init__(message)
        self.status: Status = status


@dataclass(frozen=True, slots=True)
class Observation:
    """A view of what the agent may see, and the 64-bit key of the canonical state behind it.

    `view` is an instance of the world's `View`. Free-text actions are listed among the legal ones as templates, for
    example `search[<words>]`.
    """

    view: Any
    legal_actions: tuple[str, ...]
    state_key: int

    @property
    def text(self) -> str:
        """The view itself, in a world whose views are text."""
        assert isinstance(self.view, str), f"{type(self.view).__name__} is worded by the world's prompt"
        return self.view


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one action. `outcome` names the world's `OUTCOMES`, up to date after every step.

    `trace` is kept for people who read the episode, and for `World.draw`: texts, numbers, lists and maps of them.
    """

    observation: Observation
    reward: float
    terminal: bool
    valid: bool
    outcome: Mapping[str, float] = field(default_factory=dict)
    trace: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Past:
    """An earlier turn: its view, and its action, "" where the reply named none. `turn` counts from 1."""

    turn: int
    view: Any
    action: str


History = Sequence[Past]


class Env(Protocol):
    """One environment. Equal task, seed and actions give equal answers, in every process."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: str) -> Step:
        """Take `action`. One that is not legal ("" stands for an unreadable reply) is answered with `valid=False`."""
        ...


class RemoteEnv(Protocol):
    """An environment in another process, as an episode uses it. Its calls raise `EnvDied` when it is gone."""

    async def reset(self, task: Task, seed: int) -> Observation: ...

    async def step(self, action: str) -> Step: ...


@dataclass(frozen=True)
class NoOptions:
    """Options of a world without any."""


class World(ABC):
    """A world with its options. A subclass needs `env` and `tasks`; the rest has defaults.

    Making one reads its options and nothing else: every process of a run makes one, most of them only for its prompts.
    """

    OUTCOMES: ClassVar[tuple[str, ...]] = ("success",)
    COUNTS: ClassVar[tuple[str, ...]] = ()
    """Outcomes that are no shares of 1, such as counts and times: intervals of shares do not apply to them."""
    STEPS_WAIT: bool = False
    """True where steps wait for something outside the process, such as a server. Environments of one process then step
    concurrently, in threads, and must bound their waiting themselves: the pool sets no deadline for them. A world in
    which this depends on options sets it in `__init__`."""
    OPENS_FAST: ClassVar[bool] = False
    """True in a shipped world that needs no time to reset a task of a user's files: a launch measures first prompts."""
    Options: ClassVar[type] = NoOptions
    """A frozen dataclass, `config.env.options`. It may refuse values in `__post_init__` with a WorldError."""
    View: ClassVar[type] = str
    """Type of what an agent sees: text, or a frozen dataclass of numbers, texts, tuples and dataclasses of these."""

    def __init__(self, **options: Any):
        """Raises:
        WorldError: an option is unknown, or has a value that it cannot have.
        """
        kind = type(self)
        declared = declared_types(kind.Options)
        for problem in option_problems("env.options", options, declared, kind.__name__):
            raise WorldError(problem)
        try:
            self.options: Any = kind.Options(**{name: with_tuples(declared[name], options[name]) for name in options})
        except Exception as error:  # a user's Options may raise anything
            if is_refusal(error):
                raise
            why = f"{type(error).__name__}: {error}"
            raise WorldError(
                f"env.options is {options}, which {kind.__name__} does not take ({why}): change it"
            ) from error

    @abstractmethod
    def env(self) -> Env:
        """An environment.

        Raises:
            NotReady: this machine lacks something that it needs.
        """

    @abstractmethod
    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """All tasks of a split.

        All have the same `Task.world`: workers state by it which tasks they can play. A task that is held out under one
        data seed must not be a training task under another.
        """

    def longest_step_s(self) -> float:
        """Seconds after which a step ends by itself; `config.env.step_timeout_s` must not be shorter. 0: no limit."""
        return 0.0

    def most_turns(self) -> int:
        """Turns after which an episode ends by itself; `config.env.max_turns` must not be fewer. 0: no limit."""
        return 0

    def asked_bases(self) -> Mapping[str, int]:
        """Base models of the run that environments send requests to, with the most tokens of a reply."""
        return {}

    def lessons(self, tasks: Any, rng: np.random.Generator) -> Iterator[tuple[list[Message], str]]:
        """Requests of environments to `asked_bases` in training tasks, with the right replies, without end: training
        data of a nano base model.

        Raises:
            WorldError: there are none.
        """
        raise WorldError(f"{type(self).__name__} has no lessons() for a nano base that it asks itself: {_NO_NANO}")

    def lesson_pieces(self) -> tuple[str, ...]:
        """Vocabulary of `lessons`: the pieces that requests and replies are split into (`flowjax.models.nano`).

        Raises:
            WorldError: there is none.
        """
        raise WorldError(f"{type(self).__name__} has no lesson_pieces() for a nano base: {_NO_NANO}")

    def without_engines(self) -> "World":
        """The world to make base models in, when the run's engines do not exist yet."""
        return self

    def obstacles(self) -> Iterator[str]:
        """Reasons why this machine cannot play now, found by asking other machines, such as endpoints.

        Called once before a run starts, and not by its processes.
        """
        yield from ()

    # Only here is text made from data; no code parses it back.

    def instruct(self, observation: Observation, history: History) -> str:
        """Prompt of a language model: every turn's in window mode, the first turn's in append mode."""
        parts = [f"Turn {past.turn}: {past.action or 'no legal action'}" for past in history]
        actions = "\n".join(observation.legal_actions)
        parts += [_plain(observation.view), f"Your actions are:\n{actions}"]
        return "\n\n".join([*parts, "Give one of them inside <action> </action>."])

    def compact(self, observation: Observation, history: History) -> str:
        """Prompt of a nano model, in words of `vocabulary`."""
        return _plain(observation.view)

    def prompt(self, observation: Observation, history: History, style: Style) -> list[Message]:
        """The whole prompt of a turn as messages."""
        return user_says((self.compact if style == "compact" else self.instruct)(observation, history))

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        """Append mode: the messages after an action, which continue the conversation."""
        return self.prompt(observation, (), style)

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        """The expert's reply that names an action, one of the `legal` ones; `parse_action` reads it back."""
        return action if style == "compact" else f"<action>{action}</action>"

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        """The action that a reply names, None where it is unreadable or not legal."""
        return tagged_action(reply, legal)

    def read(self, reply: str, legal: tuple[str, ...], style: Style) -> tuple[str, bool]:
        """The action that a reply to a prompt of this style names, "" for none, and whether the reply may be valid."""
        return self.parse_action(reply, legal) or "", self.well_formed(reply)

    def answer(self, action: str, after: Observation) -> str:
        """The episode's answer `after` an action, normalised so that equal answers are equal texts; "" for none.

        Evaluations take the majority of several episodes' answers by it (maj@k).
        """
        return ""

    def well_formed(self, reply: str) -> bool:
        """False where a reply cannot count as valid. The action that it names is carried out all the same."""
        return True

    def draw(self, view: Any, trace: Any = None) -> str:
        """SVG of a view for people, "" where the world has no picture. `trace` is of the step that led to the view."""
        return ""

    def structured_outputs(self, style: Style) -> Mapping[str, Any]:
        """Argument of vLLM's `structured_outputs` that makes it sample legal replies only; empty for none."""
        return {}

    def expert(self, env: Any) -> str:
        """Next action of a scripted expert that sees the true state of `env`; makes the demonstrations of nano models.

        Raises:
            WorldError: there is none.
        """
        raise WorldError(f"{type(self).__name__} has no expert(), so there is nothing to imitate: {_NO_NANO}")

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """A legal action at random, free text filled in."""
        return observation.legal_actions[rng.integers(len(observation.legal_actions))]

    def vocabulary(self) -> tuple[str, ...]:
        """Every word, as whitespace splits them, of compact prompts and of the replies to them.

        Raises:
            WorldError: there is none.
        """
        raise WorldError(f"{type(self).__name__} has no vocabulary() of compact prompts: {_NO_NANO}")


_NO_NANO = "write one, or take a base model that exists (config.model.path) and config.model.nano None"


_LONGEST_ANSWER = 200  # characters that are kept as they are


def kept_answer(answer: str) -> str:
    """An answer as evaluations keep it: only compared for equality, so a long text is replaced by its hash."""
    return answer if len(answer) <= _LONGEST_ANSWER else f"{state_key(answer):016x}"


def user_says(content: str) -> list[Message]:
    """Messages of one user's text."""
    return [{"role": "user", "content": content}]


def with_more(messages: Sequence[Message], text: str) -> list[Message]:
    """Messages with more text at the end of the last one."""
    *before, last = messages
    return [*before, {**last, "content": last["content"] + text}]


def _plain(view: Any) -> str:
    """Default text of a view: the view itself if it is text, else a line for each field."""
    if isinstance(view, str):
        return view
    return "\n".join(f"{part.name}: {getattr(view, part.name)}" for part in dataclasses.fields(view))


_REMEDY = "give package.module:Class, for example flowjax.envs.sokoban:Sokoban"


def find_world(path: str) -> type[World]:
    """The world class at `package.module:Class`.

    Raises:
        WorldError: there is none, or it lacks what every world has.
    """
    module_name, _, name = path.partition(":")
    module = load_module("env.name", path, WorldError, _REMEDY)
    world = getattr(module, name, None)
    if not isinstance(world, type) or not issubclass(world, World):
        found = [each for each, value in vars(module).items() if isinstance(value, type) and issubclass(value, World)]
        worlds = [each for each in found if each != World.__name__ and not each.startswith("_")]
        there = f"it has {', '.join(worlds)}" if worlds else "a world is a subclass of World"
        raise WorldError(f"env.name is {path!r}, but {module_name} has no world {name!r} ({there}): {_REMEDY}")
    for problem in _world_problems(world):
        raise WorldError(f"env.name is {path!r}, but {problem}")
    return world


def _world_problems(world: type[World]) -> typing.Iterator[str]:
    if missing := sorted(getattr(world, "__abstractmethods__", ())):
        yield f"{world.__name__} lacks {', '.join(missing)}: write {'it' if len(missing) == 1 else 'them'}"
    outcomes = world.OUTCOMES
    if not isinstance(outcomes, tuple) or "success" not in outcomes:
        yield f'its OUTCOMES are {outcomes!r}: give a tuple of names with "success" among them'
    if not dataclasses.is_dataclass(world.Options):
        yield f"its Options are {world.Options!r}: make them a frozen dataclass"
    if world.View is not str and not dataclasses.is_dataclass(world.View):
        yield f"its View is {world.View!r}: make it a frozen dataclass, or leave it out for views that are text"


@functools.cache  # made once for a type, since every step asks for it
def view_reader(kind: Any) -> Callable[[Any], Any]:
    """Decoder of a view, or of a value in one, by annotated type: msgpack makes lists of dataclasses and tuples."""
    if dataclasses.is_dataclass(kind):
        types_of = typing.get_type_hints(kind)
        readers = [view_reader(types_of[part.name]) for part in dataclasses.fields(kind)]
        make: Any = kind
        return lambda values: make(*(read(value) for read, value in zip(readers, values, strict=True)))
    arguments = get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        [some] = [each for each in arguments if each is not type(None)][:1]
        read_some = view_reader(some)
        return lambda value: None if value is None else read_some(value)
    if typing.get_origin(kind) is not tuple:
        return _as_it_is
    if arguments[1:] == (...,):
        read_item = view_reader(arguments[0])
        return tuple if read_item is _as_it_is else lambda values: tuple(map(read_item, values))
    readers = [view_reader(each) for each in arguments]
    return lambda values: tuple(read(value) for read, value in zip(readers, values, strict=True))


def view_values(view: Any) -> Any:
    """A view as plain data, dataclasses as lists of their fields' values; `view_reader` reads it back."""
    if isinstance(view, str | int | float):  # most values: first, for speed
        return view
    if isinstance(view, list | tuple):
        return [view_values(item) for item in view]
    if dataclasses.is_dataclass(view):
        return [view_values(getattr(view, part.name)) for part in dataclasses.fields(view)]
    return view


def _as_it_is(value: Any) -> Any:
    return value


def check_split(split: str) -> None:
    """Check the name of a split.

    Raises:
        WorldError: there is no such split.
    """
    if split not in get_args(Split):
        raise WorldError(f"split is {split!r}: give {' or '.join(get_args(Split))}")


def tagged_action(reply: str, legal: tuple[str, ...]) -> str | None:
    """The legal action that a reply names, in any case: inside its last `<action>` tags, or the whole reply if it has
    no tags. None where it names none, or where several legal actions equal it but for case and none exactly."""
    text = between_tags(without_thoughts(reply), "action")
    if text is None:
        return None
    action = text.strip()
    for said in (action, action.lower()):
        if said in legal:
            return said
    for said in (action, action.strip(" .*`'\"")):  # exactly, then without punctuation and Markdown
        meant = [each for each in legal if each.lower() == said.lower()]
        if len(meant) == 1:
            return meant[0]
    return None
