"""The roles' own clients against the dataflow's server: tokens beyond loopback, several policies, back-pressure."""

import asyncio
import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Collection
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

from flowjax.broker import DataflowClient, DataflowError, Evicted, connect
from flowjax.config import default_config
from flowjax.dataflow import server as server_module
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.server import serve
from flowjax.launch import join
from flowjax.launch.machine import free_port
from flowjax.launch.roles import publish_endpoints
from flowjax.monitor.token import bearer, invite, known_run_id, known_token, make_run_id, send_away
from flowjax.records import Lease, pack
from flowjax.run import resolve, write_endpoints
from flowjax.trainer.sources import DataflowSource
from flowjax.weights.source import OriginError, source
from tests.dataflow.test_flow import configuration, make_flow, played
from tests.dataflow.test_flow_policies import episode as two_parts
from tests.dataflow.test_flow_policies import make_flow as make_flow_of_two


@contextlib.asynccontextmanager
async def serving(flow: Flow, run_dir: Path, host: str = "127.0.0.1"):
    """The address of a dataflow that listens on `host`, as the run's endpoints have it."""
    config, port, stop = default_config(), free_port(), asyncio.Event()
    config.dataflow.host = host
    task = asyncio.create_task(serve(flow, run_dir, dataflow=config.dataflow, port=port, stop=stop))
    publish_endpoints(resolve(config, run_dir), {"dataflow": port})
    url = json.loads((run_dir / "endpoints.json").read_text())["dataflow"]
    while not await asyncio.to_thread(answers, f"{url}/health"):
        await asyncio.sleep(0.01)
    try:
        yield url
    finally:
        stop.set()
        await task


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextlib.asynccontextmanager
async def client(url: str, token: str = "", worker: str = "w") -> AsyncIterator[DataflowClient]:
    async with connect(url, token=token) as broker:
        yield DataflowClient(broker, worker=worker, away_s=10.0)


def trainers(url: str, token: str = "") -> DataflowSource:
    return DataflowSource(partial(connect, url, token=token), timeout_s=60.0)


async def claimed(url: str, token: str = "", policies: Collection[str] = ("agent",)) -> DataflowSource:
    source = trainers(url, token)
    await asyncio.to_thread(source.claim, dict.fromkeys(policies, 0))
    return source


def test_beyond_loopback_both_ends_show_the_token(tmp_path):
    async def scenario() -> None:
        async with serving(make_flow(tmp_path), tmp_path, "0.0.0.0") as url:
            token = known_token(tmp_path)
            assert token and url.startswith("http://127.0.0.1:")
            async with client(url, token) as known, client(url) as unknown:
                assert await known.report_versions("agent", 0) == 0
                leases, _ = await known.lease(100)
                with pytest.raises(DataflowError, match=r"401.*token"):
                    await unknown.lease(1)
                await known.push([(lease.lease_id, played(lease, version=0)) for lease in leases])
            source = await claimed(url, token)
            served = await asyncio.to_thread(source.batch, {"agent": 0})
            assert served.policy == "agent" and len(served.rows) == 12
            await asyncio.to_thread(source.committed, "agent", 1)
            with pytest.raises(DataflowError, match="token"):
                await asyncio.to_thread(trainers(url).batch, {"agent": 0})
            with pytest.raises(urllib.error.HTTPError, match="401"):
                await asyncio.to_thread(urllib.request.urlopen, f"{url}/status", timeout=60)

    asyncio.run(scenario())


