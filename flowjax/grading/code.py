"""Tests of programs, and verdicts: results are compared outside the sandbox with the expected ones.

The tested program gets one input at a time and returns data (or text); expected results never enter its sandbox, so
there is nothing there to read, patch or print that would make a wrong program right. Tests that are code run in a
second box, which reaches the program's objects through `sandbox_objects`; its verdicts carry a token that the program
never sees.

`assert f(1, [2]) == 3` needs no test code in the sandbox: it is taken apart into a call whose result can be compared as
data. What cannot be taken apart (loops, expressions around the call) stays code.
"""

import ast
import functools
import json
import marshal
import re
import secrets
import time
import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from flowjax.grading import sandbox_libraries, sandbox_objects, sandbox_runner, sandbox_surroundings, sandbox_values
from flowjax.grading.sandbox import STARTS, Box, Isolation, Limits, NoProcessorError, require_isolation
from flowjax.grading.sandbox_libraries import check_data

JUDGE_LIMITS = Limits(cpu_s=8.0, idle_s=5.0, wall_guard_s=120.0, processes=8)
CASE_CPU_S = 3.0
TALK_BYTES = 64 << 20  # longest message between tests and program
NAMES_BYTES = 1 << 20  # longest list of a program's names: to read it as JSON takes 25 times its length in memory, here
STRAY_LINES = 100  # that a program may write before an answer; lines that are no answers are skipped
_QUESTION = b'peer ["do"'
NOT_RUN = "not reached"
# Some tests put the program into a text of their own and run that (`Suite.runs_text`). The text runs in the program's
# box. Its result must be data: an object that stays there could claim to equal whatever it is compared with.
_RUN_TEXT = "run_text"
_RUNS_TEXT = f"""
def {_RUN_TEXT}(text, names):
    names = dict(names)
    exec(compile(text, "solution.py", "exec"), names)
    if "result" not in names:
        raise NameError("name 'result' is not defined")
    return names["result"]
"""
_RUNS_THERE = f"""
def exec(text, names):
    from {check_data.__module__} import {check_data.__name__}
    result = {_RUN_TEXT}(text, names)
    {check_data.__name__}(result)
    names["result"] = result
"""
_LIBRARIES = 4  # factor on processor time and memory: such tests load libraries in both boxes
# Names by which code reads or writes files: where tests or program have one of them, they share their folder.
_FILES = re.compile(
    r"\b(?:open|os|shutil|tempfile|pathlib|Path|zipfile|tarfile|glob|sqlite3|csv|chdir|cwd"
    r"|load|loadtxt|genfromtxt|save\w*|fromfile|tofile|memmap|read_\w+|to_(?:csv|json|parquet|pickle|excel|html)|imread|imwrite)\b"
)
_LEAVES = ("int", "float", "complex", "bytes", "decimal", "fraction", "other")  # encoded values without others in them
# Numbers without a needless zero or sign.
_NUMBER = re.compile(
    r"(?!-0$)-?(?:0|[1-9]\d{0,999})(?P<fraction>\.\d{1,1000})?(?P<exponent>e[+-]?\d{1,6})?", re.ASCII | re.IGNORECASE
)
_BLANKS, _LAID_OUT = re.compile(r"[ \t]+"), re.compile(r"^[ \t]|[ \t]{2}|\t")


