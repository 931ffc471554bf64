"""A simulated executor for generated exercises: no language model, no network, the same answers every time.

It computes the true answer from an exercise's text, and then gives it or a wrong one by chance, with a probability
that depends on the operator and its inputs: a plan helps with word problems, a program with arithmetic, a check's
feedback with a revision, an instruction where it suits the kind of exercise, and independent attempts err
independently. So a better workflow causes a better answer. The sizes of the effects were chosen, and not measured on
any model. An instruction outside `PHRASES` changes nothing, not even the random draw: rewording gives no second chance.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flowjax.canvas.backends import BackendError, Completion, Prices, Request
from flowjax.canvas.context import Sandbox
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.values import Usage
from flowjax.envs.canvas.exercises import ENTRY_POINT, NAMES, PHRASE_OF, PHRASES, Reading, Specification, read
from flowjax.grading.code import Suite, Verdict
from flowjax.grading.sandbox import ProgramResult
from flowjax.records import state_key

# Chance that a first attempt is right, for the easiest exercise of a kind.
SKILL: Mapping[str, Mapping[str, float]] = {
    "arithmetic": {"Custom": 0.30, "AnswerGenerate": 0.35, "Programmer": 0.75},
    "words": {"Custom": 0.35, "AnswerGenerate": 0.40, "Programmer": 0.50},
    "list": {"Custom": 0.60, "AnswerGenerate": 0.45, "Programmer": 0.35},
    "program": {"Custom": 0.25, "AnswerGenerate": 0.20, "CustomCodeGenerate": 0.30, "Programmer": 0.40},
}
PER_SIZE = -0.04  # added for each term, step, person or part above the smallest size
SMALLEST = {"arithmetic": 2, "words": 2, "list": 4, "program": 3}
OTHERWISE = 0.30  # skill of operators outside the table
# Added to the chance by a good plan and by good subproblems.
PLANNED = {"arithmetic": 0.0, "words": 0.30, "list": 0.05, "program": 0.20}
DECOMPOSED = {"arithmetic": 0.05, "words": 0.20, "list": 0.15, "program": 0.05}
GOOD_PLAN = 0.85  # chance that a plan is good
MISLED = -0.10  # added by a poor plan
ANCHORED = 0.75  # a solver that sees an answer and no feedback keeps it this often
MENDED = 0.65  # a wrong answer is right after a revision with feedback, whatever it says
TALKED_OUT = 0.40  # likewise, a right one is wrong after it
DETECTED: Mapping[str, float] = {"Review": 0.60, "Verify": 0.85}  # wrong answers that a check finds
FALSE_ALARM: Mapping[str, float] = {"Review": 0.20, "Verify": 0.10}
VOTED = 0.55  # chance that a vote finds the right candidate where there is one; otherwise it picks at random
# Added to the chance of an attempt by an instruction that suits its kind, by another one, and by `brief`.
SUITS = {"stepwise": "words", "exact": "arithmetic", "sorted": "list", "tested": "program"}
SUITED, UNSUITED, BRIEF = 0.20, -0.05, -0.15
WORDY = 0.6  # share of Custom's answers about lists that are inside a sentence, which `Format` removes

_PLAN, _POOR_PLAN = "Go through the text in its order and keep every number.", "Guess from the largest number."
_WRONG = "A definite mistake was found."
_SENTENCE = "As far as I can tell it would have to be {}, I think"

# Python code of the exercises' filters, maps and reductions.
_KEEP = {
    "even": "x % 2 == 0",
    "odd": "x % 2 == 1",
    "greater than {k}": "x > {k}",
    "divisible by {k}": "x % {k} == 0",
}
_MAP = {
    "the numbers": "x",
    "the squares of the numbers": "x * x",
    "the doubles of the numbers": "2 * x",
}
_REDUCE = {"the sum": "sum({})", "the largest": "max({}, default=0)", "the smallest": "min({}, default=0)"}
_USUAL = {name: operator.instruction for name, operator in load_operators(entry_points=False).items()}
FAULTS = 4  # kinds of wrong programs


class SimulatedSolver:
    """Answers what operators ask about exercises. Equal seeds and requests have equal answers.

    `skill` is added to the chance of every attempt and of finding a mistake, as of a larger model, which can have its
    own `prices`. `reasoning_tokens` are counted, and paid for, with each reply that `_Asked.reasons` names.
    """

    def __init__(
        self, seed: int = 0, skill: float = 0.0, reasoning_tokens: int = 0, prices: Mapping[str, float] | None = None
    ):
        self._seed, self._skill, self._prices = seed, skill, Prices(**(prices or {}))
        self._reasoning_tokens = reasoning_tokens

    @property
    def identity(self) -> str:
        return f"offline:{self._seed}:{self._skill:g}:{self._reasoning_tokens}:{self._prices}"

    async def complete(self, request: Request) -> Completion:
        """The simulated answer. Its tokens are its words and `reasoning_tokens`.

        Raises:
            BackendError: the problem is none of the generated exercises.
        """
        asked = _Asked(self._seed, self._skill, request)
        text = asked.reply()
        read_words = sum(len(message["content"].split()) for message in request.messages)
        written = len(text.split()) + (self._reasoning_tokens if asked.reasons else 0)
        return Completion(text, Usage(1, read_words, written, self._prices.cost(read_words, written)))


class _Asked:
    """One request: its exercise, inputs and instruction, and its random draws, which are hashes of all that."""

    def __init__(self, seed: int, skill: float, request: Request):
        self._operator = request.tags.get("operator", "")
        self._given = {name.removeprefix("input."): value for name, value in request.tags.items()}
        self._text = self._given.get("problem", "")
        reading = read(self._text)
        if reading is None:
            raise BackendError("the offline executor knows generated exercises only: name a real backend for others")
        self._reading: Reading = reading
        self._schema = request.schema["properties"] if request.schema else {}
        contents = [message["content"] for message in request.messages]
        self._shown, self._skill = contents[0], skill
        instruction = request.tags.get("instruction", "").strip()
        self._phrase = PHRASE_OF.get(instruction, "")
        heard = PHRASES.get(self._phrase, _USUAL.get(self._operator, "").strip())
        asked = [heard + self._shown.removeprefix(instruction), *contents[1:], *([f"{skill:g}"] if skill else [])]
        self._key = state_key("offline", seed, request.seed, self._operator, *asked)

    @property
    def reasons(self) -> bool:
        """True for replies with `reasoning_tokens`: all but verdicts, votes, subproblems and requests to be `brief`."""
        return not self._schema and self._phrase != "brief"

    def reply(self) -> str:
        if "passed" in self._schema:
            return json.dumps(self._verdict())
        if "choice" in self._schema:
            return json.dumps({"choice": self._vote()})
        if "subproblems" in self._schema:
            return json.dumps({"subproblems": self._subproblems()})
        match self._operator:
            case "Plan":
                return _PLAN if self._happens(GOOD_PLAN, "plan") else _POOR_PLAN
            case "Format":
                return f"Answer: {_bare(self._given.get('answer', ''))}"
            case "Aggregate":
                return self._worded(self._plurality())
            case "Revise":
                return self._worded(self._revised())
            case "Verify":  # an independent solution: the proposed one is not used
                return self._worded(self._attempt())
            case _:
                return self._worded(self._solved())

    def _happens(self, chance: float, what: str) -> bool:
        return state_key(self._key, what) / 2**64 < chance  # a hash as a uniform number, equal in every process

    def _pick(self, count: int, what: str) -> int:
        return state_key(self._key, what) % count

    def _solved(self) -> str:
        """A solver's answer: chosen among candidates, revised by feedback, kept, or a new attempt."""
        if self._given.get("candidates"):
            return self._plurality()
        if self._proposed():
            if self._given.get("feedback"):
                return self._revised()
            if self._happens(ANCHORED, "anchored"):
                return self._proposed()
        return self._attempt()

    def _proposed(self) -> str:
        return self._given.get("code" if self._reading.program else "answer", "")

    def _attempt(self) -> str:
        source = self._reading.source
        chance = SKILL[source].get(self._operator, OTHERWISE)
        chance += PER_SIZE * (self._reading.size - SMALLEST[source]) + self._skill
        if self._phrase:
            suited = SUITED if SUITS.get(self._phrase) == source else UNSUITED
            chance += BRIEF if self._phrase == "brief" else suited
        helped = [
            gains[source] if _PLAN in self._given[name] else MISLED
            for name, gains in (("plan", PLANNED), ("subproblems", DECOMPOSED))
            if name in self._given
        ]
        return self._outcome(chance + max(helped, default=0.0))

    def _revised(self) -> str:
        proposed, feedback = self._proposed(), self._given.get("feedback", "")
        if not feedback:
            return proposed if self._happens(ANCHORED, "anchored") else self._attempt()
        return self._outcome(1 - TALKED_OUT if self._is_right(proposed) else MENDED)

    def _outcome(self, chance: float) -> str:
        return self._right() if self._happens(chance, "right") else self._wrong()

    def _right(self) -> str:
        return program(self._text, self._reading) if self._reading.program else self._reading.answer

    def _wrong(self) -> str:
        if self._reading.program:
            return program(self._text, self._reading, self._pick(FAULTS, "fault"))
        if self._reading.source == "list":
            others = [name for name in NAMES if f"{name} owns" in self._text and name != self._reading.answer]
            return others[self._pick(len(others), "other")]
        away = self._pick(12, "away") - 6
        return str(int(self._reading.answer) + away + (away >= 0))

    def _is_right(self, solution: str) -> bool:
        return _bare(solution).strip() == self._right()

    def _verdict(self) -> dict[str, Any]:
        right = self._is_right(self._proposed())
        operator = self._operator if self._operator in DETECTED else "Review"
        alarm = self._happens(FALSE_ALARM[operator] if right else DETECTED[operator] + self._skill, "alarm")
        return {"feedback": _WRONG if alarm else "No mistake was found.", "passed": not alarm}

    def _vote(self) -> str:
        """A letter of the choices that are listed in the message."""
        letters = self._schema["choice"]["enum"]
        listed = self._shown.rpartition("## Candidates")[2]
        choices = [part.strip() for part in re.split(r"^[A-Z]+\.\n", listed, flags=re.MULTILINE)[1:]]
        right = [letter for letter, choice in zip(letters, choices, strict=False) if self._is_right(choice)]
        return right[0] if right and self._happens(VOTED, "vote") else letters[self._pick(len(letters), "letter")]

    def _plurality(self) -> str:
        """The answer of most candidates; on a tie the right one half of the time, else a random one of the tied."""
        candidates = [_bare(text) for text in json.loads(self._given.get("candidates", "[]"))]
        if not candidates:
            return self._attempt()
        counts = Counter(candidates)
        most = [text for text, count in counts.items() if count == max(counts.values())]
        right = [text for text in most if self._is_right(text)]
        return right[0] if right and self._happens(0.5, "tie") else most[self._pick(len(most), "most")]

    def _subproblems(self) -> list[str]:
        good = self._happens(GOOD_PLAN, "plan")
        return [_PLAN if good else _POOR_PLAN, "What is the answer then?"]

    def _worded(self, solution: str) -> str:
        """A solution in the form that the operator asks for."""
        if self._operator == "Programmer" and not self._reading.program:
            solution = program(
                self._text, self._reading, -1 if self._is_right(solution) else self._pick(FAULTS, "fault")
            )
            return f"```python\n{solution}\n```"
        if self._reading.program:
            return f"```python\n{solution}\n```"
        if self._operator == "Custom" and self._reading.source == "list" and self._happens(WORDY, "wordy"):
            return _SENTENCE.format(_bare(solution))
        return f"Answer: {_bare(solution)}"


