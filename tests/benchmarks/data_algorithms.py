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
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from tests.benchmarks.runs import Curve, curve, machine, spread, trained

PLAIN = "nano_plain"
VARIANTS = (PLAIN, "nano_greso", "nano_dynamic_sampling", "nano_replay", "nano")
EVERY_STEPS = 5
SHARE = 0.9  # of plain training's gain
COLUMNS = ("rollouts", "steps", "seconds")
HEAD = """| algorithms | held-out success: first | last | met | rollouts to the target | steps | seconds |
|---|---|---|---|---|---|---|"""


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
