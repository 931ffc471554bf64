"""Boxes in control groups: the kernel holds them to their limits, also while nobody looks.

Most machines of continuous integration let nobody make such groups. The last test then starts a kernel of its own.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowjax.grading.sandbox import BUBBLEWRAP, Box, Limits, isolation, run
from flowjax.grading.sandbox_processes import ControlGroup, groups_parent

REPOSITORY = Path(__file__).parents[2]
LIMITS = Limits(memory_bytes=64 << 20, disk_bytes=16 << 20, idle_s=60.0)
in_groups = pytest.mark.skipif(
    groups_parent() is None or isolation().name != BUBBLEWRAP, reason="no control groups can be made here"
)

GREEDY = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        kept = [b"x" * (1 << 20) for _ in range(50)]
        time.sleep(60)
time.sleep(60)
"""
MANY = """
import os
made = 0
for _ in range(100):
    try:
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        made += 1
    except OSError:
        break
print(made, flush=True)
os.kill(0, 9)
"""


def groups() -> list[str]:
    parent = groups_parent()
    assert parent is not None
    return [path.name for path in parent.glob("flowjax-box-*")]


@in_groups
def test_programs_run_as_ever_and_leave_no_group():
    assert run("print(6 * 7)", limits=LIMITS).stdout == b"42\n"
    full = "open('/tmp/x', 'wb').write(bytes(15 << 20)); print(len(bytes(40 << 20)))"
    assert run(full, limits=LIMITS).stdout == b"41943040\n"
    assert groups() == []


@in_groups
def test_memory_of_all_together_is_bounded_while_nobody_looks():
    """Five children of 50 MiB each, which the limit of a process allows; nobody waits for the box meanwhile."""
    with Box(GREEDY, LIMITS, isolation()) as box:
        assert box._group is not None
        folder, until_s = box._group.folder, time.monotonic() + 60.0
        most_bytes = int((folder / "memory.max").read_text())
        assert most_bytes < 5 * (50 << 20)
        while "oom_kill 0" in (folder / "memory.events").read_text() and time.monotonic() < until_s:
            assert int((folder / "memory.current").read_text()) <= most_bytes
            time.sleep(0.01)
        assert box.finish().status == "killed"
    assert groups() == []


@in_groups
def test_the_number_of_processes_is_bounded():
    with Box(MANY, LIMITS, isolation()) as box:
        line = box.read_line()
        assert box._group is not None and line is not None
        assert int(line) <= LIMITS.processes
        assert int((box._group.folder / "pids.current").read_text()) <= LIMITS.processes + 3
    assert groups() == []


def test_the_limits_of_a_group(tmp_path):
    """In a folder like any other: what is written where. The group counts files of the box, which looks do not."""
    group = ControlGroup(tmp_path, LIMITS)
    written = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert written == {
        "memory.max": str((64 + 16 + 16 + 64) << 20),
        "memory.oom.group": "1",
        "memory.swap.max": "0",
        "pids.max": str(8 + 3),
    }
    command = group.holding(["echo", "a  b"])
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"a  b\n"
    assert (group.folder / "cgroup.procs").read_text().strip().isdecimal()


START = """#!/bin/sh
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /dev/shm
cd {repository}
PATH={path} HOME={folder} {python} -m pytest -p no:cacheprovider -rs -v {file} -k 'not kernel' > {folder}/report 2>&1
halt -f
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("linux.uml") is None, reason="needs a kernel to start: apt-get install user-mode-linux"
)
def test_in_a_kernel_that_has_them(tmp_path):
    script = tmp_path / "init"
    parts = {"repository": REPOSITORY, "path": os.environ["PATH"], "folder": tmp_path, "python": sys.executable}
    script.write_text(START.format(file=Path(__file__), **parts))
    script.chmod(0o755)
    command = ["linux.uml", "mem=2G", "rootfstype=hostfs", "rw", f"init={script}", "con=null", "con0=null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280.0)
    report = tmp_path / "report"
    assert report.exists(), done.stdout[-2000:]
    assert "4 passed, 1 deselected" in report.read_text().splitlines()[-1], report.read_text()[-4000:]
