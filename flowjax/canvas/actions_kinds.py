"""What a policy can do with the canvas in one turn."""

from dataclasses import dataclass, field

from flowjax.canvas.graph import Node

DEFAULT_LOOP_COUNT = 3  # of an added loop that names none


@dataclass(frozen=True, slots=True)
class Add:
    """A piece into a place (`flowjax.canvas.edits.add`): `into` a node, "" at the top, at a position, None the end."""

    piece: Node
    into: str = ""
    position: int | None = None
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Delete:
    """A node, at any depth."""

    target: str
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Modify:
    """A call's operator and backend, or a loop's count; "" and None leave as is. `prompt` is for the new operator."""

    target: str
    operator: str = ""
    backend: str = ""
    count: int | None = None
    prompt: str = ""
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class SetPrompt:
    """A call's instruction."""

    target: str
    prompt: str
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """The canvas is done. `answer` is what the policy believes; what counts is the run's."""

    answer: str = ""
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A response that is no action. `reason` says what is wrong and what would be right."""

    reason: str


Action = Add | Delete | Modify | SetPrompt | Finish
