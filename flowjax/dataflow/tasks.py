"""Tasks of a run: from one source of its world, or several mixed at fixed ratios.

Every mix can be indexed: the config alone fixes the task at each position of the run's order, so that the number of
groups ever opened, which the ledger keeps, is the whole state of the source.
"""

import dataclasses
import itertools
import json
import time
from functools import partial
from typing import Any

import grain
import numpy as np
from ml_collections import ConfigDict

from flowjax.config import ConfigError, task_options
from flowjax.envs import Split, World, find_world, naming_options_of
from flowjax.records import Task


def train_tasks(config: ConfigDict) -> grain.MapDataset[Task]:
    """The endless order of training tasks; each source is shuffled anew by `config.seed`."""
    return _tasks(config, "train")


def held_out_tasks(config: ConfigDict) -> grain.MapDataset[Task]:
    """Held-out tasks, each once; several sources are mixed at the ratios of training, until the first of them ends."""
    return _tasks(config, "held_out")


def held_out_contents(config: ConfigDict) -> set[str]:
    """Content of each task that an evaluation of the run plays."""
    tasks = held_out_tasks(config)
    return {content_of(task_at(tasks, index)) for index in range(min(config.eval.tasks, len(tasks)))}


def trained_in_another_source(config: ConfigDict, reading_s: float = 1.0) -> str:
    """A note on the first held-out task of a source that another one trains on, by its content; "" for none. A world
    keeps its own splits apart, but knows one source's options at a time. Of each split no more is read than
    `reading_s` lets.
    """
    contents: dict[Split, dict[str, dict[str, str]]] = {"train": {}, "held_out": {}}  # source -> content -> task_id
    for source, given in config.env.sources.items():
        world = find_world(config.env.name)(**task_options(config, source))
        most = {"train": given.get("train_tasks", config.env.train_tasks), "held_out": config.eval.tasks}
        for split, found in contents.items():
            tasks, until_s = world.tasks(split, config.env.data_seed), time.monotonic() + reading_s
            read = (task_at(tasks, index) for index in range(min(most[split], len(tasks))))
            read = itertools.takewhile(lambda _, until_s=until_s: time.monotonic() < until_s, read)
            found[source] = {content_of(dataclasses.replace(task, source="")): task.task_id for task in read}
    for source, held_out in contents["held_out"].items():
        for other, trained in contents["train"].items():
            if other != source and (both := held_out.keys() & trained.keys()):
                shared = min(held_out[content] for content in both)
                return (
                    f"config.env.sources: {len(both)} held-out tasks of {source!r} (of them {shared!r}) are training "
                    f"tasks of {other!r}: unless their options make other tasks of them, success on these says nothing "
                    "of held-out tasks"
                )
    return ""


def task_at(tasks: grain.MapDataset[Task], index: int) -> Task:
    """The task at that place.

    Raises:
        ValueError: the source left it out.
    """
    task = tasks[index]
    if task is None:
        raise ValueError(f"the task source filtered out task {index}: a source of tasks must have every index")
    return task


def content_of(task: Task) -> str:
    """Content of a task, whatever its name: equal for two draws of one task by a world that generates them, and for
    two rows of a file whose `content` is the same. A task without a payload has only its id."""
    if not task.payload:
        return task.task_id
    content = task.payload.get("content", task.payload)
    return json.dumps([task.world, task.source, content], sort_keys=True, default=written)


def written(value: Any) -> str:
    """A value as text, in full: numpy's `repr` leaves out the middle of long arrays."""
    return f"{value.dtype}{value.tolist()}" if isinstance(value, np.ndarray) else repr(value)


def episode_seed(seed: int, position: int, member: int) -> int:
    """Seed of a group's `member`-th episode."""
    # No two seeds of a run's training are equal, for groups of up to 4096; nor do runs of other seeds share any, for up
    # to a million tasks.
    return (seed * 1_000_003 + position) * 4096 + member


def _tasks(config: ConfigDict, split: Split) -> grain.MapDataset[Task]:
    kind = find_world(config.env.name)
    if not config.env.sources:
        return _source(config, kind(**task_options(config, "")), split, config.env.train_tasks)
    sources, weights = [], []
    for number, (name, options) in enumerate(config.env.sources.items()):
        given = options.to_dict()
        weight, count = given.pop("weight", 1.0), given.pop("train_tasks", config.env.train_tasks)
        given.pop("options", None)
        field = f"config.env.sources.{name}"
        if given:
            raise ConfigError(f"{field}.{min(given)} is no field: use weight, options or train_tasks")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(f"{field}.weight is {weight!r}: give a positive number")
        # Another offset of the seed for each, so that two sources of equal tasks are not in the same order.
        with naming_options_of(name, config):
            source = _source(config, kind(**task_options(config, name)), split, count, offset=number)
        sources.append(source.map(partial(_named, name=name)))
        weights.append(float(weight))
    return grain.MapDataset.mix(sources, weights)


def _source(
    config: ConfigDict, world: World, split: Split, train_tasks: int, offset: int = 0
) -> grain.MapDataset[Task]:
    tasks = world.tasks(split, config.env.data_seed)
    if split == "held_out":
        return tasks
    return tasks[:train_tasks].shuffle(config.seed + offset).repeat()


def _named(task: Task, name: str) -> Task:
    return dataclasses.replace(task, source=name)
