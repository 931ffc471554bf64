"""Mutants: functions of flowjax broken one at a time, and whether the tests notice.

    python -m tests.mutants --count=50 --seed=0           # one mutant in each of 50 functions, and the named ones
    python -m tests.mutants --room=flowjax/credit --count=10
    python -m tests.mutants --count=50 --list             # their diffs, without a test

A mutant changes one thing in one function, in a copy of the tree: a condition is negated, a comparison swapped or moved
by one, a whole number is off by one, a statement is dropped, the function returns at once, + and -, * and / or `and`
and `or` trade places, `not` or `await` goes. Words (docstrings, logging, texts of errors) and annotations stay. Seed
and function alone decide which one, so other functions may change meanwhile.

Then the unit tests of the function run, those first that name it, then files that import its module or lie nearest,
until one fails: the mutant is killed. A test that fails without the mutant, too, kills nothing. What survives is
printed with its diff: a gap in the tests, dead code, or a change that changes nothing.
"""

import argparse
import ast
import difflib
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.house.shape import importers
from tests.house.sources import Source, read_sources

ROOT = Path(__file__).parents[1]
UNIT = "not integration and not slow and not soak"
TEST_TIMEOUT_S = 60  # of one test: a mutant that waits forever is noticed
MOST_TEST_FILES = 6
MOST_TESTS_FIRST = 30
WHAT = "Break functions of flowjax and see whether the tests notice."
_SWAPPED: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
_TALK = re.compile(r"^(_?log(ger)?|logging|warnings)\.|^print$|\.(debug|info|warning|error|exception)$")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "beartype",
        "jaxtyping",
        "jax",
        "flax.nnx",
        "orbax.checkpoint",
        "grain",
        "optax",
        "aiohttp",
    ]
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef

# Mutants that no sample may miss, since they have survived before: function, code in it, what takes the code's place.
NAMED = (
    ("_advance", "if version == current and name ==", "if version < current or name =="),
    ("_advance", "version < current and version != self._newest(policy)", "False"),
    ("_streamed", 'if "error" in event:', "if False:"),
    ("rope_angles", "scaling.attention_factor or ", ""),
    ("rope_angles", "math.log(max(scaling.factor, 1.0)) + 1.0", "math.log(max(scaling.factor, 1.0))"),
    ("_evaluation_slots", "math.ceil(round(slots * total, 6))", "math.floor(round(slots * total, 6))"),
    ("_has_passed", 'self._operators[call.operator].role == "checker" and ', ""),
    ("_role", 'return "checker"', 'return "solver"'),
    ("_gate", '"checker" in roles and ', ""),
    ("measure", 'roles.get(call.operator) == "checker"', 'roles.get(call.operator) != "solver"'),
    ("remaining_s", "last - (", "last + ("),
    ("_pace_s", "max(1, ", "max(0, "),
    ("_pace_s", "max(1, len(lines) - 2 * RECENT_STEPS)", "1"),
    (
        "_apply",
        "optax.apply_updates(trained, updates)",
        "optax.apply_updates(trained, jax.tree.map(jnp.negative, updates))",
    ),
    ("_summed_loss", "total + objective.kl_coefficient", "total - objective.kl_coefficient"),
    ("make_objective", "temperature=run.config.rollout.temperature", "temperature=1.0"),
    ("_mismatch_weights", "tokens.old if is_decoupled else tokens.logprobs", "tokens.old"),
    ("make_optimizer", "optax.clip_by_global_norm(config.clip_norm), _named", "optax.identity(), _named"),
)


@dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    path: Path  # relative to the repository
    function: str  # with its class: `Ledger.assign`
    line: int
    kind: str
    before: str
    after: str  # the whole file

    @property
    def diff(self) -> str:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=1)
        return "\n".join([*lines][3:])

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.kind}"


@dataclass(frozen=True)
class Edit:
    """Bytes of a file that another text replaces, in the line where the change is seen."""

    kind: str
    line: int
    start: int
    end: int
    text: str


@dataclass
class Verdict:
    mutant: Mutant
    killed_by: str = ""
    note: str = ""
    seconds: float = 0.0


def functions(source: Source) -> Iterator[tuple[str, _Function]]:
    """Functions and methods of a file by name, those inside of others as part of them."""
    for node in source.tree.body:
        if isinstance(node, _Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, _Function))


