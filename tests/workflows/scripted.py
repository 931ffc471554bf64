"""An episode of two agents whose replies are given, in a world in this process."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowjax.envs import Observation, Step, World, find_world
from flowjax.models.nano import build_tokenizer
from flowjax.records import Task
from flowjax.workflows import Agent, Played, episode_outcomes
from flowjax.workflows.codec import Codec
from flowjax.workflows.single import EpisodeOptions

WORLD = find_world("flowjax.envs.math:Math")(answer="whole", digits=1, terms=4, operators="+")
SUM = Task("sum", "math", 0, {"question": "1+2+3+4=?", "answer": "10", "expression": "1+2+3+4"})
ASKED = "1 + 2 + 3 + 4 = ?"


def word_folder(tmp_path_factory: pytest.TempPathFactory, words: Sequence[str]) -> Path:
    """A folder with a tokenizer of the words of `WORLD` and of a workflow."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer((*WORLD.vocabulary(), *words, "<think>", "</think>"), folder)
    return folder


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
    played = asyncio.run(play(task, seed=0, env=LocalSession(world), agents=who, options=options))
    listed = episode_outcomes(f"{play.__module__}:play", type(world))
    assert not listed or played.outcome.keys() == set(listed), "EPISODE_OUTCOMES are those of every episode"
    return played, prompts
