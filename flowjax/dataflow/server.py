"""The dataflow's HTTP face: msgpack messages of `flowjax.records`, on loopback.

    POST /lease         {worker, slots, kind?, can?}         -> {leases, state: run | wait | done, retry_s}
    POST /renew         {worker, lease_ids}                  -> {lost}
    POST /episodes      {worker, items: [{lease_id, episode}]} -> {accepted, duplicate}
    POST /give_back     {worker, lease_ids, error}           -> {}
    POST /versions      {worker, policy, serving, in_use}    -> {oldest_needed}
    POST /batch         {policy, step} | {policies: {policy: step}}
                               -> {state: run, policy, rows, totals, dropped} | {state: wait}
    POST /committed     {policy, version}                    -> {}
    GET  /status                                             -> JSON counts
    GET  /metrics                                            -> the same for Prometheus
    GET  /health                                             -> ok, without a token

`/lease` and `/batch` hold the answer for up to a second while there is nothing to give. A message that cannot be read,
has a field that cannot be or names a version that has never been made is answered with 400 and {error}, one without the
run's token (where it has one) with 401, one too large with 413; nothing has changed then. /episodes answers 429 while
the trainers have more groups waiting than they may: to be sent again, however long that lasts.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from ml_collections import ConfigDict

from flowjax.dataflow import messages
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.workers import Can
from flowjax.monitor.progress import write_status
from flowjax.monitor.prometheus import CONTENT_TYPE, exposition
from flowjax.monitor.token import accepts, is_loopback, make_token
from flowjax.records import Lease, WireError, pack, unpack

_HOLD_S = 1.0
_BRIEFLY_S = 0.1  # so long where others stand behind
_PASSED_OVER = 3  # workers asked in turn before there is taken to be nothing for any
_READ_AT_ONCE = 4  # messages with episodes; of the others some 256 KiB are in memory, the rest in their sockets
_READ_S = 60.0  # longest that a message may take to come in
_LATEST_S = 0.02  # how long a batch that is waited for may lie unnoticed


class Server:
    """Routes to a `Flow`. Everything runs on one event loop, so a request sees a settled state; only credit, which may
    take seconds, is given in a thread.

    Workers that wait for episodes stand in a queue: when something has changed, the first ones are served, until there
    is nothing more.
    """

    def __init__(self, flow: Flow, *, token: str = "", max_message_bytes: int = 256 * 1024**2):
        self._flow, self._token, self._max_message_bytes = flow, token, max_message_bytes
        self._waiting: dict[Can, deque[_Waiting]] = {}  # by what they can play
        self._reading = asyncio.Semaphore(_READ_AT_ONCE)
        self._changed = asyncio.Event()
        self._crediting = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._max_message_bytes, middlewares=[self._authorise])
        for name in ("lease", "renew", "episodes", "give_back", "versions", "batch", "committed"):
            reading = self._reading if name == "episodes" else contextlib.nullcontext()
            app.router.add_post(f"/{name}", _endpoint(getattr(self, f"_{name}"), self._max_message_bytes, reading))
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

    async def _lease(self, message: Any) -> dict[str, Any]:
        worker, slots, can = messages.worker_of(message), messages.slots_of(message), messages.can_of(message)
        leases = self._flow.lease(worker, slots, can=can)  # whoever waits has been offered all that there was
        if not leases and not self._flow.finished:
            leases = await self._wait_for_leases(can, lambda: self._flow.lease(worker, slots, can=can))
        state = "run" if leases else "done" if self._flow.finished else "wait"
        return {"leases": leases, "state": state, "retry_s": 1.0 if state == "done" else 0.0}

    async def _wait_for_leases(self, can: Can, attempt: Callable[[], list[Lease]]) -> list[Lease]:
        """Stand in the queue of those who can play the same, for a while."""
        asked = _Waiting(attempt, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(can, deque())
        queue.append(asked)
        try:
            await asyncio.wait([asked.leases], timeout=_HOLD_S)
        except asyncio.CancelledError:  # the worker has gone
            if asked.leases.done():
                self._flow.give_back([lease.lease_id for lease in asked.leases.result()], "")
                self._notify()
            raise
        finally:
            if not asked.leases.done():
                queue.remove(asked)
            if not queue and self._waiting.get(can) is queue:
                del self._waiting[can]
        return asked.leases.result() if asked.leases.done() else []

    def _serve_waiting(self) -> None:
        """Give what there is to those who have waited longest; when the run is over, send all of them home."""
        finished = any(self._waiting.values()) and self._flow.finished
        for queue in self._waiting.values():
            passed_over = 0
            while passed_over < min(_PASSED_OVER, len(queue)):
                asked = queue[0]
                if (leases := asked.attempt()) or finished:
                    asked.leases.set_result(leases)
                    queue.popleft()
                else:  # what there is may not be for this worker
                    queue.rotate(-1)
                    passed_over += 1

    def _notify(self) -> None:
        """Something has changed that may give the waiting what they wait for."""
        self._serve_waiting()
        self._changed.set()

    async def _renew(self, message: Any) -> dict[str, Any]:
        return {"lost": self._flow.renew(messages.lease_ids_of(message))}

    async def _episodes(self, message: Any) -> dict[str, Any]:
        played = messages.episodes_of(message, self._newest(), self._flow.needed_outcomes)
        counted = []
        if self._flow.full:
            evaluation, played = self._flow.by_kind(played)
            counted = self._flow.accept_all(evaluation)
            until = time.monotonic() + (_BRIEFLY_S if self._reading.locked() else _HOLD_S)
            while played and self._flow.full:
                if time.monotonic() > until:
                    raise _Full
                await asyncio.sleep(_LATEST_S)
        counted += self._flow.accept_all(played)
        self._notify()
        return {"accepted": sum(counted), "duplicate": len(counted) - sum(counted)}

    async def _give_back(self, message: Any) -> dict[str, Any]:
        lease_ids, (error,) = messages.lease_ids_of(message), messages.fields(message, error=str)
        self._flow.give_back(lease_ids, error)
        self._notify()
        return {}

    async def _versions(self, message: Any) -> dict[str, Any]:
        policy, newest = self._policy(message)
        serving = messages.version_of(message, "serving", oldest=0, newest=newest)
        news = serving > self._flow.serving[policy]
        oldest_needed = self._flow.report_serving(policy, serving)
        if news:
            self._notify()
        return {"oldest_needed": oldest_needed}

    async def _batch(self, message: Any) -> dict[str, Any]:
        steps = messages.steps_of(message)
        for policy, step in steps.items():
            _, newest = self._policy({"policy": policy})
            messages.version_of({"step": step}, "step", oldest=self._flow.oldest_kept(policy), newest=newest)
        until = time.monotonic() + _HOLD_S
        while (taken := self._flow.take_first(steps)) is None and time.monotonic() < until:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                break
            await asyncio.sleep(_LATEST_S)
        if taken is None:
            return {"state": "wait"}
        self._notify()  # groups that are used or dropped make room for others
        policy, (groups, dropped) = taken[0], (taken[1].groups, taken[1].dropped)
        async with self._crediting:
            batch = await asyncio.to_thread(self._flow.credit, policy, steps[policy], groups)
        return {"state": "run", "policy": policy, "rows": batch.rows, "totals": batch.totals, "dropped": dropped}

    async def _committed(self, message: Any) -> dict[str, Any]:
        policy, newest = self._policy(message)
        self._flow.commit(policy, messages.version_of(message, "version", oldest=0, newest=newest))
        self._notify()
        return {}

    def _policy(self, message: Any) -> tuple[str, int]:
        """The policy that a message is about, and the newest version that there can be of it."""
        policy = messages.policy_of(message, dict.fromkeys(self._flow.policies, 0))
        return policy, self._flow.newest_version(policy)

    def _newest(self) -> dict[str, int]:
        trained = {policy: self._flow.newest_version(policy) for policy in self._flow.policies}
        return trained | dict.fromkeys(self._flow.frozen, -1)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._flow.status())

    async def _metrics(self, request: web.Request) -> web.Response:
        text = exposition(self._flow.status(), role="dataflow")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A worker that waits for episodes."""

    attempt: Callable[[], list[Lease]]
    leases: asyncio.Future[list[Lease]]


