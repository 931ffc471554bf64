"""Rollout services that play for one run on a clock of its own, and a trainer that fetches its next batch ahead.

No engine, no process: a service has slots, a time that a turn takes, and a time after which it serves a version that
was committed. It asks for episodes whenever it has a slot free, as `flowjax.rollout.service` does.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowjax.records import Lease
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
    version: int = -1
    playing: int = 0


@dataclass(frozen=True)
class Figures:
    """Groups that were trained on and dropped as too old in a run, its time, and how long its trainer waited of it."""

    trained: int
    too_old: int
    total_s: float
    waited_s: float

    @property
    def too_old_share(self) -> float:
        return self.too_old / (self.trained + self.too_old)

    @property
    def waited_share(self) -> float:
        return self.waited_s / self.total_s


class Simulation:
    """One run of `steps` steps, each of which takes the trainer `step_s`."""

    def __init__(
        self, folder: Path, services: Sequence[Service], *, step_s: float, steps: int, seed: int, max_staleness: int = 1
    ):
        config = configuration(max_staleness=max_staleness, keep_trajectories=False, lease_s=1e6)
        config.rollout.group_size, config.eval.tasks = MEMBERS, 0
        config.trainer.update({"steps": steps, "groups_per_step": GROUPS})
        self._now_s = 0.0
        self._flow = make_flow(folder, config, clock=lambda: self._now_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # events of one moment stay in order
        self._services = deque(services)  # who has waited longest for episodes first
        self._step_s, self._steps, self._seed, self._random = step_s, steps, seed, random.Random(seed)
        self._batches = 0  # that the trainer has been given
        self._fetched = self._training = False
        self._commits_s: list[float] = []
        self._started_s = self._idle_since_s = self._waited_s = 0.0

    def run(self) -> Figures:
        for service in self._services:
            self._at(service.joins_s + service.lag_s, partial(self._serve, service))
        while len(self._commits_s) < self._steps:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        too_old = self._flow.ledger.count_causes("dropped", "agent").get("too_old", 0)
        self._flow.close()
        return Figures(self._batches * GROUPS, too_old, self._now_s - self._started_s, self._waited_s)

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    # ------------------------------------------------------------------------------------------------------- services

    def _serve(self, service: Service) -> None:
        """Have the service serve the newest version that it has got by now."""
        version = sum(commit_s <= self._now_s - service.lag_s + 1e-9 for commit_s in self._commits_s)
        if version > service.version and self._now_s >= service.joins_s:
            service.version = version
            self._flow.workers.report(service.name, "agent", version)
            self._flow.report_serving("agent", version)
            self._offer()

    def _offer(self) -> None:
        """Give a batch and episodes to whoever waits for them, until there is nothing more."""
        self._fetch()
        passed_over = 0
        while passed_over < len(self._services):
            service = self._services[0]
            self._services.rotate(-1)
            free = service.slots - service.playing if service.version >= 0 else 0
            leases = self._flow.leases.lease(service.name, free) if free else []
            self._flow.workers.left_free(service.name, free - len(leases))
            passed_over = 0 if leases else passed_over + 1
            for lease in leases:
                service.playing += 1
                self._turn(service, lease, service.version, self._turns(lease))

    def _turns(self, lease: Lease) -> int:
        task, member = random.Random(f"{self._seed} {lease.group_id}"), random.Random(f"{self._seed} {lease.seed}")
        longer = member.randint(1, 6) if member.random() < 0.3 else 0
        return min(task.choice(_TURNS) + longer, LONGEST_TURNS)

    def _turn(self, service: Service, lease: Lease, oldest: int, left: int) -> None:
        """Play an episode of which so many turns are left, the oldest so far by that version."""
        if left:
            self._at(self._now_s + service.turn_s, partial(self._turn, service, lease, oldest, left - 1))
            return
        service.playing -= 1
        self._flow.workers.ended(service.name, lease.lease_id, counts=True)
        flows.accept_all(self._flow, [(lease.lease_id, played(lease, version=oldest, turns=1))], worker=service.name)
        self._offer()

    # -------------------------------------------------------------------------------------------------------- trainer

    def _fetch(self) -> None:
        if not self._fetched and self._batches < self._steps and flows.take(self._flow, "agent", self._batches):
            self._fetched, self._batches = True, self._batches + 1
        if self._fetched and not self._training:
            if self._batches == 1:
                self._started_s = self._idle_since_s = self._now_s
            self._waited_s += self._now_s - self._idle_since_s
            self._fetched, self._training = False, True
            self._at(self._now_s + self._step_s, self._commit)
            self._fetch()  # the next one while this one is trained on

    def _commit(self) -> None:
        self._training, self._idle_since_s = False, self._now_s
        self._commits_s.append(self._now_s)
        self._flow.batches.commit("agent", len(self._commits_s))
        for service in self._services:
            late_s = service.lag_s * self._random.uniform(1.0, 1.5)  # none is always the first
            self._at(self._now_s + late_s, partial(self._serve, service))
        self._offer()
