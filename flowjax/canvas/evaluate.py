"""Workflows, or a policy that builds them, over a folder of problems: accuracy, cost, tokens, latency, by source.

    python -m flowjax.canvas.evaluate --workflow="Plan -> Custom -> Format" --data=problems --backends=backends.json
    python -m flowjax.canvas.evaluate --workflow=workflow.json --data=gsm8k.jsonl --backends=backends.json --baselines
    python -m flowjax.canvas.evaluate --checkpoint=runs/canvas-nano --data=problems
    python -m flowjax.canvas.evaluate --checkpoint=runs/canvas-nano/checkpoints/agent/40 --data=problems

The data are a JSONL file, or a folder with `test.jsonl` or else several files (flowjax/envs/canvas/problem_files.py);
backends.json is as for `flowjax.canvas.doctor`: its `default_backend`, or else the first, answers. `--workflow` may be
given several times. `--baselines` adds a single call (io), one with its reasoning (cot), and self-consistency (sc) of
as many calls as the first workflow made in the mean, rounded, at `--sc_temperature`; each is compared with that
workflow, paired over problems.

`--checkpoint` is a run of the canvas, which plays its newest checkpoint, or one of its checkpoints: the policy builds a
workflow for each problem, with the run's own executors or those of `--backends`. `python -m flowjax.evaluate` plays it,
in a folder of the run's `evaluations/`. It comes before workflows that are given besides, and is compared with them.

Rows of DS-1000 need their packages in the sandbox, `--packages=<site-packages>`; what is left out is counted.

`--out` (by default `evaluations/<data>`) gets `rows.jsonl`, one row per problem and workflow with question, workflow,
trace, answer and gold, and `results.json` and `results.md`. The same command again asks nothing that is in rows.jsonl.

Exit status: 0 done, 1 a backend or engine is away (what was played is kept), 2 something to correct in the command.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.canvas.backends import Backend
from flowjax.canvas.backends.config import BackendConfigError, open_backends
from flowjax.canvas.checks import problems
from flowjax.canvas.context import Sandbox
from flowjax.canvas.doctor import DoctorError, read_backends
from flowjax.canvas.forms import from_json, read_workflow
from flowjax.canvas.graph import Workflow, WorkflowError
from flowjax.canvas.operators.registry import OperatorRegistryError, load_operators
from flowjax.canvas.run import Operators, run
from flowjax.canvas.text import parse, show
from flowjax.canvas.values import WorkflowRun
from flowjax.config import ConfigError, load_run
from flowjax.envs import WorldError, find_world
from flowjax.envs.canvas.executors import scored
from flowjax.envs.canvas.problem_files import Record, load
from flowjax.envs.canvas.world import Canvas
from flowjax.files import replace_file
from flowjax.grading.processes import GraderError
from flowjax.grading.sandbox import IsolationError, NoProcessorError
from flowjax.monitor.held_out import read_held_out
from flowjax.monitor.statistics import difference, task_interval
from flowjax.monitor.transcripts import held_out_path, read_lines

_IO, _COT = "Custom", "AnswerGenerate"
_TRIES, _PAUSE_S = 3, 2.0  # of a problem whose backend is away
_POLICY, _ROWS = "policy", "rows.jsonl"
_COUNTED = ("calls", "tokens", "cost", "seconds")


_MISTAKES = (ConfigError, WorldError, GraderError, IsolationError, OSError)


class PolicyNotPlayed(RuntimeError):
    """The evaluation of a policy that ended with this exit status, and has said why."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


class BackendAway(RuntimeError):
    """A backend that does not answer; what was played is kept."""


@dataclass(frozen=True)
class _Job:
    """A workflow by the name that results have for it, and the temperature that its calls have."""

    name: str
    workflow: Workflow
    temperature: float

    def key(self, record: Record, file: Path, backends: Mapping[str, Backend], default: str) -> str:
        """Equal for rows that are interchangeable: the same workflow, problem, grading, model and temperature."""
        identities = {name: backend.identity for name, backend in backends.items()}
        asked = [show(self.workflow), self.temperature, identities, default, file.name, record.row, record.problem.text]
        graded = [list(record.gold), repr(record.tests)]
        return hashlib.blake2b(json.dumps([asked, graded], sort_keys=True).encode(), digest_size=12).hexdigest()


