"""Random histories of a ledger, its workers and trainers, over a network and on a machine that both fail.

    python -m tests.dataflow.histories --count=100000 --processes=2

Messages are lost, sent twice, late and out of order; workers, trainers and the dataflow die at any moment; the power
fails, which loses what SQLite had not flushed and begins the clock anew; now and then somebody puts an older copy of
the ledger back. After every history: no group is in two batches of what a checkpoint has consumed, and every task that
was ever opened was trained on, waits, or was dropped and counted.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.dataflow.algorithms import Chain
from flowjax.dataflow.batches import select
from flowjax.dataflow.ledger import Ledger, StepError
from flowjax.records import Episode, Lease, Task, Trajectory, Turn

GROUPS, MEMBERS, STEPS, KEPT, LEASE_S = 2, 2, 5, 2, 10.0
_IDS, _LOGPROBS = np.array([1], np.int32), np.zeros(1, np.float32)
_EVENTS = (
    ["deliver"] * 50 + ["worker"] * 14 + ["trainer"] * 12 + ["clock"] * 2 + ["kill worker", "kill trainer", "second"]
)
_RARE = ["crash", "crash", "power", "copy"]


class Crash(Exception):
    """The dataflow's process dies here."""


@dataclass(frozen=True)
class Checkpoint:
    """A version on disk, and the groups of every batch that led to it."""

    version: int
    consumed: tuple[str, ...] = ()


@dataclass
class Request:
    """A message that its sender repeats until it is answered."""

    name: str
    body: dict[str, Any]
    then: Callable[[Any], None]
    answered: bool = False


class Disk:
    """The ledger's files, and how much of SQLite's log is flushed."""

    def __init__(self, folder: Path):
        self.folder, self._generation, self.flushed_bytes = folder, 0, 0
        self._full = self._flush_due = False
        self.path = folder / "0" / "ledger.sqlite"
        self.path.parent.mkdir()

    def watch(self, ledger: Ledger) -> None:
        ledger._db.execute("PRAGMA wal_autocheckpoint=0")  # the log holds the whole history: it can be cut anywhere
        ledger._db.set_trace_callback(self._trace)

    def _trace(self, statement: str) -> None:
        if statement.startswith("PRAGMA synchronous="):
            self._full = statement.endswith("FULL")
        elif statement == "COMMIT" and self._full:
            self._flush_due = True

    @property
    def log(self) -> Path:
        return Path(f"{self.path}-wal")

    def note(self) -> None:
        """What a durable transaction has flushed."""
        if self._flush_due:
            self.flushed_bytes, self._flush_due = self.log.stat().st_size, False

    def left_behind(self, ledger: Ledger, log_bytes: int | None = None) -> None:
        """Take the files as a dead process leaves them, the log cut where the power failed."""
        old = self.path
        self._generation += 1
        self.path = self.folder / str(self._generation) / "ledger.sqlite"
        self.path.parent.mkdir()
        shutil.copy(old, self.path)
        shutil.copy(f"{old}-wal", self.log)
        if log_bytes is not None:
            os.truncate(self.log, log_bytes)
            self.flushed_bytes = log_bytes
        ledger.close()
        shutil.rmtree(old.parent)


@dataclass
class Trainer:
    """One start of the trainer of a policy. `epoch` is None until its claim is good."""

    name: str
    checkpoint: Checkpoint
    epoch: int | None = None
    request: Request | None = None
    alive: bool = True
    ahead: list[str] | None = None  # the groups of its batch, trained on and not saved yet


@dataclass
class Policy:
    """What is on disk of a policy, and who trains it."""

    name: str
    trainer: Trainer
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint(0)])
    flushed: int = 0  # newest version that surely outlives a power cut