@dataclass(frozen=True, slots=True)
class CallCase:
    """One call and its expected result. `tolerance` is the largest difference of numbers, None for equality; if
    `strict`, the difference must be smaller than it.

    `json`: the test comes from JSON, which has no tuples and only strings as keys: lists and tuples count as the same.
    """

    arguments: tuple[Any, ...]
    expected: Any
    tolerance: float | None = None
    json: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """Test code that calls `candidate`, or the function by its name, and raises where that is wrong."""

    source: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Standard input of a program, and the output that it must print."""

    input: str
    output: str


Case = CallCase | Check | Lines


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one problem. `entry` is the tested function, "" where the program reads standard input.

    `preamble` runs before the program (imports and helpers that the problem gives); a function in it never counts as
    the tested one. `setup` runs before each `Check`. With `runs_text` the program is a piece of code that tests embed:
    each `Check` has its text as `solution`, puts it into a text of its own, and runs that by `exec(text, names)`, after
    which names["result"] is the result.
    """

    cases: tuple[Case, ...]
    entry: str = ""
    preamble: str = ""
    setup: str = ""
    runs_text: bool = False


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
    case_cpu_s: float = CASE_CPU_S,
    isolation: Isolation | None = None,
    allow_none: bool = False,
    packages: Sequence[str] = (),
) -> Verdict:
    """Run `program` on every case; cases of one kind run in their order.

    `case_cpu_s` bounds one case: so many seconds on a processor, or so many asleep. A program that evades that clock is
    ended a second later, and fails all cases from there on. `limits` bound all cases of a kind together. Verdicts do
    not depend on how busy the machine is.

    Raises:
        IsolationError: there is no isolation, and neither `isolation` nor `allow_none` accepts that.
        NoProcessorError: the machine had no processor for the program until `limits.wall_guard_s`, `STARTS` times.
    """
    where = isolation or require_isolation(allow_none=allow_none)
    started_s = time.monotonic()
    if suite.runs_text:
        setup = f"solution = {program!r}\n{_RUNS_THERE}"
        program, suite = _RUNS_TEXT, Suite(suite.cases, _RUN_TEXT, setup=setup)
        memory_bytes = _LIBRARIES * limits.memory_bytes
        limits = replace(limits, cpu_s=_LIBRARIES * limits.cpu_s, memory_bytes=memory_bytes)
        case_cpu_s *= _LIBRARIES
    session = _Session(program, suite, limits, case_cpu_s, where, packages)
    remarks = [NOT_RUN] * len(suite.cases)  # "" where a case passed
    for kind, judged in ((CallCase, _calls), (Lines, _scripts), (Check, _checks)):
        numbers = [number for number, case in enumerate(suite.cases) if isinstance(case, kind)]
        if numbers:
            cases: list[Any] = [suite.cases[number] for number in numbers]
            for number, remark in zip(numbers, session.patiently(judged, cases), strict=True):
                remarks[number] = remark
    passed = tuple(not remark for remark in remarks)
    return Verdict(passed, tuple(remarks), time.monotonic() - started_s, where.name)


@dataclass(frozen=True, slots=True)
class _Session:
    """Program, suite and limits of one judgement."""

    program: str
    suite: Suite
    limits: Limits
    case_cpu_s: float
    isolation: Isolation
    packages: Sequence[str]

    def patiently(self, judged: Any, cases: list[Any]) -> list[str]:
        """The remarks of `judged`, which is started again where the machine was too busy for it.

        Raises:
            NoProcessorError: the machine was too busy `STARTS` times.
        """
        for _ in range(STARTS - 1):
            try:
                return judged(self, cases)
            except NoProcessorError:
                continue
        return judged(self, cases)

    def box(self, source: str, output_bytes: int) -> Box:
        limits = replace(self.limits, output_bytes=output_bytes)
        return Box(source, limits, self.isolation, packages=self.packages)

    def job(self, mode: str, **more: Any) -> bytes:
        entry, preamble = self.suite.entry, self.suite.preamble
        if not entry or parse_quietly(preamble) is None:  # left out if broken: no fault of the program
            preamble = ""
        fields = {"mode": mode, "preamble": preamble, "program": self.program, "entry": entry}
        data = marshal.dumps({**fields, "case_cpu_s": self.case_cpu_s, **more}, 2)
        return len(data).to_bytes(8, "little") + data

    def ask_all(self, mode: str, rooms_bytes: Sequence[int], inputs: Sequence[Any]) -> list[tuple[str, Any]]:
        """The program's answer to each input: "ok" and a result, or "error" and a remark. Each may be as long as its
        room and the limit on output together: to read one as JSON takes up to 25 times its length in memory, here.

        An input is sent only after the answer to the one before it. So an answer to a public test cannot depend on the
        inputs of hidden ones.
        """
        output_bytes = self.limits.output_bytes + sum(rooms_bytes)
        answers: list[tuple[str, Any]] = []
        with self.box(_runner(), output_bytes) as box:
            box.send(self.job(mode, output_bytes=output_bytes))
            _await_start(box)
            for number, (value, room_bytes) in enumerate(zip(inputs, rooms_bytes, strict=True)):
                data = marshal.dumps(value, 2)
                box.send(b"%d\n" % len(data) + data)
                box.limit_question(self.case_cpu_s * (1 if number else 2))  # the first waits for the program to load
                answer = _answer_to(box, number, self.limits.output_bytes + room_bytes)
                answers.append(answer or ("error", _ending(box)))
                if answer is None or answer[0] == "load":
                    break
        return answers + [("error", answers[-1][1])] * (len(inputs) - len(answers))


