"""A counter that hangs, crashes or raises on demand. State: the sum of the actions. Refers to nothing but the task."""

import os
import sys
import time
from typing import Any

from flowjax.envs.base import Observation, Step
from flowjax.records import Task, state_key

OUTCOMES = ("success", "process", "jax")


class Counter:
    def __init__(self, *, fail_in_make: bool = False):
        if fail_in_make:
            os._exit(3)

    def reset(self, task: Task, seed: int) -> Observation:
        self.total = task.seed
        return self._observe()

    def step(self, action: str) -> Step:
        match action:
            case "hang":
                time.sleep(3600)
            case "crash":
                os._exit(1)
            case "raise":
                raise ArithmeticError("two and two")
            case _:
                self.total += int(action)
        outcome = {"success": 0.0, "process": float(os.getpid()), "jax": float("jax" in sys.modules)}
        return Step(self._observe(), float(self.total), False, True, outcome)

    def _observe(self) -> Observation:
        return Observation(str(self.total), ("1", "2"), state_key(self.total))


def make(**options) -> Counter:
    return Counter(**options)


def expert(env: Counter) -> str:
    return "1"


def tasks(split: str, data_seed: int, **options): ...


def vocabulary(**options: Any) -> tuple[str, ...]:
    return ("1", "2")


def prompt(observation: Observation, history, style: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": observation.text}]


def random_action(observation: Observation, rng) -> str:
    return "1"


def follow_up(observation: Observation, style: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": observation.text}]


def reply(action: str, style: str) -> str:
    return action


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str:
    return reply
