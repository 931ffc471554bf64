"""Code: write a program that passes tests. State: the problem, the last program handed in, attempts left."""

from flowjax.envs.code.world import (
    OUTCOMES,
    Code,
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
