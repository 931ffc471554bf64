"""Tasks out, and groups in: which episodes a worker is given to play, which groups are opened for that, and which of
the played groups the data algorithms keep for the trainers."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import grain

from flowjax.dataflow.algorithms import Candidate, Chain, Result, fresh_groups
from flowjax.dataflow.ledger import Kind, Ledger
from flowjax.dataflow.policies import PolicyStatus, RolloutWorkers
from flowjax.dataflow.tasks import episode_seed, task_at
from flowjax.monitor.trouble import is_machine_fault
from flowjax.records import Episode, Lease, Task
from flowjax.run import Run

KINDS: frozenset[Kind] = frozenset({"train", "eval"})
MOST_PASSED_OVER = 256  # tasks in a row that the data algorithms may refuse
_LEAST_KEPT = 0.1  # lowest share of kept groups that is planned with: at most ten are opened for one that is missing
_SPREAD = 1.0  # so many standard deviations fewer groups than expected may be kept before a batch lacks any
_LOOK_S = 1.0  # from one call of `make_up_time` to the next
_STALL_S = 3.0  # without a call: longer than the delay of a busy machine


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Worlds, policies and kinds of episode that a rollout worker can play; None is any."""

    worlds: frozenset[str] | None = None
    policies: frozenset[str] | None = None
    kinds: frozenset[Kind] = KINDS

    def policies_fit(self, speaking: Collection[str]) -> bool:
        """True if it can play every policy that speaks in the run's episodes."""
        return self.policies is None or self.policies >= set(speaking)


ANYTHING = Capabilities()


