"""What running a workflow costs beside its operators: python -m tests.benchmarks.canvas_run

Six calls, three of them in a parallel, with a backend that answers at once; the baseline awaits the same operators one
after the other in plain Python. Prints microseconds per call, the median of several rounds.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from absl import app, flags

from flowjax.canvas.backends import OfflineBackend, Rule
from flowjax.canvas.cache import Cache
from flowjax.canvas.context import UNLIMITED, CallContext, Meter, Sampling, Sandbox
from flowjax.canvas.run import run
from flowjax.canvas.text import parse
from flowjax.canvas.values import Problem, Value
from tests.canvas.toy_operators import Ask, Plan, merging

_RUNS = flags.DEFINE_integer("runs", 200, "Runs of the workflow in a round.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds; the median counts.")
CALLS = 6
PROBLEM = Problem("What is 6 times 7? " * 25, "math")
WORKFLOW = parse("Plan -> [Ask, Ask, Ask] -> Merge -> Ask")
OPERATORS = {kind.name: kind for kind in (Ask, Plan, merging())}
BACKENDS = {"offline": OfflineBackend([Rule("42")])}


async def plain() -> None:
    """The same operators by hand."""
    meter, slots, sandbox = Meter(UNLIMITED), asyncio.Semaphore(8), Sandbox()
    state: dict[str, Value] = {"problem": PROBLEM.text}
    for name in ("Plan", "Ask", "Ask", "Ask", "Merge", "Ask"):
        kind = OPERATORS[name]
        context = CallContext(
            PROBLEM,
            kind.instruction,
            BACKENDS["offline"],
            operator=name,
            inputs=state,
            seed=0,
            sampling=Sampling(),
            sandbox=sandbox,
            meter=meter,
            slots=slots,
        )
        state.update(await kind().run({"candidates": ("42",) * 3, **state}, context))


def interpreted(cache: Callable[[], Cache | None]) -> Callable[[], Awaitable[object]]:
    def once() -> Awaitable[object]:
        return run(WORKFLOW, PROBLEM, operators=OPERATORS, backends=BACKENDS, default_backend="offline", cache=cache())

    return once


async def microseconds(once: Callable[[], Awaitable[object]]) -> float:
    await once()
    rounds = []
    for _ in range(_ROUNDS.value):
        started_s = time.perf_counter()
        for _ in range(_RUNS.value):
            await once()
        rounds.append((time.perf_counter() - started_s) / _RUNS.value / CALLS * 1e6)
    return statistics.median(rounds)


async def measure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        warm, on_file = Cache(), Cache(max_entries=0, path=Path(folder, "results.sqlite"))
        cases = {
            "by hand, no interpreter": plain,
            "without a cache": interpreted(lambda: None),
            "a new cache each time": interpreted(Cache),
            "a warm cache": interpreted(lambda: warm),
            "a warm cache, from its file": interpreted(lambda: on_file),
        }
        print("| | microseconds per call | by hand = 1 |\n|---|---|---|")
        baseline = 0.0
        for name, once in cases.items():
            took = await microseconds(once)
            baseline = baseline or took
            print(f"| {name} | {took:.0f} | {took / baseline:.1f} |")
        on_file.close()


def main(arguments: list[str]) -> None:
    del arguments
    asyncio.run(measure())


if __name__ == "__main__":
    app.run(main)
