"""Custom: whatever the instruction says."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, SOLUTION, prompt, solution_form
from flowjax.canvas.operators.replies import answer_of, program_of, visible
from flowjax.canvas.values import State, Value


class Custom(Operator):
    name = "Custom"
    description = "does what its instruction says, with all that is known so far; the most flexible one"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = SOLUTION
    instruction = "Solve this problem carefully, step by step."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """The reply's answer line or program; where there is none, the instruction asked for text, and that it is."""
        reply = visible(await context.ask(prompt(context, inputs, solution_form(context.problem))))
        if not reply:
            raise OperatorError("the backend's reply is empty")
        if context.problem.kind == "code" and (program := program_of(reply)) is not None:
            return {"code": program}
        return {"answer": answer_of(reply) or reply}
