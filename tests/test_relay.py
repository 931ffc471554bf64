"""The way over a NATS server: what a node sends comes to the dataflow as it was sent, whatever fails between them."""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestServer
from nats.aio.client import Client
from yarl import URL

from flowjax import relay
from flowjax.config import ConfigError, default_config
from flowjax.monitor.token import bearer, invite, keep_run_id, make_token, send_away
from flowjax.records import Lease, Task, pack, unpack
from flowjax.relay import Lost, NatsLine, RunEnd, dialled, node_end, reached, run_end
from flowjax.run import Run, read_endpoints, write_endpoints
from tests.benchmarks.dataflow_workers import played
from tests.nats_server import NatsServer, nats_cluster, nats_server, settle, write_credentials

RUN_ID = "0123abcd"


@dataclass
class Way:
    """Both ends, a dataflow's stand-in behind one, and the address of the other."""

    here: str
    run: Run
    end: RunEnd
    line: NatsLine
    session: aiohttp.ClientSession
    heard: list[web.Request]
    key: str
    held: list[str]  # what became of requests that the dataflow holds back


def of_folder(folder: Path, url: str) -> Run:
    config = default_config()
    config.dataflow.relay = url
    return Run(config=config, folder=folder, policies={}, bases={}, agents={})


@contextlib.asynccontextmanager
async def dialled_as(user: str, url: str, credentials: Path | None = None) -> AsyncIterator[NatsLine]:
    with pytest.MonkeyPatch.context() as patch:
        if credentials is None:
            patch.setenv("NATS_USER", user)
            patch.setenv("NATS_PASSWORD", "secret")
        else:
            patch.setenv("NATS_CREDS", str(credentials / f"{user}.creds"))
        patch.setenv("NATS_INBOX_PREFIX", f"_INBOX.{user}")
        async with dialled(url) as line:
            yield line


@contextlib.asynccontextmanager
async def way(folder: Path, server: NatsServer | str, *, credentials: Path | None = None) -> AsyncIterator[Way]:
    url = server if isinstance(server, str) else server.url
    heard: list[web.Request] = []
    held: list[str] = []

    async def echo(request: web.Request) -> web.Response:
        heard.append(request)
        body = await request.read()
        if request.path == "/hold":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                held.append("dropped")
                raise
        size_bytes = int(request.query.get("answer", len(body)))
        answer = body if size_bytes == len(body) else random.Random(0).randbytes(size_bytes)
        status = int(request.query.get("status", 200))
        return web.Response(status=status, body=answer, headers={"Content-Type": "x/y", "Retry-After": "7"})

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", echo)
    dataflow = TestServer(app)
    await dataflow.start_server()
    folder.mkdir(exist_ok=True)
    keep_run_id(folder, RUN_ID)
    make_token(folder)
    write_endpoints(folder, {"dataflow": str(dataflow.make_url(""))})
    run = of_folder(folder, url)
    try:
        async with (
            dialled_as("run", url, credentials) as near,
            run_end(near, run) as end,
            dialled_as("node", url, credentials) as line,
            node_end(line, RUN_ID) as here,
            aiohttp.ClientSession(headers=bearer(key := invite(folder, "berlin"))) as session,
        ):
            yield Way(here, run, end, line, session, heard, key, held)
    finally:
        await dataflow.close()


def test_what_is_sent_comes_as_it_was_sent(tmp_path):
    """Bodies that fit into a message, that just do not, and that take many, in both directions."""

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                for size_bytes in (0, 1, relay._PART_BYTES, relay._PART_BYTES + 1, 5_000_001):
                    body = random.Random(size_bytes).randbytes(size_bytes)
                    headers = {"X-Flowjax-Run": RUN_ID, "Range": "bytes=3-5", "Content-Type": "a/b"}
                    url = URL(f"{there.here}/episodes?a=%2Fb&c=d%20e", encoded=True)
                    async with there.session.post(url, data=body, headers=headers) as answer:
                        assert await answer.read() == body
                        assert (answer.status, answer.headers["Retry-After"], answer.content_type) == (200, "7", "x/y")
                    request = there.heard[-1]
                    assert (request.method, request.raw_path) == ("POST", "/episodes?a=%2Fb&c=d%20e")
                    for name, value in headers.items():
                        assert request.headers[name] == value
                for size_bytes in (relay._PART_BYTES + 1, 3_000_000):
                    async with there.session.get(f"{there.here}/files?answer={size_bytes}&status=206") as answer:
                        assert await answer.read() == random.Random(0).randbytes(size_bytes)
                        assert answer.status == 206

    asyncio.run(check())


