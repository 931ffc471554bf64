"""Programming problems: in files of several data sets (`FORMATS`), recognised by their fields, or generated."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.envs import NotReady, Split, WorldError
from flowjax.grading.code import CallCase, Case, Lines, Suite, calls_of, from_check, from_test, parse_quietly
from flowjax.records import state_key

FORMATS = "HumanEval, BigCodeBench (prompt or complete_prompt, test, entry_point), MBPP (text or prompt, test_list), \
LiveCodeBench (question_content, public_test_cases) and DeepCoder (problem or question, tests or input_output)"


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A statement and its tests. The first `public` cases may be shown to the agent; the first `unscored` ones are
    examples that do not count. `solution` is "" where the data has none; `examples` end the statement."""

    statement: str
    suite: Suite
    public: int = 0
    unscored: int = 0
    solution: str = ""
    examples: str = ""

    @property
    def content(self) -> int:
        """Hash of statement and entry, without examples, case and white space: equal for a problem in other files."""
        words = self.statement.removesuffix(self.examples).lower().split()
        return state_key("problem", self.suite.entry, " ".join(words))


def problem_of(fields: Mapping[str, Any], *, public_tests: int = 1) -> CodeProblem:
    """A problem from one line of a file. `public_tests` of MBPP's asserts are shown; other formats mark theirs, if any.

    Raises:
        WorldError: the line is in none of the formats, or has no test that counts.
    """
    try:
        problem = _read(fields, public_tests)
        if problem is not None and not problem.suite.cases[problem.unscored :]:
            raise ValueError("no test counts")
        if problem is not None:
            return problem
    except (KeyError, ValueError, TypeError, AttributeError, pickle.UnpicklingError, zlib.error) as error:
        raise WorldError(f"a problem cannot be read ({type(error).__name__}: {error}): {sorted(fields)}") from error
    raise WorldError(f"a problem has the fields {sorted(fields)}: the known formats are {FORMATS}")


def _read(fields: Mapping[str, Any], public_tests: int) -> CodeProblem | None:
    """The problem, None for an unknown format."""
    if "entry_point" in fields and "test" in fields:
        return _human_eval(fields)
    if "test_list" in fields:
        return _mbpp(fields, public_tests)
    if "public_test_cases" in fields:
        return _live_code_bench(fields)
    return _deep_coder(fields) if "tests" in fields or "input_output" in fields else None


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
    """Code in a prompt beside the function to complete: imports and helpers."""
    # A prompt may end with the signature, which is invalid Python without a body.
    module = parse_quietly(prompt + "\n    pass\n") or parse_quietly(prompt)
    if module is None:
        lines = prompt.splitlines()
        return "\n".join(line for line in lines if line.startswith(("import ", "from ")))
    kept = [node for node in module.body if getattr(node, "name", None) != entry]
    return ast.unparse(ast.Module(kept, [])) if kept else ""


def _examples(prompt: str, entry: str) -> tuple[CallCase, ...]:
    """Calls shown in the docstring as an interactive session."""
    try:
        # doctest reads a result up to the next empty line: without one, the closing quotes would be part of it.
        shown = doctest.DocTestParser().get_examples(re.sub("\"{3}|'{3}", "\n\n", prompt))
    except ValueError:
        return ()
    cases: list[CallCase] = []
    for example in shown:
        found = from_test(f"assert {example.source.strip()} == ({example.want.strip() or None})", entry)
        cases += [case for case in found if isinstance(case, CallCase)]
    return tuple(cases)


def _mbpp(fields: Mapping[str, Any], public_tests: int) -> CodeProblem:
    tests = list(filter(str.strip, [*fields["test_list"], *(fields.get("challenge_test_list") or ())]))
    defined = _functions(fields.get("code") or "")
    called = calls_of("\n".join(tests))
    # Asserts also call helpers, such as set(f(x)): the entry is what the solution defines, else what is not builtin.
    candidates = [name for name in called if name in defined] or [n for n in called if not hasattr(builtins, n)]
    if not candidates:
        raise ValueError("no assert in test_list calls a function")
    entry = candidates[0]
    setup = "\n".join([*(fields.get("test_imports") or ()), fields.get("test_setup_code") or ""])
    cases = [from_test(test, entry) for test in tests]
    public = sum(map(len, cases[:public_tests]))  # a text may hold several asserts, or none that can be judged
    asked = f"{fields.get('text') or fields['prompt']}\n\nThe function must be called {entry}."
    shown = "\n".join([" For example:", *tests[:public_tests]]) if public_tests else ""
    suite = Suite(sum(cases, ()), entry, setup=setup)
    return CodeProblem(asked + shown, suite, public, 0, fields.get("code") or "", shown)


