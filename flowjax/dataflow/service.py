"""What the dataflow answers to each message, whatever carries it.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowjax.broker import Answer, Busy
from flowjax.dataflow import messages
from flowjax.dataflow.algorithms.chain import AlgorithmError
from flowjax.dataflow.flow import Flow, Taken
from flowjax.dataflow.ledger import StepError, is_damage
from flowjax.dataflow.workers import Can
from flowjax.monitor.trouble import explain, is_machine_fault, unwritable
from flowjax.record_checks import check_lease
from flowjax.records import Lease, WireError

NAMES = ("lease", "renew", "episodes", "give_back", "versions", "claim", "batch", "committed", "refuse")
HOLD_S = 1.0
_FAILING_S = 10.0  # of nothing but a broken disk, after which the dataflow says so and ends
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
        self._waiting: dict[Can, deque[_Waiting]] = {}  # by what they can play
        self._changed = asyncio.Event()
        self._crediting = asyncio.Lock()
        self.failure: Exception | None = None  # that the dataflow is to end of
        self._failing_since_s: float | None = None

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
            self._failing_since_s = None
            return answer
        except (sqlite3.Error, OSError) as error:
            self._failing_since_s = self._failing_since_s or time.monotonic()
            if is_damage(error) or (
                explain(error) and not unwritable(error) and time.monotonic() - self._failing_since_s > _FAILING_S
            ):
                self.failure = error
            if problem := unwritable(error):
                raise Busy(f"the dataflow cannot write to the run's folder: {problem}") from error
            raise

    async def _answer(self, name: str, message: Any, hold_s: float) -> Answer:
        match name:
            case "lease":
                return await self._lease(message, hold_s)
            case "renew":
                return {"lost": self._flow.renew(messages.lease_ids_of(message))}
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
        worker, slots, can = messages.worker_of(message), messages.slots_of(message), messages.can_of(message)
        leases = self._flow.lease(worker, slots, can=can)  # whoever waits has been offered all that there was
        if not leases and not self._flow.finished:
            leases = await self._wait_for_leases(can, lambda: self._flow.lease(worker, slots, can=can), hold_s)
        state = "run" if leases else "done" if self._flow.finished else "wait"
        return {"leases": leases, "state": state, "retry_s": 1.0 if state == "done" else 0.0}

    async def _wait_for_leases(self, can: Can, attempt: Callable[[], list[Lease]], hold_s: float) -> list[Lease]:
        """Stand in the queue of those who can play the same, for a while."""
        asked = _Waiting(attempt, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(can, deque())
        queue.append(asked)
        try:
            await asyncio.wait([asked.leases], timeout=hold_s)
        except asyncio.CancelledError:  # the worker has gone
            if asked.leases.done():
                self._flow.give_back([lease.lease_id for lease in asked.leases.result()], "")
                self._notify()
            raise
        finally:
            if not asked.leases.done():
                queue.remove(asked)
            if not queue and self._waiting.get(can) is queue:
                del self._waiting[can]
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

    async def _episodes(self, message: Any, hold_s: float) -> Answer:
        played = messages.episodes_of(message, self._newest(), self._flow.needed_outcomes, self._flow.bounds)
        for index, (lease_id, episode) in enumerate(played):
            if leased := self._flow.leased(lease_id, episode.episode_id):
                check_lease(episode, leased, where=f"items[{index}].episode")
        counted = []
        if self._flow.full:
            evaluation, played = self._flow.by_kind(played)
            counted = self._flow.accept_all(evaluation, worker=messages.sender_of(message))
            until = time.monotonic() + hold_s
            while played and self._flow.full:
                if time.monotonic() > until:
                    raise Busy("more groups than config.dataflow.max_ready_groups wait for the trainer: send it again")
                await asyncio.sleep(_LATEST_S)
        counted += self._flow.accept_all(played, worker=messages.sender_of(message))
        self._notify()
        return {"accepted": sum(counted), "duplicate": len(counted) - sum(counted)}

    def _give_back(self, message: Any) -> Answer:
        lease_ids, (error,) = messages.lease_ids_of(message), messages.fields(message, error=str)
        self._flow.give_back(lease_ids, error)
        self._notify()
        return {}

    def _versions(self, message: Any) -> Answer:
        policy, newest = self._policy(message)
        # An engine may serve what a trainer has gone back behind, until the newest version is that or later again.
        newest = max(newest, self._flow.serving[policy])
        serving = messages.version_of(message, "serving", oldest=0, newest=newest)
        news = serving > self._flow.serving[policy]
        oldest_needed = self._flow.report_serving(policy, serving)
        if news:
            self._notify()
        return {"oldest_needed": oldest_needed}

    def _claim(self, message: Any) -> Answer:
        trainer, versions, after = messages.claim_of(message)
        for policy, version in versions.items():
            _, newest = self._policy({"policy": policy})
            newest = max(newest, self._flow.newest_checkpoint(policy))  # the ledger may be an older copy
            messages.version_of({"version": version}, "version", oldest=0, newest=newest)
        claimed, epoch = self._flow.claim(trainer, versions, after)
        self._notify()
        return {"claimed": claimed, "epoch": epoch}

    async def _batch(self, message: Any, hold_s: float) -> Answer:
        steps, epoch = messages.steps_of(message), messages.epoch_of(message)
        for policy, step in steps.items():
            _, newest = self._policy({"policy": policy})
            messages.version_of({"step": step}, "step", oldest=self._flow.oldest_kept(policy), newest=newest)
        until = time.monotonic() + hold_s
        while (taken := self._take(steps, epoch)) is None and time.monotonic() < until:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                break
            await asyncio.sleep(_LATEST_S)
        if taken is None:
            return {"state": "wait"}
        self._notify()  # groups that are used or dropped make room for others
        policy, (groups, dropped) = taken[0], (taken[1].groups, taken[1].dropped)
        try:
            async with self._crediting:
                batch = await asyncio.to_thread(self._flow.credit, policy, steps[policy], groups)
        except AlgorithmError:
            raise
        except Exception as error:
            if is_machine_fault(error):
                raise
            async with self._crediting:
                reasons = await asyncio.to_thread(self._flow.uncreditable, policy, groups)
            if not self._quarantine(policy, steps[policy], epoch, reasons):
                raise  # no group of it is at fault
            self._notify()
            return {"state": "wait"}
        return {"state": "run", "policy": policy, "rows": batch.rows, "totals": batch.totals, "dropped": dropped}

    def _take(self, steps: Mapping[str, int], epoch: int) -> tuple[str, Taken] | None:
        """A batch for the trainer of that epoch: asked anew after every wait, another may have claimed meanwhile."""
        self._flow.fence(steps, epoch)
        try:
            return self._flow.take_first(steps)
        except StepError as error:
            raise WireError(str(error)) from error

    async def _committed(self, message: Any) -> Answer:
        policy, newest = self._policy(message)
        version = messages.version_of(message, "version", oldest=0, newest=newest)
        epoch = messages.epoch_of(message)
        self._flow.fence([policy], epoch)
        # Before it counts: with the commit, batches are forgotten that only earlier checkpoints need.
        await asyncio.to_thread(self._flow.flush_checkpoint, policy, version)
        self._flow.fence([policy], epoch)
        self._flow.commit(policy, version)
        self._notify()
        return {}

    def _refuse(self, message: Any) -> Answer:
        """Put groups aside that a trainer cannot train on. A copy of the message finds the batch without them."""
        policy, newest = self._policy(message)
        step, reasons = messages.refused_of(message)
        messages.version_of({"step": step}, "step", oldest=max(self._flow.committed[policy], 0), newest=newest)
        groups = self._quarantine(policy, step, messages.epoch_of(message), reasons)
        self._notify()
        return {"quarantined": groups}

    def _quarantine(self, policy: str, step: int, epoch: int, reasons: Mapping[str, str]) -> list[str]:
        """See `Flow.quarantine`; for the trainer of that epoch alone, which another may have replaced meanwhile."""
        self._flow.fence([policy], epoch)
        try:
            return self._flow.quarantine(policy, step, reasons)
        except StepError as error:
            raise WireError(str(error)) from error

    def _policy(self, message: Any) -> tuple[str, int]:
        """The policy that a message is about, and the newest version that there can be of it."""
        policy = messages.policy_of(message, dict.fromkeys(self._flow.policies, 0))
        return policy, self._flow.newest_version(policy)

    def _newest(self) -> dict[str, int]:
        """The newest version that each policy may have been played with; -1 of a model that is not trained.

        A trainer that goes back has lost versions that episodes under way were begun with, which is not their fault."""
        trained = {
            policy: max(self._flow.newest_version(policy), self._flow.serving[policy]) for policy in self._flow.policies
        }
        return trained | dict.fromkeys(self._flow.frozen, -1)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A worker that waits for episodes."""

    attempt: Callable[[], list[Lease]]
    leases: asyncio.Future[list[Lease]]
