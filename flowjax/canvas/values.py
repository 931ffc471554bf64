"""Values that flow between operators: named fields of a few kinds, and the problem that a workflow is run on.

Fields that operators share by name; an operator may add others of its own:

    problem      text   the problem's text, always there
    plan         text   how to go about it                          subproblems  texts  what to solve first
    answer       text   the newest answer                           code         code   the newest program
    candidates   texts  one answer (program) per branch             thought      text   the reasoning behind the answer
    passed       flag   what the newest check found                 feedback     text   why, for whoever revises

Beside them, what a run leaves behind: its answer, and what every node was given, gave, cost and took.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Value = str | bool | tuple[str, ...]
State = Mapping[str, Value]  # field name -> newest value
Kind = Literal["text", "code", "flag", "texts"]  # the Python types: str, str, bool, tuple of str
Message = Mapping[str, str]  # of a chat: {"role": ..., "content": ...}
ProblemKind = Literal["math", "qa", "code", "choice", "general"]


@dataclass(frozen=True, slots=True)
class Field:
    """An input or an output of an operator. An operator fails, in words, where a required input is missing."""

    name: str
    kind: Kind = "text"
    description: str = ""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """Part of a task that a workflow may see. The right answer and hidden tests are not in it.

    `options` are those of a multiple choice, letter -> text; `public_tests` are assert statements that operators may
    run, and `entry_point` the function that they call. `part`: the program is the rest of one that the text begins.
    """

    text: str
    kind: ProblemKind = "general"
    context: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    entry_point: str = ""
    public_tests: tuple[str, ...] = ()
    part: bool = False


NodeStatus = Literal["ok", "error", "budget", "executor_error"]
RunStatus = Literal["ok", "error", "budget", "executor_error", "empty"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Sum of what was spent. `cost` is in the currency of the backend's price list; cached answers cost nothing."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.sampled_tokens + other.sampled_tokens,
            self.cost + other.cost,
        )


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of one call. `turn` counts its runs from 1, as a loop repeats it; `cached` ones were not run again.

    "budget": it was cut short, or would have been; "executor_error": its backend was away. `error` says why it did not
    come to a good end.
    """

    node_id: str
    operator: str
    status: NodeStatus
    turn: int = 1
    cached: bool = False
    inputs: State = field(default_factory=dict)
    outputs: State = field(default_factory=dict)
    usage: Usage = Usage()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Start or end of one call of a run, or a reply to it on its way, as it happens.

    `node_run` is what the end leaves in the trace; `text` is the reply so far. Calls side by side start and end in
    whatever order they do. `seconds` are since the start of the run.
    """

    node_id: str
    operator: str
    turn: int
    seconds: float
    node_run: NodeRun | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """A run. `answer` is the state's newest answer (its newest code for a code problem), "" if there is none.

    `status` is "error" when a node outside a parallel failed, "budget" when a limit ended the run, "executor_error"
    when a backend or the sandbox was away, which is no fault of the workflow; the answer is then the last there was,
    and `error` says what happened. "empty" is a workflow without calls. `trace` has the calls that were reached, in
    reading order; those that were not are not in it. `unanswered_s` is how long the oldest request had waited that the
    run's end cut off (a program: beyond the time that is its own).
    """

    answer: str
    status: RunStatus
    state: State
    trace: tuple[NodeRun, ...]
    usage: Usage
    seconds: float
    error: str = ""
    unanswered_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Form of a run that `json.dumps` takes: its fields, those of its calls in `trace`, and `errors`."""
        return {**dataclasses.asdict(self), "errors": self.errors}

    @property
    def errors(self) -> tuple[str, ...]:
        """Messages of what went wrong in the run's calls, also in those that others stood in for; and of a run that
        ended before any call."""
        found = tuple(f"{node.node_id} {node.operator}: {node.error}" for node in self.trace if node.error)
        return found or ((self.error,) if self.error else ())


def sendable(value: Value) -> Value:
    """The value with halves of surrogate pairs replaced: they are no text that can be sent, hashed or written."""
    if isinstance(value, tuple):
        return tuple(text.encode(errors="replace").decode() for text in value)
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def in_thinking(text: str) -> bool:
    """True for a reply that ends before its thoughts do, wherever they began: there is no answer in it."""
    return text.rfind("<think>") > text.rfind("</think>")
