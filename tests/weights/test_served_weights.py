"""The gate in vLLM's server, before a scheduler that steps when told: what is kept, what waits, what is said of it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flowjax.rollout.client import Partial, read_event
from flowjax.rollout.engine_side.flowjax_served_weights import ServedWeights


@dataclass(eq=False)
class State:
    """A request as vLLM's output processor keeps it."""

    external_req_id: str
    most: int
    weight_version_starts: list[tuple[str, int]] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def detokenizer(self) -> Any:
        return SimpleNamespace(num_output_tokens=lambda: self.tokens)

    def spans(self) -> list[Any]:
        ends = [*(start for _, start in self.weight_version_starts[1:]), self.tokens]
        starts = zip(self.weight_version_starts, ends, strict=False)
        return [SimpleNamespace(version=version, start=start, end=end) for (version, start), end in starts]


class Vllm:
    """vLLM's server as the gate knows it: each `step` samples a token of every request, by the weights there are."""

    def __init__(self) -> None:
        self.names = [SimpleNamespace(name="base")]
        self.label, self.paused, self.broken, self.salts = "default", False, False, []
        self.calls: list[str] = []
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        state = SimpleNamespace(openai_serving_models=SimpleNamespace(base_model_paths=self.names), engine_client=self)
        self.fastapi = SimpleNamespace(state=state)
        self.gate = ServedWeights(self._app)
        self._number = self._requests = 0

    # -------------------------------------------------------------------------------------------- vLLM's engine client

    async def generate(self, prompt: dict[str, Any], sampling_params: Any, request_id: str):
        self._number += 1
        self.salts.append(prompt["cache_salt"])
        internal, state = f"{request_id}-{self._number}", State(request_id, sampling_params.max_tokens)
        self.output_processor.request_states[internal] = state
        self.output_processor.external_req_ids.setdefault(request_id, []).append(internal)
        sent = 0
        while not state.finish_reason:
            await state.news.wait()
            state.news.clear()
            versions = state.spans() if state.finish_reason else None
            choice = SimpleNamespace(
                index=0, tokens=state.tokens - sent, finish_reason=state.finish_reason, weight_versions=versions
            )
            if choice.tokens or choice.finish_reason:
                sent = state.tokens
                yield SimpleNamespace(outputs=[choice])

    def step(self) -> None:
        assert not self.paused
        for state in list(self.output_processor.request_states.values()):
            if not state.weight_version_starts or state.weight_version_starts[-1][0] != self.label:
                state.weight_version_starts.append((self.label, state.tokens))
            state.tokens += 1
            self._end(state, "length" if state.tokens == state.most else None)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True
        if mode == "abort":
            await self.abort(list(self.output_processor.external_req_ids))

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def collective_rpc(self, method: str, args: tuple[str]) -> None:
        assert self.paused and self.names[0].name == "weights-half-loaded"
        self.calls.append(f"{method} {Path(args[0]).name}")
        await asyncio.sleep(0)
        if self.broken:
            raise RuntimeError("half a file")

    async def update_weight_version(self, version: str) -> None:
        assert self.paused
        self.label = version

    async def abort(self, request_ids: list[str]) -> None:
        for state in list(self.output_processor.request_states.values()):
            if state.external_req_id in request_ids:
                self._end(state, "abort")

    def _end(self, state: State, reason: str | None) -> None:
        state.finish_reason = reason
        state.news.set()
        if reason:
            processor = self.output_processor
            (internal,) = processor.external_req_ids.pop(state.external_req_id)
            del processor.request_states[internal]

    # ----------------------------------------------------------------------------------------------- vLLM's HTTP server

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        request = json.loads((await receive())["body"])
        if request["model"] != self.names[0].name:
            await _answer(send, 404, {"error": {"message": "no such model"}})
            return
        self._requests += 1
        stream, number = request.get("stream", False), self._requests

        def said(choice: Any, index: int) -> dict[str, Any]:
            tokens = {"tokens": ["token_id:5"] * choice.tokens, "token_logprobs": [-1.5] * choice.tokens}
            return {"index": index, "finish_reason": choice.finish_reason, "logprobs": tokens}

        async def ask(index: int) -> dict[str, Any]:
            parameters, last = SimpleNamespace(n=1, max_tokens=request["max_tokens"]), {}
            outputs: Any = self.fastapi.state.engine_client.generate({}, parameters, f"cmpl-{number}-{index}")
            whole = 0
            async for output in outputs:
                (choice,) = output.outputs
                whole += choice.tokens
                last = said(SimpleNamespace(tokens=whole, finish_reason=choice.finish_reason), index)
                if stream:
                    event = json.dumps({"model": request["model"], "choices": [said(choice, index)]})
                    await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
            return last

        if stream:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        choices = await asyncio.gather(*(ask(index) for index in range(request["prompts"])))
        if stream:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await _answer(send, 200, {"model": request["model"], "choices": choices})


