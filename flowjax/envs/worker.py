"""A process that holds environments: `python -m flowjax.envs.worker`, started by `flowjax.envs.pool`.

Requests and replies are msgpack lists in frames of a length and a body, many to a frame, over an inherited socket. In
a page of memory shared with the parent the worker writes the session of its current request and the request's deadline,
so that the parent can tell which of the worker's many environments hangs.

The steps of a world with `STEPS_WAIT` wait for something outside the process. Its environments work concurrently, each
in a thread, and must bound their waiting themselves: they have no deadline.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import numpy as np

from flowjax.envs import Env, EnvDied, Observation, Step, World, find_world, view_reader
from flowjax.monitor.trouble import with_place
from flowjax.records import Task

LENGTH = struct.Struct("<I")
BUSY, DEADLINE_NS = 0, 1  # indices of 64-bit integers in the shared page
STARTING, IDLE = -1, 0  # values of BUSY that are no session
FLUSH_AFTER_S = 0.001  # replies gathered for longer are sent; looked at after each request
PR_SET_PDEATHSIG = 1
_LONGEST_SHOWN = 100  # characters of a wrong value
WAITING_THREADS = 256  # most environments of `STEPS_WAIT` worlds that work at the same time


def frame(messages: list[Any]) -> bytes:
    """The bytes of several messages; `Frames` cuts them apart again."""
    body: bytes = msgpack.packb(messages, default=_plain)  # pyright: ignore[reportAssignmentType] (the stub's None)
    try:
        _unpacked(body)  # here, where it costs one message: bytes that the other end cannot read would cost the worker
    except TypeError as error:
        raise TypeError("it has a map whose key is a tuple or a list: let keys be numbers or texts") from error
    return LENGTH.pack(len(body)) + body


def _unpacked(body: bytes | bytearray) -> list[Any]:
    return msgpack.unpackb(body, use_list=True, strict_map_key=False)


def framed(messages: list[Any], refused: Callable[[Any, str], bytes]) -> bytes:
    """The bytes of several messages. For one that cannot be encoded, `refused` makes the bytes in its place from the
    message and the reason, so that the others are sent all the same."""
    try:
        return frame(messages)
    except Exception as error:  # a view, a trace or a task of the user's own may hold anything
        if len(messages) > 1:
            return b"".join(framed([message], refused) for message in messages)
        return refused(messages[0], f"{type(error).__name__}: {error}")


def _plain(value: Any) -> Any:
    """Plain values for msgpack: a NumPy number becomes Python's, a dataclass a list, which `view_reader` reads back."""
    if isinstance(value, np.generic):
        return value.item()
    if not is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} cannot be sent to another process")
    return [getattr(value, field.name) for field in fields(value)]


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            yield from _unpacked(buffer[start + LENGTH.size : end])
            start = end
        del buffer[:start]


def pack_task(task: Task) -> list[Any]:
    return [task.task_id, task.world, task.seed, dict(task.payload)]


def unpack_observation(packed: list[Any], view_type: type) -> Observation:
    """An observation of a world whose views are of `view_type`."""
    view, legal, state_key = packed
    return Observation(view_reader(view_type)(view), tuple(legal), state_key)


def unpack_step(packed: list[Any], view_type: type) -> Step:
    observation, reward, terminal, valid, outcome, trace = packed
    return Step(unpack_observation(observation, view_type), reward, terminal, valid, outcome, trace)


def _pack_observation(observation: Observation, view_type: type) -> list[Any]:
    if not isinstance(observation.view, view_type):
        given = type(observation.view).__name__
        raise TypeError(f"an observation has a view of {given}, but the world's View is {view_type.__name__}")
    legal = observation.legal_actions
    if not isinstance(legal, list | tuple) or not all(isinstance(action, str) for action in legal):
        shown = repr(legal)[:_LONGEST_SHOWN]
        raise TypeError(f"an observation has the legal_actions {shown}: give a tuple of texts, or () for any text")
    return [observation.view, legal, observation.state_key]


