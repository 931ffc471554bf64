"""Small functions to write: a value goes through one to three steps. The same problem in English and in a few words.

Solutions are one line of words that whitespace separates, so that a model with a word-level tokenizer can write them:

    int plus 3 then times 2        ->        def f ( x ) : x = x + 3 ; x = x * 2 ; return x
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowjax.envs.base import Split, WorldError
from flowjax.envs.code.problems import CodeProblem
from flowjax.grading.code import CallCase, Suite
from flowjax.records import state_key

HEAD, TAIL, JOIN = "def f ( x ) :", "return x", " ; "
ENTRY = "f"
HELD_OUT_ONE_IN = 8  # functions, by what they compute
_MAX_ATTEMPTS = 1000
_TO_INT = frozenset({"sum", "count", "length"})  # steps after which the value is an integer


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of step. `{n}` stands for its number in the three texts."""

    words: str
    english: str
    statement: str
    apply: Callable[[Any, int], Any]
    numbers: Sequence[int] = (0,)


_SMALL, _FROM_TWO = range(1, 10), range(2, 10)
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "int": (
        Operation("plus {n}", "add {n}", "x = x + {n}", lambda x, n: x + n, _SMALL),
        Operation("minus {n}", "subtract {n}", "x = x - {n}", lambda x, n: x - n, _SMALL),
        Operation("times {n}", "multiply by {n}", "x = x * {n}", lambda x, n: x * n, _FROM_TWO),
        Operation("modulo {n}", "take the remainder by {n}", "x = x % {n}", lambda x, n: x % n, _FROM_TWO),
        Operation("divide {n}", "divide by {n}, rounding down", "x = x // {n}", lambda x, n: x // n, _FROM_TWO),
        Operation("least {n}", "raise it to {n} if it is less", "x = max ( x , {n} )", max, _SMALL),
        Operation("most {n}", "lower it to {n} if it is more", "x = min ( x , {n} )", min, _SMALL),
        Operation("square", "square it", "x = x * x", lambda x, n: x * x),
        Operation("negate", "change its sign", "x = - x", lambda x, n: -x),
        Operation("size", "take its absolute value", "x = abs ( x )", lambda x, n: abs(x)),
    ),
    "list": (
        Operation(
            "each plus {n}",
            "add {n} to every item",
            "x = [ y + {n} for y in x ]",
            lambda x, n: [y + n for y in x],
            _SMALL,
        ),
        Operation(
            "each times {n}",
            "multiply every item by {n}",
            "x = [ y * {n} for y in x ]",
            lambda x, n: [y * n for y in x],
            _FROM_TWO,
        ),
        Operation(
            "above {n}",
            "keep the items above {n}",
            "x = [ y for y in x if y > {n} ]",
            lambda x, n: [y for y in x if y > n],
            _SMALL,
        ),
        Operation(
            "even",
            "keep the even items",
            "x = [ y for y in x if y % 2 == 0 ]",
            lambda x, n: [y for y in x if y % 2 == 0],
        ),
        Operation("reverse", "reverse it", "x = x [ : : - 1 ]", lambda x, n: x[::-1]),
        Operation("sort", "sort it", "x = sorted ( x )", lambda x, n: sorted(x)),
        Operation("drop {n}", "drop the first {n} items", "x = x [ {n} : ]", lambda x, n: x[n:], range(1, 4)),
        Operation("sum", "add up the items", "x = sum ( x )", lambda x, n: sum(x)),
        Operation("count", "count the items", "x = len ( x )", lambda x, n: len(x)),
    ),
    "text": (
        Operation("reverse", "reverse it", "x = x [ : : - 1 ]", lambda x, n: x[::-1]),
        Operation("upper", "write it in upper case", "x = x . upper ( )", lambda x, n: x.upper()),
        Operation("twice", "write it twice in a row", "x = x + x", lambda x, n: x + x),
        Operation("drop {n}", "drop the first {n} letters", "x = x [ {n} : ]", lambda x, n: x[n:], range(1, 4)),
        Operation("first {n}", "keep the first {n} letters", "x = x [ : {n} ]", lambda x, n: x[:n], _SMALL),
        Operation("length", "count the letters", "x = len ( x )", lambda x, n: len(x)),
    ),
}
_ARTICLES = {"int": "an integer", "list": "a list of integers", "text": "a string"}
# Inputs that tell functions apart: the fingerprint, and with the task's own random ones the tests.
PROBES: dict[str, tuple[Any, ...]] = {
    "int": (0, 1, -1, 2, 5, -7, 10, 13, -20, 37),
    "list": ([], [3], [5, 2, 8], [-4, 7, 7, 1], [9, 0, -2, 6, 12, 3], [1, 2, 3, 4, 5, 6, 7, 8]),
    "text": ("", "a", "code", "Flow", "abcdefgh", "Xyz Uvw", "level", "ghijklmnopq"),
}

