"""Expert and random scores on held-out problems of mathematics: python -m tests.benchmarks.math_scores"""

from typing import Any

import numpy as np

from flowjax.envs.math import Math
from flowjax.envs.math.world import MathEnv
from flowjax.records import Task

PROBLEMS, TURNS = 500, 4
CASES: list[dict[str, Any]] = [
    {"answer": "whole", "digits": 2, "operators": "+"},
    {"terms": 4, "operators": "+-*/"},
    {"calculator": 2, "terms": 3, "operators": "+-"},
]


WORLD = Math()


def success(env: MathEnv, task: Task, rng: np.random.Generator | None) -> float:
    """Of the expert, or of random actions where there is a generator."""
    observation = env.reset(task, 0)
    outcome = {}
    for _ in range(TURNS):
        step = env.step(WORLD.expert(env) if rng is None else WORLD.random_action(observation, rng))
        observation, outcome = step.observation, step.outcome
        if step.terminal:
            break
    return outcome["success"]


def main() -> None:
    print("| options | problems | expert | random |\n|---|---|---|---|")
    for options in CASES:
        source = Math(**options).tasks("held_out", 0)
        env = Math(**options).env()
        rng = np.random.default_rng(0)
        tasks = [task for task in (source[index] for index in range(PROBLEMS)) if task is not None]
        expert = np.mean([success(env, task, None) for task in tasks])
        random = np.mean([success(env, task, rng) for task in tasks])
        told = ", ".join(f"{name}={value}" for name, value in options.items())
        print(f"| {told} | {PROBLEMS} | {expert:.1%} | {random:.1%} |")


if __name__ == "__main__":
    main()
