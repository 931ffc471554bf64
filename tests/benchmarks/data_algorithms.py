"""Rollouts to equal held-out success, with and without data algorithms:

    python -m tests.benchmarks.data_algorithms [--seeds=0,1,2,3,4] [--out=runs/data_algorithms]

The variants of `configs/math_efficient.py`: GRESO, dynamic sampling and replay, each alone and together, beside none,
over seeds, with a held-out evaluation every five steps. The target is nine tenths of what training without data
algorithms gains: between its first and its last evaluation, in the mean over seeds. For each run, by straight lines
between evaluations: rollouts leased, optimiser steps and seconds until its held-out success first meets the target.

Runs are kept in `--out`; the same command again goes on where it stopped. Prints, and writes to
`<out>/data_algorithms.md`, the mean over seeds with its standard deviation and every seed's figure, and how many of the
runs met the target at all. Seconds count what else the machine does.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import app, flags

from flowjax.config import load_run
from flowjax.monitor.metrics import read_metrics
from tests.benchmarks.runs import machine, trained

PLAIN = "nano_plain"
VARIANTS = (PLAIN, "nano_greso", "nano_dynamic_sampling", "nano_replay", "nano")
EVERY_STEPS = 5
SHARE = 0.9  # of plain training's gain
COLUMNS = ("rollouts", "steps", "seconds")
HEAD = """| algorithms | held-out success: first | last | met | rollouts to the target | steps | seconds |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Curve:
    """Held-out success of a run by what had been spent, one entry for each evaluation."""

    success: np.ndarray
    spent: Mapping[str, np.ndarray]

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


def curve(run: Path) -> Curve:
    """Read a finished run's metrics. An evaluation of step 0 has spent nothing."""
    lines = read_metrics(run)
    group_size = load_run(run).rollout.group_size
    leased = {line["step"]: line["tasks"] * group_size for line in lines if line["kind"] == "batch"}
    steps = {line["step"]: line["time_s"] for line in lines if line["kind"] == "train"}
    # A line is written at the end of its evaluation, beside which training is already under way.
    start = next(line for line in lines if line["kind"] == "eval" and line["step"] == 0)
    begun_s = start["time_s"] - start.get("seconds", 0.0)
    evals = sorted((line for line in lines if line["kind"] == "eval"), key=lambda line: line["step"])
    at = [line["step"] for line in evals]
    spent = {
        "rollouts": [leased[step] if step else 0 for step in at],
        "steps": at,
        "seconds": [steps[step] - begun_s if step else 0.0 for step in at],
    }
    success = np.array([line["success_rate"] for line in evals])
    return Curve(success, {name: np.array(values, float) for name, values in spent.items()})


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, and each of them."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):,.0f} ± {deviation:,.0f} ({', '.join(f'{value:,.0f}' for value in values)})"


def row(variant: str, curves: Sequence[Curve], target: float) -> str:
    """A line of the table."""
    first, last = (" ".join(f"{100 * each.success[place]:.0f}" for each in curves) for place in (0, -1))
    found = [spent for each in curves if (spent := each.until(target)) is not None]
    cells = [spread([spent[name] for spent in found]) if found else "" for name in COLUMNS]
    name = {PLAIN: "none", "nano": "all three"}.get(variant, variant.removeprefix("nano_"))
    return f"| {name} | {first} % | {last} % | {len(found)} of {len(curves)} | {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> None:
    del argv
    out = Path(flags.FLAGS.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Path]] = {variant: [] for variant in VARIANTS}
    for seed in flags.FLAGS.seeds:  # all variants of a seed before the next seed: a table may stop after any of them
        for variant, folders in runs.items():
            fields = [f"--config.eval.every_steps={EVERY_STEPS}"]
            folders.append(trained(f"math_efficient:{variant}", seed, out, fields)[0])
        curves = {variant: [curve(run) for run in folders] for variant, folders in runs.items()}
        first, last = (statistics.mean(each.success[place] for each in curves[PLAIN]) for place in (0, -1))
        target = first + SHARE * (last - first)
        rows = [row(variant, found, target) for variant, found in curves.items()]
        said = f"Target: {100 * target:.1f} % held out, sampled at temperature 1. {machine(runs[PLAIN][0])}"
        table = "\n".join([HEAD, *rows, "", said, ""])
        (out / "data_algorithms.md").write_text(table)
        print(table, flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "config.seed of each run.")
    flags.DEFINE_string("out", "runs/data_algorithms", "Folder of the runs and of the table.")
    app.run(main)
