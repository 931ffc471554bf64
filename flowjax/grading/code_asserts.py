"""Tests that are written as `assert` statements, taken apart into calls whose results can be compared as data.

`assert f(1, [2]) == 3` needs no test code in the sandbox: the arguments go in, the result comes out, the comparison is
made outside. What cannot be taken apart (loops, expressions around the call) stays code, and runs in a box of its own.
"""

import ast
import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallCase:
    """One call, and what must come back. `tolerance` is the largest difference of numbers, None for equality.

    `json` tests come from JSON, which has neither tuples nor keys other than strings: lists and tuples are the same.
    """

    arguments: tuple[Any, ...]
    expected: Any
    tolerance: float | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """Test code that calls `candidate`, or the function by its name, and raises where that is wrong."""

    source: str


def parse_quietly(source: str) -> ast.Module | None:
    """The syntax tree, None where there is none. Never warns."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def from_assert(source: str, entry: str) -> tuple[CallCase | Check, ...]:
    """The cases of test code that is `assert` statements alone; otherwise all of it as one `Check`."""
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


def from_check(source: str, entry: str) -> tuple[CallCase | Check, ...]:
    """The cases of HumanEval's test code, which defines `check(candidate)`, or BigCodeBench's `unittest` classes."""
    whole = (Check(f"{source}\n\ncheck(candidate)\n"),)
    module = parse_quietly(source)
    if module is None:
        return whole
    if "TestCase" in source and not any(getattr(node, "name", "") == "check" for node in module.body):
        return (from_unittest(source),)
    definitions = [node for node in module.body if not _is_remark(node) and not _is_metadata(node)]
    if len(definitions) != 1:
        return whole
    check = definitions[0]
    if not isinstance(check, ast.FunctionDef) or check.name != "check":
        return whole
    body = [node for node in check.body if not _is_remark(node)]
    if not all(isinstance(node, ast.Assert) for node in body):
        return whole
    return _cases(body, entry) or whole


def calls_of(source: str) -> list[str]:
    """Names of the functions that the test code's `assert` statements call first, in their order."""
    module = parse_quietly(source)
    names = []
    for node in ast.walk(module) if module else ():
        if isinstance(node, ast.Assert):
            names += [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return names


def _cases(asserts: list[Any], entry: str) -> tuple[CallCase | Check, ...]:
    cases: list[CallCase | Check] = []
    for node in asserts:
        if isinstance(node.test, ast.Constant) and node.test.value:
            continue  # HumanEval's `assert True`
        cases.append(_call(node.test, entry) or Check(ast.unparse(node)))
    return tuple(cases)


def _is_remark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _is_metadata(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "METADATA"


def _call(test: ast.expr, entry: str) -> CallCase | None:
    """The call that a condition is about, where it is one of the few forms that data can settle."""
    try:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return _comparison(test.left, test.ops[0], test.comparators[0], entry)
    except ValueError:
        pass
    return None


def _comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr, entry: str) -> CallCase | None:
    if isinstance(operator, ast.Eq):
        if (arguments := _arguments(left, entry)) is not None:
            return CallCase(arguments, ast.literal_eval(right))
        if (arguments := _arguments(right, entry)) is not None:
            return CallCase(arguments, ast.literal_eval(left))
    if isinstance(operator, ast.Lt | ast.LtE) and _is_call_of(left, "abs"):
        difference = left.args[0]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub):
            arguments = _arguments(difference.left, entry)
            if arguments is not None:
                expected, tolerance = ast.literal_eval(difference.right), ast.literal_eval(right)
                if isinstance(expected, int | float) and isinstance(tolerance, int | float):
                    return CallCase(arguments, expected, float(tolerance))
    return None


def _arguments(node: ast.expr, entry: str) -> tuple[Any, ...] | None:
    """The arguments of a call of the tested function.

    Raises:
        ValueError: they are not literals.
    """
    if not (_is_call_of(node, entry) or _is_call_of(node, "candidate")):
        return None
    assert isinstance(node, ast.Call)
    return tuple(ast.literal_eval(argument) for argument in node.args)


def _is_call_of(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and not node.keywords
        and bool(node.args or name != "abs")
    )
