"""A launch's trial of a user's own code: a world's tasks are read, an episode is played, actions are repeated, data
algorithms are asked. Of a shipped world whose tasks are a user's an episode is played, too.

`flowjax.launch.probe` calls it in its process, before anything starts. It is quick, and bounded for slow worlds.
"""

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from flowjax.canvas.backends import Completion, Request
from flowjax.canvas.values import Usage
from flowjax.config import task_options
from flowjax.dataflow.algorithms import AlgorithmError, Candidate, Chain, Result, build_algorithms
from flowjax.dataflow.built_in_algorithms import unknown_fields
from flowjax.envs import (
    EnvDied,
    Message,
    NotReady,
    Observation,
    RemoteEnv,
    Split,
    Step,
    World,
    WorldError,
    find_world,
    is_refusal,
)
from flowjax.envs.pool import EnvPool, PooledEnv, check_repeats, is_one_state, random_walk
from flowjax.fields import shown
from flowjax.monitor.trouble import with_place
from flowjax.records import COUNTED_STATUSES, Episode, Lease, Task, pack, unpack
from flowjax.rollout.episode import EpisodePlayer
from flowjax.run import Run
from flowjax.workflows import Agent, Played, Reply
from flowjax.workflows.codec import Codec, PromptTooLong, codecs_of_agents
from flowjax.workflows.single import EpisodeOptions

_SUCCESS_WITHIN_S = 5.0  # no more episodes are played after that for the sake of one that succeeds
_FIRST_TASKS = 8  # among them are two of one source, and one whose first prompt is short enough


def fails(what: str, error: Exception) -> str:
    """Message on an error of a user's own world, which may fail in any way.

    Raises:
        NotReady: a file or another machine is not there.
        ValueError: `error` itself, where its message was made for users.
    """
    if is_refusal(error):
        raise error
    text = f"{what} ({with_place(error)}): mend it"
    if isinstance(error, OSError):
        raise NotReady(text) from error
    return text


def check_tasks(config: ConfigDict) -> Iterator[str]:
    """Problems with the tasks of each split: they have to open, and the first has to be a `Task` that can be sent. Of a
    user's own world more are read, and compared."""
    from flowjax.dataflow.tasks import fault_of_splits, held_out_tasks, task_at, train_tasks

    wanted: list[Split] = []
    if not config.eval.versions:
        wanted.append("train")
    if config.eval.tasks:
        wanted.append("held_out")
    named, sound = f"config.env.name is {config.env.name!r}", True
    for split in wanted:
        try:
            source = (train_tasks if split == "train" else held_out_tasks)(config)
            first = task_at(source, 0) if len(source) else None
            pack(first)  # as a lease will be
        except Exception as error:
            sound = False
            yield fails(f"{named}, whose tasks({split!r}, ...) fails", error)
            continue
        if not isinstance(first, Task):
            sound, has = False, f"a {type(first).__name__}" if first else "no task"
            yield f"{named}, whose tasks({split!r}, ...) has {has}: make it of flowjax.records.Task"
    if sound and not config.env.name.startswith("flowjax."):  # the splits of shipped worlds have tests
        try:
            if found := fault_of_splits(config, wanted):
                yield f"{named}, {found}"
        except Exception as error:
            yield fails(f"{named}, whose tasks fail", error)


@dataclass
class _Scripted:
    """Backend of one episode, whose replies are all `say()`. `asked` names the agents that it spoke for; `too_long` has
    the tokens of first prompts over the limit."""

    say: Callable[[], str]
    identity: str = "scripted"
    replies: int = 0
    asked: set[str] = field(default_factory=set)
    too_long: list[int] = field(default_factory=list)

    async def complete(self, request: Request) -> Completion:
        """See `Backend`. A real reply has a token at least, the one that ends it: a workflow may read its log-prob."""
        await asyncio.sleep(0)  # a workflow that asks until it gets an action would keep the time limit from coming
        self.replies += 1
        return Completion(self.say(), Usage(calls=1, prompt_tokens=1, sampled_tokens=1))


