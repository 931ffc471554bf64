"""Workflows over a folder of problems: accuracy, cost, tokens and latency, by source.

    python -m flowjax.canvas.evaluate --workflow="Plan -> Custom -> Format" --data=problems --backends=backends.json
    python -m flowjax.canvas.evaluate --workflow=workflow.json --data=gsm8k.jsonl --backends=backends.json --baselines

The data are a JSONL file, or a folder with `test.jsonl` or else several files (flowjax/envs/canvas/problem_files.py);
backends.json is as for `flowjax.canvas.doctor`: its `default_backend`, or else the first, answers. `--workflow` may be
given several times. `--baselines` adds a single call (io), one with its reasoning (cot), and self-consistency (sc) of
as many calls as the first workflow made in the mean, rounded, at `--sc_temperature`; each is compared with that
workflow, paired over problems.

`--out` (by default `evaluations/<data>`) gets `rows.jsonl`, one row per problem and workflow with question, workflow,
trace, answer and gold, and `results.json` and `results.md`. The same command again asks nothing that is in rows.jsonl.
A policy that builds workflows is played by `python -m flowjax.evaluate runs/<run> --config.env.options.path=<folder>`.

Exit status: 0 done, 1 a backend is away (what was played is kept), 2 something to correct in the command.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.canvas.backends.base import Backend
from flowjax.canvas.backends.config import BackendConfigError, open_backends
from flowjax.canvas.checks import problems
from flowjax.canvas.doctor import DoctorError, read_backends
from flowjax.canvas.forms import read_workflow
from flowjax.canvas.graph import Workflow, WorkflowError
from flowjax.canvas.operators.registry import OperatorRegistryError, load_operators
from flowjax.canvas.run import Operators, run
from flowjax.canvas.text import parse, show
from flowjax.canvas.values import WorkflowRun
from flowjax.envs.base import WorldError
from flowjax.envs.canvas.executors import scored
from flowjax.envs.canvas.problem_files import Record, load
from flowjax.files import replace_file
from flowjax.monitor.statistics import difference, task_interval

_IO, _COT = "Custom", "AnswerGenerate"
_TRIES, _PAUSE_S = 3, 2.0  # of a problem whose backend is away
_COUNTED = ("calls", "tokens", "cost", "seconds")


class BackendAway(RuntimeError):
    """A backend that does not answer; what was played is kept."""


@dataclass(frozen=True)
class _Job:
    """A workflow by the name that results have for it, and the temperature that its calls have."""

    name: str
    workflow: Workflow
    temperature: float

    def key(self, record: Record, file: Path, backends: Mapping[str, Backend], default: str) -> str:
        """Equal for rows that are interchangeable: the same workflow, problem, model and temperature."""
        identities = {name: backend.identity for name, backend in backends.items()}
        said = [show(self.workflow), self.temperature, identities, default, file.name, record.row, record.problem.text]
        return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=12).hexdigest()


def read_problems(path: Path, limit: int = 0) -> list[tuple[Path, Record]]:
    """The problems of a file or folder, the first `limit` of each file where that is above 0.

    Raises:
        WorldError: there is none, or a row is no problem.
    """
    files = [path] if path.is_file() else [path / "test.jsonl"]
    if not files[0].is_file():
        files = sorted(path.glob("*.jsonl"))
    found = [(file, record) for file in files for record in load(file).records[: limit or None]]
    if not found:
        raise WorldError(f"--data={path} holds no problems: give a JSONL file, or a folder of some")
    return found


async def _play(
    job: _Job,
    wanted: Sequence[tuple[Path, Record]],
    rows: dict[str, dict[str, Any]],
    file: Path,
    *,
    operators: Operators,
    backends: Mapping[str, Backend],
    default: str,
    at_once: int,
) -> list[dict[str, Any]]:
    """The rows of a job, in the order of the problems; those that are missing are played and kept."""
    slots = asyncio.Semaphore(at_once)
    keys = [job.key(record, path, backends, default) for path, record in wanted]
    settings: dict[str, Any] = {"operators": operators, "backends": backends, "default_backend": default}

    async def one(key: str, path: Path, record: Record) -> None:
        async with slots:
            if key in rows:
                return
            played = await run(job.workflow, record.problem, temperature=job.temperature, **settings)
            for _ in range(_TRIES - 1):
                if played.status == "executor_error":
                    await asyncio.sleep(_PAUSE_S)
                    played = await run(job.workflow, record.problem, temperature=job.temperature, **settings)
            if played.status == "executor_error":
                raise BackendAway(f"{job.name}, {path.name} row {record.row}: {played.error}")
            row = await asyncio.to_thread(_row, key, job, path, record, played)
            with file.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(row, default=str) + "\n")
            rows[key] = row

    try:
        async with asyncio.TaskGroup() as group:
            for key, (path, record) in zip(keys, wanted, strict=True):
                group.create_task(one(key, path, record))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [rows[key] for key in keys]


def _row(key: str, job: _Job, path: Path, record: Record, played: WorkflowRun) -> dict[str, Any]:
    """A problem as it was played and graded: hidden tests stay hidden."""
    problem, usage = record.problem, played.usage
    gold = record.tests if record.tests is not None else record.gold
    score = scored(played.answer, gold, problem.kind, allow_none=False, options=dict(problem.options))
    return {
        "key": key,
        "name": job.name,
        "source": record.source,
        "file": path.name,
        "row": record.row,
        "question": problem.text,
        "workflow": show(job.workflow),
        "answer": played.answer,
        "gold": list(record.gold) or "hidden tests",
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


def _kept_rows(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier start by their keys; one that was cut short is cut off, and played again."""
    if not file.exists():
        return {}
    whole, newline, torn = file.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        replace_file(file, whole + newline)
    return {row["key"]: row for row in map(json.loads, whole.splitlines())}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy with its interval over problems, and the mean of what was spent; of all, and by source."""

    def part(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        mean, low, high = task_interval(np.array([float(row["correct"]) for row in of]))
        spent = {name: float(np.mean([row[name] for row in of])) for name in _COUNTED}
        return {"problems": len(of), "accuracy": mean, "low": low, "high": high, **spent}

    sources = sorted({row["source"] for row in rows})
    by_source = {source: part([row for row in rows if row["source"] == source]) for source in sources}
    return {"workflow": rows[0]["workflow"], **part(rows), "sources": by_source}


def _against(rows: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The first workflow's accuracy less this one's, paired over problems."""
    left, right = (np.array([[float(row["correct"]) for row in side]]) for side in (first, rows))
    if left.shape[1] < 2:
        return {}
    found = difference(left, right)
    return {"first_is_better_by": found.mean, "low": found.low, "high": found.high, "p_value": found.p_value}


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
    return "\n".join([*lines, "", "Calls, tokens, cost and seconds are means of a problem."]) + "\n"


