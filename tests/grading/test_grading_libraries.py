"""Tests and programs that import numpy, scipy, pandas and torch: right, wrong, and hostile ones."""

import datetime
import json
from pathlib import Path
from typing import Any

import dateutil.tz
import numpy as np
import pandas
import pytest

from flowjax.grading.code import CallCase, Check, Suite, Verdict, judge
from flowjax.grading.sandbox import Limits
from flowjax.grading.sandbox_libraries import check_data
from flowjax.grading.sandbox_objects import Peer

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
    ("result", "wanted", "right"),
    [
        ("np.int64(x + 1)", 2, True),
        ("[np.int64(v) for v in range(3)]", [0, 1, 2], True),
        ("(np.bool_(x > 0), np.float32(0.5), {np.int8(x): np.complex64(1j)})", (True, 0.5, {1: 1j}), True),
        ("np.int64(x)", 2, False),
        ("np.longdouble(x)", 2, False),
        ("np.array([x])", 1, False),
    ],
)
def test_scalars_are_numbers(result: str, wanted: Any, right: bool):
    program = f"import numpy as np\ndef f(x):\n    return {result}"
    assert judged(program, Suite((CallCase((1,), wanted),), "f")).success == right


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


@pytest.mark.parametrize(("written", "right"), [(3, True), (4, False)])
def test_tests_load_what_the_program_has_saved(written: int, right: bool):
    program = f"import numpy as np\ndef f(path):\n    np.save(path, np.array([{written}]))"
    test = "import numpy as np\nf('a.npy')\nassert np.load('a.npy')[0] == 3"
    assert judged(program, Suite((Check(test),), "f")).success == right


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


LISTED = """
import {library}
import numpy as np
{given}
names = {{"given": given}}
exec("import {library}\\nimport numpy as np\\n" + solution, names)
{compare}
"""
FRAME = (
    "pandas",
    "given = pandas.DataFrame({'size': [3, 1, 2], 'name': ['x', 'y', None]})",
    "pandas.testing.assert_frame_equal(names['result'], given.sort_values('size'))",
)
TENSOR = ("torch", "given = torch.arange(4.0)", "assert torch.equal(names['result'], 2 * given)")


@pytest.mark.parametrize(
    ("suite", "solution", "remark"),
    [
        (FRAME, "result = given.sort_values('size')", ""),
        (FRAME, "result = given", "AssertionError: DataFrame.index are different"),
        (
            FRAME,
            "result = given.groupby('size')",
            "TypeError: the result is or holds no data, but an object of class Data",
        ),
        (
            FRAME,
            "class Frame(pandas.DataFrame): pass\nresult = Frame(given.sort_values('size'))",
            "TypeError: the result is or holds no data, but an object of class Frame",
        ),
        (
            FRAME,
            AGREES + "result = given.sort_values('size').astype(object)\nresult.iloc[0, 0] = Agrees()",
            "TypeError: the result is or holds no data, but an object of class Agrees",
        ),
        (
            FRAME,
            AGREES + "result = given.sort_values('size')\nresult.columns = ['size', Agrees()]",
            "TypeError: the result is or holds no data, but an object of class Agrees",
        ),
        (TENSOR, "result = given + given", ""),
        (TENSOR, "result = given", "AssertionError"),
        (TENSOR, "result = torch.nn.Parameter(2 * given)", "TypeError: the result is or holds no data, but an object"),
    ],
)
def test_frames_and_tensors_are_compared_as_data(suite: tuple[str, str, str], solution: str, remark: str):
    library, given, compare = suite
    pytest.importorskip(library)
    test = LISTED.format(library=library, given=given, compare=compare)
    said = judge(solution, Suite((Check(test),), runs_text=True), packages=[SITE]).remarks[0]
    assert said.startswith(remark) and bool(said) == bool(remark), said


