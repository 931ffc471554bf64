"""A canvas on which a policy builds workflows; see `world`."""

from flowjax.envs.canvas.env import OUTCOMES, Canvas
from flowjax.envs.canvas.texts import follow_up, parse_action, prompt, reply
from flowjax.envs.canvas.world import (
    STEPS_WAIT,
    Options,
    expert,
    longest_step_s,
    make,
    random_action,
    structured_outputs,
    tasks,
    vocabulary,
)

__all__ = [
    "OUTCOMES",
    "STEPS_WAIT",
    "Canvas",
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
