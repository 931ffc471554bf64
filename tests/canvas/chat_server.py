"""A chat completions endpoint on this machine that answers as a test wants it to."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], web.StreamResponse | float]


def chat(text: str | None = "42", **extra: Any) -> web.Response:
    """A usual answer."""
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]
    return web.json_response({"model": "m", "choices": choices, "usage": usage} | extra)


def streamed(*pieces: str, end: bool = True) -> web.Response:
    """A usual answer in pieces, as OpenAI and vLLM stream it; without `end`, one that breaks off."""
    said: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in pieces)]
    events: list[dict[str, Any]] = [{"model": "m", "choices": [{"index": 0, "delta": delta}]} for delta in said]
    if end:
        events.append({"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        events.append({"model": "m", "choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}})
    lines = [": working\n\n", *(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n" * end]
    return web.Response(text="".join(lines), content_type="text/event-stream")


def refusal(status: int, message: str = "no", **headers: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@dataclass
class ChatServer:
    """Replies come one after the other, the last one for ever; a number is how long to keep silent first."""

    replies: list[Reply] = field(default_factory=lambda: [lambda body: chat()])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    url: str = ""
    in_flight: int = 0
    most_in_flight: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.times_s.append(asyncio.get_running_loop().time())
        reply = self.replies[min(len(self.bodies), len(self.replies)) - 1](body)
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            if isinstance(reply, web.StreamResponse):
                return reply
            await asyncio.sleep(reply)
            return chat()
        finally:
            self.in_flight -= 1


@contextlib.asynccontextmanager
async def serving(*replies: Reply, port: int = 0) -> AsyncIterator[ChatServer]:
    server = ChatServer(list(replies)) if replies else ChatServer()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
