"""A disk that fills up below the ledger: messages wait, nothing is lost, nothing counts twice.

SQLite's own limit on pages stands for the disk: it fails where a full one does, in the middle of a transaction.
"""

import asyncio
import contextlib
import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from flowjax.broker import Busy
from flowjax.dataflow.service import DataflowService
from flowjax.monitor.metrics import METRICS_FILE, read_metrics
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, played, train_leases


def fill(flow) -> int:
    """No page is left. Returns how many there were."""
    db = flow.ledger._db
    (most,) = db.execute("PRAGMA max_page_count").fetchone()
    db.execute("CREATE TABLE filler (x)")
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    return most


def refuses(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def empty(flow, most: int) -> None:
    flow.ledger._db.execute(f"PRAGMA max_page_count = {most}")


def test_episodes_wait_for_room_and_count_once(tmp_path: Path):
    flow = make_flow(tmp_path)
    service = DataflowService(flow)
    flow.report_serving("agent", 0)
    assert flow.batches.claim("trainer", {"agent": 0}, 0) == (True, 1)
    leases = train_leases(flow)
    items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in leases]

    async def main() -> None:
        most = fill(flow)
        with pytest.raises(Busy, match=r"cannot write to the run's folder: No space left on device: make room"):
            await service.answer("episodes", {"worker": "w", "items": items})
        assert not flow.ledger._db.in_transaction, "what comes next would be a part of the one that failed"
        assert flow.ledger.count_episodes()["done"] == 0
        empty(flow, most)
        assert (await service.answer("episodes", {"worker": "w", "items": items}))["accepted"] == len(items)
        assert (await service.answer("episodes", {"worker": "w", "items": items}))["duplicate"] == len(items)
        answer = await service.answer("batch", {"policy": "agent", "step": 0, "epoch": 1})
        assert answer["totals"]["episodes"] == 6

    asyncio.run(main())
    flow.close()
    again = make_flow(tmp_path)
    assert again.ledger.count_episodes()["done"] >= 6, "committed, not only seen by the connection that wrote it"


def test_what_algorithms_learn_from_a_refused_message_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With `once` each refused message lost a task: it was chosen already when it came again."""
    config = configuration()
    config.dataflow.algorithms = {"deduplicate": {"once": True}, "dynamic_sampling": {}}
    flow = make_flow(tmp_path, config)
    service = DataflowService(flow)
    flow.report_serving("agent", 0)
    flow.batches.claim("trainer", {"agent": 0}, 0)

    async def main() -> None:
        with monkeypatch.context() as full, pytest.raises(Busy):
            full.setattr(flow.ledger, "add_group", refuses)
            await service.answer("lease", {"worker": "w", "slots": 4, "can": {"kinds": ["train"]}})
        leases = (await service.answer("lease", {"worker": "w", "slots": 4, "can": {"kinds": ["train"]}}))["leases"]
        assert [lease.task.task_id for lease in leases] == ["task-0", "task-0", "task-1", "task-1"]
        first, second = [
            [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in pair]
            for pair in (leases[:2], leases[2:])
        ]
        await service.answer("episodes", {"worker": "w", "items": first})
        assert flow.algorithms.by_name["dynamic_sampling"].state()["seen"] == 1
        with monkeypatch.context() as full, pytest.raises(Busy):
            full.setattr(flow.ledger, "filter", refuses)
            await service.answer("episodes", {"worker": "w", "items": second})
        await service.answer("batch", {"policy": "agent", "step": 0, "epoch": 1}, hold_s=0.0)
        assert flow.algorithms.by_name["dynamic_sampling"].state()["seen"] == 2

    asyncio.run(main())


def test_the_line_of_a_batch_or_evaluation_that_the_disk_refused_is_written_later(tmp_path: Path):
    config = configuration()
    config.eval.tasks = 2
    flow = make_flow(tmp_path, config)
    service = DataflowService(flow)
    flow.report_serving("agent", 0)
    assert flow.batches.claim("trainer", {"agent": 0}, 0) == (True, 1)
    metrics = tmp_path / METRICS_FILE
    metrics.unlink(missing_ok=True)
    metrics.symlink_to("/dev/full")

    async def ask() -> None:
        await asyncio.sleep(0.01)
        await service.answer("lease", {"worker": "w", "slots": 1}, hold_s=0.0)

    async def main() -> None:
        leases = flows.lease(flow, "w", 100)
        assert {lease.kind for lease in leases} == {"train", "eval"}
        items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in leases]
        await service.answer("episodes", {"worker": "w", "items": items})
        with pytest.raises(Busy):
            await service.answer("batch", {"policy": "agent", "step": 0, "epoch": 1})
        async with asyncio.timeout(60.0):
            with pytest.raises(Busy):  # once it is known that the evaluation's line could not be written
                while True:
                    await ask()
            with pytest.raises(Busy):  # and while that is tried again
                await ask()
            metrics.unlink()
            await service.answer("batch", {"policy": "agent", "step": 0, "epoch": 1})
            while flow.evaluations.unwritten():
                with contextlib.suppress(Busy):
                    await ask()
            await ask()

    asyncio.run(main())
    assert sorted(entry["kind"] for entry in read_metrics(tmp_path)) == ["batch", "eval"]
