"""A counter that hangs, crashes, exits, raises or answers what cannot be sent, on demand.

State: the sum of the actions.
Refers to nothing but the task.
"""

import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from flowjax.envs import Observation, Step, World
from flowjax.records import Task, state_key


class Counter:
    def __init__(self, fail_in_env: bool):
        if fail_in_env:
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
            case "exit":
                sys.exit("as if it were a program")
            case "raise":
                raise ArithmeticError("two and two")
            case "odd":
                return Step(self._observe(), 0.0, False, True, {"success": 0.0}, trace={1, 2})
            case "keys":
                return Step(self._observe(), 0.0, False, True, {"success": 0.0}, trace={(1, 2): "a"})
            case "numpy":
                outcome = {"success": np.float32(1.0), "process": np.int64(1), "jax": np.bool_(False)}
                return Step(self._observe(), np.float32(0.5), np.bool_(True), True, outcome)  # pyright: ignore
            case _:
                self.total += int(action)
        outcome = {"success": 0.0, "process": float(os.getpid()), "jax": float("jax" in sys.modules)}
        return Step(self._observe(), float(self.total), False, True, outcome)

    def _observe(self) -> Observation:
        return Observation(str(self.total), ("1", "2"), state_key(self.total))


class Unruly(World):
    """Counts, hangs, crashes or raises on demand."""

    OUTCOMES = ("success", "process", "jax")

    @dataclass(frozen=True)
    class Options:
        fail_in_env: bool = False

    def env(self) -> Counter:
        return Counter(self.options.fail_in_env)

    def tasks(self, split: str, data_seed: int):
        raise NotImplementedError