def mutants(source: Source, name: str, function: _Function) -> list[Mutant]:
    """Every mutant of a function, in the order of the code."""
    found = []
    for edit in sorted(_edits(source, function), key=lambda edit: (edit.start, edit.end, edit.kind, edit.text)):
        raw = source.text.encode()
        after = (raw[: edit.start] + edit.text.encode() + raw[edit.end :]).decode()
        try:
            differs = ast.dump(ast.parse(after)) != ast.dump(source.tree)
        except SyntaxError:
            continue  # such as `await` dropped where an async comprehension wants it
        if differs:
            found.append(Mutant(source.path, name, edit.line, edit.kind, source.text, after))
    return found


def _edits(source: Source, function: _Function) -> Iterator[Edit]:
    raw = source.text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def edit(kind: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return Edit(kind, node.lineno, starts[node.lineno - 1] + node.col_offset, end, text)

    def code(node: ast.expr) -> str:
        return ast.unparse(node)

    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body or function.name in ("__repr__", "__str__") or all(_is_empty(statement) for statement in body):
        return
    if not isinstance(body[0], ast.Return | ast.Pass | ast.Raise) and not _is_talk(body[0]):
        here = edit("returns at once", body[0], "")
        yield Edit(here.kind, here.line, here.start, here.start, "return\n" + " " * body[0].col_offset)
    for node in _code_of(body):
        match node:
            case ast.If() | ast.While() | ast.IfExp():
                test = node.test
                plain = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
                if not isinstance(test, ast.Compare | ast.Constant):
                    yield edit("condition negated", test, f"({code(plain)})" if plain else f"(not ({code(test)}))")
            case ast.Compare(ops=[operator]):
                for other in _SWAPPED[type(operator)]:
                    changed = ast.Compare(node.left, [other()], node.comparators)
                    yield edit("comparison changed", node, f"({code(changed)})")
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()) if not _is_text(node):
                for other in _SWAPPED[type(node.op)]:
                    yield edit("operator changed", node, f"({code(ast.BinOp(node.left, other(), node.right))})")
            case ast.BoolOp():
                other = _SWAPPED[type(node.op)][0]
                yield edit("and, or changed", node, f"({code(ast.BoolOp(other(), node.values))})")
            case ast.UnaryOp(op=ast.Not()):
                yield edit("not dropped", node, f"({code(node.operand)})")
            case ast.Await():
                yield edit("await dropped", node, f"({code(node.value)})")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield edit("off by one", node, f"{value + 1}")
            case (
                ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break()
            ):
                yield edit("statement dropped", node, "pass")
            case (
                ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
                | ast.Delete(targets=[ast.Subscript() | ast.Attribute()])
            ):
                yield edit("statement dropped", node, "pass")
            case _:
                pass


