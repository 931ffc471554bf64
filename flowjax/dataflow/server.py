"""The dataflow's HTTP server: msgpack messages of `flowjax.records`, on loopback.

    POST /<name>     a message to the dataflow (`flowjax.dataflow.service`) -> its answer
    GET  /status     -> JSON counts, of the last half second
    GET  /finished   -> JSON: whether the run is over; with ?hold_s= held back so long at most while it is not
    GET  /metrics    -> the same for Prometheus
    GET  /health     -> ok, without a token

A message that is refused is answered with {error}, and has changed nothing. 400: a field is wrong. 401: it has neither
the run's token (where there is one) nor the key of an invited node. 403: its worker was sent away, or a node may not
send it. 409: another trainer has replaced its sender. 410: it is meant for another run. 413: it is too large. 503: its
body came too slowly. These are counted (`refused` of /status) unless the key or the run's id is the reason. 429: there
is no room for it yet, except for its episodes of evaluations: send it again, however long that lasts. A connection
whose header is not in after a while is closed.
"""

import asyncio
import contextlib
import json
import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11
from ml_collections import ConfigDict

from flowjax.broker import Answer, Busy, Evicted, Superseded
from flowjax.dataflow.files import RunFiles, queried_hold_s
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.ledger import damaged, is_damage
from flowjax.dataflow.service import HOLD_S, MOST_SLOTS, NAMES, NAMES_OF_NODES, DataflowService, sender_of
from flowjax.monitor.metrics import write_status
from flowjax.monitor.prometheus import CONTENT_TYPE, exposition
from flowjax.monitor.token import RUN_HEADER, InvitedNode, accepts, known_node, known_run_id, make_token, wants_token
from flowjax.records import LONGEST_SHOWN, Bounds, WireError, pack, unpack

# --------------------------------------------------------------------------------------------------------------- bodies

# Bodies of requests are read within bounds of size, time and memory: slow or many senders hold up nobody else. A body
# is read whole before it takes a place in a queue, so that a slow sender keeps no place that another needs. It must
# arrive at a minimum rate. All bodies together have a share of memory; when that is used up, the slowest is sent away.

_SMALL_MESSAGE_BYTES = 128 * 1024
_LEASE_BYTES = 40  # of a lease's id on the wire
_NAMES_BYTES = 2048  # of the names and numbers of a turn
_EPISODE_BYTES, _EPISODE_ELEMENTS = 64 * 1024, 4096  # beside its turns: outcomes, names, an error
_TURN_ELEMENTS = 64
_EPISODES = 64  # of the greatest size, in one message
_LEAST_MEMORY_BYTES = 64 * 1024**2
_AT_FIRST_S = 10.0  # before the minimum rate applies
_LEAST_BYTES_PER_S = 16 * 1024
_LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest message of one name: bytes on the wire, and elements of all its lists and maps together."""

    size_bytes: int
    elements: int


def limits(bounds: Bounds, *, most_bytes: int) -> dict[str, Limit]:
    """Limits of messages by name; the limit of "" holds for all that are not named.

    Args:
        bounds: of the run's episodes, from which the limit of `episodes` follows.
        most_bytes: of any message (config.dataflow.max_message_bytes).
    """
    turn_bytes = 4 * bounds.prompt_tokens + 8 * bounds.new_tokens + LONGEST_SHOWN + _NAMES_BYTES
    episodes = Limit(
        _EPISODES * (bounds.turns * turn_bytes + _EPISODE_BYTES),
        _EPISODES * (bounds.turns * _TURN_ELEMENTS + _EPISODE_ELEMENTS),
    )
    leases = Limit(_SMALL_MESSAGE_BYTES + MOST_SLOTS * _LEASE_BYTES, 2 * MOST_SLOTS)
    small = Limit(_SMALL_MESSAGE_BYTES, _SMALL_MESSAGE_BYTES // 8)
    found = {"": small, "episodes": episodes, **dict.fromkeys(("renew", "give_back", "refuse", "committed"), leases)}
    return {name: Limit(min(limit.size_bytes, most_bytes), limit.elements) for name, limit in found.items()}


class BodyError(Exception):
    """A body that cannot be read; says why, and with which HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(eq=False, slots=True)
class _Body:
    """A body that is on its way, or read and not answered yet."""

    timer: asyncio.Timeout
    started_s: float = field(default_factory=time.monotonic)
    parts: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    sent_away: bool = False
    whole: bool = False

    @property
    def latest_s(self) -> float:
        """By when more of it has to be in."""
        allowed_s = min(_AT_FIRST_S + self.size_bytes / _LEAST_BYTES_PER_S, _LONGEST_S)
        return self.started_s + allowed_s

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / (time.monotonic() - self.started_s + 1e-3)


