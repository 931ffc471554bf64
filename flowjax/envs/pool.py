"""Environments in worker processes, outside the event loop: one that hangs or crashes costs only its own episode.

A worker holds many environments and answers their requests in turn. When a request takes too long the worker is killed;
the episode that hung gets `EnvDied`, and the worker's other episodes continue on a new worker by replaying their
actions, which is exact because worlds are deterministic given task and seed.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.envs import EnvDied, Observation, RemoteEnv, Step, World, WorldError, find_world
from flowjax.envs.worker import (
    BUSY,
    DEADLINE_NS,
    STARTING,
    Frames,
    frame,
    framed,
    pack_task,
    unpack_observation,
    unpack_step,
)
from flowjax.records import Status, Task

MAX_LOSSES = 3  # a call that has lost so many workers fails; a slot whose workers fail to start so often is down
START_AGAIN_S = 2.0  # pause after the machine had no memory or process for a worker


_log = logging.getLogger(__name__)


class _WorkerLost(Exception):
    """The worker is gone, and not by this session's fault: replay on a new one and go on."""


@dataclass
class PoolCounts:
    """Counts of a pool: workers killed for time-outs, workers that died, episodes replayed on another worker."""

    timeouts: int = 0
    crashes: int = 0
    replays: int = 0


class _WorkerProcess(asyncio.Protocol):
    """The parent's end of one worker process."""

    def __init__(self, counts: PoolCounts, step_timeout_s: float, start_timeout_s: float):
        self._counts = counts
        self._hung_up = False
        self.sessions = 0
        self.alive = True
        self.timed_out = False
        self.offender = 0  # session whose request brought the worker down
        self.lost = asyncio.Event()
        self._frames = Frames()
        self._waiting: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._outbox: list[Any] = []
        self._start(step_timeout_s, start_timeout_s)

    def _start(self, step_timeout_s: float, start_timeout_s: float) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            # Memory and not messages, since a worker that hangs can send none. Its deadline is set before it starts.
            self._page = memoryview(mmap.mmap(shared.fileno(), mmap.PAGESIZE)).cast("q")
            self._page[DEADLINE_NS] = time.monotonic_ns() + int(start_timeout_s * 1e9)
            self._page[BUSY] = STARTING
            fds = (theirs.fileno(), shared.fileno())
            numbers = (os.getpid(), *fds, step_timeout_s, start_timeout_s)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flowjax.envs.worker", *map(str, numbers)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "PYTHONHASHSEED": "0",  # the order of sets must be equal in all workers, or a replay would differ
                },
                start_new_session=True,  # its own process group: `kill` also ends processes that environments started
            )

    @property
    def started(self) -> bool:
        """True once the worker is ready for requests; before, a loss counts as a failed start."""
        return self._page[BUSY] != STARTING

    async def connect(self) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    def call(self, session: int, number: int, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Send a request. The returned future holds the answer, or fails with `_WorkerLost` or `EnvDied`."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if self.alive:
            self._waiting[session, number] = future
            self.send([session, number, name, *arguments])
        else:
            future.set_exception(_WorkerLost())
        return future

    def send(self, request: list[Any]) -> None:
        """Queue a request; all requests of one round of the event loop are written together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)

    def _flush(self) -> None:
        if self.alive:
            self._transport.write(framed(self._outbox, self._unsendable))
        self._outbox.clear()

    def _unsendable(self, request: list[Any], reason: str) -> bytes:
        future = self._waiting.pop((request[0], request[1]), None)
        if future is not None and not future.done():
            remedy = "make payloads of tasks of texts, numbers, lists and maps"
            future.set_exception(
                EnvDied(f"{request[2]} cannot be sent to the environment ({reason}): {remedy}", "env_error")
            )
        return b""

    def data_received(self, data: bytes) -> None:
        for session, number, error, value in self._frames.feed(data):
            future = self._waiting.pop((session, number), None)
            if future is None or future.done():
                continue  # its episode was cancelled
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(EnvDied(*error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._count()
        # Killed for a time-out, yet the deadline lies ahead: before the kill the worker went on to a new request, whose
        # session is not to blame.
        spared = self.timed_out and time.monotonic_ns() < self._page[DEADLINE_NS]
        self.offender = 0 if spared else max(self._page[BUSY], 0)  # STARTING is below 0: no session is to blame
        self.kill()
        status: Status = "timeout" if self.timed_out else "env_error"
        message = "the environment took too long" if self.timed_out else "the environment's process died"
        for (session, _), future in self._waiting.items():
            if not future.done():
                future.set_exception(EnvDied(message, status) if session == self.offender else _WorkerLost())
        self._waiting.clear()
        self.lost.set()

    def _count(self) -> None:
        if self.timed_out:
            self._counts.timeouts += 1
        elif not self._hung_up:
            self._counts.crashes += 1

    def overdue(self) -> bool:
        # The page has no lock: the session is read again, in case the worker went on to another one in between.
        busy = self._page[BUSY]
        deadline_ns = self._page[DEADLINE_NS]
        return busy != 0 and busy == self._page[BUSY] and time.monotonic_ns() > deadline_ns

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Return once the killed process has ended. Polls: a machine out of resources may have no thread to wait in."""
        while self.process.poll() is None:
            await asyncio.sleep(0.01)

    def hang_up(self) -> None:
        self._hung_up = True
        self._transport.close()


class EnvPool:
    """Worker processes for environments; an async context manager.

        async with EnvPool(workers=2, step_timeout_s=10.0) as pool, pool.session(path, options) as env:
            observation = await env.reset(task, seed)

    Start it from a thread that lives as long as the pool: the kernel kills the workers when that thread ends
    (`PR_SET_PDEATHSIG` is by thread).
    """

    def __init__(self, *, workers: int = 1, step_timeout_s: float = 10.0, start_timeout_s: float = 120.0):
        self.counts = PoolCounts()
        self._timeouts_s = (step_timeout_s, start_timeout_s)
        self._size = workers
        self._workers: list[_WorkerProcess] = []
        self._numbers = itertools.count(1)
        self._down: set[int] = set()  # slots whose worker failed to start several times in a row
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "EnvPool":
        self._workers = [_WorkerProcess(self.counts, *self._timeouts_s) for _ in range(self._size)]
        for slot, worker in enumerate(self._workers):
            await worker.connect()
            self._tasks.append(asyncio.create_task(self._keep(slot)))
        self._tasks.append(asyncio.create_task(self._watch()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            worker.hang_up()
            worker.kill()
            await worker.gone()

    async def _watch(self) -> None:
        """Kill workers that are past the deadline of their request."""
        while True:
            await asyncio.sleep(min(self._timeouts_s[0] / 4, 0.5))
            for worker in self._workers:
                if worker.alive and worker.overdue():
                    worker.timed_out = True
                    worker.kill()

    async def _keep(self, slot: int) -> None:
        """Replace the slot's worker whenever it is lost, until workers prove unable to start."""
        failed_starts = 0  # in a row, and per slot: one bad moment, which hits all slots at once, is no proof
        while True:
            worker = self._workers[slot]
            await worker.lost.wait()
            await worker.gone()
            failed_starts = 0 if worker.started else failed_starts + 1
            if failed_starts >= MAX_LOSSES:
                self._down.add(slot)
                return
            self._workers[slot] = await self._replacement(slot)

    async def _replacement(self, slot: int) -> _WorkerProcess:
        """A new worker, as soon as the machine has memory and a process for it. After `MAX_LOSSES` refusals the slot is
        down until then."""
        refused = 0
        while True:
            try:
                worker = _WorkerProcess(self.counts, *self._timeouts_s)
                await worker.connect()
                self._down.discard(slot)
                return worker
            except OSError as error:
                refused += 1
                if refused <= MAX_LOSSES:
                    _log.warning("an environment worker could not be started: %s", error)
                if refused >= MAX_LOSSES:
                    self._down.add(slot)  # episodes end rather than wait for it
                await asyncio.sleep(START_AGAIN_S)

    async def _choose(self) -> _WorkerProcess:
        """The living worker with the fewest sessions."""
        while not self._closed:
            if alive := [worker for worker in self._workers if worker.alive]:
                return min(alive, key=lambda worker: worker.sessions)
            if len(self._down) == self._size:
                raise EnvDied(f"no environment worker could be started, {MAX_LOSSES} times in a row", "env_error")
            await asyncio.sleep(0.01)  # one is being replaced
        raise EnvDied("the environment pool is closed", "cancelled")

    @contextlib.asynccontextmanager
    async def session(self, path: str, options: Mapping[str, Any]) -> AsyncIterator["PooledEnv"]:
        """An environment of the world at `path` for one episode."""
        env = PooledEnv(self, next(self._numbers), path, options)
        try:
            yield env
        finally:
            env.close()


class PooledEnv:
    """One environment in the pool; keeps its episode's requests, to replay them on another worker."""

    def __init__(self, pool: EnvPool, session: int, path: str, options: Mapping[str, Any]):
        self._pool, self._session, self._path = pool, session, path
        self._opening = ("open", path, dict(options))
        self._view_type: type = str
        self._worker: _WorkerProcess | None = None
        self._calls: list[tuple[Any, ...]] = []  # the reset and the actions since
        self._number = 0
        self._dead: EnvDied | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        self._calls.clear()
        packed = await self._call("reset", pack_task(task), seed)
        self._view_type = find_world(self._path).View
        return unpack_observation(packed, self._view_type)

    async def step(self, action: str) -> Step:
        return unpack_step(await self._call("step", action), self._view_type)

    def close(self) -> None:
        """Release the environment, for another session."""
        self._leave()
        if self._worker is not None and self._worker.alive:
            self._worker.send([self._session, 0, "close"])

    async def _call(self, *request: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        for _ in range(MAX_LOSSES):
            try:
                if self._worker is None or not self._worker.alive:
                    await self._take_up()
                value = await self._send(request)
            except _WorkerLost:  # another session's fault: replay on a new worker, and ask again
                continue
            except EnvDied as died:
                self._dead = died
                raise
            self._calls.append(request)  # only after the answer: otherwise a replay would send it, and the loop again
            return value
        self._dead = EnvDied(f"{MAX_LOSSES} workers died under one step of this episode", "env_error")
        raise self._dead

    async def _take_up(self) -> None:
        """Open the environment on a living worker and replay the episode's requests there."""
        if self._worker is not None:
            self._pool.counts.replays += 1
            self._leave()
        self._worker = await self._pool._choose()
        self._worker.sessions += 1
        for request in (self._opening, *self._calls):
            await self._send(request)

    async def _send(self, request: tuple[Any, ...]) -> Any:
        assert self._worker is not None
        self._number += 1
        return await self._worker.call(self._session, self._number, *request)

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.sessions -= 1


async def random_walk(world: type[World], env: RemoteEnv, task: Task, turns: int) -> list[dict[str, Any]]:
    """Take legal actions at random, the same in each call. Returns what the environment shows, turn by turn.

    Raises:
        EnvDied: the environment is gone.
        WorldError: it shows what cannot be used; the message names it and the remedy.
    """
    draws, observation = random.Random(0), await env.reset(task, 0)
    seen = [_shown_by(observation)]
    for turn in range(1, turns + 1):
        step = await env.step(draws.choice(observation.legal_actions or ("",)))
        if lacking := sorted(set(world.OUTCOMES) - step.outcome.keys()):
            has = f"has {', '.join(step.outcome) or 'nothing'}, but not {', '.join(lacking)}"
            raise WorldError(f"the outcome of turn {turn} {has}: name all of {world.__name__}.OUTCOMES in every step")
        for name, value in step.outcome.items():
            if not (isinstance(value, int | float) and math.isfinite(value)):
                raise WorldError(f"the outcome {name} of turn {turn} is {value!r}: give a finite number")
        if fault := graded(step.outcome):
            raise WorldError(f"the outcome of turn {turn} has {fault}")
        if not (isinstance(step.reward, int | float) and math.isfinite(step.reward)):
            raise WorldError(f"the reward of turn {turn} is {step.reward!r}: give a finite number")
        observation = step.observation
        shown = _shown_by(observation) | {name: getattr(step, name) for name in ("reward", "terminal", "valid")}
        # Counts may be times, which differ.
        shares = {f"outcome {name}": step.outcome[name] for name in world.OUTCOMES if name not in world.COUNTS}
        seen.append(shown | shares)
        if step.terminal:
            break
    for turn, shown in enumerate(seen):
        if not (isinstance(key := shown["state_key"], int) and 0 <= key < 2**64):
            raise WorldError(f"the state_key of turn {turn} is {key!r}: make it with flowjax.records.state_key")
    return seen


def is_one_state(walk: Sequence[Mapping[str, Any]]) -> bool:
    """True for a walk through different views that all have the same state key."""
    keys = {shown["state_key"] for shown in walk}
    return len(keys) == 1 and any(frame([shown["view"]]) != frame([walk[0]["view"]]) for shown in walk)


def check_repeats(
    first: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], *, where: str, remedy: str
) -> None:
    """Check that two walks of the same actions show the same.

    Raises:
        WorldError: they do not; the message names the first difference.
    """
    for turn, (one, other) in enumerate(zip(first, again, strict=False)):  # of unequal lengths, `terminal` differs
        for name in one:
            # NaN, and a dataclass with `eq=False`, do not equal themselves: what was sent is compared, too.
            if one[name] != other[name] and frame([one[name]]) != frame([other[name]]):
                gave = f"the same actions gave {name} {one[name]!r} on turn {turn}"
                raise WorldError(f"{gave} and, {where}, {other[name]!r}: {remedy}")


def graded(*outcomes: Mapping[str, Any]) -> str:
    """Fault where `success` is a grade, which rewards and evaluations read as one or the other; "" for none."""
    for success in (outcome.get("success", 0.0) for outcome in outcomes):
        if success not in (0, 1):
            remedy = "make it 1 or 0, and give a grade another name, for config.reward.components to weigh"
            return f"success {success!r}: {remedy}"
    return ""


def _shown_by(observation: Observation) -> dict[str, Any]:
    return {name: getattr(observation, name) for name in ("state_key", "legal_actions", "view")}
