"""Aggregate: one answer made of several."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.candidates import CANDIDATES, groups, read_candidates, solved
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, SOLUTION, prompt, solution_form
from flowjax.canvas.operators.replies import ask_solution
from flowjax.canvas.values import Field, State, Value


class Aggregate(Operator):
    name = "Aggregate"
    description = "puts the candidates of a parallel together into one answer, which may be a new one"
    role = "combiner"
    inputs = (PROBLEM, CANDIDATES, *(field for field in HINTS if field.name in ("plan", "subproblems")))
    outputs = (Field("thought", "text", "the reasoning", required=False), *SOLUTION)
    instruction = (
        "Put the candidates together into one answer: keep what they agree on, and where they differ, take what the "
        "problem supports."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        candidates = read_candidates(inputs)
        if len(groups(candidates, context.problem)) == 1 and "subproblems" not in inputs:
            return solved(candidates[0], context.problem)
        return await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))