async def _answer(send: Any, status: int, answer: Any) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Client:
    """Who posts to the gate; `answers` are statuses and bodies in the order in which they came."""

    def __init__(self, vllm: Vllm, folder: Path) -> None:
        self.vllm, self._folder = vllm, folder
        save_file({"x": np.ones(3, np.float32)}, folder / "model.safetensors")

    async def post(self, path: str, body: Any, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
        status, got, length = 0, b"", None

        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message):
            nonlocal status, got, length
            if message["type"] == "http.response.start":
                status = message["status"]
                length = dict(message["headers"]).get(b"content-length")
            else:
                got += message.get("body", b"")

        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "app": self.vllm.fastapi}
        await self.vllm.gate(scope, receive, send)
        assert length is None or int(length) == len(got)
        return status, got

    async def load(self, name: str) -> tuple[int, bytes]:
        return await self.post("/v1/load_weights", {"name": name, "path": str(self._folder)})

    def ask(self, model: str, *headers: tuple[bytes, bytes], **body: Any) -> "asyncio.Task[tuple[int, bytes]]":
        body = {"model": model, "prompts": 1, "max_tokens": 4} | body
        return asyncio.create_task(self.post("/v1/completions", body, *headers))


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def scenario(folder: Path, act: Callable[[Vllm, Client], Awaitable[None]]) -> Vllm:
    vllm = Vllm()

    async def whole() -> None:
        client = Client(vllm, folder)
        assert (await client.load("agent@1"))[0] == 200
        await act(vllm, client)

    asyncio.run(asyncio.wait_for(whole(), 120))
    assert not vllm.paused and not vllm.output_processor.request_states
    return vllm


def spans(body: bytes) -> list[tuple[tuple[str, int], ...]]:
    """Those of the choices of an answer, as our client reads it."""
    answer, found = json.loads(body), []
    for choice in answer["choices"]:
        partial = Partial()
        partial.extend(choice, answer["model"])
        found.append(partial.completion().spans)
    return found


def test_a_reply_under_way_is_kept_and_says_which_weights_sampled_which_token(tmp_path):
    async def act(vllm: Vllm, client: Client) -> None:
        reply, early = client.ask("agent@1", prompts=3, max_tokens=6), client.ask("agent@1", max_tokens=2)
        for version in (2, 3):
            await settled()
            vllm.step()
            vllm.step()
            assert (await client.load(f"agent@{version}"))[0] == 200
            assert not reply.done()
        vllm.step()
        vllm.step()
        assert spans((await reply)[1]) == [(("agent@1", 2), ("agent@2", 2), ("agent@3", 2))] * 3
        assert spans((await early)[1]) == [(("agent@1", 2),)], "it ended as the first load began"
        late = client.ask("agent@3", max_tokens=1)
        await settled()
        vllm.step()
        assert b"weight_versions" not in (await late)[1] and spans((await late)[1]) == [(("agent@3", 1),)]
        assert (await client.ask("agent@2"))[0] == 404

    vllm = scenario(tmp_path, act)
    assert vllm.calls == ["pause keep", f"flowjax_load_folder {tmp_path.name}", "resume"] * 3, "nothing is aborted"
    assert vllm.salts[:4] == ["1 "] * 4 and vllm.salts[4] == "3 ", "a load has a salt of its own"


def test_a_stream_that_is_cut_off_has_said_the_version_of_each_token_that_came(tmp_path):
    async def act(vllm: Vllm, client: Client) -> None:
        reply = client.ask("agent@1", prompts=2, max_tokens=5, stream=True)
        await settled()
        for version in (2, 2, 3, 3, 4):
            vllm.step()
            await settled()
            await client.load(f"agent@{version}")
        events = [event for line in (await reply)[1].split(b"\n") if (event := read_event(line))]
        names = ["agent@1", "agent@2", "agent@2", "agent@3", "agent@3"]
        for index in range(2):
            partial = Partial()
            for count, event in enumerate((e for e in events if e["choices"][0]["index"] == index), 1):
                partial.extend(event["choices"][0], event["model"])
                said = [name for name, tokens in partial.completion().spans for _ in range(tokens)]
                assert said == names[:count], "also of one that ends here"

    scenario(tmp_path, act)


