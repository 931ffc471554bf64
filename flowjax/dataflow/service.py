"""Answers of the dataflow to each message, independent of the transport that carries it.

    lease         {worker, slots, can?, hold_s?} -> {leases, state: run | wait | done, retry_s, report?}
    renew         {worker, lease_ids}                  -> {lost, report?}
    episodes      {worker, items: [{lease_id, episode}]} -> {accepted, duplicate, report?}
    give_back     {worker, lease_ids, error}           -> {}
    versions      {worker, policy, serving, held?} -> {oldest_needed}
    claim         {trainer, policies: {policy: version}, after} -> {claimed, epoch}
    batch         {epoch} and {policy, step} | {policies: {policy: step}}
                                -> {state: run, policy, rows, totals, dropped} | {state: wait}
    refuse        {policy, step, epoch, trajectories}  -> {quarantined}
    committed     {epoch, policy, version, mismatches?} -> {}
    evict         {evicted: worker or node}            -> {given_back}

`lease` and `batch` hold the answer back for a while when there is nothing to give (long polling), `episodes` while more
groups wait for the trainers than may. `report` names policies for which this process has had no `versions` from the
worker. A message with a wrong field is refused before anything changes.
"""

import asyncio
import itertools
import logging
import math
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.broker import Answer, Busy, Evicted
from flowjax.config import ConfigError
from flowjax.dataflow.algorithms import AlgorithmError
from flowjax.dataflow.batches import Assigned, CreditedBatch, Uncreditable
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.leases import KINDS, Capabilities, LeasedEpisode
from flowjax.dataflow.ledger import StepError, is_damage
from flowjax.monitor.token import send_away
from flowjax.monitor.trouble import explain, is_machine_fault, unwritable
from flowjax.records import (
    COUNTED_STATUSES,
    Bounds,
    Episode,
    Group,
    Lease,
    WireError,
    check_episode,
    check_lease,
    check_outcomes,
)

NAMES = ("lease", "renew", "episodes", "give_back", "versions", "claim", "batch", "committed", "refuse", "evict")
NAMES_OF_NODES = ("lease", "renew", "episodes", "give_back", "versions")  # that a node's key is good for
_OF_WORKERS = ("lease", "renew", "episodes", "versions")  # refused from an evicted worker
HOLD_S = 1.0
MOST_HELD_S = 20.0  # longest hold that a worker may ask for
_FAILING_S = 10.0  # of failures of the disk alone, after which the dataflow reports them and ends
# A full disk is waited for. When it is full for this process alone (a quota, a folder of its own) no other process
# would report it: then this one ends, too, and the launcher starts it again once the run's folder can be written.
_UNWRITABLE_S = 30.0
_PASSED_OVER = 3  # workers of one standing for which there was nothing, before the others of it are passed over
_LOOKED_AT = 64  # waiting workers of a queue that are looked at each time
_CREDIT_HELD_S = 20.0  # longest that an answer waits for the rows of a batch; a trainer that asks again waits on
_LATEST_S = 0.02  # longest that a batch which is waited for goes unnoticed


@dataclass(frozen=True, eq=False)
class _Crediting:
    """Credit of a batch under way: made once, however often the batch is asked for meanwhile."""

    group_ids: Sequence[str]
    dropped: int  # see `Assigned`
    task: asyncio.Task[CreditedBatch | Uncreditable]


