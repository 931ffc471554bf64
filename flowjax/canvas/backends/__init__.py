"""The protocol of backends: requests, completions, prices of tokens; and a backend that answers by rules."""

import asyncio
import hashlib
import itertools
import json
import logging
import math
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowjax.canvas.values import Message, Usage
from flowjax.fields import shown

_log = logging.getLogger(__name__)
_CHARACTERS_PER_TOKEN = 4  # rough; only where an endpoint does not count
_TOKENS_PER_MILLION = 1_000_000
# As OpenAI, vLLM, SGLang, Anthropic, Gemini and TGI say it.
_TOO_LONG = re.compile(
    r"context.{0,8}length|context window|maximum model length"
    r"|(prompt|input).{0,40}(too long|longer than|exceeds the maximum|must have less than)",
    re.IGNORECASE,
)
OnText = Callable[[str], None]


class BackendError(RuntimeError):
    """A request that the backend refuses for its content: the operator's call fails, the run goes on."""


class RequestTooLong(BackendError):
    """A request that is longer than the model's context."""


def refusal(said: str) -> BackendError:
    """The error of a request that a server refuses, by what it says."""
    return RequestTooLong(said) if _TOO_LONG.search(said) else BackendError(said)


class BackendUnavailable(BackendError):
    """A backend that is away, overloaded, wrongly configured or gives invalid replies, whatever the request; or a
    sandbox on a machine that has no processor, memory or process for the program.

    It says nothing about the workflow: the run ends with status "executor_error".
    """


@dataclass(frozen=True, slots=True)
class Request:
    """One chat completion.

    `seed` tells apart calls that are meant to differ (the branches of a parallel, the votes of an ensemble). `tags` say
    what the call is for (`operator`, and the operator's `input.<field>` values as text): endpoints ignore them, offline
    backends choose by them. `schema` is a JSON schema that the answer must follow, where the backend supports one.
    `on_text` is called with the reply so far while it is sampled, by backends that stream; a new try starts from "".
    """

    messages: Sequence[Message]
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0
    schema: Mapping[str, Any] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    on_text: OnText | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """The text, what it cost, and why it ended: "length" where the request's bound cut it."""

    text: str
    usage: Usage
    finish_reason: str = "stop"


class Backend(Protocol):
    """Answers requests. `identity` is part of cache keys: equal exactly where equal requests may share an answer.

    Any exception other than `BackendError` counts as `BackendUnavailable`, and so does a reply that is no `Completion`.
    Call `reply_of`, which checks the reply, and not `complete` itself.
    """

    @property
    def identity(self) -> str: ...

    async def complete(self, request: Request) -> Completion:
        """Raises:
        BackendError: the request is refused.
        BackendUnavailable: it cannot answer at present.
        """
        ...


async def reply_of(backend: Backend, request: Request) -> Completion:
    """The reply of a backend, checked: a user's own class may return anything, or usage that cannot be counted.

    Raises:
        BackendError: the request is refused.
        BackendUnavailable: there is no answer, or an invalid one; the message then names the class and the field.
    """
    completion = await backend.complete(request)
    if fault := _completion_fault(completion):
        raise BackendUnavailable(f"{type(backend).__name__}.complete: {fault}")
    return completion


def _completion_fault(reply: Any) -> str:
    """The field of a reply that cannot be used, its value and the remedy; "" where all can."""
    if not isinstance(reply, Completion):
        return f"the reply is {shown(reply)}: return a flowjax.canvas.backends.Completion"
    if not isinstance(reply.text, str):
        return f'text is {shown(reply.text)}: give a text, "" where the model gives none'
    if not isinstance(reply.usage, Usage):
        return f"usage is {shown(reply.usage)}: give a flowjax.canvas.values.Usage"
    for name in ("prompt_tokens", "sampled_tokens"):
        if not isinstance(value := getattr(reply.usage, name), int) or value < 0:
            return f"usage.{name} is {shown(value)}: give a whole number from 0 on"
    cost = reply.usage.cost
    if not isinstance(cost, int | float) or not 0 <= cost < math.inf:  # refuses nan, too: it compares false
        return f"usage.cost is {shown(cost)}: give a number from 0 on"
    return ""


@dataclass(frozen=True, slots=True)
class Prices:
    """Per million tokens, in any one currency; 0 is free."""

    prompt: float = 0.0
    sampled: float = 0.0

    def cost(self, prompt_tokens: int, sampled_tokens: int) -> float:
        """Cost of these numbers of tokens."""
        return (prompt_tokens * self.prompt + sampled_tokens * self.sampled) / _TOKENS_PER_MILLION


