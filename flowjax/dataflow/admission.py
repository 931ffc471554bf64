"""Which task is played next, and whether one may be."""

import math
from collections.abc import Mapping

import grain
from ml_collections import ConfigDict

from flowjax.config import policy_configs
from flowjax.dataflow.algorithms.chain import Chain
from flowjax.dataflow.ledger import Ledger
from flowjax.dataflow.selection import count_replayed
from flowjax.dataflow.task_sources import episode_seed, task_at
from flowjax.records import Task

MOST_PASSED_OVER = 256  # tasks in a row that the data algorithms may refuse
_LEAST_KEPT = 0.1  # share of groups that is planned with at least: no more than ten are opened for one that is missing
_SPREAD = 1.0  # standard deviations by which fewer groups may be kept than expected without a second round


class Admission:
    """Opens the groups of training. One is opened only while for some policy

        usable groups < (serving version + max_staleness + 1 - batches made) * fresh groups per step

    so that it will be trained at most `max_staleness` versions after the one it is played with. Usable are those that
    are ready, and those under way as far as the data algorithms can be relied on to keep them: n of them count as
    p n - sqrt(p (1 - p) n (1 + n / m)), where a share p of the m newest was kept. So what a batch lacks is opened at
    once, divided by the share that is kept, not one round after the other (the adaptive batch of GRESO, arXiv
    2506.02177). Where all are kept, n count as n. Groups too old for the next batch are no longer usable.

    Args:
        serving: the newest version that the engine serves of each policy.
        committed: the newest version that each policy's trainer has made.
    """

    def __init__(
        self,
        config: ConfigDict,
        ledger: Ledger,
        algorithms: Chain,
        tasks: grain.MapDataset[Task],
        *,
        serving: Mapping[str, int],
        committed: Mapping[str, int],
    ):
        self._config, self._configs = config, policy_configs(config)
        self._ledger, self._algorithms, self._tasks = ledger, algorithms, tasks
        self._serving, self._committed = serving, committed
        self.starved: set[str] = set()  # policies whose trainer last asked in vain

    def open_next(self) -> bool:
        """Open the next training task if the staleness bound and the length of the run admit it for some policy."""
        config = self._config
        learning = self._learning()
        if config.eval.versions or not any(map(self._admits, learning)):
            return False
        position, task, forced = self._choose()
        self._algorithms.chosen(task, position)
        seeds = [episode_seed(config.seed, position, member) for member in range(config.rollout.group_size)]
        with self._algorithms.learnt() as learnt:
            self._ledger.add_group(
                f"train-{position:08d}",
                task,
                seeds,
                kind="train",
                position=position,
                temperature=config.rollout.temperature,
                policies=learning,
                serving=self._serving,
                forced=forced,
                learnt=learnt,
            )
        return True

    def _choose(self) -> tuple[int, Task, bool]:
        """The next task that every algorithm chooses, or the one after `MOST_PASSED_OVER` that some did not; and
        whether it is that."""
        start = self._ledger.count_groups()
        for position in range(start, start + MOST_PASSED_OVER):
            task = task_at(self._tasks, position)
            if self._algorithms.choose(task, position):
                return position, task, False
            self._ledger.pass_over(f"train-{position:08d}", task, position=position)
        return start + MOST_PASSED_OVER, task_at(self._tasks, start + MOST_PASSED_OVER), True

    def _admits(self, policy: str) -> bool:
        config = self._configs[policy]
        made, serving = self._ledger.batches(policy), self._serving[policy]
        ahead = min(serving + config.dataflow.max_staleness + 1, config.trainer.steps) - made
        groups = config.trainer.groups_per_step
        admitted = ahead * math.ceil(groups * self._algorithms.fresh_share)
        if made <= serving and ahead > 0:  # the trainer waits: there may be less to replay than is asked for
            used = self._ledger.groups(policy, "used")
            admitted = max(admitted, groups - count_replayed(self._algorithms, used, step=made, groups=groups))
        if config.dataflow.max_ready_groups:
            admitted = min(admitted, self._most_ready(policy))
        ready, under_way = self._ledger.unused(policy, made - config.dataflow.max_staleness)
        return ready + self._kept_of(policy, under_way) < admitted

    def _kept_of(self, policy: str, groups: int) -> float:
        """How many of these groups will be kept, all but surely."""
        share, known = self._ledger.keep_share(policy)
        share = max(share, _LEAST_KEPT)
        variance = share * (1 - share) * groups * (1 + groups / known)  # of the groups, and of the share itself
        return max(share * groups - _SPREAD * math.sqrt(variance), _LEAST_KEPT * groups)

    def shed(self) -> None:
        """Drop the oldest groups of a policy that has fallen far behind the others, for which groups are opened."""
        for policy in self._configs if len(self._configs) > 1 else ():
            ready = sorted(self._ledger.groups(policy, "ready"), key=lambda group: group.arrival)
            oldest = ready[: max(len(ready) - self._most_ready(policy), 0)]
            self._ledger.drop(policy, [group.group_id for group in oldest], "overflow")

    @property
    def full(self) -> bool:
        """Whether every policy that still learns has more groups than it may have, and no trainer waits for one."""
        learning = self._learning()
        return bool(learning) and not any(
            policy in self.starved or self._ledger.count_by_state(policy).get("ready", 0) <= self._most_ready(policy)
            for policy in learning
        )

    def _most_ready(self, policy: str) -> int:
        """Groups that may wait for a policy's trainer."""
        config = self._configs[policy]
        groups = config.trainer.groups_per_step
        return max(config.dataflow.max_ready_groups or 2 * (config.dataflow.max_staleness + 1) * groups, groups)

    def _learning(self) -> list[str]:
        """Policies that have not made their last version."""
        return [policy for policy, own in self._configs.items() if self._committed[policy] < own.trainer.steps]
