"""What to play next and what to train on next: leases, evaluation and batches over the ledger."""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
from ml_collections import ConfigDict

from flowjax.broker import Superseded
from flowjax.config import policy_configs
from flowjax.dataflow.admission import Admission
from flowjax.dataflow.algorithms.base import Result, build_algorithms
from flowjax.dataflow.algorithms.chain import Chain
from flowjax.dataflow.evaluations import Evaluations
from flowjax.dataflow.ledger import Kind, Ledger
from flowjax.dataflow.rows import CreditedBatch, credit_batch
from flowjax.dataflow.selection import select
from flowjax.dataflow.transcripts import write_transcripts
from flowjax.dataflow.workers import ANYTHING, Can
from flowjax.models.config import vocabulary_sizes
from flowjax.monitor.metrics import MetricsWriter, read_metrics
from flowjax.monitor.trouble import is_machine_fault
from flowjax.record_checks import Bounds, Leased
from flowjax.records import Episode, Group, Lease, Task
from flowjax.rewards.scores import required_outcomes, trajectory_scores

_LONGEST_REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups that a batch is made of, and how many others were dropped as too old."""

    groups: Sequence[Group]
    dropped: int


class Flow:
    """The tasks, groups and batches of a run's policies.

    Staleness is bounded twice: at admission, and when a batch is served, where a group with an older token is dropped
    and counted, and another task is opened in its place. No policy waits for another: the groups that a slower one has
    no use for in time are dropped for it alone.
    """

    def __init__(
        self,
        config: ConfigDict,
        run_dir: Path,
        *,
        train_tasks: grain.MapDataset[Task],
        held_out_tasks: grain.MapDataset[Task],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._run_dir, self._clock = config, run_dir, clock
        self._configs = policy_configs(config)
        self._ledger = Ledger(
            run_dir / "dataflow.sqlite",
            lease_s=config.dataflow.lease_s,
            max_attempts=config.dataflow.max_attempts,
            failed=config.dataflow.failed_episodes,
            min_group_size=min(config.dataflow.min_group_size, config.rollout.group_size),
            clock=clock,
        )
        self._metrics = MetricsWriter(run_dir)
        self._evaluations = Evaluations(config, self._ledger, self._metrics, held_out_tasks, clock)
        self._evaluations.write_finished()  # what a process before this one had no time for
        self._algorithms = Chain(build_algorithms(config), self._ledger.states())
        self._trained_ages = {policy: self._newest_ages(policy) for policy in self._configs}
        self._told: dict[str, int] = {}  # the step of it
        self._speaking = (set(config.agents.values()) & set(self._configs)) or set(self._configs)
        self.needed_outcomes = {  # by policy, for its reward
            policy: required_outcomes(own.reward.components.to_dict()) for policy, own in self._configs.items()
        }
        self.bounds = Bounds.of_run(config, vocabulary_sizes(config))
        self.serving = dict.fromkeys(self._configs, -1)  # newest versions that the engine serves; -1 before version 0
        self.committed = dict.fromkeys(self._configs, -1) | self._ledger.commits()  # newest ones, by the trainers
        self._found = {policy: self.newest_checkpoint(policy) for policy in self._configs}
        self._admission = Admission(
            config, self._ledger, self._algorithms, train_tasks, serving=self.serving, committed=self.committed
        )

    def close(self) -> None:
        self._ledger.close()

    @property
    def policies(self) -> Sequence[str]:
        return list(self._configs)

    @property
    def frozen(self) -> Collection[str]:
        """Models that speak in the run's episodes and are not trained: what they do is part of no group."""
        return set(self._config.agents.values()) - set(self._configs)

    def newest_version(self, policy: str) -> int:
        """The newest version that there can be: each takes a batch. Where the ledger is new, or older than the
        checkpoints that this process found when it started, those tell."""
        made = max(self._ledger.batches(policy), self.committed[policy], *self._config.eval.versions, 0)
        return max(made, self._found[policy] if made else self.newest_checkpoint(policy))

    def newest_checkpoint(self, policy: str) -> int:
        """The newest version in the run's folder, 0 where there is none."""
        folder = self._run_dir / "checkpoints" / policy
        return max((int(step.name) for step in folder.glob("[0-9]*") if step.name.isdecimal()), default=0)

    def oldest_kept(self, policy: str) -> int:
        """The oldest version whose checkpoint the policy's trainer may still go back to."""
        return max(self.committed[policy] - self._configs[policy].trainer.keep_checkpoints, 0)

    def report_serving(self, policy: str, version: int) -> int:
        """Note what the engine serves. Returns the policy's oldest version that must stay loaded."""
        self.serving[policy] = max(self.serving[policy], version)
        self._evaluations.open(self.serving)
        pinned = self._evaluations.pinned(policy)
        return min([max(self.serving[policy] - self._config.dataflow.max_staleness, 0), *pinned])

    def lease(self, worker: str, slots: int, kind: Kind | None = None, can: Can = ANYTHING) -> list[Lease]:
        """Up to `slots` episodes that the worker can play; none when nothing is admissible now.

        Evaluation gets its share of the worker's slots first, then training the rest; what either leaves idle is the
        other's.
        """
        kinds = can.kinds & {kind} if kind else can.kinds
        if min(self.serving.values()) < 0 or not can.policies_fit(self._speaking):
            return []
        self._expire()
        held = self._ledger.held(worker)
        own = self._evaluations.slots(slots + sum(held.values())) if "train" in kinds else slots
        leases: list[Lease] = []
        if "eval" in kinds:
            own_left = max(min(own - held.get("eval", 0), slots), 0)
            leases += self._ledger.lease(worker, own_left, "eval", can.worlds)
        if "train" in kinds:
            leases += self._ledger.lease(worker, slots - len(leases), "train", can.worlds)
            while len(leases) < slots and self._admission.open_next():
                leases += self._ledger.lease(worker, slots - len(leases), "train", can.worlds)
        if "eval" in kinds and len(leases) < slots:
            leases += self._ledger.lease(worker, slots - len(leases), "eval", can.worlds)
        return leases

    @property
    def full(self) -> bool:
        """Whether there is no room for more episodes of training."""
        return self._admission.full

    def renew(self, lease_ids: Sequence[str]) -> list[str]:
        return self._ledger.renew(lease_ids)

    def give_back(self, lease_ids: Sequence[str], error: str) -> None:
        self._completed(self._ledger.give_back(lease_ids, error, count_attempt=bool(error)))

    def leased(self, lease_id: str, episode_id: str) -> Leased | None:
        """See `Ledger.leased`."""
        return self._ledger.leased(lease_id, episode_id)

    def accept(self, lease_id: str, episode: Episode) -> bool:
        """Take in a played episode; False when it does not count (a duplicate, or of another run)."""
        return self.accept_all([(lease_id, episode)])[0]

    def accept_all(self, played: Sequence[tuple[str, Episode]], *, worker: str = "") -> list[bool]:
        """Take in episodes with their leases, all of them or none; `worker` is who sends them."""
        with self._ledger.transaction():
            taken = [self._ledger.accept(lease_id, episode, worker) for lease_id, episode in played]
        self._completed([group_id for _, complete in taken for group_id in complete])
        return [counted for counted, _ in taken]

    def by_kind(
        self, played: Sequence[tuple[str, Episode]]
    ) -> tuple[list[tuple[str, Episode]], list[tuple[str, Episode]]]:
        """Episodes of evaluations, and of training."""
        kinds = [self._ledger.kind_of(episode.episode_id) for _, episode in played]
        evaluation = [item for item, kind in zip(played, kinds, strict=True) if kind == "eval"]
        return evaluation, [item for item, kind in zip(played, kinds, strict=True) if kind != "eval"]

    def _filter(self) -> None:
        """Let the data algorithms decide on what has come in. All are told of it, also where one has refused."""
        for policy, group_id in self._ledger.complete_groups():
            keep = True
            if self._algorithms.by_name:
                keep = self._algorithms.keep(
                    _result(self._ledger.group(group_id, policy), policy, self._configs[policy])
                )
            with self._algorithms.learnt() as learnt:
                self._ledger.filter(policy, group_id, keep=keep, learnt=learnt)

    def batch(self, policy: str, step: int) -> tuple[CreditedBatch, int] | None:
        """What turns the policy's version `step` into `step + 1`, and how many groups were dropped as too old; None:
        wait."""
        taken = self.take(policy, step)
        return None if taken is None else (self.credit(policy, step, taken.groups), taken.dropped)

    def take_first(self, steps: Mapping[str, int]) -> "tuple[str, Taken] | None":
        """The batch of the first of these policies that has one for its step; None: wait."""
        for policy, step in steps.items():
            if taken := self.take(policy, step):
                return policy, taken
        return None

    def take(self, policy: str, step: int) -> "Taken | None":
        """The groups of the policy's batch `step`; None: wait."""
        self._filter()
        dropped_before = self._ledger.count_dropped(policy)
        config = self._configs[policy]
        limits = {"groups": config.trainer.groups_per_step, "max_staleness": config.dataflow.max_staleness}
        group_ids = self._ledger.assign(policy, step, partial(select, self._algorithms, step=step, **limits))
        if group_ids is None:
            self._admission.starved.add(policy)
            return None
        self._admission.starved.discard(policy)
        dropped = self._ledger.count_dropped(policy) - dropped_before
        groups = [self._ledger.group(group_id, policy) for group_id in group_ids]
        newest = step == self._ledger.batches(policy) - 1  # a late copy may ask for one of before
        if newest and self._told.get(policy) != step:
            self._tell(policy, step, groups)
        return Taken(groups, dropped)

    def _tell(self, policy: str, step: int, groups: Sequence[Group]) -> None:
        """Write down what a batch is made of, and what has come to nothing so far."""
        self._trained_ages[policy] = _token_ages(groups, step)
        counts = self._ledger.counts()
        self._metrics.write(
            "batch",
            step=step + 1,
            policy=policy,
            groups=len(groups),
            tasks=self._ledger.count_groups(),  # how far the order of tasks is: see `_behind_lost`
            episodes=sum(len(group.trajectories) for group in groups),
            ages=self._trained_ages[policy],
            sources=dict(Counter(group.task.source for group in groups if group.task.source)),
            failed=_under(counts.get("", {}), "failed/"),
            dropped=_under(counts.get(policy, {}), "dropped/"),
            quarantined=counts.get("", {}).get("quarantined", 0),
            short_groups=counts.get("", {}).get("short_groups", 0),
        )
        self._told[policy] = step  # last: a line that a full disk refused is written when the batch is asked for again

    def _newest_ages(self, policy: str) -> dict[str, int]:
        """Ages of the tokens of the newest batch that there is."""
        step = self._ledger.batches(policy) - 1
        groups = [self._ledger.group(group_id, policy) for group_id in self._ledger.batch(policy, step)]
        return _token_ages(groups, step)

    def credit(self, policy: str, step: int, groups: Sequence[Group]) -> CreditedBatch:
        """The rows of a batch. Touches no state of the flow: it may run in a thread."""
        if self._configs[policy].dataflow.keep_trajectories:
            write_transcripts(self._run_dir, policy, step, groups)
        return self._credit(policy, groups)

    def _credit(self, policy: str, groups: Sequence[Group]) -> CreditedBatch:
        config = self._configs[policy]
        return credit_batch(
            groups,
            components=config.reward.components.to_dict(),
            estimator=config.credit.name,
            options=config.credit.options.to_dict(),
            trained=np.concatenate([self._trained(group, policy) for group in groups]),
        )

    def uncreditable(self, policy: str, groups: Sequence[Group]) -> dict[str, str]:
        """Of a batch whose credit fails, the first trajectory of each group that it fails for alone, and why.

        Raises:
            Exception: it fails for one because of the machine, which says nothing about the group.
        """
        reasons = {}
        for group in groups:
            try:
                self._credit(policy, [group])
            except Exception as error:
                if is_machine_fault(error):
                    raise
                reason = f"no credit can be given: {type(error).__name__}: {error}"
                reasons[group.trajectories[0].trajectory_id] = reason[:_LONGEST_REASON]
        return reasons

    def quarantine(self, policy: str, step: int, reasons: Mapping[str, str]) -> list[str]:
        """Put the groups of the policy's batch `step` aside that hold these trajectories; the batch is made anew, and
        other tasks are played in their place. Returns the groups.

        Raises:
            StepError: it is no longer the newest batch.
        """
        groups = self._ledger.quarantine(policy, step, reasons)
        for group_id in groups:
            logging.warning("%s, step %d: group %s is put aside: %s", policy, step, group_id, reasons)
        if groups:
            self._told.pop(policy, None)  # what the new batch is made of is another line
        return groups

    def _trained(self, group: Group, policy: str) -> np.ndarray:
        """Which of a group's trajectories the loss may have."""
        if not self._algorithms.by_name:
            return np.ones(len(group.trajectories), bool)
        return self._algorithms.trains(_result(group, policy, self._configs[policy]))

    def claim(self, trainer: str, versions: Mapping[str, int], after: int) -> tuple[bool, int]:
        """Make `trainer` the one of these policies, from these versions on: see `Ledger.claim`."""
        lost = {policy: version - self._ledger.batches(policy) for policy, version in versions.items()}
        position = self._behind_lost(lost) if max(lost.values()) > 0 else 0
        claimed, epoch = self._ledger.claim(trainer, versions, after, position=position)
        self.committed.update(self._ledger.commits())
        return claimed, epoch

    def _behind_lost(self, lost: Mapping[str, int]) -> int:
        """A position in the order of tasks behind all that these many batches can have taken: behind what the log says
        of the newest batch, and as much again as may have been open beside it."""
        known = max(
            (line.get("tasks", 0) for line in read_metrics(self._run_dir) if line["kind"] == "batch"), default=0
        )
        configs = [(self._configs[policy], max(n, 0) + 1) for policy, n in lost.items()]
        most = max((n + own.dataflow.max_staleness) * own.trainer.groups_per_step for own, n in configs)
        return max(known, self._ledger.count_groups()) + most

    def fence(self, policies: Collection[str], epoch: int) -> None:
        """Let only the trainer that claimed these policies last go on.

        Raises:
            Superseded: `epoch` is not its epoch.
        """
        for policy in policies:
            if (newest := self._ledger.epoch(policy)) != epoch:
                problem = (
                    f"epoch {epoch} is over, {policy} is in epoch {newest}: a trainer that was started later has it"
                )
                if epoch > newest:  # of a copy of the ledger that was ahead
                    problem = f"epoch {epoch} was never given, {policy} is in epoch {newest}"
                raise Superseded(f"{problem}. A policy has one trainer: end this one, or start it anew")

    def flush_checkpoint(self, policy: str, version: int) -> None:
        """Have a checkpoint on the disk, not only in memory that a power cut loses. Touches no state: it may run in a
        thread. What is not there is left out: a version of one's own may be kept elsewhere."""
        folder = self._run_dir / "checkpoints" / policy
        for path in [*(folder / str(version)).rglob("*"), folder / str(version), folder]:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def commit(self, policy: str, version: int) -> None:
        """The policy's trainer has committed a checkpoint of `version`."""
        if version > self.committed[policy]:
            self._algorithms.published(policy, version)
            with self._algorithms.learnt() as learnt:
                self._ledger.commit(policy, version, learnt=learnt)
        self.committed[policy] = max(self.committed[policy], version)
        kept_versions = max(self._configs[policy].trainer.keep_checkpoints, self._algorithms.keeps_used_versions)
        self._ledger.close_batches(policy, version - kept_versions)

    @property
    def finished(self) -> bool:
        """Whether all training is committed and every evaluation is in."""
        last, asked = self._last_versions(), set(self._config.eval.versions)
        if not asked and any(self.committed[policy] < version for policy, version in last.items()):
            return False
        return self._evaluations.finished

    def status(self) -> dict[str, Any]:
        """Counts for the live screen; the first policy's where there are several, and all of them by policy."""
        counts = self._ledger.counts()
        by_policy = {policy: self._policy_status(policy, counts.get(policy, {})) for policy in self._configs}
        of_all = counts.get("", {})
        return {
            **next(iter(by_policy.values())),
            "policies": by_policy,
            **self._ledger.count_episodes(),
            "quarantined": of_all.get("quarantined", 0),
            "short_groups": of_all.get("short_groups", 0),
            "failed": _under(of_all, "failed/"),
            "last_failures": self._ledger.last_failures(),
            "put_aside": self._ledger.put_aside(),
            "opened_groups": self._ledger.count_groups(),
            "passed_over_tasks": of_all.get("passed_over", 0),
            "forced_tasks": of_all.get("forced", 0),
            "algorithms": self._algorithms.metrics(),
        }

    def _policy_status(self, policy: str, counts: Mapping[str, int]) -> dict[str, Any]:
        by_state, step = self._ledger.count_by_state(policy), self._ledger.batches(policy)
        ages = Counter(max(step - group.oldest_version, 0) for group in self._ledger.groups(policy, "ready"))
        return {
            "version": self.serving[policy],
            "committed": self.committed[policy],
            "lag": max(self.committed[policy] - self.serving[policy], 0),
            **{f"{state}_groups": by_state.get(state, 0) for state in ("ready", "open", "quarantined")},
            "dropped_groups": self._ledger.count_dropped(policy),
            "dropped": _under(counts, "dropped/"),
            "ages": {str(age): groups for age, groups in sorted(ages.items())},
            "trained_ages": self._trained_ages[policy],
        }

    def _last_versions(self) -> dict[str, int]:
        return {policy: config.trainer.steps for policy, config in self._configs.items()}

    def _expire(self) -> None:
        self._completed(self._ledger.expire())
        self._evaluations.write_finished()  # a full disk may have refused its line when the last episode came in

    def _completed(self, group_ids: Sequence[str]) -> None:
        if not group_ids:
            return
        self._filter()
        self._admission.shed()
        self._evaluations.write_finished()


def _result(group: Group, policy: str, config: ConfigDict) -> Result:
    rewards, _ = trajectory_scores([group], config.reward.components.to_dict())
    longest = [max(len(turn.sampled_ids) for turn in trajectory.turns) for trajectory in group.trajectories]
    return Result(group.group_id, group.task, policy, np.asarray(rewards), np.array(longest))


def _token_ages(groups: Sequence[Group], step: int) -> dict[str, int]:
    """Sampled tokens by their age in versions, where version `step` trains on them."""
    ages: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                ages[step - turn.version] += len(turn.sampled_ids)
    return {str(age): tokens for age, tokens in sorted(ages.items())}


def _under(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
