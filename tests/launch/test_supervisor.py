"""Real child processes that spawn children of their own."""

import asyncio
import itertools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from flowjax.launch.supervisor import Role, RoleFailed, Supervisor, Unhealthy


def role(tmp_path: Path, name: str, body: str, **options) -> Role:
    script = tmp_path / f"{name}.py"
    script.write_text("import os, signal, subprocess, sys, time\nfrom pathlib import Path\n" + textwrap.dedent(body))
    return Role(name, [sys.executable, str(script)], env={"HERE": str(tmp_path)}, **options)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def wait_for(condition, timeout_s: float = 120.0):
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)
    return value


async def kill_when_up(supervisor: Supervisor, name: str, folder: Path, lives: int = 100) -> None:
    """Tell a role that waits for it to die, each time that the supervisor has seen it up."""
    for _ in range(lives):
        await wait_until(lambda: supervisor.states[name].phase == "up")
        (folder / "die").write_text("")
        await wait_until(lambda: supervisor.states[name].phase != "up")


async def wait_until(condition, timeout_s: float = 120.0):
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, "waited too long"
        await asyncio.sleep(0.02)
    return value


def pids_in(folder: Path, count: int) -> list[int]:
    files = sorted(folder.glob("*.pid"))
    return [int(f.read_text()) for f in files] if len(files) == count and all(f.read_text() for f in files) else []


# A role with a child that ignores SIGTERM, and a grandchild that leaves its session, as daemons do. Of their names the
# kernel keeps 15 bytes, the last of which is half a letter.
FAMILY = """
here = Path(os.environ["HERE"])
sleeper = "import ctypes, os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" \\
          "ctypes.CDLL(None).prctl(15, 'évaluateur-moèle'.encode(), 0, 0, 0)\\n" \\
          "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleeper, str(here / "child.pid")])
subprocess.Popen([sys.executable, "-c", sleeper, str(here / "daemon.pid")], start_new_session=True)
(here / "role.pid").write_text(str(os.getpid()))
"""
FOREVER = "\nwhile True: time.sleep(1)\n"
# Lives until it is told to die.
DIE = """
while not (die := Path(os.environ["HERE"]) / "die").exists(): time.sleep(0.02)
die.unlink()
sys.exit(3)
"""


def test_restart_then_end(tmp_path):
    events = []

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.01)
        supervisor.start(
            role(
                tmp_path,
                "worker",
                """
                count = Path(os.environ["HERE"]) / "count"
                count.write_text(count.read_text() + "x" if count.exists() else "x")
                print("attempt", len(count.read_text()))
                sys.exit(0 if len(count.read_text()) == 2 else 3)
                """,
                restarts=2,
                finite=True,
            )
        )
        await supervisor.until(supervisor.ended("worker"))
        assert supervisor.states["worker"].restarts == 1
        await supervisor.stop()

    asyncio.run(main())
    assert (tmp_path / "count").read_text() == "xx"
    log = (tmp_path / "logs" / "worker.log").read_text()
    assert log.count("starting worker") == 2
    assert "attempt 1" in log
    assert "attempt 2" in log
    assert [event for _, event, _ in events] == ["start", "down", "restart", "done"]
    assert events[1][2] == "exit status 3"


def test_giving_up_names_role_status_and_log(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01, assumed_up_s=0.05)
        body = """
        for i in range(30): print("line", i)
        print("no such device", file=sys.stderr)
        """
        supervisor.start(role(tmp_path, "engine", body + textwrap.indent(DIE.replace("3)", "7)"), " " * 8), restarts=2))
        supervisor.start(role(tmp_path, "other", FOREVER))
        dying = asyncio.create_task(kill_when_up(supervisor, "engine", tmp_path))
        with pytest.raises(RoleFailed) as failure:
            await supervisor.until(asyncio.sleep(250))
        dying.cancel()
        assert supervisor.states["engine"].restarts == 2
        assert supervisor.states["engine"].phase == "failed"
        await supervisor.stop(grace_s=5)
        assert supervisor.states["other"].phase == "stopped"
        return failure.value

    failure = asyncio.run(main())
    report = failure.report()
    assert (failure.role, failure.status) == ("engine", 7)
    assert "engine has failed: exit status 7" in report
    assert str(tmp_path / "logs" / "engine.log") in report
    assert "no such device" in report
    assert "line 29" in report
    assert "line 10\n" not in report
    assert (tmp_path / "logs" / "engine.log").read_text().count("no such device") == 3


