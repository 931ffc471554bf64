"""Any endpoint that speaks OpenAI's chat completions, the run's own vLLM among them.

    OpenAIBackend(["https://api.openai.com/v1"], "gpt-4.1-mini", api_key=os.environ["OPENAI_API_KEY"])
    OpenAIBackend(["http://127.0.0.1:8000/v1"], "base")          # the run's engine; "<policy>@<version>" is an adapter

Facts of the API: platform.openai.com/docs/api-reference/chat, and what its Python client retries.
"""

import asyncio
import contextlib
import email.utils
import json
import logging
import math
import random
import time
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

import aiohttp

from flowjax.canvas.backends import (
    BackendUnavailable,
    Completion,
    Prices,
    Request,
    prompt_estimate,
    refusal,
    streamed_answer,
    usage_of,
)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """None is no limit. Limits are per event loop: divide them by the number of processes that share an endpoint."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # of prompts and answers together
    concurrency: int | None = None  # requests in flight


@dataclass(slots=True)
class Grant:
    """Permission to send one request. Set `tokens` to the number it used once that is known."""

    sent_s: float
    tokens: float


class Limiter:
    """Rate limiter: lets requests through in order, no more within any `window_s` than the limits allow."""

    def __init__(self, limits: RateLimits, window_s: float = 60.0):
        self._requests = _or_infinite(limits.requests_per_minute) * window_s / 60
        self._tokens = _or_infinite(limits.tokens_per_minute) * window_s / 60
        self._window_s = window_s
        self._slots = None if limits.concurrency is None else asyncio.Semaphore(limits.concurrency)
        self._turn = asyncio.Lock()
        self._recent: deque[Grant] = deque()
        self._clock = asyncio.get_running_loop().time

    @contextlib.asynccontextmanager
    async def grant(self, tokens: float) -> AsyncIterator[Grant]:
        """Wait until a request that takes about so many tokens may be sent."""
        async with self._slots or contextlib.nullcontext():
            # One request waits for room, the others for its lock. asyncio locks are fair, so none is overtaken.
            async with self._turn:
                while (wait_s := self._wait_s(tokens)) > 0:
                    await asyncio.sleep(wait_s)
                grant = Grant(self._clock(), tokens)
                self._recent.append(grant)
            yield grant

    def _wait_s(self, tokens: float) -> float:
        """Seconds until the oldest request leaves the window, 0 if there is room; an empty window has room for any."""
        now_s = self._clock()
        while self._recent and self._recent[0].sent_s + self._window_s <= now_s:
            self._recent.popleft()
        used = sum(grant.tokens for grant in self._recent) if self._tokens < math.inf else 0.0
        if not self._recent or (len(self._recent) + 1 <= self._requests and used + tokens <= self._tokens):
            return 0.0
        return max(self._recent[0].sent_s + self._window_s - now_s, 0.001)  # rounding must not make a wait of 0


def _or_infinite(limit: float | None) -> float:
    return math.inf if limit is None else limit


_log = logging.getLogger(__name__)
_RETRIED = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
# For the request's content. Others, such as a missing key or an unknown model, are the endpoint's or config's fault.
_REFUSALS = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}
_ASKS_TO_WAIT = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
_ERROR_CHARACTERS = 300
_ANSWER_BYTES, _BYTES_PER_TOKEN = 4 * 2**20, 1024  # an answer may have so many, and so many more for each token
_NO_LIMITS, _FREE = RateLimits(), Prices()


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of waiting for an endpoint and of trying again."""

    timeout_s: float = 120.0  # one try, answer included
    connect_timeout_s: float = 10.0
    retries: int = 4  # tries after the first
    first_retry_s: float = 0.25  # doubles with every round of the endpoints, and is shortened by up to half at random
    last_retry_s: float = 2.0
    longest_wait_s: float = 5.0  # an endpoint that asks for more (Retry-After) is given up
    failures_in_a_row: int = 8  # failed tries, of any requests, after which none is sent for a while
    first_pause_s: float = 1.0  # doubles each time that the one request after it fails too
    last_pause_s: float = 30.0


_PATIENCE = Patience()


