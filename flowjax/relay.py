"""The way between a run and its nodes where neither can reach the other: both dial out to a NATS server.

    python -m flowjax.relay --run=<run folder, or a node's>

At the node's end roles send requests to loopback, as if the dataflow listened there. At the run's end these go to the
dataflow, with the senders' keys: only the dataflow decides what they mean and who may send them (docs/dataflow.md).
NATS stores nothing. A message that is lost on the way is sent again by its sender, as with HTTP all the way.

    flowjax.<run id>         requests [{id, method, path, headers, zstd}, body], answered with [{status, headers},
                             body] or [{lost}, body], a reason
    flowjax.<run id>.gone    ids of requests whose senders have gone

in msgpack. A body is [bytes, size, subject]: its beginning, its size, and the subject that gives the rest, if it does
not fit into one message. "<first> <bytes>" sent there asks for a part; an empty message says that all has come. `zstd`
says that the body of a request is compressed: the turns of an episode repeat each other's prompts.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import LogRecord, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import aiohttp
import msgpack
import zstandard
from absl import logging
from aiohttp import web
from yarl import URL

from flowjax.broker import Address
from flowjax.config import ConfigError
from flowjax.monitor.token import RUN_HEADER, accepts, known_node, known_run_id, known_token
from flowjax.monitor.trouble import allow_many_files
from flowjax.records import pack
from flowjax.run import Run, is_nats, read_endpoints, read_run

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

# As the command `nats` reads them. The last is flowjax's: answers come under that prefix; no other user may listen.
_VARIABLES = {"user_credentials": "NATS_CREDS", "user": "NATS_USER", "password": "NATS_PASSWORD"}
_VARIABLES["inbox_prefix"] = "NATS_INBOX_PREFIX"
_CONNECTIONS = 8  # where a packet in a hundred is lost, each is slow, whatever the bandwidth
_PART_BYTES, _PARTS_AT_ONCE = 256 * 1024, 8
_HEAD_BYTES = 8 * 1024  # of a message, beside the part of a body
_SHORT_BYTES, _WORTH = 1024, 0.9  # longer bodies are compressed, if that leaves at most this share of them
_LEVEL = 1  # zstd's: 3 makes episodes no shorter, and takes 1.4 to 1.9 times as long
_DIAL_S = 10
_FOR_EVER = -1  # number of attempts to reconnect: nats-py takes it as no limit
_ANSWER_S = 60.0  # the dataflow holds some back for 20 s
_LOOK_S = 1.0  # between two checks that the connection is still there
_PART_S, _TRIES = 15.0, 3  # longest wait for a part, and how often it is asked for
_MOST_REQUESTS = 4096  # under way at the run's end
_MOST_LARGE = 4  # of them with a body in memory that is longer than a part
_MOST_ANSWER_BYTES = 16 * 1024**2  # pieces of files have 1 MiB at most; a config or a list of files may be large
_INBOX = "_INBOX"
_SENT_HEADERS = ("Authorization", "Content-Type", "Range", RUN_HEADER)
_ANSWERED_HEADERS = ("Allow", "Content-Range", "Content-Type", "Retry-After")


class Lost(Exception):
    """A request did not reach the dataflow, or its answer did not come back; says why."""


@contextlib.asynccontextmanager
async def reached(url: str) -> AsyncIterator[str]:
    """An address at which this process reaches a run's dataflow over HTTP, while entered: `url` itself, or, if `url` is
    at a NATS server, that of a node's end made here.

    Raises:
        ConfigError: there is no such server, or it does not let this process in.
    """
    if not is_nats(url):
        yield url
        return
    servers, _, run_id = url.rpartition("/")
    async with dialled(servers) as line, node_end(line, run_id) as here:
        yield here


# ---------------------------------------------------------------------------------------------------------------- lines


@contextlib.asynccontextmanager
async def dialled(servers: str, *, patient: bool = False) -> AsyncIterator["NatsLine"]:
    """Connections to one of the NATS servers (addresses separated by commas), which are made again when they break.

    Args:
        patient: wait for a server as long as it takes.

    Raises:
        ConfigError: nats-py is missing, or messages may be too short; not `patient`: no server answers, or it refuses.
    """
    try:
        from nats.aio.client import Client
        from nats.errors import Error
    except ImportError as error:
        raise ConfigError(f"{servers} is a NATS server, which takes nats-py: pip install -e '.[cluster]'") from error
    getLogger("asyncio").addFilter(_is_news)
    problems = _Problems(servers)
    clients = [Client() for _ in range(_CONNECTIONS)]
    attempts = _FOR_EVER if patient else 1
    options: dict[str, Any] = {"name": "flowjax", "error_cb": problems.note, "reconnected_cb": problems.over}
    options |= {"connect_timeout": _DIAL_S, "reconnect_time_wait": 1, "ping_interval": 5}
    options |= {"max_reconnect_attempts": attempts, "closed_cb": problems.end}
    options |= {name: os.environ[variable] for name, variable in _VARIABLES.items() if os.environ.get(variable)}
    try:
        try:
            async with asyncio.timeout(None if patient else 2 * _DIAL_S):
                await asyncio.gather(*(client.connect(servers.split(","), **options) for client in clients))
            for client in clients:
                client.options["max_reconnect_attempts"] = _FOR_EVER
        except (Error, OSError, ValueError) as error:  # TimeoutError is an OSError; ValueError is of a bad file of keys
            reason = ", ".join(problems.texts) or f"{type(error).__name__}: {error}"
            remedy = f"start nats-server there, and give what it asks for in {', '.join(_VARIABLES.values())}"
            raise ConfigError(f"no NATS server lets this machine in at {servers} ({reason}): {remedy}") from error
        if (most_bytes := min(client.max_payload for client in clients)) < _PART_BYTES + _HEAD_BYTES:
            raise ConfigError(f"max_payload of the NATS server {servers} is {most_bytes:,}: set it to 1MB or more")
        yield NatsLine(servers, clients, problems.closed)
    finally:
        for client in clients:  # ends reconnecting: to cancel it is not enough, Python 3.11's wait_for may lose that
            client.options["max_reconnect_attempts"] = 1
        # With a time-out: nats-py may wait for ever for a connection that was being made again.
        await asyncio.wait([asyncio.ensure_future(client.close()) for client in clients], timeout=_DIAL_S)


def _is_news(record: LogRecord) -> bool:
    """Log filter: False for the line that asyncio logs whenever a TLS connection ends."""
    return "eof_received" not in record.getMessage()


class _Problems:
    """Logs problems of NATS connections, each once until one is up again. `closed` is set when one stays down."""

    def __init__(self, servers: str):
        self._servers, self.closed = servers, asyncio.Event()
        self.texts: dict[str, None] = {}

    async def over(self) -> None:
        self.texts.clear()

    async def end(self) -> None:
        self.closed.set()

    async def note(self, error: Exception) -> None:
        if (text := str(error) or type(error).__name__) not in self.texts:
            logging.warning("%s: %s", self._servers, text)
        self.texts[text] = None


@dataclass(frozen=True)
class _Parcel:
    """A body as a message holds it: its beginning, its size, and the subject to ask for the rest."""

    begin: bytes
    size_bytes: int
    subject: str


class NatsLine:
    """Connections to a NATS server, used in turns. `closed` is set once one has ended for good."""

    def __init__(self, servers: str, clients: Sequence["Client"], closed: asyncio.Event):
        self.servers, self.clients, self.closed = servers, clients, closed
        self._turns = itertools.count()

    def connection(self) -> "Client":
        """The next connection that is up.

        Raises:
            Lost: none is.
        """
        if not (up := [client for client in self.clients if client.is_connected]):
            raise Lost(f"the NATS server {self.servers} does not answer")
        return up[next(self._turns) % len(up)]

    async def ask(self, subject: str, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
        """Head and body of the answer to a request.

        Raises:
            Lost: there is none.
        """
        from nats.errors import Error, NoRespondersError

        client = self.connection()
        try:
            async with _offered(client, body) as (offer, _):
                answer = await _answered(client, subject, _packed(head, offer))
            answered, rest = _unpacked(answer)
            return answered, await self.fetched(rest, _MOST_ANSWER_BYTES)
        except NoRespondersError as error:
            raise Lost(f"no run is under way at {self.servers} with the id {subject.rpartition('.')[2]}") from error
        except (Error, OSError, ValueError) as error:
            raise Lost(f"{self.servers}: {type(error).__name__}: {error}") from error

    async def fetched(self, body: _Parcel, most_bytes: int) -> bytes | bytearray:
        """All of a body; the parts that its message did not hold are fetched, several at a time.

        Raises:
            Lost: its sender does not answer any more, or it is over `most_bytes`.
            nats.errors.Error: the connection broke.
        """
        if len(body.begin) == body.size_bytes:
            return body.begin
        if body.size_bytes > most_bytes:
            raise Lost(f"{body.size_bytes:,} bytes are offered, {most_bytes:,} are taken at most")
        whole, firsts = bytearray(body.size_bytes), iter(range(len(body.begin), body.size_bytes, _PART_BYTES))
        whole[: len(body.begin)] = body.begin

        async def fetch() -> None:
            for first in firsts:
                size_bytes = min(_PART_BYTES, body.size_bytes - first)
                whole[first : first + size_bytes] = await self._part(body.subject, first, size_bytes)

        parts = [asyncio.ensure_future(fetch()) for _ in range(_PARTS_AT_ONCE)]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
        await self.connection().publish(body.subject, b"")
        return whole

    async def _part(self, subject: str, first: int, size_bytes: int) -> bytes:
        from nats.errors import Error

        problem = ""
        for _ in range(_TRIES):
            try:
                asked = f"{first} {size_bytes}".encode()
                part = (await self.connection().request(subject, asked, timeout=_PART_S)).data
                if len(part) == size_bytes:
                    return part
                problem = f"{len(part)} bytes came for {size_bytes}"
            except (Error, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise Lost(f"{self.servers}: a part did not come ({problem})")


async def _answered(client: "Client", subject: str, message: bytes) -> bytes:
    """The answer to a request. If the connection that it should come by breaks, it is not waited for.

    Raises:
        ConnectionError, nats.errors.Error: there is none.
    """
    before, asked = client.stats["reconnects"], asyncio.ensure_future(client.request(subject, message, _ANSWER_S))
    try:
        while not (await asyncio.wait([asked], timeout=_LOOK_S))[0]:
            if not client.is_connected or client.stats["reconnects"] != before:
                raise ConnectionError("the connection to it broke")
        return asked.result().data
    finally:
        asked.cancel()


@contextlib.asynccontextmanager
async def _offered(client: "Client", body: bytes) -> AsyncIterator[tuple[_Parcel, asyncio.Event]]:
    """Offer a body while entered. Yields the parcel with which a receiver can fetch it, and an event that is set once
    all of it was fetched."""
    fetched = asyncio.Event()
    if len(body) <= _PART_BYTES:
        fetched.set()
        yield _Parcel(body, len(body), ""), fetched
        return

    async def give(message: "Msg") -> None:
        if not message.data:
            fetched.set()
            return
        with contextlib.suppress(ValueError):  # any other request gets no answer
            first, size_bytes = map(int, message.data.split())
            await message.respond(body[first : first + min(size_bytes, _PART_BYTES)])

    subject = client.new_inbox()
    offer = await client.subscribe(subject, cb=give)
    try:
        yield _Parcel(body[:_PART_BYTES], len(body), subject), fetched
    finally:
        from nats.errors import Error

        with contextlib.suppress(Error):  # the connection is gone, and the offer with it
            await offer.unsubscribe()


def _packed(head: Mapping[str, Any], body: _Parcel) -> bytes:
    return cast(bytes, msgpack.packb([head, [body.begin, body.size_bytes, body.subject]]))


def _unpacked(message: bytes) -> tuple[dict[str, Any], _Parcel]:
    """
    Raises:
        ValueError: it is no message of this protocol.
    """
    match msgpack.unpackb(message):
        case [dict(head), [bytes(begin), int(size_bytes), str(subject)]]:
            if len(begin) == size_bytes or (len(begin) < size_bytes and subject.startswith(_INBOX)):
                return head, _Parcel(begin, size_bytes, subject)
    raise ValueError("no message of this version")


async def _compressed(body: bytes) -> tuple[bytes, bool]:
    """The body to send, and whether it is compressed."""
    if len(body) < _SHORT_BYTES:
        return body, False
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    packed = compress(body) if len(body) <= _PART_BYTES else await asyncio.to_thread(compress, body)
    return (packed, True) if len(packed) <= _WORTH * len(body) else (body, False)


def _whole_bytes(begin: bytes) -> int:
    """Size of a compressed body when it is decompressed, from the header in its beginning. No more memory than that is
    taken for it.

    Raises:
        ValueError: the header does not have it.
    """
    try:
        size_bytes = zstandard.frame_content_size(begin)
    except zstandard.ZstdError as error:
        raise ValueError(f"no body by zstd: {error}") from error
    if size_bytes < 0:
        raise ValueError("a compressed body that does not say how large it is")
    return size_bytes


async def _decompressed(body: bytes | bytearray, whole_bytes: int) -> bytes:
    """A compressed body, decompressed; `whole_bytes` is its size then.

    Raises:
        ValueError: it is damaged.
    """
    decompress = partial(zstandard.ZstdDecompressor().decompress, body, allow_extra_data=False)
    try:
        return decompress() if whole_bytes <= _PART_BYTES else await asyncio.to_thread(decompress)
    except zstandard.ZstdError as error:
        raise ValueError(f"a damaged body: {error}") from error


# ----------------------------------------------------------------------------------------------------------------- ends


@contextlib.asynccontextmanager
async def node_end(line: NatsLine, run_id: str, port: int = 0) -> AsyncIterator[str]:
    """Take requests on loopback and send them to the run, while entered. Yields the address; port 0 is a free one."""
    problems = _Problems(line.servers)

    async def pass_on(request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in _SENT_HEADERS if name in request.headers}
        request_id, done = secrets.token_hex(8), False
        head = {"id": request_id, "method": request.method, "path": request.raw_path, "headers": headers}
        try:
            sent, head["zstd"] = await _compressed(await request.read())
            answer, body = await line.ask(f"flowjax.{run_id}", head, sent)
            if "lost" in answer:
                raise Lost(body.decode(errors="replace"))
            done = True
            await problems.over()
            return web.Response(status=answer["status"], headers=answer["headers"], body=body)
        except (Lost, KeyError, TypeError, ValueError) as error:
            await problems.note(error)
            if request.method == "GET" and request.transport is not None:  # as if nobody listened here
                request.transport.abort()
            return web.Response(status=503, body=pack({"error": str(error)}), content_type="application/msgpack")
        finally:
            if not done:  # also when the caller hung up: the run must give it no leases
                with contextlib.suppress(Exception):
                    await line.connection().publish(f"flowjax.{run_id}.gone", request_id.encode())

    app = web.Application(client_max_size=2**40)  # no bound here: the run has its own
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class RunEnd:
    """Sends requests that come from nodes to the dataflow of a run.

    Args:
        line: the connections that requests come by.
        run: the run that they are for.
        session: HTTP session for the dataflow.
    """

    def __init__(self, line: NatsLine, run: Run, session: aiohttp.ClientSession):
        self._line, self._run, self._session = line, run, session
        self._dataflow = Address(run.folder, "dataflow")
        self._most_bytes: int = run.config.dataflow.max_message_bytes
        self._large = asyncio.Semaphore(_MOST_LARGE)
        self._under_way: set[asyncio.Task[None]] = set()
        self._by_id: dict[str, asyncio.Task[None]] = {}

    async def until_answered(self) -> None:
        """Return once the dataflow is up."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                await self._passed_on("GET", "/health", {}, b"")
                return
            await asyncio.sleep(0.1)

    async def take(self, client: "Client", message: "Msg") -> None:
        """Answer a request that came by `client`, in a task of its own: others are taken meanwhile."""
        task = asyncio.create_task(self._answer(client, message))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def drop(self, message: "Msg") -> None:
        """Cancel the request whose id comes: its sender has gone."""
        if task := self._by_id.get(message.data.decode(errors="replace")):
            task.cancel()

    async def _answer(self, client: "Client", message: "Msg") -> None:
        from nats.errors import Error

        request_id = ""
        try:
            head, body = _unpacked(message.data)
            request_id, task = str(head.get("id")), asyncio.current_task()
            assert task is not None
            self._by_id[request_id] = task
            answer, content = await self._asked(head, body)
        except (Lost, aiohttp.ClientError, Error, OSError, ValueError) as error:
            answer, content = {"lost": True}, f"{type(error).__name__}: {error}".encode()
        finally:
            self._by_id.pop(request_id, None)
        with contextlib.suppress(Error, TimeoutError):  # the sender has gone, or asks again
            async with _offered(client, content) as (offer, fetched):
                await message.respond(_packed(answer, offer))
                await asyncio.wait_for(fetched.wait(), _ANSWER_S)

    async def _asked(self, head: Mapping[str, Any], body: _Parcel) -> tuple[dict[str, Any], bytes]:
        """The dataflow's answer.

        Raises:
            Lost: it cannot be asked now, or its answer is too large.
            ValueError: this is no request.
            aiohttp.ClientError, OSError: it does not answer.
        """
        match head:
            case {"method": "GET" | "POST" as method, "path": str(path), "headers": dict(given)} if path[:1] == "/":
                headers = {name: str(given[name]) for name in _SENT_HEADERS if name in given}
            case _:
                raise ValueError("no request of this version")
        if len(self._under_way) > _MOST_REQUESTS:
            raise Lost("too many requests are under way")
        # Keys are checked before a body is fetched, as the dataflow does: any user of the NATS server gets this far.
        if not (token := known_token(self._run.folder)):
            raise Lost("the dataflow has not come up yet")
        node = None if accepts(headers, token) else known_node(self._run.folder, headers)
        if node is None and not accepts(headers, token):
            return {"status": 401, "headers": {}}, pack({"error": "show the key of a node (--invite)"})
        if node and node.sent_away:  # the dataflow refuses it without reading the body
            return await self._passed_on(method, path, headers, body.begin)
        compressed = head.get("zstd") is True
        size_bytes = max(body.size_bytes, _whole_bytes(body.begin) if compressed else 0)
        if size_bytes > self._most_bytes:
            reason = f"the body is over {self._most_bytes:,} bytes (config.dataflow.max_message_bytes): send less"
            return {"status": 413, "headers": {}}, pack({"error": reason})
        async with self._large if body.subject or size_bytes > _PART_BYTES else contextlib.nullcontext():
            content = await self._line.fetched(body, self._most_bytes)
            if compressed:
                content = await _decompressed(content, size_bytes)
            return await self._passed_on(method, path, headers, content)

    async def _passed_on(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | bytearray
    ) -> tuple[dict[str, Any], bytes]:
        shown = {**headers, "Accept-Encoding": "identity"}
        url = URL(self._dataflow().rstrip("/") + path, encoded=True)
        async with self._session.request(method, url, headers=shown, data=body or None) as response:
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > _MOST_ANSWER_BYTES:
                    raise Lost(f"the answer to {path[:200]} is over {_MOST_ANSWER_BYTES:,} bytes: ask for it in pieces")
            answered = {name: response.headers[name] for name in _ANSWERED_HEADERS if name in response.headers}
            return {"status": response.status, "headers": answered}, bytes(content)


