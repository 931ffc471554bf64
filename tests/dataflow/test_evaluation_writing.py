"""Files and line of an evaluation, written beside the event loop: messages are answered meanwhile, it comes once."""

import asyncio
import errno
import os
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowjax.broker import Busy
from flowjax.dataflow import evaluations
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.service import DataflowService
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.transcripts import held_out_path, read_lines, transcript
from flowjax.records import Episode, Lease
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, played

_LONG_S = 60.0  # after which something is taken to be stuck


class HeldBack:
    """Transcripts that are not made before they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun, self.go_on, self.made, self.fails = threading.Event(), threading.Event(), 0, False
        monkeypatch.setattr(evaluations, "transcript", self._transcript)

    def _transcript(self, *args: Any) -> dict[str, Any]:
        self.made += 1
        self.begun.set()
        assert self.go_on.wait(_LONG_S), "the event loop is held up"
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return transcript(*args)


def eval_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["kind"] == "eval"]


async def play_all(flow: Flow, service: DataflowService) -> list[Lease]:
    """Play an evaluation to its end, as a worker does."""
    leases = flows.lease(flow, "w", 1000, "eval")
    items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in leases]
    assert (await service.answer("episodes", {"worker": "w", "items": items}))["accepted"] == 5
    return leases


async def until_begun(held: HeldBack) -> None:
    assert await asyncio.to_thread(held.begun.wait, _LONG_S)


async def until_written(flow: Flow) -> None:
    async with asyncio.timeout(_LONG_S):
        while flow.evaluations.unwritten():
            await asyncio.sleep(0.01)


def test_messages_are_answered_while_it_is_written_and_the_end_waits_for_it(tmp_path, monkeypatch):
    """Nobody was answered for as long as that took, minutes for 512 long episodes; leases ran out meanwhile."""
    flow, held = make_flow(tmp_path), HeldBack(monkeypatch)
    service = DataflowService(flow)

    async def main() -> None:
        flow.report_serving("agent", 0)
        leases = await play_all(flow, service)
        await until_begun(held)
        (train,) = (await service.answer("lease", {"worker": "w", "slots": 1}, hold_s=0.0))["leases"]
        lease_ids = [train.lease_id, leases[0].lease_id]
        assert (await service.answer("renew", {"worker": "w", "lease_ids": lease_ids}))["lost"] == lease_ids[1:]
        assert not flow.evaluations.finished and not eval_lines(tmp_path)
        held.go_on.set()
        await until_written(flow)
        await service.answer("lease", {"worker": "w", "slots": 1}, hold_s=0.0)

    asyncio.run(main())
    (line,) = eval_lines(tmp_path)
    assert (line["version"], line["episodes"], held.made) == (0, 5, 5)
    assert len(list(read_lines(held_out_path(tmp_path, "agent@0")))) == 5
    assert set(flow.ledger.evaluations("closed")) == {"agent@0"}
    flow.close()


def test_it_is_written_by_the_next_process_where_this_one_dies_meanwhile(tmp_path, monkeypatch):
    flow, held = make_flow(tmp_path), HeldBack(monkeypatch)

    async def main() -> None:
        flow.report_serving("agent", 0)
        await play_all(flow, DataflowService(flow))
        await until_begun(held)
        flow.close()
        held.go_on.set()

    asyncio.run(main())
    assert not eval_lines(tmp_path)
    flow = make_flow(tmp_path)

    async def again() -> None:
        await DataflowService(flow).answer("lease", {"worker": "w", "slots": 1}, hold_s=0.0)
        await until_written(flow)

    asyncio.run(again())
    assert [line["episodes"] for line in eval_lines(tmp_path)] == [5]
    flow.close()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_trainer_that_goes_back_undoes_meanwhile_has_no_line(tmp_path, monkeypatch, fails):
    flow, held = make_flow(tmp_path), HeldBack(monkeypatch)
    held.go_on.set()
    service = DataflowService(flow)

    async def main() -> None:
        flow.report_serving("agent", 0)
        await play_all(flow, service)
        await until_written(flow)
        held.begun.clear()
        held.go_on.clear()
        held.fails = fails
        monkeypatch.setattr(flow.evaluations, "_due", lambda versions: True)
        flow.ledger.commit("agent", 1)
        flow.report_serving("agent", 1)
        for lease in flows.lease(flow, "w", 1000, "eval"):
            assert flows.accept(flow, lease.lease_id, played(lease, version=1))
        await until_begun(held)
        if fails:
            held.go_on.set()
            with pytest.raises(Busy):
                async with asyncio.timeout(_LONG_S):
                    while True:
                        await service.answer("lease", {"worker": "w", "slots": 1}, hold_s=0.0)
                        await asyncio.sleep(0.01)
        await service.answer("claim", {"trainer": "restarted", "policies": {"agent": 0}, "after": 0})
        held.go_on.set()
        assert not flow.evaluations.unwritten()
        await service.answer("lease", {"worker": "w", "slots": 1}, hold_s=0.0)

    asyncio.run(main())  # which waits for its threads
    assert [line["version"] for line in eval_lines(tmp_path)] == [0]
    flow.close()


def test_its_episodes_are_read_one_at_a_time(tmp_path):
    """All of them, and their text, were in memory at once: gigabytes for long ones."""
    config = configuration()
    config.eval.tasks, config.eval.transcripts, tokens = 100, 5, 20_000
    flow = make_flow(tmp_path, config)

    def long(lease: Lease) -> Episode:
        episode = played(lease, version=0, turns=1)
        (part,) = episode.trajectories
        ids, logprobs = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
        return replace(
            episode, trajectories=[replace(part, turns=[replace(part.turns[0], sampled_ids=ids, logprobs=logprobs)])]
        )

    flow.report_serving("agent", 0)
    for lease in flows.lease(flow, "w", 1000, "eval"):
        assert flow.ledger.accept(lease.lease_id, long(lease))[0]
    tracemalloc.start()
    try:
        flows.write_finished(flow)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 0.7 * config.eval.tasks * 8 * tokens, "less than their ids and log-probs"
    assert [(line["tasks"], line["episodes"]) for line in eval_lines(tmp_path)] == [(100, 100)]
    flow.close()


def test_files_and_line_are_on_the_disk_before_the_ledger_says_so(tmp_path, monkeypatch):
    """A power cut left a ledger with an evaluation that is over, and nothing of it: the run could never end."""
    flow, fsync = make_flow(tmp_path), os.fsync
    close, flushed, unflushed = flow.ledger.close_evaluation, {}, []

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        flushed[status.st_ino] = status.st_size

    def close_evaluation(name: str) -> None:
        files = [tmp_path / "metrics.jsonl", *(tmp_path / "held_out").iterdir()]
        assert len(files) == 3
        unflushed.extend(file.name for file in files if flushed.get(file.stat().st_ino) != file.stat().st_size)
        close(name)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(flow.ledger, "close_evaluation", close_evaluation)
    flow.report_serving("agent", 0)
    for lease in flows.lease(flow, "w", 1000, "eval"):
        flows.accept(flow, lease.lease_id, played(lease, version=0))
    assert len(eval_lines(tmp_path)) == 1 and not unflushed