@dataclass
class _Watched:
    """An environment that keeps its newest observation, and whether all its actions were valid and led to success.
    `twin` is an environment of a shipped world that is in the same state, for the world's expert to see."""

    env: RemoteEnv
    twin: Any = None
    newest: Observation | None = None
    invalid: int = 0
    succeeded: bool = False

    async def reset(self, task: Task, seed: int) -> Observation:
        self.newest = await self.env.reset(task, seed)
        with contextlib.suppress(Exception):  # it may need a server that is not up yet
            self.twin.reset(task, seed)
        return self.newest

    async def step(self, action: str) -> Step:
        step = await self.env.step(action)
        with contextlib.suppress(Exception):
            self.twin.step(action)
        self.newest, self.succeeded = step.observation, step.outcome.get("success", 0.0) > 0
        self.invalid += not step.valid
        return step

    def legal_reply(self, options: EpisodeOptions, rng: np.random.Generator) -> str:
        """Reply that names a legal action, the expert's if possible; "" before there is an observation."""
        if self.newest is None:
            return ""
        legal, world = self.newest.legal_actions, options.world
        action = world.random_action(self.newest, rng) if legal else "1"  # without: any text is
        with contextlib.suppress(Exception):  # there is no twin, or the expert cannot solve the task
            action = world.expert(self.twin)
        return world.reply(action, options.prompt, legal)


class _Measured(Agent):
    """An agent that says when it is asked. Where there is a codec it raises `PromptTooLong` as in a run, until the
    episode has a reply: what is asked later depends on the replies, which are other ones in a run."""

    def __init__(self, name: str, agent: Agent, codec: Codec | None, backend: _Scripted):
        self._name, self._agent, self._limit, self._backend = name, agent, codec, backend

    async def act(self, messages: Sequence[Message], *, after: Reply | None = None) -> Reply:
        """See `Agent`."""
        if self._limit is not None and not self._backend.replies:
            try:
                self._limit.encode(messages)
            except PromptTooLong as error:
                self._backend.too_long.append(error.tokens)
                raise
        self._backend.asked.add(self._name)
        return await self._agent.act(messages, after=after)


