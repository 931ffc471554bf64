"""Senders that are slow, many, or send what is costly to decode: nobody else waits for them."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from flowjax.dataflow import server
from flowjax.dataflow.server import Limit, limits
from flowjax.records import Bounds, WireError, unpack
from tests.dataflow.hostile_messages import episode, on_the_wire
from tests.dataflow.test_hostile import Dataflow, body_of, run
from tests.work import million_additions_s

SENDERS = 20


class SlowSender:
    """A connection that tells of a long body and has sent its first bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def answer(self) -> str:
        """Status line, once there is one."""
        return (await self.reader.readline()).decode()


@contextlib.asynccontextmanager
async def slow_senders(dataflow: Dataflow, count: int, path: str = "/episodes") -> AsyncIterator[list[SlowSender]]:
    senders = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(dataflow.server.host, dataflow.server.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n\x82".encode("latin1"))
        await writer.drain()
        senders.append(SlowSender(reader, writer))
    try:
        yield senders
    finally:
        for sender in senders:
            sender.writer.close()


async def all_begun(dataflow: Dataflow, count: int) -> None:
    """Until the server reads that many bodies."""
    while len(dataflow.bodies._held) < count:
        await asyncio.sleep(0.01)


def test_slow_senders_hold_up_nobody(tmp_path):
    """Four held every place that a message with episodes could be read at."""

    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        async with slow_senders(dataflow, SENDERS) as senders, ClientSession() as session:
            await all_begun(dataflow, SENDERS)
            for lease in dataflow.leases:  # each waits for the answer to the one before, and none for a slow one
                body = on_the_wire(
                    {"worker": "w", "items": [{"lease_id": lease["lease_id"], "episode": episode(lease)}]}
                )
                async with session.post(dataflow.server.make_url("/episodes"), data=body) as answer:
                    assert answer.status == 200
            assert len(dataflow.bodies._held) == SENDERS, "they are still at it"
            for sender in senders:
                sender.writer.write(b"\x00")

    run(tmp_path, scenario)


def test_a_sender_below_the_least_pace_is_sent_away_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_AT_FIRST_S", 0.2)

    async def scenario(dataflow: Dataflow) -> None:
        async with slow_senders(dataflow, 3) as senders:
            before = dataflow.everything()
            for sender in senders:
                assert "503" in await asyncio.wait_for(sender.answer(), 30)
            assert dataflow.everything() == before and not dataflow.bodies._held
            assert dataflow.status()["last_refused"]
            assert all(
                "has to keep 16,384 bytes a second" in said for said in dataflow.status()["last_refused"].values()
            )

    run(tmp_path, scenario)


def test_where_bodies_take_too_much_memory_the_slowest_goes(tmp_path):
    """A fast sender of a large body goes through between slow ones, whatever those have sent so far."""

    async def scenario(dataflow: Dataflow) -> None:
        dataflow.bodies._memory_bytes = 1_000_000
        async with slow_senders(dataflow, 3) as senders:
            await all_begun(dataflow, 3)
            for sender in senders[:2]:
                sender.writer.write(bytes(400_000))
                await sender.writer.drain()
            while sum(body.size_bytes for body in dataflow.bodies._held) < 800_000:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            status, answer = await dataflow.raw("/episodes", bytes(500_000))
            assert status == 400, answer  # read whole, and no message
            gone = [asyncio.create_task(sender.answer()) for sender in senders]
            done, waiting = await asyncio.wait(gone, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert done and all("503" in task.result() for task in done)
            for task in waiting:
                task.cancel()

    run(tmp_path, scenario)


NOTHING: dict[str, Any] = {
    "empty lists in a list": b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000,
    "lists of lists": b"\xdc\x03\xe8" + (b"\xdc\x03\xe8" + b"\x90" * 1000) * 1000,
    "maps in lists": b"\xdc\x03\xe8" + (b"\xdc\x03\xe8" + b"\x80" * 1000) * 1000,
    "one deep list": b"\x91" * 1_000_000 + b"\x90",
    "lists that tell of more than there is": b"\xdd\x00\x01\x86\xa0" * 400,
    "a wide map": b"\xde\xff\xff" + b"".join(bytes([0xCD]) + number.to_bytes(2) + b"\x90" for number in range(0xFFFF)),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_nested_nothing_is_refused_before_it_takes_memory(kind):
    before, started_s = resident_bytes(), time.process_time()
    message = on_the_wire(0)[:-1] + NOTHING[kind]
    with pytest.raises(WireError):
        unpack(message, most_elements=50_000)
    assert resident_bytes() - before < 64 * 2**20
    assert time.process_time() - started_s < 33 * million_additions_s()  # 1 s on a fast machine


def test_a_large_message_is_decoded_beside_the_loop(tmp_path, monkeypatch):
    """While it is, others are answered: nothing of it runs on the loop."""

    async def scenario(dataflow: Dataflow) -> None:
        await dataflow.lease()
        items = [{"lease_id": dataflow.leases[0]["lease_id"], "episode": episode(dataflow.leases[0])}] * 500
        decoded_in = []

        def noting(*args: Any, **options: Any) -> Any:
            decoded_in.append(threading.get_ident())
            return unpack(*args, **options)

        monkeypatch.setattr(server, "unpack", noting)
        status, answer = await dataflow.raw("/episodes", on_the_wire({"worker": "w", "items": items}))
        assert (status, answer) == (200, {"accepted": 1, "duplicate": 499})
        assert decoded_in and threading.get_ident() not in decoded_in

    run(tmp_path, scenario)


def test_limits_follow_from_the_run():
    small = limits(Bounds(64, 16, turns=10), most_bytes=2**28)
    assert small["episodes"].size_bytes < 24 * 2**20 and small[""] == Limit(128 * 1024, 16 * 1024)
    assert limits(Bounds(32_000, 4000, turns=200), most_bytes=2**28)["episodes"].size_bytes == 2**28
    assert small["renew"].size_bytes < 5 * 2**20


@pytest.mark.parametrize(("path", "size"), [("/lease", 200_000), ("/versions", 200_000), ("/renew", 5 * 2**20)])
def test_each_kind_of_message_has_its_own_limit(tmp_path, path, size):
    async def scenario(dataflow: Dataflow) -> None:
        status, answer = await dataflow.raw(path, bytes(size))
        assert status == 413 and path in answer["error"] and "bytes" in answer["error"]
        status, answer = await dataflow.raw(path, bytes(1000), **{"Content-Encoding": "gzip"})
        assert status in (400, 415)
        assert dataflow.status()["refused"][f"{path[1:]} 413"] == 1

    run(tmp_path, scenario)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def closed_after_s(port: int, *sent: bytes) -> float:
    """Seconds until the server hangs up on a connection over which these are sent, and then a byte now and then."""
    began_s, data = time.monotonic(), b"".join(sent)  # before the server can have begun to count
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(data)
            await writer.drain()
            data = b"x"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1000), 0.1)
    writer.close()
    return time.monotonic() - began_s


def test_a_header_without_end_is_not_waited_for(tmp_path, monkeypatch):
    """Be it the first of its connection or a later one; a message that waits for its answer keeps its connection."""
    monkeypatch.setattr(server, "_HEADER_S", 1.0)
    monkeypatch.setattr(server, "_IDLE_S", 1.0)
    monkeypatch.setattr(server, "HOLD_S", 5.0)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        flow, stop = Dataflow(tmp_path).flow, asyncio.Event()
        serving = asyncio.create_task(
            server.serve(flow, tmp_path, dataflow=flow.run.config.dataflow, port=port, stop=stop)
        )
        await until_listening(port)
        lease, began_s = on_the_wire({"worker": "w", "slots": 100, "can": {"kinds": ["train"]}}), time.monotonic()
        async with ClientSession() as session, asyncio.TaskGroup() as group:
            ends = [
                group.create_task(closed_after_s(port, *sent)) for sent in ([b"GET /"], [whole[:-2]], [whole, b"GET /"])
            ]
            async with session.post(f"http://127.0.0.1:{port}/lease", data=lease) as answer:  # version 0 is not there
                assert answer.status == 200 and body_of(await answer.read())["leases"] == []
            assert time.monotonic() - began_s >= 5.0
        assert min(end.result() for end in ends) >= 1.0
        stop.set()
        await serving

    asyncio.run(asyncio.wait_for(scenario(), 120))


async def until_listening(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
