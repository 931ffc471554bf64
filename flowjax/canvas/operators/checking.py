"""What operators that check a solution have in common."""

from flowjax.canvas.operators.base import OperatorError
from flowjax.canvas.operators.replies import object_schema
from flowjax.canvas.values import Field, State

CHECKED = (
    Field("answer", "text", "the answer to check", required=False),
    Field("code", "code", "the program to check", required=False),
)
VERDICT = (
    Field("passed", "flag", "whether the check passed"),
    Field("feedback", "text", "what was found, for whoever revises"),
)
VERDICT_SCHEMA = object_schema(feedback={"type": "string"}, passed={"type": "boolean"})


def require_solution(inputs: State) -> None:
    """Refuse to go on without an answer or a program.

    Raises:
        OperatorError: there is neither.
    """
    if not inputs.get("answer") and not inputs.get("code"):
        raise OperatorError("there is neither an answer nor a program yet: put a solving operator before this one")
