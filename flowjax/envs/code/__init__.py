"""Code: write a program that passes tests. State: the problem, the last program handed in, attempts left."""

from flowjax.envs.code.options import Options
from flowjax.envs.code.programs import parse_action
from flowjax.envs.code.prompts import follow_up, prompt, reply, vocabulary
from flowjax.envs.code.sources import tasks
from flowjax.envs.code.world import OUTCOMES, Code, expert, longest_step_s, make, random_action

__all__ = [
    "OUTCOMES",
    "Code",
    "Options",
    "expert",
    "follow_up",
    "longest_step_s",
    "make",
    "parse_action",
    "prompt",
    "random_action",
    "reply",
    "tasks",
    "vocabulary",
]