class Leases:
    """Leases episodes to workers, and opens training groups when workers ask for more. A group is opened only while,
    for some policy,

        usable groups < (version + max_staleness + 1 - batches made) * fresh groups per step

    where `version` is the one that the asking worker plays with, so that the group is trained on at most
    `max_staleness` versions later. Usable are groups that are ready, and those under way as far as the data algorithms
    can be relied on to keep them: n of them count as p n - sqrt(p (1 - p) n (1 + n / m)), where a share p of the m
    newest was kept. So all that a batch lacks, divided by the share that is kept, is opened at once, not one round
    after another (the adaptive batch of GRESO, arXiv 2506.02177). If all are kept, n count as n. Groups too old for the
    next batch are not usable.

    No policy waits for another: groups that a slower policy cannot use in time are dropped for it alone. But while all
    policies are within a batch of each other, a group is opened only when all have room, or when one that has room has
    less than a whole batch: a group opened for one alone would be too old at the others' turn, and as many again would
    be opened for these. Where one trainer trains them all in turns, a policy of which it still holds a batch also
    counts the groups that will be opened for all at the others' turn.

    A worker whose version is more than `max_staleness` behind the newest plays evaluations only, until it has caught
    up; one that is behind at all is given no group that was opened for a newer version. A worker that is much slower
    than another leaves training to it, as long as that one has room.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        algorithms: Chain,
        tasks: grain.MapDataset[Task],
        policies: Mapping[str, PolicyStatus],
        workers: RolloutWorkers,
        evaluations: Callable[[], Mapping[str, Mapping[str, int]]],
    ):
        config = run.config
        self._config, self._ledger, self._algorithms = config, ledger, algorithms
        self._tasks, self._policies, self._workers, self._evaluations = tasks, policies, workers, evaluations
        # Policies that speak for an agent of the workflow; all of them where the config names no agents.
        self._played = (set(config.agents.values()) & set(policies)) or set(policies)

    def lease(self, worker: str, slots: int, playable: Capabilities = ANYTHING) -> list[Lease]:
        """Up to `slots` episodes that the worker can play; none when nothing is admissible now.

        Evaluation gets its share of the worker's slots first, then training the rest; what either leaves idle is the
        other's. An evaluation is pinned to its versions: a worker that says that it lacks one is given none of it, as
        long as another worker may have that version.
        """
        if any(policy.serving < 0 for policy in self._policies.values()) or not playable.policies_fit(self._played):
            return []
        held = self._ledger.held(worker)
        newest = {policy.name: policy.serving for policy in self._policies.values()}
        serving = self._workers.serving(worker, newest)
        may_train = "train" in playable.kinds and self._workers.may_train(serving, newest)
        trains = may_train and not self._workers.yields(worker, newest)
        evaluation = self._evaluation_slots(slots + sum(held.values())) if trains else slots
        evaluated = self._evaluations()
        lacking = [name for name, versions in evaluated.items() if self._workers.lacks(worker, versions)]
        leases: list[Lease] = []
        if "eval" in playable.kinds:
            self._workers.asks_evaluation(worker)
            free = max(min(evaluation - held.get("eval", 0), slots), 0)
            leases += self._ledger.lease(worker, free, "eval", playable.worlds, without=lacking)
        if trains:
            leases += self._ledger.lease(worker, slots - len(leases), "train", playable.worlds, serving)
            while len(leases) < slots and self._open_group(serving):
                leases += self._ledger.lease(worker, slots - len(leases), "train", playable.worlds, serving)
        elif may_train:  # only episodes that another worker failed at: the faster one does not get these again
            free = slots - len(leases)
            leases += self._ledger.lease(worker, free, "train", playable.worlds, serving, tried_by_others=True)
        if "eval" in playable.kinds and len(leases) < slots:
            leases += self._ledger.lease(worker, slots - len(leases), "eval", playable.worlds, without=lacking)
        self._workers.began(worker, [lease.lease_id for lease in leases])
        return leases

    def _evaluation_slots(self, total: int) -> int:
        """Number of a worker's slots that an evaluation may take before training does."""
        slots = self._config.eval.slots
        return min(math.ceil(round(slots * total, 6)) if slots < 1 else int(slots), total)  # ceil(0.07 * 100) is 8

    def _open_group(self, serving: Mapping[str, int]) -> bool:
        """Open the next training task, to be played with these versions, if the staleness bound and the length of the
        run admit it for some policy."""
        config = self._config
        learning = [policy for policy in self._policies.values() if policy.learns]
        admitting = [policy for policy in learning if self._admits(policy, serving[policy.name])]
        if not admitting or (len(admitting) < len(learning) and self._can_wait(admitting, learning)):
            return False
        position, task, forced = self._choose()
        self._algorithms.chosen(task, position)
        seeds = [episode_seed(config.seed, position, member) for member in range(config.rollout.group_size)]
        # The group is opened for every policy that learns, also for those that did not ask: they speak in its episodes.
        with self._algorithms.state_changes("chosen", position) as changes:
            self._ledger.add_group(
                f"train-{position:08d}",
                task,
                seeds,
                kind="train",
                position=position,
                temperature=config.rollout.temperature,
                policies=[policy.name for policy in learning],
                serving=serving,
                forced=forced,
                changes=changes,
            )
        return True

    def _choose(self) -> tuple[int, Task, bool]:
        """Position of the next task that every algorithm chooses, that task, and False. After `MOST_PASSED_OVER` tasks
        that some algorithm refused it is the next one, whatever they say, and the third value is True: forced."""
        start = self._ledger.count_groups()
        for position in range(start, start + MOST_PASSED_OVER):
            task = task_at(self._tasks, position)
            if self._algorithms.choose(task, position):
                return position, task, False
            self._ledger.pass_over(f"train-{position:08d}", task, position=position)
        return start + MOST_PASSED_OVER, task_at(self._tasks, start + MOST_PASSED_OVER), True

    def _admits(self, policy: PolicyStatus, version: int) -> bool:
        """True if another group that is played with that version will be trained on before it is too old."""
        trainer, dataflow = policy.settings.trainer, self._config.dataflow
        made = self._ledger.batches_made(policy.name)
        # A group opened now may be in batches up to version + max_staleness. Batches count from 0, so these are that
        # many plus one; those that are made need no groups any more.
        ahead = min(version + dataflow.max_staleness + 1, trainer.steps) - made
        groups = trainer.groups_per_step
        admitted = ahead * fresh_groups(groups, self._algorithms.fresh_share)
        if made <= policy.serving and ahead > 0:  # the trainer waits: fresh groups stand in for missing replays
            admitted = max(admitted, groups - self._count_replayed(policy.name, made, groups))
        if dataflow.max_ready_groups:
            admitted = min(admitted, policy.most_ready)
        return self._usable(policy, made) < admitted

    def _can_wait(self, admitting: Sequence[PolicyStatus], learning: Sequence[PolicyStatus]) -> bool:
        """True if a new group can wait until all policies have room: all are within a batch of each other, and each of
        those that have room now has a whole batch, counting what will be opened for all at the others' turn."""
        made = {policy.name: self._ledger.batches_made(policy.name) for policy in learning}
        if max(made.values()) - min(made.values()) > 1:
            return False
        share = self._algorithms.fresh_share
        needed = {policy.name: fresh_groups(policy.settings.trainer.groups_per_step, share) for policy in learning}
        # The least number of groups that will be opened for all at the others' turn; 0 if one of these is at its end.
        to_come = 0
        if not self._config.separate_trainers:
            others = [policy for policy in learning if policy not in admitting]
            has_turn = all(made[other.name] < other.settings.trainer.steps for other in others)
            to_come = min(needed[other.name] for other in others) if has_turn else 0
        return all(
            self._usable(policy, made[policy.name]) + (to_come if made[policy.name] > policy.serving else 0)
            >= needed[policy.name]
            for policy in admitting
        )

    def _usable(self, policy: PolicyStatus, made: int) -> float:
        """Groups for batch `made` of a policy and those after it: see the class."""
        ready, under_way = self._ledger.unused(policy.name, made - self._config.dataflow.max_staleness)
        return ready + self._kept_of(policy.name, under_way)

    def _count_replayed(self, policy: str, step: int, groups: int) -> int:
        """Number of groups in batch `step` that would be replayed ones."""
        if self._algorithms.fresh_share == 1:
            return 0
        used = [
            Candidate(each.group_id, each.arrival, step - each.oldest_version, each.batches)
            for each in self._ledger.groups(policy, "used")
        ]
        return min(len(self._algorithms.serve([], used, groups)), groups)

    def _kept_of(self, policy: str, groups: int) -> float:
        """Number of these groups that are relied on to be kept: the expected one less `_SPREAD` standard deviations."""
        share, known = self._ledger.keep_share(policy)
        share = max(share, _LEAST_KEPT)
        # Binomial variance p (1 - p) n of the number kept; times 1 + n / m, because p itself is measured over m groups.
        variance = share * (1 - share) * groups * (1 + groups / known)
        return max(share * groups - _SPREAD * math.sqrt(variance), _LEAST_KEPT * groups)


