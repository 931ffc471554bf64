"""Held-out evaluations beside training: when one is due, and its line in the log."""

import asyncio
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import grain
import numpy as np

from flowjax.dataflow.ledger import EpisodeReader, Ledger, trajectories_of
from flowjax.dataflow.policies import PolicyStatus
from flowjax.dataflow.tasks import content_of, episode_seed, task_at
from flowjax.monitor.held_out import HeldOutEpisode, write_held_out
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.statistics import wilson
from flowjax.monitor.transcripts import Credit, held_out_path, transcript, write_lines
from flowjax.monitor.trouble import is_machine_fault
from flowjax.records import Episode, Group, Task, Trajectory, Turn
from flowjax.rewards import Components, trajectory_scores
from flowjax.run import Run

_P = TypeVar("_P", Episode, Trajectory)
_LONGEST_REASON = 500  # characters
_Rewards = Mapping[str, Mapping[str, float]]  # of trajectories, by policy and id


class Evaluations:
    """Evaluations of the versions that are served, each pinned to them. Training goes on meanwhile.

    Each of the first `config.eval.tasks` held-out tasks is played `config.eval.samples` times. Where there are fewer
    tasks, all of them are played, and the log says so. A generated set may hold a task twice: all of its episodes are
    samples of one task, which has the weight of one in every mean and interval.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        metrics: MetricsWriter,
        tasks: grain.MapDataset[Task],
        policies: Mapping[str, PolicyStatus],
        clock: Callable[[], float] = time.monotonic,
    ):
        config = run.config
        self._config, self._policies, self._run_dir = config, policies, run.folder
        self._ledger, self._metrics, self._tasks, self._clock = ledger, metrics, tasks, clock
        self._started_s: dict[str, float] = {}
        self._writing: asyncio.Task[None] | None = None
        self._written: asyncio.Task[None] | None = None  # the newest try that has ended, well or not
        # No further than its end: beyond it, a source repeats its tasks.
        self._count = min(config.eval.tasks, len(tasks)) if config.eval.tasks else 0
        self.read_ledger()

    def read_ledger(self) -> None:
        """Note which evaluations there are; a trainer that has gone back to an earlier version undoes some."""
        self.give_up_writing()  # an evaluation may be undone now, and be played again under the same name
        self._all = self._ledger.evaluations()  # versions by name
        closed = self._ledger.evaluations("closed").keys()
        self._unwritten = {name: self._all[name] for name in self._all.keys() - closed}

    def pinned(self, policy: str) -> list[int]:
        """Versions of a policy that an evaluation under way needs."""
        return [versions[policy] for versions in self._under_way().values()]

    def unwritten(self) -> Mapping[str, Mapping[str, int]]:
        """Versions of each evaluation whose line is not written, by its name: under way, or just over."""
        return self._unwritten

    def _under_way(self) -> dict[str, Mapping[str, int]]:
        return {name: versions for name, versions in self._unwritten.items() if self._ledger.is_under_way(name)}

    def open(self) -> None:
        """Evaluate the versions that are served, if that is due and not done yet."""
        config, versions = self._config, {name: policy.serving for name, policy in self._policies.items()}
        name = ",".join(f"{policy}@{version}" for policy, version in versions.items())
        if min(versions.values()) < 0 or not config.eval.tasks or not self._due(versions):
            return
        if name in self._all:
            return
        if not self._all and self._count < config.eval.tasks:
            text = f"{self._count} tasks, all that are held out; config.eval.tasks asks for {config.eval.tasks}"
            self._metrics.write("run", role="evaluation", event="small held-out set:", text=text)
        with self._ledger.transaction():  # all of it or none, also when the process dies meanwhile
            for index, task in enumerate(self._held_out):
                self._ledger.add_group(
                    f"eval-{name}-{index:06d}",
                    task,
                    [episode_seed(0, index, sample) for sample in range(config.eval.samples)],
                    kind="eval",
                    position=index,
                    temperature=config.eval.temperature,
                    evaluation=name,
                    versions=versions,
                )
        self._all[name] = self._unwritten[name] = versions
        self._started_s[name] = self._clock()

    @functools.cached_property
    def _held_out(self) -> list[Task]:
        """The tasks of every evaluation, made once: a world may take milliseconds for each, and the event loop gives no
        leases meanwhile."""
        return [task_at(self._tasks, index) for index in range(self._count)]

    def _due(self, versions: Mapping[str, int]) -> bool:
        """True at the start, at the end, and when the run has passed another `eval.every_steps`."""
        config = self._config
        if not any(versions.values()) or versions == self._last_versions():
            return True
        every, step = config.eval.every_steps, self._step(versions)
        if not every or step < every:
            return False
        evaluated = [self._step(earlier) for earlier in self._all.values()]
        # Multiples passed, not met: the engines may serve 9, then 11, and the evaluation at 10 is then that of 11.
        return step // every > max(evaluated, default=0) // every

    def _step(self, versions: Mapping[str, int]) -> int:
        """The step of the run at these versions: the version of the slowest policy that has more to make. At the end it
        is that of the policy with the most steps."""
        last = self._last_versions()
        under_way = [version for policy, version in versions.items() if version < last[policy]]
        return min(under_way, default=max(versions.values()))

    @property
    def finished(self) -> bool:
        """True when the run's last evaluation has been played, and the lines of all of them are written."""
        if self._unwritten:
            return False
        return not self._config.eval.tasks or self._last_versions() in self._all.values()

    def _last_versions(self) -> dict[str, int]:
        return {name: policy.settings.trainer.steps for name, policy in self._policies.items()}

    def start_writing(self) -> None:
        """Start to write the line of each evaluation whose episodes have all ended, while the event loop goes on.

        Raises:
            Exception: the last try failed with it; another one is under way.
        """
        if self._writing is not None and self._writing.done():
            self._written, self._writing = self._writing, None
        if self._writing is None and self._over():
            self._writing = asyncio.create_task(self.write_finished())
        if self._written is not None and not self._written.cancelled():
            self._written.result()

    def give_up_writing(self) -> None:
        """Cancel the writing of lines. The ledger keeps evaluations that are over: `start_writing` writes them anew."""
        if self._writing is not None:
            self._writing.cancel()
        self._writing = self._written = None  # a failure of the last try is forgotten, too

    async def write_finished(self) -> None:
        """Write the line of each evaluation whose episodes have all ended, one after another."""
        for name in self._over():
            given_up = threading.Event()
            try:
                line = await asyncio.to_thread(self._keep, name, given_up)
            finally:
                given_up.set()  # cancellation does not end a thread: this does (`_EpisodesOnDisk`)
            # No await between these, so that no other task sees half of it; a process that dies before the second one
            # writes the line again. Files and line are on the disk before the ledger says so: also a power failure
            # leaves that true.
            self._metrics.write("eval", **self._about(name), **line)
            self._ledger.close_evaluation(name)
            del self._unwritten[name]

    def _over(self) -> list[str]:
        """Evaluations whose episodes have all ended, and whose line is not written."""
        return sorted(self._unwritten.keys() - self._under_way().keys()) if self._unwritten else []

    def _about(self, name: str) -> dict[str, Any]:
        """Fields of an evaluation's line that do not come from its episodes."""
        versions = self._unwritten[name]
        step = self._step(versions)
        return {
            "step": step,
            "version": step,
            "versions": dict(versions),
            "asked": self._config.eval.tasks,
            "samples": self._config.eval.samples,
            # Unknown if an earlier process opened the evaluation.
            **({"seconds": self._clock() - self._started_s[name]} if name in self._started_s else {}),
        }

    def _keep(self, name: str, given_up: threading.Event) -> dict[str, Any]:
        """Keep the episodes of an evaluation, and return the fields of its line that come from them. Runs in a thread:
        with large episodes it takes minutes."""
        components = {policy: of.settings.reward.components.to_dict() for policy, of in self._policies.items()}
        with contextlib.closing(EpisodeReader(self._ledger.path)) as reader:
            played = _EpisodesOnDisk(reader, reader.evaluated(name), given_up)
            keep = functools.partial(
                keep_evaluation, self._run_dir, name, played, transcripts=self._config.eval.transcripts
            )
            unrewarded = ""
            try:
                kept = keep(components)
            except Exception as error:
                if is_machine_fault(error):
                    raise
                # The rest of the result is worth keeping without rewards, and the run has to go on.
                unrewarded = f"no reward can be given: {type(error).__name__}: {error}"[:_LONGEST_REASON]
                kept = keep({})
        by_task: dict[str, list[Episode]] = {}
        by_source: dict[str, dict[str, list[Episode]]] = {}
        for task, episode in kept.played:
            by_task.setdefault(content_of(task), []).append(episode)
            by_source.setdefault(task.source, {}).setdefault(content_of(task), []).append(episode)
        tasks = list(by_task.values())
        success_rate, low, high = _success(tasks)
        return {
            "tasks": len(by_task),
            "episodes": len(kept.played),
            "unfinished": self._count * self._config.eval.samples - len(kept.played),
            "success_rate": success_rate,
            "low": low,
            "high": high,
            "turns_mean": _mean_of_tasks(tasks, lambda episode: len(episode.turns)),
            "env_return_mean": _mean_of_tasks(tasks, lambda episode: sum(turn.env_reward for turn in episode.turns)),
            "policies": {policy: _of_policy(policy, tasks, kept.rewards.get(policy)) for policy in self._policies},
            "sources": {
                source: _mean_of_tasks(list(found.values()), _solved) for source, found in by_source.items() if source
            },
            **({"unrewarded": unrewarded} if unrewarded else {}),
        }


