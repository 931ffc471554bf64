"""Rollout services that play for one run on a clock of its own, and trainers that fetch their next batch ahead.

No engine, no process: a service has slots, a time that a turn takes, and a time after which it serves a version that
was committed. It asks for episodes whenever it has a slot free, as `flowjax.rollout.service` does.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from flowjax.records import Episode, Lease
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, played

GROUPS, MEMBERS, LONGEST_TURNS = 8, 4, 12  # of a batch, of a group, of an episode
_TURNS = (1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8, 9, LONGEST_TURNS, LONGEST_TURNS)  # of a task


@dataclass
class Service:
    """A rollout service, from `joins_s` on. It serves a version about `lag_s` after its commit."""

    name: str
    slots: int = 32
    turn_s: float = 0.1
    lag_s: float = 0.05
    joins_s: float = 0.0
    versions: dict[str, int] = field(default_factory=dict)  # that it serves, by policy
    playing: int = 0


@dataclass(frozen=True)
class Figures:
    """Groups that were trained on and dropped as too old in a run, summed over its policies, and groups that were
    opened; its time, and how long its trainers waited of it, in the mean."""

    trained: int
    too_old: int
    opened: int
    total_s: float
    waited_s: float

    @property
    def too_old_share(self) -> float:
        return self.too_old / (self.trained + self.too_old)

    @property
    def waited_share(self) -> float:
        return self.waited_s / self.total_s


@dataclass
class _Trainer:
    """A trainer of some policies, in the order in which their batches come."""

    policies: Sequence[str]
    fetched: str = ""  # policy whose batch it has, beside the one that it trains on
    training: str = ""
    idle_since_s: float = 0.0
    waited_s: float = 0.0


class Simulation:
    """One run in which each policy makes `steps` steps, each of which takes its trainer `step_s`. The policies have one
    trainer, or each its own (`separate`); all of them speak in every episode."""

    def __init__(
        self,
        folder: Path,
        services: Sequence[Service],
        *,
        step_s: float,
        steps: int,
        seed: int,
        max_staleness: int = 1,
        policies: Sequence[str] = ("agent",),
        separate: bool = False,
    ):
        config = configuration(max_staleness=max_staleness, keep_trajectories=False, lease_s=1e6)
        config.rollout.group_size, config.eval.tasks = MEMBERS, 0
        config.trainer.update({"steps": steps, "groups_per_step": GROUPS})
        config.policies = {policy: {} for policy in policies}
        config.separate_trainers = separate
        self._now_s = 0.0
        self._flow = make_flow(folder, config, clock=lambda: self._now_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # events of one moment stay in order
        self._services = deque(services)  # who has waited longest for episodes first
        self._step_s, self._steps, self._seed, self._random = step_s, steps, seed, random.Random(seed)
        self._trainers = [_Trainer([policy]) for policy in policies] if separate else [_Trainer(policies)]
        self._batches = dict.fromkeys(policies, 0)  # that its trainer has been given
        self._commits_s: dict[str, list[float]] = {policy: [] for policy in policies}
        self._started_s: float | None = None  # when the first batch was there

    def run(self) -> Figures:
        for service in self._services:
            self._at(service.joins_s + service.lag_s, partial(self._serve, service))
        while min(map(len, self._commits_s.values())) < self._steps:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        ledger, trained = self._flow.ledger, sum(self._batches.values()) * GROUPS
        too_old = sum(ledger.count_causes("dropped", policy).get("too_old", 0) for policy in self._commits_s)
        opened = ledger.count_groups()
        self._flow.close()
        waited_s = sum(trainer.waited_s for trainer in self._trainers) / len(self._trainers)
        return Figures(trained, too_old, opened, self._now_s - (self._started_s or 0.0), waited_s)

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    # ------------------------------------------------------------------------------------------------------- services

    def _serve(self, service: Service) -> None:
        """Have the service serve the newest versions that it has got by now."""
        if self._now_s < service.joins_s:
            return
        got = {
            policy: sum(commit_s <= self._now_s - service.lag_s + 1e-9 for commit_s in commits_s)
            for policy, commits_s in self._commits_s.items()
        }
        if got != service.versions:
            service.versions = got
            for policy, version in got.items():
                self._flow.workers.report(service.name, policy, version)
                self._flow.report_serving(policy, version)
            self._offer()

    def _offer(self) -> None:
        """Give a batch and episodes to whoever waits for them, until there is nothing more."""
        self._fetch()
        passed_over = 0
        while passed_over < len(self._services):
            service = self._services[0]
            self._services.rotate(-1)
            free = service.slots - service.playing if service.versions else 0
            leases = self._flow.leases.lease(service.name, free) if free else []
            self._flow.workers.left_free(service.name, free - len(leases))
            passed_over = 0 if leases else passed_over + 1
            for lease in leases:
                service.playing += 1
                self._turn(service, lease, service.versions, self._turns(lease))

    def _turns(self, lease: Lease) -> int:
        task, member = random.Random(f"{self._seed} {lease.group_id}"), random.Random(f"{self._seed} {lease.seed}")
        longer = member.randint(1, 6) if member.random() < 0.3 else 0
        return min(task.choice(_TURNS) + longer, LONGEST_TURNS)

    def _turn(self, service: Service, lease: Lease, oldest: dict[str, int], left: int) -> None:
        """Play an episode of which so many turns are left, the oldest so far by those versions."""
        if left:
            self._at(self._now_s + service.turn_s, partial(self._turn, service, lease, oldest, left - 1))
            return
        service.playing -= 1
        self._flow.workers.ended(service.name, lease.lease_id, counts=True)
        flows.accept_all(self._flow, [(lease.lease_id, _episode(lease, oldest))], worker=service.name)
        self._offer()

    # ------------------------------------------------------------------------------------------------------- trainers

    def _fetch(self) -> None:
        for trainer in self._trainers:
            while not trainer.fetched and self._take(trainer):
                if self._started_s is None:
                    self._started_s = self._now_s
                    for each in self._trainers:
                        each.idle_since_s = self._now_s
                if not trainer.training:
                    self._train(trainer)

    def _take(self, trainer: _Trainer) -> bool:
        """Have the trainer take the next batch of one of its policies, of the one that is behind first."""
        steps = {policy: self._batches[policy] for policy in trainer.policies if self._batches[policy] < self._steps}
        self._flow.groups.filter()
        taken = self._flow.batches.take_first(dict(sorted(steps.items(), key=lambda item: item[1]))) if steps else None
        if taken:
            trainer.fetched = taken[0]
            self._batches[taken[0]] += 1
        return taken is not None

    def _train(self, trainer: _Trainer) -> None:
        trainer.waited_s += self._now_s - trainer.idle_since_s
        trainer.training, trainer.fetched = trainer.fetched, ""
        self._at(self._now_s + self._step_s, partial(self._commit, trainer))

    def _commit(self, trainer: _Trainer) -> None:
        policy, trainer.training, trainer.idle_since_s = trainer.training, "", self._now_s
        if trainer.fetched:
            self._train(trainer)
        self._commits_s[policy].append(self._now_s)
        self._flow.batches.commit(policy, len(self._commits_s[policy]))
        for service in self._services:
            late_s = service.lag_s * self._random.uniform(1.0, 1.5)  # none is always the first
            self._at(self._now_s + late_s, partial(self._serve, service))
        self._offer()


def _episode(lease: Lease, versions: dict[str, int]) -> Episode:
    """An episode in which each policy spoke once, with that version."""
    episode = played(lease, version=0, turns=1)
    (part,) = episode.trajectories
    parts = [
        replace(
            part,
            trajectory_id=f"{part.trajectory_id}/{policy}",
            policy=policy,
            turns=[replace(turn, policy=policy, version=version) for turn in part.turns],
        )
        for policy, version in versions.items()
    ]
    return replace(episode, trajectories=parts)
