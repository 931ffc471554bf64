"""Tests that are code: right programs of the data sets' shapes pass, wrong ones and tricks do not, nothing leaks."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canonical_problems import PROBLEMS
from hostile_programs import TRICKS

from flowjax.grading.code import CallCase, Check, Lines, Suite, judge
from flowjax.grading.sandbox import Limits
from flowjax.grading.sandbox_objects import Peer

TIGHT = Limits(idle_s=1.0, cpu_s=3.0, memory_bytes=192 << 20)
PATIENT = Limits(idle_s=30.0, cpu_s=60.0)
ROOMY = Limits(idle_s=30.0, cpu_s=60.0, memory_bytes=2 << 30)
_TESTS = """
import unittest
class TestF(unittest.TestCase):
    def test_number(self):
        self.assertEqual(f(21), 42)
    def test_words(self):
        for word in ("BEBE", "x"):
            with self.subTest(word=word):
                self.assertEqual(f(word), word + word)
    def test_list(self):
        data = [1]
        self.assertEqual(f(data), [1, 1])
        self.assertEqual(data, [1])
found = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(TestF))
assert found.wasSuccessful() and found.testsRun
"""
_PATIENT_TESTS = """
def attempt(*given):
    try:
        return f(*given)
    except Exception:
        return None
assert attempt(21) is not None
assert attempt(21) in (42, 43) and attempt("BEBE") == "BEBEBEBE" and abs(attempt(1.5) - 3.0) < 1e-9
"""
SUITE = Suite(
    (
        Check(_TESTS),
        Check(_PATIENT_TESTS),
        Check("assert candidate(21) == 42"),
        Check("try:\n    f(21)\nexcept:\n    pass\nassert 42 == f(21)"),
        Check("def callback(): return 'BEBE'\nf(callback)\nassert {f(21)} == {42}"),
    ),
    "f",
)


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_programs_pass_and_wrong_ones_fail(name: str):
    entry, tests, right, wrong = PROBLEMS[name]
    suite = Suite((Check(tests),), entry)
    verdict = judge(right, suite, PATIENT, case_cpu_s=20.0)
    assert verdict.success, verdict.remarks
    assert not judge(wrong, suite, PATIENT, case_cpu_s=20.0).success


def test_a_right_program_passes_what_tricks_are_tried_on():
    right = "def f(x):\n    return 2 * x() if callable(x) else x + x"
    verdict = judge(right, SUITE, PATIENT, case_cpu_s=20.0)
    assert verdict.success, verdict


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_do_not_pass(name: str):
    started_s = time.process_time()
    verdict = judge(TRICKS[name], SUITE, TIGHT, case_cpu_s=0.5)
    assert verdict.score == 0.0, verdict
    assert time.process_time() - started_s < 10


_SEARCH = """
import gc, glob, os, re, sys
def found():
    texts = []
    for o in gc.get_objects():
        if isinstance(o, (list, tuple, dict)):
            try: texts.append(repr(o))
            except Exception: pass
    frame = sys._getframe()
    while frame:
        for v in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            try: texts.append(repr(v))
            except Exception: pass
        frame = frame.f_back
    for line in open('/proc/self/maps'):
        low, high = (int(n, 16) for n in line.split()[0].split('-'))
        if 'rw' in line and high - low < 1 << 28:
            try:
                with open('/proc/self/mem', 'rb') as memory:
                    memory.seek(low)
                    texts.append(memory.read(high - low).decode('latin1'))
            except (OSError, ValueError): pass
    for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/tmp/*'):
        try: texts.append(open(path, errors='replace').read())
        except OSError: pass
    for text in texts:
        if match := re.search('HIDDEN-[0-9]{6}', text): return match[0]
    return 'nothing'
"""
_LEAKS = {
    "calls": (
        Suite((CallCase(("public",), "a"), CallCase(("HIDDEN-271828",), "b")), "f"),
        _SEARCH + "def f(x): return found()",
    ),
    "scripts": (Suite((Lines("public", "a"), Lines("HIDDEN-271828", "b"))), _SEARCH + "print(found())"),
    "checks": (
        Suite((Check("assert f('public') == 'a', f('x')"), Check("assert f('HIDDEN-271828') == 'HIDDEN-314159'")), "f"),
        _SEARCH + "def f(x): return found()",
    ),
}


@pytest.mark.parametrize("kind", _LEAKS)
def test_what_is_said_of_a_public_test_holds_no_hidden_input(kind: str):
    """The program searches its memory for the hidden input when it answers the public test; later it finds it."""
    suite, program = _LEAKS[kind]
    public, hidden = judge(program, suite, ROOMY, case_cpu_s=30.0).remarks
    assert "nothing" in public and "HIDDEN" not in public
    assert "HIDDEN-271828" in hidden or kind == "checks"  # it does look in the right places


def test_a_program_that_dies_says_nothing_of_hidden_inputs():
    suite = Suite((CallCase(("public",), "a"), CallCase(("HIDDEN-271828",), "b")), "f")
    program = f"""{_SEARCH}
def f(x):
    os.write(3, ('["load", "%s"]\\n' % found()).encode())
    os._exit(0)"""
    assert "HIDDEN" not in judge(program, suite, ROOMY, case_cpu_s=30.0).remarks[0]


def test_arrays_arrive_as_copies_of_data_and_never_as_objects():
    peer: Any = Peer(None, None, decides=True, files=False)
    given = np.arange(6, dtype=np.int16).reshape(2, 3)
    shape, content = ["tuple", 2, 3], ["bytes", given.tobytes().hex()]
    array = peer._decode(["library", "numpy.array", "'<i2'", shape, content])
    np.testing.assert_array_equal(array, given)
    assert array.dtype == given.dtype
    array[0, 0] = 7  # the tests may write to it
    with pytest.raises(ValueError, match="objects are no data"):
        peer._decode(["library", "numpy.array", "'|O'", ["tuple", 1], ["bytes", "00" * 8]])


_SHADOWS = {
    "a built-in function": ("assert all(f(x) == 2 * x for x in (1, 2))", "def all(x):\n    return True"),
    "a range that is empty": ("for x in range(3):\n    assert f(x) == 2 * x", "def range(*a):\n    return []"),
    "a module": (
        "assert math.isclose(f(1), 2)",
        "class math:\n    isclose = staticmethod(lambda *a: True)",
    ),
    "a class of a library": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
        "class TestCase:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return TestCase()",
    ),
    "a name of another class": (
        "try:\n    Point\nexcept Exception:\n    pass\nassert f(1) == 2",
        "class Point: pass\nclass Other:\n    def __eq__(self, other):\n        return True\n"
        "Other.__name__ = 'Point'\ndef f(x):\n    return Other()",
    ),
    "a class of the tests": (
        "class Given:\n    pass\nassert f(Given()) == 2",
        "def f(x):\n    type(x).__eq__ = lambda *a: True\n    return x",
    ),
    "a mock that equals everything": (
        "from unittest.mock import Mock\nassert f(Mock()) == 2",
        "def f(x):\n    x.__eq__ = lambda *a: True\n    return x",
    ),
    "a mock that has been called": (
        "from unittest.mock import Mock\nm = Mock()\nf(m)\nm.assert_called_once_with(2)",
        "def f(x):\n    x.assert_called_once_with = lambda *a: None",
    ),
    "a mock that wraps": (
        "from unittest.mock import Mock\nm = Mock()\nassert f(m) == 2",
        "def f(x):\n    import builtins\n    x.configure_mock(__eq__=lambda *a: True)\n    return x",
    ),
    "a context that forgives": (
        "with f(1) as x:\n    assert x == 2",
        "class C:\n    def __enter__(self):\n        return 1\n    def __exit__(self, *a):\n        return True\n"
        "def f(x):\n    return C()",
    ),
    "a tensor": (
        "import torch\nassert torch.allclose(f(1), torch.tensor([2.0]))",
        "class A:\n    def __torch_function__(self, *a, **k):\n        return True\ndef f(x):\n    return A()",
    ),
}


@pytest.mark.parametrize("name", _SHADOWS)
def test_no_name_of_a_program_stands_for_what_the_tests_mean(name: str):
    test, program = _SHADOWS[name]
    site = str(Path(np.__file__).parent.parent)
    program = program if "def f" in program else f"{program}\ndef f(x):\n    return 0"
    suite = Suite((Check(test),), "f")
    limits = Limits(idle_s=30.0, cpu_s=60.0, memory_bytes=2 << 30)
    packages = [site] if "torch" in test else []
    verdict = judge(program, suite, limits, case_cpu_s=20.0, packages=packages)
    assert not verdict.success, verdict


@pytest.mark.parametrize("sent", [["data", "Fraction", ["object", 3, ["class", 1, "R", [], [], [], None, ""]], 1]])
def test_no_object_of_a_program_gets_into_a_value(sent: list):
    peer: Any = Peer(None, None, decides=True, files=False)
    with pytest.raises(ValueError, match="a part of Fraction is no data"):
        peer._decode(sent)


def test_classes_of_a_program_have_no_methods_that_libraries_ask_for():
    peer: Any = Peer(None, None, decides=True, files=False)
    mirror = peer._decode(["class", 1, "A", [], ["__array_function__", "__array_ufunc__", "__len__"], [], None, ""])
    assert "__len__" in vars(mirror) and not {"__array_function__", "__array_ufunc__"} & set(vars(mirror))
    for claim in (["torch", "Tensor"], ["tests", "pd.DataFrame"], ["numpy", "ndarray"]):
        kind = peer._decode(["class", 5 + len(claim[1]), "A", [], [], [], claim, ""])
        assert peer._claimed(kind) is kind