def check_episode(run: Run, notes: list[str], limit_s: float = 20.0) -> Iterator[str]:
    """Play one episode without engines, every reply empty: a fault of a user's world or workflow that ends it would end
    all. (Where it leaves no turn, some whose replies name legal actions.) Then play the world alone with random
    actions, each of two tasks twice: it has to do the same.

    Args:
        notes: gets a line where this takes longer than `limit_s`, and ends unfinished: a slow world may be sound; and
            one where no episode has a turn of a policy, as with a workflow that leaves out those that fail.
        limit_s: seconds for what is played in a process once it has an environment that was reset.
    """
    from flowjax.dataflow.tasks import held_out_tasks, task_at, train_tasks

    kind, config = find_world(run.config.env.name), run.config
    shipped = all(path.startswith("flowjax.") for path in (config.env.name, config.workflow))
    if "rollout" in config.elsewhere or kind.asked_bases is not World.asked_bases:
        return  # this machine does not play; or the bases that the world asks do not run yet
    if shipped and not (kind.OPENS_FAST and _reads_files(config)):  # it has tests, but not with a user's tasks
        return
    tasks = (held_out_tasks if config.eval.versions else train_tasks)(config)
    task = task_at(tasks, 0)
    if kind(**task_options(config, task.source)).STEPS_WAIT:
        return
    named = f"config.env.name is {config.env.name!r} and config.workflow {config.workflow!r}"
    try:
        codecs = codecs_of_agents(run)
    except Exception as error:  # a user's world lists the words
        yield fails(f"{named}, of whose words no tokenizer can be made", error)
        return

    def first() -> Iterator[Task]:  # read one by one: they may be slow to make
        return (task_at(tasks, index) for index in range(min(_FIRST_TASKS, len(tasks))))

    # Another one of the same source; the same one in a world of a single task.
    another = next((each for each in first() if each.source == task.source and pack(each) != pack(task)), task)

    async def play() -> str:
        most = config.env.max_turns
        async with contextlib.AsyncExitStack() as one_process:
            try:
                pool, opened = await one_process.enter_async_context(_opened(config, task))
            except EnvDied as died:
                return f"where the first reset fails ({died}): mend it"
            async with asyncio.timeout(limit_s):
                player = EpisodePlayer.of_run(run, pool=pool, backend=_Scripted(str))
                if fault := await _played_wrongly(player, first(), codecs, found):
                    return fault
                if shipped:
                    return ""
                async with opened() as env:
                    walk, between, again = [await random_walk(kind, env, of, most) for of in (task, another, task)]
                if is_one_state(walk):
                    text = "of which all states of an episode have one state_key, though what they show differs: credit"
                    found.append(f"{text} by states (rewardflow, gigpo) would take them for the same state")
                remedy = "have reset() set all state, also that of random numbers"
                check_repeats(walk, again, where="on one env object again", remedy=remedy)
            if config.env.workers == 1:  # the world may be one that no two processes can have open, by a fixed port
                await one_process.aclose()
            # A new object of another process shows what belongs to an object or its process alone, such as its
            # address, chance in `__init__`, or the first task that it had.
            async with _opened(config, another) as (_, opened), asyncio.timeout(limit_s), opened() as env:
                again = await random_walk(kind, env, another, most)
            remedy = "make it of task, seed and actions alone, and have reset() set all state"
            check_repeats(between, again, where="on a new env object of another process", remedy=remedy)
        return ""

    at_random = f"{named}, where legal actions are taken at random"
    found: list[str] = []
    try:
        if fault := asyncio.run(play()):
            yield f"{named}, {fault}"
    except TimeoutError:
        notes.append(f"{named}: their trial did not end within {limit_s:g} s, so the rest of it is not checked")
    except EnvDied as died:
        yield f"{at_random}: {died}: mend it"
    except WorldError as error:
        yield f"{at_random}: {error}"
    notes.extend(f"{named}, {text}" for text in found)


def _reads_files(config: ConfigDict) -> bool:
    """True where files that the options name hold the world's tasks, which may be too long for the run's limits."""
    given = [option for source in config.env.sources or ("",) for option in task_options(config, source).values()]
    return any(isinstance(option, str) and option and Path(option).exists() for option in given)


@contextlib.asynccontextmanager
async def _opened(
    config: ConfigDict, task: Task
) -> AsyncIterator[tuple[EnvPool, Callable[[], contextlib.AbstractAsyncContextManager[PooledEnv]]]]:
    """A process that has an environment in which `task` was reset, so that one that takes long to make costs no later
    time; and a function that opens sessions of it.

    Raises:
        EnvDied: the reset fails.
    """
    async with EnvPool(step_timeout_s=config.env.step_timeout_s) as pool:
        opened = partial(pool.session, config.env.name, task_options(config, task.source))
        async with opened() as env:
            await env.reset(task, 0)
        yield pool, opened


