"""Untrusted programs in a sandbox: bubblewrap where there is one; always resource limits, a wall clock, output caps.

    result = run("print(6 * 7)")        # ProgramResult(stdout=b"42\\n", status="ok", ...)

A program chooses freely what it prints and how it ends: neither proves that it is right. Verdicts are in
`flowjax.grading.code`, which compares outside the sandbox. What the sandbox keeps out, and what not: docs/sandbox.md.
"""

import contextlib
import functools
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from flowjax.grading.sandbox_processes import (
    COUNTS_WAITING,
    GROWTH_BYTES_PER_S,
    ONE_THREAD,
    SHORTEST_WATCH_S,
    WATCH_S,
    ControlGroup,
    Interpreter,
    Limits,
    ProcessTree,
    ProcessUsage,
    box_uid,
    bubblewrap_command,
    groups_parent,
    interpreters,
    limited_command,
    seccomp_filter,
)

__all__ = [
    "Box",
    "Isolation",
    "IsolationError",
    "Limits",
    "NoProcessorError",
    "ProgramResult",
    "isolation",
    "require_isolation",
    "run",
]

Status = Literal["ok", "error", "killed", "timeout", "output", "no_processor"]
BUBBLEWRAP, RLIMITS_ONLY = "bubblewrap", "rlimits only"
_CHUNK_BYTES = 1 << 16
_REPORT_BYTES = 1 << 12  # of bubblewrap's two lines of JSON
_COMPLAINT_CHARACTERS = 200
_PROBE = "open('/dev/null', 'w').close(); print('ready')"  # opens /dev/null, which libraries need on import
_BULK_BYTES = 1 << 12  # size of the smallest pipe: after moving as much, the program may have waited for us
_LATE_S = 1.0  # most that counts between two looks: the machine stood still if it was longer
_QUESTION_S = 1.0  # grace beyond a question's limit before the box ends: its own clock should have rung by then
_DRAIN_S = 0.5  # for reading what a program wrote just before its end
STARTS = 2  # tries of a program that the machine had no processor for, before that is an error


class IsolationError(ValueError):
    """This machine cannot isolate untrusted programs, and nobody allowed them to run without."""


