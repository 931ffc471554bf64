"""Verdicts on programs: tests taken apart, results compared as data, output compared as text."""

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.grading import code
from flowjax.grading.code import (
    CallCase,
    Check,
    Lines,
    Suite,
    Verdict,
    _read,
    from_assert,
    from_check,
    judge,
    matches,
    normal_form,
    same_text,
)
from flowjax.grading.sandbox import Box, Limits
from flowjax.grading.sandbox_runner import decode, encode

PATIENT = Limits(idle_s=30.0, cpu_s=60.0)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
hashable = st.recursive(scalars, lambda x: st.lists(x, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    scalars | st.complex_numbers(),
    lambda x: (
        st.lists(x, max_size=4)
        | st.lists(x, max_size=4).map(tuple)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, x, max_size=3)
    ),
    max_leaves=12,
)


def judged(program: str, suite: Suite, **options: Any) -> Verdict:
    return judge(program, suite, options.pop("limits", PATIENT), case_cpu_s=options.pop("case_cpu_s", 20.0), **options)


def same_data(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


@given(values)
@settings(max_examples=300, deadline=None)
def test_values_cross_with_their_types(value: Any):
    crossed = decode(json.loads(json.dumps(encode(value))))
    if "'set'" not in repr(encode(value)):  # whose order may differ
        assert same_data(crossed, value)
    assert matches(CallCase((), value), json.loads(json.dumps(encode(value)))) == bool(crossed == value)


@given(values, values)
@settings(max_examples=300, deadline=None)
def test_equality_is_that_of_python(expected: Any, returned: Any):
    returned = copy.deepcopy(returned)  # no shared nan, which containers take for equal to itself
    assert matches(CallCase((), expected), encode(returned)) == bool(expected == decode(encode(returned)))


json_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda x: (
        st.lists(x, max_size=4)
        | st.tuples(
            st.sampled_from(["list", "tuple", "set", "dict", "range", *code._LEAVES]),
            x,
            x,
        ).map(list)
        | st.dictionaries(st.text(max_size=3), x, max_size=2)
    ),
    max_leaves=10,
)


@given(json_junk, values, st.sampled_from([None, 0.5]))
@settings(max_examples=500, deadline=None)
def test_no_answer_makes_the_comparison_fail(answer: Any, expected: Any, tolerance: float | None):
    assert matches(CallCase((), expected, tolerance), answer) in (True, False)
    assert not matches(CallCase((), "a secret that no junk equals", tolerance), answer)


def test_numbers_that_collide_cost_nothing():
    """Integers of equal hash make sets quadratic: what is larger than the expected is not even built."""
    hostile = ["set", *(encode(n * (2**61 - 1)) for n in range(200_000))]
    assert not matches(CallCase((), {1, 2}), hostile)
    assert not matches(CallCase((), list(range(200_000))), hostile)  # of as many parts
    assert not matches(CallCase((), [{1}, *range(199_998)]), ["list", hostile[:200_000]])


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("7\n", "7", True),
        ("7", "8", False),
        ("1 2\n3 ", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("0.50", "0.5", True),
        ("1e3", "1000", False),
        ("1e3", "1000.0", True),
        ("1.5e-07", "1.5E-7", True),
        ("7.0", "7", True),
        ("-0.0", "0.0", True),
        ("-0", "0", False),
        ("+5", "5", False),
        ("005", "5", False),
        ("110", "00110", False),
        ("00110", "00110", True),
        ("1.10e2", "00110", False),
        (" 1  2\r\n3\r\n", "1 2\n3", True),
        ("\n7\n\n", "7", True),
        ("1\x0b2", "1\n2", False),
        ("1\x0c2", "1\n2", False),
        ("1\u20282", "1\n2", False),
        ("1\xa02", "1 2", False),
        ("a\xa0b", "a\xa0b", True),
        ("1\n\n2", "1\n2", False),
        ("*\n***", " *\n***", False),
        (" *  \n***", " *\n***\n", True),
        (" *\n***", "*\n***", True),  # data sets that keep their outputs without the blanks around them
        ("a b", "a    b", False),
        ("a\tb", "a    b", False),
        ("a    b", "a    b", True),
        ("a  0.50", "a  0.5", True),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("1_000", "1000", False),
        ("", "", True),
        ("", "0", False),
        ("1" * 5000, "1", False),
        ("9e999999", "1", False),
    ],
)
def test_output_is_compared_by_line_and_number(printed: str, expected: str, same: bool):
    assert same_text(printed, expected) == same