def _answer_to(box: Box, number: int, most_bytes: int) -> tuple[str, Any] | None:
    for line in _lines_of(box):
        if len(line) > most_bytes:
            return "error", "returned too much"
        answer = _read(line)
        if answer[:1] == ["load"] and len(answer) == 2 and number == 0:
            return "load", answer[1]
        if len(answer) >= 3 and type(answer[0]) is int and answer[0] == number:
            return str(answer[1]), answer[2]
    return None


def _calls(session: _Session, cases: Sequence[CallCase]) -> list[str]:
    arguments = [sandbox_runner.encode(case.arguments) for case in cases]
    # As long as they are when sent: a float takes ten times the digits that Python prints.
    rooms_bytes = [4 * len(json.dumps(sandbox_runner.encode(case.expected))) for case in cases]
    remarks = []
    for case, (kind, value) in zip(cases, session.ask_all("calls", rooms_bytes, arguments), strict=True):
        if kind != "ok":
            remarks.append(_short(str(value)) or "failed")
        else:
            remarks.append("" if matches(case, value) else f"returned {_shown(value)}, expected {case.expected!r}")
    return remarks


def _scripts(session: _Session, cases: Sequence[Lines]) -> list[str]:
    rooms_bytes = [4 * len(json.dumps(case.output)) for case in cases]
    remarks = []
    answers = session.ask_all("scripts", rooms_bytes, [case.input for case in cases])
    for case, (kind, value) in zip(cases, answers, strict=True):
        if kind != "ok":
            remarks.append(_short(str(value)) or "failed")
        elif isinstance(value, str) and same_text(value, case.output):
            remarks.append("")
        else:
            remarks.append(f"printed {_short(str(value))!r}, expected {_short(case.output)!r}")
    return remarks


def _checks(session: _Session, cases: Sequence[Check]) -> list[str]:
    """Judge with two boxes, one with the tests and one with the program; this process relays messages between them."""
    token = secrets.token_hex(16)  # only the tests' box gets it, and only a line with it is a verdict
    sources = [case.source for case in cases]
    talk = {
        "objects": _objects(),
        "files": _use_files(session.suite.preamble, session.program, session.suite.setup, *sources),
    }
    found: dict[int, str] = {}
    with session.box(_runner(), TALK_BYTES) as tester, session.box(_runner(), TALK_BYTES) as tested:
        tested.send(session.job("serve", **talk))
        tested.limit_question(session.case_cpu_s)
        _await_start(tested)
        line = tested.read_line()
        loaded = _read(line) if line is not None and len(line) <= NAMES_BYTES else []
        if loaded[:1] != ["names"]:
            said = str(loaded[1]) if loaded[:1] == ["load"] and len(loaded) == 2 else _ending(tested)
            return [_short(said)] * len(cases)
        names = [name for name in loaded[1:] if isinstance(name, str)]
        tests = {"sources": sources, "setup": session.suite.setup, "token": token, "names": names}
        tester.send(session.job("check", program="", **talk, **tests))
        _await_start(tester)
        ended = ""
        while (line := tester.read_line()) is not None:
            if line.startswith(b"peer "):  # relayed as it is: nothing that the program may have made is decoded here
                reply = None
                if not ended:
                    if line.startswith(_QUESTION):  # a new question, not an answer to one that the program asked
                        tested.limit_question(session.case_cpu_s)
                    tested.send(line[5:] + b"\n")
                    reply = _reply(tested)
                    ended = "" if reply is not None else _ending(tested)
                tester.send((reply or b'["gone"]') + b"\n")
            elif (message := _read(line))[:2] == ["verdict", token] and len(message) == 5:
                found[message[2]] = ended or ("" if message[3] is True else str(message[4]) or "failed")
        missing = _ending(tester)
    return [_short(found.get(number, missing)) for number in range(len(cases))]


