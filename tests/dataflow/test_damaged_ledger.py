"""A ledger that a disk has damaged: it is named with its remedy, and the remedy gives a run no task twice."""

import asyncio
import contextlib
import errno
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flowjax.broker import Busy
from flowjax.dataflow import service as service_module
from flowjax.dataflow.ledger import Ledger, LedgerError, is_damage, start_anew
from flowjax.dataflow.service import DataflowService
from flowjax.monitor.metrics import METRICS_FILE
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, play, train_leases


def overwrite(path: Path, start: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * size)


@pytest.mark.parametrize("where", ["header", "pages", "all"])
def test_a_damaged_ledger_is_named_with_the_remedy(tmp_path, where):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 0)
    play(flow, train_leases(flow), version=0)
    flow.close()
    path = tmp_path / "dataflow.sqlite"
    size = path.stat().st_size
    start, much = {"header": (0, 16), "pages": (4096, size // 2), "all": (0, size)}[where]
    overwrite(path, start, much)
    with pytest.raises(LedgerError, match=r"is damaged .*--resume=.* --fresh_ledger"):
        make_flow(tmp_path)


@pytest.mark.parametrize("refused", ["open", "fchmod"])
def test_a_ledger_of_another_user_is_named(tmp_path, monkeypatch, refused):
    """One that this user may not open, or one that all may write and only its owner changes."""

    def refuse(what: object, *arguments: object) -> int:
        if refused == "fchmod" or "dataflow.sqlite" in str(what):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return opened(what, *arguments)

    opened: Any = os.open
    monkeypatch.setattr(f"os.{refused}", refuse)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(LedgerError, match=r"dataflow.sqlite belongs to another user: chown it"):
        make_flow(tmp_path)


def test_a_ledger_of_this_user_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    def refuse(what: object, *arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", what)

    make_flow(tmp_path)
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(LedgerError, match=r"dataflow.sqlite may not be written: chmod u\+rw it"):
        make_flow(tmp_path)


def test_damage_that_a_message_meets_ends_the_dataflow_with_the_remedy(tmp_path):
    flow = make_flow(tmp_path)
    service = DataflowService(flow)

    def broken(*args, **kwargs):
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    flow.ledger.renew = broken
    with pytest.raises(sqlite3.DatabaseError):
        asyncio.run(service.answer("renew", {"worker": "w", "lease_ids": []}))
    assert service.failure is not None and is_damage(service.failure)
    assert not is_damage(sqlite3.OperationalError("database is locked"))


def test_a_disk_that_fails_again_and_again_ends_the_dataflow_and_one_that_recovers_does_not(tmp_path, monkeypatch):
    flow, now_s = make_flow(tmp_path), [0.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: now_s[0])
    service, renew = DataflowService(flow), flow.ledger.renew

    def broken(*args, **kwargs):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    async def ask(at_s: float, answer) -> None:
        now_s[0], flow.ledger.renew = at_s, answer
        with pytest.raises(sqlite3.OperationalError) if answer is broken else contextlib.nullcontext():
            await service.answer("renew", {"worker": "w", "lease_ids": []})

    async def main() -> None:
        for at_s, answer in ((1.0, broken), (8.0, broken), (9.0, renew), (12.0, broken), (21.0, broken)):
            await ask(at_s, answer)
            assert service.failure is None
        # Another message goes well between: where metrics cannot be written, leases are given all the same.
        await service.answer("give_back", {"worker": "w", "lease_ids": [], "error": ""})
        await ask(23.0, broken)
        assert "disk I/O error" in str(service.failure)

    asyncio.run(main())


def test_single_faults_of_a_message_that_is_rare_end_nothing(tmp_path, monkeypatch):
    """Only a success of the same message was a success: two faults an hour apart ended the dataflow."""
    flow, now_s = make_flow(tmp_path), [0.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: now_s[0])
    service = DataflowService(flow)

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    async def main() -> None:
        flow.groups.give_back = broken
        for at_s in (0.0, 3600.0, 7200.0):
            now_s[0] = at_s
            with pytest.raises(OSError, match="Input/output error"):
                await service.answer("give_back", {"worker": "w", "lease_ids": ["lease"], "error": ""})
            assert service.failure is None

    asyncio.run(main())


def test_a_disk_that_is_full_for_the_dataflow_alone_ends_it_so_that_the_launcher_tells(tmp_path, monkeypatch):
    """The others can write, so nobody else would say why the run stands still."""
    flow, now_s = make_flow(tmp_path), [0.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: now_s[0])
    service = DataflowService(flow)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        flow.ledger.renew = full
        for at_s in (1.0, 20.0, 30.0, 32.0):
            assert service.failure is None
            now_s[0] = at_s
            with pytest.raises(Busy, match="cannot write to the run's folder: No space left"):
                await service.answer("renew", {"worker": "w", "lease_ids": []})
        assert "No space left" in str(service.failure)

    asyncio.run(main())


@pytest.mark.parametrize("readable", [True, False])
def test_a_new_ledger_goes_on_with_other_tasks(tmp_path, readable):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 0)
    before = {lease.group_id for lease in train_leases(flow)}
    opened = flow.status()["opened_groups"]
    assert opened == len(before) > 0
    flow.close()
    path = tmp_path / "dataflow.sqlite"
    if not readable:
        overwrite(path, 0, path.stat().st_size)
    position = start_anew(path, least_position=0 if readable else opened + 6)
    assert position == (opened if readable else opened + 6)
    assert (tmp_path / "dataflow.sqlite.aside-1").exists()
    flow = make_flow(tmp_path)
    (tmp_path / "checkpoints" / "agent" / "2").mkdir(parents=True)  # what the trainer goes on from
    claimed, epoch = flow.batches.claim("trainer", {"agent": 2}, 0)
    assert claimed and epoch == 1
    flow.report_serving("agent", 2)
    leases = train_leases(flow)
    assert leases and not before & {lease.group_id for lease in leases}
    assert min(lease.group_id for lease in leases) >= f"train-{position:08d}"
    play(flow, leases, version=2)
    taken = flows.take(flow, "agent", 2)
    assert taken is not None and not before & {group.group_id for group in taken.groups}
    flow.close()


def test_a_second_one_leaves_the_first_aside_alone(tmp_path):
    path = tmp_path / "dataflow.sqlite"
    Ledger(path, lease_s=1.0, max_attempts=1).close()
    assert start_anew(path, least_position=3) == 3
    assert start_anew(path, least_position=0) == 3, "what the new one has counted on from"
    assert (tmp_path / "dataflow.sqlite.aside-1").exists() and (tmp_path / "dataflow.sqlite.aside-2").exists()


@pytest.mark.parametrize("kept", ["older copies", "checkpoints alone"])
def test_no_group_is_trained_on_twice_where_the_ledger_and_the_log_are_lost_and_many_groups_were_dropped(
    tmp_path, kept
):
    """The order of tasks went on as if each group that was opened had been trained on: it came to the same ones."""
    config = configuration(max_staleness=1, keep_trajectories=False, algorithms={"dynamic_sampling": {}})
    config.trainer.update({"steps": 60, "groups_per_step": 3})
    config.eval.tasks = 0
    checkpoints, trained = tmp_path / "checkpoints" / "agent", Counter[str]()

    def success(lease) -> float:
        """One group in six has rewards that differ."""
        position, member = int(lease.group_id.split("-")[1]), int(lease.episode_id.split("/")[1])
        return float(member % 2) if position % 6 == 0 else 0.0

    def train(flow, steps: range) -> None:
        for step in steps:
            flow.report_serving("agent", step)
            while (taken := flows.take(flow, "agent", step)) is None:
                play(flow, train_leases(flow, 64), version=step, success=success)
            trained.update(group.group_id for group in taken.groups)
            (checkpoints / str(step + 1)).mkdir()
            flow.batches.commit("agent", step + 1)

    (checkpoints / "0").mkdir(parents=True)
    flow = make_flow(tmp_path, config)
    flow.batches.claim("first", {"agent": 0}, 0)
    train(flow, range(4))
    copies = {"dataflow.sqlite": flow.ledger._db.serialize(), METRICS_FILE: (tmp_path / METRICS_FILE).read_bytes()}
    train(flow, range(4, 8))
    opened = flow.ledger.count_groups()
    flow.close()
    for path in [*tmp_path.glob("dataflow.sqlite*"), tmp_path / METRICS_FILE]:
        path.unlink()
    if kept == "older copies":
        for name, content in copies.items():
            (tmp_path / name).write_bytes(content)
    flow = make_flow(tmp_path, config)
    flow.batches.claim("second", {"agent": 8}, flow.ledger.epoch("agent"))
    assert flow.ledger.count_groups() >= opened > 100
    train(flow, range(8, 16))
    assert len(trained) == 16 * 3, trained.most_common(3)


def test_a_new_ledger_goes_on_behind_what_is_noted_beside_the_checkpoints(tmp_path):
    for policy, noted in (("one", "40"), ("two", "70"), ("cut by a power cut", "")):
        (tmp_path / "checkpoints" / policy).mkdir(parents=True)
        (tmp_path / "checkpoints" / policy / "tasks").write_text(noted)
    assert start_anew(tmp_path / "dataflow.sqlite", least_position=3) == 70