class History:
    """One history, fixed by its seed."""

    def __init__(self, seed: int, folder: Path):
        self.rng, self.seed = random.Random(seed), seed
        self.disk, self.now_s, self.boots, self.starts = Disk(folder), 1000.0, 0, 0
        self.network: list[Callable[[], None]] = []
        self.staleness = self.rng.randrange(3)
        self.policies = {
            name: Policy(name, self._start(Checkpoint(0))) for name in ("a", "b")[: self.rng.randint(1, 2)]
        }
        self.workers: list[dict[str, Lease]] = [{}, {}]
        self.tasks_told, self.copied, self.copy = 0, False, b""
        self.faults = True
        self._open()

    # ------------------------------------------------------------------------------------------------- the dataflow

    def _open(self) -> None:
        self.ledger = Ledger(
            self.disk.path, lease_s=LEASE_S, max_attempts=50, clock=lambda: self.now_s, boot=str(self.boots)
        )
        self.disk.watch(self.ledger)
        self._filter()

    def _answer(self, name: str, body: dict[str, Any]) -> Any:
        answer = getattr(self, f"_on_{name}")(**body)
        self.disk.note()
        return answer

    def _may_crash(self) -> None:
        if self.faults and self.rng.random() < 0.01:
            raise Crash

    def _filter(self) -> None:
        for policy, group_id in self.ledger.complete_groups():
            self._may_crash()
            self.ledger.filter(policy, group_id, keep=hash_of(group_id, policy) % 3 > 0)

    def _on_lease(self, worker: str, slots: int) -> list[Lease]:
        self.ledger.expire()
        self._filter()
        leases = self.ledger.lease(worker, slots, "train")
        while len(leases) < slots and self._admits():
            position = self.ledger.count_groups()
            self.ledger.add_group(
                f"train-{position:08d}",
                Task(f"task-{position}", "toy", position),
                range(MEMBERS),
                kind="train",
                position=position,
                policies=list(self.policies),
            )
            self._may_crash()
            leases += self.ledger.lease(worker, slots - len(leases), "train")
        return leases

    def _admits(self) -> bool:
        for name, policy in self.policies.items():
            states = self.ledger.count_by_state(name)
            ahead = min(policy.checkpoints[-1].version + self.staleness + 1, STEPS) - self.ledger.batches_made(name)
            if sum(states.get(state, 0) for state in ("open", "complete", "ready")) < ahead * GROUPS:
                return True
        return False

    def _on_episode(self, lease_id: str, episode: Episode) -> bool:
        counted, _ = self.ledger.accept(lease_id, episode)
        self._may_crash()
        self._filter()
        return counted

    def _on_renew(self, lease_ids: list[str]) -> list[str]:
        return self.ledger.renew(lease_ids)

    def _on_give_back(self, lease_ids: list[str], error: str) -> None:
        self.ledger.give_back(lease_ids, error, count_attempt=bool(error))
        self._filter()

    def _on_claim(self, policy: str, trainer: str, version: int, after: int) -> tuple[bool, int]:
        lost = version - self.ledger.batches_made(policy)
        position = max(self.tasks_told, self.ledger.count_groups()) + (lost + self.staleness + 1) * GROUPS
        claimed = self.ledger.claim(trainer, {policy: version}, after, position=position)
        self.disk.note()
        self._may_crash()
        return claimed

    def _on_batch(self, policy: str, step: int, epoch: int) -> list[str] | str:
        if self.ledger.epoch(policy) != epoch:
            return "superseded"
        chosen = partial(select, Chain({}), step=step, groups=GROUPS, max_staleness=self.staleness)
        try:
            groups = self.ledger.assign(policy, step, chosen)
        except StepError:
            return "refused"
        self.disk.note()
        self._may_crash()
        self.tasks_told = max(self.tasks_told, self.ledger.count_groups())
        return groups or "wait"

    def _on_committed(self, policy: str, version: int, epoch: int) -> str:
        if self.ledger.epoch(policy) != epoch:
            return "superseded"
        own = self.policies[policy]
        own.flushed = max(own.flushed, version)
        if version > self.ledger.committed_versions()[policy]:
            self.ledger.commit(policy, version)
            self.disk.note()
            self._may_crash()
        self.ledger.close_batches(policy, version - KEPT)
        return "ok"

    # -------------------------------------------------------------------------------------------------- the network

    def _send(self, request: Request) -> None:
        """A copy of the message goes off; what comes back may be lost, or late."""

        def arrive() -> None:
            try:
                answer = self._answer(request.name, request.body)
            except Crash:
                self._crash()
                return
            if not self.faults or self.rng.random() < 0.8:
                self.network.append(lambda: _receive(request, answer))

        self.network.append(arrive)
        if self.faults and self.rng.random() < 0.15:
            self.network.append(arrive)

    def _deliver(self) -> None:
        """Anything that is on its way: the oldest, mostly."""
        if self.network:
            in_turn = not self.faults or self.rng.random() < 0.6
            self.network.pop(0 if in_turn else self.rng.randrange(len(self.network)))()

    # -------------------------------------------------------------------------------------------------- the workers

    def _work(self) -> None:
        number = self.rng.randrange(len(self.workers))
        held, name = self.workers[number], f"w{number}"
        act = self.rng.random()
        if not held or act < 0.2:
            self._send(Request("lease", {"worker": name, "slots": self.rng.randint(1, 4)}, partial(_hold, held)))
        elif act < 0.25 and self.faults:
            self._send(Request("renew", {"lease_ids": list(held)}, partial(_let_go, held)))
        elif act < 0.3 and self.faults:
            body = {"lease_ids": [held.popitem()[0]], "error": self.rng.choice(["", "broken"])}
            self._send(Request("give_back", body, _nothing))
        else:
            lease_id, lease = held.popitem()
            body = {"lease_id": lease_id, "episode": self._played(lease)}
            request = Request("episode", body, _nothing)
            for _ in range(self.rng.choice([0, 1, 1, 1, 2]) if self.faults else 1):
                self._send(request)

    def _played(self, lease: Lease) -> Episode:
        names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
        parts = []
        for policy, own in self.policies.items():
            version = own.checkpoints[-1].version
            turn = Turn(policy, version, _IDS, _IDS, _LOGPROBS, "stop", 1, 2, 0.0, True, True)
            parts.append(Trajectory(f"{names[0]}/{policy}", *names[1:], (turn,), {}, policy=policy))
        return Episode(*names, parts, {})

    # ------------------------------------------------------------------------------------------------- the trainers

    def _start(self, checkpoint: Checkpoint) -> Trainer:
        self.starts += 1
        return Trainer(f"t{self.starts}", checkpoint)

    def _train(self, policy: Policy) -> None:
        trainer = policy.trainer
        if not trainer.alive:
            policy.trainer = self._start(policy.checkpoints[-1])
        elif trainer.request is not None and not trainer.request.answered:
            self._send(trainer.request)
        elif trainer.epoch is None:
            self._ask_claim(policy, trainer, 0)
        elif trainer.ahead is not None:
            self._save(policy, trainer)
        elif trainer.checkpoint.version < STEPS:
            body = {"policy": policy.name, "step": trainer.checkpoint.version, "epoch": trainer.epoch}
            self._ask(trainer, "batch", body, partial(_got_batch, trainer))

    def _ask(self, trainer: Trainer, name: str, body: dict[str, Any], then: Callable[[Any], None]) -> None:
        trainer.request = Request(name, body, then)
        self._send(trainer.request)

    def _ask_claim(self, policy: Policy, trainer: Trainer, after: int) -> None:
        def claimed(answer: tuple[bool, int]) -> None:
            good, epoch = answer
            if good:
                trainer.epoch = epoch
            else:
                self._ask_claim(policy, trainer, epoch)

        body = {"policy": policy.name, "trainer": trainer.name, "version": trainer.checkpoint.version, "after": after}
        self._ask(trainer, "claim", body, claimed)

    def _save(self, policy: Policy, trainer: Trainer) -> None:
        """Only the newest trainer of a policy writes: its process holds the folder."""
        assert trainer.ahead is not None and trainer.epoch is not None
        before = trainer.checkpoint
        trainer.checkpoint = Checkpoint(before.version + 1, (*before.consumed, *trainer.ahead))
        trainer.ahead = None
        policy.checkpoints = [c for c in policy.checkpoints if c.version < trainer.checkpoint.version]
        policy.checkpoints = [*policy.checkpoints, trainer.checkpoint][-KEPT - 1 :]
        self._check_consumed(trainer.checkpoint)
        body = {"policy": policy.name, "version": trainer.checkpoint.version, "epoch": trainer.epoch}
        self._ask(trainer, "committed", body, lambda answer: _fenced(trainer, answer))

    # ------------------------------------------------------------------------------------------------------- faults

    def _crash(self) -> None:
        """The dataflow's process dies and is started again; now and then again before it is up."""
        while True:
            try:
                self.disk.left_behind(self.ledger)
                self._open()
                return
            except Crash:
                continue

    def _power(self) -> None:
        """What was not flushed is lost from some point on: the ledger's log, checkpoints. Others may play elsewhere."""
        self.disk.note()
        kept = self.rng.randint(self.disk.flushed_bytes, self.disk.log.stat().st_size)
        self.disk.left_behind(self.ledger, kept)
        self.boots, self.now_s = self.boots + 1, self.rng.uniform(0, 50)
        for policy in self.policies.values():
            policy.trainer.alive = False
            policy.checkpoints = [
                c for c in policy.checkpoints if c.version <= policy.flushed or self.rng.random() < 0.5
            ] or [Checkpoint(0)]
        if self.rng.random() < 0.5:
            self.workers = [{}, {}]
        try:
            self._open()
        except Crash:
            self._crash()

    def _copy(self) -> None:
        """A copy of the ledger is made, or put back with everything else started anew."""
        if not self.copy:
            self.copy = self.ledger._db.serialize()
        elif self.rng.random() < 0.3:
            self.disk.left_behind(self.ledger)
            self.disk.path.write_bytes(self.copy)
            self.disk.log.unlink()
            self.disk.flushed_bytes, self.copied, self.copy = 0, True, b""
            self.network.clear()
            self.workers = [{}, {}]
            for policy in self.policies.values():
                policy.trainer.alive = False
            try:
                self._open()
            except Crash:
                self._crash()

    # --------------------------------------------------------------------------------------------------- the history

    def run(self, events: int) -> None:
        for _ in range(events):
            self._event(self.rng.choice(_RARE) if self.rng.random() < 0.02 else self.rng.choice(_EVENTS))
        self.faults = False
        for _ in range(2000):
            if all(policy.checkpoints[-1].version == STEPS for policy in self.policies.values()):
                break
            self.now_s += 0.3
            self._event("deliver" if self.network else self.rng.choice(["worker", "trainer"]))
        else:
            raise AssertionError(f"the run does not come to an end: {self.policies}, {self.ledger.count_episodes()}")
        while self.network:
            self._deliver()
        self._check_all_are_accounted_for()
        self.ledger.close()

    def _event(self, event: str) -> None:
        policy = self.rng.choice(list(self.policies.values()))
        match event:
            case "deliver":
                self._deliver()
            case "worker":
                self._work()
            case "trainer":
                self._train(policy)
            case "clock":
                self.now_s += self.rng.choice([0.1, 3.0, LEASE_S + 1])
            case "kill worker":
                self.workers[self.rng.randrange(len(self.workers))] = {}
            case "kill trainer":
                policy.trainer.alive = policy.trainer.alive and self.rng.random() < 0.5
            case "second":
                if policy.trainer.epoch is not None and self.rng.random() < 0.3:
                    policy.trainer = self._start(policy.checkpoints[-1])
            case "crash":
                self._crash()
            case "power":
                self._power()
            case "copy":
                self._copy()

    def _check_consumed(self, checkpoint: Checkpoint) -> None:
        twice = [group for group, n in Counter(checkpoint.consumed).items() if n > 1]
        assert not twice, f"trained twice at version {checkpoint.version}: {twice}"

    def _check_all_are_accounted_for(self) -> None:
        """Every position is open, ready, in a batch, or dropped and counted. Those that an older copy of the ledger did
        not know of are left out of the order of tasks: then no more than that can be said."""
        if self.copied:
            return
        for name, policy in self.policies.items():
            states, consumed = self.ledger.count_by_state(name), set(policy.checkpoints[-1].consumed)
            waiting = sum(states.get(state, 0) for state in ("open", "complete", "ready"))
            in_batches = {g for step in range(STEPS + 1) for g in self.ledger.batch(name, step)} | consumed
            known = waiting + len(in_batches) + self.ledger.count_dropped(name)
            assert known == self.ledger.count_groups(), (name, states, self.ledger.counts(), len(consumed))