def test_a_key_lets_a_node_play_under_its_own_name_and_nothing_else(tmp_path):
    flow, key = make_flow(tmp_path), invite(tmp_path, "berlin")

    async def asked(url: str, path: str, shown: str) -> int:
        async with aiohttp.ClientSession(headers=bearer(shown)) as session, session.get(f"{url}{path}") as answer:
            return answer.status

    async def scenario() -> None:
        async with serving(flow, tmp_path, "0.0.0.0") as url:
            for path in ("/run", "/status", "/finished", "/files/weights"):
                assert await asked(url, path, key) == 200
                for wrong in (
                    key[:-1],
                    "berlin:",
                    "paris:" + key[7:],
                    "..:" + key[7:],
                    key.replace(":", "/"),
                    "\udcff",
                ):
                    assert await asked(url, path, wrong) == 401
            for wrong in ("berlin", "berlin-2:w"):  # as "berlin" it would never be judged by its mismatch
                async with client(url, key, wrong) as unnamed:
                    with pytest.raises(DataflowError, match=f"'{wrong}': this key is of workers called berlin:<name>"):
                        await unnamed.lease(1)
            async with client(url, key, "berlin:w") as node, client(url, key, "paris:w") as other:
                assert await node.report_versions("agent", 0) == 0
                (lease,), _ = await node.lease(1)
                await node.push([(lease.lease_id, played(lease, version=0))])
                (lease,), _ = await node.lease(1)
                with pytest.raises(DataflowError, match="'paris:w': this key is of workers called berlin:<name>"):
                    await other.lease(1)
                source = trainers(url, key)
                for say in (lambda: source.claim({"agent": 0}), lambda: source.batch({"agent": 0})):
                    with pytest.raises(DataflowError, match="a node's key is for playing"):
                        await asyncio.to_thread(say)
                async with connect(url, token=key) as broker:
                    for name in ("committed", "refuse", "evict"):
                        with pytest.raises(DataflowError, match="a node's key is for playing"):
                            await broker.call(name, {"evicted": "berlin"}, away_s=10.0)
                assert send_away(tmp_path, "berlin")
                for say in (node.lease(1), node.report_versions("agent", 0)):
                    with pytest.raises(Evicted, match="node berlin was sent away"):
                        await say
                assert await asked(url, "/run", key) == 403
                async with connect(url, token=known_token(tmp_path)) as broker:
                    answer = await broker.call("evict", {"evicted": "berlin"}, away_s=10.0)
                    assert answer == {"given_back": 1}
                again = invite(tmp_path, "berlin")
                assert (await asked(url, "/run", key), await asked(url, "/run", again)) == (401, 200)

    asyncio.run(scenario())


def test_a_trainer_of_two_policies_waits_for_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "HOLD_S", 100.0)  # so long would it wait for the verifier alone

    async def scenario() -> None:
        flow = make_flow_of_two(tmp_path)
        async with serving(flow, tmp_path) as url, client(url) as worker:
            for policy in ("solver", "verifier"):
                await worker.report_versions(policy, 0)
            leases, _ = await worker.lease(1000)
            versions = {"solver": 0, "verifier": 0}
            train = [lease for lease in leases if lease.kind == "train"]
            right = [lease for lease in train if lease.group_id <= "train-00000001"]  # enough for the solver alone
            await worker.push([(lease.lease_id, two_parts(lease, versions)) for lease in right])
            source = await claimed(url, policies=("solver", "verifier"))
            started_s = time.monotonic()
            served = await asyncio.to_thread(source.batch, {"verifier": 0, "solver": 0})
            assert served.policy == "solver" and time.monotonic() - started_s < 90.0, "the verifier's wait is not its"
            rest = [lease for lease in train if lease not in right]
            await worker.push([(lease.lease_id, two_parts(lease, versions)) for lease in rest])
            served = await asyncio.to_thread(source.batch, {"solver": 1, "verifier": 0})
            assert served.policy == "verifier", "the one that is behind comes first where both are ready"

    asyncio.run(scenario())


def test_what_the_trainer_has_no_room_for_waits_and_is_not_lost(tmp_path):
    config = configuration(max_staleness=3)
    config.rollout.group_size = 1
    config.eval.tasks = 1

    async def scenario() -> None:
        flow = make_flow(tmp_path, config)
        async with serving(flow, tmp_path) as url, client(url) as worker:
            await worker.report_versions("agent", 0)
            leases, _ = await worker.lease(100)
            train = [lease for lease in leases if lease.kind == "train"]
            (held_out,) = (lease for lease in leases if lease.kind == "eval")
            assert len(train) == 12
            await worker.push([(lease.lease_id, played(lease, version=0)) for lease in train[:9]])
            flow.policies[
                "agent"
            ].run.config.dataflow.max_ready_groups = (
                3  # the trainer's room is smaller than what has been leased already
            )
            assert flow.groups.full
            rest = [(lease.lease_id, played(lease, version=0)) for lease in (*train[9:], held_out)]
            body = pack({"worker": "w", "items": [{"lease_id": i, "episode": e} for i, e in rest]})
            with pytest.raises(urllib.error.HTTPError, match="429"):
                await asyncio.to_thread(urllib.request.urlopen, f"{url}/episodes", body)
            assert flow.status()["ready_groups"] == 9
            assert not flow.evaluations._unwritten, "an evaluation never waits for the trainer"
            pushing = asyncio.create_task(worker.push(rest))
            source = await claimed(url)
            for step in range(2):
                await asyncio.sleep(0.1)
                assert not pushing.done()
                assert len((await asyncio.to_thread(source.batch, {"agent": step})).rows) == 6
            assert await pushing == 3
            assert flow.status()["ready_groups"] == 6

    asyncio.run(scenario())


