"""Episodes in a world that answers late: the one-agent workflow with a long-tailed pause at each step."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowjax.envs import Observation, RemoteEnv, Step
from flowjax.records import Task
from flowjax.workflows import Agent, Played, single

MEDIAN_S, SIGMA, LONGEST_S = 0.08, 1.6, 20.0  # log-normal: one step in a hundred takes over 3 s


class _Late:
    """A session whose steps take as long as the seed says, each time the same."""

    def __init__(self, session: RemoteEnv, seed: int):
        self._session, self._random = session, np.random.default_rng(seed)

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._session.reset(task, seed)

    async def step(self, action: str) -> Step:
        pause_s = float(self._random.lognormal(math.log(MEDIAN_S), SIGMA))
        await asyncio.sleep(min(pause_s, LONGEST_S))
        return await self._session.step(action)


async def play(
    task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: single.EpisodeOptions, **more: Any
) -> Played:
    """`flowjax.workflows.single:play`, late."""
    return await single.play(task, seed=seed, env=_Late(env, seed), agents=agents, options=options, **more)