def _endpoint(
    handle: Callable[[Any], Awaitable[dict[str, Any]]],
    most_bytes: int,
    reading: contextlib.AbstractAsyncContextManager[Any],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        try:
            if (request.content_length or 0) > most_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=request.content_length or 0)
            async with reading:
                async with asyncio.timeout(_READ_S):
                    body = await request.read()
                answer = await handle(unpack(body))
        except WireError as error:
            return _refusal(400, f"{request.path}: {error}")
        except TimeoutError:
            return _refusal(503, f"{request.path}: the body was not in within {_READ_S:g} s: send it again")
        except _Full:
            reason = "more groups than config.dataflow.max_ready_groups wait for the trainer: send it again"
            return _refusal(429, f"{request.path}: {reason}", {"Retry-After": "1"})
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"{request.path}: the body is over config.dataflow.max_message_bytes")
        except Exception as error:
            logging.exception("%s failed", request.path)
            return _refusal(500, f"{request.path} failed ({type(error).__name__}: {error})")
        return web.Response(body=pack(answer), content_type="application/msgpack")

    return respond


def _refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = pack({"error": reason})
    return web.Response(body=body, status=status, headers=headers, content_type="application/msgpack")


async def _healthy(request: web.Request) -> web.Response:
    """Whoever asks, and without a token: tells nothing but that there is somebody."""
    return web.Response(text="ok\n")


class _Full(Exception):
    """There is no room for what was sent."""


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
            write_status(run_dir, "dataflow", flow.status())
            try:
                await asyncio.wait_for(stop.wait(), timeout=1.0)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
        flow.close()
