"""A deterministic backend for tests and demonstrations: rules say what is answered to what.

OfflineBackend([
    Rule(operator="Verify", tags={"input.answer": "42"}, answer='{"passed": true}'),
    Rule(operator="Custom", answer=("42", "41", "42")),   # which one: by the request's seed and messages
    Rule(text="divide by zero", error="the model is away"),
    Rule(answer=lambda request: request.messages[-1]["content"].upper()),
])
"""

import asyncio
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flowjax.canvas.backends.base import BackendError, Completion, Prices, Request
from flowjax.canvas.values import Usage

_FREE = Prices()
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Rule:
    """Matches a request if every condition that is given does.

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
    """The first rule that matches answers. A request that no rule matches fails.

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
