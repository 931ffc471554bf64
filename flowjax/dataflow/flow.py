"""What to play next and what to train on next: admission, evaluation and batches over the ledger."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
from ml_collections import ConfigDict

from flowjax.dataflow.ledger import Lease, Ledger
from flowjax.dataflow.rows import CreditedBatch, credit_batch
from flowjax.monitor.metrics import MetricsWriter, wilson
from flowjax.records import Group, Task, Trajectory


class Flow:
    """One policy's tasks, groups and batches.

    Staleness is bounded twice. At admission: a group is opened only while

        groups opened < (serving version + max_staleness + 1) * groups per step

    so that it will be trained at most `max_staleness` versions after the one it is played with. And when a batch is
    served: a group with an older token is dropped and counted, and another task is opened in its place.
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
        self._train_tasks, self._held_out_tasks = train_tasks, held_out_tasks
        self._ledger = Ledger(
            run_dir / "dataflow.sqlite",
            lease_s=config.dataflow.lease_s,
            max_attempts=config.dataflow.max_attempts,
            clock=clock,
        )
        self._metrics = MetricsWriter(run_dir)
        self._oldest: dict[str, int] = {}  # version of the oldest token of a group
        self._eval_started_s: dict[int, float] = {}
        self.serving = -1  # newest version that the engine serves; -1 before version 0 is there
        self.committed = -1  # newest version that the trainer has committed

    def close(self) -> None:
        self._ledger.close()

    def report_serving(self, version: int) -> int:
        """Note what the engine serves. Returns the oldest version that must stay loaded."""
        self.serving = max(self.serving, version)
        self._open_evaluations()
        pinned = self._ledger.eval_versions("open")
        return min([max(self.serving - self._config.dataflow.max_staleness, 0), *pinned])

    def lease(self, worker: str, slots: int, kind: str | None = None) -> list[Lease]:
        """Up to `slots` episodes to play; none when nothing is admissible now."""
        if self.serving < 0:
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

    def accept(self, lease_id: str, trajectory: Trajectory) -> bool:
        """Take in a played episode; False when it does not count (a duplicate, or of another run)."""
        counted, settled = self._ledger.accept(lease_id, trajectory)
        self._settled(settled)
        return counted

    def batch(self, step: int) -> tuple[CreditedBatch, int] | None:
        """What turns version `step` into `step + 1`, and how many groups were dropped as too old; None: wait."""
        config = self._config
        oldest = step - config.dataflow.max_staleness
        dropped_before = self._ledger.count_groups("train").get("dropped", 0)
        group_ids = self._ledger.assign(
            step, config.trainer.groups_per_step, usable=lambda group_id: self._oldest_version(group_id) >= oldest
        )
        if group_ids is None:
            return None
        groups = [self._ledger.group(group_id) for group_id in group_ids]
        batch = credit_batch(
            groups,
            components=config.reward.components.to_dict(),
            estimator=config.credit.name,
            options=config.credit.options.to_dict(),
        )
        if config.dataflow.keep_trajectories:
            self._write_trajectories(step, groups)
        return batch, self._ledger.count_groups("train").get("dropped", 0) - dropped_before

    def commit(self, version: int) -> None:
        """The trainer has committed a checkpoint of `version`."""
        self.committed = max(self.committed, version)
        self._ledger.close_batches(version - self._config.trainer.keep_checkpoints)

    @property
    def finished(self) -> bool:
        """Whether all training is committed and every evaluation is in."""
        if self._ledger.eval_versions("open"):
            return False
        if self._config.eval.versions:
            return set(self._config.eval.versions) <= set(self._ledger.eval_versions())
        evaluated = not self._config.eval.tasks or self._config.trainer.steps in self._ledger.eval_versions()
        return self.committed >= self._config.trainer.steps and evaluated

    def status(self) -> dict[str, Any]:
        """Counts for the live screen."""
        groups = self._ledger.count_groups("train")
        return {
            "version": self.serving,
            "committed": self.committed,
            "ready_groups": groups.get("ready", 0),
            "open_groups": groups.get("open", 0),
            "dropped_groups": groups.get("dropped", 0),
            **self._ledger.count_episodes(),
        }

    def _open_next_group(self) -> bool:
        """Open the next training task if the staleness bound and the length of the run admit it."""
        config = self._config
        if config.eval.versions:
            return False
        counts = self._ledger.count_groups("train")
        position = sum(counts.values())
        versions = min(self.serving + config.dataflow.max_staleness + 1, config.trainer.steps)
        if position - counts.get("dropped", 0) >= versions * config.trainer.groups_per_step:
            return False
        seeds = [_episode_seed(config.seed, position, member) for member in range(config.rollout.group_size)]
        self._ledger.add_group(
            f"train-{position:08d}", _task(self._train_tasks, position), seeds, kind="train", position=position
        )
        return True

    def _open_evaluations(self) -> None:
        config, version = self._config, self.serving
        if version in self._ledger.eval_versions() or not config.eval.tasks:
            return
        if config.eval.versions:
            due = version in config.eval.versions
        else:
            every = config.eval.every_steps
            due = version in (0, config.trainer.steps) or bool(every and version % every == 0)
        if not due:
            return
        for index in range(config.eval.tasks):
            self._ledger.add_group(
                f"eval-{version}-{index:06d}",
                _task(self._held_out_tasks, index),
                [_episode_seed(0, index, 0)],
                kind="eval",
                position=index,
                version=version,
            )
        self._eval_started_s[version] = self._clock()

    def _expire(self) -> None:
        self._settled(self._ledger.expire())

    def _settled(self, group_ids: Sequence[str]) -> None:
        if not any(group_id.startswith("eval") for group_id in group_ids):
            return
        for version in self._ledger.eval_versions("ready"):
            if not self._ledger.count_groups("eval", version).get("open"):
                self._finish_evaluation(version)

    def _oldest_version(self, group_id: str) -> int:
        if group_id not in self._oldest:
            turns = [turn for trajectory in self._ledger.group(group_id).trajectories for turn in trajectory.turns]
            self._oldest[group_id] = min((turn.version for turn in turns), default=0)
        return self._oldest[group_id]

    def _finish_evaluation(self, version: int) -> None:
        trajectories = [
            trajectory
            for group_id in self._ledger.ready("eval", version)
            for trajectory in self._ledger.group(group_id).trajectories
        ]
        successes = sum(trajectory.outcome.get("success", 0.0) >= 1.0 for trajectory in trajectories)
        low, high = wilson(successes, len(trajectories))
        self._metrics.write(
            "eval",
            step=version,
            version=version,
            episodes=len(trajectories),
            unfinished=self._config.eval.tasks - len(trajectories),
            success_rate=successes / max(len(trajectories), 1),
            low=low,
            high=high,
            turns_mean=sum(len(t.turns) for t in trajectories) / max(len(trajectories), 1),
            env_return_mean=sum(t.outcome.get("env_return", 0.0) for t in trajectories) / max(len(trajectories), 1),
            seconds=self._clock() - self._eval_started_s.get(version, self._clock()),
        )
        self._ledger.close_eval(version)

    def _write_trajectories(self, step: int, groups: Sequence[Group]) -> None:
        path = self._run_dir / "trajectories" / f"{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for group in groups for line in _readable(group)))


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
