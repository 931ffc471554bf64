"""Whether a program is right: its results, compared outside the sandbox with what was expected.

The tested program gets inputs and gives back data (or text); expected results never enter the sandbox, so there is
nothing there to read, patch or print that would make a wrong program right. Tests that are code run in a second box,
which reaches the program only by sending it arguments, and whose verdicts carry a token that the program never sees.
"""

import functools
import json
import marshal
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from flowjax.grading import sandbox_runner
from flowjax.grading.code_asserts import Call, Check, parse_quietly
from flowjax.grading.sandbox import Box, Isolation, Limits, Result, require_isolation, run

__all__ = ["JUDGE_LIMITS", "Call", "Check", "Lines", "Suite", "Verdict", "judge", "matches", "same_text"]

JUDGE_LIMITS = Limits(wall_s=8.0, cpu_s=8.0, processes=8)
NOT_RUN = "not reached"
_NUMBER = re.compile(r"[+-]?\d{1,1000}(\.\d{0,1000})?(e[+-]?\d{1,6})?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Lines:
    """What a program reads from standard input, and what it must print."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one problem. `entry` is the tested function, "" where the program reads standard input.

    `preamble` is put before a program that defines the function without it (imports and helpers that the problem
    gives); `setup` before each `Check`.
    """

    cases: tuple[Call | Check | Lines, ...]
    entry: str = ""
    preamble: str = ""
    setup: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judged program, case by case; `remarks` say for each case what happened, "" where it passed."""

    passed: tuple[bool, ...]
    remarks: tuple[str, ...]
    seconds: float
    isolation: str

    @property
    def success(self) -> bool:
        return bool(self.passed) and all(self.passed)

    @property
    def score(self) -> float:
        """Share of the cases that passed."""
        return sum(self.passed) / max(1, len(self.passed))


def judge(
    program: str,
    suite: Suite,
    limits: Limits = JUDGE_LIMITS,
    *,
    case_s: float = 3.0,
    isolation: Isolation | None = None,
    allow_none: bool = False,
    packages: Sequence[str] = (),
) -> Verdict:
    """Run `program` on every case. `case_s` bounds one case, `limits.wall_s` all of them together.

    Raises:
        IsolationError: there is no isolation, and neither `isolation` nor `allow_none` accepts that.
    """
    where = isolation or require_isolation(allow_none=allow_none)
    started_s = time.monotonic()
    answers: dict[int, str] = {}  # case -> "" where it passed, else a remark
    source = complete(program, suite)
    for kind, judged in ((Call, _calls), (Lines, _scripts), (Check, _checks)):
        numbers = [number for number, case in enumerate(suite.cases) if isinstance(case, kind)]
        left_s = limits.wall_s - (time.monotonic() - started_s)
        if numbers and left_s > 0:
            cases: list[Any] = [suite.cases[number] for number in numbers]
            session = _Session(source, suite, replace(limits, wall_s=left_s), case_s, where, packages)
            remarks = judged(session, cases)
            answers |= dict(zip(numbers, remarks, strict=True))
    remarks = tuple(answers.get(number, NOT_RUN) for number in range(len(suite.cases)))
    passed = tuple(not remark for remark in remarks)
    return Verdict(passed, remarks, time.monotonic() - started_s, where.name)


def complete(program: str, suite: Suite) -> str:
    """The program as it is run: behind the problem's preamble."""
    if not suite.preamble or not suite.entry:
        return program
    joined = f"{suite.preamble}\n{program}"
    return program if parse_quietly(joined) is None and parse_quietly(program) is not None else joined


@dataclass(frozen=True, slots=True)
class _Session:
    """What the judging of one program needs."""

    program: str
    suite: Suite
    limits: Limits
    case_s: float
    isolation: Isolation
    packages: Sequence[str]

    def job(self, mode: str, **more: Any) -> bytes:
        fields = {"mode": mode, "program": self.program, "entry": self.suite.entry, "case_s": self.case_s, **more}
        data = marshal.dumps(fields, 2)
        return len(data).to_bytes(8, "little") + data

    def answers(self, mode: str, room_bytes: int, **more: Any) -> tuple[dict[int, list[Any]], str]:
        """The runner's answers by case, and what is to be said of a case that has none."""
        limits = replace(self.limits, output_bytes=self.limits.output_bytes + room_bytes)
        job = self.job(mode, output_bytes=limits.output_bytes, **more)
        result = run(_runner(), job, limits, isolation=self.isolation, packages=self.packages)
        found: dict[int, list[Any]] = {}
        remark = _ending(result)
        for line in result.stdout.split(b"\n"):
            answer = _read(line)
            if answer and answer[0] == "load" and len(answer) == 2:
                remark = str(answer[1])
            elif len(answer) >= 3 and type(answer[0]) is int:
                found.setdefault(answer[0], answer)
        return found, remark


def _calls(session: _Session, cases: Sequence[Call]) -> list[str]:
    arguments = [sandbox_runner.encode(case.arguments) for case in cases]
    room_bytes = 4 * sum(len(repr(case.expected)) for case in cases)
    found, missing = session.answers("calls", room_bytes, arguments=arguments)
    remarks = []
    for number, case in enumerate(cases):
        _, kind, value, *_ = found.get(number, (number, "error", missing))
        if kind != "ok":
            remarks.append(_short(str(value)) or "failed")
        else:
            remarks.append("" if matches(case, value) else f"returned {_shown(value)}, expected {case.expected!r}")
    return remarks


def _scripts(session: _Session, cases: Sequence[Lines]) -> list[str]:
    room_bytes = 4 * sum(len(case.output) for case in cases)
    found, missing = session.answers("scripts", room_bytes, inputs=[case.input for case in cases])
    remarks = []
    for number, case in enumerate(cases):
        _, kind, value, *_ = found.get(number, (number, "error", missing))
        if kind != "ok":
            remarks.append(_short(str(value)) or "failed")
        elif isinstance(value, str) and same_text(value, case.output):
            remarks.append("")
        else:
            remarks.append(f"printed {_short(str(value))!r}, expected {_short(case.output)!r}")
    return remarks


def _checks(session: _Session, cases: Sequence[Check]) -> list[str]:
    """Two boxes, one with the tests and one with the program; this process carries messages between them."""
    token = secrets.token_hex(16)
    sources = [case.source for case in cases]
    tests = session.job("check", sources=sources, setup=session.suite.setup, token=token, program="")
    found: dict[int, str] = {}
    start: Callable[[], Box] = functools.partial(
        Box, _runner(), session.limits, session.isolation, packages=session.packages
    )
    with start() as tester, start() as tested:
        tester.send(tests)
        tested.send(session.job("serve"))
        while (line := tester.read_line()) is not None:
            message = _read(line)
            if message[:2] == ["verdict", token] and len(message) == 5:
                found[message[2]] = "" if message[3] is True else str(message[4]) or "failed"
            elif message[:1] == ["call"]:
                tested.send(json.dumps(message[1:]).encode() + b"\n")
                reply = tested.read_line()
                answer = _read(reply) if reply is not None else []
                if answer[:1] == ["load"]:
                    return [str(answer[-1])] * len(cases)
                if len(answer) != 3:
                    answer = ["answer", "error", "the program ended before it answered"]
                tester.send(json.dumps(answer).encode() + b"\n")
    return [found.get(number, NOT_RUN) for number in range(len(cases))]


def _read(line: bytes) -> list[Any]:
    """A message of the runner; an empty list for anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return message if isinstance(message, list) else []


def _ending(result: Result) -> str:
    reasons = {"timeout": "took too long", "output": "printed too much", "killed": "was killed (memory or time)"}
    return reasons.get(result.status, "the program ended before it answered")


@functools.cache
def _runner() -> str:
    return Path(sandbox_runner.__file__).read_text(encoding="utf-8")


def matches(case: Call, answer: Any) -> bool:
    """Whether an encoded answer is what the case expects. Never raises, whatever the answer.

    Equality is Python's, between plain data: 1, 1.0 and True are equal, a list is no tuple (but see `Call.json`).
    """
    expected = sandbox_runner.encode(case.expected)
    if _nodes(answer, _nodes(expected)) != _nodes(expected):
        return False  # equal data has equally many parts; so hostile data is never larger than the expected
    try:
        value, wanted = sandbox_runner.decode(answer), case.expected
        if case.tolerance is not None:
            return isinstance(value, int | float) and abs(value - wanted) <= case.tolerance
        return bool(_as_json(value) == _as_json(wanted) if case.json else value == wanted)
    except (ValueError, TypeError, OverflowError, RecursionError, IndexError, AttributeError):
        return False


def _nodes(value: Any, most: float = float("inf")) -> int:
    """Number of data in an encoded value, counted up to a little over `most`."""
    count, stack = 0, [value]
    while stack and count <= most:
        part = stack.pop()
        count += 1
        if isinstance(part, list) and part and part[0] not in ("int", "float", "complex", "bytes", "other"):
            stack += part[1:]
    return count


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _as_json(item) for key, item in value.items()}
    return value


def same_text(printed: str, expected: str) -> bool:
    """Whether two outputs are the same: line by line without surrounding space, numbers by their value."""
    said, wanted = printed.strip(), expected.strip()
    if said == wanted:
        return True
    if len(said) > 4 * len(wanted) + 1024:
        return False
    ours, theirs = ([line.split() for line in text.splitlines()] for text in (said, wanted))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    numbers = _NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)
    return printed == expected or bool(numbers and Decimal(printed) == Decimal(expected))


def _shown(answer: Any) -> str:
    if isinstance(answer, list) and answer[:1] == ["other"]:
        return f"a value of type {_short(str(answer[-1]))}"
    try:
        return _short(repr(sandbox_runner.decode(answer))) if _nodes(answer, 200) <= 200 else "a long value"
    except (ValueError, TypeError, OverflowError, RecursionError, IndexError, AttributeError):
        return "something that is no data"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
