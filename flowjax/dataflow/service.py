"""Answers of the dataflow to each message, whatever carries it.

    lease         {worker, slots, kind?, can?}         -> {leases, state: run | wait | done, retry_s}
    renew         {worker, lease_ids}                  -> {lost}
    episodes      {worker, items: [{lease_id, episode}]} -> {accepted, duplicate}
    give_back     {worker, lease_ids, error}           -> {}
    versions      {worker, policy, serving, in_use}    -> {oldest_needed}
    claim         {trainer, policies: {policy: version}, after} -> {claimed, epoch}
    batch         {epoch} and {policy, step} | {policies: {policy: step}}
                                -> {state: run, policy, rows, totals, dropped} | {state: wait}
    committed     {epoch, policy, version}             -> {}

`lease` and `batch` hold the answer back for a while when there is nothing to give, `episodes` while the trainers have
more groups waiting than they may.
"""

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.broker import Answer, Busy
from flowjax.dataflow import messages
from flowjax.dataflow.algorithms import AlgorithmError
from flowjax.dataflow.batches import Assigned
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.leases import Capabilities, Played
from flowjax.dataflow.ledger import StepError, is_damage
from flowjax.monitor.trouble import explain, is_machine_fault, unwritable
from flowjax.records import Lease, WireError, check_lease

NAMES = ("lease", "renew", "episodes", "give_back", "versions", "claim", "batch", "committed", "refuse")
HOLD_S = 1.0
_FAILING_S = 10.0  # of nothing but a broken disk, after which the dataflow says so and ends
# A full disk is waited for. When it is full for this process alone (a quota, a folder of its own) nobody else would say
# so: then it ends, too, and the launcher starts it again once the run's folder can be written.
_UNWRITABLE_S = 30.0
_PASSED_OVER = 3  # workers asked in turn before there is taken to be nothing for any
_LATEST_S = 0.02  # how long a batch that is waited for may lie unnoticed


