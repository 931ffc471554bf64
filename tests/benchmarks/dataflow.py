"""What running asynchronously is worth, with a real vLLM and real trainers where it says so:

    python -m tests.benchmarks.dataflow [--parts=staleness,policies] [--steps=20] [--seeds=1] [--staleness=4]

staleness: whole launches of one recipe (nano Sokoban; each step of the world takes a log-normal time), synchronous
    (`max_staleness` 0) beside asynchronous. Prints steps per minute without the first ones, their ratio, and held-out
    success before and after.
policies: two policies, one of them slow, in the real dataflow with simulated workers and trainers; each at its own
    rate beside both waiting for each other after every version.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowjax.monitor.metrics import read_metrics
from tests.benchmarks.dataflow_policies import steps_made

ROOT = Path(__file__).parents[2]
RECIPE = "tests/benchmarks/dataflow_recipe.py"
GOAL = 2.5
_FIRST_STEPS = 4  # while programs are compiled and the first episodes are played


@dataclass(frozen=True)
class Measured:
    """One launch. `staleness` is the mean lag of trained tokens, in versions."""

    steps_per_min: float
    wait_share: float
    staleness: float
    before: float
    after: float
    low: float
    high: float


def launch(folder: Path, *, seed: int, staleness: int, steps: int) -> Measured:
    """Run the recipe to its end.

    Raises:
        RuntimeError: it fails.
    """
    name = f"staleness-{staleness}-seed-{seed}"
    command = [sys.executable, "-m", "flowjax.launch", f"--config={RECIPE}", f"--name={name}"]
    command += [f"--config.runs={folder}", f"--config.model.path={folder / 'base'}", f"--config.seed={seed}"]
    command += [f"--config.trainer.steps={steps}", f"--config.dataflow.max_staleness={staleness}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    lines = read_metrics(folder / name)
    train = [line for line in lines if line["kind"] == "train"]
    evals = {line["step"]: line for line in lines if line["kind"] == "eval"}
    timed = train[_FIRST_STEPS:]
    took_s = timed[-1]["time_s"] - train[_FIRST_STEPS - 1]["time_s"]
    return Measured(
        steps_per_min=60 * len(timed) / took_s,
        wait_share=sum(line["wait_s"] for line in timed) / took_s,
        staleness=statistics.fmean(line["staleness_mean"] for line in timed),
        before=evals[0]["success_rate"],
        after=evals[steps]["success_rate"],
        low=evals[steps]["low"],
        high=evals[steps]["high"],
    )


def compare_staleness(console: Console, folder: Path, *, seeds: int, steps: int, staleness: int) -> None:
    table = Table("seed", "max_staleness", "steps/min", "waiting", "lag", "success before", "after", "ratio")
    ratios = []
    for seed in range(seeds):
        measured = {bound: launch(folder, seed=seed, staleness=bound, steps=steps) for bound in (0, staleness)}
        ratios.append(measured[staleness].steps_per_min / measured[0].steps_per_min)
        for bound, run in measured.items():
            table.add_row(
                str(seed),
                str(bound),
                f"{run.steps_per_min:.1f}",
                f"{run.wait_share:.0%}",
                f"{run.staleness:.2f}",
                f"{run.before:.3f}",
                f"{run.after:.3f} [{run.low:.3f}, {run.high:.3f}]",
                f"{ratios[-1]:.2f} x" if bound else "",
            )
    console.print(table)
    console.print(f"asynchronous over synchronous: {min(ratios):.2f} x to {max(ratios):.2f} x (goal {GOAL} x)")


def compare_policies(console: Console, *, seconds: float) -> None:
    table = Table("two policies", "versions of the fast one", "versions of the slow one")
    for together in (True, False):
        fast, slow = asyncio.run(steps_made(together=together, seconds=seconds))
        table.add_row("wait for each other" if together else "each at its own rate", str(fast), str(slow))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="staleness,policies", help="with commas between")
    parser.add_argument("--steps", type=int, default=20, help="of each launch")
    parser.add_argument("--seeds", type=int, default=1, help="launches of each kind")
    parser.add_argument("--staleness", type=int, default=4, help="bound of the asynchronous launches, in versions")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of policies")
    parser.add_argument("--folder", default="", help="where the runs are left; a temporary one by default")
    arguments = parser.parse_args()
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).absolute()
        if "staleness" in arguments.parts:
            compare_staleness(
                console, folder, seeds=arguments.seeds, steps=arguments.steps, staleness=arguments.staleness
            )
        if "policies" in arguments.parts:
            compare_policies(console, seconds=arguments.seconds)


if __name__ == "__main__":
    main()