def _cells(of: Mapping[str, Any]) -> str:
    share = f"{100 * of['accuracy']:.1f} % [{100 * of['low']:.1f}, {100 * of['high']:.1f}]"
    spent = f"{of['calls']:.2f} | {of['tokens']:.0f} | {of['cost']:.4g} | {of['seconds']:.2f}"
    return f"| {share} | {of['problems']} | {spent} |"


def _baselines(first: Iterable[Mapping[str, Any]], sc_temperature: float) -> list[_Job]:
    """The baselines of a workflow whose rows these are."""
    branches = max(2, round(float(np.mean([row["calls"] for row in first]))))
    votes = f"[{', '.join([_IO] * branches)}] -> ScEnsemble"
    return [_Job("io", parse(_IO), 0.0), _Job("cot", parse(_COT), 0.0), _Job("sc", parse(votes), sc_temperature)]


async def _evaluate(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    names = [f"workflow {n}" for n in range(1, len(arguments.workflow) + 1)] if arguments.workflow[1:] else ["workflow"]
    workflows = map(read_workflow, arguments.workflow)
    jobs = [_Job(name, workflow, arguments.temperature) for name, workflow in zip(names, workflows, strict=True)]
    operators, data = load_operators(arguments.operators), Path(arguments.data)
    wanted = read_problems(data, arguments.limit)
    out = Path(arguments.out or f"evaluations/{data.stem}")
    results: dict[str, dict[str, Any]] = {}
    config, default = read_backends(arguments.backends)
    async with open_backends(config) as backends:
        for job in jobs:
            if faults := problems(job.workflow, operators, backends):
                raise WorkflowError(" ".join(faults))
        out.mkdir(parents=True, exist_ok=True)
        kept, first = _kept_rows(out / "rows.jsonl"), []
        while jobs:
            job = jobs.pop(0)
            parts: dict[str, Any] = {"operators": operators, "backends": backends, "default": default}
            rows = await _play(job, wanted, kept, out / "rows.jsonl", at_once=arguments.at_once, **parts)
            results[job.name] = summarise(rows)
            if first and (against := _against(rows, first)):
                results[job.name]["against_first"] = against
            if not first:
                first = rows
                jobs += _baselines(first, arguments.sc_temperature) if arguments.baselines else []
    replace_file(out / "results.json", json.dumps(results, indent=2) + "\n")
    replace_file(out / "results.md", markdown(results))
    return results


def main(argv: Sequence[str]) -> int:
    head, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m flowjax.canvas.evaluate",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workflow", required=True, action="append", help="a workflow's text, or its JSON form's file")
    parser.add_argument("--data", required=True, help="a JSONL file of problems, or a folder")
    parser.add_argument("--backends", required=True, help="a JSON file, or a recipe that names backends")
    parser.add_argument("--operators", nargs="*", default=[], help="further operators, package.module:Class")
    parser.add_argument("--baselines", action="store_true", help="io, cot and sc as well")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the workflows' calls")
    parser.add_argument("--sc_temperature", type=float, default=0.7, help="of self-consistency's calls")
    parser.add_argument("--limit", type=int, default=0, help="problems of each file; 0: all")
    parser.add_argument("--at_once", type=int, default=8, help="problems played at one time")
    parser.add_argument("--out", default="", help="folder of the results")
    arguments = parser.parse_args(argv)
    if arguments.at_once < 1 or arguments.limit < 0:
        parser.error(f"--at_once={arguments.at_once} and --limit={arguments.limit}: give at least 1, and at least 0")
    try:
        results = asyncio.run(_evaluate(arguments))
    except BackendAway as error:
        print(f"{error}; the same command goes on from here", file=sys.stderr)
        return 1
    except (WorkflowError, BackendConfigError, DoctorError, OperatorRegistryError, WorldError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
