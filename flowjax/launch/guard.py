"""Stands between the supervisor and one role, so that nothing the role started outlives the supervisor.

Run as a file, with the standard library only: `python -I -S guard.py <pipe> <command...>`. The supervisor holds the
other end of the pipe and never writes: when it closes, by intent or because the supervisor was killed, every
descendant is killed at once. SIGTERM is passed on to the role only, which stops what it started in its own order;
processes that are left when the role has ended get SIGTERM, then SIGKILL. The exit status is the role's, 128 + n for
signal n.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # the kernel signals this process when its parent dies
_PR_SET_CHILD_SUBREAPER = 36  # orphans among the descendants become children of this process, not of init
_LEFTOVERS_GRACE_S = 2.0  # between SIGTERM and SIGKILL


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process, on Linux; elsewhere only the process group can be killed as a whole."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """Every process below this one, those that left its session included: orphans come back to a subreaper."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # A process chooses its own name, which may hold spaces, parentheses and half a letter: the other fields
            # begin behind the last ")".
            after_name = entry.read_bytes().rpartition(b")")[2].split()
            if after_name[0] != b"Z":  # a zombie has ended: it cannot be signalled, only reaped
                children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    found, seeds = [], [os.getpid()]
    while seeds:
        below = children.get(seeds.pop(), [])
        found += below
        seeds += below
    return found


def _signal_all(number: int) -> bool:
    """Signal every descendant. Returns whether there was one."""
    pids = _descendants()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def _reaped() -> Iterator[tuple[int, int]]:
    """Process and wait status of every child that has ended, adopted ones included."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _kill_everything() -> None:
    # Again until nobody is left: a process may have forked between the listing and its death.
    while _signal_all(signal.SIGKILL):
        list(_reaped())
        time.sleep(0.01)


def _clear_leftovers() -> None:
    """Ask what the role has left behind to end, then kill it. A shared-memory tracker leaves by itself."""
    until = time.monotonic() + _LEFTOVERS_GRACE_S
    _signal_all(signal.SIGTERM)
    while _descendants() and time.monotonic() < until:
        list(_reaped())
        time.sleep(0.02)
    _kill_everything()


def _start(argv: list[str]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)
    # `exec` resets handlers but keeps what is ignored: without this the role would ignore SIGINT, as the guard does.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard died before `prctl`: the kernel would never signal its death
        os._exit(128 + signal.SIGKILL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def main() -> int:
    supervisor, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(supervisor, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Signals write into a pipe that `poll` reads: a signal that comes just before `poll` would else go unnoticed
    # until the next one (the self-pipe trick).
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    terminate: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: terminate.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    role = _start(argv)
    awaited = select.poll()  # not `select`, which takes no descriptor over 1,023: a supervisor may hold that many
    awaited.register(supervisor, select.POLLIN)
    awaited.register(woken, select.POLLIN)
    while True:
        for pid, status in _reaped():
            if pid == role:
                _clear_leftovers()
                return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        while terminate:
            os.kill(role, terminate.pop())
        ready = {descriptor for descriptor, _ in awaited.poll()}
        if woken in ready:
            os.read(woken, 4096)
        if supervisor in ready:
            _kill_everything()
            return 128 + signal.SIGKILL


if __name__ == "__main__":
    sys.exit(print(__doc__) if sys.argv[1:] == ["--help"] else main())
