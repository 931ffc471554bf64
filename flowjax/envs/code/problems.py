"""Programming problems in the files of several data sets (`FORMATS`), told apart by their fields."""

import ast
import base64
import builtins
import doctest
import functools
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowjax.envs.base import NotReady, WorldError
from flowjax.grading.code import CallCase, Check, Lines, Suite
from flowjax.grading.code_asserts import calls_of, from_assert, from_check, parse_quietly
from flowjax.records import state_key

FORMATS = "HumanEval, BigCodeBench (prompt or complete_prompt, test, entry_point), MBPP (text or prompt, test_list), \
LiveCodeBench (question_content, public_test_cases) and DeepCoder (problem or question, tests or input_output)"


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A statement and its tests. The first `public` cases may be shown to the agent; the first `unscored` ones are
    examples that do not count. `solution` is "" where the data has none."""

    statement: str
    suite: Suite
    public: int = 0
    unscored: int = 0
    solution: str = ""

    @property
    def content(self) -> int:
        """The same for two problems that ask the same thing, whatever file they come from."""
        return state_key("problem", self.suite.entry, " ".join(self.statement.lower().split()))


def problem_of(fields: Mapping[str, Any], *, public_tests: int = 1) -> CodeProblem:
    """A problem from one line of a file. `public_tests` of MBPP's asserts are shown; the other formats say themselves.

    Raises:
        WorldError: the line is in none of the formats.
    """
    try:
        if "entry_point" in fields and "test" in fields:
            return _human_eval(fields)
        if "test_list" in fields:
            return _mbpp(fields, public_tests)
        if "public_test_cases" in fields:
            return _live_code_bench(fields)
        if "tests" in fields or "input_output" in fields:
            return _deep_coder(fields)
    except (KeyError, ValueError, TypeError, AttributeError, pickle.UnpicklingError, zlib.error) as error:
        raise WorldError(f"a problem cannot be read ({type(error).__name__}: {error}): {sorted(fields)}") from error
    raise WorldError(f"a problem has the fields {sorted(fields)}: the known formats are {FORMATS}")


def _human_eval(fields: Mapping[str, Any]) -> CodeProblem:
    prompt = fields["prompt"] if "prompt" in fields else fields["complete_prompt"]
    entry = fields["entry_point"]
    preamble = _before(prompt, entry)
    examples = _examples(prompt, entry)
    suite = Suite((*examples, *from_check(fields["test"], entry)), entry, preamble, setup=preamble)
    solution = prompt + fields["canonical_solution"] if fields.get("canonical_solution") else ""
    statement = f"Complete this Python function.\n\n```python\n{prompt.rstrip()}\n```"
    return CodeProblem(statement, suite, len(examples), len(examples), solution)


def _before(prompt: str, entry: str) -> str:
    """Code that a prompt has besides the function to complete: imports and helpers."""
    module = parse_quietly(prompt + "\n    pass\n") or parse_quietly(prompt)
    if module is None:
        lines = prompt.splitlines()
        return "\n".join(line for line in lines if line.startswith(("import ", "from ")))
    kept = [node for node in module.body if getattr(node, "name", None) != entry]
    return ast.unparse(ast.Module(kept, [])) if kept else ""


def _examples(prompt: str, entry: str) -> tuple[CallCase, ...]:
    """Calls shown in the docstring as an interactive session."""
    try:
        shown = doctest.DocTestParser().get_examples(re.sub("\"{3}|'{3}", "\n\n", prompt))
    except ValueError:
        return ()
    cases: list[CallCase] = []
    for example in shown:
        found = from_assert(f"assert {example.source.strip()} == ({example.want.strip() or None})", entry)
        cases += [case for case in found if isinstance(case, CallCase)]
    return tuple(cases)


def _mbpp(fields: Mapping[str, Any], public_tests: int) -> CodeProblem:
    tests = [*fields["test_list"], *(fields.get("challenge_test_list") or ())]
    defined = _functions(fields.get("code") or "")
    called = calls_of("\n".join(tests))
    candidates = [name for name in called if name in defined] or [n for n in called if not hasattr(builtins, n)]
    if not candidates:
        raise ValueError("no assert in test_list calls a function")
    entry = candidates[0]
    setup = "\n".join([*(fields.get("test_imports") or ()), fields.get("test_setup_code") or ""])
    cases = [case for test in tests for case in from_assert(test, entry)]
    shown = "\n".join(tests[:public_tests])
    statement = f"{fields.get('text') or fields['prompt']}"
    statement += f"\n\nThe function must be called {entry}." + (f" For example:\n{shown}" if shown else "")
    return CodeProblem(statement, Suite(tuple(cases), entry, setup=setup), public_tests, 0, fields.get("code") or "")


def _functions(source: str) -> list[str]:
    module = parse_quietly(source)
    return [node.name for node in module.body if isinstance(node, ast.FunctionDef)] if module else []


def _live_code_bench(fields: Mapping[str, Any]) -> CodeProblem:
    public = json.loads(fields["public_test_cases"])
    private = _private(fields.get("private_test_cases") or "[]")
    metadata = json.loads(fields.get("metadata") or "{}")
    entry = metadata.get("func_name") or ""
    cases: list[CallCase | Check | Lines] = []
    for test in (*public, *private):
        if test.get("testtype") == "functional" or (entry and "testtype" not in test):
            arguments = tuple(json.loads(line) for line in test["input"].splitlines())
            cases.append(CallCase(arguments, json.loads(test["output"]), json=True))
        else:
            cases.append(Lines(test["input"], test["output"]))
    statement = fields["question_content"]
    if fields.get("starter_code"):
        statement += f"\n\nStart from this:\n```python\n{fields['starter_code'].rstrip()}\n```"
    else:
        statement += "\n\nRead from standard input and print to standard output."
    return CodeProblem(statement, Suite(tuple(cases), entry, preamble=_STARTER if entry else ""), len(public))


_STARTER = "from typing import *\nimport collections, functools, heapq, itertools, math\nfrom collections import *"


class _NoGlobals(pickle.Unpickler):
    """LiveCodeBench packs a string with pickle. Nothing but plain values comes out of this one."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def _private(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("["):
        return json.loads(text)
    return json.loads(_NoGlobals(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())


def _deep_coder(fields: Mapping[str, Any]) -> CodeProblem:
    listed: Any = fields.get("tests") or fields.get("input_output")
    tests = json.loads(listed) if isinstance(listed, str) else listed
    if isinstance(tests, dict):
        entry = tests.get("fn_name") or ""
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    else:
        entry = next((test["fn_name"] for test in tests if test.get("fn_name")), "")
        pairs = [(test["input"], test["output"]) for test in tests]
    solutions = fields.get("solutions") or ()
    solutions = json.loads(solutions) if isinstance(solutions, str) else solutions
    statement = fields.get("problem") or fields.get("question") or fields["prompt"]
    if entry:
        cases, note = _json_calls(pairs), f"The function must be called {entry}."
    else:
        cases = tuple(Lines(_text(given), _text(wanted)) for given, wanted in pairs)
        note = "Read from standard input and print to standard output."
    solution = _unfenced(solutions[0]) if solutions else ""
    return CodeProblem(f"{statement}\n\n{note}", Suite(cases, entry, _STARTER if entry else ""), 0, 0, solution)


def _json_calls(pairs: list[tuple[Any, Any]]) -> tuple[CallCase, ...]:
    """Calls and their results. A list of one as every output only wraps the result."""
    read = [tuple(json.loads(x) if isinstance(x, str) else x for x in pair) for pair in pairs]
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in read)
    return tuple(CallCase(tuple(given), wanted[0] if wrapped else wanted, json=True) for given, wanted in read)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _unfenced(program: str) -> str:
    lines = program.strip().splitlines()
    return "\n".join(lines[1:-1]) if lines and lines[0].startswith("```") else program


@dataclass(frozen=True, slots=True)
class ProblemFile:
    """A JSONL file of problems, one line of which is read at a time."""

    path: str
    offsets: tuple[int, ...]

    def fields(self, offset: int) -> dict[str, Any]:
        with Path(self.path).open("rb") as file:
            file.seek(offset)
            return json.loads(file.readline())


@functools.lru_cache(maxsize=4)
def open_problems(path: str) -> ProblemFile:
    """The problems at `path`.

    Raises:
        NotReady: there is no such file.
        WorldError: it is not JSONL.
    """
    offsets, position = [], 0
    try:
        with Path(path).open("rb") as file:
            for line in file:
                if line.strip():
                    offsets.append(position)
                position += len(line)
        found = ProblemFile(path, tuple(offsets))
        found.fields(offsets[0])
    except (OSError, ValueError, IndexError) as error:
        kind = NotReady if isinstance(error, FileNotFoundError) else WorldError
        raise kind(
            f"env.options path={path!r} holds no problems ({type(error).__name__}: {error}): give a JSONL file in one "
            f"of the formats {FORMATS}. docs/worlds/code.md says where to get them; python -m data.code.build makes "
            "small ones"
        ) from error
    return found
