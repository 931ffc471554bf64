"""An episode of two agents whose replies are given, in a world in this process."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.envs import Observation, Step, World
from flowjax.records import Task
from flowjax.workflows import Agent, Played
from flowjax.workflows.codec import Codec
from flowjax.workflows.single import EpisodeOptions


class LocalSession:
    """A world's environment, called as one in another process is."""

    def __init__(self, world: World):
        self._env = world.env()

    async def reset(self, task: Task, seed: int) -> Observation:
        return self._env.reset(task, seed)

    async def step(self, action: str) -> Step:
        return self._env.step(action)


@dataclass(frozen=True)
class Scripted:
    """An engine's answer."""

    sampled_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int]]
    finish_reason: str = "stop"


def play_scripted(
    play: Callable[..., Coroutine[Any, Any, Played]],
    task: Task,
    *,
    world: World,
    codec: Codec,
    agents: Sequence[str],
    replies: Sequence[str],
    max_turns: int = 1,
) -> tuple[Played, list[str]]:
    """The episode in which whoever is asked replies with the next of `replies`, and the prompts that were seen."""
    left, prompts = iter(replies), []

    def agent(name: str) -> Agent:
        async def generate(prompt_ids: list[int]) -> Scripted:
            prompts.append(codec.decode(prompt_ids))
            ids = codec.encode_reply(next(left))
            return Scripted(ids, [-1.0] * len(ids), [(f"{name}@3", len(ids))])

        return Agent(codec, generate)

    options = EpisodeOptions(world, max_turns=max_turns, prompt="compact")
    who = {name: agent(name) for name in agents}
    return asyncio.run(play(task, seed=0, env=LocalSession(world), agents=who, options=options)), prompts
