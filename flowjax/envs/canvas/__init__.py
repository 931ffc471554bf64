"""The canvas: edit a workflow of operators until its run solves the problem. State: problem, workflow, finished."""

from flowjax.envs.canvas.options import Options
from flowjax.envs.canvas.prompts import follow_up, parse_action, prompt, reply, structured_outputs, vocabulary
from flowjax.envs.canvas.sources import tasks
from flowjax.envs.canvas.world import OUTCOMES, STEPS_WAIT, Canvas, expert, longest_step_s, make, random_action

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
