"""CustomCodeGenerate: a program in one go, not run."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, code_form, prompt
from flowjax.canvas.operators.replies import program_of
from flowjax.canvas.values import Field, State, Value


class CustomCodeGenerate(Operator):
    name = "CustomCodeGenerate"
    description = "writes a program as its instruction says, and does not run it"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = (Field("code", "code", "the program"),)
    instruction = "Write a Python program that solves this problem."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        reply = await context.ask(prompt(context, inputs, code_form(context.problem)))
        program = program_of(reply)
        if program is None:
            raise OperatorError("the reply has no program in a ```python block")
        return {"code": program}
