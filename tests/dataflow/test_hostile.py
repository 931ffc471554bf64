"""Whatever is sent to a dataflow: it answers with 4xx and a reason and is as before, or it was a fair message."""

import asyncio
import contextlib
import json
import os
import sqlite3
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grain
import msgpack
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowjax.config import default_config
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.server import Server
from flowjax.models.config import hf_config
from flowjax.models.nano import nano_config
from flowjax.records import Task
from flowjax.run import resolve
from tests.dataflow.hostile_messages import WRONG, array, changed, episode, on_the_wire, paths, without

GROUPS, MEMBERS, STEPS, VOCABULARY = 2, 2, 4, 64
Message = dict[str, Any]


class Dataflow:
    """A server with some episodes leased, and a view of everything that it holds."""

    def __init__(
        self, folder: Path, *, eval_tasks: int = 0, rollout: Message | None = None, steps: int = STEPS, **options: Any
    ):
        config = default_config()
        config.rollout.update({"group_size": MEMBERS, **(rollout or {})})
        config.trainer.update({"steps": steps, "groups_per_step": GROUPS})
        config.agents = {"player": "agent", "judge": "base"}
        config.eval.tasks = eval_tasks
        config.reward.components = {"success": 1.0}
        config.model.path = str(folder / "model")
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps(hf_config(nano_config(VOCABULARY), "float32")))
        tasks = grain.MapDataset.range(100).map(lambda index: Task(f"task-{index}", "toy", index))
        self.flow = Flow(resolve(config, folder), train_tasks=tasks, held_out_tasks=tasks)
        served = Server(self.flow, **options)
        self.bodies, self.status = served._bodies, served.status
        self.server = TestServer(served.application())
        self._path = folder / "dataflow.sqlite"
        self.leases: list[Message] = []
        self.epoch = 0  # of the newest trainer

    def everything(self) -> tuple[Any, ...]:
        """Every row of every table, and what the flow itself remembers."""
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            rows = {name: sorted(map(repr, db.execute(f"SELECT * FROM {name}"))) for name in names}
        versions = {name: (own.serving, own.committed) for name, own in self.flow.policies.items()}
        status = self.flow.status()
        for worker in status["workers"].values():
            del worker["heard_s_ago"]  # time goes by whatever is sent
        return rows, status, versions, self.flow.finished

    async def raw(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        url = self.server.make_url(path)
        async with ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
            return answer.status, body_of(await answer.read())

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return await self.raw(path, on_the_wire(body))

    async def lease(self) -> None:
        await self.post("/versions", worker="w", policy="agent", serving=0)
        _, answer = await self.post("/lease", worker="w", slots=100)
        self.leases = answer["leases"]
        await self.claim(0)

    async def claim(self, version: int) -> int:
        """Claim the policy as a new trainer that has that version; returns its epoch."""
        status, answer = await self.post(
            "/claim", trainer=f"t{self.epoch}", policies={"agent": version}, after=self.epoch
        )
        assert (status, answer["claimed"]) == (200, True)
        self.epoch = answer["epoch"]
        return self.epoch

    def fair(self) -> dict[str, Message]:
        """A message for each endpoint that would change something, or tell something."""
        ids = [lease["lease_id"] for lease in self.leases]
        items = [{"lease_id": lease["lease_id"], "episode": episode(lease)} for lease in self.leases[:2]]
        return {
            "/lease": {"worker": "w", "slots": 2, "can": {"kinds": ["train"]}},
            "/renew": {"worker": "w", "lease_ids": ids[:2]},
            "/episodes": {"worker": "w", "items": items},
            "/give_back": {"worker": "w", "lease_ids": ids[:2], "error": "no"},
            "/versions": {"worker": "w", "policy": "agent", "serving": 0},
            "/claim": {"trainer": "new", "policies": {"agent": 0}, "after": self.epoch},
            "/batch": {"policy": "agent", "step": 0, "epoch": self.epoch},
            "/refuse": {"policy": "agent", "step": 0, "epoch": self.epoch, "trajectories": {"x": "why"}},
            "/committed": {"policy": "agent", "version": 0, "epoch": self.epoch},
        }


def run(folder: Path, scenario: Callable[[Dataflow], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        dataflow = Dataflow(folder, **options)
        with contextlib.closing(dataflow.flow):
            async with dataflow.server:
                await scenario(dataflow)

    asyncio.run(main())


async def refused(dataflow: Dataflow, path: str, body: bytes, status: int = 400) -> str:
    """Post what must be refused; returns the reason."""
    before = dataflow.everything()
    found, answer = await dataflow.raw(path, body)
    assert found == status, (path, body[:200], answer)
    assert path in answer["error"] and len(answer["error"]) < 1000
    assert dataflow.everything() == before, (path, body[:200])
    return answer["error"]


def test_bodies_that_are_no_message(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        for path, message in dataflow.fair().items():
            whole = on_the_wire(message)
            nested = b"\x91" * 5000 + b"\x90"
            deep = on_the_wire(0)[:-1] + nested
            bodies = [b"", b"\x00", b"garbage", whole[:-1], whole[: len(whole) // 2], whole + b"\x00", nested, deep]
            bodies += [on_the_wire(message, schema) for schema in (0, 2, None, "1", [1])]
            bodies += [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", msgpack.packb(message), msgpack.packb([1, 2])]
            bodies += [on_the_wire(body) for body in (None, 7, "text", [], {}, {"__record__": "Lease"})]
            bodies += [on_the_wire({"__record__": "Nothing"}), on_the_wire({**message, "__array__": "<f8"})]
            for body in bodies:
                await refused(dataflow, path, body)

    run(tmp_path, scenario)


def test_every_field_missing_or_of_the_wrong_kind(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        for path, message in dataflow.fair().items():
            for place in paths(message) if path != "/episodes" else ():
                if place[0] == "worker" and path not in ("/lease", "/versions"):
                    continue  # said for people, not read
                if len(place) == 1 and place != ("can",):
                    await refused(dataflow, path, on_the_wire(without(message, place)))
                for value in WRONG:
                    if type(value) is not type(_at(message, place)) and (place, value) != (("can",), None):
                        await refused(dataflow, path, on_the_wire(changed(message, place, value)))

    run(tmp_path, scenario)


def test_records_with_fields_missing_or_of_the_wrong_kind(tmp_path):
    texts = {"error", "shown", "finish_reason", "trajectory_id", "lease_id", "episode_id"}
    optional = {"status", "shown", "error", "generate_s", "env_s", "spans", "worker"}

    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        message = dataflow.fair()["/episodes"]
        for place in paths(message):
            name = place[-1]
            if isinstance(name, str) and name not in optional and (name != "policy" or "turns" in place):
                await refused(dataflow, "/episodes", on_the_wire(without(message, place)))
            if place[0] == "worker" or "shape" in place:
                continue
            for value in (None, b"\xff", {"a": {}}, [[1]], float("nan")):
                await refused(dataflow, "/episodes", on_the_wire(changed(message, place, value)))
            if name not in texts:
                await refused(dataflow, "/episodes", on_the_wire(changed(message, place, "x")))

    run(tmp_path, scenario)


TURN = ("items", 1, "episode", "trajectories", 0, "turns", 0)
BAD_PARTS = [
    ((*TURN, "prompt_ids"), array("<f4", 3), "whole numbers"),
    ((*TURN, "prompt_ids"), array("<i4", 1, struct.pack("<i", -5)), "negative token"),
    ((*TURN, "sampled_ids"), array("<i4", 3), "2 values for 3 sampled tokens"),
    ((*TURN, "logprobs"), array("|b1", 2), "floats"),
    ((*TURN, "logprobs"), array("<f4", 2, struct.pack("<ff", float("nan"), 0.0)), "not finite"),
    ((*TURN, "logprobs"), {"__array__": "<f4", "shape": [2, 1], "data": bytes(8)}, "one axis"),
    ((*TURN, "logprobs"), {"__array__": "<f4", "shape": [4], "data": bytes(8)}, "not a flowjax message"),
    ((*TURN, "logprobs"), {"__array__": "O", "shape": [1], "data": bytes(8)}, "array type 'O'"),
    ((*TURN, "spans"), [[0, 1], [1, 1]], "spans[1] is 1, 1: it is a version from 0, the turn's, to 0"),
    ((*TURN, "spans"), [[0, 3]], "spans has 3 tokens, but 2 were sampled"),
    ((*TURN, "version"), -1, "0 to 0"),
    ((*TURN, "version"), 1, "0 to 0"),
    ((*TURN, "policy"), "stranger", "this run has agent"),
    ((*TURN, "env_reward"), float("inf"), "finite number"),
    ((*TURN, "env_reward"), 1e30, "finite number"),
    ((*TURN, "prompt_ids"), array("<i4", 0), "prompt_ids is empty: send the whole prompt"),
    ((*TURN, "prompt_ids"), array("<i4", 5000), "config.rollout.max_prompt_tokens is 1024"),
    ((*TURN, "prompt_ids"), array("<i4", 1, struct.pack("<i", VOCABULARY)), "the model of agent has 64"),
    ((*TURN, "sampled_ids"), array("<i4", 2, struct.pack("<ii", 3, 10**9)), "has token 1000000000"),
    ((*TURN, "logprobs"), array("<f4", 2, struct.pack("<ff", 0.5, -1.0)), "from -1 to 0.5"),
    ((*TURN, "logprobs"), array("<f4", 2, struct.pack("<ff", -3e38, -1.0)), "natural logarithms"),
    ((*TURN[:5], "trajectory_id"), "another's", "it is the episode's id"),
    ((*TURN[:5], "outcome"), {"success": 1e300}, "finite numbers"),
    ((*TURN[:3], "error"), "x" * 50_000, "50000 characters"),
    ((*TURN, "valid"), 1, "true or false"),
    ((*TURN[:5], "policy"), "stranger", "this run has agent"),
    ((*TURN[:5], "policy"), "base", "policy differs from the trajectory's"),
    ((*TURN[:5], "seed"), 99, "differs from the episode's"),
    ((*TURN[:3], "status"), "perfect", "one of ok"),
    ((*TURN[:5], "outcome"), {"score": 1.0}, "lacks 'success'"),
    ((*TURN[:3], "outcome"), {"score": 1.0}, "episode.outcome lacks 'success', which evaluations count"),
    ((*TURN[:3], "outcome"), {"success": float("nan")}, "finite numbers"),
    ((*TURN[:3], "outcome"), {1: 1.0}, "finite numbers"),
    ((*TURN[:3], "trajectories"), {"__record__": "Task", "task_id": "", "world": "", "seed": 0}, "list of Trajectory"),
    (("items", 1), {"lease_id": "x"}, "episode is missing"),
]


@pytest.mark.parametrize(("place", "value", "reason"), BAD_PARTS)
def test_one_bad_item_refuses_the_whole_message(tmp_path, place, value, reason):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        message = dataflow.fair()["/episodes"]
        told = await refused(dataflow, "/episodes", on_the_wire(changed(message, place, value)))
        assert reason in told
        assert (await dataflow.post("/episodes", **message))[1] == {"accepted": 2, "duplicate": 0}

    run(tmp_path, scenario)


def of_another(lease: Message, field: str) -> Message:
    """An episode that is sound in itself, with another `field` throughout than its lease has."""
    if field == "task_id":
        return episode({**lease, "task": {**lease["task"], "task_id": "task-99"}})
    return episode({**lease, field: "train-00000099" if field == "group_id" else 99})


@pytest.mark.parametrize("field", ["task_id", "group_id", "seed"])
def test_an_episode_is_held_to_its_lease(tmp_path, field):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        first, second = dataflow.leases[:2]
        items = [
            {"lease_id": second["lease_id"], "episode": episode(second)},
            {"lease_id": first["lease_id"], "episode": of_another(first, field)},
        ]
        told = await refused(dataflow, "/episodes", on_the_wire({"worker": "w", "items": items}))
        assert f"items[1].episode.{field}" in told and "its lease says" in told
        items[1]["episode"] = episode(first)
        assert (await dataflow.post("/episodes", worker="w", items=items))[1] == {"accepted": 2, "duplicate": 0}

    run(tmp_path, scenario)


@pytest.mark.parametrize(("parts", "turns", "reason"), [(500, 1, "500 turns"), (500, 0, "500 turns"), (2, 900, "1800")])
def test_an_episode_has_no_more_turns_than_the_run_allows(tmp_path, parts, turns, reason):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        whole = episode(dataflow.leases[0])
        (part,) = whole["trajectories"]
        whole["trajectories"] = [
            {**part, "trajectory_id": f"{whole['episode_id']}/{index}", "turns": part["turns"] * turns}
            for index in range(parts)
        ]
        items = [{"lease_id": dataflow.leases[0]["lease_id"], "episode": whole}]
        told = await refused(dataflow, "/episodes", on_the_wire({"worker": "w", "items": items}))
        assert reason in told and "config.rollout.max_episode_turns" in told
        whole["trajectories"] = [part, part]
        told = await refused(dataflow, "/episodes", on_the_wire({"worker": "w", "items": items}))
        assert "as an earlier one's" in told

    run(tmp_path, scenario)


def test_an_evaluation_is_played_with_the_versions_that_its_lease_names(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        (held_out,) = (lease for lease in dataflow.leases if lease["kind"] == "eval")
        train = [lease for lease in dataflow.leases if lease["kind"] == "train"]
        items = [{"lease_id": lease["lease_id"], "episode": episode(lease)} for lease in train]
        assert (await dataflow.post("/episodes", worker="w", items=items))[0] == 200
        assert (await dataflow.post("/batch", **dataflow.fair()["/batch"]))[1]["state"] == "run"  # version 1 may be
        newer = changed(episode(held_out), ("trajectories", 0, "turns", 0, "version"), 1)
        items = [{"lease_id": held_out["lease_id"], "episode": newer}]
        told = await refused(dataflow, "/episodes", on_the_wire({"worker": "w", "items": items}))
        assert "version is 1, but its lease says 0" in told

    run(tmp_path, scenario, eval_tasks=1)


@pytest.mark.parametrize("version", [-1, 1, STEPS, 10**12, -(2**63)])
def test_versions_that_nobody_has_made_poison_nothing(tmp_path, version):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        for path, name in (("/versions", "serving"), ("/batch", "step"), ("/committed", "version")):
            message = dataflow.fair()[path] | {name: version}
            assert f"{name} is {version}" in await refused(dataflow, path, on_the_wire(message))
            assert "this run has agent" in await refused(
                dataflow, path, on_the_wire(dataflow.fair()[path] | {"policy": "x"})
            )

    run(tmp_path, scenario)


UNCLEAR = [
    ("/lease", {"can": 7}),
    ("/lease", {"can": ["agent"]}),
    ("/lease", {"can": {"worlds": "toy"}}),
    ("/lease", {"can": {"worlds": [1]}}),
    ("/lease", {"can": {"worlds": [[]]}}),
    ("/lease", {"can": {"kinds": ["nap"]}}),
    ("/lease", {"can": {"hats": []}}),
    ("/lease", {"slots": 10**9}),
    ("/lease", {"worker": "w" * 10**5}),
    ("/batch", {"policies": {}}),
    ("/batch", {"policies": []}),
    ("/batch", {"policies": {"agent": -1}}),
    ("/batch", {"policies": {"agent": 9}}),
    ("/batch", {"policies": {"agent": True}}),
    ("/batch", {"policies": {"agent": 0, "stranger": 0}}),
    ("/batch", {"policies": {1: 0}}),
    ("/renew", {"lease_ids": ["x"] * 200_000}),
]


@pytest.mark.parametrize(("path", "changes"), UNCLEAR)
def test_what_is_understood_in_part_is_refused(tmp_path, path, changes):
    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        message = dataflow.fair()[path] | changes
        if "policies" in changes:
            del message["policy"], message["step"]
        await refused(dataflow, path, on_the_wire(message))

    run(tmp_path, scenario)


def test_batches_that_no_checkpoint_needs_any_more_are_refused(tmp_path):
    """A batch of long ago, asked for again, would undo all later ones and have their groups trained on twice."""

    async def scenario(dataflow: Dataflow) -> None:
        dataflow.flow.policies["agent"].settings.trainer.keep_checkpoints = 1
        epoch = await dataflow.claim(0)
        for step in range(3):
            await dataflow.post("/versions", worker="w", policy="agent", serving=step)
            _, answer = await dataflow.post("/lease", worker="w", slots=100)
            version = ("trajectories", 0, "turns", 0, "version")
            items = [
                {"lease_id": lease["lease_id"], "episode": changed(episode(lease), version, step)}
                for lease in answer["leases"]
            ]
            assert (await dataflow.post("/episodes", worker="w", items=items))[0] == 200
            assert (await dataflow.post("/batch", policy="agent", step=step, epoch=epoch))[1]["state"] == "run"
            assert (await dataflow.post("/committed", policy="agent", version=step + 1, epoch=epoch))[0] == 200
        await refused(dataflow, "/batch", on_the_wire({"policy": "agent", "step": 1, "epoch": epoch}))
        assert (await dataflow.post("/batch", policy="agent", step=2, epoch=epoch))[1]["state"] == "run"

    run(tmp_path, scenario)


def test_strange_leases_change_nothing(tmp_path):
    """Unknown ones, made-up ones, another episode's, and answers sent twice or late."""

    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        first, second = dataflow.leases[:2]
        before = dataflow.everything()
        for lease_id in ("", "x", "0" * 32, second["lease_id"], first["lease_id"][:-1], "é" * 16):
            items = [{"lease_id": lease_id, "episode": episode(first)}]
            assert await dataflow.post("/episodes", worker="w", items=items) == (200, {"accepted": 0, "duplicate": 1})
        elsewhere = episode({**first, "episode_id": "train-00000099/000"})
        items = [{"lease_id": first["lease_id"], "episode": elsewhere}]
        assert (await dataflow.post("/episodes", worker="w", items=items))[1]["accepted"] == 0
        assert (await dataflow.post("/renew", worker="w", lease_ids=["x", ""]))[1] == {"lost": ["x", ""]}
        assert (await dataflow.post("/give_back", worker="w", lease_ids=["x"], error="e"))[0] == 200
        assert dataflow.everything() == before
        items = [{"lease_id": first["lease_id"], "episode": episode(first)}] * 3
        assert (await dataflow.post("/episodes", worker="w", items=items))[1] == {"accepted": 1, "duplicate": 2}
        before = dataflow.everything()
        assert (await dataflow.post("/give_back", worker="w", lease_ids=[first["lease_id"]], error="e"))[0] == 200
        broken = {"lease_id": first["lease_id"], "episode": episode(first, status="env_error")}
        assert (await dataflow.post("/episodes", worker="w", items=[broken]))[1]["accepted"] == 0
        assert dataflow.everything() == before

    run(tmp_path, scenario)


def test_without_the_token_no_endpoint_answers(tmp_path):
    async def scenario(dataflow: Dataflow) -> None:
        for path, message in dataflow.fair().items():
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "secret"}, {"Authorization": "é"}):
                before = dataflow.everything()
                status, answer = await dataflow.raw(path, on_the_wire(message), **headers)
                assert status == 401 and "token" in answer["error"]
                assert dataflow.everything() == before
        async with ClientSession() as session:
            for path in ("/status", "/metrics", "/nothing"):
                async with session.get(dataflow.server.make_url(path)) as answer:
                    assert answer.status in (401, 404)
            for path, method in (("/lease", "GET"), ("/status", "POST"), ("/metrics", "DELETE")):
                url, token = dataflow.server.make_url(path), {"Authorization": "Bearer secret"}
                async with session.request(method, url, headers=token) as answer:
                    assert answer.status == 405

    run(tmp_path, scenario, token="secret")


@pytest.mark.parametrize("told", [True, False], ids=["length told", "in chunks"])
@pytest.mark.parametrize("token", ["", "secret"])
def test_a_gigabyte_is_refused_early_and_not_held(tmp_path, told, token):
    size, piece = 2**30, bytes(2**20)

    async def scenario(dataflow: Dataflow) -> None:
        before, memory = dataflow.everything(), _resident_bytes()
        reader, writer = await asyncio.open_connection(dataflow.server.host, dataflow.server.port)
        length = f"Content-Length: {size}" if told else "Transfer-Encoding: chunked"
        writer.write(f"POST /episodes HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        answer = asyncio.create_task(reader.readline())
        sent = 0
        while sent < size and not answer.done():
            writer.write(piece if told else b"100000\r\n" + piece + b"\r\n")
            try:
                async with asyncio.timeout(60):
                    await writer.drain()
            except (ConnectionError, TimeoutError):
                break
            sent += len(piece)
        assert (b"401" if token else b"413") in await asyncio.wait_for(answer, 5)
        assert sent < 64 * len(piece)
        assert _resident_bytes() - memory < 256 * 2**20
        assert dataflow.everything() == before
        writer.close()

    run(tmp_path, scenario, max_message_bytes=16 * 2**20, token=token)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fair_messages_changed_at_random_are_never_a_fault_of_the_server(tmp_path_factory, data):
    """Two changes per message. A 4xx has changed nothing; what is still fair is answered with 200."""

    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        for path, message in dataflow.fair().items():
            for _ in range(2):
                place = data.draw(st.sampled_from(list(paths(message))))
                gone = data.draw(st.booleans())
                message = without(message, place) if gone else changed(message, place, data.draw(VALUES))
                if not message:
                    break
            if path == "/lease" and message.get("slots") != 2:
                message["slots"] = "none"  # nothing is left to lease: a fair message would only be held
            if path == "/claim":
                message["after"] = data.draw(SCALARS.filter(lambda value: value != dataflow.epoch))
            if path == "/batch":
                message["step"] = data.draw(SCALARS.filter(lambda value: value != 0))
            before = dataflow.everything()
            status, answer = await dataflow.raw(path, on_the_wire(message))
            assert status in (200, 400), answer
            if status == 400:
                assert dataflow.everything() == before

    run(tmp_path_factory.mktemp("flow"), scenario)


def _at(message: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        message = message[key]
    return message


def body_of(data: bytes) -> Any:
    message: Any = msgpack.unpackb(data)
    return message["body"]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
