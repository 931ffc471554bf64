"""One leased episode: from the lease to its trajectories, with the versions that sampled each turn.

And many, for an evaluation in one process: each is kept as it ends, so that a second start plays only the missing ones.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from flowjax.canvas.backends import Backend, BackendUnavailable, Request, RequestTooLong
from flowjax.config import ConfigError, task_options
from flowjax.envs import Message, World, find_world
from flowjax.envs.pool import EnvPool, graded
from flowjax.fields import NAMED, load_named
from flowjax.models.config import vocabulary_sizes
from flowjax.monitor.trouble import with_place
from flowjax.records import (
    COUNTED_STATUSES,
    Bounds,
    Episode,
    Lease,
    Trajectory,
    WireError,
    check_episode,
    check_outcomes,
    pack,
    state_key,
    unpack,
)
from flowjax.rewards import required_outcomes
from flowjax.rollout.client import EngineError, EngineReply, SamplingOptions, VersionAway
from flowjax.rollout.engines import ServedBase
from flowjax.run import Run
from flowjax.workflows import UNVERSIONED, Agent, Generate, Played, Reply, served_version
from flowjax.workflows.codec import PromptRefused
from flowjax.workflows.single import EpisodeOptions


class Play(Protocol):
    """An episode as an async function over named agents (`flowjax.workflows`)."""

    def __call__(
        self, task: Any, *, seed: int, env: Any, agents: Mapping[str, Agent], options: EpisodeOptions
    ) -> Awaitable[Played]: ...


def load_workflow(path: str) -> Play:
    """The episode function at `package.module:function`.

    Raises:
        ConfigError: there is none.
    """
    return load_named("config.workflow", path, ConfigError, NAMED.remedy)


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays leases of one run."""

    bases: Sequence[ServedBase]
    pool: EnvPool
    worlds: Mapping[str, World]  # by source of tasks
    workflow: Play
    agents: Mapping[str, str]  # agent -> policy, or base model
    config: ConfigDict
    bounds: Bounds
    needed: Mapping[str, Collection[str]]  # policy -> outcomes that its reward is made of
    backend: Backend | None = None  # an endpoint that speaks for all agents in place of the bases

    @classmethod
    def of_run(
        cls, run: Run, *, pool: EnvPool, bases: Sequence[ServedBase] = (), backend: Backend | None = None
    ) -> "EpisodePlayer":
        """The player that the run's config describes.

        Raises:
            ValueError: the config names a world or a workflow that cannot be used.
        """
        config, kind = run.config, find_world(run.config.env.name)
        worlds = {source: kind(**task_options(config, source)) for source in config.env.sources or ("",)}
        bounds = Bounds.of_run(run, vocabulary_sizes(run) if backend is None else {})
        if backend is not None:  # config.rollout's bounds are in tokens of the bases: an endpoint has others
            bounds = replace(bounds, prompt_tokens=sys.maxsize, new_tokens=sys.maxsize)
        needed = {name: required_outcomes(policy.reward.components.to_dict()) for name, policy in run.policies.items()}
        return cls(bases, pool, worlds, load_workflow(config.workflow), run.agents, config, bounds, needed, backend)

    async def play(self, lease: Lease) -> Episode:
        """Play to the end. A failure inside the episode becomes its status.

        Raises:
            EngineError: the engine is gone, so that the episode says nothing and should be played again.
        """
        limit_s = self.config.rollout.episode_timeout_s
        timeout = asyncio.timeout(limit_s)
        sampled: set[tuple[str, str]] = set()  # policy, and the engines' name of the weights that were sampled
        try:
            async with timeout:
                played = await self._play(lease, sampled)
            return self._checked(lease, played, self._commits(sampled))
        except EngineError:
            raise
        except Exception as error:  # a fault of this episode's world or workflow must not reach other episodes
            # Also a time-out inside the world, or an outcome that is no number, which the dataflow would refuse.
            if not timeout.expired():
                played = Played([], {}, "env_error", with_place(error))
            # With an engine away the time-out says nothing about the episode; with all of them up it was too long.
            elif all(await asyncio.gather(*(base.engine.healthy() for base in self.bases))):
                played = Played([], {}, "timeout", f"the episode took longer than rollout.episode_timeout_s={limit_s}")
            else:
                raise EngineError(f"the engine was away for longer than the {limit_s} s of an episode") from error
        return replace(self._episode(lease, played), commits=self._commits(sampled))

    def _checked(self, lease: Lease, played: Played, commits: Mapping[str, Mapping[int, str]]) -> Episode:
        """The episode that was played.

        Raises:
            TypeError, ValueError: the workflow has returned something that the dataflow would refuse.
        """
        if not isinstance(played, Played):
            raise TypeError(f"config.workflow returned {type(played).__name__}: return a flowjax.workflows.Played")
        for part in played.parts:
            if part.agent not in self.agents:
                known = ", ".join(self.agents)
                raise ValueError(f"config.workflow returned a part of agent {part.agent!r}: config.agents has {known}")
        episode = replace(self._episode(lease, played), commits=commits)
        # The dataflow's own checks, before it is sent. Only the dataflow knows the newest version: here any passes.
        trained = {policy for base in self.bases for policy in base.policies}
        newest = {name: sys.maxsize if name in trained else UNVERSIONED for name in self.agents.values()}
        check_episode(episode, newest=newest, bounds=self.bounds)
        check_outcomes(episode, self.needed)
        if fault := graded(episode.outcome, *(part.outcome for part in episode.trajectories)):
            raise ValueError(f"it ended with {fault}")
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
                policy=self.agents[part.agent],
                shown=part.shown,
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
            answer=played.answer,
        )

    def _commits(self, sampled: Collection[tuple[str, str]]) -> dict[str, dict[int, str]]:
        """Commits of the versions that were sampled from, by policy and version, where they are known."""
        found: dict[str, dict[int, str]] = {}
        for base in self.bases:
            for policy, name in sampled:
                if policy in base.policies and (commit := base.follower.commit(name)):
                    found.setdefault(policy, {})[served_version(name)[1]] = commit
        return found

    async def _play(self, lease: Lease, sampled: set[tuple[str, str]]) -> Played:
        env = self.config.env
        options = EpisodeOptions(
            self.worlds[lease.task.source],
            max_turns=env.max_turns,
            prompt=env.prompt,
            context=env.context,
            history=env.history,
        )
        base_of = {model: base for base in self.bases for model in (base.name, *base.policies)}
        agents = {
            agent: self._agent(agent, base_of.get(model), model, lease, sampled) for agent, model in self.agents.items()
        }
        async with self.pool.session(env.name, task_options(self.config, lease.task.source)) as session:
            # An evaluation plays fixed versions: they stay on the engines until the episode ends, not only its turns.
            with contextlib.ExitStack() as pins:
                for policy, version in lease.versions.items():
                    pins.enter_context(base_of[policy].follower.using(policy, version, pinned=True))
                    await base_of[policy].served(policy, version)
                played = await self.workflow(lease.task, seed=lease.seed, env=session, agents=agents, options=options)
        lost = [name for policy, name in sampled if base_of[policy].follower.lost(name)]
        # The dataflow knows a version by its number: tokens of the lost weights would be trained on as if those that
        # have the number now had sampled them. An evaluation is pinned, and goes on with a version that is lost.
        if lost and lease.kind == "train":
            raise VersionAway(f"the trainer has gone back behind {', '.join(sorted(lost))}, which it was played with")
        return played

    def _agent(
        self, agent: str, base: ServedBase | None, model: str, lease: Lease, sampled: set[tuple[str, str]]
    ) -> Agent:
        rollout, world = self.config.rollout, self.worlds[lease.task.source]
        allowed = rollout.structured_outputs and world.structured_outputs(self.config.env.prompt)
        filters = self.config.eval if lease.kind == "eval" else rollout
        sampling = SamplingOptions(
            temperature=lease.temperature,
            max_new_tokens=rollout.max_new_tokens,
            top_p=filters.top_p,
            top_k=filters.top_k,
            min_p=filters.min_p,
            stop=tuple(rollout.stop),
            structured_outputs=json.dumps(allowed) if allowed else "",
        )
        # Seeded evaluations can be repeated; beside training they are seeded only where config.eval.seed is not -1.
        # Training never is seeded: the replies to one prompt must differ within a group.
        evaluation_seed = self.config.eval.seed
        is_seeded = lease.kind == "eval" and lease.temperature > 0 and evaluation_seed >= 0
        seed_of = partial(_reply_seed, evaluation_seed if is_seeded else 0, lease.seed, agent)
        if base is None:
            assert self.backend is not None, f"nobody speaks for {agent}"
            return EndpointAgent(self.backend, model, sampling, seed_of)
        sampling = replace(sampling, stop_token_ids=base.codec.stop_token_ids)
        return Agent(base.codec, _generator(base, model, lease, sampling, sampled, seed_of if is_seeded else None))


