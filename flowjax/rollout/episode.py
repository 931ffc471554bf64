"""One leased episode: from the lease to its trajectories, every turn on the version that it began with."""

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict

from flowjax.config import ConfigError, task_options
from flowjax.envs.base import Constrained, World, load_world
from flowjax.envs.pool import EnvPool
from flowjax.record_checks import check_episode
from flowjax.records import Episode, Lease, Trajectory, WireError
from flowjax.rollout.client import EngineError, UnknownModel
from flowjax.rollout.completions import Completion, Sampling
from flowjax.rollout.engines import Engines
from flowjax.rollout.names import BASE_NAME, engine_logs, speakers
from flowjax.weights.follow import Follower, model_name
from flowjax.workflows.agent import UNVERSIONED, Agent, Generate, Played
from flowjax.workflows.codec import Codec
from flowjax.workflows.single import Options


class Play(Protocol):
    """An episode as an async function over named agents (`flowjax.workflows`)."""

    def __call__(
        self, task: Any, *, seed: int, env: Any, agents: Mapping[str, Agent], options: Options
    ) -> Awaitable[Played]: ...


def load_workflow(path: str) -> Play:
    """The episode function at a dotted path.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"config.workflow is {path!r}, which cannot be imported ({error}): give the dotted path of an async "
            "function, for example flowjax.workflows.single.play"
        ) from error
    return function


@dataclass(frozen=True)
class Player:
    """Plays leases of one run."""

    engine: Engines
    follower: Follower
    pool: EnvPool
    codec: Codec
    world: World
    workflow: Play
    speakers: Mapping[str, str]  # agent -> policy
    config: ConfigDict
    structured_outputs: str = ""  # see `Sampling`

    @classmethod
    def of_run(cls, config: ConfigDict, *, engine: Engines, follower: Follower, pool: EnvPool) -> "Player":
        """A player as the run's config wants it.

        Raises:
            ValueError: the config names a world, a workflow or a tokenizer that cannot be used.
        """
        world = load_world(config.env.module)
        held = ""
        if config.rollout.structured_outputs and isinstance(world, Constrained):
            held = json.dumps(world.structured_outputs(config.env.prompt, **config.env.options.to_dict()))
        return cls(
            engine,
            follower,
            pool,
            Codec(Path(config.model.path), max_prompt_tokens=config.rollout.max_prompt_tokens),
            world,
            load_workflow(config.workflow),
            speakers(config),
            config,
            held,
        )

    async def play(self, lease: Lease) -> Episode:
        """Play to the end. What goes wrong inside the episode is its status.

        Raises:
            EngineError: the engine is gone, so the episode says nothing and should be played again.
        """
        try:
            async with asyncio.timeout(self.config.rollout.episode_timeout_s):
                played = await self._play(lease)
        except EngineError:
            raise
        except TimeoutError as error:
            limit_s = self.config.rollout.episode_timeout_s
            if not await self.engine.healthy():
                raise EngineError(f"the engine was away for longer than the {limit_s} s of an episode") from error
            played = Played([], {}, "timeout", f"the episode took longer than rollout.episode_timeout_s={limit_s}")
        except Exception as error:  # a fault of this episode's world or workflow must not reach its siblings
            played = Played([], {}, "env_error", f"{type(error).__name__}: {error}")
        episode = self._episode(lease, played)
        try:
            newest = {name: UNVERSIONED if name == BASE_NAME else sys.maxsize for name in self.speakers.values()}
            check_episode(episode, newest=newest)
        except WireError as error:  # a world whose reward is not a number, say: the dataflow would refuse it
            episode = self._episode(lease, Played([], {}, "env_error", str(error)))
        return episode

    def _episode(self, lease: Lease, played: Played) -> Episode:
        trajectories = [
            Trajectory(
                trajectory_id=lease.episode_id if len(played.parts) == 1 else f"{lease.episode_id}/{part.agent}-{i}",
                group_id=lease.group_id,
                task_id=lease.task.task_id,
                seed=lease.seed,
                turns=part.turns,
                outcome=part.outcome,
                status=played.status,
                error=played.error,
                policy=self.speakers[part.agent],
            )
            for i, part in enumerate(played.parts)
        ]
        return Episode(
            episode_id=lease.episode_id,
            group_id=lease.group_id,
            task_id=lease.task.task_id,
            seed=lease.seed,
            trajectories=trajectories,
            outcome=played.outcome,
            status=played.status,
            error=played.error,
        )

    async def _play(self, lease: Lease) -> Played:
        env = self.config.env
        options = Options(
            self.world,
            max_turns=env.max_turns,
            prompt=env.prompt,
            context=env.context,
            history=env.history,
            reference_parsing=env.reference_parsing,
        )
        agents = {agent: Agent(self.codec, self._generator(policy, lease)) for agent, policy in self.speakers.items()}
        async with self.pool.session(env.module, task_options(self.config, lease.task.source)) as session:
            with contextlib.ExitStack() as pins:
                for policy, version in lease.versions.items():
                    pins.enter_context(self.follower.using(policy, version, pinned=True))
                    await self._served(policy, version)
                return await self.workflow(lease.task, seed=lease.seed, env=session, agents=agents, options=options)

    def _generator(self, policy: str, lease: Lease) -> Generate:
        """Samples one turn: of the lease's version where it names one, else of the newest when the turn begins."""
        sampling = Sampling(
            lease.temperature, self.config.rollout.max_new_tokens, structured_outputs=self.structured_outputs
        )
        pinned = lease.versions.get(policy)

        async def generate_frozen(prompt_ids: list[int]) -> Completion:
            while True:
                try:
                    return await self.engine.generate(BASE_NAME, prompt_ids, sampling, group=lease.group_id)
                except UnknownModel:  # engines that have just come up have not been looked at yet
                    self.follower.recheck(BASE_NAME)
                    await self._soon(BASE_NAME, self.follower.listed(BASE_NAME))

        async def generate(prompt_ids: list[int]) -> Completion:
            while True:
                version = self.follower.current(policy)[0] if pinned is None else pinned
                name = model_name(policy, version)
                with self.follower.using(policy, version):
                    try:
                        return await self.engine.generate(name, prompt_ids, sampling, group=lease.group_id)
                    except UnknownModel:  # the engine has been restarted, or holds other weights by now
                        self.follower.recheck(name)
                        await self._served(policy, pinned)

        return generate_frozen if policy == BASE_NAME else generate

    async def _served(self, policy: str, version: int | None) -> None:
        """Wait until an engine has that version, or whichever is the current one."""
        if version is None:
            await self._soon(policy, self.follower.serve_current(policy))
        else:
            await self._soon(model_name(policy, version), self.follower.serve(policy, version))

    async def _soon(self, name: str, served: Awaitable[None]) -> None:
        bound_s = self.config.engine.start_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                await served
        except TimeoutError as error:
            where = engine_logs(self.config)
            raise EngineError(f"{name} has not come to the engine within {bound_s:.0f} s: see {where}") from error