def conversation(turns: int, tokens: int) -> bytes:
    """An episode as its worker sends it, each turn with the whole prompt before it."""
    lease = Lease("l", Task("t", "w", 0), "g", "e", 0, "train", 1.0)
    return pack({"items": [{"lease_id": "l", "episode": played(lease, {"agent": 0}, turns=turns, turn_tokens=tokens)}]})


def test_episodes_are_shorter_on_the_way_than_at_its_ends(tmp_path):
    """Also those that come in parts, compressed or not."""

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:

                def sent_bytes() -> int:
                    return sum(client.stats["out_bytes"] for client in there.line.clients)

                for turns, tokens, parts in ((8, 64, False), (8, 1024, False), (16, 2048, False), (4, 131_072, True)):
                    body, before = conversation(turns, tokens), sent_bytes()
                    async with there.session.post(f"{there.here}/episodes", data=body) as answer:
                        assert await answer.read() == body
                    on_the_way = sent_bytes() - before
                    assert parts == (on_the_way > relay._PART_BYTES)
                    assert on_the_way < 0.7 * len(body), (turns, tokens)

    asyncio.run(check())


def test_a_damaged_body_is_lost_and_one_that_grows_too_large_refused(tmp_path):
    """Before memory is taken for it."""

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                there.end._most_bytes = 2_000_000

                async def answered(body: bytes) -> tuple[dict[str, Any], bytes]:
                    head = {"id": "a", "method": "POST", "path": "/x", "headers": bearer(there.key), "zstd": True}
                    message = bytes(msgpack.packb([head, [body, len(body), ""]]) or b"")
                    answer = await there.line.connection().request(f"flowjax.{RUN_ID}", message, timeout=120)
                    head, (content, *_) = msgpack.unpackb(answer.data)
                    return head, content

                good = zstandard.compress(bytes(1_000_000))
                assert (await answered(good))[0]["status"] == 200
                whole = zstandard.compress(random.Random(0).randbytes(100_000))
                of_any_size = zstandard.ZstdCompressor().compressobj()
                silent = of_any_size.compress(b"a") + of_any_size.flush()
                for damaged in (b"", b"none", good[:-1], good + b"?", whole[:-9], silent):
                    head, reason = await answered(damaged)
                    assert head == {"lost": True} and b"body" in reason, damaged[:50]
                head, reason = await answered(zstandard.compress(bytes(2_000_001)))
                assert head["status"] == 413 and "config.dataflow.max_message_bytes" in unpack(reason)["error"]
                assert len(there.heard) == 1

    asyncio.run(check())


PAGE = Path(__file__).parents[1] / "docs" / "rollout.md"


