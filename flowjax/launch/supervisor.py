"""Roles as supervised child processes: logs, health, restarts, an orderly stop, no orphans."""

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from flowjax.monitor.metrics import RoleState
from flowjax.monitor.trouble import explain, probe, unwritable_in, write_whole

_GUARD = Path(__file__).with_name("guard.py")
_POLL_S = 0.1
_STOPPED_S = 10.0  # a poll that took longer: this process was stopped (Ctrl-Z), or its machine was suspended
_HEALTH_EVERY_S = 1.0
_ASSUMED_UP_S = 30.0  # a role that cannot be asked counts as up once it has lived this long
_UNRESPONSIVE_S = 120.0  # a role that was up and has not answered for this long is killed
_UNHEALTHY_S = 10.0  # so is one that has refused for this long: a busy server is silent, a broken one refuses
_RESTART_WINDOW_S = 3600.0  # a restart longer ago than this is not held against its role: runs last for days
_LONGEST_BACKOFF_S = 15.0  # between lives of a role: with the time that a start takes, a run goes on within a minute
_TAIL_BYTES = 64 * 1024  # read from the end of a log for its last lines
_PAUSE_S = 3600.0  # a disk may be full for this long before the run ends
_ERROR_LINE = re.compile(r"(?:[\w.]*(?:Error|Exception|Refused)|trainer|rollout|dataflow|warm_start)\b.*: .")
USER_MISTAKE = 2  # exit status of a role that its config does not allow to run: starting it again changes nothing


@dataclass(frozen=True)
class Role:
    """One child process of a run. A `finite` role ends by itself with status 0; for others every end is a failure.

    It may be restarted `restarts` times within an hour; one that dies more often has failed for good. It is up when
    `health` returns True, or once it has written the file `written`; `if_slow` ends the message on a role that is not
    up in time. `again` returns the role as it is to be restarted, with a line of news ("" for none); where it raises an
    OSError, the role waits.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    health: Callable[[], Awaitable[bool]] | None = None
    written: Path | None = None
    restarts: int = 0
    start_timeout_s: float = 300.0
    if_slow: str = ""
    finite: bool = False
    again: "Callable[[], tuple[Role, str]] | None" = None


class RoleFailed(Exception):
    """A role has failed for good. `report` names it, its exit status and the log to read."""

    def __init__(self, role: str, status: int, log: Path, reason: str):
        super().__init__(f"{role}: {reason}")
        self.role, self.status, self.log, self.reason = role, status, log, reason

    def report(self, lines: int = 20) -> str:
        tail = "\n".join(f"    {line}" for line in _tail(self.log, lines))
        return f"{self.role} has failed: {self.reason}\n  the end of {self.log}:\n{tail}\n  the whole log: {self.log}"


# The asking process is out of files, memory or ports: that says nothing about the role.
_OF_THE_ASKER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EAGAIN)


class Unhealthy(Exception):
    """A role does not serve: nobody listens at its port, or it says itself that something is wrong."""


async def answers(host: str, port: int, path: str, timeout_s: float = 5.0) -> bool:
    """True if an HTTP server answers `GET path` with a status below 400; False while it is silent, as one that is busy
    may be.

    Raises:
        Unhealthy: connections are refused or broken off, or the status is 400 or more.
        OSError: this process cannot ask (it has too many files open); the role may be healthy.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except TimeoutError:  # an OSError as well: silence comes first
        return False
    except OSError as error:
        if error.errno in _OF_THE_ASKER:
            raise
        raise Unhealthy("refused connections") from error
    if len(status) < 2 or not status[1].isdigit():
        raise Unhealthy("broke connections off")
    if int(status[1]) >= 400:
        raise Unhealthy(f"answered {path} with status {int(status[1])}")
    return True


