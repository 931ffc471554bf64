"""The dataflow's HTTP face: msgpack messages of `flowjax.records`, on loopback.

    POST /<name>     a message to the dataflow (`flowjax.dataflow.service`) -> its answer
    GET  /status     -> JSON counts
    GET  /metrics    -> the same for Prometheus
    GET  /health     -> ok, without a token

A message that is refused is answered with 400 and {error}, one without the run's token (where it has one) with 401, one
of a trainer that another has replaced with 409, one too large with 413; nothing has changed then. 429: there is no room
for it yet; it is to be sent again, however long that lasts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web
from ml_collections import ConfigDict

from flowjax.broker import Busy, Superseded
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.service import HOLD_S, NAMES, DataflowService
from flowjax.monitor.progress import write_status
from flowjax.monitor.prometheus import CONTENT_TYPE, exposition
from flowjax.monitor.token import accepts, is_loopback, make_token
from flowjax.records import WireError, pack, unpack

_BRIEFLY_S = 0.1  # so long is an answer held back where others stand behind
_READ_AT_ONCE = 4  # messages with episodes; of the others some 256 KiB are in memory, the rest in their sockets
_READ_S = 60.0  # longest that a message may take to come in


class Server:
    """Routes to the service of a `Flow`."""

    def __init__(self, flow: Flow, *, token: str = "", max_message_bytes: int = 256 * 1024**2):
        self._flow, self._service = flow, DataflowService(flow)
        self._token, self._max_message_bytes = token, max_message_bytes
        self._reading = asyncio.Semaphore(_READ_AT_ONCE)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._max_message_bytes, middlewares=[self._authorise])
        app.router.add_post(f"/{{name:{'|'.join(NAMES)}}}", self._message)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", _healthy)
        return app

    @web.middleware
    async def _authorise(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if accepts(request.headers, self._token) or request.path == "/health":
            return await handler(request)
        return _refusal(401, f"{request.path}: show the run's token (runs/<name>/token) as a bearer token")

    async def _message(self, request: web.Request) -> web.Response:
        """Answer a message; whatever goes wrong is told in words."""
        name, told_bytes = request.match_info["name"], request.content_length or 0
        with_episodes = name == "episodes"
        try:
            if told_bytes > self._max_message_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=self._max_message_bytes, actual_size=told_bytes)
            async with self._reading if with_episodes else contextlib.nullcontext():
                async with asyncio.timeout(_READ_S):
                    body = await request.read()
                hold_s = _BRIEFLY_S if with_episodes and self._reading.locked() else HOLD_S
                answer = await self._service.answer(name, unpack(body), hold_s=hold_s)
        except WireError as error:
            return _refusal(400, f"{request.path}: {error}")
        except Superseded as error:
            return _refusal(409, f"{request.path}: {error}")
        except TimeoutError:
            return _refusal(503, f"{request.path}: the body was not in within {_READ_S:g} s: send it again")
        except Busy as error:
            return _refusal(429, f"{request.path}: {error}", {"Retry-After": "1"})
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"{request.path}: the body is over config.dataflow.max_message_bytes")
        except Exception as error:
            logging.exception("%s failed", request.path)
            return _refusal(500, f"{request.path} failed ({type(error).__name__}: {error})")
        return web.Response(body=pack(answer), content_type="application/msgpack")

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._flow.status())

    async def _metrics(self, request: web.Request) -> web.Response:
        text = exposition(self._flow.status(), role="dataflow")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = pack({"error": reason})
    return web.Response(body=body, status=status, headers=headers, content_type="application/msgpack")


async def _healthy(request: web.Request) -> web.Response:
    """Whoever asks, and without a token: tells nothing but that there is somebody."""
    return web.Response(text="ok\n")


async def serve(flow: Flow, run_dir: Path, *, config: ConfigDict, port: int, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, writing `status-dataflow.json` every second."""
    host = config.dataflow.host
    token = "" if is_loopback(host) else make_token(run_dir)
    server = Server(flow, token=token, max_message_bytes=config.dataflow.max_message_bytes)
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        while not stop.is_set():
            with contextlib.suppress(OSError):  # on a full disk messages are told to wait; who asks is not sent away
                write_status(run_dir, "dataflow", flow.status())
            try:
                await asyncio.wait_for(stop.wait(), timeout=1.0)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
        flow.close()
