"""Problems of mathematics; see `world`."""

from flowjax.envs.math.world import (
    OUTCOMES,
    Math,
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
    "Math",
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
