"""What a ledger knows after a power cut, after an older copy of it was put back, and when clocks jump."""

import stat
import time

import pytest

from flowjax.dataflow.ledger import Ledger
from flowjax.files import boot_id
from tests.dataflow.histories import Disk
from tests.dataflow.test_ledger import Clock, add, first, play_all, played


def opened(disk: Disk, clock: Clock, boot: str = "one") -> Ledger:
    ledger = Ledger(disk.path, lease_s=10.0, max_attempts=2, clock=clock, boot=boot)
    disk.watch(ledger)
    return ledger


def test_what_a_trainer_was_told_outlives_a_power_cut(tmp_path):
    """The log of SQLite is cut where it was last flushed: a batch that was served stays one, a commit stays."""
    disk, clock = Disk(tmp_path), Clock()
    ledger = opened(disk, clock)
    for position in range(4):
        add(ledger, position)
    play_all(ledger)
    assert ledger.claim("t", {"agent": 0}, 0) == (True, 1)
    batch = ledger.assign("agent", 0, first(2))
    disk.note()
    add(ledger, 4)
    play_all(ledger)
    assert disk.log.stat().st_size > disk.flushed_bytes > 0
    disk.left_behind(ledger, disk.flushed_bytes)
    ledger = opened(disk, clock, "two")
    assert ledger.epoch("agent") == 1
    assert ledger.assign("agent", 0, first(2)) == batch
    assert ledger.count_by_state("agent") == {"used": 2, "ready": 2}, "group 4 is opened and played again"
    assert ledger.count_groups() == 4
    ledger.commit("agent", 1)
    disk.note()
    disk.left_behind(ledger, disk.flushed_bytes)
    assert opened(disk, clock, "three").committed_versions() == {"agent": 1}


def test_a_checkpoint_ahead_of_an_older_copy_goes_on_and_trains_nothing_twice(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", lease_s=10.0, max_attempts=2)
    for position in range(6):
        add(ledger, position)
    play_all(ledger)
    ledger.claim("t", {"agent": 0}, 0)
    consumed = ledger.assign("agent", 0, first(2)) or []
    copy = ledger._db.serialize()
    consumed += ledger.assign("agent", 1, first(2)) or []
    ledger.close()
    old = tmp_path / "old.sqlite"
    old.write_bytes(copy)
    ledger = Ledger(old, lease_s=10.0, max_attempts=2)
    add(ledger, 6)
    assert ledger.claim("restarted", {"agent": 2}, 1, position=9) == (True, 2)
    assert ledger.counts("agent") == {"dropped/lost_ledger": 5}
    assert ledger.lease("w", 10, "train") == [], "nobody needs the episodes of group 6"
    assert ledger.batches_made("agent") == 2 and ledger.count_groups() == 9
    for position in range(9, 11):
        add(ledger, position)
    play_all(ledger)
    assert not set(ledger.assign("agent", 2, first(2)) or pytest.fail("no batch")) & set(consumed)


def test_setting_the_date_moves_no_lease(tmp_path, monkeypatch):
    """Back by an hour, a dead worker's episodes were frozen; forward, a living one's were taken away."""
    ledger = Ledger(tmp_path / "ledger.sqlite", lease_s=0.2, max_attempts=2)
    add(ledger, 0, members=1)
    started_s, date_s = time.monotonic(), time.time()
    monkeypatch.setattr(time, "time", lambda: date_s + 3600.0)
    (lease,) = ledger.lease("dead", 1, "train")
    assert ledger.renew([lease.lease_id]) == []
    monkeypatch.setattr(time, "time", lambda: date_s - 3600.0)
    while time.monotonic() < started_s + 0.5:
        time.sleep(0.05)
    ledger.expire()
    assert len(ledger.lease("other", 1, "train")) == 1


def test_leases_go_on_over_a_restart_and_get_a_whole_term_after_a_boot(tmp_path):
    disk, clock = Disk(tmp_path), Clock()
    clock.now_s = 100_000.0
    ledger = opened(disk, clock)
    add(ledger, 0)
    (lease,) = ledger.lease("w", 1, "train")
    for boot, now_s, left_s in (("one", 100_004.0, 6.0), ("two", 20.0, 10.0), ("three", 10**7, 10.0)):
        clock.now_s = now_s
        disk.left_behind(ledger)
        ledger = opened(disk, clock, boot)
        clock.now_s = now_s + left_s - 0.1
        assert ledger.expire() == [] and ledger.count_episodes()["leased"] == 1, boot
    clock.now_s += 0.2
    ledger.expire()
    assert ledger.count_episodes()["leased"] == 0
    assert ledger.accept(lease.lease_id, played(lease))[0], "who plays on after all is not too late"


def test_the_boot_is_the_same_for_every_process_of_a_machine():
    assert boot_id() == boot_id()


def test_the_ledger_is_nobody_elses_to_read(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", lease_s=10.0, max_attempts=2)
    add(ledger, 0)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"), 0o600)
