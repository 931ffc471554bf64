"""Values that flow between operators: named fields of a few kinds, and the problem that a workflow is run on.

Fields that operators share by name; an operator may add others of its own:

    problem      text   the problem's text, always there
    plan         text   how to go about it                          subproblems  texts  what to solve first
    answer       text   the newest answer                           code         code   the newest program
    candidates   texts  one answer (program) per branch             thought      text   the reasoning behind the answer
    passed       flag   what the newest check found                 feedback     text   why, for whoever revises

And the result of a run: its answer, and for every node its inputs, outputs, usage and seconds.
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
    """An input or an output of an operator. A call fails, with a message, where a required input is missing."""

    name: str
    kind: Kind = "text"
    description: str = ""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """The part of a task that a workflow may see. The right answer and hidden tests are not in it.

    `options` are those of a multiple choice, letter -> text; `public_tests` are assert statements that operators may
    run, and `entry_point` the function that they call. `part`: the wanted program continues one that `text` begins.
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
    """Usage of backends. `cost` is in the currency of the backend's price list; cached answers cost nothing."""

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
    """One run of one call. `turn` counts the call's runs from 1, since a loop repeats it; `cached` ones did not run.

    Status "budget": a limit stopped it, or kept it from starting; "executor_error": its backend was away. `error` says
    why it has no outputs.
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
    """Start or end of one call of a run, or its backend's reply so far, as it happens.

    `node_run` is the call's entry in the trace, at its end; `text` is the reply so far. Parallel calls start and end in
    any order. `seconds` are since the start of the run.
    """

    node_id: str
    operator: str
    turn: int
    seconds: float
    node_run: NodeRun | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """Result of a run. `answer` is the state's newest answer (its newest code for a code problem), "" if there is none.

    `status` is "error" when a node outside a parallel failed, "budget" when a limit ended the run, "executor_error"
    when a backend or the sandbox was away, which is no fault of the workflow; the answer is then the last one before
    that, and `error` says what happened. "empty" is a workflow without calls. `trace` has the calls that were reached,
    in reading order, and no others. `unanswered_s` is the longest wait of a request that the end of the run cancelled
    (of a program: beyond its own time limit).
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
        """The run as plain data for `json.dumps`: its fields, its calls' fields in `trace`, and `errors`."""
        return {**dataclasses.asdict(self), "errors": self.errors}

    @property
    def errors(self) -> tuple[str, ...]:
        """Messages of all calls that failed, also where another branch made up for it; where there is none, the run's
        `error`, as of a run that ended before any call."""
        found = tuple(f"{node.node_id} {node.operator}: {node.error}" for node in self.trace if node.error)
        return found or ((self.error,) if self.error else ())


def sendable(value: Value) -> Value:
    """The value with lone surrogates replaced: UTF-8 lacks them, so they cannot be sent, hashed or written."""
    if isinstance(value, tuple):
        return tuple(text.encode(errors="replace").decode() for text in value)
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def in_thinking(text: str) -> bool:
    """True for a reply that ends inside its thinking, wherever that began: there is no answer in it."""
    return text.rfind("<think>") > text.rfind("</think>")