async def _played_wrongly(
    player: EpisodePlayer, first: Iterator[Task], codecs: Mapping[str, Codec], notes: list[str]
) -> str:
    """Fault of the first episode that gets a reply, and of others where it has no turn; "" for none."""
    most, shortest = player.config.rollout.max_prompt_tokens, sys.maxsize
    for task in first:
        episode, backend, _ = await _played(player, task, codecs)
        if backend.replies or not backend.too_long:
            break
        shortest = min(shortest, *backend.too_long)
    else:
        return (
            f"of which the first prompts have {shortest} tokens or more, but config.rollout.max_prompt_tokens is "
            f"{most}, so that no episode gets a reply: raise it, or shorten the prompts"
        )
    if fault := _fault(episode, "is empty"):
        return fault
    asked, recorded = _asked(player, backend), _with_turns(episode)
    # Perhaps turns without an action are left out, or episodes that fail, since nobody should learn them. And a user's
    # workflow has to be seen at a success: one that fails there is played again until it has none, and nobody learns.
    won, clock = player.config.workflow.startswith("flowjax."), asyncio.get_running_loop().time
    until_s, rng = clock() + _SUCCESS_WITHIN_S, np.random.default_rng(0)
    for of in itertools.chain([task], first):
        if recorded and not (asked - recorded) & player.needed.keys() and (won or clock() > until_s):
            return ""
        episode, backend, env = await _played(player, of, codecs, rng)
        if fault := _fault(episode, "names a legal action"):
            return fault
        asked, recorded = asked | _asked(player, backend), recorded | _with_turns(episode)
        won = won or (env is not None and env.succeeded)
        if not recorded and env and env.succeeded and not env.invalid:
            return "of which an episode that succeeded by valid actions alone has no turn: return a part with turns"
    if not asked:
        return "of which no episode asks an agent, so that nobody could learn: call agents[...].act"
    if without := sorted((asked - recorded) & player.needed.keys()):
        of = f" of {', '.join(without)}, which was asked" if recorded else ""
        notes.append(
            f"of which no episode of the trial has a turn{of}: neither with empty replies nor with legal actions taken "
            "at random. If no episode ever has one, nobody learns, and its trainer waits. take_turn and record_turn "
            "make turns; a part with them has to be returned (docs/workflows.md)"
        )
    return ""


async def _played(
    player: EpisodePlayer, task: Task, codecs: Mapping[str, Codec], rng: np.random.Generator | None = None
) -> tuple[Episode, _Scripted, _Watched | None]:
    """An episode whose replies are empty, or with `rng` name legal actions; and its environment, None for none."""
    backend, opened, twin = _Scripted(say=str), list[_Watched](), None
    world = player.worlds[task.source]
    if rng is not None and type(world).__module__.startswith("flowjax."):
        with contextlib.suppress(Exception):  # random actions do, too
            twin = world.env()

    async def watched(
        task: Task, *, seed: int, env: RemoteEnv, agents: Mapping[str, Agent], options: EpisodeOptions
    ) -> Played:
        env = _Watched(env, twin)
        opened.append(env)
        if rng is not None:
            backend.say = partial(env.legal_reply, options, rng)
        agents = {name: _Measured(name, agent, codecs.get(name), backend) for name, agent in agents.items()}
        return await player.workflow(task, seed=seed, env=env, agents=agents, options=options)

    lease = unpack(pack(Lease("first", task, "first", "first", 0, "train", 1.0)))
    episode = await replace(player, workflow=watched, backend=backend).play(lease)
    return episode, backend, opened[-1] if opened else None


def _fault(episode: Episode, replies: str) -> str:
    """Fault of an episode that failed; "" for none."""
    if episode.status in COUNTED_STATUSES:
        return ""
    why = f"{episode.status}: {episode.error}" if episode.error else f"status {episode.status!r}, no error"
    return f"of which an episode where every reply {replies} fails ({why}): mend it"


def _asked(player: EpisodePlayer, backend: _Scripted) -> set[str]:
    """The policies and bases whose agents were asked."""
    return {player.agents[name] for name in backend.asked}


def _with_turns(episode: Episode) -> set[str]:
    """The policies and bases that have turns in it."""
    return {part.policy for part in episode.trajectories if part.turns}


_GROUPS_MADE_UP = 4  # of new tasks at each start
_MOST_REFUSED = 64  # tasks in a row


