"""Programs judged per second in one process, and the scores of the code world's expert and of chance:

    python -m tests.benchmarks.worlds_code

The baseline is a bare start of Python, with no sandbox and nothing judged. Every program is judged by eight tests.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable

import numpy as np

from flowjax.envs.code import Code
from flowjax.grading.code import CallCase, Check, Lines, Suite, judge
from flowjax.grading.sandbox import isolation, run

TESTS = 8
EPISODES = 100


def benchmark(seconds: float = 3.0) -> dict[str, float]:
    """Rates per second, each measured for so many seconds; shares of the bare start; successes over 100 tasks."""
    called, checked, read = _suites()
    program, script = "def f(x):\n    return x + x", "print(int(input()) * 2)"
    rates = {
        "bare_python_starts_per_s": _rate(_bare, seconds),
        "sandbox_runs_per_s": _rate(lambda: run("pass"), seconds),
        "programs_per_s_function_tests": _rate(lambda: _right(program, called), seconds),
        "programs_per_s_stdin_tests": _rate(lambda: _right(script, read), seconds),
        "programs_per_s_test_code": _rate(lambda: _right(program, checked), seconds),
    }
    rates["function_tests_over_bare_start"] = rates["programs_per_s_function_tests"] / rates["bare_python_starts_per_s"]
    return {**rates, **_successes()}


def _suites() -> tuple[Suite, Suite, Suite]:
    numbers = range(TESTS)
    return (
        Suite(tuple(CallCase((n,), 2 * n) for n in numbers), "f"),
        Suite(tuple(Check(f"assert candidate({n}) == {2 * n}") for n in numbers), "f"),
        Suite(tuple(Lines(f"{n}\n", f"{2 * n}\n") for n in numbers)),
    )


def _right(program: str, suite: Suite) -> None:
    assert judge(program, suite).success


def _bare() -> None:
    python = isolation().interpreter.executable
    subprocess.run([python, "-I", "-S", "-c", "pass"], check=True, stdin=subprocess.DEVNULL, env=dict(os.environ))


def _rate(work: Callable[[], object], seconds: float) -> float:
    work()
    count, started_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - started_s) < seconds:
        work()
        count += 1
    return count / passed_s


def _successes() -> dict[str, float]:
    env, source, rng = Code().env(), Code().tasks("held_out", 0), np.random.default_rng(0)
    expert, chance = [], []
    for index in range(EPISODES):
        task = source[index]
        assert task is not None
        env.reset(task, 0)
        expert.append(env.step(Code().expert(env)).outcome)
        observation = env.reset(task, 0)
        chance.append(env.step(Code().random_action(observation, rng)).outcome)
    return {
        "expert_success": float(np.mean([outcome["success"] for outcome in expert])),
        "random_success": float(np.mean([outcome["success"] for outcome in chance])),
        "random_score": float(np.mean([outcome["score"] for outcome in chance])),
    }


if __name__ == "__main__":
    print(json.dumps({**benchmark(), "isolation": isolation().name}, indent=2))