def read_problems(
    path: Path, limit: int = 0, packages: Sequence[str] = ()
) -> tuple[list[tuple[Path, Record]], dict[str, int]]:
    """The problems of a file or folder, the first `limit` of each file where that is above 0; the rows that were left
    out, by the reason. `packages` are folders that programs may import from.

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
        raise WorldError(f"--data={path} holds no problems: give a JSONL file, or a folder of some")
    return found, dict(left_out)


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
    packages: tuple[str, ...],
) -> list[dict[str, Any]]:
    """The rows of a job, in the order of the problems; those that are missing are played and kept."""
    slots = asyncio.Semaphore(at_once)
    keys = [job.key(record, path, backends, default) for path, record in wanted]
    settings: dict[str, Any] = {"operators": operators, "backends": backends, "default_backend": default}
    settings["sandbox"] = Sandbox(packages=packages)

    async def one(key: str, path: Path, record: Record) -> None:
        async with slots:
            if key in rows:  # of an earlier start, or of another name for the same workflow
                return
            played = await run(job.workflow, record.problem, temperature=job.temperature, **settings)
            for _ in range(_TRIES - 1):
                if played.status == "executor_error":
                    await asyncio.sleep(_PAUSE_S)
                    played = await run(job.workflow, record.problem, temperature=job.temperature, **settings)
            if played.status == "executor_error":
                raise BackendAway(f"{job.name}, {path.name} row {record.row}: {played.error}")
            row = await asyncio.to_thread(_row, key, job, path, record, played, packages)
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


def _row(
    key: str, job: _Job, path: Path, record: Record, played: WorkflowRun, packages: tuple[str, ...]
) -> dict[str, Any]:
    """A problem as it was played and graded: hidden tests stay hidden."""
    problem, usage = record.problem, played.usage
    gold = record.tests if record.tests is not None else record.gold
    options = dict(problem.options)
    try:
        score = scored(played.answer, gold, problem.kind, allow_none=False, options=options, packages=packages)
    except NoProcessorError as busy:
        raise BackendAway(f"{job.name}, {path.name} row {record.row}: sandbox: {busy}") from busy
    return {
        "key": key,
        "name": job.name,
        **_asked(path, record),
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


def _asked(path: Path, record: Record) -> dict[str, Any]:
    """The problem of a row, and what is right."""
    gold = list(record.gold) or "hidden tests"
    place = {"source": record.source, "file": path.name, "row": record.row}
    return {**place, "question": record.problem.text, "gold": gold}


def _kept_rows(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier start by their keys; one that was cut short or damaged is cut out, and played again."""
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
        _write_rows(file, rows)
    return rows