@pytest.mark.parametrize(("status", "runs"), [(2, 1), (1, 2)])
def test_what_never_came_up_is_not_tried_to_the_last(tmp_path, status, runs):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01)
        supervisor.start(role(tmp_path, "engine", f"print('no'); sys.exit({status})", restarts=10))
        with pytest.raises(RoleFailed):
            await supervisor.until(asyncio.sleep(250))

    asyncio.run(main())
    assert (tmp_path / "logs" / "engine.log").read_text().splitlines().count("no") == runs


MORTAL = (
    """
lives = Path(os.environ["HERE"]) / "lives"
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
"""
    + DIE
)


FORGIVEN = "time.sleep(0.4); sys.exit(3)"  # lives longer than a restart is held against it


def test_a_restart_of_long_ago_is_forgiven(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01, assumed_up_s=0.05, restart_window_s=0.2)
        supervisor.start(role(tmp_path, "rollout", FORGIVEN, restarts=1))
        await supervisor.until(wait_until(lambda: supervisor.states["rollout"].restarts == 4))
        await supervisor.stop()

    asyncio.run(main())


def test_restarts_of_late_add_up(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01, assumed_up_s=0.05, restart_window_s=120.0)
        supervisor.start(role(tmp_path, "rollout", MORTAL, restarts=2))
        dying = asyncio.create_task(kill_when_up(supervisor, "rollout", tmp_path))
        with pytest.raises(RoleFailed, match="exit status 3, after 2 restarts within 2 min"):
            await supervisor.until(asyncio.sleep(250))
        dying.cancel()

    asyncio.run(main())
    assert (tmp_path / "lives").read_text() == "xxx"


def test_what_has_told_of_itself_has_come_up(tmp_path):
    told, events = tmp_path / "status.json", []
    told.write_text("of the process before")
    os.utime(told, (0, 0))
    body = """
    (Path(os.environ["HERE"]) / "status.json").write_text("")
    """ + textwrap.indent(DIE, " " * 4)

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.01)
        supervisor.start(role(tmp_path, "trainer", body, restarts=3, written=told))
        dying = asyncio.create_task(kill_when_up(supervisor, "trainer", tmp_path))
        with pytest.raises(RoleFailed, match="after 3 restarts"):
            await supervisor.until(asyncio.sleep(250))
        dying.cancel()

    asyncio.run(main())
    assert [event for _, event, _ in events] == [
        *["start", "up", "down"],
        *2 * ["restart", "up", "down"],
        "restart",
        "up",
        "failed",
    ]


def test_a_command_that_does_not_exist_is_named(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01)
        supervisor.start(Role("engine", ["/no/such/python", "-m", "x"]))
        with pytest.raises(RoleFailed) as failure:
            await supervisor.until(asyncio.sleep(250))
        return failure.value.report()

    assert "cannot run /no/such/python: No such file or directory" in asyncio.run(main())


def test_orderly_stop_lets_a_role_finish_and_clears_its_children(tmp_path):
    body = (
        FAMILY
        + """
def finish(number, frame):
    time.sleep(0.3)
    (here / "finished").write_text("yes")
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
(here / "ready").write_text("")
"""
        + FOREVER
    )

    async def main():
        supervisor = Supervisor(tmp_path / "logs")
        supervisor.start(role(tmp_path, "rollout", body))
        await wait_until(lambda: (tmp_path / "ready").exists() and pids_in(tmp_path, 3))
        pids = pids_in(tmp_path, 3)
        await supervisor.stop(grace_s=10)
        return pids, supervisor.states["rollout"].phase

    pids, phase = asyncio.run(main())
    assert (tmp_path / "finished").read_text() == "yes"
    assert phase == "stopped"
    assert not any(alive(pid) for pid in pids)


def test_a_role_that_ignores_sigterm_is_killed_after_the_grace_and_waves_keep_their_order(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY + FOREVER
    stopped = []

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: stopped.append(event))
        supervisor.start(role(tmp_path, "trainer", stubborn))
        supervisor.start(role(tmp_path, "dataflow", "print('here')" + FOREVER))
        pids = await wait_until(lambda: pids_in(tmp_path, 3))
        await supervisor.stop(("trainer",), grace_s=0.5)
        return pids

    pids = asyncio.run(main())
    assert [(r, e, t) for r, e, t in stopped if e in ("kill", "stopped")] == [
        ("trainer", "kill", "did not stop within 0 s"),
        ("trainer", "stopped", ""),
        ("dataflow", "stopped", ""),
    ]
    assert not any(alive(pid) for pid in pids)


