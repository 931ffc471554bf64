"""What a rollout worker serves, and what the dataflow takes it to serve: reports on changes, presence, restarts.

The dataflow and the reports are real; time is the event loop's own, and what is served is told to them.
"""

import asyncio
import contextlib
import math
import random
import selectors
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from rollout_run import RolloutRun, until

from flowjax import broker as broker_module
from flowjax.broker import Answer, DataflowClient, Unanswered, until_answered
from flowjax.dataflow import service as service_module
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.server import Server
from flowjax.dataflow.service import DataflowService
from flowjax.records import WireError, pack, unpack
from flowjax.rollout.service import VersionReports
from flowjax.run import Run
from flowjax.weights.follow import Follower
from flowjax.weights.mirror import WeightsMirror
from flowjax.weights.publish import committed_steps
from flowjax.weights.source import source
from tests.dataflow.test_flow import configuration, make_flow

PRESENCE_S = 10.0
RETRY_S = 1.0  # longest between two tries of a message
LATE_S = 3.0  # longest that a copy of a message is on its way


class LoopOfItsOwnTime(asyncio.SelectorEventLoop):
    """Event loop in which nothing takes time but waiting, and that takes none."""

    def __init__(self):
        self.now_s = 1000.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def pass_time(timeout: float | None = None) -> list[Any]:
            if timeout:
                self.now_s += timeout
            return select(0 if timeout is not None else None)

        selector.select = pass_time
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=LoopOfItsOwnTime) as runner:
        clock = types.SimpleNamespace(monotonic=runner.get_loop().time)
        for module in (broker_module, service_module):
            monkeypatch.setattr(module, "time", clock)
        runner.run(whole())


class Served:
    """What a worker serves, in the place of a `Follower`."""

    def __init__(self):
        self.version, self.name, self.oldest = 0, "agent@0", 0
        self.known = {0}
        self._changed = asyncio.Condition()

    async def serve(self, version: int, name: str) -> None:
        async with self._changed:
            self.version, self.name = version, name
            self.known.add(version)
            self._changed.notify_all()

    def current(self, policy: str) -> tuple[int, str]:
        return self.version, self.name

    def held(self, policy: str) -> list[int]:
        return sorted(version for version in self.known if version >= self.oldest)

    def keep_from(self, policy: str, version: int) -> None:
        self.oldest = version

    async def ready(self) -> None:
        pass

    async def changed(self, policy: str, version: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != version)
        return self.version