class Bodies:
    """The bodies that are in memory.

    Args:
        memory_bytes: the most that they may take together before they are decoded.
    """

    def __init__(self, memory_bytes: int = _LEAST_MEMORY_BYTES):
        self._memory_bytes = max(memory_bytes, _LEAST_MEMORY_BYTES)
        self._held: set[_Body] = set()

    @asynccontextmanager
    async def read(self, request: web.Request, limit: Limit):
        """The body of a request, which counts as in memory until the context is left.

        Raises:
            BodyError: it is larger than `limit` (413), compressed (415), broken on the way (400), slower than a sender
                may be, or the slowest where there is no more room (503: it may be sent again).
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise BodyError(415, "the body is compressed: send it as it is")
        if (request.content_length or 0) > limit.size_bytes:
            raise BodyError(413, _too_large(limit))
        with self._place(_Body(asyncio.timeout(None))) as body:
            yield await self._receive(request, body, limit)

    @contextmanager
    def _place(self, body: _Body) -> Iterator[_Body]:
        self._held.add(body)
        try:
            yield body
        finally:
            self._held.discard(body)

    async def _receive(self, request: web.Request, body: _Body, limit: Limit) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            async with body.timer:
                while True:
                    # If the time ran out at the very moment when more came in, its cancellation is raised at the next
                    # await. Rescheduling a timer that has expired would fail, so that await comes first.
                    if body.timer.expired():
                        await asyncio.sleep(0)
                    body.timer.reschedule(loop.time() + body.latest_s - time.monotonic())
                    if not (part := await request.content.readany()):
                        break
                    body.parts.append(part)
                    body.size_bytes += len(part)
                    if body.size_bytes > limit.size_bytes:
                        raise BodyError(413, _too_large(limit))
                    self._make_room()
                    if body.sent_away:
                        raise TimeoutError
        except TimeoutError as error:
            reason = "there was no room for all bodies, and this was the slowest" if body.sent_away else _too_slow(body)
            raise BodyError(503, f"{reason}: send it again") from error
        except (BodyError, ConnectionError):  # a sender that has gone needs no answer
            raise
        except Exception as error:  # whatever aiohttp makes of a broken transfer
            raise BodyError(400, f"the body cannot be read ({type(error).__name__}: {error})") from error
        body.whole = True
        whole = b"".join(body.parts)
        body.parts.clear()
        return whole

    def _make_room(self) -> None:
        """Send away the slowest bodies that are still on their way, while all together are too large."""
        on_their_way = {body for body in self._held if not body.whole and not body.sent_away}
        while on_their_way and sum(body.size_bytes for body in self._held) > self._memory_bytes:
            slowest = min(on_their_way, key=lambda body: body.bytes_per_s)
            on_their_way.discard(slowest)
            slowest.sent_away, slowest.size_bytes = True, 0
            slowest.parts.clear()
            if not slowest.timer.expired():  # wakes its reader, which waits for more in `_receive`
                slowest.timer.reschedule(asyncio.get_running_loop().time())


def _too_large(limit: Limit) -> str:
    return (
        f"the body is over {limit.size_bytes:,} bytes, the most that a message of this name may have in this run: send "
        "less at once, or raise config.dataflow.max_message_bytes where that is the limit"
    )


def _too_slow(body: _Body) -> str:
    waited_s = time.monotonic() - body.started_s
    return (
        f"the body was not in after {waited_s:.0f} s ({body.size_bytes:,} bytes of it were): it may take "
        f"{_LONGEST_S:g} s and, after {_AT_FIRST_S:g} s, has to keep {_LEAST_BYTES_PER_S:,} bytes a second"
    )


# ------------------------------------------------------------------------------------------------------------- messages

_BRIEFLY_S = 0.1  # longest that an answer is held back while other messages wait for its place
_HANDLED_AT_ONCE = 4  # messages with episodes: so many may be held back at a time
_SMALL_BYTES = 16 * 1024  # up to that, decoding is faster than handing it to a thread
_WAIT = 429
_STATUS = {WireError: 400, Superseded: 409, Evicted: 403, Busy: _WAIT}  # HTTP status of each refusal
_QUESTIONS = ("status", "finished", "metrics", "health")
_SHOWN_S = 0.5  # for which a status is answered again
_HEADER_S = 20.0  # from connecting until the header of the first request is in
_WATCHED_S = 3.0  # a node that watches asks at least once in this time
_IDLE_S = 60.0  # from an answer until the next header is in; clients keep an idle connection for less (aiohttp: 15 s)


class Server:
    """Routes to the service of a `Flow`."""

    def __init__(self, flow: Flow, *, token: str = "", max_message_bytes: int = 256 * 1024**2):
        self._flow, self._service = flow, DataflowService(flow)
        self._files = RunFiles(flow.run, flow.oldest_needed, flow.evaluations.pinned)
        self._token, self._run_id = token, known_run_id(flow.run.folder)
        self._limits = limits(flow.bounds, most_bytes=max_message_bytes)
        self._bodies = Bodies(2 * self._limits["episodes"].size_bytes)
        self._handling = asyncio.Semaphore(_HANDLED_AT_ONCE)
        self._refused: Counter[str] = Counter()  # by name and HTTP status
        self._last_refused: dict[str, str] = {}
        self._asked_s = -math.inf  # when a node last asked whether the run is over, or was known to wait for that
        self._shown, self._shown_s = b"", -math.inf  # the status as it was sent last, and when that was made
        self._heard: set[web.RequestHandler] = set()
        self._silent_since_s: dict[web.RequestHandler, float] = {}

    @property
    def failure(self) -> Exception | None:
        """Failure that the dataflow cannot go on with: damage, or a disk that fails again and again."""
        return self._service.failure

    @property
    def is_watched(self) -> bool:
        """True while nodes ask again and again whether the run is over."""
        return time.monotonic() - self._asked_s < _WATCHED_S

    def application(self) -> web.Application:
        logging.getLogger("aiohttp.server").addFilter(_without_trace)
        app = web.Application(middlewares=[self._authorise])
        add = partial(app.router.add_route, expect_handler=_expected)
        add("POST", f"/{{name:{'|'.join(NAMES)}}}", self._message)
        add("GET", "/status", self._status)
        add("GET", "/finished", self._finished)
        add("GET", "/metrics", self._metrics)
        add("GET", "/health", _healthy)
        for path, handler in self._files.routes().items():
            add("GET", path, handler)
        add("*", "/{name:.*}", _unknown)
        return app

    @web.middleware
    async def _authorise(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._heard.add(request.protocol)
        if request.path == "/health":
            return await handler(request)
        if request.headers.get(RUN_HEADER, self._run_id) != self._run_id:
            return _refusal(410, f"{request.path}: another run plays here now: join it anew")
        if accepts(request.headers, self._token):
            return await handler(request)
        node = self._node(request)
        if node is None:
            reason = "show the run's token (runs/<name>/token), or a node's key (--invite), as a bearer token"
            return _refusal(401, f"{request.path}: {reason}")
        if node.sent_away:
            return _refusal(403, f"{request.path}: node {node.name} was sent away from the run ({node.sent_away})")
        if request.method != "GET" and request.path[1:] not in NAMES_OF_NODES:
            return _refusal(403, f"{request.path}: a node's key is for playing: show the run's token")
        return await handler(request)

    def _node(self, request: web.Request) -> InvitedNode | None:
        """The node whose key a request shows; None if it shows the run's token, or no key that is known."""
        return None if accepts(request.headers, self._token) else known_node(self._flow.run.folder, request.headers)

    def close_silent(self, connections: Sequence[web.RequestHandler]) -> None:
        """Close connections on which no request has come in time. To be called periodically.

        aiohttp bounds the size of a header but not its time, and times out a connection only after its first answer:
        anyone who can connect could use up all the open files that the process may have.
        """
        now_s = time.monotonic()
        self._heard.intersection_update(connections)
        silent = [connection for connection in connections if connection not in self._heard]
        self._silent_since_s = {connection: self._silent_since_s.get(connection, now_s) for connection in silent}
        for connection, since_s in self._silent_since_s.items():
            if now_s - since_s > _HEADER_S:
                connection.force_close()

    async def _message(self, request: web.Request) -> web.Response:
        """Answer a message. Every failure is answered with a text; all but 429 are counted."""
        name = request.match_info["name"]
        try:
            async with self._bodies.read(request, limit := self._limits.get(name, self._limits[""])) as body:
                answer = await self._answer(name, body, limit, self._node(request))
            # Only a batch is large: to pack one on the event loop would hold up every other message.
            packed = await asyncio.to_thread(pack, answer) if name == "batch" else pack(answer)
            return web.Response(body=packed, content_type="application/msgpack")
        except BodyError as error:
            status, reason = error.status, str(error)
        except (WireError, Superseded, Evicted, Busy) as error:
            status, reason = _STATUS[type(error)], str(error)
        except ConnectionError:
            raise
        except Exception as error:
            logging.exception("%s failed", request.path)
            status, reason = 500, f"failed ({type(error).__name__}: {error})"
        if status == _WAIT:
            return _refusal(status, f"{request.path}: {reason}", {"Retry-After": "1"})
        self._refused[f"{name} {status}"] += 1
        self._last_refused[f"{name} {status}"] = f"from {request.remote}: {reason}"
        return _refusal(status, f"{request.path}: {reason}")

    async def _answer(self, name: str, body: bytes, limit: Limit, node: InvitedNode | None) -> Answer:
        """Decode a message and answer it. A large one is decoded in a thread, so that no other waits for it."""
        if name != "episodes":
            message = _of_sender(await _decoded(body, limit), node)
            return await self._service.answer(name, message, hold_s=HOLD_S)
        async with self._handling:
            # This message took the last place: others may wait for it, so that its answer is held back only briefly.
            hold_s = _BRIEFLY_S if self._handling.locked() else HOLD_S
            message = _of_sender(await _decoded(body, limit), node)
            return await self._service.answer(name, message, hold_s=hold_s)

    def status(self) -> dict[str, Any]:
        """Counts of the flow, and of messages that were refused, by name and HTTP status."""
        return {**self._flow.status(), "refused": dict(self._refused), "last_refused": dict(self._last_refused)}

    async def _status(self, request: web.Request) -> web.Response:
        now_s = time.monotonic()
        if now_s - self._shown_s > _SHOWN_S:  # with a thousand workers it takes milliseconds
            self._shown, self._shown_s = json.dumps(self.status()).encode(), now_s
        return web.Response(body=self._shown, content_type="application/json")

    async def _finished(self, request: web.Request) -> web.Response:
        until_s = time.monotonic() + queried_hold_s(request)
        while True:
            self._asked_s = time.monotonic()
            if self._flow.finished or self._asked_s >= until_s or self._files.stopping:
                return web.json_response({"finished": self._flow.finished})
            await asyncio.sleep(min(until_s - self._asked_s, HOLD_S))

    def stop_holding(self) -> None:
        """Answer all held requests soon, and hold none from now on: a server that stops waits for its answers."""
        self._files.stopping = True
        self._service.stop_holding()

    async def _metrics(self, request: web.Request) -> web.Response:
        text = exposition(self.status(), role="dataflow")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _without_trace(record: logging.LogRecord) -> bool:
    """Log filter: a request that is not HTTP, which aiohttp answers with 400, keeps its line but loses its stack trace.
    Anyone who can connect could fill the disk with these."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.msg, record.args, record.exc_info = f"no HTTP: {str(error)[:200]!r}", (), None
    return True


async def _decoded(body: bytes, limit: Limit) -> Any:
    read = partial(unpack, body, most_elements=limit.elements)
    return read() if len(body) <= _SMALL_BYTES else await asyncio.to_thread(read)


def _of_sender(message: Any, node: InvitedNode | None) -> Any:
    """The message; a node may send it only in the name of its own workers.

    Raises:
        WireError: it is sent in another's name.
    """
    if node is not None and not sender_of(message).startswith(f"{node.name}:"):  # as `Mismatches` knows a node's
        raise WireError(f"field worker is {sender_of(message)!r}: this key is of workers called {node.name}:<name>")
    return message


def _refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = pack({"error": reason})
    return web.Response(body=body, status=status, headers=headers, content_type="application/msgpack")


async def _expected(request: web.Request) -> web.Response | None:
    """Ask a client that sent `Expect: 100-continue` for its body. aiohttp's own handler fails at odd bytes in it."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _refusal(417, f"{request.path}: the header Expect may say 100-continue and nothing else")
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