def _generator(
    base: ServedBase,
    model: str,
    lease: Lease,
    sampling: SamplingOptions,
    sampled: set[tuple[str, str]],
    seed_of: Callable[[int], int] | None,
) -> Generate:
    """Function that samples one turn: from the lease's version if it names one, else from the newest when the turn
    begins. It adds the policy, and the names of the weights that sampled it, to `sampled`."""
    numbers = itertools.count()

    async def generate(prompt_ids: list[int]) -> EngineReply:
        seeded = sampling if seed_of is None else replace(sampling, seed=seed_of(next(numbers)))
        reply = await base.generate(model, lease.versions.get(model), prompt_ids, seeded, group=lease.group_id)
        if model in base.policies:
            sampled.update((model, name) for name, _ in reply.spans)
        return reply

    return generate


def _reply_seed(seed: int, episode_seed: int, agent: str, number: int) -> int:
    """Seed of an agent's reply of that number in an episode; 31 bits."""
    return state_key("reply", seed, episode_seed, agent, number) >> 33


class EndpointAgent(Agent):
    """An agent of one episode that an endpoint speaks for.

    The endpoint's token ids and log-probs are not known: zeros stand for them, as many as the endpoint says that it has
    read and sampled, so that counts of tokens are right.
    """

    def __init__(self, backend: Backend, model: str, sampling: SamplingOptions, seed_of: Callable[[int], int]):
        """`model` is what the run calls it, `seed_of` gives the seed of the agent's n-th call."""
        self._backend, self._model, self._sampling, self._seed_of = backend, model, sampling, seed_of
        self._said: list[tuple[Reply, list[Message]]] = []
        self._numbers = itertools.count()  # of calls, some of which may be under way at once

    async def act(self, messages: Sequence[Message], *, after: Reply | None = None) -> Reply:
        """One reply to `messages`; with `after`, the next one of the conversation that led to that reply.

        Raises:
            EngineError, PromptRefused: the endpoint does not answer; the conversation is longer than its context.
        """
        before = next((conversation for reply, conversation in self._said if reply is after), [])
        asked = [*before, *messages]
        request = Request(
            [dict(message) for message in asked],
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            max_new_tokens=self._sampling.max_new_tokens,
            seed=self._seed_of(next(self._numbers)),
        )
        try:
            answer = await self._backend.complete(request)
        except BackendUnavailable as error:
            raise EngineError(str(error)) from error
        except RequestTooLong as error:
            raise PromptRefused(str(error)) from error
        text = answer.text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent as UTF-8
        reply = Reply(
            text=text,
            prompt_ids=np.zeros(max(answer.usage.prompt_tokens, 1), np.int32),
            sampled_ids=np.zeros(answer.usage.sampled_tokens, np.int32),
            logprobs=np.zeros(answer.usage.sampled_tokens, np.float32),
            finish_reason=answer.finish_reason,
            policy=self._model,
            version=UNVERSIONED,
            generate_s=0.0,
        )
        self._said.append((reply, [*asked, {"role": "assistant", "content": text}]))
        return reply


