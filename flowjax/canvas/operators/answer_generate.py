"""AnswerGenerate: reasoning, then a short answer."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, SOLUTION, prompt, solution_form
from flowjax.canvas.operators.replies import ask_solution
from flowjax.canvas.values import Field, State, Value


class AnswerGenerate(Operator):
    name = "AnswerGenerate"
    description = "reasons aloud and then states a short answer"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = (Field("thought", "text", "the reasoning", required=False), *SOLUTION)
    instruction = "Think about this problem step by step, and then state the answer as shortly as you can."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        return await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))
