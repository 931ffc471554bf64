"""A run's session with small scripts as its roles, supervised in a process of its own."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.sokoban import get_config
from flowjax.launch.__main__ import _final_evaluation, _trained_by_others
from flowjax.launch.session import UnusedGroups
from flowjax.launch.supervisor import RoleFailed
from flowjax.monitor.metrics import NewStatus, Progress, read_metrics, read_status, write_status
from flowjax.run import resolve

# What the launch does with its roles, with other commands in them.
SESSION = """
import asyncio, sys
from pathlib import Path
from flowjax.launch.session import RunSession
from flowjax.launch.supervisor import Role
from flowjax.launch.screen import summary

here = Path(sys.argv[1])
python = [sys.executable, "-u"]

def role(name, **options):
    return Role(name, [*python, str(here / f"{name}.py"), str(here)], **options)

async def done(supervisor, progress):
    await supervisor.ended("trainer")
    while 2 not in progress.evals:
        await asyncio.sleep(0.05)

async def main():
    session = RunSession(here, steps={"agent": 2}, stop_order=(("trainer",), ("dataflow",)))
    first = [role("warm_start", finite=True)] if (here / "warm_start.py").exists() else []
    roles = lambda: [role("dataflow"), role("trainer", finite=True)]
    status = await session.run(roles, done, first=first)
    session.screen.say(f"status {status}")
    return status

sys.exit(asyncio.run(main()))
"""
SERVER = """
import signal, sys, time
from pathlib import Path
def stop(number, frame):
    Path(sys.argv[1], "dataflow.stopped").write_text("")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
Path(sys.argv[1], "dataflow.started").write_text("")
while True: time.sleep(0.1)
"""
TRAINER = """
import sys
from pathlib import Path
from flowjax.monitor.metrics import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]))
for step in (1, 2):
    writer.write("train", step=step, success_rate=0.5, episodes=8, total_s=0.1)
writer.write("eval", step=2, version=2, episodes=8, success_rate=0.5, low=0.2, high=0.8)
"""

WAITS = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1], "go on").exists(): time.sleep(0.02)
"""