class DataflowService:
    """Answers for a `Flow`. All runs on one event loop, so that no message sees a half-made transition. Only slow work
    runs in threads: credit, keeping an evaluation (which may take minutes) and flushing a checkpoint.

    Workers that wait for episodes stand in queues: when something has changed, the first ones are served, until there
    is nothing more.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        self._waiting: dict[Capabilities, deque[_Waiting]] = {}  # by what they can play
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        self._crediting = asyncio.Lock()
        self._credits: dict[str, _Crediting] = {}  # by policy, the batch that was asked for last and not given yet
        self.failure: Exception | None = None  # the dataflow cannot go on with it and must end
        # By message, when its failures began, and the newest one: one file may be broken and the others not.
        self._failing_s: dict[str, tuple[float, float]] = {}

    async def answer(self, name: str, message: Any, *, hold_s: float = HOLD_S) -> Answer:
        """The answer to the message of that name.

        If the call is cancelled, leases that it had got are given back; a batch may be asked for again.

        Args:
            hold_s: longest that the answer is held back, in seconds.

        Raises:
            WireError: there is no message of that name, it has a wrong field, or names a version that has never been
                made; nothing has changed.
            Superseded: it is of a trainer that another one has replaced; nothing has changed.
            Evicted: it is of a worker that was sent away; nothing has changed.
            Busy: there is no room for the episodes now; those of evaluations have been taken in. Or the disk of the run
                is full or read-only: nothing has changed, and the sender tries again until it can be written.
        """
        asked_s = time.monotonic()
        try:
            answer = await self._answer(name, message, hold_s)
            self._failing_s.pop(name, None)
            return answer
        except (sqlite3.Error, OSError) as error:
            now_s = time.monotonic()
            since_s, newest_s = self._failing_s.get(name, (now_s, now_s))
            if asked_s - newest_s > _UNWRITABLE_S:  # a failed message is sent again at once: the earlier fault was over
                since_s = now_s
            self._failing_s[name], failing_s = (since_s, now_s), now_s - since_s
            problem = unwritable(error)
            if is_damage(error) or (explain(error) and failing_s > (_UNWRITABLE_S if problem else _FAILING_S)):
                self.failure = error
            if problem:
                raise Busy(f"the dataflow cannot write to the run's folder: {problem}") from error
            raise

    async def _answer(self, name: str, message: Any, hold_s: float) -> Answer:
        if name in _OF_WORKERS:
            self._refuse_evicted(sender_of(message))
        match name:
            case "lease":
                return self._prompting(message, await self._lease(message, hold_s))
            case "renew":
                return self._prompting(message, {"lost": self._flow.groups.renew(lease_ids_of(message))})
            case "episodes":
                return self._prompting(message, await self._episodes(message, hold_s))
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
            case "evict":
                return self._evict(message)
        raise WireError(f"there is no message {name!r}: send one of {', '.join(NAMES)}")

    def _prompting(self, message: Any, answer: Answer) -> Answer:
        """The answer to a worker, with a request for those of its versions that this process has not heard of."""
        worker = sender_of(message)
        if worker and (unreported := self._flow.workers.unreported(worker, self._flow.policies)):
            return {**answer, "report": unreported}
        return answer

    def stop_holding(self) -> None:
        """Answer at once all that is held back, and hold nothing back from now on."""
        self._stopping = True
        self._release(lambda asked: True)

    def _release(self, whom: Callable[["_Waiting"], bool]) -> None:
        """Answer those waiting workers for which `whom` is true: there are no episodes for them."""
        for queue in self._waiting.values():
            for asked in [asked for asked in queue if whom(asked)]:
                asked.leases.set_result([])
                queue.remove(asked)

    async def _lease(self, message: Any, hold_s: float) -> Answer:
        worker, slots, playable, asked_s = (
            worker_of(message),
            slots_of(message),
            capabilities_of(message),
            hold_s_of(message),
        )

        def attempt() -> list[Lease]:
            if self._flow.workers.why_evicted(worker):  # while it waited
                return []
            self._expire()
            leases = self._flow.leases.lease(worker, slots, playable)
            self._flow.workers.left_free(worker, slots - len(leases))
            return leases

        leases = attempt()  # past the queue, which is fair: the workers in it have been offered all that there was
        if asked_s is not None:
            # A worker that has not reported its versions is not held for long: others may wait for what it serves.
            if not self._flow.workers.unreported(worker, self._flow.policies):
                hold_s = asked_s
            elif self._flow.workers.prompts(worker):
                hold_s = 0.0
        if not leases and not self._flow.finished and not self._stopping:
            leases = await self._wait_for_leases(worker, playable, attempt, hold_s)
        state = "run" if leases else "done" if self._flow.finished else "wait"
        return {"leases": leases, "state": state, "retry_s": 1.0 if state == "done" else 0.0}

    async def _wait_for_leases(
        self, worker: str, playable: Capabilities, attempt: Callable[[], list[Lease]], hold_s: float
    ) -> list[Lease]:
        """Wait in the queue of workers with the same capabilities, for `hold_s` at most."""
        asked = _Waiting(worker, attempt, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(playable, deque())
        queue.append(asked)
        ended: list[asyncio.Future[Any]] = [asked.leases]
        if hold_s > HOLD_S:  # else it asks again before the next look
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            ended.append(self._looking)
        try:
            # Not `wait_for`, which cancels the future at its timeout: leases set at that very moment would be lost.
            await asyncio.wait(ended, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
            if not asked.leases.done() and ended[-1].done():
                await ended[-1]  # a look failed, as when the disk does
        except BaseException:  # the worker hung up, or the disk fails; it may have been given leases just before
            if asked.leases.done():
                self._return([lease.lease_id for lease in asked.leases.result()], "")
            raise
        finally:
            if not asked.leases.done():
                queue.remove(asked)
            if not queue and self._waiting.get(playable) is queue:
                del self._waiting[playable]
        return asked.leases.result() if asked.leases.done() else []

    async def _look(self) -> None:
        """While workers wait, serve the queues each second even if nothing has changed: time alone frees episodes, too,
        as when a worker has died. One timer for all: a thousand would be slow."""
        while any(self._waiting.values()):
            await asyncio.sleep(HOLD_S)
            for asked in itertools.chain(*self._waiting.values()):
                self._flow.workers.still_waits(asked.worker)
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Lease episodes to the workers that have waited longest; when the run is over, answer all of them."""
        finished = any(self._waiting.values()) and self._flow.finished
        for queue in self._waiting.values():
            looked_at, yielded, failed = 0, 0, Counter[Hashable]()
            while looked_at < min(_LOOKED_AT, len(queue)):
                asked = queue[0]
                standing = self._flow.workers.standing(asked.worker)
                # Once a few have left training to a faster worker, others that last did so, too, are passed over.
                leaves = yielded >= _PASSED_OVER and self._flow.workers.yielded(asked.worker)
                leases = asked.attempt() if finished or not (leaves or failed[standing] >= _PASSED_OVER) else []
                if leases or finished:
                    asked.leases.set_result(leases)
                    queue.popleft()
                    continue
                # The episodes that there are may not suit this worker; those that it left may suit the next one.
                if self._flow.workers.yielded(asked.worker):
                    yielded += 1
                else:
                    failed[standing] += 1
                queue.rotate(-1)
                looked_at += 1

    def _notify(self) -> None:
        """Serve the queues and wake trainers that wait: something has changed that they may wait for."""
        self._serve_waiting()
        self._changed.set()

    def _expire(self) -> None:
        """Take back leases that ran out, so that these episodes are leased first. Also have the lines of finished
        evaluations written, which a full disk may have refused, or an earlier process may have left."""
        self._flow.groups.expire()
        self._flow.evaluations.start_writing()

    async def _episodes(self, message: Any, hold_s: float) -> Answer:
        flow = self._flow
        played = episodes_of(message, self._newest(), flow.needed_outcomes, flow.bounds)
        worker = worker_of(message)
        for index, (lease_id, episode) in enumerate(played):
            if leased := flow.ledger.leased(lease_id, episode.episode_id):
                check_lease(episode, leased, where=f"items[{index}].episode")
        received = len(played)
        played = self._without_lost(played, worker)
        accepted = []
        if flow.groups.full:
            # Training waits for room, evaluations do not: what they play waits for no trainer.
            evaluation, played = flow.groups.by_kind(played)
            accepted = self._accept(evaluation, worker)
            until = time.monotonic() + hold_s
            while played and flow.groups.full:
                if time.monotonic() > until:
                    raise Busy("more groups than config.dataflow.max_ready_groups wait for the trainer: send it again")
                await asyncio.sleep(_LATEST_S)
            self._refuse_evicted(worker)  # it may have been sent away meanwhile
            played = self._without_lost(played, worker)  # a trainer may have gone back meanwhile
        accepted += self._accept(played, worker)
        self._notify()
        return {"accepted": sum(accepted), "duplicate": received - sum(accepted)}

    def _without_lost(self, played: Sequence[LeasedEpisode], worker: str) -> list[LeasedEpisode]:
        """Those of the episodes whose weights are not lost. The others are to be played again: a worker that was cut
        off, or whose message was late, did not know that the trainer had gone back."""
        lost = {lease_id for lease_id, episode in played if self._flow.has_lost(episode)}
        for lease_id in lost:
            self._flow.workers.ended(worker, lease_id, counts=False)
        if lost:
            self._return(sorted(lost), "")
        return [item for item in played if item[0] not in lost]

    def _refuse_evicted(self, worker: str) -> None:
        if reason := self._flow.workers.why_evicted(worker):
            raise Evicted(f"this worker was sent away from the run ({reason})")

    def _accept(self, played: Sequence[LeasedEpisode], worker: str) -> list[bool]:
        """Take in episodes. Returns for each whether it was taken in, also one that failed."""
        accepted = self._flow.groups.accept_all(played, worker=worker)
        for (lease_id, episode), new in zip(played, accepted, strict=True):
            self._flow.workers.ended(worker, lease_id, counts=new and episode.status in COUNTED_STATUSES)
        self._flow.evaluations.start_writing()
        return accepted

    def _give_back(self, message: Any) -> Answer:
        lease_ids, (error,) = lease_ids_of(message), fields(message, error=str)
        self._return(lease_ids, error)
        return {}

    def _return(self, lease_ids: Sequence[str], error: str) -> None:
        self._flow.groups.give_back(lease_ids, error)
        self._flow.evaluations.start_writing()
        self._notify()

    def _evict(self, message: Any) -> Answer:
        """Send away a worker, or all workers of a node. Others get the episodes that they were playing, and their
        messages are refused from now on."""
        (evicted,) = fields(message, evicted=str)
        if not (workers := self._flow.workers.evict(evicted)):
            known = ", ".join(self._flow.status()["workers"]) or "none"
            raise WireError(f"no worker {evicted[:_LONGEST_NAME]!r} plays for this run: there is {known}")
        return {"given_back": self._send_away(workers)}

    def _send_away(self, workers: Collection[str]) -> int:
        """Give episodes that evicted workers were playing back, for others. Returns their number."""
        leases = [lease_id for worker in workers for lease_id in self._flow.ledger.leases_of(worker)]
        self._release(lambda asked: asked.worker in workers)
        self._return(leases, "")
        return len(leases)

    def _versions(self, message: Any) -> Answer:
        policy = self._policy(message)
        serving = version_of(message, "serving", oldest=0, newest=self._newest()[policy])
        is_news = self._flow.workers.report(worker_of(message), policy, serving, held_of(message))
        oldest_needed = self._flow.report_serving(policy, serving)
        if is_news:  # a newer version admits further groups, and a worker that has caught up plays again
            self._notify()
        return {"oldest_needed": oldest_needed}

    def _claim(self, message: Any) -> Answer:
        trainer, versions, after = claim_of(message)
        for policy, version in versions.items():
            newest = self._flow.newest_version(self._policy({"policy": policy}))
            newest = max(newest, self._flow.policies[policy].newest_checkpoint())  # the ledger may be an older copy
            version_of({"version": version}, "version", oldest=0, newest=newest)
        claimed, epoch = self._flow.batches.claim(trainer, versions, after)
        self._flow.evaluations.read_ledger()
        self._notify()
        return {"claimed": claimed, "epoch": epoch}

    async def _batch(self, message: Any, hold_s: float) -> Answer:
        steps, epoch = steps_of(message), epoch_of(message)
        for policy, step in steps.items():
            newest = self._flow.newest_version(self._policy({"policy": policy}))
            version_of({"step": step}, "step", oldest=self._flow.policies[policy].oldest_kept, newest=newest)
            if step >= (steps_of_run := self._flow.policies[policy].settings.trainer.steps):
                made = f"{policy} makes its last version, {steps_of_run}, of batch {steps_of_run - 1}"
                raise WireError(f"field step is {step}: {made} (config.trainer.steps): ask for it no more")
        until = time.monotonic() + hold_s
        while (batch := self._take(steps, epoch)) is None and time.monotonic() < until:
            self._changed.clear()  # nothing is awaited since the batch was looked for: no change is missed
            left_s = until - time.monotonic()
            pause_s = min(left_s, max(self._flow.batches.patience_s(steps), _LATEST_S))
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                if pause_s == left_s:
                    break
                continue
            await asyncio.sleep(_LATEST_S)  # changes come in bursts: one look for all of them
        if batch is None:
            return {"state": "wait"}
        self._notify()  # groups that are used or dropped make room for others
        policy, assigned = batch
        crediting = self._credit_of(policy, steps[policy], assigned)
        # Not `wait_for`: credit goes on when the trainer hangs up or this times out, and is there when it asks again.
        await asyncio.wait({crediting.task}, timeout=_CREDIT_HELD_S)
        if not crediting.task.done():
            return {"state": "wait"}
        if self._credits.get(policy) is crediting:
            del self._credits[policy]
        credited = crediting.task.result()
        if isinstance(credited, Uncreditable):
            self._quarantine(policy, steps[policy], epoch, credited.reasons)
            self._notify()
            return {"state": "wait"}
        return {
            "state": "run",
            "policy": policy,
            "rows": credited.rows,
            "totals": credited.totals,
            "dropped": crediting.dropped,
        }

    def _credit_of(self, policy: str, step: int, assigned: Assigned) -> _Crediting:
        """The credit of that batch, which is begun if it is not under way."""
        group_ids = [group.group_id for group in assigned.groups]
        if policy not in self._credits or self._credits[policy].group_ids != group_ids:
            task = asyncio.create_task(self._credit(policy, step, assigned.groups))
            self._credits[policy] = _Crediting(group_ids, assigned.dropped, task)
        return self._credits[policy]

    async def _credit(self, policy: str, step: int, groups: Sequence[Group]) -> CreditedBatch | Uncreditable:
        async with self._crediting:
            try:
                return await asyncio.to_thread(self._flow.batches.try_credit, policy, step, groups)
            except AlgorithmError:
                raise
            except Exception as error:
                if not is_machine_fault(error):  # credit is a function of the batch: it would fail again and again
                    name, said = self._flow.policies[policy].settings.credit.name, f"{type(error).__name__}: {error}"
                    self.failure = ConfigError(
                        f"config.credit.name of {policy} is {name!r}, which fails on a batch, and on no group alone "
                        f"({said}): mend it, then --resume the run"
                    )
                raise

    def _take(self, steps: Mapping[str, int], epoch: int) -> tuple[str, Assigned] | None:
        """A batch for the trainer of that epoch, which is checked after every wait: another may have claimed since."""
        self._flow.batches.fence(steps, epoch)
        self._flow.groups.filter()
        try:
            return self._flow.batches.take_first(steps)
        except StepError as error:
            raise WireError(str(error)) from error

    async def _committed(self, message: Any) -> Answer:
        policy = self._policy(message)
        version = version_of(message, "version", oldest=0, newest=self._flow.newest_version(policy))
        epoch, mismatches = epoch_of(message), mismatches_of(message)
        self._flow.batches.fence([policy], epoch)
        # On the disk before it counts: the commit deletes batches that only earlier checkpoints need.
        await asyncio.to_thread(self._flow.policies[policy].flush_checkpoint, version)
        self._flow.batches.fence([policy], epoch)  # another trainer may have claimed the policy meanwhile
        nodes = self._flow.compare(policy, mismatches)  # before the commit, which deletes episodes with their workers
        self._flow.batches.commit(policy, version)
        for node, reason in nodes.items():
            # Its key first: if a full disk refuses that, the message comes again, and the node still plays until then.
            send_away(self._flow.run.folder, node, reason)
            if workers := self._flow.workers.evict(node, reason):
                logging.warning("node %s is sent away: %s", node, reason)
                self._send_away(workers)
        self._notify()
        return {}

    def _refuse(self, message: Any) -> Answer:
        """Put aside groups that a trainer cannot train on. A copy of the message finds the batch without them."""
        policy = self._policy(message)
        step, reasons = refused_of(message)
        oldest, newest = max(self._flow.policies[policy].committed, 0), self._flow.newest_version(policy)
        version_of({"step": step}, "step", oldest=oldest, newest=newest)
        groups = self._quarantine(policy, step, epoch_of(message), reasons)
        self._notify()
        return {"quarantined": groups}

    def _quarantine(self, policy: str, step: int, epoch: int, reasons: Mapping[str, str]) -> list[str]:
        """See `Batches.quarantine`. Only for the trainer of that epoch: another may have replaced it meanwhile."""
        self._flow.batches.fence([policy], epoch)
        try:
            return self._flow.batches.quarantine(policy, step, reasons)
        except StepError as error:
            raise WireError(str(error)) from error

    def _policy(self, message: Any) -> str:
        return policy_of(message, self._flow.policies)

    def _newest(self) -> dict[str, int]:
        """The newest version that each policy may be played with; -1 of a model that is not trained.

        A trainer that goes back has lost versions, which engines still serve for a while and episodes under way were
        begun with: messages that name these are not wrong."""
        trained = {
            name: max(self._flow.newest_version(name), policy.newest_served)
            for name, policy in self._flow.policies.items()
        }
        return trained | dict.fromkeys(self._flow.frozen, -1)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A worker that waits for episodes."""

    worker: str
    attempt: Callable[[], list[Lease]]
    leases: asyncio.Future[list[Lease]]


# --------------------------------------------------------------------------------------------- messages, field by field

MOST_SLOTS = 100_000  # episodes asked for, or leases named, in one message
_LONGEST_NAME = 500  # characters


def fields(message: Any, **kinds: type) -> list[Any]:
    """The named fields of a message.

    Raises:
        WireError: the message is no map, or a field is missing or of another kind.
    """
    if not isinstance(message, dict):
        raise WireError(f"the body is a {type(message).__name__}: send a map")
    for name, kind in kinds.items():
        if name not in message:
            raise WireError(f"field {name} is missing")
        if not isinstance(message[name], kind) or (kind is int and isinstance(message[name], bool)):
            raise WireError(f"field {name} is {type(message[name]).__name__}: send {kind.__name__}")
    return [message[name] for name in kinds]


def worker_of(message: Any) -> str:
    (worker,) = fields(message, worker=str)
    if not 0 < len(worker) <= _LONGEST_NAME or not worker.isprintable():
        raise WireError(f"field worker has {len(worker)} characters: send 1 to {_LONGEST_NAME} that can be printed")
    return worker


def sender_of(message: Any) -> str:
    """Sender of a message, "" where it does not say."""
    sender = message.get("worker") if isinstance(message, dict) else ""
    return sender[:_LONGEST_NAME] if isinstance(sender, str) and sender.isprintable() else ""


def slots_of(message: Any) -> int:
    (slots,) = fields(message, slots=int)
    if not 0 < slots <= MOST_SLOTS:
        raise WireError(f"field slots is {slots}: send 1 to {MOST_SLOTS}")
    return slots


def hold_s_of(message: Any) -> float | None:
    """Seconds for which a worker asks its answer to be held back; None where it does not say."""
    held_s = message.get("hold_s") if isinstance(message, dict) else None
    if held_s is not None and not (type(held_s) in (int, float) and 0 <= held_s <= MOST_HELD_S):
        raise WireError(f"field hold_s is {repr(held_s)[:_LONGEST_NAME]}: send 0 to {MOST_HELD_S:g}, or leave it out")
    return held_s


def capabilities_of(message: Any) -> Capabilities:
    """Capabilities of a worker: `can`, a map of lists with the names of worlds, policies and kinds."""
    said = {} if message.get("can") is None else message["can"]
    if not isinstance(said, dict) or set(said) - {"worlds", "policies", "kinds"}:
        raise WireError("field can is not understood: send a map with lists of worlds, policies and kinds, or some")
    for name, values in said.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise WireError(f"field can.{name} is no list of strings: send one")
    kinds = frozenset(said.get("kinds", KINDS))
    if kinds - KINDS:
        raise WireError(f"field can.kinds names others than {' and '.join(sorted(KINDS))}: leave them out")
    worlds, policies = (frozenset(said[name]) if name in said else None for name in ("worlds", "policies"))
    return Capabilities(worlds, policies, kinds)


def steps_of(message: Any) -> dict[str, Any]:
    """The policies that a trainer asks for and the step of each: `policies`, or `policy` and `step` of one."""
    fields(message)
    if "policies" not in message:
        policy, step = fields(message, policy=str, step=int)
        return {policy: step}
    (steps,) = fields(message, policies=dict)
    if not steps:
        raise WireError("field policies is empty: send policy -> step")
    return steps


def claim_of(message: Any) -> tuple[str, dict[str, Any], int]:
    """Trainer that claims, the versions that it goes on from by policy, and the newest epoch that it knows of."""
    trainer, versions, after = fields(message, trainer=str, policies=dict, after=int)
    if not 0 < len(trainer) <= _LONGEST_NAME:
        raise WireError(f"field trainer has {len(trainer)} characters: send 1 to {_LONGEST_NAME}")
    if not versions:
        raise WireError("field policies is empty: send policy -> version")
    return trainer, versions, after


def epoch_of(message: Any) -> int:
    """The epoch of the trainer that sends it."""
    given = message.get("epoch", "missing") if isinstance(message, dict) else 0
    if given == "missing" or given == 0:
        raise WireError(
            f"field epoch is {given}: a trainer claims its policies first, and sends the epoch it was given"
        )
    return fields(message, epoch=int)[0]


def mismatches_of(message: Any) -> dict[str, tuple[float, int]]:
    """Mismatches between engine and trainer, by trajectory: sum of k3 over its tokens, and their number."""
    if "mismatches" not in message:
        return {}
    (found,) = fields(message, mismatches=dict)
    for name, pair in found.items():
        match name, pair:
            case str(), [int() | float() as k3, int() as tokens] if 0 <= k3 < math.inf and tokens > 0:
                continue
        raise WireError("field mismatches is no map of pairs: send trajectory_id -> [sum of k3, number of tokens]")
    return {name: (float(k3), tokens) for name, (k3, tokens) in found.items()}


def refused_of(message: Any) -> tuple[int, dict[str, str]]:
    """Step of the batch that a trainer refuses, and why it cannot train on some trajectories of it, by their id."""
    step, reasons = fields(message, step=int, trajectories=dict)
    for trajectory_id, reason in reasons.items():
        if not isinstance(trajectory_id, str) or not isinstance(reason, str):
            raise WireError("field trajectories is no map of texts: send trajectory_id -> why it cannot be trained on")
    if not reasons:
        raise WireError("field trajectories is empty: name those that cannot be trained on")
    return step, {name: reason[:_LONGEST_NAME] for name, reason in reasons.items()}


def lease_ids_of(message: Any) -> list[str]:
    (lease_ids,) = fields(message, lease_ids=list)
    if len(lease_ids) > MOST_SLOTS:
        raise WireError(f"field lease_ids has {len(lease_ids)} items: send {MOST_SLOTS} at most")
    for index, lease_id in enumerate(lease_ids):
        if not isinstance(lease_id, str):
            raise WireError(f"field lease_ids[{index}] is {type(lease_id).__name__}: send str")
    return lease_ids


def policy_of(message: Any, policies: Collection[str]) -> str:
    """The policy that a message is about, one of the run's."""
    (policy,) = fields(message, policy=str)
    if policy not in policies:
        raise WireError(f"field policy is {policy[:_LONGEST_NAME]!r}: this run has {', '.join(policies)}")
    return policy