def _bare(answer: str) -> str:
    """The answer without the sentence around it."""
    before, _, after = _SENTENCE.partition("{}")
    return answer.strip().removeprefix(before).removesuffix(after)


def program(text: str, reading: Reading, fault: int = -1) -> str:
    """A program for an exercise: right where `fault` is negative, otherwise wrong in one of `FAULTS` ways."""
    if reading.program is not None:
        return function(reading.program, fault)
    if reading.source == "arithmetic":
        right = f"print({text.removeprefix('Compute ').rstrip('.')})"
    elif reading.source == "words":
        right = _story(text)
    else:
        right = _ranking(text)
    if fault == FAULTS - 1:
        return right.replace("print(", "print(result, ", 1)  # an undefined name: the program fails
    return right if fault < 0 else _with_one_number_changed(right, fault)


def function(wanted: Specification, fault: int = -1) -> str:
    """The wanted function. Faults 0 to 3: filter negated, map left out, another reduction, a misspelt name."""
    keep, mapped, reduction = _KEEP[wanted.keep].format(k=wanted.k), _MAP[wanted.mapping], _REDUCE[wanted.reduction]
    if fault == 0:
        keep = f"not {keep}"
    elif fault == 1:
        mapped = "x + 1" if mapped == "x" else "x"
    elif fault == 2:
        reduction = "len({})" if wanted.reduction == "the sum" else "sum({})"
    elif fault == 3:
        keep = keep.replace("x", "y")
    kept = reduction.format(f"[{mapped} for x in numbers if {keep}]")
    return f"def {ENTRY_POINT}(numbers):\n    return {kept}"


