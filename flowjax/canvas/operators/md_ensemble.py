"""MdEnsemble: several votes over shuffled candidates. After Medprompt (Nori et al. 2023, arXiv 2311.16452)."""

import random
from collections import Counter
from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.candidates import CANDIDATES, groups, read_candidates, solved, vote
from flowjax.canvas.operators.prompts import PROBLEM, SOLUTION
from flowjax.canvas.values import State, Value

VOTES = 5


class MdEnsemble(Operator):
    name = "MdEnsemble"
    description = f"lets the backend vote {VOTES} times over the candidates of a parallel, each time in another order"
    role = "combiner"
    inputs = (PROBLEM, CANDIDATES)
    outputs = SOLUTION
    instruction = "Choose the candidate that solves the problem best."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """No vote where the candidates agree. A vote that cannot be read does not count; ties go to the first."""
        candidates = read_candidates(inputs)
        choices = [group[0] for group in groups(candidates, context.problem)]
        if len(choices) == 1:
            return solved(choices[0], context.problem)
        votes: Counter[int] = Counter()
        unread: OperatorError | None = None
        for seed in range(VOTES):
            order = random.Random(seed).sample(range(len(choices)), len(choices))
            try:
                votes[order[await vote(context, inputs, [choices[i] for i in order], seed=seed)]] += 1
            except OperatorError as error:
                unread = error
        if not votes:
            raise OperatorError(f"none of {VOTES} votes could be read: {unread}")
        return solved(choices[max(sorted(votes), key=votes.__getitem__)], context.problem)