def test_kill_ends_a_stop_under_way(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs")
        supervisor.start(
            role(tmp_path, "trainer", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY + FOREVER)
        )
        pids = await wait_until(lambda: pids_in(tmp_path, 3))
        stop = asyncio.create_task(supervisor.stop(grace_s=600))
        await wait_until(lambda: supervisor.states["trainer"].phase == "stopping")
        supervisor.kill()
        await asyncio.wait_for(stop, 120)
        return pids

    assert not any(alive(pid) for pid in asyncio.run(main()))


def test_kill_reaches_a_role_that_waits_for_its_restart(tmp_path):
    events = []

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.5)
        supervisor.start(role(tmp_path, "engine", "sys.exit(3)", restarts=1))
        (keeper,) = [task for task in asyncio.all_tasks() if task.get_name() == "engine"]
        await wait_until(lambda: supervisor.states["engine"].phase == "waiting")
        supervisor.kill()
        await asyncio.wait_for(keeper, 120)
        await supervisor.stop()

    asyncio.run(main())
    assert [event for _, event, _ in events] == ["start", "down", "stopped"]


def test_killed_role_takes_its_children_along_before_it_is_restarted(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01, assumed_up_s=0.1)
        supervisor.start(role(tmp_path, "engine", FAMILY + FOREVER, restarts=3))
        first = await wait_until(lambda: pids_in(tmp_path, 3))
        await wait_until(lambda: supervisor.states["engine"].phase == "up")
        os.kill(int((tmp_path / "role.pid").read_text()), signal.SIGKILL)
        await wait_until(lambda: supervisor.states["engine"].restarts == 1)
        assert not any(alive(pid) for pid in first)
        assert supervisor.states["engine"].detail.startswith("killed by SIGKILL")
        second = await wait_until(lambda: (pids := pids_in(tmp_path, 3)) and not set(pids) & set(first) and pids)
        await supervisor.stop(grace_s=5)
        return second

    assert not any(alive(pid) for pid in asyncio.run(main()))