def test_an_evaluation_gets_past_those_that_wait_for_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "HOLD_S", 120.0)
    config = configuration(max_staleness=20)
    config.rollout.group_size, config.trainer.steps, config.eval.tasks = 1, 100, 1

    async def scenario() -> None:
        flow = make_flow(tmp_path, config)
        async with serving(flow, tmp_path) as url, client(url) as worker, aiohttp.ClientSession() as session:

            async def post(lease: Lease) -> int:
                items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)}]
                body = pack({"worker": "w", "items": items})
                async with session.post(f"{url}/episodes", data=body) as answer:
                    return answer.status

            await worker.report_versions("agent", 0)
            leases, _ = await worker.lease(100)
            train = [lease for lease in leases if lease.kind == "train"]
            (held_out,) = (lease for lease in leases if lease.kind == "eval")
            for lease in train[:4]:
                assert await post(lease) == 200
            flow.policies["agent"].run.config.dataflow.max_ready_groups = 3
            ahead = [asyncio.create_task(post(lease)) for lease in train[4:44]]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(110):  # four at a time for two minutes each would be twenty
                assert await post(held_out) == 200
            assert {task.result() for task in ahead if task.done()} <= {429}
            flow.policies["agent"].run.config.dataflow.max_ready_groups = 100
            assert set(await asyncio.gather(*ahead)) == {200, 429}, "there is room for those that were still held"

    asyncio.run(scenario())


def test_a_copy_of_a_run_has_an_id_of_its_own_and_a_moved_run_keeps_its_id(tmp_path):
    """Behind one relay the two shared the original's nodes."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run_id = make_run_id(run)
    shutil.copytree(run, copy)
    assert known_run_id(copy) == run_id, "the original's, until the copy is launched"
    assert (copied := make_run_id(copy)) != run_id
    assert make_run_id(copy) == copied and make_run_id(run) == run_id
    run.rename(tmp_path / "moved")
    assert make_run_id(tmp_path / "moved") == run_id
    shutil.copytree(tmp_path / "moved", tmp_path / "restored")
    shutil.rmtree(tmp_path / "moved")
    (tmp_path / "restored").rename(tmp_path / "moved")
    assert make_run_id(tmp_path / "moved") == run_id, "restored to where it was"


def test_the_next_run_at_an_address_refuses_what_is_meant_for_the_one_before(tmp_path):
    async def scenario() -> None:
        run_id = make_run_id(tmp_path)
        assert make_run_id(tmp_path) == run_id
        async with serving(make_flow(tmp_path), tmp_path) as url:
            for meant in ("", run_id):
                async with connect(url, run_id=meant) as broker:
                    assert await DataflowClient(broker, worker="w", away_s=10.0).report_versions("agent", 0) == 0
            async with connect(url, run_id="another") as broker:
                with pytest.raises(Evicted, match="another run plays here now"):
                    await DataflowClient(broker, worker="w", away_s=10.0).lease(1)
            async with source(url, "", "another") as origin:
                with pytest.raises(OriginError, match=r"refused \(HTTP 410\): /[a-z/?=]*: another run plays here now"):
                    await origin.ask("/files/weights")
            async with source(url, "") as origin:
                assert (await origin.ask("/run"))["id"] == run_id

    asyncio.run(scenario())


def test_a_node_hears_of_the_end_before_the_dataflow_is_gone(tmp_path, monkeypatch):
    async def scenario() -> None:
        flow, asked = make_flow(tmp_path), []
        status = flow.status
        monkeypatch.setattr(flow, "status", lambda: asked.append(True) or status())
        async with serving(flow, tmp_path) as url:
            asked.clear()
            config = default_config()
            config.dataflow.update({"url": url, "lease_s": 300.0})
            node = resolve(config, tmp_path / "node")
            node.folder.mkdir()
            write_endpoints(node.folder, {"dataflow": url})
            hears = asyncio.create_task(join.until_done(node, Console()))
            while not asked:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(Flow, "finished", True)
        await asyncio.wait_for(hears, 120)

    asyncio.run(scenario())
