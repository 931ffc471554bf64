"""Problems of mathematics: one answer, and if asked for a calculator before it. State: the problem and what was
calculated."""

from flowjax.envs.math.world import (
    OUTCOMES,
    Math,
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
