"""Sokoban: push every box onto a target. State: walls, targets, boxes and player."""

from flowjax.envs.sokoban.options import Options
from flowjax.envs.sokoban.prompts import follow_up, parse_action, prompt, published_format, reply, vocabulary
from flowjax.envs.sokoban.rooms import View
from flowjax.envs.sokoban.world import OUTCOMES, Sokoban, expert, make, random_action, tasks

__all__ = [
    "OUTCOMES",
    "Options",
    "Sokoban",
    "View",
    "expert",
    "follow_up",
    "make",
    "parse_action",
    "prompt",
    "published_format",
    "random_action",
    "reply",
    "tasks",
    "vocabulary",
]
