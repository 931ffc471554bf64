"""Asks a vLLM server for completions: token ids in, token ids and log-probabilities out.

Concurrent calls share HTTP requests, many prompts in each, since with small models the request itself costs most. While
the engine is away (its supervisor restarts it) a patient client's calls wait and are sent again. An impatient client's
fail at once, with the tokens streamed so far, from which another engine can go on (`flowjax.rollout.engines`).
"""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp

from flowjax.monitor.trouble import explain

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_CONTROL_TIMEOUT_S = 60.0  # for everything but completions, and new weights, which may wait for completions to end
_HEALTH_TIMEOUT_S = 5.0
_PROBE_EVERY_S = 5.0  # while waiting for a completion
_LONGEST_EVENT_BYTES = 2**20  # of a stream
_FINISHED = ("stop", "length")
_EVENT, _LAST_EVENT = b"data: ", b"[DONE]"  # lines of a stream


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Parameters of a call. Calls with equal sampling can travel in one request."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0  # all
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    structured_outputs: str = ""  # JSON of what vLLM's parameter of that name takes; "" leaves replies free
    seed: int | None = None  # None leaves it to the engine


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A sampled reply, the end-of-sequence token included if there was one.

    `logprobs` are those of the distribution that was sampled from: after temperature, top-p, top-k and min-p. A stop
    text is part of the reply, with the whole of the token that completes it. `finish_reason` is "stop" or "length".
    `spans` are the model names (`<policy>@<version>`) that the engine says sampled the tokens, in order, each with its
    number of tokens; more than one only if weights were replaced meanwhile.
    """

    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Partial:
    """The part of a reply that has come so far; `finish_reason` is empty until its end, which may also be "abort"."""

    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    starts: list[tuple[str, int]] = field(default_factory=list)  # names, and the first token that each has sampled

    def extend(self, choice: dict[str, Any], model: str) -> None:
        """Add what a choice of an answer of that `model`, or of one event of a stream, holds."""
        tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else ()  # each "token_id:<id>"
        if tokens:
            self.sampled_ids += [int(token.rpartition(":")[2]) for token in tokens]
            self.logprobs += choice["logprobs"]["token_logprobs"]
        self.finish_reason = choice["finish_reason"] or ""
        # Only if weights were replaced under the request: spans of all its tokens so far, also of some not sent yet.
        if spans := choice.get("weight_versions"):
            self.starts = [(span["version"], span["start"]) for span in spans]
        elif not self.starts:
            self.starts = [(model, 0)]

    def append(self, rest: EngineReply) -> None:
        """Add the rest that another engine has sampled after it."""
        place = len(self.sampled_ids)
        for name, tokens in rest.spans:
            self.starts.append((name, place))
            place += tokens
        self.sampled_ids += rest.sampled_ids
        self.logprobs += rest.logprobs
        self.finish_reason = rest.finish_reason

    def completion(self) -> EngineReply:
        n = len(self.sampled_ids)
        ends = [start for _, start in self.starts[1:]] + [n]
        # A start may lie beyond the tokens that have come: its count is 0. Not strict: without starts there is one end.
        counts = [(name, max(min(end, n) - start, 0)) for (name, start), end in zip(self.starts, ends, strict=False)]
        counts = [each for each in counts if each[1]] or counts[-1:]  # of a reply without tokens, the last name
        spans = tuple((name, sum(tokens for _, tokens in of)) for name, of in groupby(counts, key=itemgetter(0)))
        return EngineReply(tuple(self.sampled_ids), tuple(self.logprobs), self.finish_reason, spans)


def completion_body(model: str, sampling: SamplingOptions, prompts: list[list[int]], *, stream: bool) -> dict[str, Any]:
    """Body of a request to /v1/completions. With a seed, equal prompts are answered equally: training has none.

    Every parameter is given: an engine that was not started here may take those that are missing from its model's
    generation_config.json.
    """
    held: dict[str, Any] = {}
    if sampling.structured_outputs:
        held["structured_outputs"] = json.loads(sampling.structured_outputs)
    if sampling.seed is not None:
        held["seed"] = sampling.seed
    return {
        "model": model,
        "prompt": prompts,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token and no other
        "return_tokens_as_token_ids": True,  # as text, different tokens may look alike
        "stream": stream,
        **held,
    }


def read_event(line: bytes) -> dict[str, Any] | None:
    """The message in one line of a stream; None for lines without, and for the last one.

    Raises:
        ValueError: the line was cut off.
    """
    if not line.startswith(_EVENT):
        return None
    text = line.removeprefix(_EVENT).strip()
    return None if text == _LAST_EVENT else json.loads(text)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine: requests running and waiting, requests preempted, share of its key-value cache in use.

    vLLM preempts a request when the cache is full: it loses its keys and values, and all its tokens are computed again.
    """

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    cache_share: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        """The load of two engines; the fuller cache counts, since one that overflows preempts."""
        return Load(
            self.running + other.running,
            self.waiting + other.waiting,
            self.preemptions + other.preemptions,
            max(self.cache_share, other.cache_share),
        )


