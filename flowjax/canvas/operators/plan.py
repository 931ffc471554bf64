"""Plan: how to go about the problem."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, prompt
from flowjax.canvas.operators.replies import visible
from flowjax.canvas.values import Field, State, Value


class Plan(Operator):
    name = "Plan"
    description = "thinks out how to go about the problem, step by step, without solving it"
    role = "planner"
    inputs = (PROBLEM, *(field for field in HINTS if field.name not in ("plan", "candidates")))
    outputs = (Field("plan", "text", "all steps of the plan"),)
    instruction = (
        "Plan how to solve this problem: name what is asked, what is given and what is easily overlooked, and then "
        "list numbered steps that lead to the answer. Do not carry them out."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        plan = visible(await context.ask(prompt(context, inputs)))
        if not plan:
            raise OperatorError("the backend's plan is empty")
        return {"plan": plan}
