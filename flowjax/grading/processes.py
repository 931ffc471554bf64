"""Graders in processes of their own, for libraries that need a main thread (signals), or that can hang or crash.

    with GraderProcesses("flowjax.grading.math:equal", workers=2) as graders:
        verdict = graders.call("1/2", "0.5")

Requests and answers are msgpack after a length, over the worker's standard input and output. A worker that takes too
long, or dies, is counted and replaced. The limit is processor time, which the kernel counts; a call without an answer
in `PATIENCE` times as long on the clock says nothing about the answer that was to be graded. `call` may be called from
any thread; it waits for a free worker. A worker is
`python -m flowjax.grading.processes <module>:<function> <pid of its parent> <processor seconds for an answer>`.
"""

import contextlib
import importlib
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

import msgpack

from flowjax.grading.sandbox import NoProcessorError

_LENGTH = struct.Struct("<I")  # bytes of the message that follows
PATIENCE = 10.0  # times `cpu_s`, on the clock: the machine may be busy


class GraderError(RuntimeError):
    """A grader that gave no verdict: it took too long, died or raised."""


@dataclass
class GraderCounts:
    """Workers that took too long, workers that died, and calls that raised."""

    timeouts: int = 0
    crashes: int = 0
    errors: int = 0


class GraderProcesses:
    """A pool of processes that each hold one function, named `package.module:function`.

    Arguments and answer are values that msgpack can carry. `start_timeout_s` bounds the import of the function on the
    clock, `cpu_s` the processor time of a call.
    """

    def __init__(self, function: str, *, workers: int = 1, cpu_s: float = 10.0, start_timeout_s: float = 60.0):
        self.counts = GraderCounts()
        self._function, self._cpu_s, self._start_timeout_s = function, cpu_s, start_timeout_s
        self._free: queue.SimpleQueue[_GraderProcess | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._free.put(None)  # started when first needed
        self._workers = workers

    def __enter__(self) -> "GraderProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """Wait for running calls and end all processes."""
        for _ in range(self._workers):
            if (worker := self._free.get()) is not None:
                worker.kill()
            self._free.put(None)

    def call(self, *arguments: Any) -> Any:
        """The function's answer.

        Raises:
            GraderError: it raised, died or took too long; in the last two cases the worker is replaced.
            NoProcessorError: the machine could not start a worker, or no answer came in time on the clock, within its
                processor time, and the worker is replaced. Neither says anything of the arguments.
        """
        worker, limit_s = self._free.get(), self._start_timeout_s
        try:
            if worker is None:
                worker = self._started()
                worker.answer(limit_s)
            worker.send(arguments)
            limit_s = PATIENCE * self._cpu_s
            error, value = worker.answer(limit_s)
        except TimeoutError:
            self.counts.timeouts += 1
            worker = _killed(worker)
            raise NoProcessorError(f"{self._function} gave no answer within {limit_s} s on the clock") from None
        except OSError as died:
            ended_by = worker.kill() if worker is not None else 0
            worker = None
            if ended_by == -signal.SIGPROF:
                self.counts.timeouts += 1
                raise GraderError(f"{self._function} took more than {self._cpu_s} s of processor time") from None
            self.counts.crashes += 1
            raise GraderError(f"the process of {self._function} died") from died
        except BaseException:  # an interrupt, or arguments that cannot be sent: its next answer may be to this call
            worker = _killed(worker)
            raise
        finally:
            self._free.put(worker)  # None where it was killed: the next call starts another
        if error is not None:
            self.counts.errors += 1
            raise GraderError(f"{self._function} raised {error}")
        return value

    def _started(self) -> "_GraderProcess":
        try:
            return _GraderProcess(self._function, self._cpu_s)
        except OSError as error:  # too many processes or open files
            raise NoProcessorError(f"{self._function}: its process could not be started: {error}") from error


def _killed(worker: "_GraderProcess | None") -> None:
    if worker is not None:
        worker.kill()


class _GraderProcess:
    """The caller's end of one process."""

    def __init__(self, function: str, cpu_s: float):
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flowjax.grading.processes", function, str(os.getpid()), str(cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def send(self, arguments: tuple[Any, ...]) -> None:
        _write(self._input, list(arguments))

    def answer(self, timeout_s: float) -> list[Any]:
        """[error or None, value].

        Raises:
            TimeoutError: there is none in time.
            OSError: the process is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline_s))
        return msgpack.unpackb(self._read(length, deadline_s))

    def _read(self, size: int, deadline_s: float) -> bytes:
        data, waiting = b"", select.poll()  # `select` refuses descriptors from 1024 on, which a busy rollout has
        waiting.register(self._output, select.POLLIN)
        while len(data) < size:
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0 or not waiting.poll(1000 * wait_s):
                raise TimeoutError
            got = os.read(self._output.fileno(), size - len(data))
            if not got:
                raise BrokenPipeError
            data += got
        return data

    def kill(self) -> int:
        """End the process. Returns its exit status: -n where signal n ended it, now or before."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()
        self._output.close()
        return status


def _write(stream: BinaryIO | Any, message: list[Any]) -> None:
    body: bytes = msgpack.packb(message)  # pyright: ignore[reportAssignmentType] (the stub allows None)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def _serve(function: Callable[..., Any], requests: BinaryIO, answers: BinaryIO, cpu_s: float) -> None:
    while header := requests.read(_LENGTH.size):
        arguments = msgpack.unpackb(requests.read(*_LENGTH.unpack(header)))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF, without a handler, ends the process even in C code
        try:
            answer = [None, function(*arguments)]
        except Exception as error:  # reported to the caller, who decides what it means
            answer = [f"{type(error).__name__}: {error}", None]
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answers, answer)


def _leave_with(parent: int) -> None:
    """End this process when its parent has ended: it is then adopted by another, and `getppid` changes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(argv: list[str]) -> None:
    threading.Thread(target=_leave_with, args=(int(argv[2]),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that a grader prints goes to standard error, not between the answers
    module, _, name = argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    _write(answers, [None, None])  # ready
    _serve(function, sys.stdin.buffer, answers, float(argv[3]))


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv)
