"""Tasks of a run: from one source of its world, or several mixed at fixed ratios.

Every mix can be indexed: the config alone fixes the task at each position of the run's order, so that the number of
groups ever opened, which the ledger keeps, is the whole state of the source.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Collection
from functools import partial
from typing import Any

import grain
import numpy as np
from ml_collections import ConfigDict

from flowjax.config import ConfigError, task_options
from flowjax.envs import Split, World, find_world, naming_options_of
from flowjax.records import Task, pack

_MOST_TASKS = 64  # held out, and read twice of each split
_MOST_TRAINED = 10_000  # training tasks that held-out ones are compared with
_READING_S = 1.0  # of one split, where tasks are slow to make


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


def trained_in_another_source(config: ConfigDict, reading_s: float = _READING_S) -> str:
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


def fault_of_splits(config: ConfigDict, splits: Collection[Split]) -> str:
    """The first fault that shows when the first tasks of each split are read twice and compared; "" for none.

    By source, since options may tell tasks of equal payloads apart. In the world's own order: of two splits that are
    the same, each in an order of its own, the first tasks are others.
    """
    kind, names = find_world(config.env.name), set[str]()
    for source in config.env.sources or ("",):
        world, trained, games = kind(**task_options(config, source)), dict[str, str](), set[tuple[str, int]]()
        in_training = config.env.sources.get(source, {}).get("train_tasks", config.env.train_tasks)
        for split in splits:
            tasks, until_s = world.tasks(split, config.env.data_seed), time.monotonic() + _READING_S
            by_id = dict[str, str]()  # of this split alone: nothing looks a task up by its id in both
            # Tasks beyond these are neither trained on nor played.
            trains = split == "train"
            most = min(in_training, _MOST_TRAINED) if trains else min(config.eval.tasks, _MOST_TASKS)
            for index in range(min(len(tasks), most)):
                if time.monotonic() > until_s:
                    break
                task, place = task_at(tasks, index), f"whose tasks({split!r}, ...)[{index}]"
                if not isinstance(task, Task):
                    return f"{place} is a {type(task).__name__}: make it of flowjax.records.Task"
                if index < _MOST_TASKS and pack(task) != pack(task_at(tasks, index)):
                    return f"{place} is another task when it is read again: make it from data_seed and its index alone"
                names.add(task.world)
                if len(names) > 1:
                    one, other = sorted(names)
                    return f"whose tasks have the Task.world {one!r} and {other!r}: give all of them the same"
                content = content_of(task)
                if by_id.setdefault(task.task_id, content) != content:
                    return f"{place} has the task_id {task.task_id!r} of a task with another payload: give it its own"
                if split == "train":
                    trained[content] = task.task_id
                    games.add((content, task.seed))
                elif content in trained and len(games) > 1:  # one game has no other task to hold out
                    decides = "payload" if task.payload else "task_id"
                    decides = "payload['content']" if "content" in task.payload else decides
                    return (
                        f"{place} is {task.task_id!r}, with the {decides} of the training task {trained[content]!r}: "
                        "hold out tasks with another one, or set config.eval.tasks to 0. Tasks that only their seed "
                        "tells apart count as one: put into the payload what is made of it"
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