def _story(text: str) -> str:
    """A word problem as a program that updates a count sentence by sentence."""
    first, changes = _sentences(text)
    lines = [f"count = {first}", *(f"count = count {sign} {operand}" for sign, operand in changes)]
    return "\n".join([*lines, "print(count)"])


def _sentences(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The first number of a story, and each further sentence as a sign and a number or a product of numbers."""
    start, *sentences = text.split(". ")[:-1]
    changes: list[tuple[str, str]] = []
    for sentence in sentences:
        sign = "-" if "gives" in sentence else "*" if "times" in sentence else "+"
        changes.append((sign, " * ".join(re.findall(r"\d+", sentence))))
    return re.findall(r"\d+", start)[0], changes


def _ranking(text: str) -> str:
    facts = ", ".join(f"({count}, {name!r})" for name, count in re.findall(r"(\w+) owns (\d+) ", text))
    place = int("second" in text)
    return f"order = sorted([{facts}], reverse={'most' in text})\nprint(order[{place}][1])"


def _with_one_number_changed(right: str, fault: int) -> str:
    numbers = list(re.finditer(r"\d+", right))
    found = numbers[-1 - fault % len(numbers)]
    changed = int(found[0]) + 1 if found[0] != "1" else 0
    return f"{right[: found.start()]}{changed}{right[found.end() :]}"


# ------------------------------------------------------------------------------------------ solutions in writing


def facts(text: str) -> list[tuple[int, str]]:
    """Numbers and names of a list, in its order."""
    return [(int(count), name) for name, count in re.findall(r"(\w+) owns (\d+) ", text)]


def in_order(text: str, source: str) -> tuple[str, str]:
    """Written steps in the order of the text, and the result; for sums without precedence of `*`, so often wrong."""
    lines: list[str] = []
    if source == "arithmetic":
        first, *rest = text.removeprefix("Compute ").rstrip(".").split()
        changes = list(zip(rest[::2], rest[1::2], strict=True))
        total = int(first)
    else:
        first, changes = _sentences(text)
        total = int(first)
    for sign, operand in changes:
        number = math.prod(int(factor) for factor in operand.split(" * "))
        if " * " in operand:
            lines.append(f"{operand} = {number}")
        after = total * number if sign == "*" else total - number if sign == "-" else total + number
        lines.append(f"{total} {sign} {number} = {after}")
        total = after
    return "\n".join(lines), str(total)


def by_products(text: str) -> tuple[str, str]:
    """Written steps, products first and then the sum, and the result, which is right."""
    lines: list[str] = []
    terms = re.split(r" ([-+]) ", text.removeprefix("Compute ").rstrip("."))
    values: list[int] = []
    for term in terms[::2]:
        first, *factors = map(int, term.split(" * "))
        for factor in factors:
            lines.append(f"{first} * {factor} = {first * factor}")
            first *= factor
        values.append(first)
    total = values[0]
    for sign, value in zip(terms[1::2], values[1:], strict=True):
        after = total + value if sign == "+" else total - value
        lines.append(f"{total} {sign} {value} = {after}")
        total = after
    return "\n".join(lines), str(total)


def at_once(text: str) -> str:
    """A story as one expression without brackets, so that `times` multiplies only the last number: often wrong."""
    first, changes = _sentences(text)
    return f"print({' '.join([first, *(f'{sign} {operand}' for sign, operand in changes)])})"


def first_place(text: str) -> str:
    """A program for a question about a list that always prints the first place: wrong for second places."""
    listed = ", ".join(f"({count}, {name!r})" for count, name in facts(text))
    return f"print({'max' if 'most' in text else 'min'}([{listed}])[1])"


class KnownPrograms(Sandbox):
    """Runs programs of this module in this process. They are safe, since no model writes them, and there are thousands
    of them in lessons, too many for a real sandbox."""

    def require(self) -> None:
        """See `Sandbox`: nothing is needed."""

    def run(self, program: str, stdin: bytes) -> ProgramResult:
        """See `Sandbox`."""
        printed: list[str] = []
        try:
            exec(program, {"print": lambda *values: printed.append(" ".join(map(str, values)))})
        except Exception as error:
            return ProgramResult(b"", f"{type(error).__name__}: {error}".encode(), "error", 0.0, 0.0, "none")
        return ProgramResult("\n".join(printed).encode(), b"", "ok", 0.0, 0.0, "none")

    def judge(self, program: str, suite: Suite) -> Verdict:
        """See `Sandbox`."""
        remarks = tuple(_remark(program, suite.entry, case) for case in suite.cases)
        return Verdict(tuple(not remark for remark in remarks), remarks, 0.0, "none")


def _remark(program: str, entry: str, case: Any) -> str:
    names: dict[str, Any] = {}
    try:
        exec(program, names)
        value = names[entry](*case.arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error} (line 2)"
    return "" if value == case.expected else f"returned {value!r}, expected {case.expected!r}"
