"""Format: the bare final answer."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import PROBLEM, SOLUTION, answer_form, prompt
from flowjax.canvas.operators.replies import answer_of, program_of, visible
from flowjax.canvas.values import Field, Problem, State, Value
from flowjax.grading.math import is_number
from flowjax.grading.multiple_choice import chosen


class Format(Operator):
    name = "Format"
    description = "reduces the newest answer to the bare final answer: a value, a few words, a letter, a program"
    role = "formatter"
    inputs = (
        PROBLEM,
        Field("answer", "text", "the answer in whatever words", required=False),
        Field("code", "code", "the program, for a code problem", required=False),
    )
    outputs = SOLUTION
    instruction = "Copy the final answer out of the solution below. Do not solve the problem again."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """No call where the answer is bare already: a number, an option, a program."""
        problem = context.problem
        if problem.kind == "code":
            return {"code": _program(inputs)}
        answer = str(inputs.get("answer", ""))
        if not answer.strip():
            raise OperatorError("there is no answer yet: put a solving operator before this one")
        if (bare := _bare(answer, problem)) is not None:
            return {"answer": bare}
        form = f"One line: Answer: {answer_form(problem)}"
        reply = await context.ask(prompt(context, {**inputs, "code": ""}, form))
        text = answer_of(reply) or visible(reply)
        if not text or "\n" in text:
            raise OperatorError(f"the backend's final answer is not one line: {text[:200]!r}")
        return {"answer": chosen(text, problem.options) or text}


def _program(inputs: State) -> str:
    for name in ("code", "answer"):
        text = str(inputs.get(name, ""))
        if text and (program := program_of(text) or (text if name == "code" else None)):
            return program
    raise OperatorError("there is no program yet: put an operator that writes code before this one")


def _bare(answer: str, problem: Problem) -> str | None:
    if problem.kind == "choice":
        return chosen(answer, problem.options)
    return answer.strip() if is_number(answer) else None
