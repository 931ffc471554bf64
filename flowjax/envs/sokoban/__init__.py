"""Sokoban: push every box onto a target. State: walls, targets, boxes and player."""

from flowjax.envs.sokoban.world import (
    OUTCOMES,
    Sokoban,
    expert,
    follow_up,
    make,
    parse_action,
    prompt,
    random_action,
    reply,
    tasks,
    vocabulary,
)

__all__ = [
    "OUTCOMES",
    "Sokoban",
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
