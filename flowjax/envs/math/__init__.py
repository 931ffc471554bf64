"""Problems of mathematics; see `world`."""

from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import History, Message, Observation, Split, Style, World
from flowjax.envs.math.world import (
    OUTCOMES,
    Options,
    View,
    expert,
    follow_up,
    make,
    parse_action,
    prompt,
    random_action,
    read_options,
    reply,
    tasks,
    vocabulary,
)
from flowjax.envs.math.world import Math as MathEnv
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

__all__ = [
    "OUTCOMES",
    "Math",
    "MathEnv",
    "Options",
    "View",
    "expert",
    "follow_up",
    "make",
    "parse_action",
    "prompt",
    "random_action",
    "reply",
    "tasks",
    "vocabulary",
]


class Math(World):
    """Problems of mathematics. State: the problem and what was calculated."""

    OUTCOMES = OUTCOMES
    Options = Options
    View = View

    def __init__(self, **options: Any):
        self.options = read_options(options)
        self._given = options

    def env(self) -> "MathEnv":
        return make(**self._given)

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        return tasks(split, data_seed, **self._given)

    def prompt(self, observation: Observation, history: History, style: Style) -> list[Message]:
        return prompt(observation, history, style)

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        return follow_up(observation, style)

    def reply(self, action: str, style: Style) -> str:
        return reply(action, style)

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        return parse_action(reply, legal)

    def vocabulary(self) -> tuple[str, ...]:
        return vocabulary(**self._given)

    def expert(self, env: Any) -> str:
        return expert(env)

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        return random_action(observation, rng)
