"""An engine whose next token is the length of what came before, so that an answer in pieces can be checked."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class CountingEngine:
    """Token n of a context of length n, with log-probability -n; `token_s` passes between two of a stream."""

    def __init__(self, *models: str):
        self.models = set(models)
        self.dies_after: int | None = None  # tokens of each answer, after which it is dead
        self.dead = False
        self.on_death: Callable[[], object] = lambda: None
        self.token_s = 0.0
        self.swaps: list[tuple[int, str]] = []  # places of each reply at which weights are replaced, and by which
        self.requests: list[dict[str, Any]] = []
        self.metrics = ""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    @property
    def asked(self) -> list[int]:
        """First tokens of the prompts, in the order in which they came."""
        return [prompt[0] for request in self.requests for prompt in request["prompt"]]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200, text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.dead:
            return web.Response(status=503)
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if body["stream"]:
            return await self._stream(request, body)
        if self.dies_after is not None:
            self._die(request)
        choices = [
            self._choice(body, index, prompt, 0, body["max_tokens"]) for index, prompt in enumerate(body["prompt"])
        ]
        return web.json_response({"model": body["model"], "choices": choices})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place in range(body["max_tokens"]):
            if place == self.dies_after:
                await response.write(b'data: {"model": "cut off')
                self._die(request)
                break
            for index, prompt in enumerate(body["prompt"]):
                event = {"model": body["model"], "choices": [self._choice(body, index, prompt, place, 1)]}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(self.token_s)
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, body: dict[str, Any], index: int, prompt: list[int], place: int, count: int) -> dict[str, Any]:
        numbers = range(len(prompt) + place, len(prompt) + place + count)
        last = place + count == body["max_tokens"]
        logprobs = {"tokens": [f"token_id:{n}" for n in numbers], "token_logprobs": [-float(n) for n in numbers]}
        choice = {"index": index, "finish_reason": "length" if last else None, "logprobs": logprobs}
        if said := [(start, name) for start, name in self.swaps if start < place + count]:
            starts = [(0, body["model"]), *said]
            choice["weight_versions"] = [{"version": name, "start": start, "end": None} for start, name in starts]
        return choice

    def _die(self, request: web.Request) -> None:
        self.dead = True
        self.on_death()
        assert request.transport is not None
        request.transport.abort()
