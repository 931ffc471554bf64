"""What to play next and what to train on next: admission, evaluation and batches over the ledger."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
from ml_collections import ConfigDict

from flowjax.config import policy_configs
from flowjax.dataflow.algorithms.base import Candidate, Result, build_algorithms
from flowjax.dataflow.ledger import Kind, Ledger, Selection, Stream
from flowjax.dataflow.rows import CreditedBatch, credit_batch
from flowjax.monitor.metrics import MetricsWriter, wilson
from flowjax.records import Episode, Group, Lease, Task
from flowjax.rewards.scores import trajectory_scores

MOST_PASSED_OVER = 256  # tasks in a row that the data algorithms may refuse


class Flow:
    """The tasks, groups and batches of a run's policies.

    Staleness is bounded twice. At admission: a group is opened only while for some policy

        unused groups < (serving version + max_staleness + 1 - batches made) * fresh groups per step

    so that it will be trained at most `max_staleness` versions after the one it is played with. And when a batch is
    served: a group with an older token is dropped and counted, and another task is opened in its place. No policy waits
    for another: the groups that a slower one has no use for in time are dropped from its stream alone.
    """

    def __init__(
        self,
        config: ConfigDict,
        run_dir: Path,
        *,
        train_tasks: grain.MapDataset[Task],
        held_out_tasks: grain.MapDataset[Task],
        clock: Callable[[], float] = time.time,
    ):
        self._config, self._run_dir, self._clock = config, run_dir, clock
        self._configs = policy_configs(config)
        self._train_tasks, self._held_out_tasks = train_tasks, held_out_tasks
        self._ledger = Ledger(
            run_dir / "dataflow.sqlite",
            lease_s=config.dataflow.lease_s,
            max_attempts=config.dataflow.max_attempts,
            clock=clock,
        )
        self._metrics = MetricsWriter(run_dir)
        self._algorithms = build_algorithms(config)
        for name, state in self._ledger.states().items():
            self._algorithms[name].restore(state)
        self._passed_over = self._forced = 0  # tasks that an algorithm did not choose, and those played in spite of it
        self._oldest: dict[tuple[str, str], int] = {}  # version of a policy's oldest token in a group
        self._eval_started_s: dict[str, float] = {}
        self.serving = dict.fromkeys(self._configs, -1)  # newest versions that the engine serves; -1 before version 0
        self.committed = dict.fromkeys(self._configs, -1)  # newest versions that the trainers have committed

    def close(self) -> None:
        self._ledger.close()

    @property
    def policies(self) -> Sequence[str]:
        return list(self._configs)

    def report_serving(self, policy: str, version: int) -> int:
        """Note what the engine serves. Returns the policy's oldest version that must stay loaded."""
        self.serving[policy] = max(self.serving[policy], version)
        self._open_evaluation()
        pinned = [versions[policy] for versions in self._ledger.evaluations("open").values()]
        return min([max(self.serving[policy] - self._config.dataflow.max_staleness, 0), *pinned])

    def lease(self, worker: str, slots: int, kind: Kind | None = None) -> list[Lease]:
        """Up to `slots` episodes to play; none when nothing is admissible now."""
        if min(self.serving.values()) < 0:
            return []
        self._expire()
        leases = self._ledger.lease(worker, slots, kind)
        while len(leases) < slots and kind != "eval" and self._open_next_group():
            leases += self._ledger.lease(worker, slots - len(leases), kind)
        return leases

    def renew(self, lease_ids: Sequence[str]) -> list[str]:
        return self._ledger.renew(lease_ids)

    def give_back(self, lease_ids: Sequence[str], error: str) -> None:
        self._settled(self._ledger.give_back(lease_ids, error, count_attempt=bool(error)))

    def accept(self, lease_id: str, episode: Episode) -> bool:
        """Take in a played episode; False when it does not count (a duplicate, or of another run)."""
        counted, settled = self._ledger.accept(lease_id, episode)
        self._settled(settled)
        return counted

    def _judge(self) -> None:
        """Let the data algorithms decide on what has come in. All are told of it, also where one has refused."""
        for policy, group_id in self._ledger.settled():
            keep = True
            if self._algorithms:
                result = _result(self._ledger.group(group_id, policy), policy, self._configs[policy])
                verdicts = [algorithm.keep(result) for algorithm in self._algorithms.values()]
                keep = all(verdicts)
            self._ledger.judge(policy, group_id, keep=keep, states=self._states())

    def _states(self) -> dict[str, Any]:
        return {name: algorithm.state() for name, algorithm in self._algorithms.items()}

    def batch(self, policy: str, step: int) -> tuple[CreditedBatch, int] | None:
        """What turns the policy's version `step` into `step + 1`, and how many groups were dropped as too old; None:
        wait."""
        config = self._configs[policy]
        self._judge()
        dropped_before = self._ledger.count_streams(policy).get("dropped", 0)
        group_ids = self._ledger.assign(policy, step, partial(self._select, policy, step))
        if group_ids is None:
            return None
        groups = [self._ledger.group(group_id, policy) for group_id in group_ids]
        batch = credit_batch(
            groups,
            components=config.reward.components.to_dict(),
            estimator=config.credit.name,
            options=config.credit.options.to_dict(),
        )
        if config.dataflow.keep_trajectories:
            self._write_trajectories(policy, step, groups)
        return batch, self._ledger.count_streams(policy).get("dropped", 0) - dropped_before

    def _select(self, policy: str, step: int, ready: list[Stream], used: list[Stream]) -> Selection:
        """The groups of a batch, and those that are too old for any."""
        config = self._configs[policy]
        groups = config.trainer.groups_per_step
        candidates = [self._candidate(stream, policy, step) for stream in ready]
        again = [self._candidate(stream, policy, step) for stream in used]
        fresh = [each for each in candidates if each.age_versions <= config.dataflow.max_staleness]
        stale = [each.group_id for each in candidates if each.age_versions > config.dataflow.max_staleness]
        chosen: Sequence[Candidate] = fresh
        for algorithm in self._algorithms.values():
            chosen = algorithm.serve(chosen, again, groups)
        return ([each.group_id for each in chosen[:groups]] if len(chosen) >= groups else None), stale

    def _candidate(self, stream: Stream, policy: str, step: int) -> Candidate:
        age_versions = step - self._oldest_version(stream.group_id, policy)
        return Candidate(stream.group_id, stream.arrival, age_versions, stream.batches)

    def commit(self, policy: str, version: int) -> None:
        """The policy's trainer has committed a checkpoint of `version`."""
        if version > self.committed[policy]:
            for algorithm in self._algorithms.values():
                algorithm.published(policy, version)
        self.committed[policy] = max(self.committed[policy], version)
        self._ledger.close_batches(policy, version - self._configs[policy].trainer.keep_checkpoints)

    @property
    def finished(self) -> bool:
        """Whether all training is committed and every evaluation is in."""
        if self._ledger.evaluations("open"):
            return False
        evaluated = self._ledger.evaluations().values()
        if self._config.eval.versions:
            return {step for versions in evaluated for step in versions.values()} >= set(self._config.eval.versions)
        last = self._last_versions()
        trained = all(self.committed[policy] >= version for policy, version in last.items())
        return trained and (not self._config.eval.tasks or last in evaluated)

    def status(self) -> dict[str, Any]:
        """Counts for the live screen; the first policy's where there are several, and all of them by policy."""
        by_policy = {}
        for policy in self._configs:
            streams = self._ledger.count_streams(policy)
            by_policy[policy] = {
                "version": self.serving[policy],
                "committed": self.committed[policy],
                **{f"{state}_groups": streams.get(state, 0) for state in ("ready", "open", "dropped")},
            }
        algorithms = {name: algorithm.metrics() for name, algorithm in self._algorithms.items()}
        return {
            **next(iter(by_policy.values())),
            "policies": by_policy,
            **self._ledger.count_episodes(),
            "passed_over_tasks": self._passed_over,
            "forced_tasks": self._forced,
            "algorithms": algorithms,
        }

    def _last_versions(self) -> dict[str, int]:
        return {policy: config.trainer.steps for policy, config in self._configs.items()}

    def _open_next_group(self) -> bool:
        """Open the next training task if the staleness bound and the length of the run admit it for some policy."""
        config = self._config
        learning = [policy for policy, last in self._last_versions().items() if self.committed[policy] < last]
        if config.eval.versions or not any(map(self._admits, learning)):
            return False
        position, task = self._choose()
        seeds = [_episode_seed(config.seed, position, member) for member in range(config.rollout.group_size)]
        self._ledger.add_group(
            f"train-{position:08d}",
            task,
            seeds,
            kind="train",
            position=position,
            temperature=config.rollout.temperature,
            policies=learning,
            states=self._states(),
        )
        return True

    def _choose(self) -> tuple[int, Task]:
        """The next task that every algorithm chooses, or the one after `MOST_PASSED_OVER` that some did not."""
        start = self._ledger.count_groups()
        for position in range(start, start + MOST_PASSED_OVER):
            task = _task(self._train_tasks, position)
            if all(algorithm.choose(task, position) for algorithm in self._algorithms.values()):
                return position, task
            self._passed_over += 1
            self._ledger.add_group(f"train-{position:08d}", task, (), kind="train", position=position, policies=())
        self._forced += 1
        return start + MOST_PASSED_OVER, _task(self._train_tasks, start + MOST_PASSED_OVER)

    def _admits(self, policy: str) -> bool:
        config = self._configs[policy]
        streams = self._ledger.count_streams(policy)
        unused = sum(streams.get(state, 0) for state in ("open", "settled", "ready"))
        made, serving = self._ledger.batches(policy), self.serving[policy]
        ahead = min(serving + config.dataflow.max_staleness + 1, config.trainer.steps) - made
        fresh_share = math.prod(algorithm.fresh_share for algorithm in self._algorithms.values())
        groups = config.trainer.groups_per_step
        admitted = ahead * math.ceil(groups * fresh_share)
        if made <= serving and ahead > 0:  # the trainer waits: there may be nothing to replay yet
            admitted = max(admitted, groups)
        return unused < admitted

    def _open_evaluation(self) -> None:
        """Evaluate the versions that are served now, if that is due and not done yet."""
        config, versions = self._config, dict(self.serving)
        name = ",".join(f"{policy}@{version}" for policy, version in versions.items())
        if min(versions.values()) < 0 or not config.eval.tasks or not self._evaluation_due(versions):
            return
        if name in self._ledger.evaluations():
            return
        for index in range(config.eval.tasks):
            self._ledger.add_group(
                f"eval-{name}-{index:06d}",
                _task(self._held_out_tasks, index),
                [_episode_seed(0, index, 0)],
                kind="eval",
                position=index,
                temperature=config.eval.temperature,
                evaluation=name,
                versions=versions,
            )
        self._eval_started_s[name] = self._clock()

    def _evaluation_due(self, versions: Mapping[str, int]) -> bool:
        """At the start, at the end, and when the slowest policy has made another `eval.every_steps`."""
        config = self._config
        if config.eval.versions:
            return set(versions.values()) <= set(config.eval.versions)
        if not any(versions.values()) or versions == self._last_versions():
            return True
        every, slowest = config.eval.every_steps, min(versions.values())
        if not every or slowest < every:
            return False
        evaluated = [min(earlier.values()) for earlier in self._ledger.evaluations().values()]
        return slowest // every > max(evaluated, default=0) // every

    def _expire(self) -> None:
        self._settled(self._ledger.expire())

    def _settled(self, group_ids: Sequence[str]) -> None:
        if not group_ids:
            return
        self._judge()
        unfinished = self._ledger.evaluations("open")
        for name, versions in self._ledger.evaluations("ready").items():
            if name not in unfinished:
                self._finish_evaluation(name, versions)

    def _oldest_version(self, group_id: str, policy: str) -> int:
        if (group_id, policy) not in self._oldest:
            turns = [turn for part in self._ledger.group(group_id, policy).trajectories for turn in part.turns]
            self._oldest[group_id, policy] = min((turn.version for turn in turns), default=0)
        return self._oldest[group_id, policy]

    def _finish_evaluation(self, name: str, versions: Mapping[str, int]) -> None:
        episodes = [episode for group_id in self._ledger.evaluated(name) for episode in self._ledger.episodes(group_id)]
        successes = sum(episode.outcome.get("success", 0.0) >= 1.0 for episode in episodes)
        low, high = wilson(successes, len(episodes))
        turns = sum(len(episode.turns) for episode in episodes)
        version = min(versions.values())
        self._metrics.write(
            "eval",
            step=version,
            version=version,
            versions=dict(versions),
            episodes=len(episodes),
            unfinished=self._config.eval.tasks - len(episodes),
            success_rate=successes / max(len(episodes), 1),
            low=low,
            high=high,
            turns_mean=turns / max(len(episodes), 1),
            env_return_mean=sum(e.outcome.get("env_return", 0.0) for e in episodes) / max(len(episodes), 1),
            policies={policy: self._evaluated(policy, episodes) for policy in self._configs},
            seconds=self._clock() - self._eval_started_s.get(name, self._clock()),
        )
        self._ledger.close_evaluation(name)

    def _evaluated(self, policy: str, episodes: Sequence[Episode]) -> dict[str, float]:
        """How a policy did in these episodes: success with its Wilson interval, mean reward with that of the normal
        approximation, both of 95 %."""
        parts = [part for episode in episodes for part in episode.trajectories if part.policy == policy and part.turns]
        if not parts:
            return {"trajectories": 0}
        group = Group("evaluation", Task("", "", 0), parts)
        rewards, _ = trajectory_scores([group], self._configs[policy].reward.components.to_dict())
        mean, half = float(np.mean(rewards)), 1.96 * float(np.std(rewards)) / math.sqrt(len(parts))
        successes = sum(part.outcome.get("success", 0.0) >= 1.0 for part in parts)
        low, high = wilson(successes, len(parts))
        return {
            "trajectories": len(parts),
            "success_rate": successes / len(parts),
            "low": low,
            "high": high,
            "reward_mean": mean,
            "reward_low": mean - half,
            "reward_high": mean + half,
        }

    def _write_trajectories(self, policy: str, step: int, groups: Sequence[Group]) -> None:
        path = self._run_dir / "trajectories" / policy / f"{step:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for group in groups for line in _readable(group)))