class _TryAgain(Exception):
    """A failed try that is worth repeating. `after_s` is the wait that the endpoint asks for, if it does; `busy` says
    that it works and is overloaded; `other_only` that only another endpoint may answer."""

    def __init__(self, message: str, after_s: float | None = None, *, busy: bool = False, other_only: bool = False):
        super().__init__(message)
        self.after_s, self.busy, self.other_only = after_s, busy, other_only


class Breaker:
    """Circuit breaker: after a row of failures nothing is sent for a while, then one trial request decides for all.

    So an outage costs episodes no waiting, and an endpoint that recovers does not get all requests at once.
    """

    def __init__(self, patience: Patience):
        self._patience = patience
        self._failures = 0  # in a row
        self.last = ""  # what the last of them was
        self._pause_s = patience.first_pause_s
        self._paused_s, self._closed_until_s = -math.inf, 0.0  # start and end of the last pause
        self._trial: asyncio.Future[None] | None = None
        self._clock = asyncio.get_running_loop().time

    @property
    def wait_s(self) -> float:
        """Seconds for which nothing is sent."""
        tripped = self._failures >= self._patience.failures_in_a_row
        return max(0.0, self._closed_until_s - self._clock()) if tripped else 0.0

    async def admit(self) -> bool:
        """Wait until a request may be sent; true for the one on trial, whose sender must call `end_trial`.

        Raises:
            BackendUnavailable: nothing is sent at present.
        """
        while self._failures >= self._patience.failures_in_a_row:
            if (wait_s := self.wait_s) > 0:
                row = f"{self._failures} tries in a row have failed, the last at {self.last}"
                raise BackendUnavailable(f"{row}; no request for {wait_s:.1f} s")
            if self._trial is None:
                self._trial = asyncio.get_running_loop().create_future()
                return True
            await asyncio.shield(self._trial)  # shielded: cancelling one waiter must not cancel the others' future
        return False

    def end_trial(self) -> None:
        """Wake the waiting requests, which look at the breaker's state anew."""
        if self._trial is not None:
            self._trial.set_result(None)
            self._trial = None

    def note_success(self) -> None:
        self._failures, self._pause_s = 0, self._patience.first_pause_s

    def note_failure(self, failure: str, sent_s: float) -> None:
        """Note that a request fails that was sent at that time of the event loop's clock."""
        self._failures, self.last = self._failures + 1, failure
        # Requests that were under way when the last pause began are of its outage, however late they fail.
        if self._failures >= self._patience.failures_in_a_row and sent_s > self._paused_s:
            self._paused_s = self._clock()
            self._closed_until_s = self._paused_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._patience.last_pause_s)


@dataclass(slots=True)
class _Connections:
    """Connections and limits of one event loop."""

    session: aiohttp.ClientSession
    limiter: Limiter
    breaker: Breaker
    paused_until_s: dict[str, float] = field(default_factory=dict)  # endpoint -> when it wants to be asked again


