"""Tests of programs in the forms that published rows have: hidden ones as a suite, public ones as statements."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowjax.envs.base import WorldError
from flowjax.envs.code_problems import problem_of
from flowjax.grading.code import Check, Suite
from flowjax.grading.code_asserts import calls_of, parse_quietly

_UNITTEST = """
import unittest as _unittest
_found = _unittest.TestSuite(
    _unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in _unittest.TestCase.__subclasses__()
    if case.__module__ != "unittest.case"
)
assert _unittest.TextTestRunner().run(_found).wasSuccessful()
"""


def hidden_tests(fields: Mapping[str, Any], text: str) -> Suite | None:
    """The hidden tests of a program, None where there are none in a form that keeps program and tests apart."""
    if fields.get("input_output"):
        return _read({"problem": text, "input_output": fields["input_output"]})
    test: Any = fields.get("test") or fields.get("test_list")
    entry = str(fields.get("entry_point") or "")
    if isinstance(test, list):
        imports = {
            name: fields.get(name) for name in ("test_imports", "test_setup_code", "challenge_test_list", "code")
        }
        return _read({"prompt": text, "test_list": test, **imports}, entry)
    module = parse_quietly(test) if isinstance(test, str) else None
    if module is None or not module.body:
        return None
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in module.body):
        prompt = fields.get("prompt") or fields.get("code_prompt") or ""
        entry = entry or _candidate(test)
        return _read({"prompt": prompt, "test": test, "entry_point": entry}) if entry else None
    if any(isinstance(node, ast.ClassDef) for node in module.body):
        return Suite((Check(test + _UNITTEST),), entry or "task_func")
    asserts = [ast.unparse(node) for node in module.body if isinstance(node, ast.Assert)]
    others = ast.unparse(ast.Module([node for node in module.body if not isinstance(node, ast.Assert)], []))
    if not asserts:
        return Suite((Check(test),), entry) if entry else None
    return _read({"prompt": text, "test_list": asserts, "test_setup_code": others}, entry)


def _read(fields: Mapping[str, Any], entry: str = "") -> Suite | None:
    try:
        problem = problem_of(fields, public_tests=0)
    except WorldError:
        return None
    cases = problem.suite.cases[problem.unscored :]
    if entry and entry != problem.suite.entry:
        cases = tuple(Check(test) for test in fields["test_list"])
    return replace(problem.suite, cases=cases, entry=entry or problem.suite.entry) if cases else None


def _candidate(test: str) -> str:
    """The function that tests in HumanEval's form are told to try, "" where they do not say."""
    found = re.search(r"^\s*(?:candidate\s*=\s*|check\()(\w+)", test, re.MULTILINE)
    names = [found[1]] if found else [name for name in calls_of(test) if name != "candidate"]
    return names[0] if names else ""


def statements(value: Any, entry: str) -> tuple[str, ...]:
    """Public tests as statements that call the function by its name."""
    if isinstance(value, list):
        return tuple(statement for item in value for statement in statements(item, entry))
    module = parse_quietly(value) if isinstance(value, str) else None
    if module is None or not module.body:
        return ()
    if all(isinstance(node, ast.Assert) for node in module.body):
        return tuple(ast.unparse(node) for node in module.body)
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if checks and all(isinstance(node, ast.Assert) for node in checks[0].body):
        return tuple(re.sub(r"\bcandidate\b", entry, ast.unparse(node)) for node in checks[0].body)
    return (f"{value}\ncheck({entry})\n" if checks else value,)
