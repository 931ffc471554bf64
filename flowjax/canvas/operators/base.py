"""Operators: one class each that says what it reads, what it writes and how it works."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from flowjax.canvas.values import Field, Message, Problem, State, Value
from flowjax.grading.code import Suite, Verdict
from flowjax.grading.sandbox import ProgramResult

Role = Literal["planner", "solver", "checker", "reviser", "combiner", "formatter"]


class OperatorError(RuntimeError):
    """An operator that cannot do its work; the message is what the policy reads."""


class Context(Protocol):
    """Interface that the interpreter lends an operator for one run of it."""

    @property
    def problem(self) -> Problem: ...

    @property
    def instruction(self) -> str:
        """The call's instruction, or else the operator's own."""
        ...

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        seed: int = 0,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        """The backend's answer. Counts against the budget; `seed` is added to the call's own."""
        ...

    async def execute(self, program: str, stdin: bytes = b"") -> ProgramResult:
        """A program's run in the sandbox."""
        ...

    async def judge(self, program: str, suite: Suite) -> Verdict:
        """The program's verdict on tests: `flowjax.grading.code.judge` in the sandbox that `execute` uses."""
        ...


class Operator(ABC):
    """A kind of step. Subclasses say what they are in class attributes and implement `run`.

    The policy's prompt, the reward, the checks of a graph and the drawing read these attributes; nothing else has to
    know of an operator. `cacheable` is False where equal inputs may give another result.
    """

    name: ClassVar[str]
    description: ClassVar[str]  # one line, for the policy
    role: ClassVar[Role]
    inputs: ClassVar[tuple[Field, ...]]  # read from the state, or as the call binds them
    outputs: ClassVar[tuple[Field, ...]]  # written to the state; a checker writes the flag `passed`
    instruction: ClassVar[str]  # what it is told where the call says nothing
    cacheable: ClassVar[bool] = True

    @abstractmethod
    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """The outputs.

        Raises:
            OperatorError: they cannot be made from these inputs.
            BackendError: the backend has no answer.
        """