def hash_of(group_id: str, policy: str) -> int:
    return int(group_id[-8:]) * 7919 + ord(policy)


def _receive(request: Request, answer: Any) -> None:
    if not request.answered:
        request.answered = True
        request.then(answer)


def _nothing(answer: Any) -> None:
    pass


def _hold(held: dict[str, Lease], leases: list[Lease]) -> None:
    held.update({lease.lease_id: lease for lease in leases})


def _let_go(held: dict[str, Lease], lost: list[str]) -> None:
    for lease_id in lost:
        held.pop(lease_id, None)


def _fenced(trainer: Trainer, answer: str) -> None:
    trainer.alive = trainer.alive and answer != "superseded"


def _got_batch(trainer: Trainer, answer: list[str] | str) -> None:
    if isinstance(answer, list):
        trainer.ahead = answer
    else:
        assert answer in ("wait", "superseded"), f"step {trainer.checkpoint.version} is {answer}"
        _fenced(trainer, answer)


def run(seed: int, events: int = 120) -> None:
    """The history of that seed.

    Raises:
        AssertionError: it breaks what must hold; the message names the seed.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        try:
            History(seed, Path(folder)).run(events)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error


def _quietly(seed: int) -> str:
    try:
        run(seed)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="histories")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    started_s, broken = time.perf_counter(), 0
    seeds = range(given.seed, given.seed + given.count)
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for done, problem in enumerate(pool.imap_unordered(_quietly, seeds, chunksize=50), start=1):
            broken += bool(problem)
            if problem and broken <= 20:
                print(problem, flush=True)
            if done % 5000 == 0:
                print(f"{done} histories, {broken} broken, {time.perf_counter() - started_s:.0f} s", flush=True)
    print(f"{given.count} histories from seed {given.seed}: {broken} broken, {time.perf_counter() - started_s:.0f} s")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
