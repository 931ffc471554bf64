"""Words and demonstrations for a nano base: those of the world, or of a workflow that has more to teach."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

from ml_collections import ConfigDict

from flowjax.envs.base import World
from flowjax.envs.demonstrations import Exchange, demonstrations


def base_words(config: ConfigDict, world: World) -> tuple[str, ...]:
    """The words of the base: those of the world, and those of the workflow's `vocabulary()` if it has one."""
    added = getattr(_workflow(config), "vocabulary", tuple)()
    return (*world.vocabulary(), *added)


def expert_conversations(config: ConfigDict) -> Callable[..., Iterator[list[Exchange]]]:
    """The workflow's own `demonstrations`, or else those of one agent in the world (`envs.demonstrations`)."""
    return getattr(_workflow(config), "demonstrations", demonstrations)


def _workflow(config: ConfigDict) -> ModuleType:
    return importlib.import_module(config.workflow.rpartition(".")[0])