# --------------------------------------------------------------------------------------------------------------- groups

LeasedEpisode = tuple[str, Episode]  # id of a lease, and the episode that was played under it


class Groups:
    """Takes in episodes that workers played or gave up, and lets the data algorithms decide on groups that this
    completes.

    Groups of a policy that has fallen far behind the others are dropped for it alone, the oldest first: more are opened
    for the others than it can use.
    """

    def __init__(
        self,
        ledger: Ledger,
        algorithms: Chain,
        policies: Mapping[str, PolicyStatus],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._ledger, self._algorithms, self._policies, self._clock = ledger, algorithms, policies, clock
        self._hearing_s = clock()  # up to then, renewals are known to have been taken
        self._renewal_failed = False  # the newest renewal, as on a full disk

    def accept_all(self, played: Sequence[LeasedEpisode], *, worker: str = "") -> list[bool]:
        """Take in the episodes that `worker` sends, all of them or none. Returns for each whether it was taken in, also
        as a failure; a duplicate or an episode of another run is not."""
        with self._ledger.transaction():
            accepted = [self._ledger.accept(lease_id, episode, worker) for lease_id, episode in played]
        self._completed([group_id for _, complete in accepted for group_id in complete])
        return [new for new, _ in accepted]

    def give_back(self, lease_ids: Sequence[str], error: str) -> None:
        """Let others play these episodes; one that was given back with an error has used up an attempt."""
        self._completed(self._ledger.give_back(lease_ids, error, count_attempt=bool(error)))

    def renew(self, lease_ids: Sequence[str]) -> list[str]:
        """Give these leases a full term from now; returns those that are no longer held."""
        self.make_up_time()
        self._renewal_failed = True  # stays so if the next line raises, as on a full disk
        lost = self._ledger.renew(lease_ids)
        self._renewal_failed = False
        return lost

    def expire(self) -> None:
        """Take back the leases that no worker has renewed in time."""
        self.make_up_time()
        self._completed(self._ledger.expire())

    def make_up_time(self) -> None:
        """Move all deadlines later by the time in which no renewal could be taken, because this process stood still or
        its disk was full: the workers were not silent then. Must be called every second: a pause of more than
        `_STALL_S` between two calls is itself taken for such a time."""
        now_s = self._clock()
        if self._renewal_failed or now_s - self._hearing_s > _STALL_S:
            # Less the second between two calls: else no lease would ever run out where every call is late.
            late_s = max(now_s - self._hearing_s - _LOOK_S, 0.0)
            self._ledger.put_off(late_s)  # fails, too, while nothing can be written
        self._hearing_s, self._renewal_failed = now_s, False

    def _completed(self, group_ids: Sequence[str]) -> None:
        if group_ids:
            self.filter()
            self._drop_overflow()

    def filter(self) -> None:
        """Let the data algorithms decide on groups that are complete. All of them see each, also if one has refused it.

        If the process died, or the disk was full, between a group's last episode and this, the group is still in the
        state `complete`: the next batch calls this first.
        """
        for policy, group_id in self._ledger.complete_groups():
            keep = not self._algorithms.by_name or self._keeps(policy, group_id)
            with self._algorithms.state_changes("keep", (policy, group_id)) as changes:
                self._ledger.filter(policy, group_id, keep=keep, changes=changes)

    def _keeps(self, policy: str, group_id: str) -> bool:
        """True if the algorithms keep the group, or if no reward can be given for it, so that they cannot be asked: the
        batch that gets it puts it aside with the reason (`Batches.try_credit`)."""
        components = self._policies[policy].settings.reward.components.to_dict()
        group = self._ledger.group(group_id, policy)
        try:
            result = Result.of(group, policy, components)
        except Exception as error:
            if is_machine_fault(error):
                raise
            return True
        return self._algorithms.keep(result)

    def _drop_overflow(self) -> None:
        # A single policy's groups are bounded where they are opened: `Leases` opens none that it has no use for.
        for policy in self._policies.values() if len(self._policies) > 1 else ():
            ready = sorted(self._ledger.groups(policy.name, "ready"), key=lambda group: group.arrival)
            oldest = ready[: max(len(ready) - policy.most_ready, 0)]
            self._ledger.drop(policy.name, [group.group_id for group in oldest], "overflow")

    @property
    def full(self) -> bool:
        """True while every policy that still learns has more ready groups than may wait, and no trainer waits for any.
        Training episodes are not taken in then (backpressure)."""
        learning = [policy for policy in self._policies.values() if policy.learns]
        return bool(learning) and not any(
            policy.is_waiting or self._ledger.count_by_state(policy.name).get("ready", 0) <= policy.most_ready
            for policy in learning
        )

    def by_kind(self, played: Sequence[LeasedEpisode]) -> tuple[list[LeasedEpisode], list[LeasedEpisode]]:
        """Episodes of evaluations, and of training."""
        kinds = [self._ledger.kind_of(episode.episode_id) for _, episode in played]
        evaluation = [item for item, kind in zip(played, kinds, strict=True) if kind == "eval"]
        return evaluation, [item for item, kind in zip(played, kinds, strict=True) if kind != "eval"]