def _functions(source: str) -> list[str]:
    module = parse_quietly(source)
    return [node.name for node in module.body if isinstance(node, ast.FunctionDef)] if module else []


def _live_code_bench(fields: Mapping[str, Any]) -> CodeProblem:
    public = json.loads(fields["public_test_cases"])
    private = _private(fields.get("private_test_cases") or "[]")
    metadata = json.loads(fields.get("metadata") or "{}")
    entry = metadata.get("func_name") or ""
    cases: list[Case] = []
    for test in (*public, *private):
        if test.get("testtype") == "functional" or (entry and "testtype" not in test):
            cases.append(_call_by_line(test))
        else:
            cases.append(Lines(test["input"], test["output"]))
    note = _start(fields) or "Read from standard input and print to standard output."
    statement = f"{fields['question_content']}\n\n{note}"
    return CodeProblem(statement, Suite(tuple(cases), entry, preamble=_STARTER if entry else ""), len(public))


def _call_by_line(test: Mapping[str, Any]) -> CallCase:
    """A call whose arguments are JSON, one a line."""
    return CallCase(tuple(map(json.loads, test["input"].splitlines())), json.loads(test["output"]), json=True)


def _start(fields: Mapping[str, Any]) -> str:
    """Request to begin with the row's starter code, "" where it has none."""
    code = fields.get("starter_code")
    return f"Start from this:\n```python\n{code.rstrip()}\n```" if code else ""


# As in these problems' judges: in the end `bisect` is the module, and `pow` the builtin, not that of `math`.
_MODULES = ("typing", "bisect", "collections", "functools", "heapq", "itertools", "math", "builtins")
_STARTER = "\n".join(f"from {name} import *" for name in _MODULES)
_STARTER += f"\nimport copy, operator, re, sys, {', '.join(_MODULES)}"


class _NoGlobals(pickle.Unpickler):
    """LiveCodeBench packs a string with pickle, which could run any code: this one loads plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def _private(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("["):
        return json.loads(text)
    return json.loads(_NoGlobals(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())


def _deep_coder(fields: Mapping[str, Any]) -> CodeProblem:
    listed: Any = fields.get("tests") or fields.get("input_output")
    tests = json.loads(listed) if isinstance(listed, str) else listed
    by_line = ""  # function of tests that come from LiveCodeBench
    if isinstance(tests, dict):
        entry = tests.get("fn_name") or ""
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    else:
        entry = next((test["fn_name"] for test in tests if test.get("fn_name")), "")
        pairs = [(test["input"], test["output"]) for test in tests]
        named = (test.get("metadata") or {} for test in tests if test.get("testtype") == "functional")
        by_line = "" if entry else next((given["func_name"] for given in named if given.get("func_name")), "")
    solutions = fields.get("solutions") or ()
    solutions = json.loads(solutions) if isinstance(solutions, str) else solutions
    statement = fields.get("problem") or fields.get("question") or fields["prompt"]
    if by_line:
        entry, cases = by_line, tuple(map(_call_by_line, tests))
        note = _start(fields) or f"The function must be called {entry}."
    elif entry:
        cases, note = _json_calls(pairs), f"The function must be called {entry}."
    else:
        cases = tuple(Lines(_text(given), _text(wanted)) for given, wanted in pairs)
        note = "Read from standard input and print to standard output."
    solution = _unfenced(solutions[0]) if solutions else ""
    return CodeProblem(f"{statement}\n\n{note}", Suite(cases, entry, _STARTER if entry else ""), 0, 0, solution)


def _json_calls(pairs: list[tuple[Any, Any]]) -> tuple[CallCase, ...]:
    """Calls and their results. If every output is a list of one, these lists only wrap the results."""
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
    """A JSONL file of problems, read line by line on demand."""

    path: str
    offsets: tuple[int, ...]

    def fields(self, offset: int) -> dict[str, Any]:
        """Raises:
        WorldError: the line is no object with fields.
        """
        with Path(self.path).open("rb") as file:
            file.seek(offset)
            line = file.readline()
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise WorldError(f"a problem cannot be read ({error}): give one JSON object a line") from error
        if not isinstance(fields, dict):
            raise WorldError(f"a problem is {line[:60]!r}: give one JSON object a line")
        return fields


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


# --------------------------------------------------------------------------------------------------- generated problems

# Small functions to write: a value goes through one to three steps. Each problem in English and in a few words.
# Solutions are one line of words with spaces between them, so that a model with a word-level tokenizer can write them:
#     int plus 3 then times 2        ->        def f ( x ) : x = x + 3 ; x = x * 2 ; return x
HEAD, TAIL, JOIN, ENTRY = "def f ( x ) :", "return x", " ; ", "f"
HELD_OUT_ONE_IN = 8  # functions, by their results on the probes
_MAX_ATTEMPTS = 1000
_TO_INT = frozenset({"sum", "count", "length"})  # steps after which the value is an integer


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of step. `{n}` stands for its number in the three texts."""

    words: str
    english: str
    statement: str
    apply: Callable[[Any, int], Any]
    numbers: Sequence[int] = (0,)