DAYS = pandas.date_range("2020-01-31", periods=3, freq="ME", tz="Europe/Berlin", name="day")
FRAMES = {
    "columns of every type": pandas.DataFrame(
        {
            "int": [1, 2, 3],
            "text": ["x", None, "z"],
            "float": np.array([1.5, np.nan, 2], np.float32),
            "category": pandas.Categorical(["u", None, "u"], ["v", "u"], ordered=True),
            "day": DAYS,
            "whole": pandas.array([1, None, 3], dtype="Int64"),
            "yes": pandas.array([True, None, False], dtype="boolean"),
            "quarter": pandas.period_range("2020", periods=3, freq="Q"),
            "between": pandas.interval_range(0, 3),
            "span": pandas.to_timedelta([1, 2, None], unit="s"),
            "any": np.array(["a", 1, (2, 3)], dtype=object),
            "string": pandas.array(["a", None, "b"], dtype="string"),
        },
        index=DAYS,
    ),
    "two columns of one name, rows too": pandas.DataFrame([[1, 2], [3, 4]], columns=["a", "a"], index=[0, 0]),
    "levels": pandas.DataFrame(
        np.eye(4),
        index=pandas.MultiIndex.from_product([["a", "b"], [1, 2]], names=["p", None]),
        columns=pandas.MultiIndex.from_product([["x", "y"], ["u", "v"]]),
    ),
    "nothing": pandas.DataFrame(),
    "no rows": pandas.DataFrame(columns=["a", "b"]),
    "no columns": pandas.DataFrame(index=[1, 2]),
    "texts as objects": pandas.Series(np.array(["a", "b"], dtype=object), name=("n", 1)).to_frame(),
}
INDEXES = [
    pandas.RangeIndex(1, 10, 3, name="r"),
    pandas.Index(["a", 1, None], dtype=object),
    pandas.Index([0.5, 1]),
    pandas.CategoricalIndex(["a", "b"]),
    pandas.timedelta_range("1h", periods=3),
    pandas.date_range("2020", periods=3, unit="s"),
    pandas.Index([1, None], dtype="Int64"),
]
SCALARS = [
    pandas.Timestamp("2020-01-01", tz=datetime.timezone(datetime.timedelta(hours=1, seconds=1))),
    np.str_(""),
    np.dtype("<f4"),
    pandas.Timestamp("2020-01-01 12:00", tz="US/Eastern"),
    pandas.Timestamp("2020-01-01T00:00+02:00"),
    pandas.Timestamp("2020-01-01"),
    pandas.Timedelta("1 day 2 s"),
    pandas.Period("2020Q1"),
    pandas.Interval(0, 1, "both"),
    np.float32(1.5),
    np.str_("é"),
    np.datetime64("2020-01-01T01"),
]


def across(value: Any) -> Any:
    """What the tests get of a value that a program hands over."""
    program, tests = (Peer(None, None, decides=decides, files=False) for decides in (False, True))
    arrived = tests._decode(json.loads(json.dumps(program._encode(value))))
    check_data(arrived)
    return arrived


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_arrives_with_its_types(name: str):
    arrived = across(FRAMES[name])
    pandas.testing.assert_frame_equal(arrived, FRAMES[name], check_freq=True)
    for column in range(arrived.shape[1]):
        pandas.testing.assert_series_equal(across(FRAMES[name].iloc[:, column]), FRAMES[name].iloc[:, column])


@pytest.mark.parametrize("index", INDEXES, ids=lambda index: type(index).__name__)
def test_an_index_arrives_with_its_type(index: Any):
    arrived = across(index)
    pandas.testing.assert_index_equal(arrived, index, exact=True)
    assert getattr(arrived, "freq", None) == getattr(index, "freq", None)


@pytest.mark.parametrize("value", SCALARS, ids=str)
def test_a_single_value_arrives_with_its_type(value: Any):
    arrived = across(value)
    assert (type(arrived), arrived, str(arrived)) == (type(value), value, str(value))


def test_what_is_missing_arrives_as_itself():
    assert across(pandas.NaT) is pandas.NaT and across(pandas.NA) is pandas.NA


