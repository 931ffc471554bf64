"""Verdicts on the same programs on a free machine and on a busy one, side by side:

    python -m tests.benchmarks.judge_load --programs=500 --load=32

Prints how many verdicts differ (none should) and exits with 1 where one does. The load is so many processes that only
compute, with twelve programs judged at a time beside them.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flowjax.grading.code import CallCase, Check, Lines, Suite, Verdict, judge
from flowjax.grading.sandbox import Limits

AT_A_TIME = 12
LIMITS = Limits(cpu_s=2.0, idle_s=1.0, wall_guard_s=600.0)
CASE_CPU_S = 1.0


@dataclass(frozen=True)
class Job:
    name: str
    program: str
    suite: Suite


def jobs(count: int) -> list[Job]:
    """Right and wrong programs of every kind of test, some of which compute, sleep or loop for long."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "grading"))
    from canonical_problems import PROBLEMS

    made: list[Job] = []
    for name, (entry, tests, right, wrong) in PROBLEMS.items():
        suite = Suite((Check(tests),), entry)
        made += [Job(f"{name}, right", right, suite), Job(f"{name}, wrong", wrong, suite)]
    for n in range(max(0, count - len(made))):
        called = Suite((CallCase((n,), 2 * n), CallCase((n + 1,), 2 * n + 2)), "f")
        read = Suite((Lines(f"{n}", f"{2 * n}"), Lines("7", "14")))
        made.append(
            (
                Job(f"call {n}, right", "def f(x): return x + x", called),
                Job(f"call {n}, wrong", "def f(x): return x * x + 1", called),
                Job(f"script {n}, right", "print(int(input()) * 2)", read),
                Job(f"script {n}, wrong", "print(int(input()) + 3)", read),
                Job(f"busy {n}, right", "def f(x):\n    for _ in range(10**6): pass\n    return x + x", called),
                Job(f"sleeps {n}, right", "import time\ndef f(x):\n    time.sleep(0.2)\n    return x + x", called),
                Job(f"tested {n}, right", "def f(x): return x + x", Suite((Check(f"assert f({n}) == {2 * n}"),), "f")),
                Job(f"raises {n}, wrong", "def f(x): raise KeyError(x)", called),
                Job(f"loops {n}, wrong", "def f(x):\n    while True: pass", called)
                if n % 5 == 3
                else Job(f"sleeps on {n}, wrong", "import time\ndef f(x): time.sleep(1000)", called),
            )[n % 9]
        )
    return made[:count]


def verdicts(all_jobs: Sequence[Job], at_a_time: int) -> list[Verdict]:
    def one(job: Job) -> Verdict:
        return judge(job.program, job.suite, LIMITS, case_cpu_s=CASE_CPU_S)

    with ThreadPoolExecutor(at_a_time) as threads:
        return list(threads.map(one, all_jobs))


def _compute() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description="Verdicts on a free and on a busy machine.")
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--load", type=int, default=32)
    arguments = parser.parse_args()
    all_jobs = jobs(arguments.programs)
    started_s = time.monotonic()
    free = verdicts(all_jobs, 2)
    free_s = time.monotonic() - started_s
    loads = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(arguments.load)]
    for load in loads:
        load.start()
    try:
        started_s = time.monotonic()
        busy = verdicts(all_jobs, AT_A_TIME)
        busy_s = time.monotonic() - started_s
    finally:
        for load in loads:
            load.kill()
    wrong = [job.name for job, verdict in zip(all_jobs, free, strict=True) if verdict.success != ("right" in job.name)]
    other = [
        (job.name, a.remarks, b.remarks) for job, a, b in zip(all_jobs, free, busy, strict=True) if a.passed != b.passed
    ]
    print(f"programs               {len(all_jobs)}, {sum('right' in job.name for job in all_jobs)} of them right")
    print(f"on a free machine      {free_s:.0f} s, {len(wrong)} verdicts wrong {wrong[:5]}")
    print(f"beside {arguments.load:3d} processes   {busy_s:.0f} s, {AT_A_TIME} at a time, {len(other)} verdicts differ")
    for entry in other:
        print(" ", *entry)
    return 1 if wrong or other else 0


if __name__ == "__main__":
    sys.exit(main())
