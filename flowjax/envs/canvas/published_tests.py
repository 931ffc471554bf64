"""Tests of programs in the forms that published rows have: hidden ones as a suite, public ones as statements."""

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowjax.envs.base import WorldError
from flowjax.envs.code.problems import problem_of
from flowjax.grading.code import Check, Suite
from flowjax.grading.code_asserts import from_unittest, parse_quietly

_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


def hidden_tests(fields: Mapping[str, Any], text: str) -> Suite | None:
    """The hidden tests of a program.

    None where there are none, where they check nothing, or where they cannot be kept apart from the program, as those
    of DS-1000, which run a text that the program is put into.
    """
    if fields.get("input_output"):
        return _read({"problem": text, "input_output": fields["input_output"]})
    test: Any = fields.get("test") or fields.get("test_list")
    entry = str(fields.get("entry_point") or "")
    if isinstance(test, list):
        more = ("test_imports", "test_setup_code", "challenge_test_list", "code")
        return _read({"prompt": text, "test_list": test} | {name: fields.get(name) for name in more}, entry)
    module = parse_quietly(test) if isinstance(test, str) else None
    if module is None or not _checks_something(module):
        return None
    entry = entry or _candidate(test, module)
    if not entry:
        return None
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in module.body):
        prompt = fields.get("prompt") or fields.get("code_prompt") or ""
        return _read({"prompt": prompt, "test": test, "entry_point": entry})
    if "TestCase" in test:
        return Suite((from_unittest(test),), entry)
    asserts = [node for node in module.body if isinstance(node, ast.Assert)]
    others = [node for node in module.body if not isinstance(node, ast.Assert)]
    if asserts and all(isinstance(node, _DEFINITIONS) for node in others):
        setup = ast.unparse(ast.Module([*others], []))
        return _read({"prompt": text, "test_list": list(map(ast.unparse, asserts)), "test_setup_code": setup}, entry)
    calls = [f"{node.name}()" for node in others if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    if not asserts and not calls and all(isinstance(node, _DEFINITIONS) for node in others):
        return None  # nothing calls what it defines
    return Suite((Check("\n".join([test, *calls])),), entry)


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


def called(source: str) -> str:
    """The first function that test code calls and does not define itself, "" where there is none."""
    module = parse_quietly(source)
    return _candidate(source, module) if module is not None else ""


def _read(fields: Mapping[str, Any], entry: str = "") -> Suite | None:
    try:
        problem = problem_of(fields, public_tests=0)
    except WorldError:
        return None
    cases = problem.suite.cases[problem.unscored :]
    if entry and entry != problem.suite.entry:
        cases = tuple(Check(test) for test in fields["test_list"])
    return replace(problem.suite, cases=cases, entry=entry or problem.suite.entry) if cases else None


def _checks_something(module: ast.Module) -> bool:
    names = [node.func for node in ast.walk(module) if isinstance(node, ast.Call)]
    methods = [name.attr for name in names if isinstance(name, ast.Attribute)]
    return any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(module)) or any(
        method.startswith("assert") for method in methods
    )


def _candidate(test: str, module: ast.Module) -> str:
    if found := re.search(r"^\s*(?:candidate\s*=\s*|check\()(\w+)", test, re.MULTILINE):
        return found[1]
    known = {"candidate", *dir(builtins)}
    known |= {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {alias.asname or alias.name for node in module.body for alias in getattr(node, "names", ()) if alias}
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = [node.func.id for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]  # pyright: ignore[reportAttributeAccessIssue]
    return next((name for name in names if name not in known), "")