def _write_rows(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    replace_file(file, "".join(json.dumps(row, default=str) + "\n" for row in rows.values()))


def _play_policy(
    arguments: argparse.Namespace, wanted: Sequence[tuple[Path, Record]], kept: dict[str, dict[str, Any]], out: Path
) -> list[dict[str, Any]]:
    """The rows of a policy, in the order of the problems: `flowjax.evaluate` plays them, or has played them before.

    Raises:
        PolicyNotPlayed: it says why on standard error.
        BackendAway: some episodes came to no end.
    """
    from flowjax.evaluate import main as evaluate  # which loads jax: fixed workflows do without
    from flowjax.evaluate import read_requests

    run, step = _run_of(Path(arguments.checkpoint))
    options: dict[str, Any] = {"path": str(_copied(wanted, out / "problems")), "packages": arguments.packages}
    if arguments.backends:
        backends, default = read_backends(arguments.backends)
        options |= {"backends": dict(backends), "default_backend": default}
    asked = {"tasks": len(wanted), "samples": 1, "transcripts": len(wanted), "temperature": arguments.temperature}
    argv = [str(run), *([f"--steps={step}"] if step else [])]
    argv += [f"--config.eval.{name}={value}" for name, value in asked.items()]
    argv += [f"--config.env.options.{name}={value}" for name, value in options.items()]
    if status := evaluate(argv):
        raise PolicyNotPlayed(status)
    [request] = read_requests(argv)
    [evaluation] = request.evaluations
    folder = evaluation.run.folder
    spent = {episode.task_id: episode for episode in read_held_out(folder)}
    rows = {}
    for line in read_lines(held_out_path(folder, evaluation.name)):
        path, record = wanted[line["payload"]["row"]]
        episode = spent[line["task_id"]]
        rows[path, record.row] = {
            "key": hashlib.blake2b(json.dumps([dict(evaluation.played), line]).encode(), digest_size=12).hexdigest(),
            "name": _POLICY,
            **_asked(path, record),
            **_built(line),
            "policy_tokens": episode.prompt_tokens + episode.sampled_tokens,
        }
    missing = len(wanted) - len(rows)
    kept.update({row["key"]: row for row in rows.values()})
    _write_rows(out / _ROWS, kept)
    if missing:
        raise BackendAway(f"{missing} of {len(wanted)} episodes of the policy came to no end")
    return [rows[path, record.row] for path, record in wanted]


def _run_of(checkpoint: Path) -> tuple[Path, str]:
    """The run's folder, and the step, "" for the newest.

    Raises:
        ConfigError: it is neither a run of the canvas nor in one.
    """
    found = checkpoint.absolute()
    run, step = (found, "") if (found / "config.json").exists() else (found.parent.parent.parent, found.name)
    if not (run / "config.json").exists():
        raise ConfigError(f"--checkpoint={checkpoint} is no run folder, nor runs/<run>/checkpoints/<policy>/<step>")
    world = find_world(load_run(run).env.name)
    if not issubclass(world, Canvas):
        raise ConfigError(f"--checkpoint={checkpoint} was trained in the world {world.__name__}: give a run of Canvas")
    return run, step


def _copied(wanted: Sequence[tuple[Path, Record]], folder: Path) -> Path:
    """A folder whose held-out problems are those that are wanted, in their order; other problems have another."""
    lines = {path: path.read_text(encoding="utf-8").split("\n") for path in {path for path, _ in wanted}}
    rows = ({**json.loads(lines[path][record.row - 1]), "source": record.source} for path, record in wanted)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    folder = (folder / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (file := folder / "test.jsonl").exists():  # one that is written again would be other data for `evaluate`
        replace_file(file, text)
    return folder


def _built(line: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow at the end of an episode, and what became of it; `line` is its transcript."""
    traces = [turn["shown"]["trace"] for turn in line["turns"] if turn.get("shown", {}).get("trace")]
    last = traces[-1] if traces else {"workflow": None, "answer": "", "status": "empty", "nodes": []}
    nodes = {node["id"]: node for trace in traces for node in trace["nodes"] if not node["cached"]}
    outcome = line["outcome"]
    return {
        "workflow": show(from_json(last["workflow"])) if last["workflow"] else "",
        "answer": last["answer"],
        "correct": outcome["success"] >= 1.0,
        "score": outcome["correctness"],
        "remark": "",
        "status": last["status"],
        "errors": [node["error"] for node in last["nodes"] if node["error"]],
        **{name: outcome[f"executor_{name}"] for name in ("calls", "tokens", "cost")},
        "seconds": sum(turn["generate_s"] + turn["env_s"] for turn in line["turns"]),
        # What a step gave that was not run again is in an earlier trace.
        "trace": [{**nodes.get(node["id"], {}), **node} for node in last["nodes"]],
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy with its interval over problems, and the mean of what was spent; of all, and by source."""

    def part(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        mean, low, high = task_interval(np.array([float(row["correct"]) for row in of]))
        spent = {name: float(np.mean([row[name] for row in of])) for name in _COUNTED}
        return {"problems": len(of), "accuracy": mean, "low": low, "high": high, **spent}

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


def _baselines(first: Iterable[Mapping[str, Any]], sc_temperature: float) -> list[_Job]:
    """The baselines of a workflow whose rows these are."""
    branches = max(2, round(float(np.mean([row["calls"] for row in first]))))
    votes = f"[{', '.join([_IO] * branches)}] -> ScEnsemble"
    return [_Job("io", parse(_IO), 0.0), _Job("cot", parse(_COT), 0.0), _Job("sc", parse(votes), sc_temperature)]


def _evaluate(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    given = arguments.workflow
    # A single workflow needs no number; there may also be none.
    names = [f"workflow {number}" for number in range(1, len(given) + 1)] if given[1:] else ["workflow"] * len(given)
    workflows = map(read_workflow, given)
    jobs = [_Job(name, workflow, arguments.temperature) for name, workflow in zip(names, workflows, strict=True)]
    data = Path(arguments.data)
    wanted, left_out = read_problems(data, arguments.limit, arguments.packages)
    if arguments.backends:
        asyncio.run(_check(jobs, arguments))
    out = Path(arguments.out or f"evaluations/{data.stem}")
    out.mkdir(parents=True, exist_ok=True)
    kept, rows = _kept_rows(out / _ROWS), {}
    if arguments.checkpoint:
        rows[_POLICY] = _play_policy(arguments, wanted, kept, out)
    if jobs or arguments.baselines:
        asyncio.run(_play_jobs(jobs, wanted, kept, rows, out / _ROWS, arguments))
    first = next(iter(rows.values()))
    results = {name: summarise(of) | {"left_out": left_out} for name, of in rows.items()}
    for name, of in rows.items():
        if of is not first and (against := _against(of, first)):
            results[name]["against_first"] = against
    replace_file(out / "results.json", json.dumps(results, indent=2) + "\n")
    replace_file(out / "results.md", markdown(results))
    return results


async def _check(jobs: Sequence[_Job], arguments: argparse.Namespace) -> None:
    """Raises:
    WorkflowError: one of them cannot be run with these operators and backends.
    """
    operators = load_operators(arguments.operators)
    async with open_backends(read_backends(arguments.backends)[0]) as backends:
        for job in jobs:
            if faults := problems(job.workflow, operators, backends):
                raise WorkflowError(" ".join(faults))


async def _play_jobs(
    jobs: Sequence[_Job],
    wanted: Sequence[tuple[Path, Record]],
    kept: dict[str, dict[str, Any]],
    rows: dict[str, list[dict[str, Any]]],
    file: Path,
    arguments: argparse.Namespace,
) -> None:
    """Add the rows of the fixed workflows, and of the baselines of whatever is first, to `rows`, by name."""
    config, default = read_backends(arguments.backends)
    async with open_backends(config) as backends:
        parts: dict[str, Any] = {"operators": load_operators(arguments.operators), "backends": backends}
        parts |= {"default": default, "at_once": arguments.at_once, "packages": tuple(arguments.packages)}
        for job in jobs:
            rows[job.name] = await _play(job, wanted, kept, file, **parts)
        first = next(iter(rows.values()))
        for job in _baselines(first, arguments.sc_temperature) if arguments.baselines else ():
            rows[job.name] = await _play(job, wanted, kept, file, **parts)


def main(argv: Sequence[str]) -> int:
    head, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m flowjax.canvas.evaluate",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workflow", default=[], action="append", help="a workflow's text, or its JSON form's file")
    parser.add_argument("--checkpoint", default="", help="a run folder, or one of its checkpoints")
    parser.add_argument("--data", required=True, help="a JSONL file of problems, or a folder")
    parser.add_argument("--backends", default="", help="a JSON file, or a recipe that names backends")
    parser.add_argument("--operators", nargs="*", default=[], help="further operators, package.module:Class")
    parser.add_argument("--baselines", action="store_true", help="io, cot and sc as well")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the workflows' calls, or the policy")
    parser.add_argument("--sc_temperature", type=float, default=0.7, help="of self-consistency's calls")
    parser.add_argument("--limit", type=int, default=0, help="problems of each file; 0: all")
    parser.add_argument("--at_once", type=int, default=8, help="problems played at one time")
    parser.add_argument("--packages", nargs="*", default=[], help="folders that programs and tests may import from")
    parser.add_argument("--out", default="", help="folder of the results")
    arguments = parser.parse_args(argv)
    if arguments.at_once < 1 or arguments.limit < 0:
        parser.error(f"--at_once={arguments.at_once} and --limit={arguments.limit}: give at least 1, and at least 0")
    if not (arguments.workflow or arguments.checkpoint):
        parser.error("it is not said what is to be evaluated: give --workflow or --checkpoint")
    if (arguments.workflow or arguments.baselines) and not arguments.backends:
        parser.error("--backends is missing: say who answers the calls of --workflow and --baselines")
    if missing := [folder for folder in arguments.packages if not Path(folder).is_dir()]:
        parser.error(f"--packages={missing[0]} is no folder: give those of installed packages, such as site-packages")
    try:
        results = _evaluate(arguments)
    except PolicyNotPlayed as error:
        return error.status
    except BackendAway as error:
        print(f"{error}; the same command goes on from here", file=sys.stderr)
        return 1
    except (WorkflowError, BackendConfigError, DoctorError, OperatorRegistryError, *_MISTAKES) as error:
        print(error, file=sys.stderr)
        return 2
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
