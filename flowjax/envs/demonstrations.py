"""Demonstrations for a nano base: replies of a world's scripted expert, on paths with some random moves.

A workflow with more to teach has its own vocabulary and demonstrations.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from flowjax.config import ConfigError, load_run
from flowjax.envs import Context, Message, Observation, Past, Style, World, WorldError, find_world
from flowjax.fields import NAMED, load_module
from flowjax.monitor.held_out import NO_SHARES
from flowjax.records import Task
from flowjax.run import Run

Exchange = tuple[list[Message], str]  # the messages to the agent, and its reply


class Tasks(Protocol):
    """A task source, sliced to a finite length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def demonstrations(
    world: World,
    tasks: Tasks,
    *,
    path_noise: float,
    label_noise: float,
    max_turns: int,
    style: Style,
    rng: np.random.Generator,
    context: Context = "window",
    history: int = 0,
) -> Iterator[list[Exchange]]:
    """Conversations with the expert, over all tasks in order, again and again without end.

    In window mode each turn is a conversation of one exchange; in append mode an episode is one conversation. A share
    `path_noise` of the moves is a random legal action, so that states off the expert's path are seen too; the expert
    replies anew in each. A share `label_noise` of the replies (not of the moves) is a random legal action. In append
    mode the reply is also the move, so `label_noise` is the share of both, and `path_noise` has no effect.

    Raises:
        WorldError: there are no tasks.
    """
    if not len(tasks):
        raise WorldError("there are no tasks to demonstrate: raise env.train_tasks")
    env = world.env()
    while True:
        for index in range(len(tasks)):  # not grain's iterator: its prefetching threads cost more than making a task
            task: Task = tasks[index]
            observation = env.reset(task, task.seed)
            past: list[Past] = []
            conversation: list[Exchange] = []
            for turn in range(1, max_turns + 1):
                best = world.expert(env)
                stray, mislabel = rng.random(2) < (path_noise, label_noise)
                label = world.random_action(observation, rng) if mislabel else best
                messages = _said(world, observation, past, style, context, history)
                conversation.append((messages, world.reply(label, style, observation.legal_actions)))
                if context == "window":
                    yield [conversation.pop()]
                action = label if context == "append" else best
                action = world.random_action(observation, rng) if stray and context == "window" else action
                past.append(Past(turn, observation.view, action))
                if turn == max_turns:
                    break  # before the step: its result is not used, and a step is expensive in some worlds
                step = env.step(action)
                observation = step.observation
                if step.terminal:
                    break
            if conversation:
                yield conversation


def _said(
    world: World, observation: Observation, past: list[Past], style: Style, context: Context, history: int
) -> list[Message]:
    if context == "append" and past:
        return world.follow_up(observation, style)
    return world.prompt(observation, past[-history:] if history else [], style)


def is_executor(run: Run, base: str, world: World) -> bool:
    """True for a base model that environments ask and that is no agent's: it is trained on the world's lessons."""
    return base in world.asked_bases() and not run.policies_on(base) and base not in run.agents.values()


def base_words(run: Run, base: str, world: World) -> tuple[str, ...]:
    """The words of a nano base, each once: the world's and those of the workflow's `vocabulary()` if it has one; for an
    executor, its lesson pieces."""
    if is_executor(run, base, world):
        return world.lesson_pieces()
    of_workflow = getattr(_module_of(run.config.workflow), "vocabulary", tuple)()
    return tuple(dict.fromkeys((*world.vocabulary(), *of_workflow)))


def expert_conversations(workflow: str) -> Callable[..., Iterator[list[Exchange]]]:
    """The `demonstrations` function of the workflow's module, or else the one of this module."""
    return getattr(_module_of(workflow), "demonstrations", demonstrations)


def _module_of(workflow: str) -> ModuleType:
    return load_module("config.workflow", workflow, WorldError, NAMED.remedy)


def no_shares_of(run_dir: Path) -> frozenset[str]:
    """Metrics of a run's episodes that are no shares of 1; without its world's and its workflow's, if these are not on
    this machine."""
    try:
        config = load_run(run_dir)
        counts = (*find_world(config.env.name).COUNTS, *getattr(_module_of(config.workflow), "COUNTS", ()))
    except (ConfigError, WorldError):
        counts = ()
    return frozenset((*NO_SHARES, *counts))
