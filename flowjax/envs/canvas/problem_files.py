"""Problems in the published JSONL format, and in the formats of the twelve data sets that it was made from.

    {"problem": ..., "ground_truth": ..., "source": "squad_v2", "problem_type": "qa", "meta": {"context": ...}}

Fields may also be called `question` and `answer`, and be beside `meta` or in it. Tests of a program are hidden: only
`meta.public_tests`, or a separate file of public tests, is shown. No row is dropped silently: rows that cannot be
graded are counted by reason.
"""

import ast
import builtins
import functools
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowjax.canvas.values import Problem, ProblemKind
from flowjax.envs import NotReady, WorldError, check_characters
from flowjax.envs.code.problems import problem_of
from flowjax.grading.answers import chosen, last_boxed, normalise_answer, options_of
from flowjax.grading.code import Check, Suite, from_unittest, parse_quietly
from flowjax.grading.scoring import UNANSWERABLE
from flowjax.records import state_key

KINDS: Mapping[str, ProblemKind] = {
    "gsm8k": "math",
    "math": "math",
    "aime2025": "math",
    "mathqa": "choice",
    "hotpotqa": "qa",
    "squadv2": "qa",
    "triviaqa": "qa",
    "nq": "qa",
    "mbpp": "code",
    "mbppplus": "code",
    "humaneval": "code",
    "bigcodebench": "code",
    "codeexercises": "code",
    "apps": "code",
    "ds1000": "code",
}
_TYPES: Mapping[str, ProblemKind] = {"math": "math", "qa": "qa", "code": "code", "choice": "choice"}
# Gold answers which as a whole say that there is no answer.
_NO_ANSWER = {
    "unanswerable",
    "no answer",
    "not answerable",
    "cannot be answered",
    "cannot answer",
    "cant be answered",
    "no information",
    "not mentioned",
    "not provided",
    "insufficient information",
}
_MAY_BE_UNANSWERABLE = f"If the passage does not answer the question, the answer is: {UNANSWERABLE}."
_LETTERED = re.compile(r"\b([a-j]) \) (.*?)(?=\s*,\s*[a-j] \) |$)")