class DataflowService:
    """Answers for a `Flow`. Everything runs on one event loop, so no message sees a half-made
    transition; only credit, which may take seconds, is given in a thread.

    Workers that wait for episodes stand in a queue: when something has changed, the first ones are served, until there
    is nothing more.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        self._waiting: dict[Capabilities, deque[_Waiting]] = {}  # by what they can play
        self._changed = asyncio.Event()
        self._crediting = asyncio.Lock()
        self.failure: Exception | None = None  # that the dataflow is to end of
        self._failing_since_s: dict[str, float] = {}  # by message: one file may be broken, the others not

    async def answer(self, name: str, message: Any, *, hold_s: float = HOLD_S) -> Answer:
        """The answer to the message of that name.

        Leases that a cancelled call had got are given back; a batch may be asked for again.

        Args:
            hold_s: longest that the answer is held back.

        Raises:
            WireError: there is no message of that name, it has a field that cannot be, or names a version that has
                never been made; nothing has changed.
            Superseded: it is of a trainer that another one has replaced; nothing has changed.
            Busy: there is no room for the episodes now; those of evaluations have been taken in. Or the disk of the run
                is full or read-only: nothing has changed, and who asks waits until it can be written.
        """
        try:
            answer = await self._answer(name, message, hold_s)
            self._failing_since_s.pop(name, None)
            return answer
        except (sqlite3.Error, OSError) as error:
            failing_s = time.monotonic() - self._failing_since_s.setdefault(name, time.monotonic())
            problem = unwritable(error)
            if is_damage(error) or (explain(error) and failing_s > (_UNWRITABLE_S if problem else _FAILING_S)):
                self.failure = error
            if problem:
                raise Busy(f"the dataflow cannot write to the run's folder: {problem}") from error
            raise

    async def _answer(self, name: str, message: Any, hold_s: float) -> Answer:
        match name:
            case "lease":
                return await self._lease(message, hold_s)
            case "renew":
                return {"lost": self._flow.ledger.renew(messages.lease_ids_of(message))}
            case "episodes":
                return await self._episodes(message, hold_s)
            case "give_back":
                return self._give_back(message)
            case "versions":
                return self._versions(message)
            case "claim":
                return self._claim(message)
            case "batch":
                return await self._batch(message, hold_s)
            case "committed":
                return await self._committed(message)
            case "refuse":
                return self._refuse(message)
        raise WireError(f"there is no message {name!r}: send one of {', '.join(NAMES)}")

    async def _lease(self, message: Any, hold_s: float) -> Answer:
        worker, slots, playable = (
            messages.worker_of(message),
            messages.slots_of(message),
            messages.capabilities_of(message),
        )

        self._flow.workers.heard(worker)

        def attempt() -> list[Lease]:
            self._expire()
            return self._flow.leases.lease(worker, slots, playable)

        leases = attempt()  # whoever waits has been offered all that there was
        if not leases and not self._flow.finished:
            leases = await self._wait_for_leases(playable, attempt, hold_s)
        state = "run" if leases else "done" if self._flow.finished else "wait"
        return {"leases": leases, "state": state, "retry_s": 1.0 if state == "done" else 0.0}

    async def _wait_for_leases(
        self, playable: Capabilities, attempt: Callable[[], list[Lease]], hold_s: float
    ) -> list[Lease]:
        """Stand in the queue of those who can play the same, for a while."""
        asked = _Waiting(attempt, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(playable, deque())
        queue.append(asked)
        try:
            await asyncio.wait([asked.leases], timeout=hold_s)
        except asyncio.CancelledError:  # the worker has gone
            if asked.leases.done():
                self._return([lease.lease_id for lease in asked.leases.result()], "")
            raise
        finally:
            if not asked.leases.done():
                queue.remove(asked)
            if not queue and self._waiting.get(playable) is queue:
                del self._waiting[playable]
        return asked.leases.result() if asked.leases.done() else []

    def _serve_waiting(self) -> None:
        """Give what there is to those who have waited longest; when the run is over, send all of them home."""
        finished = any(self._waiting.values()) and self._flow.finished
        for queue in self._waiting.values():
            passed_over = 0
            while passed_over < min(_PASSED_OVER, len(queue)):
                asked = queue[0]
                if (leases := asked.attempt()) or finished:
                    asked.leases.set_result(leases)
                    queue.popleft()
                else:  # what there is may not be for this worker
                    queue.rotate(-1)
                    passed_over += 1

    def _notify(self) -> None:
        """Something has changed that may give the waiting what they wait for."""
        self._serve_waiting()
        self._changed.set()

    def _expire(self) -> None:
        """Before anything is leased: what nobody plays any more goes out first. A finished evaluation's line, which a
        full disk may have refused when its last episode came in, is written at the next of these."""
        self._flow.groups.expire()
        self._flow.evaluations.write_finished()

    async def _episodes(self, message: Any, hold_s: float) -> Answer:
        flow = self._flow
        played = messages.episodes_of(message, self._newest(), flow.needed_outcomes, flow.bounds)
        worker = messages.sender_of(message)
        for index, (lease_id, episode) in enumerate(played):
            if leased := flow.ledger.leased(lease_id, episode.episode_id):
                check_lease(episode, leased, where=f"items[{index}].episode")
        counted = []
        if flow.groups.full:
            # Training waits for room, evaluations do not: what they play waits for no trainer.
            evaluation, played = flow.groups.by_kind(played)
            counted = self._accept(evaluation, worker)
            until = time.monotonic() + hold_s
            while played and flow.groups.full:
                if time.monotonic() > until:
                    raise Busy("more groups than config.dataflow.max_ready_groups wait for the trainer: send it again")
                await asyncio.sleep(_LATEST_S)
        counted += self._accept(played, worker)
        self._notify()
        return {"accepted": sum(counted), "duplicate": len(counted) - sum(counted)}

    def _accept(self, played: Sequence[Played], worker: str) -> list[bool]:
        counted = self._flow.groups.accept_all(played, worker=worker)
        self._flow.workers.counted(worker, sum(counted))
        self._flow.evaluations.write_finished()
        return counted

    def _give_back(self, message: Any) -> Answer:
        lease_ids, (error,) = messages.lease_ids_of(message), messages.fields(message, error=str)
        self._return(lease_ids, error)
        return {}

    def _return(self, lease_ids: Sequence[str], error: str) -> None:
        self._flow.groups.give_back(lease_ids, error)
        self._flow.evaluations.write_finished()
        self._notify()

    def _versions(self, message: Any) -> Answer:
        policy = self._policy(message)
        before = self._flow.policies[policy].serving
        # An engine may serve what a trainer has gone back behind, until the newest version is that or later again.
        newest = max(self._flow.newest_version(policy), before)
        serving = messages.version_of(message, "serving", oldest=0, newest=newest)
        is_news = self._flow.workers.report(messages.sender_of(message), policy, serving)
        oldest_needed = self._flow.report_serving(policy, serving)
        if is_news:  # a newer version admits further groups, and a worker that has caught up plays again
            self._notify()
        return {"oldest_needed": oldest_needed}

    def _claim(self, message: Any) -> Answer:
        trainer, versions, after = messages.claim_of(message)
        for policy, version in versions.items():
            newest = self._flow.newest_version(self._policy({"policy": policy}))
            newest = max(newest, self._flow.policies[policy].newest_checkpoint())  # the ledger may be an older copy
            messages.version_of({"version": version}, "version", oldest=0, newest=newest)
        claimed, epoch = self._flow.batches.claim(trainer, versions, after)
        self._notify()
        return {"claimed": claimed, "epoch": epoch}

    async def _batch(self, message: Any, hold_s: float) -> Answer:
        steps, epoch = messages.steps_of(message), messages.epoch_of(message)
        for policy, step in steps.items():
            newest = self._flow.newest_version(self._policy({"policy": policy}))
            messages.version_of({"step": step}, "step", oldest=self._flow.policies[policy].oldest_kept, newest=newest)
        until = time.monotonic() + hold_s
        while (batch := self._take(steps, epoch)) is None and time.monotonic() < until:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                break
            await asyncio.sleep(_LATEST_S)
        if batch is None:
            return {"state": "wait"}
        self._notify()  # groups that are used or dropped make room for others
        policy, (groups, dropped) = batch[0], (batch[1].groups, batch[1].dropped)
        try:
            async with self._crediting:
                batch = await asyncio.to_thread(self._flow.batches.credit, policy, steps[policy], groups)
        except AlgorithmError:
            raise
        except Exception as error:
            if is_machine_fault(error):
                raise
            async with self._crediting:
                reasons = await asyncio.to_thread(self._flow.batches.uncreditable, policy, groups)
            if not self._quarantine(policy, steps[policy], epoch, reasons):
                raise  # no group of it is at fault
            self._notify()
            return {"state": "wait"}
        return {"state": "run", "policy": policy, "rows": batch.rows, "totals": batch.totals, "dropped": dropped}

    def _take(self, steps: Mapping[str, int], epoch: int) -> tuple[str, Assigned] | None:
        """A batch for the trainer of that epoch: asked anew after every wait, another may have claimed meanwhile."""
        self._flow.batches.fence(steps, epoch)
        self._flow.groups.filter()
        try:
            return self._flow.batches.take_first(steps)
        except StepError as error:
            raise WireError(str(error)) from error

    async def _committed(self, message: Any) -> Answer:
        policy = self._policy(message)
        version = messages.version_of(message, "version", oldest=0, newest=self._flow.newest_version(policy))
        epoch = messages.epoch_of(message)
        self._flow.batches.fence([policy], epoch)
        # Before it counts: with the commit, batches are forgotten that only earlier checkpoints need.
        await asyncio.to_thread(self._flow.policies[policy].flush_checkpoint, version)
        self._flow.batches.fence([policy], epoch)  # another trainer may have claimed the policy meanwhile
        self._flow.batches.commit(policy, version)
        self._notify()
        return {}

    def _refuse(self, message: Any) -> Answer:
        """Put groups aside that a trainer cannot train on. A copy of the message finds the batch without them."""
        policy = self._policy(message)
        step, reasons = messages.refused_of(message)
        oldest, newest = max(self._flow.policies[policy].committed, 0), self._flow.newest_version(policy)
        messages.version_of({"step": step}, "step", oldest=oldest, newest=newest)
        groups = self._quarantine(policy, step, messages.epoch_of(message), reasons)
        self._notify()
        return {"quarantined": groups}

    def _quarantine(self, policy: str, step: int, epoch: int, reasons: Mapping[str, str]) -> list[str]:
        """See `Batches.quarantine`; for the trainer of that epoch alone, which another may have replaced meanwhile."""
        self._flow.batches.fence([policy], epoch)
        try:
            return self._flow.batches.quarantine(policy, step, reasons)
        except StepError as error:
            raise WireError(str(error)) from error

    def _policy(self, message: Any) -> str:
        return messages.policy_of(message, self._flow.policies)

    def _newest(self) -> dict[str, int]:
        """The newest version that each policy may have been played with; -1 of a model that is not trained.

        A trainer that goes back has lost versions that episodes under way were begun with, which is not their fault."""
        trained = {
            name: max(self._flow.newest_version(name), policy.serving) for name, policy in self._flow.policies.items()
        }
        return trained | dict.fromkeys(self._flow.frozen, -1)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A worker that waits for episodes."""

    attempt: Callable[[], list[Lease]]
    leases: asyncio.Future[list[Lease]]