def _use_files(*texts: str) -> bool:
    return any(_FILES.search(text) for text in texts)


def _reply(box: Box) -> bytes | None:
    """The next message of the program's side; other lines that it writes are skipped."""
    for line in _lines_of(box):
        if line.startswith(b"peer "):
            return line[5:]
    return None


def _lines_of(box: Box) -> Iterator[bytes]:
    """The next lines, at most `STRAY_LINES`, one of which should be an answer."""
    for _ in range(STRAY_LINES):
        if (line := box.read_line()) is None:
            return
        yield line


def _read(line: bytes) -> list[Any]:
    """A message of the runner; an empty list for anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return message if isinstance(message, list) else []


def _await_start(box: Box) -> None:
    """Read the line that the runner writes before it runs any of the program.

    Raises:
        NoProcessorError: the machine had no processor for it.
        OSError: there is none: the box did not start, or was killed, which says nothing about the program.
    """
    # Twice: a line that comes in the moment in which the program breaks a limit is left for the next call.
    line = box.read_line() or box.read_line()
    if line is None or _read(line) != ["ready"]:
        raise OSError(f"a sandbox did not start: {_ending(box)}{box.complaint}")


def _ending(box: Box) -> str:
    """Reason for which a box has stopped answering.

    Raises:
        NoProcessorError: the machine had no processor for it, which says nothing about the program.
    """
    if box.status == "no_processor":
        raise NoProcessorError(
            "a program waited for a processor until wall_guard_s: judge fewer at a time, or raise the guard"
        )
    reasons = {"timeout": "took too long", "output": "printed too much", "killed": "was killed (memory or time)"}
    return reasons.get(box.status or "", "the program ended before it answered")


def normal_form(program: str) -> str:
    """A program without layout and comments; as it is where Python cannot parse it, or write its syntax tree."""
    module = parse_quietly(program)
    try:
        return program.strip() if module is None else ast.dump(module)
    except (RecursionError, ValueError):  # deep, or an integer of more digits than Python turns into text
        return program.strip()


@functools.cache
def _runner() -> str:
    return Path(sandbox_runner.__file__).read_text(encoding="utf-8")


@functools.cache
def _objects() -> list[list[str]]:
    """Names and sources of the modules by which tests and program communicate, each after those that it imports."""
    modules = (sandbox_values, sandbox_libraries, sandbox_surroundings, sandbox_objects)
    return [[each.__name__, Path(each.__file__ or "").read_text(encoding="utf-8")] for each in modules]


def matches(case: CallCase, answer: Any) -> bool:
    """Compare an encoded answer with what the case expects. Never raises, whatever the answer.

    Equality is Python's: 1, 1.0, True and Fraction(2, 2) are equal, a list is no tuple (but see `CallCase.json`).
    """
    expected = sandbox_runner.encode(case.expected)
    if _nodes(answer, _nodes(expected)) != _nodes(expected):
        return False  # equal data has equally many parts; this also bounds what hostile data costs to decode
    if _largest_hashed(answer) > _largest_hashed(expected):
        return False  # no set or dict is larger in equal data: values of equal hash cost the square of their number
    try:
        value, wanted = sandbox_runner.decode(answer), case.expected
        if case.tolerance is not None:
            if not isinstance(value, int | float | Decimal | Fraction):
                return False
            difference = abs(value - wanted)
            return bool(difference < case.tolerance if case.strict else difference <= case.tolerance)
        return bool(_as_json(value) == _as_json(wanted) if case.json else value == wanted)
    except (ValueError, TypeError, ArithmeticError, RecursionError, IndexError, AttributeError):
        return False


def _nodes(value: Any, most: float = float("inf")) -> int:
    """Number of parts of an encoded value, counted up to a little over `most`."""
    count, stack = 0, [value]
    while stack and count <= most:
        part = stack.pop()
        count += 1
        if isinstance(part, list) and part and part[0] not in _LEAVES:
            stack += part[1:]
    return count


def _largest_hashed(value: Any) -> int:
    """Length of the largest encoded set or dict in an encoded value."""
    largest, stack = 0, [value]
    while stack:
        part = stack.pop()
        if isinstance(part, list) and part and part[0] not in _LEAVES:
            largest = max(largest, len(part) if part[0] in ("set", "frozenset", "dict") else 0)
            stack += part[1:]
    return largest


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _as_json(item) for key, item in value.items()}
    return value


def same_text(printed: str, expected: str) -> bool:
    """Compare two outputs: line by line, numbers by their value.

    Blanks at the end of a line and empty lines at the start and the end do not count. Other blanks only separate words,
    unless they are the expected line's layout: it is indented, or has two of them in a row.
    """
    said, wanted = printed.rstrip(), expected.rstrip()
    # A right output may be longer (spaces, digits of a number), but a flood of output is wrong without being parsed.
    if len(said) > 4 * len(wanted) + 1024:
        return False
    ours, theirs = _lines(said), _lines(wanted)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    r"""Lines, split at "\n" only, without the blanks at their ends; `str.splitlines` splits at other marks, too."""
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n").split("\n")


def _same_line(printed: str, expected: str) -> bool:
    if _LAID_OUT.search(expected) and _BLANKS.findall(printed) != _BLANKS.findall(expected):
        return False
    ours, theirs = (_BLANKS.split(line.strip(" \t")) for line in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(printed: str, expected: str) -> bool:
    """Compare two words: numbers by value, but only in their usual form, since a task may be about how one is written.

    So `00110` equals only itself, and `1e3` is an answer where a float is expected, not where `1000` is.
    """
    if printed == expected:
        return True
    ours, theirs = _NUMBER.fullmatch(printed), _NUMBER.fullmatch(expected)
    if not ours or not theirs or (ours["exponent"] and not (theirs["exponent"] or theirs["fraction"])):
        return False
    return Decimal(printed) == Decimal(expected)


def _shown(answer: Any) -> str:
    if isinstance(answer, list) and answer[:1] == ["other"]:
        return f"a value of type {_short(str(answer[-1]))}"
    try:
        return _short(repr(sandbox_runner.decode(answer))) if _nodes(answer, 200) <= 200 else "a long value"
    except (ValueError, TypeError, ArithmeticError, RecursionError, IndexError, AttributeError):
        return "something that is no data"


def _short(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half of a surrogate pair cannot be encoded as UTF-8
    return text if len(text) <= 200 else f"{text[:200]}..."


# ------------------------------------------------------------------------------------------------ programs in replies

PYTHON = ("python", "python3", "py")
# Code within a line, or a block's first line. Linear in time: quantifiers are possessive (`++` never gives back), and a
# match starts only at the first mark of a run.
_FENCE = re.compile(r"(?<!`)(`{3,}+)(?:[^`]++\1|[ \t]*+([^\s`]*+)[^`]*+$)")
_NEXT_BLOCK = re.compile(r"`{3,}+\w[^\s`]*+\s*$")


def fenced_blocks(text: str, languages: Sequence[str] = PYTHON) -> list[str]:
    """Contents of a text's fenced blocks that name one of the languages; if there are none, of blocks without a name.

    Empty blocks do not count. Blocks of other languages are also read to their ends: else the text between two of them
    would be taken for a block.
    """
    found = [(language, content) for language, content in _blocks(text) if content.strip()]
    named = [content for language, content in found if language in languages]
    return named or [content for language, content in found if not language]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each block that has an end, as Markdown reads them: by lines, without the indentation
    of the fence."""
    fence, language, margin, lines = "", "", 0, []
    for line in text.split("\n"):
        start = 0
        if fence:
            end = _end_of_block(line, fence, margin)
            if end is None or line[:end].strip():
                lines.append(line[:margin].lstrip(" \t") + line[margin:end])
            if end is None:
                continue
            yield language, "\n".join(lines).strip("\r\n")
            fence = ""
            # A fence with a language (```python) ends a block whose own end is missing, and begins the next one.
            start = end if _NEXT_BLOCK.match(line, end) else len(line) - len(line[end:].lstrip("`"))
        for begun in _FENCE.finditer(line, start):
            if begun[2] is not None:
                margin = len(line) - len(line.lstrip(" \t"))
                fence, language, lines = begun[1], begun[2].casefold(), []