class OpenAIBackend:
    """A model behind one or several equal endpoints, which are used in turn and stand in for each other.

    Tries that end in a timeout may have been billed; their usage is not known and not counted.

    Args:
        base_urls: up to and including `/v1`, say.
        model: as the endpoint calls it.
        api_key: sent as a bearer token; in no error, log or `repr`.
        prices: of tokens; by default they cost nothing.
        token_limit_field: the endpoint's name for `max_new_tokens`; the second one for OpenAI's reasoning models.
        structured: whether the endpoint can hold answers to a JSON schema. If not, `schema` is not sent.
        extra_body: more fields of the request, such as `chat_template_kwargs`; None leaves out a field that the
            endpoint would refuse, such as `seed` or `top_p`.
        identity: the model's name in cache keys, where name and addresses at the endpoint do not tell its weights:
            another run's engine serves other weights at the same address.
        use_proxy: go through the proxies that the environment names.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        model: str,
        *,
        api_key: str = "",
        patience: Patience = _PATIENCE,
        limits: RateLimits = _NO_LIMITS,
        prices: Prices = _FREE,
        token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        structured: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        identity: str = "",
        use_proxy: bool = False,
    ):
        self._urls = [f"{url.rstrip('/')}/chat/completions" for url in base_urls]
        self._model, self._api_key = model, api_key
        self._patience, self._limits, self._prices = patience, limits, prices
        self._token_limit_field, self._structured = token_limit_field, structured
        self._extra_body = dict(extra_body or {})
        self._use_proxy = use_proxy
        self._identity = identity or json.dumps(
            [model, sorted(self._urls), structured, self._extra_body], sort_keys=True
        )
        self._next_url = 0
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"OpenAIBackend({self._model!r} at {', '.join(self._urls)})"

    @property
    def identity(self) -> str:
        """See `Backend`."""
        return self._identity

    @property
    def structured(self) -> bool:
        """True where JSON schemas go along with requests."""
        return self._structured

    async def close(self) -> None:
        """Close the connections of the running event loop; the next request opens new ones."""
        if (connections := self._loops.pop(asyncio.get_running_loop(), None)) is not None:
            await connections.session.close()

    async def complete(self, request: Request) -> Completion:
        """See `Backend`.

        Raises:
            BackendError: the request is refused; the message names the endpoint.
            BackendUnavailable: no try has brought an answer, or none is made at present.
        """
        connections = self._connections()
        on_trial = await connections.breaker.admit()
        try:
            return await self._complete(connections, request)
        finally:
            if on_trial:
                connections.breaker.end_trial()

    async def ready(self, limit_s: float) -> None:
        """Wait until requests are sent again after a row of failures, if there was one.

        Raises:
            BackendUnavailable: it takes longer than the limit.
        """
        breaker = self._connections().breaker
        wait_s, failure = breaker.wait_s, breaker.last
        await asyncio.sleep(min(wait_s, limit_s))
        if wait_s > limit_s:
            row = f"{self!r} has failed again and again, the last time at {failure}"
            raise BackendUnavailable(f"{row}; no request for {wait_s - limit_s:.1f} s")

    async def _complete(self, connections: _Connections, request: Request) -> Completion:
        body = self._body(request)
        first = self._next_url
        self._next_url = (first + 1) % len(self._urls)  # round robin over requests
        order = self._urls[first:] + self._urls[:first]
        pauses: dict[str, float] = {}  # endpoint -> when this request may go there again
        failure, tries = "", 0
        for tries in range(1 + self._patience.retries):
            url = await self._free_url(order, connections, pauses)
            sent_s = asyncio.get_running_loop().time()
            try:
                completion = await self._try(connections, url, body, request, sent_s)
                connections.breaker.note_success()
                return completion
            except _TryAgain as error:
                failure = f"{url}: {error}"
                now_s = asyncio.get_running_loop().time()
                # Grows after each round of the endpoints.
                pauses[url] = math.inf if error.other_only else now_s + self._retry_s(tries // len(order))
                refused = all(pauses.get(each) == math.inf for each in order)
                if refused or not (error.busy or error.other_only):  # others still answer: no reason to pause all
                    connections.breaker.note_failure(failure, sent_s)
                _log.info("Backend %s, try %d: %s", self._model, tries + 1, failure)
                if refused:
                    raise BackendUnavailable(f"{url} refuses the request with {error}") from error
                if error.after_s is not None:
                    connections.paused_until_s[url] = now_s + error.after_s
                if connections.breaker.wait_s > 0:
                    break
        raise BackendUnavailable(f"no answer after {1 + tries} tries, the last at {failure}")

    async def _free_url(self, order: Sequence[str], connections: _Connections, pauses: Mapping[str, float]) -> str:
        """The first endpoint that may be asked now, or else the first one to be free, once it is."""

        def free_s(url: str) -> float:
            return max(connections.paused_until_s.get(url, 0.0), pauses.get(url, 0.0))

        clock = asyncio.get_running_loop().time
        url = next((url for url in order if free_s(url) <= clock()), None) or min(order, key=free_s)
        wait_s = free_s(url) - clock()
        if wait_s > self._patience.longest_wait_s:
            asked = f"asks to wait {wait_s:.0f} s, more than longest_wait_s ({self._patience.longest_wait_s:g})"
            connections.breaker.note_failure(f"{url}: {asked}", clock())
            raise BackendUnavailable(f"{url} {asked}")
        await asyncio.sleep(max(0.0, wait_s))
        return url

    async def _try(self, connections: _Connections, url: str, body: str, request: Request, sent_s: float) -> Completion:
        async with connections.limiter.grant(prompt_estimate(request.messages) + request.max_new_tokens) as grant:
            status, headers, content = await self._post(connections.session, url, body, request)
            if status != HTTPStatus.OK:
                message = f"HTTP {status}: {self._error_text(content)}"
                if status in _REFUSALS:
                    raise refusal(f"{url} refuses the request with {message}")
                if status not in _RETRIED and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise _TryAgain(message, other_only=True)
                after_s = retry_after_s(headers) if status in _ASKS_TO_WAIT else None
                raise _TryAgain(message, after_s, busy=status == HTTPStatus.TOO_MANY_REQUESTS)
            answer, text, finish_reason = self._read(content)
            usage = usage_of(answer, request.messages, text, self._prices)
            grant.tokens = usage.prompt_tokens + usage.sampled_tokens
            return Completion(text, usage, finish_reason)

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: str, request: Request
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            # A redirect could carry the key elsewhere.
            async with session.post(url, data=body, headers=self._headers(), allow_redirects=False) as response:
                limit_bytes = _ANSWER_BYTES + _BYTES_PER_TOKEN * request.max_new_tokens
                chunks = _at_most(limit_bytes, response.content.iter_any())
                if request.on_text is not None and response.content_type == "text/event-stream":
                    content = await streamed_answer(chunks, request.on_text)
                else:
                    content = b"".join([chunk async for chunk in chunks])
                return response.status, response.headers, content
        except aiohttp.ConnectionTimeoutError as error:
            remedy = "see that the endpoint is up and can be reached from here, or raise connect_timeout_s"
            raise _TryAgain(f"no connection within {self._patience.connect_timeout_s:g} s: {remedy}") from error
        except TimeoutError as error:
            remedy = "raise timeout_s if its answers take longer"
            raise _TryAgain(f"no answer within {self._patience.timeout_s:g} s: {remedy}") from error
        except aiohttp.ClientError as error:
            raise _TryAgain(self._redacted(f"{type(error).__name__}: {error}")) from error

    def _read(self, content: bytes) -> tuple[Mapping[str, Any], str, str]:
        """The answer, its text and why it ended. One that is no chat completion is worth another try."""
        try:
            answer = json.loads(content)
            choice = answer["choices"][0]
            message, finish_reason = choice["message"], choice.get("finish_reason")
            text = message.get("content") or message.get("refusal") or ""
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _TryAgain(f"not a chat completion: {self._error_text(content)}") from error
        if not isinstance(text, str):
            raise _TryAgain(f"content that is no text: {self._error_text(content)}")
        return answer, text, finish_reason if isinstance(finish_reason, str) else "stop"

    def _body(self, request: Request) -> str:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            self._token_limit_field: request.max_new_tokens,
        }
        if request.schema is not None and self._structured:
            schema = {"name": "answer", "strict": True, "schema": request.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if request.on_text is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({name: value for name, value in (body | self._extra_body).items() if value is not None})

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        return {"Content-Type": "application/json", **key}

    def _error_text(self, content: bytes) -> str:
        """The endpoint's own words, shortened."""
        text = content.decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        return self._redacted(" ".join(text.split()))[:_ERROR_CHARACTERS] or "(nothing)"

    def _redacted(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    def _retry_s(self, rounds: int) -> float:
        """Exponential back-off with jitter."""
        longest_s = min(self._patience.first_retry_s * 2.0 ** min(rounds, 60), self._patience.last_retry_s)
        return longest_s * random.uniform(0.5, 1.0)

    def _connections(self) -> _Connections:
        """One session for all requests of an event loop, so that connections are kept open."""
        loop = asyncio.get_running_loop()
        if (connections := self._loops.get(loop)) is None:
            timeout = aiohttp.ClientTimeout(self._patience.timeout_s, sock_connect=self._patience.connect_timeout_s)
            connector = aiohttp.TCPConnector(limit=0)  # no limit (aiohttp's default is 100): `Limiter` has ours
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=self._use_proxy)
            connections = self._loops[loop] = _Connections(session, Limiter(self._limits), Breaker(self._patience))
        return connections


async def _at_most(limit_bytes: int, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        if (limit_bytes := limit_bytes - len(chunk)) < 0:
            raise _TryAgain("an answer that goes on beyond what max_new_tokens allows")
        yield chunk


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Pause that a `Retry-After` header asks for (seconds or a date, RFC 9110 10.2.3), None if it cannot be read."""
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds else None  # nan, which `float` reads, is not equal to itself
