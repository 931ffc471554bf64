"""Time in which the dataflow takes no renewals: the leases of workers that live go on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowjax.broker import Busy
from flowjax.dataflow.service import DataflowService
from tests.dataflow.test_flow import configuration, make_flow
from tests.dataflow.test_full_disk import refuses

LEASE_S = 120.0


class Run:
    """A service with a clock of its own, and the leases that two workers hold."""

    def __init__(self, folder: Path):
        self.now_s = 1000.0
        config = configuration(lease_s=LEASE_S)
        config.eval.tasks = 0
        config.trainer.steps = 50
        self.flow = make_flow(folder, config, lambda: self.now_s)
        self._service = DataflowService(self.flow)
        self.flow.report_serving("agent", 0)

    async def ask(self, name: str, worker: str, **fields: Any) -> dict[str, Any]:
        return await self._service.answer(name, {"worker": worker, **fields}, hold_s=0.0)

    async def lease(self, worker: str) -> list[str]:
        return [lease.lease_id for lease in (await self.ask("lease", worker, slots=6))["leases"]]

    async def start(self) -> dict[str, list[str]]:
        for worker in "ab":
            await self.ask("versions", worker, policy="agent", serving=0)
        return {worker: await self.lease(worker) for worker in "ab"}

    async def renew(self, worker: str, held: list[str]) -> list[str]:
        return (await self.ask("renew", worker, lease_ids=held))["lost"]

    def pass_time(self, seconds: float) -> None:
        """With the look at each second that the server takes."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.flow.groups.make_up_time()


@pytest.mark.parametrize("first", ["lease", "renew", "the server"])
def test_a_dataflow_that_stood_still_takes_nothing_from_workers_that_live(tmp_path, first):
    """Its first answer expired what the renewals in its sockets would have kept."""
    run = Run(tmp_path)

    async def main() -> None:
        held = await run.start()
        for _ in range(4):
            run.pass_time(39.0)
            run.now_s += 100.0
            if first == "the server":
                run.flow.groups.make_up_time()
            if first == "lease":
                assert await run.lease("a") == [], "all are being played"
            assert [await run.renew(worker, held[worker]) for worker in "ab"] == [[], []]
        run.pass_time(LEASE_S - 1)
        assert await run.renew("a", held["a"]) == []
        run.pass_time(2.0)
        assert set(await run.lease("a")) and await run.renew("b", held["b"]) == held["b"], "b has died"

    asyncio.run(main())
    assert run.flow.ledger.count_causes("failed") == {"lease_ran_out": 6}


def test_a_full_disk_takes_nothing_from_workers_that_live(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """What it is full for is waited for, however long: the leases ran out meanwhile, and used up an attempt each."""
    run = Run(tmp_path)

    async def main() -> None:
        held = await run.start()
        run.pass_time(30.0)
        with monkeypatch.context() as full:
            for name in ("renew", "expire", "put_off"):
                full.setattr(run.flow.ledger, name, refuses)
            for _ in range(180):
                run.now_s += 1.0
                for worker in "ab":
                    with pytest.raises(Busy):
                        await run.renew(worker, held[worker])
        assert await run.lease("a") == []
        assert [await run.renew(worker, held[worker]) for worker in "ab"] == [[], []]
        run.pass_time(LEASE_S + 1)
        await run.lease("a")
        assert await run.renew("b", held["b"]) == held["b"], "no more than the time that was lost is made up"

    asyncio.run(main())