def _end_of_block(line: str, fence: str, margin: int) -> int | None:
    """The position at which a line ends a block, None where it does not.

    A fence ends it at the start of the line, or at its end after code without one. A fence further to the right, as in
    a docstring, or within a line of code belongs to the program.
    """
    at = line.find(fence)
    if at < 0:
        return None
    ends = not line[at:].strip().strip("`") if line[:at].strip() else at <= margin + 3  # 3 as in Markdown
    return at if ends else None


# ---------------------------------------------------------------------------------------- assert statements taken apart


def parse_quietly(source: str) -> ast.Module | None:
    """The syntax tree, None where there is none. Never warns."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def from_assert(source: str, entry: str) -> tuple[CallCase | Check, ...]:
    """The cases of test code that consists of `assert` statements; other test code is one `Check` as a whole."""
    module = parse_quietly(source)
    if module is not None and module.body and all(isinstance(node, ast.Assert) for node in module.body):
        return _cases(module.body, entry)
    return (Check(source),)


_UNITTEST = """
import unittest as _unittest
_cases = [case for case in list(globals().values()) if isinstance(case, type) and issubclass(case, _unittest.TestCase)]
_load = _unittest.defaultTestLoader.loadTestsFromTestCase
_found = _unittest.TextTestRunner().run(_unittest.TestSuite(map(_load, _cases)))
assert _found.wasSuccessful() and _found.testsRun, "; ".join(
    text.strip().splitlines()[-1] for _, text in _found.errors + _found.failures
)
"""


def from_unittest(source: str) -> Check:
    """Test code that defines classes of `unittest`, all of whose tests have to pass."""
    return Check(source + "\n" + _UNITTEST)


def from_test(source: str, entry: str) -> tuple[CallCase | Check, ...]:
    """The cases of one text of MBPP's test_list: asserts, other code that runs, or classes of `unittest`.

    Raises:
        ValueError: it passes whatever is tested.
    """
    if "TestCase" in source:
        return (from_unittest(source),)
    cases, module = from_assert(source, entry), parse_quietly(source)
    if module is not None and cases and not _tests_anything(module.body):
        raise ValueError(f"a test checks nothing when it runs: {_short(source)!r}")
    return cases


def _tests_anything(statements: Sequence[ast.stmt]) -> bool:
    """False if test code passes whatever is tested: it only defines things, or asserts what is always true."""
    return any(_can_fail(node) for node in statements)


def _can_fail(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    if isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__"):
        return _tests_anything(node.orelse)  # it is no main program in the box
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Tuple) and node.test.elts) and not _is_true(node.test)
    return any(isinstance(each, ast.Assert | ast.Raise | ast.Call) for each in ast.walk(node))


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _defines_check(module: ast.Module) -> bool:
    names = (getattr(node, "name", getattr(node, "id", "")) for node in ast.walk(module))
    return "check" in names


def from_check(source: str, entry: str) -> tuple[CallCase | Check, ...]:
    """The cases of HumanEval's test code, which defines `check(candidate)`, or BigCodeBench's `unittest` classes.

    Raises:
        ValueError: it defines neither, or `check` passes whatever is tested.
    """
    whole = (Check(f"{source}\n\ncheck(candidate)\n"),)
    module = parse_quietly(source)
    if module is None:
        return whole
    if "TestCase" in source and not any(getattr(node, "name", "") == "check" for node in module.body):
        return (from_unittest(source),)
    if not _defines_check(module):
        raise ValueError("test defines neither check(candidate) nor classes of unittest")
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and not _tests_anything(node.body):
            raise ValueError("check(candidate) checks nothing")
    # Only where the code is nothing but `check`, and that nothing but asserts: anything else may change the calls.
    definitions = [node for node in module.body if not _is_remark(node) and not _is_metadata(node)]
    if len(definitions) != 1:
        return whole
    check = definitions[0]
    if not isinstance(check, ast.FunctionDef) or check.name != "check" or len(check.args.args) != 1:
        return whole
    body = [node for node in check.body if not _is_remark(node)]
    if not all(isinstance(node, ast.Assert) for node in body):
        return whole
    return _cases(body, entry, check.args.args[0].arg) or whole


def calls_of(source: str) -> list[str]:
    """Names of the functions that the test code's `assert` statements call, in their order; of nested calls the outer
    one comes first."""
    module = parse_quietly(source)
    names = []
    for node in ast.walk(module) if module else ():
        if isinstance(node, ast.Assert):
            names += [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return names


def _cases(asserts: list[Any], entry: str, called: str = "candidate") -> tuple[CallCase | Check, ...]:
    """One case for each `assert`; `called` is another name of the tested function in them."""
    cases: list[CallCase | Check] = []
    named = "" if called == "candidate" else f"{called} = candidate\n"
    for node in asserts:
        if _is_true(node.test):
            continue  # HumanEval's `assert True`
        cases.append(_call(node.test, (entry, called, "candidate")) or Check(named + ast.unparse(node)))
    return tuple(cases)


def _is_remark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _is_metadata(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "METADATA"


def _call(test: ast.expr, names: Container[str]) -> CallCase | None:
    """A condition as a call whose result can be compared as data; None where it has another form."""
    try:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return _comparison(test.left, test.ops[0], test.comparators[0], names)
    except ValueError:
        pass
    return None


def _comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr, names: Container[str]) -> CallCase | None:
    if isinstance(operator, ast.Eq):
        if (arguments := _arguments(left, names)) is not None:
            return CallCase(arguments, ast.literal_eval(right))
        if (arguments := _arguments(right, names)) is not None:
            return CallCase(arguments, ast.literal_eval(left))
    if isinstance(operator, ast.Lt | ast.LtE) and _is_call_of(left, ("abs",)):
        difference = left.args[0]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub):
            arguments = _arguments(difference.left, names)
            if arguments is not None:
                expected, tolerance = ast.literal_eval(difference.right), ast.literal_eval(right)
                if isinstance(expected, int | float) and isinstance(tolerance, int | float):
                    return CallCase(arguments, expected, float(tolerance), strict=isinstance(operator, ast.Lt))
    return None


def _arguments(node: ast.expr, names: Container[str]) -> tuple[Any, ...] | None:
    """The arguments of a call of the tested function; None for another expression.

    Raises:
        ValueError: they are not literals.
    """
    if not _is_call_of(node, names):
        return None
    assert isinstance(node, ast.Call)
    return tuple(ast.literal_eval(argument) for argument in node.args)


def _is_call_of(node: ast.expr, names: Container[str]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and not node.keywords
        and bool(node.args or node.func.id != "abs")
    )