class Worker:
    """Environments by session. Those of closed sessions are reused by later sessions of the same world and options."""

    def __init__(self, page: mmap.mmap, step_timeout_s: float, start_timeout_s: float):
        self._page = memoryview(page).cast("q")
        self._limits_ns = {"open": int(start_timeout_s * 1e9)}
        self._step_limit_ns = int(step_timeout_s * 1e9)
        self._envs: dict[int, tuple[str, Env, type]] = {}
        self._worlds: dict[str, World] = {}
        self._spare: defaultdict[str, list[Env]] = defaultdict(list)
        self._turns: dict[int, threading.Lock] = {}  # of sessions whose world waits: one request at a time
        self._page[BUSY] = IDLE

    def answer(self, request: list[Any]) -> list[Any]:
        """[session, number, (message, status) or None, value] for a request [session, number, name, *arguments]."""
        session, _, name = request[:3]
        limit_ns = self._limits_ns.get(name, self._step_limit_ns)
        # In this order: the parent must not see the new session with the old deadline, and kill it as overdue.
        self._page[DEADLINE_NS] = time.monotonic_ns() + limit_ns
        self._page[BUSY] = session
        try:
            return self._answer(request)
        finally:
            self._page[BUSY] = IDLE

    def waits(self, request: list[Any]) -> bool:
        """True for a request to a `STEPS_WAIT` world, which `answer_waiting` answers in another thread."""
        return request[0] in self._turns

    def answer_waiting(self, request: list[Any]) -> list[Any]:
        """As `answer`, without a deadline."""
        turn = self._turns.get(request[0])
        with turn or contextlib.nullcontext():
            return self._answer(request)

    def _answer(self, request: list[Any]) -> list[Any]:
        session, number, name, *arguments = request
        try:
            value = getattr(self, f"_{name}")(session, *arguments)
        except BaseException as error:  # any error of a world, even `sys.exit()`, ends only its own episode
            self._envs.pop(session, None)
            self._turns.pop(session, None)
            if isinstance(error, EnvDied):  # the world itself says what has ended the episode
                return [session, number, [str(error), error.status], None]
            return [session, number, [with_place(error), "env_error"], None]
        return [session, number, None, value]

    def _open(self, session: int, path: str, options: dict[str, Any]) -> None:
        kind = json.dumps([path, options], sort_keys=True)
        spare = self._spare[kind]
        if (world := self._worlds.get(kind)) is None:
            world = self._worlds[kind] = find_world(path)(**options)
        env = spare.pop() if spare else world.env()
        self._envs[session] = (kind, env, world.View)
        if world.STEPS_WAIT:
            self._turns[session] = threading.Lock()

    def _reset(self, session: int, task: list[Any], seed: int) -> list[Any]:
        _, env, view_type = self._envs[session]
        return _pack_observation(env.reset(Task(*task), seed), view_type)

    def _step(self, session: int, action: str) -> list[Any]:
        _, env, view_type = self._envs[session]
        step = env.step(action)
        return [
            _pack_observation(step.observation, view_type),
            step.reward,
            step.terminal,
            step.valid,
            dict(step.outcome),
            step.trace,
        ]

    def _close(self, session: int) -> None:
        self._turns.pop(session, None)
        if session in self._envs:
            kind, env, _ = self._envs.pop(session)
            self._spare[kind].append(env)


def _unsendable(answer: list[Any], reason: str) -> bytes:
    remedy = "make views, outcomes and traces of texts, numbers, lists and maps"
    return frame([[*answer[:2], [f"the environment's answer cannot be sent ({reason}): {remedy}", "env_error"], None]])


def serve(connection: socket.socket, worker: Worker) -> None:
    """Answer requests in order until the parent hangs up; those to `STEPS_WAIT` worlds as soon as each is done."""
    frames = Frames()
    replies: list[Any] = []
    sending = threading.Lock()
    threads = ThreadPoolExecutor(WAITING_THREADS, "waiting")

    def send(messages: list[Any]) -> None:
        with sending:
            connection.sendall(framed(messages, _unsendable))

    def answer_later(request: list[Any]) -> None:
        answer = worker.answer_waiting(request)
        with contextlib.suppress(OSError):  # the parent has hung up meanwhile
            send([answer])

    while data := connection.recv(1 << 20):
        oldest_s = time.monotonic()
        for request in frames.feed(data):
            if worker.waits(request):
                threads.submit(answer_later, request)
                continue
            replies.append(worker.answer(request))
            if time.monotonic() - oldest_s > FLUSH_AFTER_S:
                send(replies)
                replies.clear()
                oldest_s = time.monotonic()
        if replies:
            send(replies)
            replies.clear()
    threads.shutdown(wait=False, cancel_futures=True)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies: a hung environment would never notice that itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above, which then has no effect
        sys.exit("the process that started this environment worker is gone")


def main(argv: list[str]) -> None:
    parent, socket_fd, page_fd = (int(argument) for argument in argv[1:4])
    step_timeout_s, start_timeout_s = (float(argument) for argument in argv[4:6])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    page = mmap.mmap(page_fd, mmap.PAGESIZE)
    hung_up = contextlib.suppress(BrokenPipeError, ConnectionResetError)  # on our replies
    with socket.socket(fileno=socket_fd) as connection, hung_up:
        serve(connection, Worker(page, step_timeout_s, start_timeout_s))
        os._exit(0)  # not waiting for threads whose environments still wait


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv)