async def _unknown(request: web.Request) -> web.Response:
    known = {**dict.fromkeys(NAMES, "POST"), **dict.fromkeys(_QUESTIONS, "GET")}
    if (method := known.get(request.match_info["name"])) is not None:
        return _refusal(405, f"{request.path}: send {method}", {"Allow": method})
    return _refusal(404, f"{request.path[:100]}: there is {', '.join(f'/{name}' for name in known)}")


async def _healthy(request: web.Request) -> web.Response:
    """Answer without asking for a token: it says only that the server is alive."""
    return web.Response(text="ok\n")


async def serve(flow: Flow, run_dir: Path, *, dataflow: ConfigDict, port: int, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, writing `status-dataflow.json` every second.

    Raises:
        LedgerError: the ledger turned out to be damaged.
        OSError, sqlite3.Error: the disk fails again and again.
    """
    host = dataflow.host
    token = make_token(run_dir) if wants_token(dataflow) else ""
    server = Server(flow, token=token, max_message_bytes=dataflow.max_message_bytes)
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, keepalive_timeout=_IDLE_S)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        while not stop.is_set():
            if runner.server is not None:
                server.close_silent(runner.server.connections)
            if (failure := server.failure) is not None:
                raise damaged(run_dir / "dataflow.sqlite", str(failure)) if is_damage(failure) else failure
            with contextlib.suppress(OSError, sqlite3.Error):  # messages meet it, too, and are answered with it
                flow.groups.make_up_time()
            with contextlib.suppress(OSError):  # on a full disk the service goes on, and has messages sent again
                write_status(run_dir, "dataflow", server.status())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), timeout=1.0)
        if flow.finished and server.is_watched:  # a node that does not hear of the end waits for two leases' time
            await asyncio.sleep(_WATCHED_S)
    finally:
        server.stop_holding()
        await runner.cleanup()
        flow.close()