class Supervisor:
    """Starts roles and keeps them up until it is asked to stop. Calls `on_event(role, event, text)` for all events."""

    def __init__(
        self,
        logs: Path,
        *,
        on_event: Callable[[str, str, str], None] = lambda role, event, text: None,
        backoff_s: float = 1.0,
        assumed_up_s: float = _ASSUMED_UP_S,
        unresponsive_s: float = _UNRESPONSIVE_S,
        unhealthy_s: float = _UNHEALTHY_S,
        restart_window_s: float = _RESTART_WINDOW_S,
        pause_s: float = _PAUSE_S,
    ):
        self._logs, self._on_event = logs, on_event
        self._backoff_s, self._assumed_up_s, self._unresponsive_s = backoff_s, assumed_up_s, unresponsive_s
        self._unhealthy_s, self._restart_window_s, self._pause_s = unhealthy_s, restart_window_s, pause_s
        self.states: dict[str, RoleState] = {}
        self._children: dict[str, _Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._hurried = False
        self._failed: asyncio.Future[RoleFailed] = asyncio.get_running_loop().create_future()
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, role: Role) -> None:
        """Start `role` and keep it up."""
        self.states[role.name] = RoleState(role.name)
        self._stopping.discard(role.name)
        self._keepers[role.name] = asyncio.create_task(self._keep(role), name=role.name)

    async def until(self, condition: Awaitable[object]) -> None:
        """Wait for `condition` while all roles are kept up.

        Raises:
            RoleFailed: a role failed for good first.
        """
        waiting = asyncio.ensure_future(condition)
        try:
            await asyncio.wait({waiting, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            await waiting
        finally:
            waiting.cancel()

    async def ended(self, name: str) -> None:
        """Wait until the finite role `name` has ended well."""
        while self.states[name].phase != "done":
            await asyncio.sleep(_POLL_S)

    async def stop(self, *waves: Sequence[str], grace_s: float = 20.0) -> None:
        """SIGTERM, then after `grace_s` SIGKILL: first the roles of each wave together, then all others."""
        for wave in (*waves, [name for name in self._keepers if not any(name in names for names in waves)]):
            names = [name for name in wave if name in self._keepers]
            await asyncio.gather(*(self._stop_one(name, grace_s) for name in names))

    def kill(self) -> None:
        """Kill everything now; a `stop` under way ends at once."""
        self._hurried = True
        self._stopping.update(self._keepers)
        for name, child in self._children.items():
            if child.poll() is None:
                self._on_event(name, "kill", "hurried")
                child.kill()

    async def _stop_one(self, name: str, grace_s: float) -> None:
        self._stopping.add(name)  # before the signal: else its keeper takes the end for a failure and restarts it
        keeper, child, state = self._keepers[name], self._children.get(name), self.states[name]
        if child is not None and child.poll() is None:
            state.phase = "stopping"
            child.terminate()
            until = time.monotonic() + grace_s
            while child.poll() is None and time.monotonic() < until and not self._hurried:
                await asyncio.sleep(_POLL_S / 2)
            if child.poll() is None:
                if not self._hurried:
                    self._on_event(name, "kill", f"did not stop within {grace_s:.0f} s")
                child.kill()
            await child.gone()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if state.phase not in ("done", "failed"):
            state.phase = "stopped"
            self._on_event(name, "stopped", "")

    async def _keep(self, role: Role) -> None:
        """Keep a role up. An unexpected exception ends the run: nobody awaits this task, so it would go unseen."""
        try:
            await self._keep_up(role)
        except Exception as error:
            self._fail(role, 1, f"the launcher failed over it ({type(error).__name__}: {error})")

    async def _keep_up(self, role: Role) -> None:
        state, log = self.states[role.name], self._log(role)
        ever_up = False
        restarted_s: list[float] = []  # times of the restarts that still count
        paused_s, said = None, ""  # since when the machine is at fault, not the role; the last report of that
        while role.name not in self._stopping:  # `kill` may come while a role waits for its restart
            role, status, reason, trouble = await self._live(role, state)
            ever_up = ever_up or state.phase == "up"
            if role.name in self._stopping:
                return
            if role.finite and status == 0:
                state.phase = "done"
                self._on_event(role.name, "done", "")
                return
            lived_s = time.time() - state.started_s if state.phase == "up" else 0.0
            lived_long = lived_s > self._assumed_up_s
            # A fault of the machine, such as a full disk, uses up no restart. But a role that came up, lived and then
            # complains of a disk that can be written from here might do so without end: that counts as a failure.
            if trouble and (not lived_long or probe(self._logs)):
                if paused_s is None or lived_long:  # a pause of its own, to be reported again
                    paused_s, said = time.monotonic(), ""
                state.phase, state.detail = "paused", f"{reason}: {trouble}"
                if state.detail != said:
                    self._on_event(role.name, "paused", f"{state.detail}; it goes on by itself then")
                said = state.detail
                if await self._writable(until_s=paused_s + self._pause_s):
                    continue
                self._fail(role, status, f"{reason}: {trouble}, for {self._pause_s / 60:.0f} min")
                return
            paused_s, said = None, ""
            # What has never come up is unlikely to come up at the third attempt.
            allowed = role.restarts if ever_up else min(role.restarts, 1)
            restarted_s = [at_s for at_s in restarted_s if time.monotonic() - at_s < self._restart_window_s]
            if status == USER_MISTAKE or len(restarted_s) >= allowed:
                if n := len(restarted_s):
                    reason += f", after {n} restart{'s' * (n != 1)} within {self._restart_window_s / 60:.0f} min"
                self._fail(role, status, reason)
                return
            cause = _error_line(log, state.log_start_bytes)
            state.phase, state.detail = "waiting", reason
            self._on_event(role.name, "down", f"{reason} ({cause})" if cause else reason)
            await asyncio.sleep(min(self._backoff_s * 2 ** len(restarted_s), _LONGEST_BACKOFF_S))
            state.restarts += 1
            restarted_s.append(time.monotonic())

    async def _live(self, role: Role, state: RoleState) -> tuple[Role, int, str, str]:
        """One life of a role: the role as started, its exit status, why it ended, the machine's fault ("": none)."""
        log = self._log(role)
        state.phase, state.log_start_bytes = "starting", _size_bytes(log)
        try:
            if role.again is not None and role.name in self._children:  # not at its first start
                role, news = role.again()
                if news:
                    self._on_event(role.name, "moved", news)
            child = self._children[role.name] = _Child(role, log)
        except OSError as error:
            return role, 1, "cannot be started", explain(error) or str(error)
        state.pid, state.started_s = child.pid, time.time()
        self._on_event(role.name, "restart" if state.restarts else "start", f"process {child.pid}")
        status, reason = await self._watch(role, child, state)
        if status == 0 and role.finite:
            return role, status, reason, ""
        said = unwritable_in("\n".join(_tail(log, 40, since_bytes=state.log_start_bytes)))
        return role, status, reason, said or probe(self._logs)

    async def _writable(self, *, until_s: float) -> bool:
        """Wait until the run's folder can be written; False when it could not be until then."""
        await asyncio.sleep(self._backoff_s)
        while time.monotonic() < until_s and probe(self._logs):
            await asyncio.sleep(min(self._backoff_s, 1.0))
        return time.monotonic() < until_s

    def _fail(self, role: Role, status: int, reason: str) -> None:
        state = self.states[role.name]
        state.phase, state.detail = "failed", reason
        if not self._failed.done():
            self._failed.set_result(RoleFailed(role.name, status, self._log(role), reason))
        self._on_event(role.name, "failed", reason)

    def _log(self, role: Role) -> Path:
        return self._logs / f"{role.name}.log"

    async def _watch(self, role: Role, child: "_Child", state: RoleState) -> tuple[int, str]:
        """Follow one process to its end. Returns its exit status and why it ended, in words."""
        started = heard = time.monotonic()
        next_check, cause = started, ""
        unhealthy_since: float | None = None
        while (status := child.poll()) is None:
            asleep = time.monotonic()
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            if now - asleep > _STOPPED_S:  # this process stood still: the role's silence meanwhile does not count
                started, heard, unhealthy_since = started + now - asleep, now, None
            if role.health is None:
                reported = role.written is not None and _written_s(role.written) > state.started_s
                if state.phase == "starting" and (reported or now - started > self._assumed_up_s):
                    state.phase = "up"
                    if reported:
                        self._on_event(role.name, "up", f"after {now - started:.1f} s")
                continue
            if now < next_check or cause:  # with a cause it has been killed: only its end is waited for
                continue
            next_check = now + (_HEALTH_EVERY_S if state.phase == "up" else _HEALTH_EVERY_S / 4)
            try:
                healthy, problem = await _ask(role.health)
            except OSError:  # the launcher itself is short of something: the role may be healthy
                heard, unhealthy_since = now, None
                continue
            unhealthy_since = (unhealthy_since or now) if problem else None
            if healthy:
                heard = now
                if state.phase == "starting":
                    state.phase = "up"
                    self._on_event(role.name, "up", f"after {now - started:.1f} s")
            elif state.phase == "starting" and now - started > role.start_timeout_s:
                cause = f"was not healthy within {role.start_timeout_s:.0f} s{role.if_slow}"
            elif state.phase == "up" and unhealthy_since is not None and now - unhealthy_since > self._unhealthy_s:
                cause = f"{problem} for {self._unhealthy_s:.0f} s"
            elif state.phase == "up" and now - heard > self._unresponsive_s:
                cause = f"did not answer for {self._unresponsive_s:.0f} s"
            if cause:
                child.kill()
        return status, cause or describe_status(status)


def on_signals(stop: Callable[[signal.Signals], None]) -> None:
    """Have the running event loop call `stop` for each signal that asks to end. Under nohup SIGHUP stays ignored, so
    that the run outlives its terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)


class _Child:
    """A role's process below its guard, in a session of its own."""

    def __init__(self, role: Role, log: Path):
        watched, self._pipe = os.pipe()
        try:
            with log.open("ab", buffering=0) as output:
                _write_header(output, role)
                # -I -S: without site packages the guard starts at once, and no PYTHONPATH can break it. In a session of
                # its own Ctrl-C does not reach the role: the launcher stops roles in order.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), str(watched), *role.argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **role.env},
                    pass_fds=(watched,),
                    start_new_session=True,
                )
        except BaseException:
            self._close_pipe()
            raise
        finally:
            os.close(watched)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status, None while running. At the end, kills what is left of the process group."""
        status = self._process.returncode
        if status is None:
            # WNOWAIT leaves it a zombie, which keeps its number and its group's from being reused: only then is it safe
            # to kill the group by its number. `wait` reaps the zombie afterwards.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is None:
                return None
            self._kill_group()
            status = self._process.wait()
            self._close_pipe()
        return 128 - status if status < 0 else status

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Have the guard kill the role and every process that it started, in whatever session."""
        self._close_pipe()  # the guard reads its other end

    async def gone(self, timeout_s: float = 2.0) -> None:
        """Wait for the end after `kill`; a guard that takes longer than `timeout_s` is killed with its group."""
        until = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > until:
                self._kill_group()
            await asyncio.sleep(0.02)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


async def _ask(health: Callable[[], Awaitable[bool]]) -> tuple[bool, str]:
    """(True, "") of a healthy role, (False, its problem) of an unhealthy one, (False, "") of one that is silent."""
    try:
        return await health(), ""
    except Unhealthy as error:
        return False, str(error)


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status > 128:
        with contextlib.suppress(ValueError):
            name = signal.Signals(status - 128).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}"
    return f"exit status {status}"


def _write_header(output: BinaryIO, role: Role) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    write_whole(output.fileno(), f"--- {stamp} starting {role.name}: {' '.join(role.argv)}\n".encode())


def _written_s(path: Path) -> float:
    """Time at which a file was last written, in seconds since the epoch; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _error_line(log: Path, since_bytes: int) -> str:
    """The last line of a role's log that looks like the error that ended it, or ""."""
    lines = _tail(log, 40, since_bytes=since_bytes)
    return next((line.strip()[:300] for line in reversed(lines) if _ERROR_LINE.match(line)), "")


def _tail(path: Path, lines: int, since_bytes: int = 0) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(since_bytes, file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return [f"({error})"]