def test_simple_asserts_become_calls():
    source = """
METADATA = {'author': 'x'}

def check(candidate):
    # a remark
    assert True, "good"
    assert candidate([1.0, -2], 'a') == {'k': (1, None)}, "message"
    assert 5 == candidate(5)
    assert abs(candidate(1) - 0.5) < 1e-6
    assert abs(candidate(2) - 0.5) <= 1e-6
    assert candidate(x=1) == 2
    assert sorted(candidate(3)) == [1]
"""
    assert from_check(source, "f") == (
        CallCase(([1.0, -2], "a"), {"k": (1, None)}),
        CallCase((5,), 5),
        CallCase((1,), 0.5, 1e-6, strict=True),
        CallCase((2,), 0.5, 1e-6),
        Check("assert candidate(x=1) == 2"),
        Check("assert sorted(candidate(3)) == [1]"),
    )
    assert from_assert("assert f(2) == 4", "f") == (CallCase((2,), 4),)


def test_the_tested_function_has_the_name_that_check_gives_it():
    source = "def check(fn):\n    assert fn(1) == 2\n    assert fn(2) in (4,)"
    suite = Suite(from_check(source, "f"), "f")
    assert suite.cases == (CallCase((1,), 2), Check("fn = candidate\nassert fn(2) in (4,)"))
    assert judged("def f(x): return 2 * x", suite).success
    assert judged("def f(x): return 3 - x", suite).passed == (True, False)


@pytest.mark.parametrize(
    "source",
    [
        "def check(candidate, times=2):\n    assert candidate(0) == 0",
        "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i",
        "import math\n\ndef check(candidate):\n    assert candidate(0) == 0",
        "def check(candidate):\n    x = 3\n    assert candidate(x) == 3",
        "def check(candidate)",
    ],
)
def test_other_test_code_stays_code(source: str):
    assert from_check(source, "f") == (Check(f"{source}\n\ncheck(candidate)\n"),)


CHECKED = Suite(
    (
        Check("for i in range(4):\n    assert candidate(i) == helper(i)"),
        Check("assert list(candidate(7)) == [14], 'not so'"),
        Check("import math\nassert math.isclose(double(0.1), 0.2)"),
    ),
    "double",
    setup="def helper(x):\n    return 2 * x",
)


def test_test_code_reaches_the_program_through_data():
    verdict = judged("def double(x):\n    return x + x", CHECKED)
    assert verdict.passed == (True, False, True)
    assert "TypeError" in verdict.remarks[1]
    assert verdict.score == pytest.approx(2 / 3)


def test_a_program_that_dies_fails_the_tests_from_there_on():
    verdict = judged("import os\ndef double(x):\n    if x == 7: os._exit(0)\n    return x + x", CHECKED)
    assert verdict.passed == (True, False, False)


@pytest.mark.parametrize("kind", ["names", "answer"])
def test_lines_of_a_program_are_not_read_without_limit(kind: str, monkeypatch: pytest.MonkeyPatch):
    """62 MB of nested lists in place of the program's names took 1.6 GB of the judge's own memory."""
    read: list[int] = []
    monkeypatch.setattr(code, "_read", lambda line: (read.append(len(line)), _read(line))[1])
    line = "b'[\"names\",' + b'{},' * 1_000_000 + b'0]\\n'" if kind == "names" else "b'[]\\n' * 10_000"
    write = f"data = memoryview({line})\nwhile data: data = data[os.write(3, data):]"
    test = Check("assert candidate(1) in (2,)") if kind == "names" else CallCase((1,), 2)
    assert not judged(f"import os\n{write}\ndef f(x): return 1", Suite((test,), "f")).success
    assert len(read) <= 200 and sum(read) < 1 << 20


@pytest.mark.parametrize(("depth", "right"), [(70, True), (190, True), (300, False)])
def test_data_may_be_nested_as_deeply_as_between_tests_and_program(depth: int, right: bool):
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    suite = Suite((CallCase((nested,), nested), CallCase((), nested)), "f")
    build = f"    a = []\n    for _ in range({depth}): a = [a]\n    return x[0] if x else a"
    assert judged(f"def f(*x):\n{build}", suite).passed == (right, right)


