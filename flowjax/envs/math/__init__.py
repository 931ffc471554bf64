"""Problems of mathematics: one answer, and if asked for a calculator before it. State: the problem and what was
calculated."""

from flowjax.envs.math.options import Options
from flowjax.envs.math.prompts import follow_up, parse_action, prompt, reply, vocabulary
from flowjax.envs.math.sources import tasks
from flowjax.envs.math.world import OUTCOMES, Math, expert, make, random_action

__all__ = [
    "OUTCOMES",
    "Math",
    "Options",
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