@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_nothing_is_orphaned_when_a_keeper_is_killed(tmp_path, victim):
    role(tmp_path, "engine", FAMILY + FOREVER)
    supervising = tmp_path / "supervising.py"
    supervising.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        HERE = Path({str(tmp_path)!r})
        from flowjax.launch.supervisor import Role, Supervisor
        async def main():
            supervisor = Supervisor(HERE / "logs")
            supervisor.start(Role("engine", [sys.executable, str(HERE / "engine.py")], env={{"HERE": str(HERE)}}))
            await supervisor.until(asyncio.sleep(600))
        asyncio.run(main())
        """)
    )
    keeper = subprocess.Popen([sys.executable, str(supervising)], stderr=subprocess.DEVNULL)
    try:
        pids = wait_for(lambda: pids_in(tmp_path, 3))
        role_pid = int((tmp_path / "role.pid").read_text())
        guard = int(Path(f"/proc/{role_pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert guard not in (1, keeper.pid)
        os.kill(keeper.pid if victim == "supervisor" else guard, signal.SIGKILL)
        if victim == "guard":  # its process group goes; only what left the group on purpose can stay
            pids = [pid for pid in pids if pid != int((tmp_path / "daemon.pid").read_text())]
        wait_for(lambda: not any(alive(pid) for pid in pids))
    finally:
        keeper.kill()
        keeper.wait()
        if alive(daemon := int((tmp_path / "daemon.pid").read_text())):
            os.kill(daemon, signal.SIGKILL)


def test_health_marks_up_and_a_role_that_stops_answering_is_restarted(tmp_path):
    healthy = tmp_path / "healthy"
    events = []

    async def health() -> bool:
        return healthy.exists()

    async def main():
        supervisor = Supervisor(
            tmp_path / "logs", on_event=lambda *e: events.append(e), backoff_s=0.01, unresponsive_s=0.5
        )
        supervisor.start(role(tmp_path, "engine", FOREVER, restarts=1, health=health))
        await asyncio.sleep(0.5)
        assert supervisor.states["engine"].phase == "starting"
        healthy.write_text("")
        await wait_until(lambda: supervisor.states["engine"].phase == "up")
        healthy.unlink()
        await wait_until(lambda: supervisor.states["engine"].restarts == 1)
        await supervisor.stop()

    asyncio.run(main())
    assert any(event == "down" and "did not answer" in text for _, event, text in events)


def test_a_launcher_that_was_stopped_asks_again_before_it_calls_a_role_silent(tmp_path, monkeypatch):
    away_s, questions = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + away_s[0])

    async def health() -> bool:
        questions.append(away_s[0])
        return questions.count(3600.0) != 1  # the first question after it went on is not answered

    async def main():
        supervisor = Supervisor(tmp_path / "logs", unresponsive_s=60.0)
        supervisor.start(role(tmp_path, "engine", FOREVER, restarts=1, health=health))
        await wait_until(lambda: supervisor.states["engine"].phase == "up")
        asked = len(questions)
        away_s[0] = 3600.0  # within a pause between two looks, as nearly all of its time is
        await wait_until(lambda: len(questions) > asked + 1)
        assert supervisor.states["engine"].phase == "up" and not supervisor.states["engine"].restarts
        await supervisor.stop()

    asyncio.run(main())


def test_a_role_that_refuses_is_restarted_long_before_one_that_is_silent(tmp_path):
    answer, events = iter([True, False, False, True]), []

    async def health() -> bool:
        if (well := next(answer, None)) is None:
            raise Unhealthy("refused connections")
        return well

    async def main():
        supervisor = Supervisor(
            tmp_path / "logs", on_event=lambda *e: events.append(e), backoff_s=0.01, unhealthy_s=0.5
        )
        supervisor.start(role(tmp_path, "engine", FOREVER, restarts=1, health=health))
        await wait_until(lambda: supervisor.states["engine"].restarts == 1)
        await supervisor.stop()

    asyncio.run(main())
    assert ("engine", "down", "refused connections for 0 s") in events


def test_a_role_that_is_not_healthy_in_time_is_given_up(tmp_path):
    async def never() -> bool:
        return False

    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01)
        supervisor.start(role(tmp_path, "engine", FOREVER, health=never, start_timeout_s=0.3, if_slow=" (wait)"))
        with pytest.raises(RoleFailed, match=r"was not healthy within 0 s \(wait\)"):
            await supervisor.until(asyncio.sleep(250))

    asyncio.run(main())


WORKER = """
started = Path(os.environ["HERE"]) / "started"
started.write_text(started.read_text() + "x" if started.exists() else "x")
"""


def test_a_role_whose_log_cannot_be_written_waits_with_a_line_until_it_can(tmp_path):
    events = []

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.05)
        log = tmp_path / "logs" / "worker.log"
        log.symlink_to("/dev/full")  # every write there finds the disk full
        supervisor.start(role(tmp_path, "worker", WORKER, finite=True))
        await wait_until(lambda: events)
        await asyncio.sleep(0.3)  # several attempts, one line
        assert events == [("worker", "paused", events[0][2])]
        assert events[0][2].startswith("cannot be started: No space left on device: make room")
        assert supervisor.states["worker"].phase == "paused"
        log.unlink()
        await supervisor.until(supervisor.ended("worker"))
        assert supervisor.states["worker"].restarts == 0

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    asyncio.run(main())
    assert (tmp_path / "started").read_text() == "x"
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_role_that_dies_of_a_full_disk_is_not_held_to_its_restarts(tmp_path):
    events = []
    body = (
        WORKER
        + """
if len(started.read_text()) < 5:
    raise OSError(28, "No space left on device", "checkpoint")
"""
    )

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.01)
        supervisor.start(role(tmp_path, "trainer", body, finite=True, restarts=1))
        await supervisor.until(supervisor.ended("trainer"))
        assert supervisor.states["trainer"].restarts == 0

    asyncio.run(main())
    assert [event for _, event, _ in events].count("start") == 5
    paused = [text for _, event, text in events if event == "paused"]
    assert paused[0].startswith("exit status 1: No space left on device: make room")


def test_a_disk_that_is_full_again_later_is_reported_again(tmp_path, monkeypatch):
    events, answers = [], itertools.cycle(["full", ""])  # after each life, then soon
    monkeypatch.setattr("flowjax.launch.supervisor.probe", lambda folder: next(answers))
    body = (
        WORKER
        + """
if len(started.read_text()) < 3:
    time.sleep(1.0)
    raise OSError(28, "No space left on device", "checkpoint")