_IMPORTS = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+(\w[^\n;#]*))", re.MULTILINE)
_DATA_PACKAGES = {
    "numpy",
    "pandas",
    "scipy",
    "torch",
}  # whose objects cross as data (flowjax.grading.sandbox_libraries)
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Record:
    """One problem and the means to grade it: `gold` answers, any of which is right, or hidden `tests` of a program.

    `row` counts from 1. The gold of a question without an answer is `UNANSWERABLE`.
    """

    problem: Problem
    gold: tuple[str, ...]
    tests: Suite | None
    source: str
    row: int
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class PublishedData:
    """The problems of a file in order, and the number of rows left out, by reason."""

    records: tuple[Record, ...]
    left_out: Mapping[str, int]


def load(
    path: str | Path,
    *,
    source: str = "",
    public_tests: Mapping[str, str | Path] | None = None,
    keep_unanswerable: bool = True,
    packages: Sequence[str] = (),
) -> PublishedData:
    """The problems of a JSONL file.

    Args:
        source: data set of rows that name none; not needed if the file is named after its data set.
        public_tests: data set -> JSONL file of rows with task_id and test, which are shown.
        keep_unanswerable: keep questions whose gold says that there is no answer; otherwise they are left out.
        packages: folders that programs may import from; rows of DS-1000 that need another package are left out.

    Raises:
        WorldError: a file cannot be read, or a row is no problem.
    """
    path = Path(path)
    shown = {_plain_name(name): _public_by_id(Path(file)) for name, file in (public_tests or {}).items()}
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for number, row in _rows(path):
        name = str(row.get("source") or row.get("dataset") or source or path.stem)
        fields = _fields(row)
        made = _record(fields, name, number, path, shown.get(_plain_name(name), {}), packages)
        if isinstance(made, str):
            left_out[f"{name}: {made}"] += 1
        elif made.gold == (UNANSWERABLE,) and not keep_unanswerable:
            left_out[f"{name}: no answer by its gold"] += 1
        else:
            records.append(made)
    for reason, count in left_out.items():
        logging.warning("%s: %d rows left out, %s", path, count, reason)
    return PublishedData(tuple(records), dict(left_out))


@functools.lru_cache(maxsize=4)
def records(file: str, packages: tuple[str, ...] = ()) -> tuple[Record, ...]:
    """The problems of a file that the world's option `path` names; each process reads it once."""
    try:
        return load(file, packages=packages).records
    except WorldError as error:
        raise type(error)(f"env.options path: {error}") from error


def content_of(record: Record) -> str:
    """Equal for rows of the same problem, in every process."""
    return f"{state_key('problem', record.problem.text):x}"


def alike(record: Record) -> str:
    """Equal for rows whose problems differ only in case and white space, so that these go into the same split."""
    return " ".join(record.problem.text.casefold().split())


def record_of(payload: Mapping[str, Any]) -> Record:
    """The row of a task that `Canvas` made from a file.

    Raises:
        WorldError: the file now has another problem at that row.
    """
    found, row = records(payload["file"], tuple(payload.get("packages", ()))), payload["row"]
    if row >= len(found) or content_of(found[row]) != payload["content"]:
        raise WorldError(
            f"env.options path: {payload['file']} has not the problem of the task in its place {row + 1}: the file was "
            "changed after the run had begun, or is another one on this machine; put the first one back"
        )
    return found[row]


def _record(
    fields: Mapping[str, Any],
    source: str,
    row: int,
    path: Path,
    shown: Mapping[str, tuple[str, ...]],
    packages: Sequence[str],
) -> Record | str:
    """The record, or the reason why it cannot be graded."""
    text = next((fields[name] for name in ("problem", "question", "text", "prompt") if fields.get(name)), None)
    if not isinstance(text, str) or not text.strip():
        raise WorldError(f"{path}, row {row} has no problem (it has {', '.join(fields)}): give problem or question")
    name = _plain_name(source)
    kind = KINDS.get(name) or _TYPES.get(str(fields.get("problem_type", "")).lower(), "general")
    task_id = str(fields.get("task_id", fields.get("id", "")))
    if kind == "code":
        suite = hidden_tests(fields, text)
        if suite is None:
            return "no tests that can be run"
        if suite.runs_text:
            metadata = fields.get("metadata")
            library = metadata.get("library", "") if isinstance(metadata, Mapping) else fields.get("library", "")
            lacking = _beyond(suite, str(library), packages)
            return lacking or Record(Problem(text, "code", part=True), (), suite, source, row, task_id)
        public = statements(fields.get("public_tests"), suite.entry) or shown.get(task_id, ())
        return Record(
            Problem(text, "code", entry_point=suite.entry, public_tests=public), (), suite, source, row, task_id
        )
    gold = _gold(fields, kind)
    if not gold:
        return "no answer"
    problem = Problem(text, kind, context=_context(fields, text))
    listed = fields.get("options") or fields.get("choices")
    options = _options(listed, text)
    if kind != "qa" and options and all(chosen(answer, options) for answer in gold):
        problem = replace(problem, kind="choice", options=options)
    elif options and (kind == "choice" or (listed and kind == "general")):
        return "its answer is none of its options"
    elif kind == "choice":
        if any(len(answer) == 1 and answer.isalpha() for answer in gold):
            return "its answer is a letter, and it has no options"
        problem = replace(problem, kind="math")  # options are lacking: the value is asked for
    if name == "squadv2" and UNANSWERABLE not in text.lower():
        problem = replace(problem, text=f"{text}\n\n{_MAY_BE_UNANSWERABLE}")
    return Record(problem, gold, None, source, row, task_id)


def _gold(fields: Mapping[str, Any], kind: ProblemKind) -> tuple[str, ...]:
    """The right answers; `UNANSWERABLE` for a question without one, () where the row lacks the field."""
    names = ("ground_truth", "answer", "answers", "correct")
    named = [name for name in names if name in fields]
    if named and isinstance(fields[named[0]], bool):  # a flag, not an answer in words
        return ()
    golds = tuple(dict.fromkeys(text for name in named[:1] for text in _texts(fields[name], kind)))
    if not golds and isinstance(fields.get("solution"), str) and (boxed := last_boxed(fields["solution"])):
        golds = (boxed,)
    if kind == "qa" and named and (not golds or any(normalise_answer(text) in _NO_ANSWER for text in golds)):
        return (UNANSWERABLE,)
    return golds


def _texts(value: Any, kind: ProblemKind) -> list[str]:
    if isinstance(value, Mapping):  # SQuAD's {"text": [...]}, TriviaQA's {"value": ..., "aliases": [...]}
        return [text for name in ("text", "value", "aliases") for text in _texts(value.get(name), kind)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [text for item in value for text in _texts(item, kind)]
    if value is None or isinstance(value, bool):
        return []
    text = str(value).rpartition("####")[2] if kind == "math" else str(value)
    parts = text.split("|") if kind == "qa" else [text]
    return [part.strip() for part in parts if part.strip()]


def _options(listed: Any, text: str) -> dict[str, str]:
    """Options from the row's own field, else those in the text."""
    if isinstance(listed, Mapping):
        return {str(letter).upper(): str(option) for letter, option in listed.items()}
    if isinstance(listed, list):
        return {chr(ord("A") + place): str(option) for place, option in enumerate(listed)}
    found = _LETTERED.findall(listed if isinstance(listed, str) else text)
    if len(found) > 1 and [letter for letter, _ in found] == [chr(ord("a") + place) for place in range(len(found))]:
        return {letter.upper(): option.strip() for letter, option in found}
    return options_of(text)


def _context(fields: Mapping[str, Any], text: str) -> str:
    context = fields.get("context", "")
    if isinstance(context, Mapping):  # HotpotQA
        titles, paragraphs = context.get("title"), context.get("sentences")
        if not (isinstance(titles, list) and isinstance(paragraphs, list)):
            return ""
        pairs = zip(titles, paragraphs, strict=False)
        said = ((title, part if isinstance(part, list) else [part or ""]) for title, part in pairs)
        context = "\n\n".join(f"[{title}]\n{''.join(map(str, sentences))}" for title, sentences in said)
    return context if isinstance(context, str) and context not in text else ""


def _public_by_id(path: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for _, row in _rows(path):
        fields = _fields(row)
        test = fields.get("test") or fields.get("test_list") or fields.get("public_tests")
        entry = str(fields.get("entry_point") or called(str(test)) or "candidate")
        found[str(fields.get("task_id", ""))] = statements(test, entry)
    return found


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's fields and those of its `meta`, names in lower case; the row's own take precedence."""
    meta = row.get("meta")
    fields = {str(name).lower(): value for name, value in meta.items()} if isinstance(meta, Mapping) else {}
    return fields | {str(name).lower(): value for name, value in row.items() if name != "meta"}


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, Mapping):
                        raise WorldError(f"{path}, row {number} is no object with fields: give one problem a line")
                    if "\\u" in line:  # only an escape can spell a lone surrogate, and tests may be long
                        check_characters(f"{path}, row {number}", json.dumps(row, ensure_ascii=False))
                    yield number, row
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, WorldError):
            raise
        kind = NotReady if isinstance(error, FileNotFoundError) else WorldError
        raise kind(f"{path} cannot be read as JSON lines ({error}): give a file with one object a line") from error


def _plain_name(source: str) -> str:
    return re.sub(r"[^a-z0-9]", "", source.lower())


def hidden_tests(fields: Mapping[str, Any], text: str) -> Suite | None:
    """The hidden tests of a program; None where there are none, or where they check nothing."""
    if fields.get("input_output"):
        return _read({"problem": text, "input_output": fields["input_output"]})
    test: Any = fields.get("test") or fields.get("test_list") or fields.get("code_context")
    entry = str(fields.get("entry_point") or "")
    if isinstance(test, list):
        more = ("test_imports", "test_setup_code", "challenge_test_list", "code")
        return _read({"prompt": text, "test_list": test} | {name: fields.get(name) for name in more}, entry)
    module = parse_quietly(test) if isinstance(test, str) else None
    if module is None or not _checks_something(module):
        return None
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if "test_execution" in functions:  # DS-1000 inserts the program into a text that it runs
        asked = [name for name in ("test_execution", "test_string") if name in functions]
        return Suite((Check("\n".join([test, *(f"{name}(solution)" for name in asked)])),), runs_text=True)
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
        return None  # the tests are only defined, and never called
    return Suite((Check("\n".join([test, *calls])),), entry)


def _beyond(suite: Suite, library: str, packages: Sequence[str]) -> str:
    """Reason why the tests cannot be run with these folders of packages, "" where they can."""
    imported = {name for case in suite.cases if isinstance(case, Check) for name in _imported(case.source)}
    names = sorted(imported - sys.stdlib_module_names)
    places = [(Path(folder), name) for folder in packages for name in names]
    found = {name for folder, name in places if any(folder.glob(f"{name}.*")) or any(folder.glob(f"{name}/*.py"))}
    if lacking := [name for name in names if name not in found]:
        return f"needs {', '.join(lacking)} in the sandbox: give packages, folders that hold it"
    others = [name for name in names if name not in _DATA_PACKAGES]
    if others and library.lower() not in _DATA_PACKAGES:
        return f"compares objects of {', '.join(others)}, which do not leave the sandbox"
    return ""


def _imported(source: str) -> set[str]:
    """The packages that code imports, also inside strings, which it may run as code."""
    names = []
    for package, modules in _IMPORTS.findall(source):
        names += [package] if package else [module.split()[0].partition(".")[0] for module in modules.split(",")]
    return set(names)


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
