"""Generated exercises of four kinds, each with a checked answer: arithmetic, word problems, lists of facts, programs.

Every exercise states all that is needed to solve it, so `read` computes the answer from its text alone.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowjax.canvas.values import Problem, ProblemKind
from flowjax.envs import Split, WorldError
from flowjax.records import state_key

KINDS = ("arithmetic", "words", "list", "program")
ENTRY_POINT = "compute"
NAMES = ("Ana", "Ben", "Chidi", "Dora", "Emre", "Fumi", "Goran", "Hana", "Ivo", "Jun", "Kaya", "Leo")
THINGS = ("apples", "books", "coins", "stamps", "shells", "tickets", "pencils", "marbles")
RANKS = ("the most", "the second most", "the fewest", "the second fewest")
# Instructions that a nano policy can give, each by one word; the simulated executors react to them.
PHRASES: Mapping[str, str] = {
    "stepwise": "Go through the text in its order, one step at a time, and keep every number.",
    "exact": "Multiply before you add, and check every digit.",
    "sorted": "Write the facts down in the order of their numbers first.",
    "tested": "Try the examples by hand before you give the program.",
    "brief": "Give the answer at once, without any explanation.",
}
PHRASE_OF = {sentence: word for word, sentence in PHRASES.items()}
WORDS = (
    "Compute", "How", "Then", "Who", "are", "as", "bags", "by", "divisible", "does", "doubles", "end", "even", "fewest",
    "finds", "for", "gets", "gives", "greater", "has", "have", "in", "largest", "many", "more", "most", "numbers",
    "odd", "of", "owns", "second", "smallest", "squares", "sum", "than", "that", "the", "them", "times", "to", "trades",
    "+", "-", "*",
)  # fmt: skip
LARGEST_NUMBER = 99  # in the words of an exercise
HELD_OUT_ONE_IN = 8  # exercises, by content
_MAX_ATTEMPTS = 10_000

FILTERS: Mapping[str, Callable[[int, int], bool]] = {
    "even": lambda x, k: x % 2 == 0,
    "odd": lambda x, k: x % 2 == 1,
    "greater than {k}": lambda x, k: x > k,
    "divisible by {k}": lambda x, k: x % k == 0,
}
MAPS: Mapping[str, Callable[[int, int], int]] = {
    "the numbers": lambda x, k: x,
    "the squares of the numbers": lambda x, k: x * x,
    "the doubles of the numbers": lambda x, k: 2 * x,
}
REDUCTIONS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "the sum": sum,
    "the largest": lambda values: max(values, default=0),
    "the smallest": lambda values: min(values, default=0),
}


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question and the means to grade an answer: a gold answer, or hidden assertions about a program.

    `size` is the number of terms, steps or people, and 3 for programs: the larger, the harder.
    """

    source: str
    kind: ProblemKind
    text: str
    answer: str
    size: int
    entry_point: str = ""
    public_tests: tuple[str, ...] = ()
    hidden_tests: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Specification:
    """A program to be written: filter the numbers, map them, reduce the results to one number."""

    reduction: str
    mapping: str
    keep: str
    k: int

    def value(self, numbers: Sequence[int]) -> int:
        kept = [x for x in numbers if FILTERS[self.keep](x, self.k)]
        return REDUCTIONS[self.reduction]([MAPS[self.mapping](x, self.k) for x in kept])


@dataclass(frozen=True, slots=True)
class Reading:
    """Meaning of an exercise's text: its kind, its answer ("" for a program), and the program that is asked for."""

    source: str
    answer: str
    size: int
    program: Specification | None = None


def split_of(text: str) -> Split:
    """Split of an exercise, by a hash of its text: the same in every process and under every data seed."""
    return "train" if state_key("canvas", " ".join(text.split())) % HELD_OUT_ONE_IN else "held_out"


def generate(rng: np.random.Generator, kinds: Sequence[str], split: Split) -> Exercise:
    """An exercise of one split, of a kind drawn from `kinds`.

    Raises:
        WorldError: none was found in `_MAX_ATTEMPTS` attempts.
    """
    for _ in range(_MAX_ATTEMPTS):
        exercise = _MAKERS[kinds[int(rng.integers(len(kinds)))]](rng)
        if split_of(exercise.text) == split:
            return exercise
    raise WorldError(f"no {split} exercise in {_MAX_ATTEMPTS} attempts: name more kinds than {', '.join(kinds)}")