# ---------------------------------------------------------------------------------------- the episodes of an evaluation

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
_PAUSE_S = 1.0  # before an episode is tried again that met an outage
_FAILED_ROUNDS = 4  # times the number of slots: so many failures in a row end the evaluation


class EvaluationStopped(RuntimeError):
    """An evaluation that cannot go on now; the message says why. What it has played is kept."""


class EpisodeFile:
    """Episodes of an evaluation in a file, in the order in which they ended.

    Each record is its length (8 bytes, little-endian) and its content, so that one that a crash cut short is noticed.
    """

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> dict[str, Episode]:
        """The whole episodes, by id; another process may be adding to them."""
        return self._whole()[0]

    def resume(self) -> dict[str, Episode]:
        """The whole episodes, by id. A rest that a crash left after them is cut off: no other process may be adding."""
        found, end = self._whole()
        if self._path.exists() and self._path.stat().st_size > end:
            with self._path.open("r+b") as file:
                file.truncate(end)
        return found

    def add(self, episode: Episode) -> None:
        """Keep an episode.

        Raises:
            OSError: it cannot be written.
        """
        data = pack(episode)
        with self._path.open("ab") as file:
            file.write(_LENGTH.pack(len(data)) + data)

    def _whole(self) -> tuple[dict[str, Episode], int]:
        """The episodes, and the place where the last of them ends."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}, 0
        found, start = dict[str, Episode](), 0
        while start + _LENGTH.size <= len(data):
            end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
            if end > len(data):  # a crash cut it short
                break
            try:
                episode = unpack(data[start + _LENGTH.size : end])
            except WireError:  # of another version of flowjax: this episode and those after it are played again
                break
            found[episode.episode_id] = episode
            start = end
        return found, start


async def play_missing(
    leases: Sequence[Lease],
    file: EpisodeFile,
    play: Callable[[Lease], Awaitable[Episode]],
    *,
    slots: int,
    attempts: int,
    patience_s: float,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Episode]:
    """Play those leases whose episodes the file does not have. Returns all that there are then, by id.

    Args:
        file: to which no other process adds meanwhile.
        play: plays one episode; an `EngineError` is a failure of engine or endpoint, not of the episode.
        slots: episodes at a time.
        attempts: plays of an episode that its world breaks, after which it is left out; a second start tries again.
        patience_s: longest time in seconds without any answer of engine or endpoint.
        report: called with the number of episodes that are in, and of all.

    Raises:
        EvaluationStopped: engine or endpoint have been away for longer, or episode after episode fails.
    """
    wanted = {lease.episode_id: lease for lease in leases}
    kept = {
        name: episode
        for name, episode in file.resume().items()
        if name in wanted and episode.task_id == wanted[name].task.task_id
    }
    waiting = iter([lease for lease in leases if lease.episode_id not in kept])
    answered_s, failures = time.monotonic(), 0
    report(len(kept), len(wanted))

    async def one(lease: Lease) -> None:
        nonlocal answered_s, failures
        failed = 0
        while failed < attempts:
            asked_s = time.monotonic()
            try:
                episode = await play(lease)
                reason = episode.error
            except EngineError as error:
                episode, reason = None, str(error)
            if episode is None or episode.status == "executor_error":
                if time.monotonic() - answered_s > patience_s:
                    raise EvaluationStopped(f"nothing has answered for {patience_s:.0f} s, the last because: {reason}")
                failed += answered_s > asked_s  # others are answered, this one is not
                await asyncio.sleep(_PAUSE_S)
                continue
            answered_s = time.monotonic()
            if episode.status in COUNTED_STATUSES:
                failures = 0
                file.add(episode)
                kept[lease.episode_id] = episode
                report(len(kept), len(wanted))
                return
            failed, failures = failed + 1, failures + 1
            _log.warning("episode %s: %s: %s", lease.episode_id, episode.status, episode.error)
            if failures >= _FAILED_ROUNDS * slots:
                text = f"{failures} episodes in a row came to nothing, the last because: {episode.error}"
                raise EvaluationStopped(text)

    async def slot() -> None:
        for lease in waiting:
            await one(lease)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(slots, len(wanted) - len(kept))):
                group.create_task(slot())
    except BaseExceptionGroup as errors:  # callers expect one error; the first one has cancelled the other slots
        raise errors.exceptions[0] from None
    return kept