def test_what_another_name_says_arrives_as_that():
    """Offsets from Greenwich of another library, steps between days that no name says, a matrix."""
    moment = pandas.Timestamp("2020-01-01", tz=dateutil.tz.tzoffset(None, 3600))
    assert across(moment) == moment
    days = pandas.date_range("2020", periods=3, freq=pandas.DateOffset(months=1, hour=3))
    pandas.testing.assert_index_equal(across(days), days)
    assert across(days).freq is None
    with pytest.warns(PendingDeprecationWarning):
        assert type(across(np.matrix([[1, 2]]))) is np.matrix
    assert across(np.array(["", ""])).tolist() == ["", ""]


def test_arrays_of_fields_arrive():
    given = np.array([(1, [2.0], "x")], dtype=[("a", "i4"), ("b", "f8", (1,)), ("c", "U3")])
    arrived = across(given)
    assert arrived.dtype == given.dtype and arrived.tobytes() == given.tobytes()


@pytest.mark.parametrize(
    "sent",
    [
        ["library", "os.system", "true"],
        ["library", "pandas.read_pickle", "/tmp/x"],
        ["library", "pandas.index", "DataFrame", None, None, None],
        ["library", "pandas.masked", "Categorical", None, None],
        ["library", "scipy.sparse", "save_npz", ["tuple", 1], None],
        ["view", "fork", ["module", "os"]],
        ["view", "clear", ["dict", 1]],
        ["module", "unittest.__main__"],  # which runs what the program has written
        ["module", "this"],
        ["named", "asyncio.__main__", "REPLThread", "object"],
        ["named", "unittest.case", "SkipTest", ""],
        ["named", "doctest", "unittest.SkipTest", ""],
    ],
)
def test_no_other_name_is_reached(sent: list[Any]):
    tests: Any = Peer(None, None, decides=True, files=False)
    with pytest.raises((ValueError, ImportError), match=r"\bno\b|not for tests"):
        tests._decode(sent)


CLAIMS = ["class", 1, "Column", [], ["__len__", "__iter__"], [], ["pandas.arrays", "NumpyExtensionArray"], ""]
COLUMN = ["object", 3, CLAIMS]


@pytest.mark.parametrize(
    "sent",
    [
        ["library", "pandas.series", COLUMN, ["range", 0, 3, 1], "a"],
        ["library", "pandas.range", COLUMN, None, None, None],
        ["library", "pandas.periods", ["library", "numpy.array", "'<i8'", ["tuple", 0], ["bytes", ""]], COLUMN],
        ["library", "pandas.levels", ["tuple", ["tuple", COLUMN]], ["tuple"], ["tuple", None]],
        ["library", "pandas.masked", "IntegerArray", COLUMN, COLUMN],
        ["library", "scipy.sparse", "csr_matrix", ["tuple", 2, 2], COLUMN],
        ["library", "torch.tensor", COLUMN],
        ["library", "numpy.matrix", ["list", 5, 1, COLUMN]],
    ],
)
def test_no_object_of_a_program_gets_into_a_constructor(sent: list[Any]):
    """It could say that it is a column, and be another one each time that it is looked at."""
    tests: Any = Peer(None, None, decides=True, files=False)
    with pytest.raises(ValueError, match=f"a part of {sent[1]} is no data"):
        tests._decode(sent)


def test_no_object_of_a_program_passes_for_a_frame():
    program = "import pandas\nclass Frame(pandas.DataFrame): pass\ndef f(x):\n    return Frame({'a': [1]})"
    test = "import pandas\nassert not isinstance(f(1), pandas.DataFrame)\nassert f(1).shape == (1, 1)"
    assert judged(program, Suite((Check(test),), "f")).success


def test_an_object_of_a_program_does_not_say_what_it_contains():
    program = "class All:\n    def __contains__(self, x): return True\ndef f(x):\n    return All()"
    for test in ("assert 3 in f(1)", "assert 3 not in f(1)"):
        assert judged(program, Suite((Check(test),), "f")).remarks[0].startswith("TypeError")


def test_an_exception_that_the_tests_may_not_import_is_what_it_derives_from():
    program = "import unittest\ndef f(x):\n    raise unittest.SkipTest('no')"
    for expected, right in (("Exception", True), ("ValueError", False)):
        test = f"try:\n    f(1)\n    assert False\nexcept {expected} as error:\n    assert str(error) == 'no'"
        assert judged(program, Suite((Check(test),), "f")).success == right
