"""Plays fixed workflows over problems: keeps a row for each, so that none is played twice, and makes tables of them.

A row has the question, the answer, the right answer, and the usage (docs/canvas/running.md).
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.canvas.backends import Backend
from flowjax.canvas.backends.config import BackendConfigError
from flowjax.canvas.cache import fingerprint, problem_digest
from flowjax.canvas.context import Budget, Sandbox
from flowjax.canvas.graph import Workflow, WorkflowError
from flowjax.canvas.operators.registry import OperatorRegistryError
from flowjax.canvas.run import Operators, run
from flowjax.canvas.text import show
from flowjax.canvas.values import WorkflowRun
from flowjax.config import ConfigError
from flowjax.envs import WorldError
from flowjax.envs.canvas.executors import scored
from flowjax.envs.canvas.problem_files import Record, load
from flowjax.files import replace_file
from flowjax.grading.processes import GraderError
from flowjax.grading.sandbox import IsolationError, NoProcessorError
from flowjax.monitor.statistics import difference, task_interval

ROWS = "rows.jsonl"  # their file
_TRIES, _PAUSE_S = 3, 2.0  # of a problem whose backend is away
# Errors that the user of a command can correct.
_MISTAKES = (
    *(WorkflowError, BackendConfigError, OperatorRegistryError),
    *(ConfigError, WorldError, GraderError, IsolationError, OSError),
)
_COUNTED = ("calls", "tokens", "cost", "seconds")


class BackendAway(RuntimeError):
    """A backend does not answer; rows played so far are kept."""


@dataclass(frozen=True)
class Job:
    """A workflow, its name in the results, the temperature of its calls, and the most calls for one problem."""

    name: str
    workflow: Workflow
    temperature: float
    most_calls: int | None = None

    def key(
        self,
        record: Record,
        file: Path,
        operators: Operators,
        backends: Mapping[str, Backend],
        default: str,
        packages: tuple[str, ...] = (),
    ) -> str:
        """Key of a row, equal for interchangeable rows: the same workflow, problem, grading, model, temperature and
        packages, and the same code of operators from outside flowjax."""
        identities = {name: backend.identity for name, backend in backends.items()}
        problem = problem_digest(record.problem)
        asked = [show(self.workflow), self.temperature, identities, default, file.name, record.row, problem]
        asked += [self.most_calls] if self.most_calls is not None else []
        asked += [["packages", *packages]] if packages else []
        used = {call.operator for call in self.workflow.calls()}
        found = (operators[name] for name in sorted(used) if name in operators)
        asked += [fingerprint(each) for each in found if not each.__module__.startswith("flowjax.canvas.")]
        graded = [list(record.gold), repr(record.tests)]
        return hashlib.blake2b(json.dumps([asked, graded], sort_keys=True).encode(), digest_size=12).hexdigest()


def read_problems(
    path: Path, limit: int = 0, packages: Sequence[str] = (), *, flag: str = "--data"
) -> tuple[list[tuple[Path, Record]], dict[str, int]]:
    """The problems of a file or folder, and the number of rows left out, by reason.

    `limit` above 0 takes the first problems of each file. Programs may import from the folders `packages`; errors name
    `flag`.

    Raises:
        WorldError: there is none, or a row is no problem.
    """
    files = [path] if path.is_file() else [path / "test.jsonl"]
    if not files[0].is_file():
        files = sorted(path.glob("*.jsonl"))
    found, left_out = [], Counter[str]()
    for file in files:
        data = load(file, packages=packages)
        found += [(file, record) for record in data.records[: limit or None]]
        left_out.update(data.left_out)
    if not found:
        raise WorldError(f"{flag}={path} holds no problems: give a JSONL file, or a folder of some")
    return found, dict(left_out)


def name_of(data: Path) -> str:
    """Name of a data set: of its file or folder; of a file `test` or `train`, as every set has one, its folder's."""
    place = data.absolute()
    return place.parent.name if place.stem in ("train", "test") and not place.is_dir() else place.stem


def command_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of a command over problems, with the flags that all of them have; `doc` is what `--help` says."""
    head, _, rest = doc.partition("\n")
    parser = argparse.ArgumentParser(
        prog=f"python -m flowjax.canvas.{name}",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operators", nargs="*", default=[], help="further operators, package.module:Class")
    parser.add_argument("--at_once", type=int, default=8, help="problems played at one time")
    parser.add_argument(
        "--packages", nargs="*", default=[], type=_packages_folder, help="that programs may import from"
    )
    parser.add_argument("--out", default="", help="folder of the results")
    return parser


def _packages_folder(path: str) -> str:
    """A value of `--packages`.

    Raises:
        ArgumentTypeError: it is no folder.
    """
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(
            f"{path} is no folder: give those of installed packages, such as site-packages"
        )
    return path


def refuse_below(parser: argparse.ArgumentParser, arguments: argparse.Namespace, least: Mapping[str, float]) -> None:
    """End the command where a number is below its bound, or is nan."""
    for name, bound in least.items():
        if not getattr(arguments, name) >= bound:  # and not `<`, which is false for nan
            parser.error(f"--{name}={getattr(arguments, name)}: give at least {bound}")


def exit_status(work: Callable[[], None]) -> int:
    """Do the work; returns the command's exit status, with a message on standard error where it is not 0."""
    try:
        work()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + signal.SIGINT
    except BackendAway as error:
        print(f"{error}; the same command goes on from here", file=sys.stderr)
        return 1
    except _MISTAKES as error:
        print(error, file=sys.stderr)
        return 2
    return 0