def read_load(metrics: str) -> Load:
    """The load in what vLLM's `/metrics` answers; over all ranks where it has several.

    Raises:
        ValueError, OverflowError: it cannot be read.
    """
    values: dict[str, list[float]] = {}
    for line in metrics.splitlines():
        if line.startswith("vllm:"):
            name = line.partition("{")[0].partition(" ")[0]
            values.setdefault(name, []).append(float(line.rpartition(" ")[2]))
    return Load(
        running=int(sum(values.get("vllm:num_requests_running", ()))),
        waiting=int(sum(values.get("vllm:num_requests_waiting", ()))),
        preemptions=int(sum(values.get("vllm:num_preemptions_total", ()))),
        cache_share=max(values.get("vllm:kv_cache_usage_perc", ()), default=0.0),
    )


class EngineError(RuntimeError):
    """The engine refuses a request, or has been away for too long; the message names the log to read."""


class VersionAway(EngineError):
    """No engine got an episode's version in time, although it exists, or the version was lost because its trainer went
    back: neither says anything about the task."""


class UnknownModel(EngineError):
    """The engine serves no model or adapter of that name: it was retired, or the engine has been restarted."""


class EngineAway(EngineError):
    """The engine is dead or does not answer. `partial` is the part of the completion that it had sampled until then."""

    def __init__(self, message: str, partial: Partial | None = None):
        super().__init__(message)
        self.partial = partial or Partial()


class _Away(Exception):
    """The engine cannot answer at present."""


_Key = tuple[str, SamplingOptions, bool]  # calls that can travel in one request: model, sampling, whether pinned