def start(folder: Path, **scripts: str) -> subprocess.Popen[str]:
    for name, body in {"dataflow": SERVER, "trainer": TRAINER, **scripts}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(body))
    (folder / "session.py").write_text(SESSION)
    command = [sys.executable, str(folder / "session.py"), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(path: Path, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.02)


def test_a_run_goes_through_warm_start_to_the_final_evaluation(tmp_path):
    warm = "import sys; from pathlib import Path; assert not Path(sys.argv[1], 'dataflow.started').exists()"
    run = start(tmp_path, warm_start=warm)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    lines = output.splitlines()
    told = [line.partition(")")[0] for line in lines if line.startswith(("step", "held"))]
    assert told == [
        "step 1/2  success 50.0 %  reward -  invalid -  no signal -  staleness -  k3 -  0.1 s (wait -, step -, save -",
        "step 2/2  success 50.0 %  reward -  invalid -  no signal -  staleness -  k3 -  0.1 s (wait -, step -, save -",
        "held out, version 2: success 50.0 % [20.0, 80.0] of 8",
    ]
    assert lines[-1] == "status 0"
    assert (tmp_path / "dataflow.stopped").exists()
    events = [(e["role"], e["event"]) for e in read_metrics(tmp_path) if e["kind"] == "run"]
    assert events[:2] == [("warm_start", "start"), ("warm_start", "done")]
    assert ("trainer", "done") in events
    roles = read_status(tmp_path, "launch")["roles"]
    assert {name: role["phase"] for name, role in roles.items()} == {
        "warm_start": "done", "dataflow": "stopped", "trainer": "done",
    }  # fmt: skip


def test_the_last_evaluation_may_take_as_long_as_its_episodes_end(tmp_path):
    config = get_config("nano")
    config.trainer.step_timeout_s, config.rollout.episode_timeout_s = 2.0, 1.0
    run, progress = resolve(config, tmp_path), Progress(tmp_path)

    async def play(waiting: asyncio.Task[None]) -> None:
        for done in range(10):
            write_status(tmp_path, "dataflow", {"done": done, "failed": {}})
            await asyncio.sleep(0.4)
        last = config.trainer.steps
        progress.evals[last] = {"versions": {"agent": last - 1}}  # as of a policy that ends earlier than another
        await asyncio.sleep(0.4)
        assert not waiting.done(), "it waits for all of the last versions"
        progress.evals[last] = {"versions": {"agent": last}}

    async def both() -> None:
        waiting = asyncio.create_task(_final_evaluation(run, progress))
        await asyncio.gather(play(waiting), waiting)

    asyncio.run(both())
    with pytest.raises(RoleFailed, match=r"no episode of the evaluation of version \d+ has ended within 3 s"):
        asyncio.run(_final_evaluation(run, Progress(tmp_path)))


def dataflow_status(folder: Path, *, ready: int = 0, committed: int = 0, **dropped: int) -> None:
    counts = {"dropped": dropped, "quarantined_groups": 0, "ready_groups": ready, "committed": committed}
    failures = {"failed": {"env_error": 7, "timeout": 1}, "last_failures": {"env_error": "KeyError: 'level'\x1b"}}
    write_status(folder, "dataflow", {"policies": {"agent": counts}, "put_aside": [], **failures})


def test_groups_that_all_come_to_nothing_are_said_once_with_the_cause(tmp_path):
    """The run waited without a word."""
    dataflow_status(tmp_path, failed=100)  # of the launch before
    unused = UnusedGroups(tmp_path)
    assert not [*unused.warnings()]
    dataflow_status(tmp_path, failed=101)
    assert not [*unused.warnings()]
    dataflow_status(tmp_path, failed=132, too_old=50)
    assert not [*unused.warnings()], "groups that were too old would have been of use"
    dataflow_status(tmp_path, failed=132, not_kept=1)
    (said,) = unused.warnings()
    assert said == (
        "none of the last 32 groups of agent can be trained on (31 with failed episodes, 1 refused by "
        "config.dataflow.algorithms); most failed episodes: env_error, the last by KeyError: 'level'\ufffd"
    )
    dataflow_status(tmp_path, failed=170, not_kept=1)
    assert not [*unused.warnings()]
    for usable in ({"ready": 1}, {"committed": 1}):
        dataflow_status(tmp_path, failed=170, **usable)
        assert not [*unused.warnings()]
    dataflow_status(tmp_path, committed=1, failed=201)
    assert not [*unused.warnings()]
    dataflow_status(tmp_path, committed=1, failed=202)
    assert len([*unused.warnings()]) == 1, "another row"


def test_a_role_that_fails_for_good_ends_the_run_with_its_log(tmp_path):
    failing = """
        import sys, time
        from pathlib import Path
        while not Path(sys.argv[1], "dataflow.started").exists(): time.sleep(0.02)
        print("starting up")
        raise SystemExit("trainer: no such model")
        """
    run = start(tmp_path, trainer=failing)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "trainer has failed: exit status 1" in output
    assert f"the whole log: {tmp_path}/logs/trainer.log" in output
    assert "    trainer: no such model" in output
    assert (tmp_path / "dataflow.stopped").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_in_order(tmp_path, number):
    run = start(tmp_path, trainer="import time\nwhile True: time.sleep(0.1)")
    wait_for(tmp_path / "dataflow.started")
    run.send_signal(number)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + number
    assert "press Ctrl-C again" in output
    assert (tmp_path / "dataflow.stopped").exists()


def test_a_run_outlives_who_reads_its_output(tmp_path):
    run = start(tmp_path, trainer=WAITS + TRAINER)
    wait_for(tmp_path / "dataflow.started")
    assert run.stdout is not None
    run.stdout.close()
    (tmp_path / "go on").touch()
    assert run.wait(120) == 0
    assert (tmp_path / "dataflow.stopped").exists()


@pytest.mark.parametrize(("before", "status"), [(signal.SIG_DFL, 128 + signal.SIGHUP), (signal.SIG_IGN, 0)])
def test_a_terminal_that_closes_stops_a_run_but_under_nohup(tmp_path, before, status):
    found = signal.signal(signal.SIGHUP, before)  # as nohup has it for what it starts
    try:
        run = start(tmp_path, trainer=WAITS + TRAINER)
    finally:
        signal.signal(signal.SIGHUP, found)
    wait_for(tmp_path / "dataflow.started")
    run.send_signal(signal.SIGHUP)
    if not status:
        (tmp_path / "go on").touch()
    run.communicate(timeout=120)
    assert run.returncode == status


def test_the_second_signal_stops_at_once(tmp_path):
    stubborn = """
        import os, signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(sys.argv[1], "trainer.pid.partial").write_text(str(os.getpid()))
        Path(sys.argv[1], "trainer.pid.partial").rename(Path(sys.argv[1], "trainer.pid"))
        while True: time.sleep(0.1)
        """
    run = start(tmp_path, trainer=stubborn)
    wait_for(tmp_path / "trainer.pid")
    run.send_signal(signal.SIGINT)
    until = time.monotonic() + 120.0
    while read_status(tmp_path, "launch").get("roles", {}).get("trainer", {}).get("phase") != "stopping":
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=120)
    assert run.returncode == 130
    killed = {e["role"]: e["text"] for e in read_metrics(tmp_path) if e.get("event") == "kill"}
    assert killed["trainer"] == "hurried", "not because its time to stop was over"
    assert not alive(int((tmp_path / "trainer.pid").read_text()))


def test_a_run_whose_trainers_are_remote_ends_with_the_last_version_of_each(tmp_path):
    run: Any = SimpleNamespace(
        folder=tmp_path,
        policies={name: SimpleNamespace(trainer=SimpleNamespace(steps=steps)) for name, steps in (("a", 2), ("b", 3))},
    )

    def write(**committed: int) -> None:
        write_status(tmp_path, "dataflow", {"policies": {name: {"committed": n} for name, n in committed.items()}})

    write(a=2, b=3)  # the run had ended, and an older state of it was put back
    dataflow = NewStatus(tmp_path, "dataflow")

    async def ends_with(**committed: int) -> bool:
        if committed:
            write(**committed)
        try:
            await asyncio.wait_for(_trained_by_others(run, dataflow), 0.2)
        except TimeoutError:
            return False
        return True

    assert not asyncio.run(ends_with()), "what the launch before has left says nothing"
    assert not asyncio.run(ends_with(a=2))
    assert not asyncio.run(ends_with(a=2, b=2))
    assert asyncio.run(ends_with(a=2, b=3))