@pytest.mark.parametrize(
    ("result", "wanted", "right"),
    [
        ("Decimal(x) / 2", "0.5", True),
        ("[Decimal(x), -Decimal(x)]", "[1, -1.0]", True),
        ("{Decimal(x): Decimal('Infinity')}", "{1: 1e999}", True),
        ("Decimal('0.1')", "0.1", False),
        ("Decimal('0.1')", "'0.1'", False),
        ("Decimal('sNaN')", "0.1", False),
        ("Decimal('1e999999999')", "1", False),
        ("Fraction(6 * x, 2)", "3", True),
        ("(Fraction(6 * x, 2), Fraction(x, 2))", "(3, 0.5)", True),
        ("Fraction(x, 3)", repr(1 / 3), False),
        ("Fraction(10 ** 20000, 3)", "3", False),
        ("{x: 1}.keys()", "{1}", True),
        ("{x: 2}.items()", "{(1, 2)}", True),
        ("{x: 2}.keys()", "[1]", False),
        ("{x: [2]}.items()", "{(1, 2)}", False),
        ("{x: 2}.values()", "[2]", False),
        ("iter([x])", "[1]", False),
        ("[Fraction(x, 2), iter([x])]", "[0.5, [1]]", False),
    ],
)
def test_an_assert_is_as_right_as_a_call_as_it_is_as_code(result: str, wanted: str, right: bool):
    suite = Suite((*from_assert(f"assert f(1) == {wanted}", "f"), Check(f"assert (f(1)) == {wanted}, 'as code'")), "f")
    assert isinstance(suite.cases[0], CallCase)
    program = f"from decimal import Decimal\nfrom fractions import Fraction\ndef f(x):\n    return {result}"
    verdict = judged(program, suite)
    assert verdict.passed == (right, right) and " at 0x" not in verdict.remarks[0]


def test_a_tolerance_is_for_fractions_too():
    program = "from decimal import Decimal\nfrom fractions import Fraction\ndef f(x):\n    return"
    near, whole = (from_assert(f"assert abs(f(3) - {wanted}) < 0.01", "f") for wanted in ("0.333", "3"))
    assert judged(f"{program} Fraction(1, x)", Suite(near, "f")).success
    assert judged(f"{program} Decimal(x)", Suite(whole, "f")).success
    assert not judged(f"{program} Decimal(1) / x", Suite(near, "f")).success  # Python subtracts no float from it


def test_every_kind_of_case_in_one_suite():
    suite = Suite((CallCase((1,), 2), Check("assert candidate(2) == 4"), CallCase((3,), 7)), "f")
    verdict = judged("def f(x):\n    print('noise')\n    return 2 * x", suite)
    assert verdict.passed == (True, True, False)
    assert verdict.remarks[2] == "returned 6, expected 7"


def test_programs_that_read_input():
    suite = Suite((Lines("3 4\n", "7\n"), Lines("1\n2\n", "3"), Lines("x", "")))
    for program in (
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(sum(int(word) for word in open(0).read().split()))",
        "import os\na = os.read(0, 100).split()\nos.write(1, b'%d' % sum(map(int, a)))",
        "def main():\n    import sys\n    print(sum(int(w) for line in sys.stdin for w in line.split()))\n"
        "if __name__ == '__main__':\n    main()\n    exit()",
    ):
        verdict = judged(program, suite)
        assert verdict.passed == (True, True, False), verdict
        assert "ValueError" in verdict.remarks[2]


def test_one_run_cannot_change_the_next():
    program = "import builtins\nprint(getattr(builtins, 'left', 0))\nbuiltins.left = 1\nopen('left', 'a').write('x')"
    assert judged(program, Suite((Lines("", "0"), Lines("", "0")))).success


def test_a_slow_case_costs_only_itself():
    suite = Suite((CallCase((1,), 1), CallCase((2,), 2), CallCase((3,), 3)), "f")
    verdict = judged("def f(x):\n    while x == 2: pass\n    return x", suite, case_cpu_s=0.5)
    assert verdict.passed == (True, False, True)
    assert verdict.remarks[1] == "took too long"
    lines = Suite((Lines("1", "1"), Lines("2", "2"), Lines("3", "3")))
    assert judged("x = input()\nwhile x == '2': pass\nprint(x)", lines, case_cpu_s=0.5).passed == (True, False, True)


