"""Tests and programs that import numpy and scipy: right, wrong, and hostile ones."""

from pathlib import Path

import numpy as np
import pytest

from flowjax.grading.code import Check, Suite, Verdict, judge
from flowjax.grading.sandbox import Limits

SITE = str(Path(np.__file__).parent.parent)
PATIENT = Limits(idle_s=60.0, cpu_s=60.0, wall_guard_s=300.0)
# As an object it says whatever is asked of it: hands comparisons of numpy to itself, equals everything, is true.
AGREES = """
class Agrees:
    shape, ndim, size = (3,), 1, 3
    def __array_ufunc__(self, *arguments, **keywords): return True
    def __array_function__(self, *arguments, **keywords): return True
    def __eq__(self, other): return True
    def all(self): return True
"""


def judged(program: str, suite: Suite) -> Verdict:
    return judge(program, suite, PATIENT, case_cpu_s=60.0, packages=[SITE])


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("import numpy as np\ndef f(x):\n    return x + 1", True),
        ("def f(x):\n    return list(x + 1)", True),
        ("def f(x):\n    return x", False),
        (AGREES + "def f(x):\n    return Agrees()", False),
    ],
)
@pytest.mark.parametrize(
    "test", ["np.testing.assert_array_equal(f(given), given + 1)", "assert np.allclose(f(given), given + 1)"]
)
def test_arrays_are_compared_by_the_tests_and_not_by_what_the_program_returns(program: str, right: bool, test: str):
    suite = Suite((Check(f"import numpy as np\ngiven = np.arange(3)\n{test}"),), "f")
    assert judged(program, suite).success == right


def test_tests_import_no_file_that_the_program_has_written():
    test = "open\nf()\nimport colorsys\nassert colorsys.rgb_to_hsv(1, 1, 1) == 'forged'"  # `open`: files are shared
    writes = "open('colorsys.py', 'w').write('def rgb_to_hsv(*colour): return \"forged\"')"
    verdict = judged(f"def f():\n    {writes}", Suite((Check(test),), "f"))
    assert verdict.remarks[0].startswith("AssertionError")


RUNS_TEXT = """
import numpy as np
from scipy import sparse
{compare}
for given in (np.array([3, 1, 2]), np.array([5.0, 4.0, 7.0])):
    names = {{"given": given}}
    exec("import numpy as np\\nfrom scipy import sparse\\n" + solution, names)
    assert same(names["result"], {wanted})
"""
SAME = "def same(result, wanted):\n    return {}"


@pytest.mark.parametrize(
    ("solution", "compare", "wanted", "remark"),
    [
        ("result = np.sort(given)", "np.array_equal(result, wanted)", "np.sort(given)", ""),
        ("result = given", "np.array_equal(result, wanted)", "np.sort(given)", "AssertionError"),
        ("result = sparse.csr_matrix(given)", "(result != wanted).nnz == 0", "sparse.csr_matrix(given)", ""),
        (
            "result = sparse.lil_array(np.diag(given))",
            "(result != wanted).nnz == 0",
            "np.diag(given)",
            "AttributeError",
        ),
        ("result = np.array([given, None], dtype=object)", "result[1] is None and result.shape == (2,)", "0", ""),
        ("result = {'least': min(given)}", "result == {'least': wanted}", "given.min()", ""),
        (AGREES + "result = Agrees()", "result.all()", "0", "TypeError: the result is or holds no data"),
        (AGREES + "result = (1, [Agrees()])", "result[1][0].all()", "0", "TypeError: the result is or holds no data"),
        (AGREES + "class Both(Agrees, list): pass\nresult = Both()", "result.all()", "0", "TypeError: the result is"),
        (AGREES + "result = np.array([Agrees()])", "result[0].all()", "0", "TypeError: the result is or holds no data"),
        (
            AGREES + "import collections\nresult = collections.deque([Agrees()])",
            "result[0].all()",
            "0",
            "TypeError: the",
        ),
        (
            AGREES + "import collections\nresult = collections.defaultdict(Agrees)",
            "result[0].all()",
            "0",
            "TypeError: the",
        ),
        (AGREES + "result = (each for each in [Agrees()])", "next(result).all()", "0", "TypeError: the result is or"),
        (AGREES + "result = {0: Agrees()}.values()", "list(result)[0].all()", "0", "TypeError: the result is or holds"),
        ("least = min(given)", "True", "0", "NameError: name 'result' is not defined"),
        ("def same(*given): return True\nresult = 0", "result == wanted", "1", "AssertionError"),
    ],
)
def test_a_part_of_a_program_runs_inside_the_text_of_its_tests(solution: str, compare: str, wanted: str, remark: str):
    """A result that is or holds an object is none: the object could say that it equals whatever is wanted."""
    test = RUNS_TEXT.format(compare=SAME.format(compare), wanted=wanted)
    said = judged(solution, Suite((Check(test),), runs_text=True)).remarks[0]
    assert said.startswith(remark) and bool(said) == bool(remark), said
