"""A canvas on which a policy builds workflows; see `world`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import History, Message, Observation, Split, Style, World
from flowjax.envs.canvas.env import OUTCOMES
from flowjax.envs.canvas.env import Canvas as CanvasEnv
from flowjax.envs.canvas.texts import follow_up, parse_action, prompt, reply
from flowjax.envs.canvas.world import (
    STEPS_WAIT,
    Options,
    expert,
    longest_step_s,
    make,
    random_action,
    read_options,
    structured_outputs,
    tasks,
    vocabulary,
)
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

__all__ = [
    "OUTCOMES",
    "STEPS_WAIT",
    "Canvas",
    "CanvasEnv",
    "Options",
    "expert",
    "follow_up",
    "longest_step_s",
    "make",
    "parse_action",
    "prompt",
    "random_action",
    "reply",
    "structured_outputs",
    "tasks",
    "vocabulary",
]


class Canvas(World):
    """Edit a workflow of operators until its run solves the problem. State: problem, workflow, finished."""

    OUTCOMES = OUTCOMES
    Options = Options
    STEPS_WAIT = STEPS_WAIT

    def longest_step_s(self) -> float:
        return longest_step_s(**self._given)

    def structured_outputs(self, style: Style) -> Mapping[str, Any]:
        return structured_outputs(style, **self._given)

    def __init__(self, **options: Any):
        self.options = read_options(options)
        self._given = options

    def env(self) -> "CanvasEnv":
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
