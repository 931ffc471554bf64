"""Time of every estimator against plain Python loops: python -m tests.benchmarks.credit

Prints a table in Markdown. Jitted times are the least and the median of several runs after compilation, on one core;
loops run once and count processor time, at the largest size only where that takes less than 20 s.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags

from flowjax.credit.estimators import estimate
from flowjax.credit.table import TurnTable, table_from_columns
from tests.benchmarks.credit_loops import LOOPS, Turn

SIZES = {"ALFWorld, 16 x 8 x 25": (16, 8, 25), "Search, 256 x 5 x 4": (256, 5, 4), "100 x ALFWorld": (1600, 8, 25)}
LONGEST_LOOP_S = 20.0
_BUDGET_S = flags.DEFINE_float("budget_s", 1.0, "Time spent on each jitted estimator; the least time counts.")


def random_turns(groups: int, members: int, turns: int, *, seed: int = 0, states: int = 60) -> dict[str, np.ndarray]:
    """Random walks in a small random world for each group; four in ten end in success."""
    rng = np.random.default_rng(seed)
    ways = rng.integers(states, size=(groups, states, 4))
    position = np.zeros((groups, members), np.int64)
    walked = [position]
    for _ in range(turns):
        way = rng.integers(4, size=position.shape)
        position = ways[np.arange(groups)[:, None], position, way]
        walked.append(position)
    walks = np.stack(walked, axis=-1) + states * np.arange(groups)[:, None, None]
    won = np.repeat((rng.random(groups * members) < 0.4)[:, None], turns, axis=1)
    step = np.tile(np.arange(turns), (groups * members, 1))
    last = step == turns - 1
    _, ids = np.unique(walks, return_inverse=True)
    ids = ids.reshape(groups * members, turns + 1)
    columns = {
        "group": np.repeat(np.arange(groups), members * turns),
        "trajectory": np.repeat(np.arange(groups * members), turns),
        "step": step,
        "state": ids[:, :-1],
        "next_state": ids[:, 1:],
        "reward": np.where(won & last, 10.0, 0.0),
        "score": won.astype(float),
        "terminal": won & last,
        "valid": np.ones(step.shape, bool),
    }
    return {name: column.reshape(-1) for name, column in columns.items()}


def as_turns(columns: dict[str, np.ndarray]) -> list[Turn]:
    lists = {name: column.tolist() for name, column in columns.items()}
    return [Turn(**dict(zip(lists, row, strict=True))) for row in zip(*lists.values(), strict=True)]


def jitted_s(table: TurnTable, name: str, budget_s: float) -> tuple[float, float]:
    """Least and median time of a run after compilation, over runs that fill the budget (five at least)."""
    jax.block_until_ready(estimate(table, name))
    times: list[float] = []
    while len(times) < 5 or sum(times) < budget_s:
        start = time.perf_counter()
        jax.block_until_ready(estimate(table, name))
        times.append(time.perf_counter() - start)
    return min(times), float(np.median(times))


def loop_s(function: Callable, turns: list[Turn]) -> tuple[float, list[float]]:
    """Processor time of one run, so that a busy machine does not flatter the ratio, and its result."""
    start = time.process_time()
    result = function(turns)
    return time.process_time() - start, result


def main(argv: list[str]) -> None:
    print("| turns | estimator | jitted, ms | median, ms | loop, ms | loop / jitted |")
    print("|---|---|---|---|---|---|")
    rate: dict[str, float] = {}
    for label, size in SIZES.items():
        columns = random_turns(*size)
        turns = as_turns(columns)
        start = time.perf_counter()
        table = jax.device_put(table_from_columns(columns))
        made_s = time.perf_counter() - start
        for name, loop in sorted(LOOPS.items()):
            least, median = jitted_s(table, name, _BUDGET_S.value)
            if rate.get(name, 0.0) * len(turns) < LONGEST_LOOP_S:
                loop_time, expected = loop_s(loop, turns)
                rate[name] = loop_time / len(turns)
                np.testing.assert_allclose(np.asarray(estimate(table, name))[: len(turns)], expected, atol=2e-3)
                told = f"{loop_time * 1e3:,.1f} | {loop_time / least:,.0f}"
            else:
                told = "not run | "
            print(f"| {label} | {name} | {least * 1e3:.3f} | {median * 1e3:.3f} | {told} |", flush=True)
        print(f"| {label} | (columns to table, host) | {made_s * 1e3:.3f} | | | |", flush=True)


if __name__ == "__main__":
    app.run(main)