class NoProcessorError(RuntimeError):
    """The machine was too busy to start a program, or to give it its time on a processor: nothing is known about it."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation of a program from this machine. `drop_root`: we are root, and the program gets another uid;
    `reads_all`: that uid may read all files (without bubblewrap, where only root can read the interpreter)."""

    name: str
    interpreter: Interpreter
    drop_root: bool
    why: str = ""  # why it is not bubblewrap
    reads_all: bool = False


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program. `error`: an exit code other than 0; `killed`: a signal, or too much memory; `output`: it
    wrote too much; `timeout`: it used up its processor time, or its time asleep. `no_processor` says nothing about the
    program: the machine had no processor for it until the wall clock's guard (`run` raises instead).

    `stdout` and `stderr` are cut at the output limit. `cpu_s` includes the start of the sandbox and of Python.
    """

    stdout: bytes
    stderr: bytes
    status: Status
    seconds: float
    cpu_s: float
    isolation: str


@functools.cache
def isolation() -> Isolation:
    """The best isolation that works here, by a trial start of each. Cached for the process.

    Raises:
        IsolationError: no interpreter starts, not even with resource limits only.
    """
    reasons: list[str] = []
    root = os.geteuid() == 0
    if shutil.which("bwrap") is None:
        reasons.append("bubblewrap is not installed")
    else:
        reasons += [f"{tool} is not installed" for tool in ("prlimit", "setpriv") if shutil.which(tool) is None]
        for interpreter in interpreters() if not reasons else ():
            for drop_root in (True, False) if root else (False,):
                found = Isolation(BUBBLEWRAP, interpreter, drop_root)
                if (failure := _failure(found)) is None:
                    return found
                reasons.append(failure)
    why = reasons[0]
    for drop_root, reads_all in ((True, False), (True, True), (False, False)) if root else ((False, False),):
        for interpreter in interpreters():
            found = Isolation(RLIMITS_ONLY, interpreter, drop_root, why, reads_all)
            if (failure := _failure(found)) is None:
                return found
            reasons.append(failure)
    raise IsolationError(f"no Python interpreter starts in the sandbox: {'; '.join(reasons)}")


def _failure(candidate: Isolation) -> str | None:
    """Reason for which a trial start failed, None where it succeeded."""
    try:
        result = run(_PROBE, isolation=candidate, limits=Limits(idle_s=20.0))
    except (OSError, NoProcessorError) as error:
        return str(error)
    if result.stdout == b"ready\n":
        return None
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a trial start ended with {result.status}"


def require_isolation(*, allow_none: bool = False) -> Isolation:
    """The isolation in force, for a start-up check.

    Raises:
        IsolationError: there are only resource limits, and `allow_none` does not accept that.
    """
    found = isolation()
    if found.name != BUBBLEWRAP and not allow_none:
        raise IsolationError(
            f"untrusted programs would run here with resource limits only ({found.why}): install bubblewrap 0.8 or "
            "newer (apt-get install bubblewrap) and allow it user namespaces; or, on a machine that you can lose, "
            "allow programs to run without isolation"
        )
    return found


def run(
    program: str,
    stdin: bytes | str = b"",
    limits: Limits | None = None,
    *,
    isolation: Isolation | None = None,
    allow_none: bool = False,
    packages: Sequence[str] = (),
) -> ProgramResult:
    """Run a Python program to its end or to the first limit that it breaks.

    `packages` are folders that it may import from, shown to it read-only. `isolation` overrides the one in force.

    Raises:
        IsolationError: see `require_isolation`.
        NoProcessorError: `STARTS` times in a row the machine had no processor for it.
        OSError: the box did not start, which says nothing about the program.
    """
    where = isolation or require_isolation(allow_none=allow_none)
    limits = limits or Limits()
    for _ in range(STARTS):
        with Box(program, limits, where, packages=packages) as box:
            box.send(stdin.encode() if isinstance(stdin, str) else stdin)
            result = box.finish()
        if result.status != "no_processor":
            return result
    raise NoProcessorError(
        f"a program waited for a processor for most of {limits.wall_guard_s:g} s (wall_guard_s), {STARTS} times: run "
        "less beside it, or raise the guard"
    )


class Box:
    """A program that runs in the sandbox, and its streams. A context manager; leaving it kills whatever is left.

    More unread output than the limit ends the program. While a caller waits for it, its time and memory are measured at
    least every `WATCH_S`.
    """

    def __init__(self, program: str, limits: Limits, isolation: Isolation, *, packages: Sequence[str] = ()):
        self._limits, self._isolation = limits, isolation
        packages = [os.path.realpath(folder) for folder in packages]
        self._folder: str | None = None
        self._group: ControlGroup | None = None
        self._report: int | None = None  # descriptor of bubblewrap's report: what it writes there is JSON
        self._pending = bytearray()
        self._input_ended = False
        self._ending: Status | None = None
        self._exit: tuple[int, float] | None = None  # status as of `os.waitpid`, seconds of processor time
        self._selector = selectors.DefaultSelector()
        self._started_s = time.monotonic()
        self._drained_s = float("inf")  # when to stop reading the output of a program that has ended
        try:
            self._process = self._start(program, packages)
        except OSError:  # of too many open files, perhaps: those of this one are not kept until they are collected
            self._selector.close()
            self._remove()
            raise
        self._tree = ProcessTree(self._process.pid, complete=3 if isolation.name == BUBBLEWRAP else 1)
        self._watch = _Watch(limits, count_threads=not isolation.drop_root)
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._searched = 0  # leading bytes of stdout that are known to have no end of a line
        self._streams: dict[str, IO[bytes]] = {}
        for name in ("stdin", "stdout", "stderr"):
            stream = getattr(self._process, name)
            os.set_blocking(stream.fileno(), False)
            self._streams[name] = stream
            if name != "stdin":
                self._selector.register(stream, selectors.EVENT_READ, name)

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()
        for name in list(self._streams):
            self._close(name)
        self._selector.close()
        self._reap(block=True)
        self._remove()

    def send(self, data: bytes) -> None:
        """Queue input; it is written while output is read."""
        if data and "stdin" in self._streams:
            if not self._pending:
                self._selector.register(self._streams["stdin"], selectors.EVENT_WRITE, "stdin")
            self._pending += data

    def limit_question(self, case_cpu_s: float) -> None:
        """Bound the answer to the question that is asked now; holds until the next call.

        The runner's own clock in the box should end it earlier: this one is for programs that evade that clock.
        """
        self._watch.begin_question(case_cpu_s)

    @property
    def status(self) -> Status | None:
        """The limit that the program has broken, None before it breaks one."""
        return self._ending

    @property
    def complaint(self) -> str:
        """The last line of stderr so far, in brackets; "" for none."""
        lines = self._output["stderr"].decode(errors="replace").split("\n")
        return next((f" ({line.strip()[:_COMPLAINT_CHARACTERS]})" for line in reversed(lines) if line.strip()), "")

    def read_line(self) -> bytes | None:
        """The next whole line of stdout, None where the program ends or breaks a limit first."""
        out = self._output["stdout"]
        self._watch.begin()
        while (end := out.find(b"\n", self._searched)) < 0:
            self._searched = len(out)
            if "stdout" not in self._streams or not self._pump(by_line=True):
                return None
        line = bytes(out[:end])
        del out[: end + 1]
        self._searched = 0
        return line

    def finish(self) -> ProgramResult:
        """End the input and wait for the program's end."""
        self._input_ended = True
        self._watch.begin()
        if not self._pending:
            self._close("stdin")
        while self._streams.keys() & {"stdout", "stderr"} and self._pump():
            pass
        self._await_exit()
        status, cpu_s = self._exit or (signal.SIGKILL, 0.0)
        if self._ending is None and not self._began(status):
            raise OSError(f"a sandbox did not start{self.complaint}")
        cpu_s = max(cpu_s, self._watch.cpu_s)  # `wait4` does not count descendants that were killed unreaped
        seconds = time.monotonic() - self._started_s
        out, err = (bytes(self._output[name][: self._limits.output_bytes]) for name in ("stdout", "stderr"))
        return ProgramResult(out, err, self._ending or _status(status), seconds, cpu_s, self._isolation.name)

    def _began(self, status: int) -> bool:
        """False if bubblewrap has ended by itself before the program was there: it could not make the box."""
        if self._report is None or not os.WIFEXITED(status) or not os.WEXITSTATUS(status):
            return True
        return b'"exit-code"' in os.pread(self._report, _REPORT_BYTES, 0)

    def _start(self, program: str, packages: Sequence[str]) -> subprocess.Popen[bytes]:
        source = program.encode("utf-8", "surrogatepass")
        if self._isolation.name == BUBBLEWRAP:
            return self._start_bubblewrap(source, packages)
        return self._start_limited(source, packages)

    def _start_bubblewrap(self, source: bytes, packages: Sequence[str]) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            program_fd = _memory_file(stack, source)
            calls = seccomp_filter()
            filter_fd = None if calls is None else _memory_file(stack, calls)
            self._report = os.memfd_create("report")
            command = bubblewrap_command(
                self._limits,
                self._isolation.interpreter,
                program_fd=program_fd,
                filter_fd=filter_fd,
                report_fd=self._report,
                drop_root=self._isolation.drop_root,
                packages=packages,
            )
            if parent := groups_parent():
                self._group = ControlGroup(parent, self._limits)
                command = self._group.holding(command)
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[fd for fd in (program_fd, filter_fd, self._report) if fd is not None],
                env={"PATH": os.environ.get("PATH", "/usr/bin")},
            )

    def _start_limited(self, source: bytes, packages: Sequence[str]) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="flowjax-box-")
        path = Path(self._folder, "program.py")
        path.write_bytes(source)
        uid = box_uid() if self._isolation.drop_root else None
        if uid is not None:
            os.chown(self._folder, uid, uid)
        reads_all = self._isolation.reads_all
        command = limited_command(
            self._limits,
            self._isolation.interpreter,
            program=str(path),
            uid=uid,
            reads_all=reads_all,
            packages=packages,
        )
        user = None if reads_all else uid  # otherwise it becomes that user by itself
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env={"PATH": "/usr/bin", "HOME": self._folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **ONE_THREAD},
            process_group=0,
            user=user,
            group=user,
            extra_groups=None if user is None else (),
        )

    def _pump(self, *, by_line: bool = False) -> bool:
        """Move some bytes, then measure. False if nothing can follow: the program has ended or broken a limit.

        After many bytes, or after a line where lines are answers (`by_line`), the program counts as having `answered`:
        it may have been waiting for this process since long before.
        """
        if self._ending is not None:
            return False
        ready = self._selector.select(max(0.0, min(self._drained_s - time.monotonic(), self._watch.pause_s)))
        moved = sum(self._write() if key.data == "stdin" else self._read(key.data) for key, _ in ready)
        if time.monotonic() > self._drained_s:
            return False
        # The program has ended, but what it wrote last may still be in the pipes: read on for a moment.
        if self._exit is None and self._reap():
            # In bubblewrap nothing is left to write; without it, processes that it left behind may hold the pipes open.
            self._kill_group()
            self._drained_s = time.monotonic() + _DRAIN_S
        if self._exit is None and self._ending is None:
            answered = by_line and self._output["stdout"].find(b"\n", self._searched) >= 0
            self._look(answered=answered or moved >= _BULK_BYTES)
        return self._ending is None

    def _read(self, name: str) -> int:
        data = os.read(self._streams[name].fileno(), _CHUNK_BYTES)
        if not data:
            self._close(name)
        self._output[name] += data
        if len(self._output[name]) > self._limits.output_bytes:
            self._break("output")
        return len(data)

    def _write(self) -> int:
        written = 0
        try:
            written = os.write(self._streams["stdin"].fileno(), memoryview(self._pending)[:_CHUNK_BYTES])
            del self._pending[:written]
        except BrokenPipeError:
            self._pending.clear()
        if not self._pending:
            self._selector.unregister(self._streams["stdin"])
            if self._input_ended:
                self._close("stdin")
        return written

    def _close(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()

    def _look(self, *, answered: bool) -> None:
        if broken := self._watch.look(self._tree, answered=answered):
            self._break(broken)

    def _break(self, status: Status) -> None:
        self._ending = status
        self._kill()

    def _await_exit(self) -> None:
        pause_s = 0.0002
        while not self._reap() and self._ending is None:
            self._look(answered=False)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01, self._watch.pause_s)
        self._reap(block=True)

    def _reap(self, *, block: bool = False) -> bool:
        """True once the program has ended; keeps its exit status and processor time."""
        if self._exit is None:
            pid, status, usage = os.wait4(self._process.pid, 0 if block else os.WNOHANG)
            if pid:
                self._exit = (status, usage.ru_utime + usage.ru_stime)
                self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._exit is not None

    def _kill(self) -> None:
        """Kill bubblewrap, with which its namespace ends; without bubblewrap, the program's process group."""
        if self._exit is None:
            os.kill(self._process.pid, signal.SIGKILL)  # not `Popen.kill`, which may reap it: its usage would be lost
        self._kill_group()

    def _kill_group(self) -> None:
        if self._isolation.name != BUBBLEWRAP:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _remove(self) -> None:
        if self._report is not None:
            os.close(self._report)
        if self._group is not None:
            self._group.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Watch:
    """Finds the limit that the processes of a box have broken, from what they used while a caller waited for them.

    The time between two answers consists of time on a processor, waiting for one, and asleep. Sleep counts only where
    nothing has been answered and no process is awake: then the kernel has counted all of the waiting. "Spent" is all
    time except waiting that the box cannot have caused itself. It ends the box once it exceeds both limits together,
    even if little of it was seen on processors or asleep. It counts up to the answer only: this process may be late to
    read one.

    `pause_s` is the time until the next look: the less memory is left, the shorter. Processes are counted here
    (`count_threads`) where the box has no uid of its own: the kernel's limit is by uid, so it would count our other
    processes, too, and it never applies to root, not even in a user namespace.
    """

    def __init__(self, limits: Limits, *, count_threads: bool = False):
        self._limits, self._count_threads = limits, count_threads
        self.pause_s = WATCH_S
        self._since_s = self._looked_s = time.monotonic()
        self._before = ProcessUsage(0.0, 0.0, True, 0, ())
        self._last = self._before
        # Each in two sums: over all waits of a caller so far; over those before the present one.
        self._asleep_s = self._asleep_before_s = 0.0
        self._wall_s = self._wall_before_s = 0.0
        self._unexcused_s = self._unexcused_before_s = 0.0  # all time except excused waiting for a processor
        self._spent_s = self._spent_before_s = 0.0  # likewise, but from a look to an answer only time on processors
        self._question = (float("inf"), float("inf"))  # `cpu_s` and `_spent_s` at which the question's time is used up

    @property
    def cpu_s(self) -> float:
        """Seconds on processors, as of the last look."""
        return self._last.cpu_s

    def begin_question(self, case_cpu_s: float) -> None:
        """Count time from now on for one question, which may take `case_cpu_s` on processors, and as long asleep."""
        self._question = (self._last.cpu_s + case_cpu_s + _QUESTION_S, self._spent_s + 2 * case_cpu_s + _QUESTION_S)

    def begin(self) -> None:
        """Start a caller's wait. The time of the next look stays as it is: of answers that follow each other fast, none
        may take long enough for one."""
        self._since_s = time.monotonic()
        self._before = self._last
        self._asleep_before_s, self._wall_before_s = self._asleep_s, self._wall_s
        self._unexcused_before_s, self._spent_before_s = self._unexcused_s, self._spent_s

    def look(self, tree: ProcessTree, *, answered: bool) -> Status | None:
        """The broken limit; None where there is none, or where the next look is not due yet."""
        now_s, limits = time.monotonic(), self._limits
        if now_s - self._looked_s < self.pause_s:
            return None
        last, since_s = self._last, max(self._since_s, self._looked_s)
        self._looked_s, self._last = now_s, tree.read()
        usage, wall_s = self._last, now_s - self._since_s
        self._wall_s = self._wall_before_s + wall_s
        excused_s = usage.excused_s - self._before.excused_s
        self._unexcused_s = self._unexcused_before_s + max(0.0, wall_s - excused_s)
        if answered:
            spent_s = usage.cpu_s - last.cpu_s
        else:  # may be negative: the kernel counts a wait when it ends, so it may be longer than since the last look
            spent_s = min(now_s - since_s, _LATE_S) - (usage.excused_s - last.excused_s)
        self._spent_s = max(self._spent_before_s, self._spent_s + spent_s)
        if not usage.awake and not answered:
            busy_s = usage.cpu_s - self._before.cpu_s + usage.waited_s - self._before.waited_s
            self._asleep_s = self._asleep_before_s + max(0.0, wall_s - busy_s)
        if self._exceeds_memory(usage) or (self._count_threads and usage.threads > limits.processes):
            return "killed"
        if usage.cpu_s > limits.cpu_s or self._asleep_s > limits.idle_s:
            return "timeout"
        most_cpu_s, most_spent_s = self._question
        spent_too_much = self._spent_s > min(limits.cpu_s + limits.idle_s, most_spent_s)
        if usage.cpu_s > most_cpu_s or (spent_too_much and COUNTS_WAITING):
            return "timeout"
        if self._wall_s > limits.wall_guard_s:  # its own fault only if it has used its limits' time, in whatever state
            return "timeout" if self._unexcused_s > limits.cpu_s + limits.idle_s else "no_processor"
        return None

    def _exceeds_memory(self, usage: ProcessUsage) -> bool:
        """True if the processes hold too much memory together; sets the time until the next look."""
        memory_bytes = usage.memory_bytes
        if memory_bytes > self._limits.memory_bytes:
            memory_bytes = usage.proportional_bytes()
        left_bytes = self._limits.memory_bytes - memory_bytes
        took_s = time.monotonic() - self._looked_s  # looks take a fifth of a processor at most
        self.pause_s = min(WATCH_S, max(SHORTEST_WATCH_S, left_bytes / GROWTH_BYTES_PER_S, 5 * took_s))
        return left_bytes < 0


def _memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    """Descriptor of a file in memory with this data, which a child inherits: nothing is written to a disk."""
    fd = os.memfd_create("box", 0)
    stack.callback(os.close, fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _status(status: int) -> Status:
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "ok"
    return "killed" if code < 0 or code > 128 else "error"