def _result(group: Group, policy: str, config: ConfigDict) -> Result:
    rewards, _ = trajectory_scores([group], config.reward.components.to_dict())
    longest = [max(len(turn.sampled_ids) for turn in trajectory.turns) for trajectory in group.trajectories]
    return Result(group.group_id, group.task, policy, np.asarray(rewards), np.array(longest))


def _task(tasks: grain.MapDataset[Task], index: int) -> Task:
    task = tasks[index]
    if task is None:
        raise ValueError(f"the task source filtered out task {index}: a source of tasks must have every index")
    return task


def _episode_seed(seed: int, position: int, member: int) -> int:
    return (seed * 1_000_003 + position) * 4096 + member


def _readable(group: Group) -> list[dict[str, Any]]:
    """One JSON-able map per trajectory."""
    return [
        {
            "trajectory_id": trajectory.trajectory_id,
            "task_id": trajectory.task_id,
            "status": trajectory.status,
            "outcome": dict(trajectory.outcome),
            "turns": [
                {
                    "version": turn.version,
                    "state_key": f"{turn.state_key:016x}",
                    "next_state_key": f"{turn.next_state_key:016x}",
                    "reward": turn.env_reward,
                    "valid": turn.valid,
                    "terminal": turn.terminal,
                    "prompt_ids": turn.prompt_ids.tolist(),
                    "sampled_ids": turn.sampled_ids.tolist(),
                    "logprobs": [round(float(value), 6) for value in turn.logprobs],
                }
                for turn in trajectory.turns
            ],
        }
        for trajectory in group.trajectories
    ]
