"""A run without HTTP between its roles: the dataflow's service is called as it is, by another broker."""

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_run import RolloutRun, until

import flowjax.broker
from flowjax.broker import Answer, Broker, DataflowError, Unanswered, connect, until_answered
from flowjax.dataflow.service import NAMES, DataflowService
from flowjax.records import WireError, pack, unpack
from flowjax.trainer.sources import DataflowSource

STEPS = 3


class InProcess:
    """Calls the service on its own event loop, from whichever; `carried` counts what was answered."""

    def __init__(self, service: DataflowService):
        self._service, self._loop = service, asyncio.get_running_loop()
        self.carried: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Broker]:
        yield self

    async def call(self, name: str, message: Mapping[str, Any], *, away_s: float) -> Answer:
        async def attempt() -> Answer:
            answering = self._service.answer(name, unpack(pack(dict(message))))
            try:
                answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answering, self._loop))
            except WireError as error:
                raise DataflowError(f"the dataflow refuses {name}: {error}") from error
            self.carried[name] += 1
            return unpack(pack(answer))

        return await until_answered(attempt, where="the dataflow", away_s=away_s)


def test_a_whole_run_goes_through_another_broker(tmp_path):
    """Every message of one, with a trajectory that the trainer refuses."""
    refused = []

    def unusable(policy, rows):
        if not refused:
            refused.append((policy, rows[0].trajectory_id))
            return {rows[0].trajectory_id: "too long for this trainer"}
        return {}

    async def scenario():
        run = RolloutRun(tmp_path, trainer__steps=STEPS, eval__tasks=2)
        async with run.servers() as servers:
            await servers.dataflow.close()  # nothing listens
            broker = InProcess(DataflowService(servers.flow))
            trainer = DataflowSource(broker.connect, timeout_s=60.0, unusable=unusable)
            await asyncio.to_thread(trainer.claim, {"agent": 0})
            async with run.serving(servers, broker.connect):
                for step in range(STEPS):
                    served = await asyncio.to_thread(trainer.batch, {"agent": step})
                    assert served.policy == "agent" and served.totals["episodes"] == 8
                    ages = {step - int(version) for row in served.rows for version in row.versions[row.sampled]}
                    assert ages <= {0, 1}
                    run.publish(step + 1)
                    await asyncio.to_thread(trainer.committed, "agent", step + 1)
                await until(lambda: servers.flow.finished)
                (aside,) = servers.flow.status()["put_aside"]
                assert (aside["policy"], aside["trajectory_id"]) == refused[0]
                with pytest.raises(DataflowError, match="refuses batch: field step is 99"):
                    await asyncio.to_thread(trainer.batch, {"agent": 99})
        trained = [episode for episode in servers.counted if episode.group_id.startswith("train")]
        assert len({episode.episode_id for episode in trained}) == len(trained) == 8 * STEPS + 4, (
            "a group was put aside"
        )
        assert not servers.refused
        assert set(broker.carried) >= set(NAMES) - {"renew", "give_back", "evict"}

    asyncio.run(scenario())


def test_a_message_that_there_is_not_is_refused(tmp_path):
    async def scenario():
        service = DataflowService(RolloutRun(tmp_path).flow())
        with pytest.raises(WireError, match="'lesae': send one of lease, renew"):
            await service.answer("lesae", {})

    asyncio.run(scenario())


def test_who_cannot_connect_at_all_says_so_soon(monkeypatch):
    """asyncio takes EAGAIN of connect(2) for a connection under way, and then for one that is made."""

    def out_of_ports(self, address):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(socket.socket, "connect", out_of_ports)
    monkeypatch.setattr(flowjax.broker, "_LACKING_S", 0.1)

    async def scenario():
        async with connect("http://127.0.0.1:9") as broker:
            with pytest.raises(DataflowError, match="cannot be asked: Resource temporarily unavailable"):
                await broker.call("lease", {}, away_s=300.0)

    asyncio.run(scenario())


def test_a_worker_that_was_stopped_asks_again(monkeypatch):
    """It took its own sleep, as with Ctrl-Z or a machine that is paused, for silence of the dataflow."""
    clock_s = 0.0
    monkeypatch.setattr(flowjax.broker, "time", SimpleNamespace(monotonic=lambda: clock_s))

    async def attempt() -> Answer:
        nonlocal clock_s
        if clock_s:
            return {}
        clock_s += 3600.0
        raise Unanswered("TimeoutError")

    assert asyncio.run(until_answered(attempt, where="the dataflow", away_s=120.0)) == {}
