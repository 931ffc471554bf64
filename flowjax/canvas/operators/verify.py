"""Verify: an independent solution, compared with the newest one."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.candidates import same
from flowjax.canvas.operators.checking import CHECKED, VERDICT, VERDICT_SCHEMA, require_solution
from flowjax.canvas.operators.prompts import PROBLEM, prompt, solution_form
from flowjax.canvas.operators.replies import answer_of, ask_object, object_form, program_of, visible
from flowjax.canvas.values import State, Value


class Verify(Operator):
    name = "Verify"
    description = "solves the problem anew without seeing the newest solution, then says whether that one holds"
    role = "checker"
    inputs = (PROBLEM, *CHECKED)
    outputs = VERDICT
    instruction = "Check by an independent solution of your own."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """One call where the independent answer is the same, two where they have to be compared."""
        require_solution(inputs)
        problem = context.problem
        alone = {"problem": inputs.get("problem", problem.text)}
        reply = visible(await context.ask(prompt(context, alone, solution_form(problem))))
        result = (program_of if problem.kind == "code" else answer_of)(reply)
        proposed = inputs.get("code" if problem.kind == "code" else "answer")
        if result and isinstance(proposed, str) and same(proposed, result, problem):
            return {"passed": True, "feedback": "An independent solution gives the same."}
        form = (
            "The solution above is proposed. An independent one, which may be wrong itself, gives:\n\n"
            f"{reply}\n\nFind out where they differ and which is right, by the problem alone. "
            f"passed: whether the proposed one is right; feedback: why.\n{object_form(VERDICT_SCHEMA)}"
        )
        found = await ask_object(context, prompt(context, inputs, form), VERDICT_SCHEMA)
        return {"passed": found["passed"], "feedback": found["feedback"]}
