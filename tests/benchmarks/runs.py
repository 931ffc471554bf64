"""Whole runs of a recipe over seeds, for benchmarks that compare what they learn."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.config import load_run
from flowjax.launch.roles import HUGE_PAGES
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.provenance import read_starts

HOW = {"greedy": 0.0, "sampled": 1.0}  # temperature of each way to play


def trained(recipe: str, seed: str, out: Path, fields: Sequence[str] = ()) -> tuple[Path, float]:
    """The folder of a finished run, and the seconds that the launcher took; a run that was stopped goes on.

    `fields` are further ones to set, as on the command line.
    """
    file, _, variant = recipe.partition(":")
    variant = variant or "nano"
    run = out / f"{file}-{variant}-{seed}".replace("_", "-").replace(",", "-")
    took = run / "launch.json"
    if not took.exists():
        named = [f"--config=configs/{file}.py:{variant}", f"--name={run.name}", f"--config.seed={seed}"]
        fresh = [*named, f"--config.runs={out}", *fields]
        started_s = time.monotonic()
        call("flowjax.launch", *([f"--resume={run}"] if (run / "config.json").exists() else fresh))
        took.write_text(json.dumps({"launch_s": time.monotonic() - started_s, "load": os.getloadavg()[1]}))
    return run, json.loads(took.read_text())["launch_s"]


def evaluated(run: Path, *, how: str, base: bool, tasks: int) -> Path:
    """The folder of an evaluation of a run's newest checkpoint or of its base model on so many tasks, or on more that
    it was made for before; what is missing is played."""
    folder = run / "skills" / f"{'base' if base else 'trained'}-{how}"
    if not (folder / "results.json").exists() or load_run(folder).eval.tasks < tasks:
        fields = [f"--config.eval.temperature={HOW[how]}", f"--config.eval.tasks={tasks}"]
        call("flowjax.evaluate", str(run), f"--out={folder}", *fields, *(["--base"] if base else []))
    return folder


def success(evaluation: Path) -> Mapping[str, Any]:
    return json.loads((evaluation / "results.json").read_text())["metrics"]["success"]


def call(module: str, *arguments: str) -> None:
    """Run a command of flowjax to its end.

    Raises:
        SystemExit: it failed; its own words are above.
    """
    command = [sys.executable, "-m", module, *arguments]
    print("$", "python -m", module, *arguments, flush=True)
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def peer_python(peers: Path) -> Path:
    """The interpreter of the peers' environment.

    Raises:
        SystemExit: there is none.
    """
    python = peers / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"--peers is {peers}, which has no bin/python: run bash launch/benchmark_peers.sh")
    return python


def peer_environment(threads: int, *, huge_pages: bool) -> dict[str, str]:
    """Environment variables of a trainer that is measured: nothing is fetched, `threads` cores are used."""
    quiet = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    cores = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, **quiet, **cores, **(HUGE_PAGES if huge_pages else {})}


def machine(run: Path) -> str:
    """Commit and machine of a run, in a sentence."""
    start = read_starts(run)[0]
    where = start["machine"]
    return f"Commit {start['code'].get('commit', 'unknown')[:9]}, {where['cpus_allowed']} cores of {where['cpu']}."


@dataclass(frozen=True)
class Curve:
    """Held-out success of a run by what had been spent, one entry for each evaluation, and when its spending began."""

    success: np.ndarray
    spent: Mapping[str, np.ndarray]
    begun_s: float = 0.0

    def until(self, target: float) -> Mapping[str, float] | None:
        """What was spent until success first meets `target`, by straight lines between evaluations; None if never."""
        met = np.flatnonzero(self.success >= target)
        if not len(met):
            return None
        last = int(met[0])
        if last == 0:
            return {name: float(values[0]) for name, values in self.spent.items()}
        before, after = self.success[last - 1 : last + 1]
        part = (target - before) / (after - before)
        return {name: float(v[last - 1] + part * (v[last] - v[last - 1])) for name, v in self.spent.items()}


def curve(run: Path, later: Mapping[int, float] | None = None) -> Curve:
    """Read a finished run's metrics. An evaluation of step 0 has spent nothing. `tokens` are those that the engine
    sampled and the trainer trained on. `later`: success by step of evaluations that were made after the run, which
    stand in place of its own but for that of step 0."""
    lines = read_metrics(run)
    group_size = load_run(run).rollout.group_size
    leased = {line["step"]: line["tasks"] * group_size for line in lines if line["kind"] == "batch"}
    trained_lines = [line for line in lines if line["kind"] == "train"]
    steps = {line["step"]: line["time_s"] for line in trained_lines}
    tokens = dict(zip(steps, np.cumsum([line["trained_tokens"] for line in trained_lines]).tolist(), strict=True))
    # A line is written at the end of its evaluation, beside which training is already under way.
    start = next(line for line in lines if line["kind"] == "eval" and line["step"] == 0)
    begun_s = start["time_s"] - start.get("seconds", 0.0)
    evals = {line["step"]: line["success_rate"] for line in lines if line["kind"] == "eval"}
    if later is not None:
        evals = {0: evals[0], **{step: success for step, success in later.items() if step}}
    at = sorted(evals)
    spent = {
        "rollouts": [leased[step] if step else 0 for step in at],
        "steps": at,
        "tokens": [tokens[step] if step else 0 for step in at],
        "seconds": [steps[step] - begun_s if step else 0.0 for step in at],
    }
    success = np.array([evals[step] for step in at])
    return Curve(success, {name: np.array(values, float) for name, values in spent.items()}, begun_s)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, and each of them."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):,.0f} ± {deviation:,.0f} ({', '.join(f'{value:,.0f}' for value in values)})"