"""
    )

    async def main():
        supervisor = Supervisor(
            tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.01, assumed_up_s=0.1
        )
        supervisor.start(role(tmp_path, "trainer", body, finite=True))
        await supervisor.until(supervisor.ended("trainer"))

    asyncio.run(main())
    assert [event for _, event, _ in events].count("paused") == 2


def test_a_role_that_complains_of_a_disk_each_time_it_was_up_uses_up_its_restarts(tmp_path):
    events = []

    async def main():
        supervisor = Supervisor(
            tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.01, assumed_up_s=0.01
        )
        body = DIE.replace("sys.exit(3)", 'raise OSError(28, "No space left on device", "checkpoint")')
        supervisor.start(role(tmp_path, "trainer", body, finite=True, restarts=2))
        keeper = asyncio.create_task(kill_when_up(supervisor, "trainer", tmp_path))
        with pytest.raises(RoleFailed, match=r"exit status 1, after 2 restarts"):
            await supervisor.until(asyncio.sleep(250))
        keeper.cancel()

    asyncio.run(main())
    assert [event for _, event, _ in events].count("restart") == 2
    assert "No space left on device" in next(text for _, event, text in events if event == "down")


def test_a_full_disk_ends_the_run_when_nobody_makes_room(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs", backoff_s=0.01, pause_s=0.5)
        (tmp_path / "logs" / "worker.log").symlink_to("/dev/full")
        supervisor.start(role(tmp_path, "worker", WORKER, finite=True))
        with pytest.raises(RoleFailed, match=r"worker: cannot be started: No space left on device: make room .*, for"):
            await supervisor.until(asyncio.sleep(250))

    asyncio.run(main())


def test_a_supervisor_with_too_many_files_open_waits_and_leaves_its_roles_alone(tmp_path):
    events, asked = [], []

    async def healthy():
        asked.append(True)
        os.close(os.dup(0))  # as a connection would take one
        return True

    async def main():
        supervisor = Supervisor(
            tmp_path / "logs",
            on_event=lambda *event: events.append(event),
            backoff_s=0.05,
            unhealthy_s=0.0,
            unresponsive_s=0.0,
        )
        supervisor.start(role(tmp_path, "engine", FOREVER, health=healthy))
        await wait_until(lambda: supervisor.states["engine"].phase == "up")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        seen, worker = len(asked), role(tmp_path, "worker", WORKER, finite=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            supervisor.start(worker)
            await wait_until(lambda: len(asked) > seen + 1 and supervisor.states["worker"].phase == "paused")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await supervisor.until(supervisor.ended("worker"))
        assert supervisor.states["engine"].phase == "up"
        await supervisor.stop(grace_s=10)

    asyncio.run(main())
    (paused,) = [text for _, event, text in events if event == "paused"]
    assert "Too many open files: raise the limit of open files (ulimit -n)" in paused


def test_a_supervisor_with_many_files_open_starts_and_kills_its_roles(tmp_path):
    async def main():
        supervisor = Supervisor(tmp_path / "logs")
        supervisor.start(role(tmp_path, "worker", WORKER, finite=True))
        await supervisor.until(supervisor.ended("worker"))
        supervisor.start(role(tmp_path, "engine", FAMILY + FOREVER))
        pids = await wait_until(lambda: pids_in(tmp_path, 3))
        supervisor.kill()
        await wait_until(lambda: not any(alive(pid) for pid in pids))
        await supervisor.stop(grace_s=10)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.dup(0) for _ in range(1024)]  # no descriptor below 1,024 is left
    try:
        asyncio.run(main())
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_whatever_goes_wrong_in_a_keeper_ends_the_run_with_a_line(tmp_path):
    async def broken():
        raise ValueError("a fault of the launcher's own")

    async def main():
        supervisor = Supervisor(tmp_path / "logs")
        supervisor.start(role(tmp_path, "engine", FOREVER, health=broken))
        with pytest.raises(RoleFailed, match=r"launcher failed over it \(ValueError: a fault of the launcher's own\)"):
            await supervisor.until(asyncio.sleep(250))
        await supervisor.stop(grace_s=10)

    asyncio.run(main())


def test_what_a_role_died_of_is_in_its_line(tmp_path):
    events = []

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=0.01)
        body = WORKER + "assert len(started.read_text()) > 1, 'first'"
        supervisor.start(role(tmp_path, "rollout", body, finite=True, restarts=1))
        await supervisor.until(supervisor.ended("rollout"))

    asyncio.run(main())
    assert ("rollout", "down", "exit status 1 (AssertionError: first)") in events
