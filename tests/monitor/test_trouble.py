"""Faults of the machine, real ones where they can be made."""

import errno
import os
import resource
import sqlite3
import subprocess
import sys

import pytest

from flowjax.monitor.trouble import explain, probe, unwritable, unwritable_in


def test_a_full_disk_is_known_however_it_is_wrapped():
    with pytest.raises(OSError) as caught, open("/dev/full", "wb", buffering=0) as file:  # noqa: PTH123
        file.write(b"x")
    assert unwritable(caught.value) == "No space left on device: make room on its disk"
    wrapped = ValueError("a checkpoint could not be written")
    wrapped.__cause__ = RuntimeError("in the background")
    wrapped.__cause__.__context__ = caught.value
    assert unwritable(wrapped) == unwritable(caught.value)
    wrapped.__cause__.__context__.__cause__ = wrapped  # a ring of causes ends
    assert explain(wrapped)


def test_a_full_database_is_a_full_disk():
    db = sqlite3.connect(":memory:")
    db.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as caught:
        db.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(100000))")
    assert unwritable(caught.value).startswith("No space left on device")
    assert unwritable_in(f"sqlite3.OperationalError: {caught.value}").startswith("No space left on device")


def test_other_errors_are_nobodys_trouble():
    assert not explain(KeyError("x"))
    assert not explain(OSError(errno.ECONNREFUSED, "refused"))
    assert explain(OSError(errno.EMFILE, "")) and not unwritable(OSError(errno.EMFILE, ""))
    assert not unwritable_in("trainer: no such model")


def test_a_probe_leaves_nothing_and_finds_what_is_wrong(tmp_path):
    assert probe(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in probe(tmp_path / "gone")
    assert probe(tmp_path / "gone").startswith(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert probe(tmp_path) == "", "a process without file descriptors knows nothing of the folder"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_allows_itself_as_many_files_as_it_may():
    code = (
        "import resource; from flowjax.monitor.trouble import allow_many_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200)); allow_many_files();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "200 200\n"


def test_a_probe_finds_a_disk_that_takes_only_a_part(tmp_path):
    """A limit on the size of files makes the system write a part, as a disk does that fills up."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from flowjax.monitor.trouble import probe;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); print(probe(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert os.strerror(errno.EFBIG) in told
    assert list(tmp_path.iterdir()) == []
