"""Groups in: episodes that were played become groups, of which the data algorithms keep some for the trainers."""

from collections.abc import Mapping, Sequence

from flowjax.dataflow.algorithms.base import Chain, Result
from flowjax.dataflow.ledger import Ledger
from flowjax.dataflow.policies import PolicyStatus
from flowjax.records import Episode

Played = tuple[str, Episode]  # an episode, after the id of the lease that it was played under


class Groups:
    """Takes in what workers played or gave up, and lets the data algorithms decide on groups that are complete by it.

    Groups of a policy that has fallen far behind the others are dropped for it alone, the oldest first: more are opened
    for the others than it can use.
    """

    def __init__(self, ledger: Ledger, algorithms: Chain, policies: Mapping[str, PolicyStatus]):
        self._ledger, self._algorithms, self._policies = ledger, algorithms, policies

    def accept_all(self, played: Sequence[Played], *, worker: str = "") -> list[bool]:
        """Take in episodes, all of them or none; `worker` is who sends them. Returns for each whether it counts: no
        duplicate does, and none of another run."""
        with self._ledger.transaction():
            counts = [self._ledger.accept(lease_id, episode, worker) for lease_id, episode in played]
        self._completed([group_id for _, complete in counts for group_id in complete])
        return [counted for counted, _ in counts]

    def give_back(self, lease_ids: Sequence[str], error: str) -> None:
        """Let others play these episodes; one that was given back with an error has used up an attempt."""
        self._completed(self._ledger.give_back(lease_ids, error, count_attempt=bool(error)))

    def expire(self) -> None:
        """Take back the leases of workers that are no longer heard of."""
        self._completed(self._ledger.expire())

    def _completed(self, group_ids: Sequence[str]) -> None:
        if group_ids:
            self.filter()
            self._drop_overflow()

    def filter(self) -> None:
        """Let the data algorithms decide on what has come in. All see it, also where one has refused.

        Where a process died, or a disk was full, between the last episode of a group and this, the group is still
        complete and nothing else: whoever makes the next batch calls this first.
        """
        for policy, group_id in self._ledger.complete_groups():
            keep = True
            if self._algorithms.by_name:
                components = self._policies[policy].settings.reward.components.to_dict()
                keep = self._algorithms.keep(Result.of(self._ledger.group(group_id, policy), policy, components))
            with self._algorithms.state_changes() as changes:
                self._ledger.filter(policy, group_id, keep=keep, changes=changes)

    def _drop_overflow(self) -> None:
        for policy in self._policies.values() if len(self._policies) > 1 else ():
            ready = sorted(self._ledger.groups(policy.name, "ready"), key=lambda group: group.arrival)
            oldest = ready[: max(len(ready) - policy.most_ready, 0)]
            self._ledger.drop(policy.name, [group.group_id for group in oldest], "overflow")

    @property
    def full(self) -> bool:
        """True while every policy that still learns has more groups than it may have, and no trainer waits for one."""
        learning = [policy for policy in self._policies.values() if policy.learns]
        return bool(learning) and not any(
            policy.is_waiting or self._ledger.count_by_state(policy.name).get("ready", 0) <= policy.most_ready
            for policy in learning
        )

    def by_kind(self, played: Sequence[Played]) -> tuple[list[Played], list[Played]]:
        """Episodes of evaluations, and of training."""
        kinds = [self._ledger.kind_of(episode.episode_id) for _, episode in played]
        evaluation = [item for item, kind in zip(played, kinds, strict=True) if kind == "eval"]
        return evaluation, [item for item, kind in zip(played, kinds, strict=True) if kind != "eval"]