_SMALL, _FROM_TWO = range(1, 10), range(2, 10)
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "int": (
        Operation("plus {n}", "add {n}", "x = x + {n}", lambda x, n: x + n, _SMALL),
        Operation("minus {n}", "subtract {n}", "x = x - {n}", lambda x, n: x - n, _SMALL),
        Operation("times {n}", "multiply by {n}", "x = x * {n}", lambda x, n: x * n, _FROM_TWO),
        Operation("modulo {n}", "take the remainder by {n}", "x = x % {n}", lambda x, n: x % n, _FROM_TWO),
        Operation("divide {n}", "divide by {n}, rounding down", "x = x // {n}", lambda x, n: x // n, _FROM_TWO),
        Operation("least {n}", "raise it to {n} if it is less", "x = max ( x , {n} )", max, _SMALL),
        Operation("most {n}", "lower it to {n} if it is more", "x = min ( x , {n} )", min, _SMALL),
        Operation("square", "square it", "x = x * x", lambda x, n: x * x),
        Operation("negate", "change its sign", "x = - x", lambda x, n: -x),
        Operation("size", "take its absolute value", "x = abs ( x )", lambda x, n: abs(x)),
    ),
    "list": (
        Operation(
            "each plus {n}",
            "add {n} to every item",
            "x = [ y + {n} for y in x ]",
            lambda x, n: [y + n for y in x],
            _SMALL,
        ),
        Operation(
            "each times {n}",
            "multiply every item by {n}",
            "x = [ y * {n} for y in x ]",
            lambda x, n: [y * n for y in x],
            _FROM_TWO,
        ),
        Operation(
            "above {n}",
            "keep the items above {n}",
            "x = [ y for y in x if y > {n} ]",
            lambda x, n: [y for y in x if y > n],
            _SMALL,
        ),
        Operation(
            "even",
            "keep the even items",
            "x = [ y for y in x if y % 2 == 0 ]",
            lambda x, n: [y for y in x if y % 2 == 0],
        ),
        Operation("reverse", "reverse it", "x = x [ : : - 1 ]", lambda x, n: x[::-1]),
        Operation("sort", "sort it", "x = sorted ( x )", lambda x, n: sorted(x)),
        Operation("drop {n}", "drop the first {n} items", "x = x [ {n} : ]", lambda x, n: x[n:], range(1, 4)),
        Operation("sum", "add up the items", "x = sum ( x )", lambda x, n: sum(x)),
        Operation("count", "count the items", "x = len ( x )", lambda x, n: len(x)),
    ),
    "text": (
        Operation("reverse", "reverse it", "x = x [ : : - 1 ]", lambda x, n: x[::-1]),
        Operation("upper", "write it in upper case", "x = x . upper ( )", lambda x, n: x.upper()),
        Operation("twice", "write it twice in a row", "x = x + x", lambda x, n: x + x),
        Operation("drop {n}", "drop the first {n} letters", "x = x [ {n} : ]", lambda x, n: x[n:], range(1, 4)),
        Operation("first {n}", "keep the first {n} letters", "x = x [ : {n} ]", lambda x, n: x[:n], _SMALL),
        Operation("length", "count the letters", "x = len ( x )", lambda x, n: len(x)),
    ),
}
_ARTICLES = {"int": "an integer", "list": "a list of integers", "text": "a string"}
# Inputs for the fingerprint, which tells functions apart; with each task's random inputs, also its tests.
PROBES: dict[str, tuple[Any, ...]] = {
    "int": (0, 1, -1, 2, 5, -7, 10, 13, -20, 37),
    "list": ([], [3], [5, 2, 8], [-4, 7, 7, 1], [9, 0, -2, 6, 12, 3], [1, 2, 3, 4, 5, 6, 7, 8]),
    "text": ("", "a", "code", "Flow", "abcdefgh", "Xyz Uvw", "level", "ghijklmnopq"),
}

