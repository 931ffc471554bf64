"""Asks a vLLM server for completions: token ids in, token ids and log-probabilities out.

Concurrent calls travel together, many prompts per HTTP request, since at small sizes the request is what costs. While
the engine is away (it is restarted by its supervisor) calls wait and are sent again.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from ml_collections import ConfigDict

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_CONTROL_TIMEOUT_S = 60.0  # for everything but completions
_HEALTH_TIMEOUT_S = 5.0
_PROBE_EVERY_S = 5.0  # while waiting for a completion


class EngineError(RuntimeError):
    """The engine refuses a request, or has been away for too long; the message names the log to read."""


class UnknownModel(EngineError):
    """The engine serves no model or adapter of that name: it was retired, or the engine has been restarted."""


class _Away(Exception):
    """The engine cannot answer at present."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Calls with equal sampling can travel in one request."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled, the end-of-sequence token included if there was one.

    `logprobs` are those of the distribution that was sampled from, at the sampling temperature. `finish_reason` is
    "stop" or "length"; `model` is the name under which the engine says it served the request.
    """

    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    model: str


@dataclass(eq=False)
class _Batch:
    """Calls waiting for one request."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[asyncio.Future[Completion]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class EngineClient:
    """Client of one vLLM server. Use as an async context manager.

    Args:
        url: of the server, without `/v1`.
        prompts_per_request: most prompts in one request.
        batch_window_s: how long a call waits for others to share its request.
        request_timeout_s: how long the engine may be away before calls fail.
        log: the engine's log, to be named in errors.
    """

    def __init__(
        self,
        url: str,
        *,
        prompts_per_request: int = 64,
        batch_window_s: float = 0.002,
        request_timeout_s: float = 120.0,
        log: Path | None = None,
    ):
        self._url = url.rstrip("/")
        self._prompts_per_request = prompts_per_request
        self._batch_window_s = batch_window_s
        self._timeout_s = request_timeout_s
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[tuple[str, Sampling], _Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()

    @classmethod
    def of_run(cls, config: ConfigDict, run_dir: Path, url: str) -> "EngineClient":
        """A client as the run's config wants it."""
        return cls(
            url,
            prompts_per_request=config.engine.prompts_per_request,
            batch_window_s=config.engine.batch_window_s,
            request_timeout_s=config.engine.request_timeout_s,
            log=run_dir / "logs" / "engine.log",
        )

    async def __aenter__(self) -> "EngineClient":
        # Requests may take as long as sampling takes; `_complete` asks for the engine's health meanwhile.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for batch in self._open.values():
            if batch.timer is not None:
                batch.timer.cancel()
            _fail(batch, EngineError("the engine client was closed"))
        self._open.clear()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def generate(self, model: str, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion of `prompt_ids` from the model or adapter of that name.

        Raises:
            UnknownModel: the engine does not serve `model`.
            EngineError: the engine refuses the request, or was away for longer than `request_timeout_s`.
        """
        key = model, sampling
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Batch()
            batch.timer = asyncio.get_running_loop().call_later(self._batch_window_s, self._dispatch, key)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        batch.prompts.append(list(prompt_ids))
        batch.answers.append(answer)
        if len(batch.prompts) >= self._prompts_per_request:
            self._dispatch(key)
        return await answer

    async def models(self) -> set[str]:
        """Names that the engine serves: the base model and the loaded adapters."""
        _, answer = await self._control("GET", "/v1/models")
        return {model["id"] for model in answer["data"]}

    async def load_adapter(self, name: str, path: Path) -> None:
        """Have the engine serve the PEFT folder `path` as `name`. A name never changes its meaning.

        Raises:
            EngineError: the engine is away or cannot use the folder.
        """
        body = {"lora_name": name, "lora_path": str(Path(path).resolve())}
        status, answer = await self._control("POST", "/v1/load_lora_adapter", body)
        if status != 200 and name not in await self.models():
            raise EngineError(f"the engine cannot load {name} from {path}: {_reason(answer)}{self._see_log()}")

    async def load_weights(self, name: str, path: Path) -> None:
        """Have the engine replace all its weights by those of a Hugging Face folder, and serve them as `name`.

        Completions that have begun end before, those that come meanwhile wait.

        Raises:
            EngineError: the engine is away or cannot use the folder.
        """
        body = {"name": name, "path": str(Path(path).resolve())}
        status, answer = await self._control("POST", "/v1/load_weights", body, timeout_s=self._timeout_s)
        if status != 200:
            raise EngineError(f"the engine cannot load {name} from {path}: {_reason(answer)}{self._see_log()}")

    async def unload_adapter(self, name: str) -> None:
        """Have the engine forget an adapter; requests that are running on it end as they began.

        Raises:
            EngineError: the engine is away or refuses.
        """
        status, answer = await self._control("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404):
            raise EngineError(f"the engine cannot unload {name}: {_reason(answer)}{self._see_log()}")

    async def healthy(self) -> bool:
        """Whether server and engine are alive."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S), self._request("GET", "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False

    def _dispatch(self, key: tuple[str, Sampling]) -> None:
        """Send the open batch of `key`."""
        batch = self._open.pop(key, None)
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._send(*key, batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def cancel_unwanted(_: asyncio.Future[Completion]) -> None:
            if all(answer.cancelled() for answer in batch.answers):
                task.cancel()  # the server drops the request when the connection closes

        for answer in batch.answers:
            answer.add_done_callback(cancel_unwanted)

    async def _send(self, model: str, sampling: Sampling, batch: _Batch) -> None:
        """Complete a batch; whatever goes wrong goes to exactly the calls in it."""
        try:
            completions = await self._complete(model, sampling, batch.prompts)
        except asyncio.CancelledError:
            _fail(batch, EngineError("the engine client was closed"))
            raise
        except Exception as error:
            _fail(batch, error)
            return
        for answer, completion in zip(batch.answers, completions, strict=True):
            if not answer.done():
                answer.set_result(completion)

    async def _complete(self, model: str, sampling: Sampling, prompts: list[list[int]]) -> list[Completion]:
        """One request, sent again for as long as the engine is away, but no longer than the time-out."""
        body = _completion_body(model, sampling, prompts)
        clock = asyncio.get_running_loop().time
        pause_s, alive_s = _FIRST_RETRY_S, clock()
        while True:
            attempt = asyncio.ensure_future(self._post("/v1/completions", body))
            try:
                while not (await asyncio.wait({attempt}, timeout=_PROBE_EVERY_S))[0]:
                    if await self.healthy():
                        alive_s = clock()
                    elif clock() - alive_s > self._timeout_s:
                        raise _Away("no answer to /health")
                status, answer = attempt.result()
                return self._completions(status, answer, body)
            except (_Away, aiohttp.ClientError, OSError) as error:
                if clock() - alive_s > self._timeout_s:
                    raise EngineError(
                        f"the engine at {self._url} has been away for {clock() - alive_s:.0f} s"
                        f" ({error or type(error).__name__}){self._see_log()}"
                    ) from error
            finally:
                attempt.cancel()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _completions(self, status: int, answer: Any, body: dict[str, Any]) -> list[Completion]:
        """The completions in an answer, in the order of the prompts."""
        if status == 404:
            raise UnknownModel(f"the engine does not serve {body['model']}: {_reason(answer)}{self._see_log()}")
        if status >= 500:
            raise _Away(f"HTTP status {status}: {_reason(answer)}")
        if status != 200:
            raise EngineError(f"the engine refuses a request (HTTP {status}): {_reason(answer)}{self._see_log()}")
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(body["prompt"]):
            raise EngineError(f"the engine answered {len(choices)} of {len(body['prompt'])} prompts{self._see_log()}")
        if any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
            raise _Away("the engine aborted requests")  # it does so when it is stopped
        return [_completion(choice, answer["model"]) for choice in choices]

    async def _control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> tuple[int, Any]:
        """An administrative request, tried once: whoever keeps adapters in step tries again anyway."""
        try:
            async with asyncio.timeout(timeout_s), self._request(method, path, body) as response:
                return response.status, await _content(response)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"the engine at {self._url} does not answer {path} ({error or type(error).__name__}){self._see_log()}"
            ) from error

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._request("POST", path, body) as response:
            return response.status, await _content(response)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None or self._session.closed:
            raise EngineError("the engine client is not open: use it in `async with`")
        async with self._session.request(method, self._url + path, json=body) as response:
            yield response

    def _see_log(self) -> str:
        return f": see {self._log}" if self._log is not None else ""


def _completion_body(model: str, sampling: Sampling, prompts: list[list[int]]) -> dict[str, Any]:
    """A request to /v1/completions. Without a seed: with one, equal prompts would be answered equally."""
    return {
        "model": model,
        "prompt": prompts,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token and no other
        "return_tokens_as_token_ids": True,
    }


def _completion(choice: dict[str, Any], model: str) -> Completion:
    tokens = choice["logprobs"]["tokens"]  # each "token_id:<id>"
    return Completion(
        sampled_ids=tuple(int(token.rpartition(":")[2]) for token in tokens),
        logprobs=tuple(choice["logprobs"]["token_logprobs"]),
        finish_reason=choice["finish_reason"],
        model=model,
    )


async def _content(response: aiohttp.ClientResponse) -> Any:
    """The answer's JSON, or its text where it is none."""
    text = await response.text()
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reason(answer: Any) -> str:
    """What an error answer says, on one line."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        answer = answer["error"].get("message", answer)
    return " ".join(str(answer).split())[:500]


def _fail(batch: _Batch, error: Exception) -> None:
    for answer in batch.answers:
        if not answer.done():
            answer.set_exception(error)
