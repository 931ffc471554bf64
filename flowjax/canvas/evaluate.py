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
in a folder of the run's `evaluations/`. The policy comes first, before given workflows, and is compared with them.

Rows of DS-1000 need their packages in the sandbox, `--packages=<site-packages>`; rows that are left out are counted.

`--out` (by default `evaluations/<data>`, of `<data>/test.jsonl` too) gets `rows.jsonl`, one row per problem and
workflow with question, workflow, trace, answer and gold, and `results.json` and `results.md`. The same command again
plays nothing that is in rows.jsonl.

Exit status: 0 done, 1 a backend or engine is away (what was played is kept), 2 something to correct in the command.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.canvas.backends.config import open_backends, read_backends
from flowjax.canvas.checks import problems
from flowjax.canvas.forms import from_json, read_workflow
from flowjax.canvas.graph import WorkflowError
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.problem_rows import (
    ROWS,
    BackendAway,
    Job,
    command_parser,
    exit_status,
    kept_rows,
    markdown,
    name_of,
    play,
    question_of,
    read_problems,
    refuse_below,
    write_results,
    write_rows,
)
from flowjax.canvas.text import parse, show
from flowjax.config import ConfigError, load_run
from flowjax.envs import find_world
from flowjax.envs.canvas.problem_files import Record
from flowjax.envs.canvas.world import Canvas
from flowjax.files import replace_file
from flowjax.monitor.held_out import read_held_out
from flowjax.monitor.transcripts import held_out_path, read_lines

_IO, _COT = "Custom", "AnswerGenerate"
_POLICY = "policy"


class PolicyNotPlayed(RuntimeError):
    """The policy's evaluation failed with this exit status, and has printed the reason."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


def _play_policy(
    arguments: argparse.Namespace, wanted: Sequence[tuple[Path, Record]], kept: dict[str, dict[str, Any]], out: Path
) -> list[dict[str, Any]]:
    """The rows of a policy, in the order of the problems: `flowjax.evaluate` plays them, or has played them before.

    Raises:
        PolicyNotPlayed: `flowjax.evaluate` failed; its reason is on standard error.
        BackendAway: some episodes did not end.
    """
    from flowjax.evaluate import main as evaluate  # not at the top: it loads jax, which fixed workflows do not need
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
            **question_of(path, record),
            **_built(line),
            "policy_tokens": episode.prompt_tokens + episode.sampled_tokens,
        }
    missing = len(wanted) - len(rows)
    kept.update({row["key"]: row for row in rows.values()})
    write_rows(out / ROWS, kept)
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
    """A folder whose held-out problems are `wanted`, in order; its name is their digest."""
    lines = {path: path.read_text(encoding="utf-8").split("\n") for path in {path for path, _ in wanted}}
    rows = ({**json.loads(lines[path][record.row - 1]), "source": record.source} for path, record in wanted)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    folder = (folder / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (file := folder / "test.jsonl").exists():  # written again, it would count as other data for `evaluate`
        replace_file(file, text)
    return folder


def _built(line: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow at the end of an episode, with the result of its last run; `line` is the episode's transcript."""
    traces = [turn["shown"]["trace"] for turn in line["turns"] if turn.get("shown", {}).get("trace")]
    last = traces[-1] if traces else {"workflow": None, "answer": "", "status": "empty", "nodes": []}
    nodes = {(node["id"], node["turn"]): node for trace in traces for node in trace["nodes"] if not node["cached"]}
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
        # A step that was cached has its outputs only in the earlier trace of the run that computed them.
        "trace": [{**nodes.get((node["id"], node["turn"]), {}), **node} for node in last["nodes"]],
    }


def _baselines(first: Iterable[Mapping[str, Any]], sc_temperature: float) -> list[Job]:
    """The baselines of the workflow that the rows `first` are of."""
    branches = max(2, round(float(np.mean([row["calls"] for row in first]))))
    votes = f"[{', '.join([_IO] * branches)}] -> ScEnsemble"
    return [Job("io", parse(_IO), 0.0), Job("cot", parse(_COT), 0.0), Job("sc", parse(votes), sc_temperature)]


