"""ScEnsemble: self-consistency, what most candidates say. After Wang et al. 2022 (arXiv 2203.11171)."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.candidates import CANDIDATES, groups, majority, read_candidates, solved, vote
from flowjax.canvas.operators.prompts import PROBLEM, SOLUTION
from flowjax.canvas.values import State, Value


class ScEnsemble(Operator):
    name = "ScEnsemble"
    description = "takes what most candidates of a parallel say; the backend votes only where none has a majority"
    role = "combiner"
    inputs = (PROBLEM, CANDIDATES)
    outputs = SOLUTION
    instruction = "Choose the candidate that agrees best with the others and with the problem."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        candidates = read_candidates(inputs)
        result = majority(candidates, context.problem)
        if result is None:
            choices = [group[0] for group in groups(candidates, context.problem)]
            result = choices[await vote(context, inputs, choices)]
        return solved(result, context.problem)
