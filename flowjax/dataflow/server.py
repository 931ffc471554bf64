"""The dataflow's HTTP server: msgpack messages of `flowjax.records`, on loopback.

    POST /<name>     a message to the dataflow (`flowjax.dataflow.service`) -> its answer
    GET  /status     -> JSON counts
    GET  /metrics    -> the same for Prometheus
    GET  /health     -> ok, without a token

A message that is refused is answered with 400 and {error}, one without the run's token (where it has one) with 401, one
of a trainer that another has replaced with 409, one too large with 413; nothing has changed then, and each is counted
(`refused` of /status). 429: there is no room for it yet; it is to be sent again, however long that lasts. 503: its body
came too slowly.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11
from ml_collections import ConfigDict

from flowjax.broker import Answer, Busy, Superseded
from flowjax.dataflow.bodies import Bodies, BodyError, Limit, limits
from flowjax.dataflow.files import RunFiles
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.ledger import damaged, is_damage
from flowjax.dataflow.service import HOLD_S, NAMES, DataflowService
from flowjax.monitor.progress import write_status
from flowjax.monitor.prometheus import CONTENT_TYPE, exposition
from flowjax.monitor.token import accepts, is_loopback, make_token
from flowjax.records import WireError, pack, unpack

_BRIEFLY_S = 0.1  # so long is an answer held back where others stand behind
_HANDLED_AT_ONCE = 4  # messages with episodes: as many may be held back at a time
_SMALL_BYTES = 16 * 1024  # a message that is decoded faster than a thread is asked to
_WAIT = 429
_QUESTIONS = ("status", "metrics", "health")


class Server:
    """Routes to the service of a `Flow`."""

    def __init__(self, flow: Flow, *, token: str = "", max_message_bytes: int = 256 * 1024**2):
        self._flow, self._service = flow, DataflowService(flow)
        self._files = RunFiles(flow.run, flow.oldest_needed)
        self._token = token
        self._limits = limits(flow.bounds, most_bytes=max_message_bytes)
        self._bodies = Bodies(2 * self._limits["episodes"].size_bytes)
        self._handling = asyncio.Semaphore(_HANDLED_AT_ONCE)
        self._refused: Counter[str] = Counter()  # by name and HTTP status
        self._last_refused: dict[str, str] = {}

    @property
    def failure(self) -> Exception | None:
        """Failure that the dataflow cannot go on with: damage, or a disk that fails again and again."""
        return self._service.failure

    def application(self) -> web.Application:
        logging.getLogger("aiohttp.server").addFilter(_without_trace)
        app = web.Application(middlewares=[self._authorise])
        add = partial(app.router.add_route, expect_handler=_expected)
        add("POST", f"/{{name:{'|'.join(NAMES)}}}", self._message)
        add("GET", "/status", self._status)
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
        if accepts(request.headers, self._token) or request.path == "/health":
            return await handler(request)
        return _refusal(401, f"{request.path}: show the run's token (runs/<name>/token) as a bearer token")

    async def _message(self, request: web.Request) -> web.Response:
        """Answer a message; whatever goes wrong is answered in words, and counted."""
        name = request.match_info["name"]
        status, headers = 200, None
        try:
            async with self._bodies.read(request, limit := self._limits.get(name, self._limits[""])) as body:
                answer = await self._answer(name, body, limit)
            packed = await asyncio.to_thread(pack, answer) if name == "batch" else pack(answer)
            return web.Response(body=packed, content_type="application/msgpack")
        except BodyError as error:
            status, reason = error.status, str(error)
        except WireError as error:
            status, reason = 400, str(error)
        except Superseded as error:
            status, reason = 409, str(error)
        except Busy as error:
            status, reason, headers = 429, str(error), {"Retry-After": "1"}
        except ConnectionError:
            raise
        except Exception as error:
            logging.exception("%s failed", request.path)
            status, reason = 500, f"failed ({type(error).__name__}: {error})"
        if status != _WAIT:
            self._refused[f"{name} {status}"] += 1
            self._last_refused[f"{name} {status}"] = f"from {request.remote}: {reason}"
        return _refusal(status, f"{request.path}: {reason}", headers)

    async def _answer(self, name: str, body: bytes, limit: Limit) -> Answer:
        """Decode a message and answer it. A large one is decoded in a thread: no other waits for it meanwhile."""
        if name != "episodes":
            return await self._service.answer(name, await _decoded(body, limit), hold_s=HOLD_S)
        async with self._handling:
            hold_s = _BRIEFLY_S if self._handling.locked() else HOLD_S
            return await self._service.answer(name, await _decoded(body, limit), hold_s=hold_s)

    def status(self) -> dict[str, Any]:
        """Counts of the flow, and of messages that were refused, by name and HTTP status."""
        return {**self._flow.status(), "refused": dict(self._refused), "last_refused": dict(self._last_refused)}

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def _metrics(self, request: web.Request) -> web.Response:
        text = exposition(self.status(), role="dataflow")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _without_trace(record: logging.LogRecord) -> bool:
    """Keep the line of a request that is no HTTP, which aiohttp answers with 400, and drop its stack trace: whoever may
    connect could fill the disk with them."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.msg, record.args, record.exc_info = f"no HTTP: {str(error)[:200]!r}", (), None
    return True


async def _decoded(body: bytes, limit: Limit) -> Any:
    read = partial(unpack, body, most_elements=limit.elements)
    return read() if len(body) <= _SMALL_BYTES else await asyncio.to_thread(read)


def _refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = pack({"error": reason})
    return web.Response(body=body, status=status, headers=headers, content_type="application/msgpack")


async def _expected(request: web.Request) -> web.Response | None:
    """Go on with a body that waits to be asked for; aiohttp's own answer to other expectations fails at odd bytes."""
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
    """Anybody may ask, without a token: the answer says that there is somebody, and nothing else."""
    return web.Response(text="ok\n")


async def serve(flow: Flow, run_dir: Path, *, dataflow: ConfigDict, port: int, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, writing `status-dataflow.json` every second.

    Raises:
        LedgerError: the ledger turned out to be damaged.
        OSError, sqlite3.Error: the disk fails again and again.
    """
    host = dataflow.host
    token = "" if is_loopback(host) else make_token(run_dir)
    server = Server(flow, token=token, max_message_bytes=dataflow.max_message_bytes)
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        while not stop.is_set():
            if server.failure is not None:
                broken = is_damage(server.failure)
                raise damaged(run_dir / "dataflow.sqlite", str(server.failure)) if broken else server.failure
            with contextlib.suppress(OSError):  # on a full disk messages are asked to wait; who asks is not sent away
                write_status(run_dir, "dataflow", server.status())
            try:
                await asyncio.wait_for(stop.wait(), timeout=1.0)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
        flow.close()