@contextlib.asynccontextmanager
async def run_end(line: NatsLine, run: Run) -> AsyncIterator[RunEnd]:
    """Pass on requests from nodes, while entered."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)  # many nodes, each of which waits for episodes
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
        end, subject = RunEnd(line, run, session), f"flowjax.{known_run_id(run.folder)}"
        for client in line.clients:
            await client.subscribe(subject, queue="run", cb=partial(end.take, client))
            await client.subscribe(f"{subject}.gone", queue="run", cb=end.drop)
        yield end


async def _relay(run: Run) -> None:
    if run.is_node:
        servers, _, run_id = run.config.dataflow.url.rpartition("/")
        port = urlsplit(read_endpoints(run.folder)["dataflow"]).port or 0
        async with dialled(servers, patient=True) as line, node_end(line, run_id, port) as here:
            logging.info("%s is the run %s at %s", here, run_id, servers)
            await _until_stopped(line)
    else:
        async with dialled(run.config.dataflow.relay, patient=True) as line, run_end(line, run) as end:
            await end.until_answered()  # a node that joins earlier ends: it takes the run for over
            logging.info("nodes join by --join=%s/%s", line.servers, known_run_id(run.folder))
            await _until_stopped(line)


async def _until_stopped(line: NatsLine) -> None:
    """
    Raises:
        Lost: a connection is closed for good, as when a user's rights are taken away: a restart makes new ones.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ends = [asyncio.create_task(event.wait()) for event in (stop, line.closed)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        raise Lost(f"{line.servers} has closed a connection")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)  # absl's flags are one table for all that a process imports
    parser.add_argument("--run", type=Path, required=True, help="run folder, or a node's")
    logging.set_verbosity(logging.INFO)
    allow_many_files()
    try:
        asyncio.run(_relay(read_run(parser.parse_args().run.absolute())))
    except ConfigError as error:
        print(f"relay: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    logging.use_absl_handler()
    main()
