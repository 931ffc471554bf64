"""Candidates of an ensemble: which are the same, whether most agree, and a vote of the backend where they do not."""

import ast
import string
from collections.abc import Sequence

from flowjax.canvas.operators.base import Context, OperatorError
from flowjax.canvas.operators.prompts import prompt, section
from flowjax.canvas.operators.replies import ask_object, object_form, object_schema
from flowjax.canvas.values import Field, Problem, State, Value
from flowjax.grading.code_asserts import parse_quietly
from flowjax.grading.math import plain_form
from flowjax.grading.multiple_choice import chosen
from flowjax.grading.qa import normalise_answer

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


def plain(candidate: str, problem: Problem) -> str:
    """Equal for candidates that are the same program, option, number or words."""
    if problem.kind == "code":
        module = parse_quietly(candidate)
        return candidate.strip() if module is None else ast.dump(module)
    if problem.kind == "choice" and (letter := chosen(candidate, problem.options)):
        return letter
    form = plain_form(candidate)
    return normalise_answer(form) if problem.kind == "qa" and any(map(str.isalpha, form)) else form


def same(a: str, b: str, problem: Problem) -> bool:
    """Whether two candidates are plainly the same."""
    return plain(a, problem) == plain(b, problem)


def groups(candidates: Sequence[str], problem: Problem) -> list[list[str]]:
    """Candidates that are the same, together; in order of first appearance."""
    found: dict[str, list[str]] = {}
    for candidate in candidates:
        found.setdefault(plain(candidate, problem), []).append(candidate)
    return list(found.values())


def majority(candidates: Sequence[str], problem: Problem) -> str | None:
    """What more than half of the candidates say, None where there is no such thing. A single one says it all."""
    largest = max(groups(candidates, problem), key=len)
    return largest[0] if 2 * len(largest) > len(candidates) else None


async def vote(context: Context, inputs: State, choices: Sequence[str], *, seed: int = 0) -> int:
    """The place of the choice that the backend votes for.

    Raises:
        OperatorError: the vote could not be read.
    """
    letters = string.ascii_uppercase[: len(choices)]
    schema = object_schema(choice={"type": "string", "enum": list(letters)})
    listed = "\n\n".join(f"{letter}.\n{text}" for letter, text in zip(letters, choices, strict=False))
    rest = {name: value for name, value in inputs.items() if name != "candidates"}
    messages = prompt(context, rest, f"{object_form(schema)}\n\n{section('Candidates', listed)}")
    found = await ask_object(context, messages, schema, seed=seed)
    return letters.index(found["choice"])


def solved(result: str, problem: Problem) -> dict[str, Value]:
    """The result as the field that the problem's kind wants."""
    return {"code" if problem.kind == "code" else "answer": result}
