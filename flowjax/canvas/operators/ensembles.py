"""Operators that make one answer out of the candidates of a parallel."""

import random
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import (
    HINTS,
    PROBLEM,
    SOLUTION,
    ask_object,
    ask_solution,
    object_form,
    object_schema,
    plain,
    prompt,
    section,
    solution_form,
)
from flowjax.canvas.values import Field, Problem, State, Value

CANDIDATES = Field("candidates", "texts", "answers or programs to choose from, one per branch of a parallel")


def read_candidates(inputs: State) -> tuple[str, ...]:
    """The candidates that say something.

    Raises:
        OperatorError: there are none.
    """
    given = inputs["candidates"]
    candidates = tuple(text for text in given if text.strip()) if isinstance(given, tuple) else ()
    if not candidates:
        raise OperatorError("there are no candidates: put a parallel of solving operators before this one")
    return candidates


def groups(candidates: Sequence[str], problem: Problem) -> list[list[str]]:
    """Candidates that are the same, together; in order of first appearance."""
    found: dict[str, list[str]] = {}
    for candidate in candidates:
        found.setdefault(plain(candidate, problem), []).append(candidate)
    return list(found.values())


def majority(candidates: Sequence[str], problem: Problem) -> str | None:
    """Answer of more than half of the candidates, None where there is no such thing. A single one says it all."""
    largest = max(groups(candidates, problem), key=len)
    return largest[0] if 2 * len(largest) > len(candidates) else None


def _letters(place: int) -> str:
    """A to Z, then AA to AZ and so on, as spreadsheets name their columns."""
    before, last = divmod(place, len(string.ascii_uppercase))
    return (_letters(before - 1) if before else "") + string.ascii_uppercase[last]


async def vote(context: Context, inputs: State, choices: Sequence[str], *, seed: int = 0) -> int:
    """The place of the choice that the backend votes for.

    Raises:
        OperatorError: the vote could not be read.
    """
    letters = [_letters(place) for place in range(len(choices))]
    schema = object_schema(choice={"type": "string", "enum": letters})
    listed = "\n\n".join(f"{letter}.\n{text}" for letter, text in zip(letters, choices, strict=True))
    rest = {name: value for name, value in inputs.items() if name != "candidates"}
    messages = prompt(context, rest, f"{object_form(schema)}\n\n{section('Candidates', listed)}")
    found = await ask_object(context, messages, schema, seed=seed)
    return letters.index(found["choice"])


def solved(result: str, problem: Problem) -> dict[str, Value]:
    """The result as the field that the problem's kind wants."""
    return {"code" if problem.kind == "code" else "answer": result}


class ScEnsemble(Operator):
    """Self-consistency: what most candidates say. After Wang et al. 2022 (arXiv 2203.11171)."""

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


VOTES = 5


class MdEnsemble(Operator):
    """Several votes over shuffled candidates. After Medprompt (Nori et al. 2023, arXiv 2311.16452)."""

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