class _EpisodesOnDisk(Sequence[tuple[Task, Episode]]):
    """Episodes of an evaluation with their tasks, each read when it is asked for: all of them may not fit in memory."""

    def __init__(self, reader: EpisodeReader, names: Sequence[tuple[str, str]], given_up: threading.Event):
        self._reader, self._names, self._given_up = reader, names, given_up

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        if self._given_up.is_set():
            raise asyncio.CancelledError
        group_id, episode_id = self._names[index]
        return self._reader.task(group_id), self._reader.episode(episode_id)


@dataclass(frozen=True, slots=True)
class KeptEvaluation:
    """An evaluation as it was kept.

    episodes: as they are written to `held_out/`.
    played: the same episodes as they were played, with all tokens set to zero.
    rewards: of each trajectory, by policy and id.
    """

    episodes: list[HeldOutEpisode]
    played: list[tuple[Task, Episode]]
    rewards: _Rewards


def keep_evaluation(
    run_dir: Path,
    name: str,
    played: Sequence[tuple[Task, Episode]],
    components: Mapping[str, Components],
    *,
    transcripts: int,
) -> KeptEvaluation:
    """Keep every episode of an evaluation, for `flowjax.compare` and readers of one's own, and some turn by turn.

    Args:
        name: of the evaluation, and of its files in `held_out/`.
        played: read once from end to end, and once more where episodes are kept turn by turn; none of it is held.
        components: of the reward, by policy.
        transcripts: most episodes that are kept turn by turn, evenly spread.
    """
    counted = [(task, _without_tokens(episode)) for task, episode in played]
    credits = {policy: _credits(policy, counted, of) for policy, of in components.items()}
    rewards = {policy: {name: each.reward for name, each in of.items()} for policy, of in credits.items()}
    if played and transcripts:
        every = -(-len(played) // transcripts)  # rounded up, so that no more than that are kept
        lines = (
            transcript(task, part, credits.get(part.policy, {}).get(part.trajectory_id))
            for task, episode in (played[index] for index in range(0, len(played), every))
            for part in episode.trajectories
        )
        write_lines(held_out_path(run_dir, name), lines, durable=True)
    episodes = [_held_out_episode(task, episode, rewards) for task, episode in counted]
    write_held_out(run_dir, name, episodes)
    return KeptEvaluation(episodes, counted, rewards)


def _without_tokens(episode: Episode) -> Episode:
    """The episode with the same number of tokens in each turn, all zero. Each array is one value broadcast to its
    length, so that it takes no memory; lengths are all that evaluations use."""

    def blank(turn: Turn) -> Turn:
        prompt, sampled = (np.broadcast_to(np.int32(0), len(ids)) for ids in (turn.prompt_ids, turn.sampled_ids))
        logprobs = np.broadcast_to(np.float32(0), len(turn.logprobs))
        return replace(turn, prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs, shown="")

    parts = [replace(part, turns=list(map(blank, part.turns)), shown="") for part in episode.trajectories]
    return replace(episode, trajectories=parts)


def _credits(policy: str, played: Sequence[tuple[Task, Episode]], components: Components) -> dict[str, Credit]:
    """Reward of each trajectory of a policy, by its id; all in one jitted call, which compiles once."""
    groups = [
        Group("evaluation", task, parts) for task, episode in played if (parts := trajectories_of([episode], policy))
    ]
    if not groups:
        return {}
    scores, parts = trajectory_scores(groups, components)
    names = [part.trajectory_id for group in groups for part in group.trajectories]
    return {
        name: Credit(float(scores[index]), {part: float(values[index]) for part, values in parts.items()})
        for index, name in enumerate(names)
    }


def _held_out_episode(task: Task, episode: Episode, rewards: _Rewards) -> HeldOutEpisode:
    """An episode as evaluations keep it; `rewards` by policy and trajectory."""
    return HeldOutEpisode(
        task=content_of(task),
        task_id=task.task_id,
        source=task.source,
        seed=episode.seed,
        status=episode.status,
        success=_solved(episode),
        turns=len(episode.turns),
        sampled_tokens=sum(len(turn.sampled_ids) for turn in episode.turns),
        outcome={outcome: float(value) for outcome, value in episode.outcome.items()},
        rewards={
            policy: _mean(scores[part.trajectory_id] for part in parts)
            for policy, scores in rewards.items()
            if (parts := trajectories_of([episode], policy))
        },
        prompt_tokens=sum(len(turn.prompt_ids) for turn in episode.turns),
        kind=task.kind,
        answer=episode.answer,
    )


def _of_policy(
    policy: str, by_task: Iterable[Sequence[Episode]], rewards: Mapping[str, float] | None
) -> dict[str, Any]:
    """Results of a policy over the episodes of each task, every task with the same weight: success with its 95 %
    interval over tasks (Wilson); reward, where there is one, with its interval (normal approximation, from two tasks
    on); and the means of its outcomes."""
    groups = [parts for episodes in by_task if (parts := trajectories_of(episodes, policy))]
    if not groups:
        return {"trajectories": 0}
    parts = [part for group in groups for part in group]
    success_rate, low, high = _success(groups)
    return {
        "tasks": len(groups),
        "trajectories": len(parts),
        "success_rate": success_rate,
        "low": low,
        "high": high,
        **({} if rewards is None else _reward_of(groups, rewards)),
        "outcomes": _means(groups),
    }


def _reward_of(by_task: Sequence[Sequence[Trajectory]], rewards: Mapping[str, float]) -> dict[str, float]:
    means = [_mean(rewards[part.trajectory_id] for part in parts) for parts in by_task]
    mean = _mean(means)
    if len(means) < 2:
        return {"reward_mean": mean}
    half = 1.96 * float(np.std(means, ddof=1)) / math.sqrt(len(means))
    return {"reward_mean": mean, "reward_low": mean - half, "reward_high": mean + half}


def _solved(played: Episode | Trajectory) -> float:
    return float(played.outcome.get("success", 0.0) >= 1.0)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / max(len(found), 1)


def _mean_of_tasks(by_task: Sequence[Sequence[_P]], value: Callable[[_P], float]) -> float:
    """Mean of the tasks' means: a task has the weight of one, however many samples or draws of it were played."""
    return _mean(_mean(map(value, samples)) for samples in by_task)


def _success(by_task: Sequence[Sequence[_P]]) -> tuple[float, float, float]:
    """Mean success over the tasks, and its 95 % interval with the number of tasks as sample size: samples of one task
    are not independent observations."""
    share = _mean_of_tasks(by_task, _solved)
    return share, *wilson(share * len(by_task), len(by_task))


def _means(by_task: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Mean of each outcome over the tasks that have it."""
    means: dict[str, list[float]] = {}
    for parts in by_task:
        values: dict[str, list[float]] = {}
        for part in parts:
            for name, value in part.outcome.items():
                values.setdefault(name, []).append(value)
        for name, found in values.items():
            means.setdefault(name, []).append(_mean(found))
    return {name: _mean(found) for name, found in means.items()}
