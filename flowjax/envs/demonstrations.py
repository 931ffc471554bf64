"""What a world's scripted expert would reply, on paths that stray now and then."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from flowjax.envs.base import Message, Past, Style, World, WorldError
from flowjax.records import Task


class Tasks(Protocol):
    """A task source, sliced to a finite length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def demonstrations(
    world: World,
    tasks: Tasks,
    *,
    options: Mapping[str, Any],
    path_noise: float,
    label_noise: float,
    max_turns: int,
    style: Style,
    rng: np.random.Generator,
    history: int = 0,
) -> Iterator[tuple[list[Message], str]]:
    """Prompts and the expert's replies, one pair per turn, walking each task once and all of them again without end.

    A share `path_noise` of the moves taken is a random legal action, so that states off the expert's way are seen too;
    the expert is asked anew in each. A share `label_noise` of the replies (not of the moves) is a random legal action.
    """
    if not len(tasks):
        raise WorldError("there are no tasks to demonstrate: raise env.train_tasks")
    env = world.make(**options)
    while True:
        for index in range(len(tasks)):  # grain's own iterator prefetches in threads, which costs more than a level
            task: Task = tasks[index]
            observation = env.reset(task, task.seed)
            past: list[Past] = []
            for turn in range(1, max_turns + 1):
                legal = observation.legal_actions
                best = world.expert(env)
                stray, mislabel = rng.random(2) < (path_noise, label_noise)
                label = legal[rng.integers(len(legal))] if mislabel else best
                messages = world.prompt(observation, past[-history:] if history else [], style)
                yield messages, label if style == "compact" else f"<action>{label}</action>"
                action = legal[rng.integers(len(legal))] if stray else best
                past.append(Past(turn, observation.text, action))
                step = env.step(action)
                observation = step.observation
                if step.terminal:
                    break