async def play(
    job: Job,
    wanted: Sequence[tuple[Path, Record]],
    rows: dict[str, dict[str, Any]],
    file: Path,
    *,
    operators: Operators,
    backends: Mapping[str, Backend],
    default: str,
    at_once: int,
    packages: tuple[str, ...],
) -> list[dict[str, Any]]:
    """The rows of a job, in the order of the problems; missing ones are played, and appended to `file` and `rows`.

    Where a backend is away no further problem is started; those under way are finished and kept.

    Raises:
        BackendAway: a backend does not answer.
        IsolationError: the workflow runs programs, and this machine cannot isolate them.
    """
    slots = asyncio.Semaphore(at_once)
    away: list[BackendAway] = []
    keys = [job.key(record, path, operators, backends, default, packages) for path, record in wanted]
    settings: dict[str, Any] = {"operators": operators, "backends": backends, "default_backend": default}
    settings |= {"sandbox": Sandbox(packages=packages), "budget": Budget(calls=job.most_calls)}

    called = (operators.get(call.operator) for call in job.workflow.calls())
    if set(keys) - rows.keys() and any(each is not None and each.runs_programs for each in called):
        # Checked here: `run` would report it as an outage, which is tried again.
        await asyncio.to_thread(settings["sandbox"].require)

    async def one(key: str, path: Path, record: Record) -> None:
        async with slots:
            if key in rows or away:  # from an earlier start, or from the same workflow under another name
                return
            try:
                row = await _played(key, job, path, record, settings)
            except BackendAway as error:
                away.append(error)
                return
            rows[key] = row
            if is_refused(row):
                return  # it says nothing about the workflow: the next start asks again
            # Row by row, so that an interrupted command keeps what it has played.
            with file.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(row, default=str) + "\n")

    try:
        async with asyncio.TaskGroup() as group:
            for key, (path, record) in zip(keys, wanted, strict=True):
                group.create_task(one(key, path, record))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # callers catch its type, which a group hides
    if away:
        raise away[0]
    return [rows[key] for key in keys]


def is_refused(row: Mapping[str, Any]) -> bool:
    """True where backends refused every request that was made for the problem."""
    return row["status"] == "error" and bool(row["calls"]) and not row["tokens"]