@dataclass(eq=False)
class _Batch:
    """Calls waiting for one request."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[asyncio.Future[EngineReply]] = field(default_factory=list)
    partials: dict[int, Partial] = field(default_factory=dict)  # of a stream, by the prompt's index
    timer: asyncio.TimerHandle | None = None


class EngineClient:
    """Client of one vLLM server. Use as an async context manager.

    Args:
        url: of the server, without `/v1`.
        prompts_per_request: most prompts in one request.
        batch_window_s: how long a call waits for others to share its request.
        request_timeout_s: how long the engine may be away before calls fail.
        patient: send calls again for so long when the engine is away; else they fail as soon as this is known.
        stream: have completions streamed, so that the tokens sampled so far are known when the engine dies.
        log: the engine's log, to be named in errors.
    """

    def __init__(
        self,
        url: str,
        *,
        prompts_per_request: int = 64,
        batch_window_s: float = 0.002,
        request_timeout_s: float = 120.0,
        patient: bool = True,
        stream: bool = False,
        log: Path | None = None,
    ):
        self.url = url.rstrip("/")
        self._prompts_per_request = prompts_per_request
        self._batch_window_s = batch_window_s
        self._timeout_s = request_timeout_s
        self._patient, self._stream = patient, stream
        self._log = log
        self.trouble = ""
        self.preempted = 0  # requests, since the engine was first asked for its load
        self._preempted_before: int | None = None  # by the engine's own count, which begins anew with each start
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[_Key, _Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[bool] | None = None  # the newest
        self._probed_s = 0.0  # when it began

    @property
    def members(self) -> Sequence["EngineClient"]:
        """The engines behind this client: itself."""
        return (self,)

    async def __aenter__(self) -> "EngineClient":
        # Requests may take as long as sampling takes; `_complete` asks for the engine's health meanwhile.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the default of 100 connections would queue requests here
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            read_bufsize=_LONGEST_EVENT_BYTES,  # aiohttp refuses a line of a stream that is longer than twice this
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for batch in self._open.values():
            if batch.timer is not None:
                batch.timer.cancel()
            _fail(batch, EngineError("the engine client was closed"))
        self._open.clear()
        tasks = [*self._sending, *([self._probe] if self._probe is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._probe = None
        if self._session is not None:
            await self._session.close()

    async def generate(
        self, model: str, prompt_ids: Sequence[int], sampling: SamplingOptions, *, group: str = "", pinned: bool = False
    ) -> EngineReply:
        """Sample one completion of `prompt_ids` from the model or adapter of that name. If the engine's weights are
        replaced meanwhile, the rest is sampled from the new ones, unless the call is `pinned`.

        `group` names calls whose prompts begin alike; it chooses an engine in a pool, and is not used here.

        Raises:
            UnknownModel: the engine does not serve `model`.
            EngineAway: the engine was away for longer than `request_timeout_s`, or at all if this is not `patient`.
            EngineError: the engine refuses the request.
        """
        del group
        key = model, sampling, pinned
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Batch()
            batch.timer = asyncio.get_running_loop().call_later(self._batch_window_s, self._dispatch, key)
        answer: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
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
        # vLLM refuses a name that it has already, as after an answer that was lost: the list of its models decides.
        if status != 200 and name not in await self.models():
            raise EngineError(f"the engine cannot load {name} from {path}: {_reason(answer)}{self._see_log()}")

    async def load_weights(self, name: str, path: Path) -> None:
        """Have the engine replace all its weights by those of a Hugging Face folder, and serve them as `name`.

        Completions under way go on with the new weights; those that come meanwhile wait. The load waits for pinned ones
        to end, however long that takes: this call has no time-out, and fails only when the engine is away.

        Raises:
            EngineError: the engine is away or cannot use the folder.
        """
        body = {"name": name, "path": str(Path(path).resolve())}
        clock = asyncio.get_running_loop().time
        alive_s, attempt = clock(), asyncio.ensure_future(self._control("POST", "/v1/load_weights", body, None))
        try:
            while not (await asyncio.wait({attempt}, timeout=_PROBE_EVERY_S))[0]:
                if await self.healthy():
                    alive_s = clock()
                elif clock() - alive_s > self._timeout_s:
                    raise EngineError(f"the engine at {self.url} died while it loaded {name}{self._see_log()}")
            status, answer = attempt.result()
        finally:
            attempt.cancel()
        if status != 200:
            raise EngineError(f"the engine cannot load {name} from {path}: {_reason(answer)}{self._see_log()}")

    async def unload_adapter(self, name: str) -> None:
        """Have the engine take no more requests for an adapter; those under way go on to their end with it.

        Raises:
            EngineError: the engine is away or refuses.
        """
        status, answer = await self._control("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404):
            raise EngineError(f"the engine cannot unload {name}: {_reason(answer)}{self._see_log()}")

    async def healthy(self) -> bool:
        """True if server and engine are alive. Otherwise `trouble` says why not."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S), self._request("GET", "/health") as response:
                self.trouble = "" if response.status == 200 else f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self.trouble = explain(error) or str(error) or type(error).__name__
        return not self.trouble

    async def _probed(self) -> bool:
        """As `healthy`, asked once every _PROBE_EVERY_S for all requests under way, however many they are."""
        clock = asyncio.get_running_loop().time
        if self._probe is None or (self._probe.done() and clock() - self._probed_s >= _PROBE_EVERY_S):
            self._probe, self._probed_s = asyncio.create_task(self.healthy()), clock()
        await asyncio.wait({self._probe})  # does not cancel the probe if this call is cancelled: others wait for it
        return self._probe.result()

    async def load(self) -> Load:
        """Ask how busy the engine is; `preemptions` are those since the first call of this.

        Raises:
            EngineError: the engine is away, or its metrics cannot be read.
        """
        status, text = await self._control("GET", "/metrics", timeout_s=_HEALTH_TIMEOUT_S)
        if status != 200:
            raise EngineError(f"the engine at {self.url} tells no metrics (HTTP {status}){self._see_log()}")
        try:
            load = read_load(str(text))
        except (ValueError, OverflowError) as error:
            problem = f"the engine at {self.url} tells no metrics that can be read ({error})"
            raise EngineError(f"{problem}{self._see_log()}") from error
        # The engine's count begins at 0 when it restarts: if it has fallen, all of it is new.
        before = load.preemptions if self._preempted_before is None else self._preempted_before
        self.preempted += load.preemptions - (before if before <= load.preemptions else 0)
        self._preempted_before = load.preemptions
        return replace(load, preemptions=self.preempted)

    def _dispatch(self, key: _Key) -> None:
        """Send the open batch of `key`."""
        batch = self._open.pop(key, None)
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._send(*key, batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        # An episode that is given up cancels its call. The request goes on while any other call of it is waited for.
        def cancel_unwanted(_: asyncio.Future[EngineReply]) -> None:
            answers = batch.answers
            if all(answer.done() for answer in answers) and any(answer.cancelled() for answer in answers):
                task.cancel()  # the server drops the request when the connection closes

        for answer in batch.answers:
            answer.add_done_callback(cancel_unwanted)

    async def _send(self, model: str, sampling: SamplingOptions, pinned: bool, batch: _Batch) -> None:
        """Complete a batch; every failure is raised in the calls of this batch, and in no others."""
        try:
            await self._complete(model, sampling, pinned, batch)
        except asyncio.CancelledError:
            _fail(batch, EngineError("the engine client was closed"))
            raise
        except EngineError as error:
            _fail(batch, error)
        except Exception as error:  # such as the answer of a gateway in the engine's place
            problem = f"the engine at {self.url} answers what cannot be read ({type(error).__name__}: {error})"
            _fail(batch, EngineError(f"{problem}{self._see_log()}"))

    async def _complete(self, model: str, sampling: SamplingOptions, pinned: bool, batch: _Batch) -> None:
        """One request, sent again for as long as the engine is away, but no longer than the time-out."""
        body = completion_body(model, sampling, batch.prompts, stream=self._stream)
        headers = {"X-Flowjax-Pinned": "1"} if pinned else {}
        clock = asyncio.get_running_loop().time
        pause_s, alive_s, failing_s = _FIRST_RETRY_S, clock(), math.inf  # when it first failed at this request
        while True:
            ask = self._streamed if self._stream else self._whole
            attempt = asyncio.ensure_future(ask(body, headers, batch))
            try:
                # A long reply and a dead engine look alike from here: /health distinguishes them.
                while not (await asyncio.wait({attempt}, timeout=_PROBE_EVERY_S))[0]:
                    if await self._probed():
                        alive_s = clock()
                    elif clock() - alive_s > self._timeout_s:
                        raise _Away("no answer to /health")
                return attempt.result()
            except (_Away, aiohttp.ClientError, OSError) as error:
                if self._patient and isinstance(error, _Away) and failing_s == math.inf:
                    failing_s = clock()
                    _log.warning("the engine at %s fails: %s", self.url, error)
                away_s = clock() - min(alive_s, failing_s)  # since a failure, too: a gateway may be healthy and fail
                if not self._patient or away_s > self._timeout_s:
                    problem = f"has been away for {away_s:.0f} s ({error or type(error).__name__}){self._see_log()}"
                    raise EngineAway(f"the engine at {self.url} {problem}") from error
            finally:
                attempt.cancel()  # closes the connection: the engine stops sampling replies that nobody waits for
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    async def _whole(self, body: dict[str, Any], headers: dict[str, str], batch: _Batch) -> None:
        """All answers at once, in the order of the prompts."""
        async with self._request("POST", "/v1/completions", body, headers) as response:
            status, answer = response.status, await _content(response)
        self._check_accepted(status, answer, body)
        partials = {choice["index"]: Partial() for choice in answer["choices"]}
        for choice in answer["choices"]:
            partials[choice["index"]].extend(choice, answer["model"])
        if len(partials) != len(batch.prompts):
            raise EngineError(f"the engine answered {len(partials)} of {len(batch.prompts)} prompts{self._see_log()}")
        if any(partial.finish_reason not in _FINISHED for partial in partials.values()):
            raise _Away("the engine aborted requests")  # it does so when it is stopped
        for index, partial in partials.items():
            _deliver(batch.answers[index], partial.completion())

    async def _streamed(self, body: dict[str, Any], headers: dict[str, str], batch: _Batch) -> None:
        """Each answer as soon as it is whole; the parts that have come of the others are kept in the batch."""
        # Empty again: a request that is sent again samples all prompts anew. Answers that were delivered stay.
        batch.partials = {index: Partial() for index in range(len(batch.prompts))}
        async with self._request("POST", "/v1/completions", body, headers) as response:
            if response.status != 200:
                self._check_accepted(response.status, await _content(response), body)
            async for line in response.content:
                try:
                    event = read_event(line)
                except ValueError as error:
                    raise _Away(f"the stream was cut off ({error})") from error
                if event is None:
                    continue
                if "error" in event:  # the status 200 was sent before anything went wrong
                    code = event["error"].get("code") or 500
                    self._check_accepted(int(code), event, body)
                for choice in event.get("choices", ()):
                    partial = batch.partials[choice["index"]]
                    if choice["finish_reason"] not in (None, *_FINISHED):
                        raise _Away("the engine aborted requests")
                    partial.extend(choice, event["model"])
                    if partial.finish_reason:
                        _deliver(batch.answers[choice["index"]], partial.completion())
        if not all(answer.done() for answer in batch.answers):
            raise _Away("the stream ended early")

    def _check_accepted(self, status: int, answer: Any, body: dict[str, Any]) -> None:
        if status == 404:
            raise UnknownModel(f"the engine does not serve {body['model']}: {_reason(answer)}{self._see_log()}")
        if status >= 500:
            raise _Away(f"HTTP status {status}: {_reason(answer)}")
        if status != 200:
            raise EngineError(f"the engine refuses a request (HTTP {status}): {_reason(answer)}{self._see_log()}")

    async def _control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> tuple[int, Any]:
        """Send an administrative request, once: the follower, which keeps versions in step, tries again anyway."""
        try:
            async with asyncio.timeout(timeout_s), self._request(method, path, body) as response:
                return response.status, await _content(response)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"the engine at {self.url} does not answer {path} ({error or type(error).__name__}){self._see_log()}"
            ) from error

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None or self._session.closed:
            raise EngineError("the engine client is not open: use it in `async with`")
        async with self._session.request(method, self.url + path, json=body, headers=headers) as response:
            yield response

    def _see_log(self) -> str:
        return f": see {self._log}" if self._log is not None else ""


async def _content(response: aiohttp.ClientResponse) -> Any:
    """The answer's JSON, or its text where it is none."""
    text = await response.text(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reason(answer: Any) -> str:
    """Words of an error answer, on one line."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        answer = answer["error"].get("message", answer)
    return " ".join(str(answer).split())[:500]


def _deliver(answer: asyncio.Future[EngineReply], completion: EngineReply) -> None:
    if not answer.done():
        answer.set_result(completion)


def _fail(batch: _Batch, error: Exception) -> None:
    """Raise the error in every call without an answer; `EngineAway` has the tokens that were streamed for it."""
    for index, answer in enumerate(batch.answers):
        if not answer.done():
            partial = batch.partials.get(index)
            answer.set_exception(EngineAway(str(error), partial) if isinstance(error, EngineAway) else error)
