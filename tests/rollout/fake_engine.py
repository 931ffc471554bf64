"""An engine that answers like vLLM's server, without a model, and fails when told to.

It is for faults and for timing; what a real engine samples is tested with a real engine.
"""

import asyncio
import random
from typing import Any

import ml_dtypes  # noqa: F401, so that numpy knows bfloat16 by name
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import load_file

EOS = 1


class FakeEngine:
    """`actions` are the token ids it answers with, each followed by the end of the sequence; `base` names its model."""

    def __init__(self, actions: list[int], base: str = "base"):
        self.actions, self.base = actions, base
        self.adapters: dict[str, str] = {}
        self.away = False  # answers 503, as vLLM does when its engine is dead
        self.refuse = False  # answers 400 to every completion
        self.only_lists = False  # answers 404 to every completion
        self.unknown = 0  # completions so answered
        self.hold = asyncio.Event()  # completions wait for it
        self.hold.set()
        self.waiting = 0  # requests, by its own account
        self.prompts: dict[str, int] = {}  # by model
        self.bodies: list[dict[str, Any]] = []  # of completions, without their prompts
        self.lora_loads: list[str] = []
        self._random = random.Random(0)
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    def restart(self) -> None:
        self.adapters.clear()
        self.away = False

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.away else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.away else 200, text=f"vllm:num_requests_waiting {self.waiting}.0\n")

    async def _models(self, request: web.Request) -> web.Response:
        if self.away:
            return web.Response(status=503)
        return web.json_response({"data": [{"id": name} for name in (self.base, *self.adapters)]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.away:
            return web.Response(status=503)
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        load_file(f"{body['lora_path']}/adapter_model.safetensors")
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.lora_loads.append(body["lora_name"])
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        known = self.adapters.pop((await request.json())["lora_name"], None)
        return web.Response(status=200 if known else 404)

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.hold.wait()
        if self.away:
            return web.Response(status=503)
        if self.refuse:
            return web.json_response({"error": {"message": "this engine refuses"}}, status=400)
        if self.only_lists or body["model"] not in (self.base, *self.adapters):
            self.unknown += 1
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        self.bodies.append({name: value for name, value in body.items() if name != "prompt"})
        self.prompts[body["model"]] = self.prompts.get(body["model"], 0) + len(body["prompt"])
        choices = [
            {
                "index": index,
                "finish_reason": "stop",
                "logprobs": {
                    "tokens": [f"token_id:{self._random.choice(self.actions)}", f"token_id:{EOS}"],
                    "token_logprobs": [-1.5, -0.25],
                },
            }
            for index in range(len(body["prompt"]))
        ]
        return web.json_response({"model": body["model"], "choices": choices})