def _arithmetic(rng: np.random.Generator) -> Exercise:
    terms = int(rng.integers(2, 5))
    numbers = rng.integers(2, 100, size=terms)
    signs = ["+-*"[i] for i in rng.integers(3, size=terms - 1)]
    expression = " ".join([str(numbers[0]), *(f"{s} {n}" for s, n in zip(signs, numbers[1:], strict=True))])
    return Exercise("arithmetic", "math", f"Compute {expression}.", str(_evaluate(expression)), terms)


def _evaluate(expression: str) -> int:
    """The value of whole numbers joined by + - *, with the usual precedence."""
    first, *rest = expression.split()
    products = [int(first)]
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        if sign == "*":
            products[-1] *= int(number)
        else:
            products.append(int(number) if sign == "+" else -int(number))
    return sum(products)


def _words(rng: np.random.Generator) -> Exercise:
    name, other = (NAMES[i] for i in rng.choice(len(NAMES), 2, replace=False))
    things = THINGS[rng.integers(len(THINGS))]
    count, size = int(rng.integers(5, 60)), int(rng.integers(2, 5))
    sentences = [f"{name} has {count} {things}."]
    for _ in range(size):
        a, b = int(rng.integers(2, 13)), int(rng.integers(2, 13))
        step = int(rng.integers(4))
        if step == 1 and count < a:
            step = 0
        if step == 0:
            sentences.append(f"{name} gets {a} more.")
            count += a
        elif step == 1:
            sentences.append(f"{name} gives {a} to {other}.")
            count -= a
        elif step == 2:
            sentences.append(f"{name} finds {a} bags of {b}.")
            count += a * b
        else:
            sentences.append(f"Then {name} trades them for {b % 3 + 2} times as many.")
            count *= b % 3 + 2
    sentences.append(f"How many {things} does {name} have in the end?")
    return Exercise("words", "math", " ".join(sentences), str(count), size)


def _list(rng: np.random.Generator) -> Exercise:
    size = int(rng.integers(4, 8))
    names = [NAMES[i] for i in rng.choice(len(NAMES), size, replace=False)]
    counts = [int(n) for n in rng.choice(np.arange(3, 100), size, replace=False)]
    things = THINGS[rng.integers(len(THINGS))]
    rank = RANKS[rng.integers(len(RANKS))]
    facts = " ".join(f"{name} owns {count} {things}." for name, count in zip(names, counts, strict=True))
    return Exercise("list", "qa", f"{facts} Who owns {rank} {things}?", _ranked(names, counts, rank), size)


def _ranked(names: Sequence[str], counts: Sequence[int], rank: str) -> str:
    order = sorted(zip(counts, names, strict=True), reverse="most" in rank)
    return order["second" in rank][1]


def _program(rng: np.random.Generator) -> Exercise:
    reduction, mapping, keep = (list(table)[rng.integers(len(table))] for table in (REDUCTIONS, MAPS, FILTERS))
    specification = Specification(reduction, mapping, keep, int(rng.integers(2, 13)))
    text = (
        f"Write a Python function {ENTRY_POINT}(numbers) that takes a list of whole numbers and returns {reduction} of "
        f"{mapping} that are {keep.format(k=specification.k)}, or 0 if there are none."
    )
    lists = [[int(n) for n in rng.integers(-9, 30, size=int(rng.integers(4, 9)))] for _ in range(5)] + [[]]
    tests = tuple(f"assert {ENTRY_POINT}({numbers}) == {specification.value(numbers)}" for numbers in lists)
    return Exercise("program", "code", text, "", 3, ENTRY_POINT, tests[:2], tests[2:])


_MAKERS: Mapping[str, Callable[[np.random.Generator], Exercise]] = {
    "arithmetic": _arithmetic,
    "words": _words,
    "list": _list,
    "program": _program,
}


