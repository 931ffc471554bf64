"""Arithmetic: numbers joined by operators, and what they come to."""

from dataclasses import dataclass

import numpy as np

from flowjax.envs.base import Split, WorldError
from flowjax.envs.math.problems import Problem, split_of

MAX_ATTEMPTS = 10_000
OPERATORS = "+-*/"


@dataclass(frozen=True)
class Arithmetic:
    """Options of generated problems: `terms` numbers of 1 to `digits` digits, joined by `operators`.

    Divisions come out even. With * or / a problem is read with the usual precedence.
    """

    digits: int = 2
    terms: int = 2
    operators: str = "+"

    def __post_init__(self):
        if not 1 <= self.digits <= 12:
            raise WorldError(f"env.options digits={self.digits}: give 1 to 12")
        if not 2 <= self.terms <= 8:
            raise WorldError(f"env.options terms={self.terms}: give 2 to 8")
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise WorldError(f"env.options operators={self.operators!r}: give some of {OPERATORS}")


def generate(rng: np.random.Generator, options: Arithmetic, split: Split) -> Problem:
    """A problem of one split.

    Raises:
        WorldError: the options allow hardly any.
    """
    for _ in range(MAX_ATTEMPTS):
        lengths = rng.integers(1, options.digits + 1, size=options.terms)
        numbers = [int(rng.integers(10 ** (int(n) - 1) if n > 1 else 0, 10 ** int(n))) for n in lengths]
        signs = [options.operators[i] for i in rng.integers(len(options.operators), size=options.terms - 1)]
        expression = "".join(f"{sign}{number}" for sign, number in zip(["", *signs], numbers, strict=True))
        value = _evaluate(numbers, signs)
        if value is not None and split_of(question := f"{expression}=?") == split:
            return Problem(question, str(value), expression)
    raise WorldError(f"no problem in {MAX_ATTEMPTS} attempts with {options}: raise digits or terms")


def _evaluate(numbers: list[int], signs: list[str]) -> int | None:
    """The value with the usual precedence; None where a division leaves a rest."""
    products = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            products[-1] *= number
        elif sign == "/":
            if number == 0 or products[-1] % number:
                return None
            products[-1] //= number
        else:
            products.append(-number if sign == "-" else number)
    return sum(products)