def test_what_has_sampled_nothing_yet_begins_anew_on_the_new_weights(tmp_path):
    async def act(vllm: Vllm, client: Client) -> None:
        reply = client.ask("agent@1", prompts=2, max_tokens=2)
        await settled()
        await client.load("agent@2")
        await settled()
        assert vllm.salts == ["1 ", "1 ", "2 ", "2 "], "no prefix that the old weights have read"
        vllm.step()
        vllm.step()
        status, body = await reply
        assert status == 200 and spans(body) == [(("agent@2", 2),)] * 2

    scenario(tmp_path, act)


def test_a_load_waits_for_pinned_replies_alone_and_so_do_those_that_come(tmp_path):
    async def act(vllm: Vllm, client: Client) -> None:
        pinned = client.ask("agent@1", (b"x-flowjax-pinned", b"1"), max_tokens=3)
        other = client.ask("agent@1", max_tokens=4)
        await settled()
        vllm.step()
        load = asyncio.create_task(client.load("agent@2"))
        await settled()
        late = client.ask("agent@2", max_tokens=1)
        vllm.step()
        await settled()
        assert not load.done() and "pause keep" not in vllm.calls[3:] and not late.done()
        vllm.step()
        assert (await load)[0] == 200 and spans((await pinned)[1]) == [(("agent@1", 3),)]
        await settled()
        vllm.step()
        assert spans((await other)[1]) == [(("agent@1", 3), ("agent@2", 1))]
        assert spans((await late)[1]) == [(("agent@2", 1),)]

    scenario(tmp_path, act)


def test_half_loaded_weights_sample_nothing_that_counts(tmp_path):
    async def act(vllm: Vllm, client: Client) -> None:
        reply = client.ask("agent@1")
        await settled()
        vllm.step()
        vllm.broken = True
        status, body = await client.load("agent@2")
        assert status == 500 and b"half a file" in body
        assert json.loads((await reply)[1])["choices"][0]["finish_reason"] == "abort"
        assert (await client.ask("agent@1"))[0] == (await client.ask("agent@2"))[0] == 404
        vllm.broken = False
        assert (await client.load("agent@2"))[0] == 200
        again = client.ask("agent@2", max_tokens=1)
        await settled()
        vllm.step()
        assert spans((await again)[1]) == [(("agent@2", 1),)]

    scenario(tmp_path, act)


def test_a_load_is_refused_before_anything_stops(tmp_path):
    async def act(vllm: Vllm, client: Client) -> None:
        before = list(vllm.calls)
        assert (await client.load("agent@1"))[0] == 200 and vllm.calls == before, "its answer was lost"
        assert (await client.load("agent@1.1732"))[0] == 200 and vllm.names[0].name == "agent@1.1732", "made anew"
        before = list(vllm.calls)
        (tmp_path / "model.safetensors").write_bytes(b"cut off")
        assert (
            (await client.load("agent@2"))[0] == 400 and vllm.calls == before and vllm.names[0].name == "agent@1.1732"
        )

    scenario(tmp_path, act)


def test_a_vllm_that_cannot_tell_versions_apart_is_named(tmp_path, monkeypatch):
    vllm = Vllm()
    monkeypatch.delattr(Vllm, "update_weight_version")

    async def act() -> None:
        status, body = await Client(vllm, tmp_path).load("agent@1")
        assert status == 501 and b"use 0.32 or newer" in body

    asyncio.run(act())


@pytest.mark.parametrize(
    ("starts", "tokens", "expected"),
    [
        ([("a@1", 0)], 3, (("a@1", 3),)),
        ([("a@1", 0)], 0, (("a@1", 0),)),
        ([("a@1", 0), ("a@2", 2)], 3, (("a@1", 2), ("a@2", 1))),
        ([("a@1", 0), ("a@2", 2)], 2, (("a@1", 2),)),  # said of a token that has not come
        ([("a@1", 0), ("a@1", 2), ("a@2", 2), ("a@1", 2)], 5, (("a@1", 5),)),  # joined at another engine
        ([], 0, ()),
    ],
)
def test_spans_are_those_of_the_tokens_that_came(starts, tokens, expected):
    assert Partial([7] * tokens, [-1.0] * tokens, "", starts).completion().spans == expected