class Dataflow:
    """A dataflow that can be restarted, and a broker to it that loses messages and answers, each with probability
    `lost`, and sends late copies of as many."""

    def __init__(self, folder: Path, *, lost: float = 0.0, seed: int = 0, **fields: Any):
        self.lost, self._random = lost, random.Random(seed)
        self._folder, self._fields = folder, fields
        self.newest = 0  # version that was ever made
        self.answered: Counter[str] = Counter()
        self._late: set[asyncio.Task[None]] = set()
        self.start()

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        config = configuration(**self._fields)
        config.eval.tasks = 0
        self.flow: Flow = make_flow(self._folder, config, clock=asyncio.get_running_loop().time)
        self.flow.policies["agent"].committed = self.newest
        self.service = DataflowService(self.flow)
        self.down = asyncio.Event()

    def kill(self) -> None:
        self.down.set()
        self.flow.close()

    def made(self, version: int) -> None:
        self.newest = max(self.newest, version)
        if not self.down.is_set():
            self.flow.policies["agent"].committed = self.newest

    async def call(self, name: str, message: Mapping[str, Any], *, away_s: float) -> Answer:
        return await until_answered(lambda: self._attempt(name, message), where="the dataflow", away_s=away_s)

    async def _attempt(self, name: str, message: Mapping[str, Any]) -> Answer:
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        if self._random.random() < self.lost:
            raise Unanswered("the message is lost")
        if self._random.random() < self.lost:
            task = asyncio.create_task(self._late_copy(name, message))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        answer = await self._answer(name, message)
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        if self._random.random() < self.lost:
            raise Unanswered("the answer is lost")
        return answer

    async def _late_copy(self, name: str, message: Mapping[str, Any]) -> None:
        await asyncio.sleep(self._random.uniform(0.0, LATE_S))
        with contextlib.suppress(Unanswered):
            await self._answer(name, message)

    async def _answer(self, name: str, message: Mapping[str, Any]) -> Answer:
        if self.down.is_set():
            raise Unanswered("nobody listens")
        answering = asyncio.ensure_future(self.service.answer(name, unpack(pack(dict(message)))))
        dies = asyncio.ensure_future(self.down.wait())
        try:
            await asyncio.wait([answering, dies], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise Unanswered("it died over it")
            self.answered[name] += 1
            return unpack(pack(answering.result()))
        finally:
            dies.cancel()
            if not answering.done():  # with the process: nothing of it is seen any more
                answering.cancel()

    def serving(self, worker: str) -> int | None:
        """The version that it takes a worker to serve."""
        known = self.flow.workers.status(within_s=math.inf)
        return known.get(worker, {"serving": {}})["serving"].get("agent")

    def held(self, worker: str) -> set[int]:
        """Versions that may still be asked for, of which it takes the worker to have."""
        seen = self.flow.workers._seen.get(worker)
        held = seen.held.get("agent", frozenset()) if seen else frozenset()
        return {version for version in held if version >= self.flow.oldest_needed("agent")}


@contextlib.asynccontextmanager
async def worker(dataflow: Dataflow, name: str, served: Served, *, idle: bool = False):
    """Reports of a worker; one that is idle asks for episodes, as `RolloutService` does."""
    client = DataflowClient(dataflow, worker=name, away_s=math.inf)
    reports = VersionReports("agent", cast(Follower, served), client, presence_s=PRESENCE_S)

    def ask(policies: Any) -> None:
        assert list(policies) == ["agent"]
        reports.ask()

    client.prompted = ask

    async def lease() -> None:
        while True:
            await reports.known()
            await client.lease(1000, hold_s=PRESENCE_S)

    tasks = [asyncio.create_task(reports.run()), *([asyncio.create_task(lease())] if idle else [])]
    try:
        yield reports
    finally:
        for task in tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_reports_come_with_changes_and_every_now_and_then(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow, served = Dataflow(tmp_path), Served()
        async with worker(dataflow, "w", served):
            await asyncio.sleep(0.5)
            assert dataflow.serving("w") == 0 and dataflow.answered == {"versions": 1}
            await asyncio.sleep(3 * PRESENCE_S)
            assert dataflow.answered == {"versions": 4}
            for version in (1, 2, 3):
                dataflow.made(version)
                await served.serve(version, f"agent@{version}")
                await asyncio.sleep(0.2)
                assert dataflow.serving("w") == version
            assert dataflow.answered == {"versions": 7}
            await served.serve(3, "agent@3.anew")  # its trainer has gone back, and made it again
            await asyncio.sleep(1.2)
            assert dataflow.answered == {"versions": 8}
            served.known.add(2)  # it is no news that there is less to be had of what nobody may ask for
            await asyncio.sleep(1.2)
            assert dataflow.held("w") == {2, 3}

    run(monkeypatch, scenario)


def test_an_idle_worker_costs_two_requests_a_presence(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow, served = Dataflow(tmp_path, lease_s=1e6), Served()
        async with worker(dataflow, "w", served, idle=True):
            await asyncio.sleep(5.0)
            dataflow.answered.clear()
            await asyncio.sleep(10 * PRESENCE_S)
            assert set(dataflow.answered) == {"versions", "lease"}
            assert all(count in (9, 10) for count in dataflow.answered.values()), dataflow.answered

    run(monkeypatch, scenario)


def test_a_restarted_dataflow_hears_at_once_of_those_that_wait(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow, idle, busy = Dataflow(tmp_path, lease_s=1e6), Served(), Served()
        dataflow.made(2)
        await busy.serve(2, "agent@2")
        async with worker(dataflow, "idle", idle, idle=True), worker(dataflow, "busy", busy) as reports:
            await asyncio.sleep(2.0)
            for _ in range(3):
                dataflow.kill()
                dataflow.start()
                await asyncio.sleep(RETRY_S + 0.5)
                assert dataflow.serving("idle") == 0
            assert dataflow.serving("busy") is None, "it had no reason to say anything"
            renewal = DataflowClient(dataflow, worker="busy", away_s=math.inf)
            renewal.prompted = lambda policies: reports.ask()
            await renewal.renew([])
            await asyncio.sleep(0.5)
            assert dataflow.serving("busy") == 2

    run(monkeypatch, scenario)


def test_a_report_that_was_begun_before_the_dataflow_asked_is_not_enough(tmp_path, monkeypatch):
    """It may have been answered by the process before."""

    async def scenario() -> None:
        dataflow, served, asked = Dataflow(tmp_path), Served(), asyncio.Event()
        async with worker(dataflow, "w", served) as reports:
            await asyncio.wait_for(reports.known(), 5.0)
            send = dataflow._answer

            async def answer(name: str, message: Mapping[str, Any]) -> Answer:
                answered = await send(name, message)
                if not asked.is_set():
                    asked.set()
                    dataflow.kill()
                    dataflow.start()
                    reports.ask()
                return answered

            monkeypatch.setattr(dataflow, "_answer", answer)
            dataflow.made(1)
            await served.serve(1, "agent@1")
            await asyncio.wait_for(asked.wait(), 5.0)
            assert not reports._known.is_set()
            await asyncio.wait_for(reports.known(), 1.0)
            assert dataflow.serving("w") == 1

    run(monkeypatch, scenario)


@pytest.mark.parametrize("seed", range(8))
def test_the_dataflow_is_right_within_one_presence_of_whatever_happens(tmp_path, monkeypatch, seed):
    """Versions that come and go, lost messages and answers, late copies, dataflows that die: once that ends."""

    async def scenario() -> None:
        chance = random.Random(seed)
        dataflow = Dataflow(tmp_path, lost=0.3, seed=seed, lease_s=1e6, max_staleness=chance.choice((0, 1, 4)))
        workers = {f"{kind} {number}": Served() for kind in ("idle", "busy") for number in range(2)}
        async with contextlib.AsyncExitStack() as stack:
            for name, served in workers.items():
                await stack.enter_async_context(worker(dataflow, name, served, idle=name.startswith("idle")))
            for _ in range(40):
                await asyncio.sleep(chance.expovariate(1.0))
                served, event = chance.choice([*workers.values()]), chance.random()
                if event < 0.55:  # the next version, or it has caught up
                    version = max(served.version + 1, chance.randint(0, dataflow.newest + 1))
                    dataflow.made(version)
                    await served.serve(version, f"agent@{version}")
                elif event < 0.7:  # its engine was restarted on an older one, or a trainer has gone back
                    version = chance.randint(0, served.version)
                    await served.serve(version, f"agent@{version}.{chance.random()}")
                elif event < 0.85:  # some are deleted
                    served.known = {version for version in served.known if chance.random() < 0.5} | {served.version}
                else:
                    dataflow.kill()
                    await asyncio.sleep(chance.choice((0.0, 0.0, 5.0)))
                    dataflow.start()
            dataflow.lost = 0.0
            await asyncio.sleep(LATE_S)  # until the last copy is there
            await asyncio.sleep(PRESENCE_S + 0.5)
            for name, served in workers.items():
                assert dataflow.serving(name) == served.version, name
                oldest = dataflow.flow.oldest_needed("agent")
                assert dataflow.held(name) == {version for version in served.known if version >= oldest}, name
                assert served.oldest == oldest or served.oldest < oldest, name
            before = {name: served.version for name, served in workers.items()}
            dataflow.kill()
            dataflow.start()
            await asyncio.sleep(RETRY_S + 0.5)
            assert all(dataflow.serving(name) == before[name] for name in before if name.startswith("idle"))

    run(monkeypatch, scenario)


# ------------------------------------------------------------------------------------- answers that are held back


async def held(dataflow: Dataflow, name: str, **message: Any) -> asyncio.Task[Answer]:
    """A request for episodes that waits for some."""
    asked = {"worker": name, "slots": 8, **message}
    waits = asyncio.create_task(dataflow.service.answer("lease", asked))
    await asyncio.sleep(0.1)
    return waits


async def say(dataflow: Dataflow, name: str, version: int = 0) -> None:
    message = {"worker": name, "policy": "agent", "serving": version}
    await dataflow.service.answer("versions", message)


def test_a_worker_that_never_says_its_versions_is_held_as_ever(tmp_path, monkeypatch):
    """One that knows nothing of `hold_s` and `report`."""

    async def scenario() -> None:
        dataflow, clock = Dataflow(tmp_path), asyncio.get_running_loop().time
        started_s = clock()
        answer = await dataflow.service.answer("lease", {"worker": "foreign", "slots": 8})
        assert answer == {"leases": [], "state": "wait", "retry_s": 0.0, "report": ["agent"]}
        assert clock() - started_s == pytest.approx(1.0)
        waits = await held(dataflow, "foreign")
        await say(dataflow, "another")
        assert len((await waits)["leases"]) == 8, "it plays with what another serves"
        await say(dataflow, "foreign")
        assert await dataflow.service.answer("renew", {"worker": "foreign", "lease_ids": []}) == {"lost": []}

    run(monkeypatch, scenario)


def test_one_that_asks_for_a_long_hold_and_never_says_its_versions_is_no_storm(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow, clock = Dataflow(tmp_path), asyncio.get_running_loop().time
        started_s = clock()
        for _ in range(11):
            answer = await dataflow.service.answer("lease", {"worker": "w", "slots": 8, "hold_s": 10.0})
            assert answer["report"] == ["agent"]
        assert clock() - started_s == pytest.approx(10.0), "but for the first, each is held as those of others"

    run(monkeypatch, scenario)


@pytest.mark.parametrize("hold_s", [-1, 21, math.nan, math.inf, True, "1", [1]])
def test_a_hold_that_cannot_be_is_refused(tmp_path, monkeypatch, hold_s):
    async def scenario() -> None:
        with pytest.raises(WireError, match=r"field hold_s is .*: send 0 to 20"):
            await Dataflow(tmp_path).service.answer("lease", {"worker": "w", "slots": 1, "hold_s": hold_s})

    run(monkeypatch, scenario)


def test_what_a_dead_worker_was_playing_goes_to_one_that_waits(tmp_path, monkeypatch):
    """Nothing but time brings it about: nobody else says anything."""

    async def scenario() -> None:
        dataflow, clock = Dataflow(tmp_path, lease_s=12.0, max_staleness=0), asyncio.get_running_loop().time

        async def look() -> None:  # as the server does, whoever says anything
            while True:
                dataflow.flow.groups.make_up_time()
                await asyncio.sleep(1.0)

        looks = asyncio.create_task(look())
        await say(dataflow, "dies")
        leases = (await dataflow.service.answer("lease", {"worker": "dies", "slots": 100}))["leases"]
        died_s = clock()
        await asyncio.sleep(5.0)
        await say(dataflow, "waits")
        waits = await held(dataflow, "waits", slots=100, hold_s=20.0)
        given = (await waits)["leases"]
        assert {lease.episode_id for lease in given} == {lease.episode_id for lease in leases}
        assert 12.0 <= clock() - died_s <= 14.0, "within a second or so of the lease's end"
        looks.cancel()

    run(monkeypatch, scenario)


def test_a_fast_worker_that_waits_long_still_counts_as_one_that_asks(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow = Dataflow(tmp_path, max_staleness=0)
        workers = dataflow.flow.workers
        for name, episode_s in (("fast", 1.0), ("slow", 10.0)):
            await say(dataflow, name)
            seen = workers._of(name)
            seen.weighed, seen.episode_s = 16, episode_s
        await asyncio.sleep(4.0)  # no version is as new as that
        for name in ("fast", "slow"):
            workers._of(name).weighed_s = asyncio.get_running_loop().time()
        taken = await dataflow.service.answer("lease", {"worker": "third", "slots": 1000})
        assert taken["leases"]
        waits = await held(dataflow, "fast", hold_s=20.0)
        await asyncio.sleep(8.0)
        assert not waits.done() and workers.yields("slow", {"agent": 0})
        waits.cancel()
        await asyncio.sleep(4.0)
        assert not workers.yields("slow", {"agent": 0}), "it has gone"

    run(monkeypatch, scenario)


def test_who_is_sent_away_and_who_waits_at_a_dataflow_that_stops_is_answered_at_once(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow, clock = Dataflow(tmp_path, lease_s=1e6), asyncio.get_running_loop().time
        for name in ("sent away", "stays"):
            await say(dataflow, name)
        await dataflow.service.answer("lease", {"worker": "stays", "slots": 1000})
        waits = {name: await held(dataflow, name, hold_s=20.0) for name in ("sent away", "stays")}
        started_s = clock()
        await dataflow.service.answer("evict", {"evicted": "sent away"})
        assert (await waits["sent away"])["state"] == "wait" and not waits["stays"].done()
        dataflow.service.stop_holding()
        assert (await waits["stays"])["state"] == "wait"
        answer = await dataflow.service.answer("lease", {"worker": "stays", "slots": 1, "hold_s": 20.0})
        assert answer["state"] == "wait" and clock() == started_s

    run(monkeypatch, scenario)


def test_leases_of_a_worker_that_goes_while_it_waits_are_given_back(tmp_path, monkeypatch):
    async def scenario() -> None:
        dataflow = Dataflow(tmp_path, lease_s=1e6)
        await say(dataflow, "stays")
        await say(dataflow, "goes")
        first = (await dataflow.service.answer("lease", {"worker": "stays", "slots": 1000}))["leases"]
        waits = await held(dataflow, "goes", slots=100, hold_s=20.0)
        given_back = dataflow.service.answer("give_back", {"lease_ids": [first[0].lease_id], "error": ""})
        await given_back  # which offers them to the one that waits
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        (again,) = (await dataflow.service.answer("lease", {"worker": "stays", "slots": 1000}))["leases"]
        assert again.episode_id == first[0].episode_id

    run(monkeypatch, scenario)


def test_questions_of_nodes_are_held_until_there_is_news(tmp_path):
    """Over HTTP, in the time of the machine: each answer has to wait for what is made to happen before it."""

    async def scenario() -> None:
        play = RolloutRun(tmp_path)
        async with play.servers() as servers, source(servers.dataflow_url, "") as origin:
            first = await origin.ask("/files/weights")
            assert await origin.ask(f"/files/weights?known={first['mark']}&hold_s=0") == first
            assert await origin.ask("/files/weights?known=another&hold_s=20") == first
            assert await origin.ask(f"/files/weights?known={first['mark']}&hold_s=nan") == first
            waits = asyncio.create_task(origin.ask(f"/files/weights?known={first['mark']}&hold_s=20"))
            done, _ = await asyncio.wait([waits], timeout=1.0)
            assert not done
            play.publish(1)
            second = await waits
            assert set(second["policies"]["agent"]) == {"0", "1"} and second["mark"] != first["mark"]
            node = tmp_path / "node"
            following = asyncio.create_task(WeightsMirror(node, origin, hold_s=20.0).follow())
            await until(lambda: committed_steps(node / "checkpoints" / "agent") == [0, 1])
            play.publish(2)
            await until(lambda: committed_steps(node / "checkpoints" / "agent")[-1:] == [2])
            following.cancel()

            async with aiohttp.ClientSession() as session:

                async def finished(hold_s: str) -> bool:
                    async with session.get(f"{servers.dataflow_url}/finished?hold_s={hold_s}") as answer:
                        return (await answer.json())["finished"]

                assert not await finished("0") and not await finished("soon") and not await finished("-3")
                ends = asyncio.create_task(finished("20"))
                done, _ = await asyncio.wait([ends], timeout=1.0)
                assert not done
                servers.flow.policies["agent"].committed = play.config.trainer.steps
                assert await ends

    asyncio.run(scenario())


def test_a_service_reports_again_when_a_restarted_dataflow_asks(tmp_path, monkeypatch):
    """The whole service; its presence would come in an hour."""
    monkeypatch.setattr(Run, "presence_s", 20.0)

    async def scenario() -> None:
        play = RolloutRun(tmp_path, dataflow__lease_s=3600.0)
        async with play.servers() as servers, play.serving(servers) as serving:
            for reports in serving.service._reports.values():
                reports._presence_s = 3600.0
            await until(lambda: len(servers.counted) == 16 and not serving.service._playing)
            port = servers.dataflow.port
            servers.flow.close()
            await servers.dataflow.close()
            flow = servers.watch(play.flow())
            assert not flow.status()["workers"]
            servers.dataflow = TestServer(Server(flow).application(), port=port)
            await servers.dataflow.start_server()
            await until(lambda: flow.status()["workers"].get("test", {}).get("serving") == {"agent": 0})

    asyncio.run(scenario())
