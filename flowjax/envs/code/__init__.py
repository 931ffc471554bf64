"""Programs that pass tests; see `world`."""

from flowjax.envs.code.world import (
    OUTCOMES,
    Code,
    Options,
    expert,
    follow_up,
    longest_step_s,
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