def version_of(message: Any, name: str, *, oldest: int, newest: int) -> int:
    """The version in field `name`, which must be from `oldest` to `newest`."""
    (version,) = fields(message, **{name: int})
    if not oldest <= version <= newest:
        raise WireError(f"field {name} is {version}: this run has made versions {oldest} to {newest} of that policy")
    return version


def held_of(message: Any) -> frozenset[int] | None:
    """Versions that a worker can serve; None where it does not say."""
    if "held" not in message:
        return None
    (versions,) = fields(message, held=list)
    if len(versions) > MOST_SLOTS or not all(type(version) is int for version in versions):
        raise WireError(f"field held is no list of versions: send {MOST_SLOTS} numbers at most")
    return frozenset(versions)


def episodes_of(
    message: Any, newest: Mapping[str, int], needed: Mapping[str, Collection[str]], bounds: Bounds
) -> list[tuple[str, Episode]]:
    """Ids of leases and the episodes played under them; one wrong item refuses the whole message. `newest` versions and
    `needed` outcomes are by policy."""
    (items,) = fields(message, items=list)
    played = []
    for index, item in enumerate(items):
        try:
            lease_id, episode = fields(item, lease_id=str, episode=Episode)
        except WireError as error:
            raise WireError(f"items[{index}]: {error}") from error
        check_episode(episode, newest=newest, bounds=bounds, where=f"items[{index}].episode")
        check_outcomes(episode, needed, where=f"items[{index}].episode")
        played.append((lease_id, episode))
    return played
