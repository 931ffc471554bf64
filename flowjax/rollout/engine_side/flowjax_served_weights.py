"""For vLLM's server: replaces all weights in place, and names the served model by their version.

    POST /v1/load_weights {"name": "<policy>@<version>", "path": "<Hugging Face folder>"}

Requests under way are kept: the scheduler pauses, the folder is loaded, and they go on with the new weights, on the
keys and values that the old ones have left in the cache; those without a token yet begin anew. Requests that come
meanwhile wait for the load alone. The server's own model name becomes `name`: `/v1/models` says which weights are
served, and a request that asks for an older name is answered 404. A request that begins after a load reuses no prefix
that was cached before it: each load has a cache salt of its own.

The scheduler labels the tokens of each of its steps with the weights that sampled them. Where weights have changed
under a completion, each choice of its answer has those labels, as in vLLM's own `/inference/v1/generate`:

    "weight_versions": [{"version": "agent@3", "start": 0, "end": 9}, {"version": "agent@4", "start": 9, "end": 20}]

("end" is null in the events of a stream, except in a choice's last one). An answer without them is of the one version
that its "model" names. A request with the header `X-Flowjax-Pinned` must be answered by the weights that it names
alone: a load waits until it has ended.

`ServedWeights` is ASGI middleware, `WorkerExtension` the part in each of vLLM's workers; both are named on vLLM's
command line, with this folder on PYTHONPATH. It runs in whatever environment the server has: standard library,
Starlette and vLLM only.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

logger = logging.getLogger("vllm.flowjax")  # a child of vLLM's own logger, so that it is shown
_ROUTE, _COMPLETIONS = "/v1/load_weights", "/v1/completions"
_PINNED = b"x-flowjax-pinned"
_UNNAMED = "weights-half-loaded"  # name that is served during a load: no request asks for it
_NEWS_S = 60.0  # between lines about a load that waits
_LOAD_S = 1800.0  # longest that a folder may take to be read
_EVENT = b"data: "  # of a stream

# For the HTTP request that the current task answers: the labels of its choices, by index. vLLM's code lies between the
# middleware and `generate`, and passes no argument of ours on; a context variable reaches both.
_said: ContextVar[dict[int, list[dict[str, Any]]] | None] = ContextVar("flowjax_weight_versions", default=None)


class WorkerExtension:
    """Methods that vLLM adds to its worker (`--worker-extension-cls`)."""

    def flowjax_load_folder(self: Any, path: str) -> None:
        """Load a folder in place; then have a head tied to the embedding take its new weights too.

        vLLM takes such a head for a layer without weights in the folder. On CPU it keeps a packed copy of the old ones.
        """
        self.reload_weights(weights_path=path)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)


class ServedWeights:
    """ASGI middleware: the gate that completions pass, which it closes for a load and opens again."""

    def __init__(self, app: Any):
        self._app = app
        self._pinned = 0  # requests under way that must end on the weights they began with
        self._loading = False
        self._loads = 0
        self._changed = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self._client: Any = None  # the engine whose completions are watched
        self._under_way: set[str] = set()  # vLLM's ids of these completions
        self._anew: set[str] = set()  # ids of those that a load has met before their first token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if not posted or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
        elif scope["path"] == _ROUTE:
            await (await self._load(Request(scope, receive)))(scope, receive, send)
        else:
            self._watch(scope["app"].state.engine_client)
            async with self._admitted(pinned=any(name == _PINNED for name, _ in scope["headers"])):
                if scope["path"] == _COMPLETIONS:
                    said: dict[int, list[dict[str, Any]]] = {}
                    _said.set(said)
                    send = _Labelled(self, said, send)
                await self._app(scope, receive, send)

    @property
    def loads(self) -> int:
        """Number of loads that have begun."""
        return self._loads

    @contextlib.asynccontextmanager
    async def _admitted(self, *, pinned: bool) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._pinned += pinned
        try:
            yield
        finally:
            if pinned:
                async with self._changed:
                    self._pinned -= 1
                    self._changed.notify_all()

    def _watch(self, client: Any) -> None:
        """Wrap the engine's `generate`: each completion gets the cache salt of the newest load, begins anew if a load
        meets it before its first token, and has its versions noted."""
        if self._client is client or not hasattr(client, "update_weight_version"):
            return  # an older vLLM, whose weights cannot be replaced
        self._client, generate = client, client.generate

        async def watched(prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
            said, salt = _said.get(), prompt.get("cache_salt", "") if isinstance(prompt, dict) else ""
            self._under_way.add(request_id)
            try:
                while True:
                    self._anew.discard(request_id)
                    if isinstance(prompt, dict):
                        prompt["cache_salt"] = f"{self._loads} {salt}"
                    async with contextlib.aclosing(generate(prompt, sampling_params, request_id, **options)) as outputs:
                        async for output in outputs:
                            if request_id in self._anew:
                                break
                            if said is not None:
                                _note(said, client, output, request_id, sampling_params.n)
                            yield output
                        else:
                            return
            finally:
                self._under_way.discard(request_id)
                self._anew.discard(request_id)

        client.generate = watched

    async def _load(self, request: Request) -> JSONResponse:
        try:
            body = await request.json()
            name, path = str(body["name"]), Path(body["path"])
            check_folder(path)
        except (KeyError, TypeError, ValueError, OSError) as error:
            return _refusal(400, f"the weights cannot be loaded: {error!r}")
        state = request.scope["app"].state
        if not hasattr(state.engine_client, "update_weight_version"):
            return _refusal(501, "this vLLM cannot say which weights have sampled a token: use 0.32 or newer")
        async with self._one_at_a_time:
            # Sent again because its answer was lost: the weights are there.
            if _served(state)[0].name == name:
                return JSONResponse({"loaded": name})
            # Closed first: no new completion may begin while those that are pinned end.
            try:
                async with self._changed:
                    self._loading = True
                await self._pinned_ended(name)
                await self._replace(state, name, path)
            except Exception as error:
                logger.exception("weights of %s could not be loaded", path)
                return _refusal(500, f"the weights could not be loaded: {error!r}")
            finally:
                async with self._changed:
                    self._loading = False
                    self._changed.notify_all()
        return JSONResponse({"loaded": name})

    async def _pinned_ended(self, name: str) -> None:
        """Wait until no completion is under way that must end on the weights it began with."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_S), self._changed:
                    await self._changed.wait_for(lambda: not self._pinned)
                    return
            logger.info("%s waits for %d completions that are pinned to the weights before", name, self._pinned)

    async def _replace(self, state: Any, name: str, path: Path) -> None:
        """Load the folder into the running model. On failure nothing is served under any version's name."""
        client, began_s = state.engine_client, time.monotonic()
        # The name goes before the old weights and comes after the new ones: no answer is ever labelled with the wrong
        # one. The scheduler's own label changes while it stands still.
        for model in _served(state):
            model.name = _UNNAMED
        try:
            await client.pause_generation(mode="keep", clear_cache=False)
            self._loads += 1  # only now: a request that began before may have read its prompt with the old weights
            await self._begin_anew(client)
            try:
                async with asyncio.timeout(_LOAD_S):
                    await client.collective_rpc("flowjax_load_folder", args=(str(path),))
            except TimeoutError as error:
                raise RuntimeError(f"{path} was not read within {_LOAD_S:.0f} s") from error
            await client.update_weight_version(name)
        except BaseException:
            # Half of the weights may be new: tokens that they sampled would be of no version.
            with contextlib.suppress(Exception):  # the engine may have died of it
                await client.pause_generation(mode="abort", clear_cache=True)
            raise
        finally:
            await client.resume_generation()
        for model in _served(state):
            model.name = name
        logger.info("%s is served, after %.3f s in which nothing was sampled", name, time.monotonic() - began_s)

    async def _begin_anew(self, client: Any) -> None:
        """Abort requests that have sampled nothing yet: the old weights may have read a part of their prompts."""
        processor = client.output_processor
        for request_id in self._under_way:
            states = [processor.request_states[each] for each in processor.external_req_ids.get(request_id, ())]
            if states and not any(state.detokenizer.num_output_tokens() for state in states):
                self._anew.add(request_id)
        if self._anew:
            await client.abort(list(self._anew))


