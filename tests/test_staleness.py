"""The benchmark of old tokens stops a run's trainer while too few batches are ready, and lets it go on."""

import subprocess
import time
from pathlib import Path

import pytest

from flowjax.config import default_config, save_run
from flowjax.monitor.metrics import write_status
from tests.benchmarks.staleness import is_early, outrun

GROUPS, STEPS = 4, 10


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = default_config()
    config.trainer.groups_per_step, config.trainer.steps = GROUPS, STEPS
    save_run(config, tmp_path)
    return tmp_path


def report(run: Path, *, committed: int, ready: int, played: int = 1) -> None:
    policy = {"committed": committed, "ready_groups": ready, "open_groups": played}
    write_status(run, "dataflow", {"policies": {"agent": policy}, "waiting": 0, "leased": 0})


@pytest.mark.parametrize(
    ("committed", "ready", "early"),
    [
        (0, 0, False),  # the first step has nothing older to wait for
        (1, 2 * GROUPS - 1, True),
        (1, 2 * GROUPS, False),
        (STEPS - 4, GROUPS - 1, True),  # one batch is left beside those that the trainer may hold
        (STEPS - 4, GROUPS, False),
        (STEPS - 3, 0, False),
    ],
)
def test_a_step_is_early_until_the_batches_before_it_are_ready(run: Path, committed: int, ready: int, early: bool):
    assert not is_early(run, 3)  # nothing is known yet
    report(run, committed=committed, ready=ready)
    assert is_early(run, 3) == early
    report(run, committed=committed, ready=ready, played=0)
    assert not is_early(run, 3), "it would wait for ever"


def is_stopped(process: subprocess.Popen) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until(stopped: bool, process: subprocess.Popen) -> None:
    until_s = time.monotonic() + 600
    while is_stopped(process) != stopped:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_the_trainer_is_stopped_and_continued(run: Path):
    trainer = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        with outrun(run, 3):
            write_status(run, "launch", {"roles": {"trainer": {"pid": trainer.pid}}})
            for ready in (0, 3 * GROUPS, 1):
                report(run, committed=2, ready=ready)
                wait_until(ready < 2 * GROUPS, trainer)
        assert not is_stopped(trainer)
    finally:
        trainer.kill()
        trainer.wait()


def test_a_trainer_of_the_launch_before_is_left_alone(run: Path):
    trainer = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        write_status(run, "launch", {"roles": {"trainer": {"pid": trainer.pid}}})
        report(run, committed=2, ready=0)
        with outrun(run, 3):
            time.sleep(0.5)
            assert not is_stopped(trainer)
    finally:
        trainer.kill()
        trainer.wait()