def usage_of(answer: Mapping[str, Any], messages: Sequence[Message], text: str, prices: Prices) -> Usage:
    """The usage that an answer of the chat API states.

    Where an endpoint does not state it, a warning is logged, and tokens are estimated from the length of the texts, so
    that budgets hold there too.
    """
    stated = answer.get("usage")
    stated = stated if isinstance(stated, Mapping) else {}
    prompt_tokens, sampled_tokens = _tokens(stated, "prompt_tokens"), _tokens(stated, "completion_tokens")
    if prompt_tokens is None or sampled_tokens is None:
        _log.warning("The endpoint of model %r does not state its usage: it is estimated", answer.get("model"))
        prompt_tokens, sampled_tokens = prompt_estimate(messages), -(-len(text) // _CHARACTERS_PER_TOKEN)
    return Usage(1, prompt_tokens, sampled_tokens, prices.cost(prompt_tokens, sampled_tokens))


def _tokens(stated: Mapping[str, Any], name: str) -> int | None:
    """Number that an answer states, None where it states none. A negative one is not used: it would refill a budget."""
    tokens = stated.get(name)
    return tokens if isinstance(tokens, int) and tokens >= 0 else None


async def streamed_answer(chunks: AsyncIterable[bytes], on_text: OnText) -> bytes:
    """Join the server-sent events of a stream into one answer of the chat API, as if it had not been streamed.

    An event that cannot be read, or that reports an error, is returned as it is; b"" where the stream breaks off.
    """
    answer: dict[str, Any] = {}
    text, refusal, finish_reason = "", "", None
    async for line in _lines(chunks):
        name, _, data = line.partition(b":")
        if name.strip() != b"data":
            continue  # a comment, sent to keep the connection open, or the empty line between two events
        if data.strip() == b"[DONE]":
            break
        try:
            event = json.loads(data)
            stated = {key: value for key in ("model", "usage") if (value := event.get(key)) is not None}
            choice = choices[0] if (choices := event.get("choices")) else {}
            delta = choice.get("delta") or {}
            text, refusal = text + (delta.get("content") or ""), refusal + (delta.get("refusal") or "")
            finish_reason = choice.get("finish_reason") or finish_reason
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return data
        if event.get("error"):
            return data
        answer |= stated
        if delta.get("content"):
            on_text(text)
    if finish_reason is None:  # broken off: the text so far must not pass for a whole reply
        return b""
    message = {"content": text, "refusal": refusal}
    return json.dumps({**answer, "choices": [{"message": message, "finish_reason": finish_reason}]}).encode()


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Lines of any length: the stream reader's own iteration over lines fails on long ones."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    yield rest


def prompt_estimate(messages: Sequence[Message]) -> int:
    """Rough number of tokens of the messages."""
    return sum(-(-len(message["content"]) // _CHARACTERS_PER_TOKEN) for message in messages)


_FREE = Prices()
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Rule:
    """Answer to requests that meet every condition given here.

    `answer` is a text, several texts to choose from, or a function of the request. With `error`, the request fails.
    """

    answer: str | Sequence[str] | Callable[[Request], str] = ""
    operator: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)  # tag -> its whole value
    text: str = ""  # a regular expression, found somewhere in the messages
    error: str = ""
    delay_s: float = 0.0

    def matches(self, request: Request) -> bool:
        """True if this rule answers the request."""
        return (
            self.operator in ("", request.tags.get("operator"))
            and all(request.tags.get(tag) == value for tag, value in self.tags.items())
            and (not self.text or re.search(self.text, _text(request)) is not None)
        )


class OfflineBackend:
    """The first rule that matches answers: for tests and demonstrations. A request that no rule matches fails.

        OfflineBackend([
            Rule(operator="Verify", tags={"input.answer": "42"}, answer='{"passed": true}'),
            Rule(operator="Custom", answer=("42", "41", "42")),   # which one: by the request's seed and messages
            Rule(text="divide by zero", error="the model is away"),
            Rule(answer=lambda request: request.messages[-1]["content"].upper()),
        ])

    Equal requests get equal answers, in every process. Words are counted as tokens. Rules that are functions cannot be
    compared, so a backend with one shares no cached answers with others, unless `identity` says so.
    """

    def __init__(self, rules: Sequence[Rule], *, seed: int = 0, prices: Prices = _FREE, identity: str = ""):
        self._rules, self._seed, self._prices = tuple(rules), seed, prices
        unlike_others = next(_numbers) if any(callable(rule.answer) for rule in rules) else ""
        self.identity = identity or f"offline {seed} {unlike_others} {self._rules!r}"

    async def complete(self, request: Request) -> Completion:
        """See `Backend`."""
        rule = next((rule for rule in self._rules if rule.matches(request)), None)
        if rule is None:
            operator, text = request.tags.get("operator", "no operator"), _text(request)
            raise BackendError(f"no rule of the offline backend answers {operator}: {text[:100]!r}")
        await asyncio.sleep(rule.delay_s)
        if rule.error:
            raise BackendError(rule.error)
        answer = self._answer(rule, request)
        prompt_tokens, sampled_tokens = len(_text(request).split()), len(answer.split())
        cost = self._prices.cost(prompt_tokens, sampled_tokens)
        return Completion(answer, Usage(1, prompt_tokens, sampled_tokens, cost))

    def _answer(self, rule: Rule, request: Request) -> str:
        if callable(rule.answer):
            return rule.answer(request)
        if isinstance(rule.answer, str):
            return rule.answer
        content = json.dumps([self._seed, request.seed, _text(request)])
        digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
        return rule.answer[int.from_bytes(digest, "big") % len(rule.answer)]


def _text(request: Request) -> str:
    return "\n".join(message["content"] for message in request.messages)
