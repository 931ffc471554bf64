"""Untrusted programs in a sandbox: bubblewrap where there is one; always resource limits, a wall clock, output caps.

    result = run("print(6 * 7)")        # Result(stdout=b"42\\n", status="ok", ...)

What a program prints and how it ends is its own doing: neither is proof of anything. Verdicts are in
`flowjax.grading.code`, which compares outside the sandbox. What is kept out, and what is not: docs/sandbox.md.
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

from flowjax.grading.sandbox_commands import (
    Interpreter,
    Limits,
    bubblewrap_command,
    interpreters,
    limited_command,
    own_uid,
)
from flowjax.grading.sandbox_seccomp import seccomp_filter

__all__ = ["Box", "Isolation", "IsolationError", "Limits", "Result", "isolation", "require_isolation", "run"]

Status = Literal["ok", "error", "killed", "timeout", "output"]
BUBBLEWRAP, RLIMITS_ONLY = "bubblewrap", "rlimits only"
_CHUNK_BYTES = 1 << 16
_PROBE = "print('ready')"
_DRAIN_S = 0.5  # for what a program wrote just before its end


class IsolationError(ValueError):
    """This machine cannot isolate untrusted programs, and nobody allowed them to run without."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What stands between a program and this machine. `drop_root`: we are root, and the program gets another uid."""

    name: str
    interpreter: Interpreter
    drop_root: bool
    why: str = ""  # why it is not bubblewrap


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended. `error`: an exit code other than 0; `killed`: a signal; `output`: it wrote too much.

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
    """The best isolation that a trial start shows to work here."""
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
    for drop_root in (True, False) if root else (False,):
        for interpreter in interpreters():
            found = Isolation(RLIMITS_ONLY, interpreter, drop_root, why)
            if (failure := _failure(found)) is None:
                return found
            reasons.append(failure)
    raise IsolationError(f"no Python interpreter starts in the sandbox: {'; '.join(reasons)}")


def _failure(candidate: Isolation) -> str | None:
    """Why a trial start did not succeed, None where it did."""
    try:
        result = run(_PROBE, isolation=candidate, limits=Limits(wall_s=20.0))
    except OSError as error:
        return str(error)
    if result.stdout == b"ready\n":
        return None
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a trial start ended with {result.status}"