Step = tuple[int, int]  # index of the operation in its kind, and its number


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function: the kind of its argument and its steps."""

    kind: str
    steps: tuple[Step, ...]

    def value(self, x: Any) -> Any:
        for operation, number in self._operations():
            x = operation.apply(x, number)
        return x

    def short(self) -> str:
        return f"{self.kind} " + " then ".join(o.words.format(n=n) for o, n in self._operations())

    def program(self) -> str:
        statements = [o.statement.format(n=n) for o, n in self._operations()]
        return f"{HEAD} " + JOIN.join([*statements, TAIL])

    def statement(self) -> str:
        lines = [f"{i}. {o.english.format(n=n)}" for i, (o, n) in enumerate(self._operations(), 1)]
        return (
            f"Write a Python function f(x). Its argument is {_ARTICLES[self.kind]}. It takes x through these steps, in "
            f"this order, and returns what comes out:\n" + "\n".join(lines) + f"\nIn short: {self.short()}"
        )

    def fingerprint(self) -> int:
        """Equal for functions with equal results on the probes, so that a reworded function is in the same split."""
        return state_key(self.kind, *(repr(self.value(x)) for x in PROBES[self.kind]))

    def _operations(self) -> list[tuple[Operation, int]]:
        return [(OPERATIONS[self.kind][index], number) for index, number in self.steps]


def draw(rng: np.random.Generator, kinds: Sequence[str], most_steps: int, split: Split | None = None) -> Recipe:
    """A function with three or more different results on the probes, of one split if one is named."""
    for _ in range(_MAX_ATTEMPTS):
        recipe = _any(rng, kinds, most_steps)
        results = {repr(recipe.value(x)) for x in PROBES[recipe.kind]}
        if len(results) < 3:
            continue
        held_out = recipe.fingerprint() % HELD_OUT_ONE_IN == 0
        if split is None or held_out == (split == "held_out"):
            return recipe
    raise WorldError(f"no function in {_MAX_ATTEMPTS} attempts with kinds={list(kinds)}, steps={most_steps}")


def _any(rng: np.random.Generator, kinds: Sequence[str], most_steps: int) -> Recipe:
    kind = kinds[int(rng.integers(len(kinds)))]
    operations = OPERATIONS[kind]
    steps: list[Step] = []
    for _ in range(int(rng.integers(1, most_steps + 1))):
        index = int(rng.integers(len(operations)))
        numbers = operations[index].numbers
        steps.append((index, int(numbers[int(rng.integers(len(numbers)))])))
        if operations[index].words in _TO_INT:
            break
    return Recipe(kind, tuple(steps))


def generated_problem(recipe: Recipe, seed: int, *, cases: int, public: int) -> CodeProblem:
    """The problem and its tests: inputs drawn by the task's seed, then probes in a drawn order, then more inputs."""
    rng = np.random.default_rng(seed)
    drawn = [_input(rng, recipe.kind) for _ in range(cases // 2)]
    drawn += [PROBES[recipe.kind][i] for i in rng.permutation(len(PROBES[recipe.kind]))]
    while len(inputs := {repr(x): x for x in drawn}) < cases:  # each once, or a public test could be hidden, too
        drawn += [_input(rng, recipe.kind) for _ in range(cases)]
    calls = tuple(CallCase((x,), recipe.value(x)) for x in list(inputs.values())[:cases])
    return CodeProblem(recipe.statement(), Suite(calls, ENTRY), public, 0, recipe.program())


def _input(rng: np.random.Generator, kind: str) -> Any:
    if kind == "int":
        return int(rng.integers(-50, 51))
    if kind == "list":
        return rng.integers(-10, 20, size=int(rng.integers(1, 8))).tolist()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    return "".join(letters[i] for i in rng.integers(len(letters), size=int(rng.integers(2, 12))))


def program_words(kinds: Sequence[str]) -> tuple[str, ...]:
    """Every word of short statements and programs."""
    texts = [HEAD, TAIL, JOIN, "then", *kinds]
    for kind in kinds:
        for operation in OPERATIONS[kind]:
            for number in operation.numbers:
                texts += [operation.words.format(n=number), operation.statement.format(n=number)]
    return tuple(dict.fromkeys(word for text in texts for word in text.split()))
