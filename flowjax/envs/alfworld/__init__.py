"""ALFWorld: household tasks in text, on alfworld's own engine. State: where everything is, and what was done to it.

Needs the `alfworld` extra, nothing of which is imported before an environment or a task is asked for.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.alfworld.options import Options, read_options
from flowjax.envs.alfworld.packages import package
from flowjax.envs.alfworld.prompts import follow_up, parse_action, prompt, reply, words
from flowjax.envs.alfworld.sources import task_source
from flowjax.envs.base import Observation, Split
from flowjax.records import Task

if TYPE_CHECKING:
    import grain

    from flowjax.envs.alfworld.env import Alfworld

__all__ = [
    "OUTCOMES",
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

OUTCOMES = ("success", "conditions_met")


def make(**options: Any) -> "Alfworld":
    """An environment; for the options see `Options`.

    Raises:
        WorldError: an option is unknown or impossible, or the `alfworld` extra is not installed.
    """
    return package("flowjax.envs.alfworld.env").Alfworld(read_options(options))


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Generated games without end, or those of a folder; see `Options.path`."""
    return task_source(split, data_seed, read_options(options))


def expert(env: "Alfworld") -> str:
    """The next action of a player who sees the true state."""
    return env.best_action()


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    return observation.legal_actions[rng.integers(len(observation.legal_actions))]


def vocabulary(**options: Any) -> tuple[str, ...]:
    del options  # the same for all games
    return words()