class _Labelled:
    """ASGI `send` of a request for completions, which adds vLLM's labels to its choices once a load has begun."""

    def __init__(self, gate: ServedWeights, said: dict[int, list[dict[str, Any]]], send: Any):
        self._gate, self._said, self._send = gate, said, send
        self._loads = gate.loads  # when the request was let in
        self._whole: dict[str, Any] | None = None  # the start of an answer that is held until its body is whole
        self._body = b""

    async def __call__(self, message: dict[str, Any]) -> None:
        if self._whole is None and self._loads == self._gate.loads:
            await self._send(message)
        elif message["type"] == "http.response.start":
            # All of a stream's headers are sent before its tokens; of a whole answer only now.
            if _is_stream(message):
                await self._send(message)
            else:
                self._whole = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._whole is None:
            await self._send({**message, "body": self._event(message.get("body", b""))})
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                body = self._labelled(self._body)
                start, headers = self._whole, [(b"content-length", str(len(body)).encode())]
                headers += [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                await self._send({**start, "headers": headers})
                await self._send({**message, "body": body})

    def _event(self, body: bytes) -> bytes:
        """A part of a stream: vLLM sends its events one by one."""
        lines = (
            _EVENT + self._labelled(line[len(_EVENT) :]) if line.startswith(_EVENT) else line
            for line in body.split(b"\n")
        )
        return b"\n".join(lines)

    def _labelled(self, text: bytes) -> bytes:
        try:
            answer = json.loads(text)
        except ValueError:  # the end of a stream, or no answer of vLLM's
            return text
        for choice in answer.get("choices", ()) if isinstance(answer, dict) else ():
            if spans := self._said.get(choice["index"]):
                choice["weight_versions"] = spans
        return json.dumps(answer, separators=(",", ":")).encode()


def _is_stream(start: dict[str, Any]) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in start["headers"])