Step = tuple[int, int]  # which operation of its kind, and its number


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function: the kind of its argument and its steps."""

    kind: str
    steps: tuple[Step, ...]

    def value(self, x: Any) -> Any:
        for operation, number in self._operations():
            x = operation.apply(x, number)
        return x

    def short(self) -> str:
        return f"{self.kind} " + " then ".join(o.words.format(n=n) for o, n in self._operations())

    def program(self) -> str:
        statements = [o.statement.format(n=n) for o, n in self._operations()]
        return f"{HEAD} " + JOIN.join([*statements, TAIL])

    def statement(self) -> str:
        lines = [f"{i}. {o.english.format(n=n)}" for i, (o, n) in enumerate(self._operations(), 1)]
        return (
            f"Write a Python function f(x). Its argument is {_ARTICLES[self.kind]}. It takes x through these steps, in "
            f"this order, and returns what comes out:\n" + "\n".join(lines) + f"\nIn short: {self.short()}"
        )

    def fingerprint(self) -> int:
        """Equal for two functions that give equal results on the probes, however they are worded."""
        return state_key(self.kind, *(repr(self.value(x)) for x in PROBES[self.kind]))

    def _operations(self) -> list[tuple[Operation, int]]:
        return [(OPERATIONS[self.kind][index], number) for index, number in self.steps]


def draw(rng: np.random.Generator, kinds: Sequence[str], most_steps: int, split: Split | None = None) -> Recipe:
    """A function whose results vary with its argument, of one split if one is named."""
    for _ in range(_MAX_ATTEMPTS):
        recipe = _any(rng, kinds, most_steps)
        results = {repr(recipe.value(x)) for x in PROBES[recipe.kind]}
        if len(results) < 3:
            continue
        held_out = recipe.fingerprint() % HELD_OUT_ONE_IN == 0
        if split is None or held_out == (split == "held_out"):
            return recipe
    raise WorldError(f"no function in {_MAX_ATTEMPTS} attempts with kinds={list(kinds)}, steps={most_steps}")


def _any(rng: np.random.Generator, kinds: Sequence[str], most_steps: int) -> Recipe:
    kind = kinds[int(rng.integers(len(kinds)))]
    operations = OPERATIONS[kind]
    steps: list[Step] = []
    for _ in range(int(rng.integers(1, most_steps + 1))):
        index = int(rng.integers(len(operations)))
        numbers = operations[index].numbers
        steps.append((index, int(numbers[int(rng.integers(len(numbers)))])))
        if operations[index].words in _TO_INT:
            break
    return Recipe(kind, tuple(steps))


def problem(recipe: Recipe, seed: int, *, cases: int, public: int) -> CodeProblem:
    """The problem and its tests: inputs of the task's own, then probes, in an order that the seed fixes."""
    rng = np.random.default_rng(seed)
    private = [_input(rng, recipe.kind) for _ in range(cases // 2)]
    order = rng.permutation(len(PROBES[recipe.kind]))
    inputs = {
        repr(x): x for x in (*private, *(PROBES[recipe.kind][i] for i in order))
    }  # each once: a public one is not hidden
    calls = tuple(CallCase((x,), recipe.value(x)) for x in list(inputs.values())[:cases])
    return CodeProblem(recipe.statement(), Suite(calls, ENTRY), public, 0, recipe.program())


def _input(rng: np.random.Generator, kind: str) -> Any:
    if kind == "int":
        return int(rng.integers(-50, 51))
    if kind == "list":
        return rng.integers(-10, 20, size=int(rng.integers(1, 8))).tolist()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    return "".join(letters[i] for i in rng.integers(len(letters), size=int(rng.integers(2, 12))))


def words(kinds: Sequence[str]) -> tuple[str, ...]:
    """Every word of short statements and programs."""
    texts = [HEAD, TAIL, JOIN, "then", *kinds]
    for kind in kinds:
        for operation in OPERATIONS[kind]:
            for number in operation.numbers:
                texts += [operation.words.format(n=number), operation.statement.format(n=number)]
    return tuple(dict.fromkeys(word for text in texts for word in text.split()))
