"""A number to be found from "higher" and "lower" within the turn limit: what wins cannot be seen beforehand."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowjax.envs import History, Observation, Split, Step, World
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

NUMBERS = 32
ACTIONS = tuple(f"n{number}" for number in range(NUMBERS))


class Guess(World):
    """Find a number. State: the range that is left, so an unreadable reply changes nothing and costs a turn."""

    @dataclass(frozen=True)
    class View:
        low: int
        high: int

    def env(self) -> "GuessEnv":
        return GuessEnv()

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        import grain

        first = 0 if split == "train" else 1 << 20
        return grain.MapDataset.range(1 << 20).map(lambda index: Task(f"guess-{first + index}", "guess", first + index))

    def compact(self, observation: Observation, history: History) -> str:
        return f"n{observation.view.low} n{observation.view.high}"

    def vocabulary(self) -> tuple[str, ...]:
        return (*ACTIONS, "hm")

    def expert(self, env: "GuessEnv") -> str:
        """Any number that is still possible."""
        return ACTIONS[int(env.rng.integers(env.low, env.high + 1))]


class GuessEnv:
    """One number at a time; the task's seed fixes it."""

    def reset(self, task: Task, seed: int) -> Observation:
        self.rng = np.random.default_rng([task.seed, seed])
        self.number = int(np.random.default_rng(task.seed).integers(NUMBERS))
        self.low, self.high, self.found = 0, NUMBERS - 1, False
        return self._observe()

    def step(self, action: str) -> Step:
        valid = action in ACTIONS
        if valid:
            guess = ACTIONS.index(action)
            self.found = guess == self.number
            if guess < self.number:
                self.low = max(self.low, guess + 1)
            elif guess > self.number:
                self.high = min(self.high, guess - 1)
        return Step(self._observe(), float(self.found), self.found, valid, {"success": float(self.found)})

    def _observe(self) -> Observation:
        return Observation(Guess.View(self.low, self.high), ACTIONS, state_key(self.low, self.high, self.found))