def _note(said: dict[int, list[dict[str, Any]]], client: Any, output: Any, request_id: str, replies: int) -> None:
    """Note the versions of the choices of one of a request's prompts: all of them so far."""
    number = request_id.rpartition("-")[2]  # vLLM numbers the prompts of a request so
    for choice in output.outputs if number.isdecimal() else ():
        place = int(number) * replies + choice.index
        if choice.weight_versions is not None:
            said[place] = [
                {"version": each.version, "start": each.start, "end": each.end} for each in choice.weight_versions
            ]
        elif replies == 1:
            for internal_id in client.output_processor.external_req_ids.get(request_id, ()):
                starts = client.output_processor.request_states[internal_id].weight_version_starts
                ends = [*(start for _, start in starts[1:]), None]
                said[place] = [
                    {"version": version, "start": start, "end": end}
                    for (version, start), end in zip(starts, ends, strict=True)
                ]


def _served(state: Any) -> list[Any]:
    """The server's own list of names; answers are labelled from it."""
    return state.openai_serving_models.base_model_paths


def check_folder(path: Path) -> None:
    """Refuse a folder that would kill the engine half-way: vLLM does not survive a file that is cut off.

    Raises:
        ValueError: there is no safetensors file, or one is shorter or longer than its header says.
        OSError: the folder cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no safetensors file")
    for file in files:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > file.stat().st_size:
                raise ValueError(f"{file} is shorter than its header, and no safetensors file")
            header = json.loads(stream.read(header_bytes))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        if file.stat().st_size != 8 + header_bytes + end:
            raise ValueError(f"{file} has {file.stat().st_size} bytes and should have {8 + header_bytes + end}")


def _refusal(status: int, message: str) -> JSONResponse:
    logger.warning("%s", message)
    return JSONResponse({"error": {"message": message}}, status_code=status)