def require_isolation(*, allow_none: bool = False) -> Isolation:
    """The isolation in force, for a start-up check.

    Raises:
        IsolationError: there is none but resource limits, and `allow_none` does not accept that.
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
) -> Result:
    """Run a Python program to its end or to the first limit that it breaks.

    `packages` are folders that it may import from, shown to it read-only. `isolation` overrides the one in force.

    Raises:
        IsolationError: see `require_isolation`.
    """
    where = isolation or require_isolation(allow_none=allow_none)
    with Box(program, limits or Limits(), where, packages=packages) as box:
        box.send(stdin.encode() if isinstance(stdin, str) else stdin)
        return box.finish()


class Box:
    """A program that runs in the sandbox, and its streams. A context manager; leaving it kills whatever is left.

    The wall clock starts with the program. Output is capped while it is read.
    """

    def __init__(self, program: str, limits: Limits, isolation: Isolation, *, packages: Sequence[str] = ()):
        self._limits, self._isolation = limits, isolation
        self._folder: str | None = None
        self._pending = bytearray()
        self._input_ended = False
        self._ending: Status | None = None
        self._exit: tuple[int, float] | None = None  # status as waitpid has it, cpu seconds
        self._selector = selectors.DefaultSelector()
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + limits.wall_s
        try:
            self._process = self._start(program, packages)
        except OSError:
            self._remove_folder()
            raise
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._taken = 0  # bytes of stdout that read_line has given out
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
        self._remove_folder()

    def send(self, data: bytes) -> None:
        """Queue input; it is written while output is read."""
        if data and "stdin" in self._streams:
            if not self._pending:
                self._selector.register(self._streams["stdin"], selectors.EVENT_WRITE, "stdin")
            self._pending += data

    def read_line(self) -> bytes | None:
        """The next whole line of stdout, None where the program ends or breaks a limit first."""
        out = self._output["stdout"]
        while (end := out.find(b"\n", self._taken)) < 0:
            if "stdout" not in self._streams or not self._pump():
                return None
        line = bytes(out[self._taken : end])
        self._taken = end + 1
        return line

    def finish(self) -> Result:
        """End the input and wait for the program's end."""
        self._input_ended = True
        if not self._pending:
            self._close("stdin")
        while self._streams.keys() & {"stdout", "stderr"} and self._pump():
            pass
        self._await_exit()
        status, cpu_s = self._exit or (signal.SIGKILL, 0.0)
        seconds = time.monotonic() - self._started_s
        out, err = (bytes(self._output[name][: self._limits.output_bytes]) for name in ("stdout", "stderr"))
        return Result(out, err, self._ending or _status(status), seconds, cpu_s, self._isolation.name)

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
            command = bubblewrap_command(
                self._limits,
                self._isolation.interpreter,
                program_fd=program_fd,
                filter_fd=filter_fd,
                drop_root=self._isolation.drop_root,
                packages=packages,
            )
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[program_fd] if filter_fd is None else [program_fd, filter_fd],
                env={"PATH": os.environ.get("PATH", "/usr/bin")},
            )

    def _start_limited(self, source: bytes, packages: Sequence[str]) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="flowjax-box-")
        path = Path(self._folder, "program.py")
        path.write_bytes(source)
        uid = own_uid() if self._isolation.drop_root else None
        if uid is not None:
            os.chown(self._folder, uid, uid)
        command = limited_command(self._limits, self._isolation.interpreter, program=str(path), packages=packages)
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env={"PATH": "/usr/bin", "HOME": self._folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            process_group=0,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else (),
        )

    def _pump(self) -> bool:
        """Move some bytes. False where that was the last: the program has ended or broken a limit."""
        if self._ending is not None:
            return False
        for key, _ in self._selector.select(max(0.0, min(self._deadline_s - time.monotonic(), 0.05))):
            if key.data == "stdin":
                self._write()
            else:
                self._read(key.data)
        if self._ending is None and time.monotonic() > self._deadline_s:
            if self._exit is None:
                self._break("timeout")
            return False
        if self._exit is None and self._reap():
            # Nothing can write any more in bubblewrap; without it, what the program left behind might hold the pipes.
            self._kill_group()
            self._deadline_s = min(self._deadline_s, time.monotonic() + _DRAIN_S)
        return self._ending is None

    def _read(self, name: str) -> None:
        data = os.read(self._streams[name].fileno(), _CHUNK_BYTES)
        if not data:
            self._close(name)
        self._output[name] += data
        if len(self._output[name]) > self._limits.output_bytes:
            self._break("output")

    def _write(self) -> None:
        try:
            written = os.write(self._streams["stdin"].fileno(), memoryview(self._pending)[:_CHUNK_BYTES])
            del self._pending[:written]
        except BrokenPipeError:
            self._pending.clear()
        if not self._pending:
            self._selector.unregister(self._streams["stdin"])
            if self._input_ended:
                self._close("stdin")

    def _close(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()

    def _break(self, status: Status) -> None:
        self._ending = status
        self._kill()

    def _await_exit(self) -> None:
        pause_s = 0.0002
        while not self._reap() and self._ending is None:
            if time.monotonic() > self._deadline_s:
                self._break("timeout")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        self._reap(block=True)

    def _reap(self, *, block: bool = False) -> bool:
        """Whether the program has ended; takes note of how."""
        if self._exit is None:
            pid, status, usage = os.wait4(self._process.pid, 0 if block else os.WNOHANG)
            if pid:
                self._exit = (status, usage.ru_utime + usage.ru_stime)
                self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._exit is not None

    def _kill(self) -> None:
        """bubblewrap takes its namespace with it; without it, the program's process group goes."""
        if self._exit is None:
            os.kill(self._process.pid, signal.SIGKILL)  # Popen.kill might reap it, and its usage would be lost
        self._kill_group()

    def _kill_group(self) -> None:
        if self._isolation.name != BUBBLEWRAP:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
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
