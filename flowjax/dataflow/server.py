"""The dataflow's HTTP face: msgpack messages of `flowjax.records`, on loopback.

    POST /lease         {worker, slots, kind?}               -> {leases, state: run | wait | done, retry_s}
    POST /renew         {worker, lease_ids}                  -> {lost}
    POST /episodes      {worker, items: [{lease_id, episode}]} -> {accepted, duplicate}
    POST /give_back     {worker, lease_ids, error}           -> {}
    POST /versions      {worker, policy, serving, in_use}    -> {oldest_needed}
    POST /batch         {policy, step}                       -> {state: run, rows, totals, dropped} | {state: wait}
    POST /committed     {policy, version}                    -> {}
    GET  /status                                             -> JSON counts
    GET  /metrics                                            -> the same for Prometheus

`/lease` and `/batch` hold the answer for up to a second while there is nothing to give. A message that cannot be read
or lacks a field is answered with 400 and {error}, one without the run's token (where it has one) with 401, one too
large with 413; nothing has changed then.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from ml_collections import ConfigDict

from flowjax.dataflow.flow import Flow
from flowjax.monitor.prometheus import CONTENT_TYPE, exposition
from flowjax.monitor.token import accepts, is_loopback, make_token
from flowjax.records import Episode, WireError, pack, unpack

_HOLD_S = 1.0
_POLL_S = 0.01


class Server:
    """Routes to a `Flow`. Everything runs on one event loop, so a request sees a settled state."""

    def __init__(self, flow: Flow, *, token: str = "", max_message_bytes: int = 256 * 1024**2):
        self._flow, self._token, self._max_message_bytes = flow, token, max_message_bytes

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._max_message_bytes, middlewares=[self._authorise])
        for name in ("lease", "renew", "episodes", "give_back", "versions", "batch", "committed"):
            app.router.add_post(f"/{name}", _endpoint(getattr(self, f"_{name}")))
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _authorise(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if accepts(request.headers, self._token):
            return await handler(request)
        return _refusal(401, f"{request.path}: show the run's token (runs/<name>/token) as a bearer token")

    async def _lease(self, message: Any) -> dict[str, Any]:
        worker, slots = _fields(message, worker=str, slots=int)
        kind = message.get("kind")
        if kind not in (None, "train", "eval"):
            raise WireError(f"field kind is {kind!r}: it is train, eval or absent")
        leases = await _hold(lambda: self._flow.lease(worker, slots, kind) or (self._flow.finished or None)) or []
        if leases is True:
            return {"leases": [], "state": "done", "retry_s": 1.0}
        return {"leases": leases, "state": "run" if leases else "wait", "retry_s": 0.0}

    async def _renew(self, message: Any) -> dict[str, Any]:
        (lease_ids,) = _fields(message, lease_ids=list)
        return {"lost": self._flow.renew(lease_ids)}

    async def _episodes(self, message: Any) -> dict[str, Any]:
        (items,) = _fields(message, items=list)
        played = [_fields(item, lease_id=str, episode=Episode) for item in items]
        counted = [self._flow.accept(lease_id, episode) for lease_id, episode in played]
        return {"accepted": sum(counted), "duplicate": len(counted) - sum(counted)}

    async def _give_back(self, message: Any) -> dict[str, Any]:
        lease_ids, error = _fields(message, lease_ids=list, error=str)
        self._flow.give_back(lease_ids, error)
        return {}

    async def _versions(self, message: Any) -> dict[str, Any]:
        policy, serving = self._policy(message, serving=int)
        return {"oldest_needed": self._flow.report_serving(policy, serving)}

    async def _batch(self, message: Any) -> dict[str, Any]:
        policy, step = self._policy(message, step=int)
        served = await _hold(lambda: self._flow.batch(policy, step))
        if served is None:
            return {"state": "wait"}
        batch, dropped = served
        return {"state": "run", "rows": batch.rows, "totals": batch.totals, "dropped": dropped}

    async def _committed(self, message: Any) -> dict[str, Any]:
        policy, version = self._policy(message, version=int)
        self._flow.commit(policy, version)
        return {}

    def _policy(self, message: Any, **kinds: type) -> list[Any]:
        """The policy that a message is about, and further fields of it."""
        policy, *values = _fields(message, policy=str, **kinds)
        if policy not in self._flow.policies:
            raise WireError(f"field policy is {policy!r}: this run has {', '.join(self._flow.policies)}")
        return [policy, *values]

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._flow.status())

    async def _metrics(self, request: web.Request) -> web.Response:
        text = exposition(self._flow.status(), role="dataflow")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _fields(message: Any, **kinds: type) -> list[Any]:
    """The named fields of a message.

    Raises:
        WireError: the message is no map, or a field is missing or of another kind.
    """
    if not isinstance(message, dict):
        raise WireError(f"the body is a {type(message).__name__}: send a map")
    for name, kind in kinds.items():
        if name not in message:
            raise WireError(f"field {name} is missing")
        if not isinstance(message[name], kind) or (kind is int and isinstance(message[name], bool)):
            raise WireError(f"field {name} is {type(message[name]).__name__}: send {kind.__name__}")
    return [message[name] for name in kinds]


def _endpoint(
    handle: Callable[[Any], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        try:
            answer = await handle(unpack(await request.read()))
        except WireError as error:
            return _refusal(400, f"{request.path}: {error}")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"{request.path}: the body is over config.dataflow.max_message_bytes")
        except Exception as error:
            logging.exception("%s failed", request.path)
            return _refusal(500, f"{request.path} failed ({type(error).__name__}: {error})")
        return web.Response(body=pack(answer), content_type="application/msgpack")

    return respond


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(body=pack({"error": reason}), status=status, content_type="application/msgpack")


async def _hold(attempt: Callable[[], Any]) -> Any:
    """`attempt()` as soon as it gives something, or None after a bounded wait."""
    until = time.monotonic() + _HOLD_S
    while not (result := attempt()) and time.monotonic() < until:
        await asyncio.sleep(_POLL_S)
    return result or None


async def serve(flow: Flow, run_dir: Path, *, config: ConfigDict, port: int, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, writing `status-dataflow.json` every second."""
    host = config.dataflow.host
    token = "" if is_loopback(host) else make_token(run_dir)
    server = Server(flow, token=token, max_message_bytes=config.dataflow.max_message_bytes)
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    status_path = run_dir / "status-dataflow.json"
    try:
        while not stop.is_set():
            partial = status_path.with_suffix(".tmp")
            partial.write_text(json.dumps({**flow.status(), "time_s": time.time()}))
            partial.replace(status_path)
            try:
                await asyncio.wait_for(stop.wait(), timeout=1.0)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
        flow.close()
