"""Decompose: the problem in smaller ones."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, prompt
from flowjax.canvas.operators.replies import ask_object, object_form, object_schema
from flowjax.canvas.values import Field, State, Value

_SCHEMA = object_schema(subproblems={"type": "array", "items": {"type": "string"}})


class Decompose(Operator):
    name = "Decompose"
    description = "splits the problem into smaller ones whose answers together give the answer"
    role = "planner"
    inputs = (PROBLEM, HINTS[0])
    outputs = (Field("subproblems", "texts", "what to solve first, in order"),)
    instruction = (
        "Split this problem into two to five smaller ones, each a question that can be answered by itself or from the "
        "answers before it, the last of which answers the whole. Do not answer them."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        found = await ask_object(context, prompt(context, inputs, object_form(_SCHEMA)), _SCHEMA)
        subproblems = tuple(text.strip() for text in found["subproblems"] if text.strip())
        if not subproblems:
            raise OperatorError("the backend found no subproblems")
        return {"subproblems": subproblems}