async def _played(key: str, job: Job, path: Path, record: Record, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Play and grade one problem; an outage is tried again.

    Raises:
        BackendAway: the backend is away at each of `_TRIES`.
    """
    played = await run(job.workflow, record.problem, temperature=job.temperature, **settings)
    for _ in range(_TRIES - 1):
        if played.status == "executor_error":
            await asyncio.sleep(_PAUSE_S)
            played = await run(job.workflow, record.problem, temperature=job.temperature, **settings)
    if played.status == "executor_error":
        raise BackendAway(f"{job.name}, {path.name} row {record.row}: {played.error}")
    return await asyncio.to_thread(_row, key, job, path, record, played, settings["sandbox"].packages)


def _row(
    key: str, job: Job, path: Path, record: Record, played: WorkflowRun, packages: tuple[str, ...]
) -> dict[str, Any]:
    """The row of a played problem, with its grade; hidden tests are not in it."""
    problem, usage = record.problem, played.usage
    gold = record.tests if record.tests is not None else record.gold
    options = dict(problem.options)
    try:
        score = scored(played.answer, gold, problem.kind, allow_none=False, options=options, packages=packages)
    except NoProcessorError as busy:
        raise BackendAway(f"{job.name}, {path.name} row {record.row}: grading: {busy}") from busy
    return {
        "key": key,
        "name": job.name,
        **question_of(path, record),
        "workflow": show(job.workflow),
        "answer": played.answer,
        "correct": bool(score.correct),
        "score": score.score,
        "remark": score.remark,
        "status": played.status,
        "errors": list(played.errors),
        "calls": usage.calls,
        "tokens": usage.prompt_tokens + usage.sampled_tokens,
        "cost": usage.cost,
        "seconds": played.seconds,
        "trace": [asdict(node) for node in played.trace],
    }


def question_of(path: Path, record: Record) -> dict[str, Any]:
    """The fields of a row that describe the problem, with the right answer."""
    gold = list(record.gold) or "hidden tests"
    place = {"source": record.source, "file": path.name, "row": record.row}
    return {**place, "question": record.problem.text, "gold": gold}


def kept_rows(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier start, by key. Damaged lines, such as one that a crash cut short, are removed from the
    file, so that their problems are played again."""
    if not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows[row["key"]] = row
    if len(rows) != len(lines) - 1 or lines[-1]:
        left_out = sum(map(bool, lines)) - len(rows)
        print(f"{file}: lines that are damaged or there twice are left out: {left_out}", file=sys.stderr)
        write_rows(file, rows)
    return rows


def write_rows(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    replace_file(file, "".join(json.dumps(row, default=str) + "\n" for row in rows.values()))


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy with its interval over problems, and mean usage: of all rows, and by source."""

    def part(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        mean, low, high = task_interval(np.array([float(row["correct"]) for row in of]))
        spent = {name: float(np.mean([row[name] for row in of])) for name in _COUNTED}
        failed = Counter(next(iter(row["errors"]), "no error is known") for row in of if row["status"] == "error")
        why = {"failed": failed.total(), "failed_with": failed.most_common(1)[0][0]} if failed else {}
        return {"problems": len(of), "accuracy": mean, "low": low, "high": high, **spent, **why}

    sources = sorted({row["source"] for row in rows})
    by_source = {source: part([row for row in rows if row["source"] == source]) for source in sources}
    built = {row["workflow"] for row in rows}
    found = {"workflow": rows[0]["workflow"] if len(built) == 1 else f"{len(built)} different", **part(rows)}
    if "policy_tokens" in rows[0]:
        found["policy_tokens"] = float(np.mean([row["policy_tokens"] for row in rows]))
    return {**found, "sources": by_source}


def _against(rows: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The first workflow's accuracy less this one's, paired over problems."""
    left, right = (np.array([[float(row["correct"]) for row in side]]) for side in (first, rows))
    if left.shape[1] < 2:
        return {}
    found = difference(left, right)
    return {"first_is_better_by": found.mean, "low": found.low, "high": found.high, "p_value": found.p_value}


def write_results(
    out: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]], left_out: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Write `results.json` and `results.md` of workflows, by name, each compared with the first; return the results."""
    first = next(iter(rows.values()))
    results = {name: summarise(of) | {"left_out": dict(left_out)} for name, of in rows.items()}
    for name, of in rows.items():
        if of is not first and (against := _against(of, first)):
            results[name]["against_first"] = against
    replace_file(out / "results.json", json.dumps(results, indent=2) + "\n")
    replace_file(out / "results.md", markdown(results))
    return results


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a page: a table of the workflows, and one of their sources."""
    head = "| accuracy [95 %] | problems | calls | tokens | cost | seconds |"
    lines = ["# Workflows over problems", "", f"| | workflow {head}", "|---|---|---|---|---|---|---|---|"]
    lines += [f"| {name} | `{of['workflow']}` {_cells(of)}" for name, of in results.items()]
    for name, of in results.items():
        if against := of.get("against_first"):
            bounds = f"[{100 * against['low']:+.1f}, {100 * against['high']:+.1f}]"
            points = f"{100 * against['first_is_better_by']:+.1f} points {bounds}"
            lines += ["", f"{next(iter(results))} against {name}: {points}, p = {against['p_value']:.3g}."]
    lines += ["", f"| | source {head}", "|---|---|---|---|---|---|---|---|"]
    for name, of in results.items():
        lines += [f"| {name} | {source} {_cells(each)}" for source, each in of["sources"].items()]
    for name, of in results.items():
        if "failed" in of:
            often = " ".join(of["failed_with"].split())
            lines += ["", f"{of['failed']} of {of['problems']} runs of {name} failed, most often with: {often}"]
    lines += ["", "Calls, tokens, cost and seconds are means of a problem."]
    for name, of in results.items():
        if "policy_tokens" in of:
            lines += ["", f"What built the workflows ({name}) read and wrote {of['policy_tokens']:.0f} tokens itself."]
    left_out = next(iter(results.values())).get("left_out", {})
    lines += ["", *(f"Rows left out: {count} of {reason}." for reason, count in left_out.items())] if left_out else []
    return "\n".join(lines) + "\n"


def _cells(of: Mapping[str, Any]) -> str:
    share = f"{100 * of['accuracy']:.1f} % [{100 * of['low']:.1f}, {100 * of['high']:.1f}]"
    spent = f"{of['calls']:.2f} | {of['tokens']:.0f} | {of['cost']:.4g} | {of['seconds']:.2f}"
    return f"| {share} | {of['problems']} | {spent} |"
