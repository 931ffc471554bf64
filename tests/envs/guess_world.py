"""A number to be found from "higher" and "lower" within the turn limit: what wins cannot be seen beforehand.

The state is the range that is left, so an unreadable reply changes nothing and costs a turn.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import Message, Observation, Past, Split, Step, Style
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

OUTCOMES = ("success",)
NUMBERS = 32
ACTIONS = tuple(f"n{number}" for number in range(NUMBERS))


class Guess:
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
        text = f"n{self.low} n{self.high}"
        return Observation(text, ACTIONS, state_key(f"{text} {self.found}"))


def make(**options: Any) -> Guess:
    return Guess()


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    import grain

    first = 0 if split == "train" else 1 << 20
    return grain.MapDataset.range(1 << 20).map(lambda index: Task(f"guess-{first + index}", "guess", first + index))


def expert(env: Guess) -> str:
    """Any number that is still possible."""
    return ACTIONS[int(env.rng.integers(env.low, env.high + 1))]


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    return ACTIONS[rng.integers(NUMBERS)]


def vocabulary(**options: Any) -> tuple[str, ...]:
    return (*ACTIONS, "hm")


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    return [{"role": "user", "content": observation.text}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    return prompt(observation, (), style)


def reply(action: str, style: Style) -> str:
    return action


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    return reply.strip() if reply.strip() in legal else None
