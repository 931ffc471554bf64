"""How much of what several rollout services play is too old, and what a step takes, on a simulated clock.

    python -m tests.benchmarks.dataflow_services [--seeds=2,3,4] [--steps=30]

Prints a table: pools of services by the trainer's pace, the mean share of groups too old over the seeds with the
greatest of them, and seconds a step. With several policies, which one trainer trains in turns, a step is one of each.
No engine and no process: see tests/dataflow/services.py.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.dataflow.services import Service, Simulation

STEP_S = (0.1, 0.5, 1.0, 2.0)


def _equal(count: int) -> list[Service]:
    return [Service(f"service {number}") for number in range(count)]


POOLS: dict[str, Callable[[], list[Service]]] = {  # made anew for each run, which counts in them
    "1": lambda: _equal(1),
    "1, two policies": lambda: _equal(1),
    "1, three policies": lambda: _equal(1),
    "2": lambda: _equal(2),
    "4": lambda: _equal(4),
    "8": lambda: _equal(8),
    "1, and 3 that get versions 0.5 s late": lambda: [
        *_equal(1),
        *(Service(f"late {number}", lag_s=0.5) for number in range(3)),
    ],
    "3, and 1 four times slower": lambda: [*_equal(3), Service("slow", turn_s=0.4)],
    "1, and 1 four times slower": lambda: [*_equal(1), Service("slow", turn_s=0.4)],
}
POLICIES = {"1, two policies": ("a", "b"), "1, three policies": ("a", "b", "c")}  # of these; elsewhere one


def measure(
    pool: Callable[[], list[Service]], policies: Sequence[str], step_s: float, *, steps: int, seeds: list[int]
) -> str:
    """A cell of the table."""
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            each_s = step_s / len(policies)
            run = Simulation(Path(folder), pool(), step_s=each_s, steps=steps, seed=seed, policies=policies)
            found.append(run.run())
    shares = [figures.too_old_share for figures in found]
    per_step_s = statistics.mean(figures.total_s for figures in found) / steps
    return f"{statistics.mean(shares):.1%} ({max(shares):.1%}), {per_step_s:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="2,3,4")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print(f"| services | {' | '.join(f'steps of {step_s} s' for step_s in STEP_S)} |")
    print("|---|" + "---|" * len(STEP_S))
    for name, pool in POOLS.items():
        policies = POLICIES.get(name, ("agent",))
        cells = [measure(pool, policies, step_s, steps=options.steps, seeds=seeds) for step_s in STEP_S]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