def test_the_rights_on_the_page_are_enough_and_no_node_hears_another(tmp_path):
    shown = re.search(r"```\n(# nats\.conf\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    config = re.sub(r"(?m)^(tls|port).*\n", "", shown[1]).replace("berlin", "node")
    (tmp_path / "nats.conf").write_text(config)

    async def check() -> None:
        with nats_server(f"--config={tmp_path / 'nats.conf'}") as server:
            async with way(tmp_path / "run", server) as there:
                large = bytes(2 * relay._PART_BYTES)
                async with there.session.post(f"{there.here}/episodes", data=large) as answer:
                    assert await answer.read() == large
                heard: list[object] = []

                async def hear(message: object) -> None:
                    heard.append(message)

                async with dialled_as("lima", server.url) as other:
                    for subject in (f"flowjax.{RUN_ID}", "_INBOX.>", "_INBOX.node.>", "_INBOX.run.>", "_INBOX.lima.>"):
                        await other.connection().subscribe(subject, cb=hear)
                    await settle(other.connection())
                    assert (await said(there))[0] == 200
                    await asyncio.sleep(0.5)
                assert not heard

    asyncio.run(check())


def test_files_of_credentials_let_in_those_whom_they_name(tmp_path):
    rights = {
        "run": {"pub": {"allow": ["_INBOX.>"]}, "sub": {"allow": ["flowjax.>", "_INBOX.run.>"]}},
        "node": {"pub": {"allow": ["flowjax.>", "_INBOX.run.>"]}, "sub": {"allow": ["_INBOX.node.>"]}},
    }
    config = write_credentials(tmp_path, rights)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    write_credentials(stranger, rights)

    async def check() -> None:
        with nats_server(f"--config={config}") as server:
            async with way(tmp_path / "run", server, credentials=tmp_path) as there:
                large = bytes(2 * relay._PART_BYTES)
                async with there.session.post(f"{there.here}/episodes", data=large) as answer:
                    assert await answer.read() == large
            for folder in (stranger, None):
                with pytest.raises(ConfigError, match=r"Authorization Violation.*NATS_CREDS"):
                    async with dialled_as("node", server.url, folder):
                        pass

    asyncio.run(check())


def test_many_are_under_way_at_once(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:

                async def ask(number: int) -> None:
                    body = random.Random(number).randbytes(number * 2000)
                    async with there.session.post(there.here + "/lease", data=body) as answer:
                        assert (answer.status, await answer.read()) == (200, body)

                await asyncio.gather(*map(ask, range(100)))

    asyncio.run(check())


async def said(there: Way, method: str = "POST", body: bytes = b"x") -> tuple[int, str]:
    """Status and reason of what comes back; 0 where the connection is closed."""
    try:
        async with there.session.request(method, f"{there.here}/lease", data=body) as answer:
            return answer.status, unpack(await answer.read())["error"] if answer.status != 200 else ""
    except aiohttp.ServerDisconnectedError as error:
        return 0, str(error)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def test_who_asks_a_run_that_is_not_there_is_told_so_at_once(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there, node_end(there.line, "0f0f") as elsewhere:
                there.here = elsewhere
                status, reason = await said(there)
                assert status == 503 and reason.endswith("with the id 0f0f")
                assert (await said(there, "GET", b""))[0] == 0, "as if nobody listened: what is fetched goes on later"

    asyncio.run(check())


def test_a_dataflow_that_is_away_is_asked_again_by_who_asked(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                write_endpoints(there.run.folder, {"dataflow": "http://127.0.0.1:9"})
                status, reason = await said(there)
                assert status == 503 and "ClientConnectorError" in reason

    asyncio.run(check())


def test_what_fails_again_after_it_went_well_is_said_again(tmp_path, caplog):
    """A node's log named the first outage of a run alone."""

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                good = read_endpoints(there.run.folder)["dataflow"]
                for _ in range(2):
                    for url, status in (("http://127.0.0.1:9", 503), ("http://127.0.0.1:9", 503), (good, 200)):
                        write_endpoints(there.run.folder, {"dataflow": url})
                        assert (await said(there))[0] == status

    asyncio.run(check())
    assert sum("ClientConnectorError" in record.getMessage() for record in caplog.records) == 2


def test_whoever_has_gone_is_asked_for_no_longer(tmp_path):
    """A worker that ends while the dataflow holds its answer back is given no leases."""

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                asked = asyncio.create_task(there.session.post(there.here + "/hold").__aenter__())
                await until(lambda: there.heard)
                asked.cancel()
                await until(lambda: there.held)
                assert there.held == ["dropped"]

    asyncio.run(check())


def test_what_is_under_way_when_the_server_dies_is_not_waited_for(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                asked = asyncio.create_task(there.session.post(there.here + "/hold").__aenter__())
                await until(lambda: there.heard)
                server.kill()
                async with asyncio.timeout(30):  # the dataflow would hold it for 60
                    assert (await asked).status == 503
                server.start()  # so that the ends can be left
                await until(lambda: all(client.is_connected for client in there.line.clients))

    asyncio.run(check())


def test_a_server_that_was_killed_is_dialled_again(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                assert (await said(there))[0] == 200
                server.kill()
                await until(lambda: not any(client.is_connected for client in there.line.clients))
                assert (await said(there)) == (503, f"the NATS server {server.url} does not answer")
                server.start()
                async with asyncio.timeout(60):
                    while (await said(there))[0] != 200:
                        await asyncio.sleep(0.1)

    asyncio.run(check())


def test_each_server_of_a_cluster_may_be_killed(tmp_path):
    """The ends need not be at the same one, and an end dials another when its own is gone."""

    async def check() -> None:
        with nats_cluster(3) as servers:
            async with way(tmp_path, ",".join(server.url for server in servers)) as there:
                for server in servers:
                    server.kill()
                    async with asyncio.timeout(120):
                        while (await said(there))[0] != 200:
                            await asyncio.sleep(0.1)
                    server.start()
                await until(lambda: all(client.is_connected for client in there.line.clients))

    asyncio.run(check())


def test_who_leaves_while_a_server_is_dialled_leaves(monkeypatch):
    """Also where the dialling does not hear that it is over: Python 3.11 forgets it if it fails in that moment."""

    async def deaf(client: Client, server: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.2)
        raise OSError("refused")

    async def check() -> None:
        with nats_server() as server:
            async with dialled(server.url) as line:
                monkeypatch.setattr(Client, "_connect_to_server", deaf)
                for client in line.clients:
                    client.options["reconnect_time_wait"] = 0.0
                server.kill()
                await until(lambda: not any(client.is_connected for client in line.clients))

    asyncio.run(check())


def test_large_bodies_are_fetched_of_nodes_alone_and_within_the_bound_of_messages(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                large = bytes(relay._PART_BYTES + 1)
                there.end._most_bytes = len(large) - 1
                status, reason = await said(there, body=large)
                assert status == 413 and "config.dataflow.max_message_bytes" in reason
                there.session.headers.clear()
                for body in (b"x", large):
                    assert await said(there, body=body) == (401, "show the key of a node (--invite)")
                assert not there.heard
                send_away(there.run.folder, "berlin")
                there.session.headers.update(bearer(there.key))
                assert (await said(there, body=large))[0] == 200
                assert len(await there.heard[-1].read()) < len(large), "the rest is not fetched: it is sent away"

    asyncio.run(check())


def test_an_answer_that_is_too_large_for_memory_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "_MOST_ANSWER_BYTES", 1000)

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there, there.session.post(there.here + "/files?answer=1001") as answer:
                assert answer.status == 503 and "ask for it in pieces" in unpack(await answer.read())["error"]

    asyncio.run(check())


HOSTILE = [
    b"",
    b"\xc1",
    msgpack.packb(7),
    msgpack.packb([]),
    msgpack.packb([{}, [b"", 0]]),
    msgpack.packb([{}, [b"", -1, ""]]),
    msgpack.packb([{}, ["text", 4, ""]]),
    msgpack.packb([{}, [b"", 10**12, "flowjax.other"]]),
    msgpack.packb([{}, [b"", 0, ""]]),
    msgpack.packb([{"method": "PUT", "path": "/x", "headers": {}}, [b"", 0, ""]]),
    msgpack.packb([{"method": "GET", "path": "http://elsewhere/", "headers": {}}, [b"", 0, ""]]),
    msgpack.packb([{"method": "GET", "path": "@elsewhere/x", "headers": {}}, [b"", 0, ""]]),
    msgpack.packb([{"method": "GET", "path": "/x", "headers": [1]}, [b"", 0, ""]]),
    msgpack.packb([{"method": "POST", "path": "/x", "headers": {}, "zstd": True}, [b"none", 4, ""]]),
    msgpack.packb([{"method": "GET", "path": "/x", "headers": {"Range": "a\r\nb: c"}}, [b"", 0, ""]]),
]


def test_whatever_else_is_sent_to_the_subject_is_answered_and_passed_on_to_nobody(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                for message in HOSTILE:
                    answer = await there.line.connection().request(f"flowjax.{RUN_ID}", message, timeout=120)
                    head, (reason, *_) = msgpack.unpackb(answer.data)
                    assert head.keys() <= {"lost", "status", "headers"} and head.get("status", 401) == 401, message
                    assert reason
                await there.line.connection().publish(f"flowjax.{RUN_ID}.gone", b"\xff nobody")
                assert not there.heard
                assert (await said(there))[0] == 200, "it goes on"

    asyncio.run(check())


def test_a_body_whose_sender_has_gone_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "_PART_S", 0.2)

    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there:
                head = {"id": "a", "method": "POST", "path": "/x", "headers": bearer(there.key)}
                before = len(asyncio.all_tasks())
                message = bytes(msgpack.packb([head, [b"", 50 * 10**6, "_INBOX.nobody"]]) or b"")
                answer = await there.line.connection().request(f"flowjax.{RUN_ID}", message, timeout=120)
                head, (reason, *_) = msgpack.unpackb(answer.data)
                assert head == {"lost": True} and b"a part did not come" in reason
                assert not there.heard
                await asyncio.sleep(0.1)
                # Of 190 parts; each connection has one more for the answers that it waits for.
                assert len(asyncio.all_tasks()) <= before + 2 * len(there.line.clients), "nobody asks for the others"

    asyncio.run(check())


def test_an_answer_that_says_it_is_huge_is_not_waited_for_in_memory(tmp_path):
    async def check() -> None:
        with nats_server() as server:
            async with way(tmp_path, server) as there, node_end(there.line, "0f0f") as there.here:
                for size_bytes in (3 * 10**9, 2**63 - 1):

                    async def rogue(message: Any, size_bytes: int = size_bytes) -> None:
                        await message.respond(msgpack.packb([{"status": 200}, [b"", size_bytes, "_INBOX.nobody"]]))

                    client = there.line.clients[0]
                    listening = await client.subscribe("flowjax.0f0f", cb=rogue)
                    await settle(client)  # else the server may still give the request to the one before
                    status, reason = await said(there)
                    assert status == 503 and f"{size_bytes:,} bytes are offered" in reason
                    await listening.unsubscribe()
                    await settle(client)

    asyncio.run(check())


def test_an_end_whose_connection_is_closed_for_good_says_so(tmp_path):
    """As when a user's password is changed: nats-py does not dial again then, and a new start of the role does."""
    config = "authorization { users = [{user: run, password: %s}, {user: node, password: secret}] }"
    (tmp_path / "nats.conf").write_text(config % "secret")

    async def check() -> None:
        with nats_server(f"--config={tmp_path / 'nats.conf'}") as server:
            async with dialled_as("run", server.url) as line:
                (tmp_path / "nats.conf").write_text(config % "other")
                server.reload()
                with pytest.raises(Lost, match="has closed a connection"):
                    await asyncio.wait_for(relay._until_stopped(line), 60)

    asyncio.run(check())


def test_a_server_of_short_messages_is_refused(tmp_path):
    async def check() -> None:
        async with dialled(server.url):
            pass

    (tmp_path / "nats.conf").write_text("max_payload: 16KB")
    refused = r"max_payload of the NATS server .* is 16,384: set it to 1MB or more"
    with nats_server(f"--config={tmp_path / 'nats.conf'}") as server, pytest.raises(ConfigError, match=refused):
        asyncio.run(check())


def test_a_server_that_is_not_there_or_wants_a_key_is_named(monkeypatch):
    async def dial(url: str) -> None:
        async with reached(f"{url}/{RUN_ID}"):
            pass

    with pytest.raises(ConfigError, match=r"at nats://127\.0\.0\.1:9 \(.*: start nats-server there"):
        asyncio.run(dial("nats://127.0.0.1:9"))
    with nats_server("--user=berlin", "--pass=secret") as server:
        with pytest.raises(
            ConfigError, match=r"Authorization Violation.*NATS_CREDS, NATS_USER, NATS_PASSWORD, NATS_INBOX_PREFIX"
        ):
            asyncio.run(dial(server.url))
        monkeypatch.setenv("NATS_USER", "berlin")
        monkeypatch.setenv("NATS_PASSWORD", "secret")
        asyncio.run(dial(server.url))


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("relay", ["", "nats://a:1", "tls://a.b:4222,wss://c"], ["http://a", "nats://me:secret@a:1", "nats://a:1/0f"]),
        ("url", ["http://a:1", "nats://a:1/0f", "nats://a:1,tls://b/0f"], ["nats://a:1", "nats://a:1/name/x"]),
    ],
)
def test_addresses(field, good, bad):
    from flowjax.config import FIELDS
    from flowjax.fields import Section

    section = FIELDS.fields["dataflow"]
    assert isinstance(section, Section)
    entry = section.fields[field]
    for value in good:
        assert not [*entry.problems("config.dataflow", value)], value
    for value in bad:
        assert [*entry.problems("config.dataflow", value)], value


def test_without_nats_py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nats.aio.client", None)

    async def dial() -> None:
        async with dialled("nats://127.0.0.1:9"):
            pass

    with pytest.raises(ConfigError, match=r"pip install -e '\.\[cluster\]'"):
        asyncio.run(dial())
