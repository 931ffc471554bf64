"""Review: a critical reading of the answer or the program."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.checking import CHECKED, VERDICT, VERDICT_SCHEMA, require_solution
from flowjax.canvas.operators.prompts import PROBLEM, prompt
from flowjax.canvas.operators.replies import ask_object, object_form
from flowjax.canvas.values import Field, State, Value


class Review(Operator):
    name = "Review"
    description = "reads the newest answer or program critically and says what is wrong with it"
    role = "checker"
    inputs = (PROBLEM, Field("plan", "text", "how it was to be done", required=False), *CHECKED)
    outputs = VERDICT
    instruction = (
        "Read the answer (or the program) below critically: does it answer what was asked, and is every step right? "
        "Let it pass unless you find a definite mistake; if you do, say what it is and how to mend it."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        require_solution(inputs)
        messages = prompt(context, inputs, object_form(VERDICT_SCHEMA))
        found = await ask_object(context, messages, VERDICT_SCHEMA)
        return {"passed": found["passed"], "feedback": found["feedback"]}