@dataclass
class _Questions:
    """Progress of the questions to data algorithms: the next position, the tasks that they chose, the last rewards, and
    their states as a ledger would have them."""

    position: int = 0
    tasks: list[Task] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    written: dict[tuple[str, str, bytes], bytes | None] = field(default_factory=dict)

    def write(self, chain: Chain, hook: str, key: Hashable) -> None:
        """Write down what a hook's answers have changed, as a run does after each."""
        with chain.state_changes(hook, key) as changes:
            self.written |= {(name, attribute, place): value for name, attribute, place, value in changes}


def check_algorithms(run: Run) -> Iterator[str]:
    """Ask a user's own data algorithms about the first tasks, with results that are made up; then new objects that have
    got the states of these, about the same tasks and others. What fails here would end the run, or every resume of it.
    Of those of all kinds, `deduplicate` has to name fields that tasks have."""
    yield from () if run.is_evaluation else unknown_fields(run.config)
    if all("path" not in options for options in run.config.dataflow.algorithms.values()) or run.is_evaluation:
        return
    asked, members = _Questions(), run.config.rollout.group_size
    for when in ("", ", once its state is restored, as plain maps and lists"):
        try:
            written = [(*place, value) for place, value in asked.written.items() if value is not None]
            _ask(run, Chain(build_algorithms(run.config), written), asked)
        except AlgorithmError as error:
            last = f", at last with the rewards {shown(asked.rewards)}" if asked.rewards else ""
            if 0 < len(asked.rewards) < members:
                last += f" of a group that lost {members - len(asked.rewards)} of its {members} episodes"
            yield f"{error} (asked at the launch about results that are made up{last}{when})"
            return


def _ask(run: Run, chain: Chain, asked: _Questions) -> None:
    """Ask the algorithms as a run does: about tasks that they chose before, which the order of training has again, and
    about new ones."""
    from flowjax.dataflow.tasks import task_at, train_tasks

    tasks, again, new, refused = train_tasks(run.config), list(asked.tasks), 0, 0
    members, dataflow = run.config.rollout.group_size, run.config.dataflow
    least = members if dataflow.failed_episodes == "drop" else min(members, dataflow.min_group_size)
    ready: dict[str, list[Candidate]] = {policy: [] for policy in run.policies}
    while again or (new < _GROUPS_MADE_UP and refused < _MOST_REFUSED):
        position, known = asked.position, bool(again)
        asked.position += 1
        task, name = again.pop(0) if known else task_at(tasks, position), f"train-{position:08d}"
        if not chain.choose(task, position):
            refused += 1
            continue  # it is not played, so that it has no result
        if not known:
            new, refused = new + 1, 0
            asked.tasks.append(task)
        chain.chosen(task, position)
        asked.write(chain, "chosen", position)
        for policy, candidates in ready.items():
            # Episodes may fail, so that groups come in short: one of the new ones is as short as a run takes it.
            result = _made_up(run, name, task, policy, position, least if new == 2 and not known else members)
            asked.rewards = result.rewards.tolist()
            kept = chain.keep(result)
            asked.write(chain, "keep", (policy, name))
            if kept:
                candidates.append(Candidate(name, position, 0))
                chain.trains(result)
    for policy, candidates in ready.items():
        groups = max(1, len(candidates))
        chain.serve(candidates, [], groups)
        if chain.keeps_used_versions:
            chain.serve([], candidates, groups)
        chain.published(policy, len(asked.tasks))
        asked.write(chain, "published", (policy, len(asked.tasks)))
    chain.metrics()


def _made_up(run: Run, name: str, task: Task, policy: str, position: int, members: int) -> Result:
    """A result that differs from those at other positions in what an algorithm may count by."""
    if run.policies[policy].reward.components.to_dict() == {"success": 1.0}:
        rewards = np.arange(members) < (1 + position) % (members + 1)
    else:
        rewards = np.linspace(1 / (1 + position), 0, members)
    lengths = np.full(members, min(1 + position, run.config.rollout.max_new_tokens))
    return Result(name, task, policy, rewards.astype(np.float32), lengths)
