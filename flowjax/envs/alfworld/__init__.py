"""Household tasks in text; see `world`."""

from flowjax.envs.alfworld.world import (
    OUTCOMES,
    Options,
    View,
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