def _code_of(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """What may be changed: all but words, annotations and what is only said."""
    for node in body:
        if isinstance(node, ast.JoinedStr | ast.arguments | ast.Import | ast.ImportFrom) or _is_talk(node):
            continue
        yield node
        if isinstance(node, ast.Raise | ast.Assert):
            continue
        if isinstance(node, ast.AnnAssign):
            yield from _code_of([node.value] if node.value is not None else [])
        elif isinstance(node, _Function | ast.ClassDef):
            yield from _code_of(node.body)
        else:
            yield from _code_of(list(ast.iter_child_nodes(node)))


def _is_talk(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(call, ast.Constant) or (
            isinstance(call, ast.Call) and bool(_TALK.search(ast.unparse(call.func)))
        )
    return False


def _is_empty(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return (
        is_text or isinstance(node, ast.Pass) or (isinstance(node, ast.Raise) and "NotImplemented" in ast.unparse(node))
    )


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def sample(sources: Sequence[Source], count: int, seed: int) -> list[Mutant]:
    """One mutant in each of `count` functions, every room of flowjax/ having its share."""
    rooms: dict[str, list[tuple[str, str, Source, _Function]]] = defaultdict(list)
    for source in sources:
        for name, function in functions(source):
            room = "/".join(source.path.parts[:2])
            rooms[room].append((_draw(seed, source.path.stem, name), name, source, function))
    # The k-th of a room's functions has the rank (k + 1/2) / size: a sample takes the same share of each room.
    ranked = [
        ((k + 0.5) / len(listed), room, name, source, function)
        for room, listed in sorted(rooms.items())
        for k, (_, name, source, function) in enumerate(sorted(listed, key=lambda one: one[0]))
    ]
    chosen: list[Mutant] = []
    for _, _, name, source, function in sorted(ranked, key=lambda one: one[:3]):
        if len(chosen) == count:
            break
        if choices := mutants(source, name, function):
            kinds = sorted({choice.kind for choice in choices})
            kind = kinds[int(_draw(seed, name, "kind"), 16) % len(kinds)]
            fitting = [choice for choice in choices if choice.kind == kind]
            chosen.append(fitting[int(_draw(seed, name, "place"), 16) % len(fitting)])
    return chosen


def _draw(seed: int, *names: str) -> str:
    return hashlib.sha256(f"{seed} {' '.join(names)}".encode()).hexdigest()


def named(sources: Sequence[Source]) -> list[Mutant]:
    """The mutants of `NAMED`.

    Raises:
        LookupError: a function, or the code in it, is not there once: it has a new name or form, which belongs into
            `NAMED`.
    """
    found = []
    for function, code, instead in NAMED:
        places = [
            (source, node)
            for source in sources
            for name, node in functions(source)
            if name.rpartition(".")[2] == function and code in (ast.get_source_segment(source.text, node) or "")
        ]
        if len(places) != 1:
            raise LookupError(f"{function} with {code!r} is in {len(places)} places: correct NAMED in tests/mutants.py")
        source, node = places[0]
        part = ast.get_source_segment(source.text, node) or ""
        line = node.lineno + part[: part.index(code)].count("\n")
        after = source.text.replace(part, part.replace(code, instead, 1), 1)
        found.append(Mutant(source.path, function, line, "named", source.text, after))
    return found


class TestFiles:
    """The test files that belong to a function, nearest first."""

    __test__ = False

    def __init__(self, root: Path, sources: Sequence[Source]):
        self._texts = {path: path.read_text() for path in sorted((root / "tests").rglob("*.py"))}
        self._root, self._importers = root, importers(sources)
        self._modules = {source.module for source in sources}

    @cache  # noqa: B019 lives as long as the run
    def _imports(self, path: Path, depth: int = 2) -> frozenset[str]:
        """Modules of flowjax that a test file names, itself or through its helpers."""
        text = self._texts[path]
        words = set(re.findall(r"flowjax(?:\.\w+)+", text))
        for package, listed in re.findall(r"^from (flowjax[\w.]*) import (\([^)]*\)|.*)$", text, re.MULTILINE):
            words |= {f"{package}.{name}" for name in re.findall(r"\w+", listed)}
        found = {word for word in words if word in self._modules} | {w.rpartition(".")[0] for w in words}
        for helper in re.findall(r"^from (tests[\w.]*) import", text, re.MULTILINE) if depth else ():
            file = self._root / (helper.replace(".", "/") + ".py")
            found |= self._imports(file, depth - 1) if file in self._texts else set()
        return frozenset(found & self._modules)

    def of(self, mutant: Mutant) -> list[list[str]]:
        """What to run, one call after another: the tests that use a thing of that name, then whole files."""
        files = self._files_of(mutant)
        name = re.compile(rf"(?<![A-Za-z0-9])_*{mutant.function.rpartition('.')[2].strip('_')}\b")
        tests = [
            f"{file.relative_to(self._root)}::{node.name}"
            for file in files
            for node in ast.parse(self._texts[file]).body
            if isinstance(node, _Function) and node.name.startswith("test_")
            if name.search(ast.get_source_segment(self._texts[file], node) or "")
        ]
        whole = [[str(file.relative_to(self._root))] for file in files]
        return [tests, *whole] if 0 < len(tests) <= MOST_TESTS_FIRST else whole

    def _files_of(self, mutant: Mutant) -> list[Path]:
        module = ".".join(mutant.path.with_suffix("").parts).removesuffix(".__init__")
        room = "/".join(mutant.path.parts[1:-1])
        near = {module: 4.0, **dict.fromkeys(self._importers[module], 2.0)}
        for name in self._importers[module]:
            near |= {further: 1.0 for further in self._importers.get(name, ()) if further not in near}
        words = [re.compile(rf"\b{word}\b") for word in mutant.function.split(".") if not word.startswith("__")]
        scores = {}
        for path, text in self._texts.items():
            if not path.name.startswith("test_"):
                continue
            score = max((near.get(name, 0.0) for name in self._imports(path)), default=0.0)
            score += 3.0 * sum(bool(word.search(text)) for word in words) if score else 0.0
            here = "/".join(path.relative_to(self._root / "tests").parts[:-1])
            score += 1.5 if here and f"{room}/".startswith(f"{here}/") else 0.0
            stem = mutant.path.parent.name if mutant.path.stem == "__init__" else mutant.path.stem
            score += 2.0 if path.stem.endswith(f"_{stem}") else float(len(stem) > 3 and stem in path.stem)
            if score:
                scores[path] = score
        return sorted(scores, key=lambda path: (-scores[path], str(path)))[:MOST_TEST_FILES]


class Runner:
    """Runs tests on mutants, in a copy of the tree."""

    def __init__(self, copy: Path, limit_s: float):
        self._copy, self._limit_s = copy, limit_s
        self._broken: set[str] = set()  # tests that fail without a mutant
        self._sound: set[str] = set()

    def judge(self, mutant: Mutant, calls: Sequence[Sequence[str]]) -> Verdict:
        started, place = time.monotonic(), self._copy / mutant.path
        verdict = Verdict(mutant, note="" if calls else "no test file belongs to it")
        try:
            for tests in calls:
                place.write_text(mutant.after)
                while not verdict.killed_by:
                    left_s = self._limit_s - (time.monotonic() - started)
                    if left_s <= 0:
                        verdict.note = f"not all of its tests ran in {self._limit_s:.0f} s"
                        return verdict
                    failed = self._first_failure(tests, left_s)
                    if failed is None:
                        break
                    if self._is_sound(failed, mutant):
                        verdict.killed_by = failed
                if verdict.killed_by:
                    return verdict
            return verdict
        finally:
            place.write_text(mutant.before)
            verdict.seconds = time.monotonic() - started

    def _is_sound(self, test: str, mutant: Mutant) -> bool:
        """Whether a test passes without the mutant."""
        if test not in self._sound | self._broken:
            (self._copy / mutant.path).write_text(mutant.before)
            (self._broken if self._first_failure([test], 4 * TEST_TIMEOUT_S) else self._sound).add(test)
            (self._copy / mutant.path).write_text(mutant.after)
        return test in self._sound

    def _first_failure(self, tests: Sequence[str], limit_s: float) -> str | None:
        """The first test that fails; a file that cannot be collected counts as one; None where the time is up."""
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-m", UNIT, f"--timeout={TEST_TIMEOUT_S}", "--tb=no", "-rfE"]
        arguments += [f"--deselect={test}" for test in sorted(self._broken)]
        output = self._copy / ".output"
        process = _SERVER.Process(target=_run_tests, args=(self._copy, [*arguments, *tests], output))
        process.start()
        process.join(limit_s)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return None
        text = output.read_text(errors="replace")
        match = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", text, re.MULTILINE)
        if match:
            return match[1]
        return None if process.exitcode in (0, 5) else tests[0]


def _run_tests(copy: Path, arguments: Sequence[str], output: Path) -> None:
    """In a fork of a process that has imported the libraries alone: they take longer than most tests."""
    os.setsid()
    os.chdir(copy)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flowjax", "tests")]:
        del sys.modules[name]  # of the tree that was copied
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    status = pytest.main([*arguments])
    sys.stdout.flush()
    os._exit(status)


def copy_tree(root: Path, to: Path) -> None:
    """The files of the repository as they lie here, changes that are not committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Break functions of flowjax and see whether the tests notice."
    )
    parser.add_argument("--count", type=int, default=50, help="functions to break")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", default="flowjax", help="folder or file, such as flowjax/credit")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time for the tests of one mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and run no test")
    parser.add_argument("--least-killed", type=float, default=0.9, help="share of the mutants below which it fails")
    options = parser.parse_args(arguments)
    sources = read_sources(ROOT)
    here = [source for source in sources if str(source.path).startswith(options.room.rstrip("/"))]
    chosen = [mutant for mutant in named(sources) if mutant.path in {source.path for source in here}]
    chosen += sample(here, options.count, options.seed)
    if options.list:
        print(*(f"{mutant}\n{mutant.diff}\n" for mutant in chosen), sep="\n")
        return 0
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="flowjax-mutants-") as folder:
        copy = Path(folder)
        copy_tree(ROOT, copy)
        tests, runner = TestFiles(copy, sources), Runner(copy, options.limit_s)
        for number, mutant in enumerate(chosen, 1):
            verdict = runner.judge(mutant, tests.of(mutant))
            verdicts.append(verdict)
            fate = f"killed by {verdict.killed_by.rpartition('/')[2]}" if verdict.killed_by else "SURVIVED"
            print(f"{number}/{len(chosen)} {mutant}: {fate} ({verdict.seconds:.0f} s)", flush=True)
    survivors = [verdict for verdict in verdicts if not verdict.killed_by]
    for verdict in survivors:
        print(f"\n{verdict.mutant}{verdict.note and f' ({verdict.note})'}\n{verdict.mutant.diff}")
    killed = len(verdicts) - len(survivors)
    print(f"\n{killed} of {len(verdicts)} mutants killed")
    return 0 if killed >= options.least_killed * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