def test_a_slow_test_costs_only_itself():
    suite = Suite(tuple(Check(f"assert candidate({n}) in ({2 * n},)") for n in range(4)), "f")
    verdict = judged("def f(x):\n    while x == 1: pass\n    return 2 * x", suite, case_cpu_s=0.5)
    assert verdict.passed == (True, False, True, True)
    assert verdict.remarks[1] == "took too long"
    caught = Suite((Check("try:\n    f(1)\nexcept BaseException:\n    pass"), Check("assert f(2) == 4")), "f")
    assert judged("def f(x):\n    while x == 1: pass\n    return 2 * x", caught, case_cpu_s=0.5).passed == (False, True)


def test_what_a_case_left_is_ended_with_it():
    program = "import os\nif os.fork() == 0:\n    while True: pass\nprint(1)"
    verdict = judged(program, Suite((Lines("", "1"), Lines("", "1"))))
    assert verdict.success and verdict.seconds < 30


@pytest.mark.parametrize(
    ("program", "remark"),
    [
        ("def f(x) return x", "SyntaxError: expected ':' (line 1)"),
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (line 1)"),
        ("def g(x):\n    return x", "NameError: name 'f' is not defined"),
        ("def f(x):\n    y = 1\n    return y / 0", "ZeroDivisionError: division by zero (line 3)"),
        ("def f(x):\n    return object", "returned a value of type type, expected 1"),
        ("def f(x):\n    return 'a' * 1000", "returned 'aaa"),
        ("def f(x):\n    return f(x)", "RecursionError"),
        ("def f(x):\n    raise SystemExit('bye')", "SystemExit: bye (line 2)"),
        ("import os\nos._exit(0)", "the program ended before it answered"),
        ("x = [0] * 10 ** 12", "MemoryError"),
    ],
)
def test_remarks_say_what_happened(program: str, remark: str):
    [said] = judged(program, Suite((CallCase((1,), 1),), "f")).remarks
    assert said.startswith(remark)
    assert len(said) < 400


@pytest.mark.parametrize(
    "program",
    [
        "import threading\ndef main(): print(int(input()) + 1)\nthreading.Thread(target=main).start()",
        "import threading, time\ndef main():\n    time.sleep(0.1)\n    print(int(input()) + 1)\n"
        "threading.Thread(target=main).start()\nraise SystemExit",
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(int(input()) + 1)",
    ],
)
def test_a_script_ends_as_python_does(program: str):
    """After its threads and what it left for the end: programs for contests print there."""
    assert judged(program, Suite((Lines("3", "4"), Lines("-1", "0")))).success


def test_methods_of_solution_and_missing_imports():
    suite = Suite((CallCase(([1, 2],), 3, json=True),), "total", preamble="from typing import List")
    assert judged("class Solution:\n    def total(self, xs: List[int]) -> int:\n        return sum(xs)", suite).success


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("x = 1", False),
        ("class Solution:\n    def other(self, a, b):\n        return 4", False),
        ("class Solution:\n    def gcd(self, a, b):\n        return gcd(a, b)", True),
        ("def gcd(a, b):\n    return gcd(b, a % b) if b else a", True),
        ("from math import gcd", True),
        ("from __future__ import annotations\ndef gcd(a: Unknown, b):\n    return math.gcd(a, b)", True),
    ],
)
def test_the_preamble_never_passes_for_the_program(program: str, right: bool):
    preamble = "import math\nfrom math import *\n" + "\n" * 10
    for case in (CallCase((8, 12), 4), Check("assert gcd(8, 12) == 4")):
        if isinstance(case, Check) and "return gcd(a, b)" in program:
            continue  # tests that are code see the method by the function's name, and so does it
        assert judged(program, Suite((case,), "gcd", preamble)).success == right
    [said] = judged("\nraise KeyError(1)", Suite((CallCase((8, 12), 4),), "gcd", preamble)).remarks
    assert said == "KeyError: 1 (line 2)"


def test_json_tests_know_no_tuples():
    assert matches(CallCase((), [[1, 2]], json=True), encode([(1, 2)]))
    assert not matches(CallCase((), [[1, 2]]), encode([(1, 2)]))
    assert matches(CallCase((), {"1": 2}, json=True), encode({1: 2}))


