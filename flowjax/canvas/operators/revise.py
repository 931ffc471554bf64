"""Revise: the answer or the program, made better by feedback."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.checking import CHECKED, require_solution
from flowjax.canvas.operators.prompts import PROBLEM, SOLUTION, prompt, solution_form
from flowjax.canvas.operators.replies import ask_solution
from flowjax.canvas.values import Field, State, Value


class Revise(Operator):
    name = "Revise"
    description = "mends the newest answer or program as the feedback of a check says"
    role = "reviser"
    inputs = (PROBLEM, *CHECKED, Field("feedback", "text", "what a check found", required=False))
    outputs = (Field("thought", "text", "the reasoning", required=False), *SOLUTION)
    instruction = (
        "Mend the solution below: put right what the feedback names, keep what is right, and where there is no "
        "feedback, look for the mistakes yourself."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        require_solution(inputs)
        return await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))