def _evaluate(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    given = arguments.workflow
    # A single workflow needs no number; there may also be none.
    names = [f"workflow {number}" for number in range(1, len(given) + 1)] if given[1:] else ["workflow"] * len(given)
    workflows = map(read_workflow, given)
    jobs = [Job(name, workflow, arguments.temperature) for name, workflow in zip(names, workflows, strict=True)]
    data = Path(arguments.data)
    wanted, left_out = read_problems(data, arguments.limit, arguments.packages)
    if arguments.backends:
        asyncio.run(_check(jobs, arguments))
    out = Path(arguments.out or f"evaluations/{name_of(data)}")
    out.mkdir(parents=True, exist_ok=True)
    kept, rows = kept_rows(out / ROWS), {}
    if arguments.checkpoint:
        rows[_POLICY] = _play_policy(arguments, wanted, kept, out)
    if jobs or arguments.baselines:
        asyncio.run(_play_jobs(jobs, wanted, kept, rows, out / ROWS, arguments))
    return write_results(out, rows, left_out)


async def _check(jobs: Sequence[Job], arguments: argparse.Namespace) -> None:
    """Check the jobs' workflows before anything is asked.

    Raises:
        WorkflowError: one of them cannot be run with these operators and backends.
    """
    operators = load_operators(arguments.operators)
    async with open_backends(read_backends(arguments.backends)[0]) as backends:
        for job in jobs:
            if faults := problems(job.workflow, operators, backends):
                raise WorkflowError(" ".join(faults))


async def _play_jobs(
    jobs: Sequence[Job],
    wanted: Sequence[tuple[Path, Record]],
    kept: dict[str, dict[str, Any]],
    rows: dict[str, list[dict[str, Any]]],
    file: Path,
    arguments: argparse.Namespace,
) -> None:
    """Add the rows of the fixed workflows to `rows`, by name, and those of the baselines of the first entry in it."""
    config, default = read_backends(arguments.backends)
    async with open_backends(config) as backends:
        parts: dict[str, Any] = {"operators": load_operators(arguments.operators), "backends": backends}
        parts |= {"default": default, "at_once": arguments.at_once, "packages": tuple(arguments.packages)}
        for job in jobs:
            rows[job.name] = await play(job, wanted, kept, file, **parts)
        first = next(iter(rows.values()))
        for job in _baselines(first, arguments.sc_temperature) if arguments.baselines else ():
            rows[job.name] = await play(job, wanted, kept, file, **parts)


def main(argv: Sequence[str]) -> int:
    parser = command_parser("evaluate", __doc__ or "")
    parser.add_argument("--workflow", default=[], action="append", help="a workflow's text, or its JSON form's file")
    parser.add_argument("--checkpoint", default="", help="a run folder, or one of its checkpoints")
    parser.add_argument("--data", required=True, help="a JSONL file of problems, or a folder")
    parser.add_argument("--backends", default="", help="a JSON file, or a recipe that names backends")
    parser.add_argument("--baselines", action="store_true", help="io, cot and sc as well")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the workflows' calls, or the policy")
    parser.add_argument("--sc_temperature", type=float, default=0.7, help="of self-consistency's calls")
    parser.add_argument("--limit", type=int, default=0, help="problems of each file; 0: all")
    arguments = parser.parse_args(argv)
    refuse_below(parser, arguments, {"at_once": 1, "limit": 0, "temperature": 0, "sc_temperature": 0})
    if not (arguments.workflow or arguments.checkpoint):
        parser.error("it is not said what is to be evaluated: give --workflow or --checkpoint")
    if not all(map(str.strip, arguments.workflow)):
        parser.error("--workflow is empty: give a workflow's text, or its JSON form's file")
    if (arguments.workflow or arguments.baselines) and not arguments.backends:
        parser.error("--backends is missing: say who answers the calls of --workflow and --baselines")
    try:
        return exit_status(lambda: print(markdown(_evaluate(arguments))))
    except PolicyNotPlayed as error:
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