@pytest.mark.parametrize("message", ["", ', "with a message"'])
def test_wrong_verdicts_of_others(message: str):
    """An assert with a message is an assert; a printed pass is none; an empty suite is passed by nobody."""
    suite = Suite(from_assert(f"assert f(2) == 4{message}", "f"), "f")
    assert judged("def f(x):\n    return x + x", suite).success
    assert not judged("print('{\"passed\": true}')\nraise SystemExit(0)", suite).success
    assert not judged("def f(x):\n    return x + x", Suite((), "f")).success


def test_a_comparison_with_a_tolerance():
    case = CallCase((), 0.5, 1e-6)
    assert matches(case, encode(0.5 + 1e-7))
    for wrong in (0.6, math.nan, math.inf, "0.5", 1j, [0.5], None, 10**400):
        assert not matches(case, encode(wrong))


@pytest.mark.parametrize(("operator", "right"), [("<", False), ("<=", True)])
def test_a_strict_comparison_stays_one(operator: str, right: bool):
    """Half of nine, rounded: a difference of exactly 0.5."""
    suite = Suite(from_assert(f"assert abs(half(9) - 4.5) {operator} 0.5", "half"), "half")
    assert judged("def half(x):\n    return x // 2", suite).success == right
    assert judged("def half(x):\n    return x / 2", suite).success


ONE_OF_EACH = (CallCase((1,), 2), Lines("1\n", "2"), Check("assert f(1) == 2"))


@pytest.mark.parametrize("case", ONE_OF_EACH)
@pytest.mark.parametrize(
    "runner", ["raise SystemExit(1)", "print('[\"names\"]')", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_box_that_does_not_start_is_no_fault_of_the_program(case, runner: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "_runner", lambda: f"import sys\nprint('no space', file=sys.stderr)\n{runner}")
    with pytest.raises(OSError, match="a sandbox did not start: "):
        judged("def f(x): return x + 1\nprint(f(int(input())))", Suite((case,), entry="f"))


@pytest.mark.parametrize(
    "cases", [(CallCase((0,), [0.1] * 9000), CallCase((1,), 1)), (Lines("0", "\u00e9" * 9000), Lines("1", "1"))]
)
def test_each_answer_has_the_room_of_its_own_expected_result(cases: tuple):
    """The long one is right, and longer when it is sent than as text; the short one may not be as long."""
    program = "def f(x): return [0.1] * 9000\nprint('\u00e9' * 9000)"
    found = judged(program, Suite(cases, entry="f"), limits=replace(PATIENT, output_bytes=1 << 12))
    assert found.passed == (True, False) and found.remarks[1] == "returned too much"


def test_a_program_that_breaks_a_limit_as_soon_as_it_runs_is_at_fault(monkeypatch: pytest.MonkeyPatch):
    """Where this process comes late, it may see the runner's first line and the broken limit at once."""
    look = Box._look

    def late(box: Box, *, answered: bool) -> None:
        look(box, answered=answered)
        if b"ready" in box._output["stdout"] and box.status is None:
            box._break("killed")

    monkeypatch.setattr(Box, "_look", late)
    found = judged("def f(x): return x + 1", Suite((ONE_OF_EACH[0],), entry="f"))
    assert found.passed == (False,) and found.remarks == ("was killed (memory or time)",)


@pytest.mark.parametrize(
    "read", ["for line in sys.stdin: print(f(int(line)))", "data = sys.stdin.read()", "open(0).read()", "input"]
)
def test_a_program_with_tests_has_an_empty_input(read: str):
    """It read the messages of the runner, or waited for more of them."""
    found = judged(f"import sys\ndef f(x): return x + 1\n{read}", Suite((ONE_OF_EACH[0], ONE_OF_EACH[2]), entry="f"))
    assert found.passed == (True, True)


@pytest.mark.parametrize("program", ["M = 0x" + "f" * 4000, "x = " + "-" * 5000 + "1", "x = (", "x = 1"])
def test_every_program_has_a_normal_form(program: str):
    """Python turns no integer of more than 4,300 digits into text, and so no syntax tree with one."""
    assert normal_form(program + "  ") == normal_form(program) != normal_form(f"{program}\ny = 2")