_NUMBER, _NAME, _THING = r"[0-9][0-9]?", f"(?:{'|'.join(NAMES)})", f"(?:{'|'.join(THINGS)})"
# Exactly the sentences that are generated: problems of files may look much like them, and must not match.
_EXPRESSION = re.compile(rf"Compute ({_NUMBER}(?: [-+*] {_NUMBER})+)\.")
_STORY = re.compile(
    rf"(?P<name>{_NAME}) has (?P<count>{_NUMBER}) (?P<things>{_THING})\."
    rf"(?P<steps>(?: (?P=name) (?:gets {_NUMBER} more|gives {_NUMBER} to {_NAME}|finds {_NUMBER} bags of {_NUMBER})\."
    rf"| Then (?P=name) trades them for {_NUMBER} times as many\.)+)"
    r" How many (?P=things) does (?P=name) have in the end\?"
)
_FACTS = re.compile(
    rf"(?P<facts>(?:{_NAME} owns {_NUMBER} {_THING}\. ){{2,}})Who owns (?P<rank>{'|'.join(RANKS)}) {_THING}\?"
)
_TASK = re.compile(
    rf"Write a Python function {ENTRY_POINT}\(numbers\) that takes a list of whole numbers and returns (.*), or 0 if "
    r"there are none\."
)


def read(text: str) -> Reading | None:
    """The kind and the right answer of an exercise, computed from its text; None for a text of no known kind."""
    text = text.strip()
    if found := _EXPRESSION.fullmatch(text):
        return Reading("arithmetic", str(_evaluate(found[1])), found[1].count(" ") // 2 + 1)
    if found := _TASK.fullmatch(text):
        return _read_program(found[1])
    if found := _STORY.fullmatch(text):
        return _read_words(int(found["count"]), found["steps"].strip().split(". "))
    if found := _FACTS.fullmatch(text):
        facts = re.findall(r"(\w+) owns (\d+) ", found["facts"])
        names, counts = [name for name, _ in facts], [int(count) for _, count in facts]
        return Reading("list", _ranked(names, counts, found["rank"]), len(names))
    return None


def _read_words(count: int, sentences: Sequence[str]) -> Reading:
    for sentence in sentences:
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        count = (
            count + math.prod(numbers)
            if "more" in sentence or "bags" in sentence
            else count - numbers[0]
            if "gives" in sentence
            else count * numbers[0]
        )
    return Reading("words", str(count), len(sentences))


def _read_program(words: str) -> Reading | None:
    for reduction in REDUCTIONS:
        for mapping in MAPS:
            found = re.fullmatch(rf"{reduction} of {mapping} that are ([a-z ]+?)( \d+)?", words)
            if found is None:
                continue
            keep = found[1] + (" {k}" if found[2] else "")
            if keep not in FILTERS:
                return None
            return Reading("program", "", 3, Specification(reduction, mapping, keep, int(found[2] or 2)))
    return None


def words(text: str) -> list[str]:
    """Words of an exercise as a nano model reads them, without punctuation and phrases that all program tasks share."""
    _, asked, rest = text.partition(" returns ")
    return re.findall(r"\d+|[A-Za-z]+|[-+*]", rest.partition(", or 0")[0] if asked else text)


def vocabulary() -> tuple[str, ...]:
    """Every word of `words`."""
    numbers = (str(number) for number in range(LARGEST_NUMBER + 1))
    return tuple(dict.fromkeys([*WORDS, *NAMES, *THINGS, *numbers]))


def payload(exercise: Exercise) -> dict[str, Any]:
    """An exercise as a task's payload; it also has the answers and hidden tests, which no workflow may see."""
    return {
        "source": exercise.source,
        "kind": exercise.kind,
        "text": exercise.text,
        "entry_point": exercise.entry_point,
        "public_tests": list(exercise.public_tests),
        "answers": [exercise.answer] if exercise.answer else [],
        "hidden_tests": list(exercise.hidden_tests),
        "size": exercise.size,
    }


def problem(task: Mapping[str, Any]) -> Problem:
    """The part of a task's payload that a workflow may see."""
    return Problem(
        task["text"],
        task["kind"],
        context=task.get("context", ""),
        options=dict(task.get("options", {})),
        entry_point=task.get("entry_point", ""),
        public_tests=tuple(task.get("public_tests", ())),
    )
