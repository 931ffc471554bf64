"""Keeps within an endpoint's rate limits by waiting before a request is sent."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit. They hold for one event loop: divide them by the processes that share an endpoint."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # of prompts and answers together
    concurrency: int | None = None  # requests in flight


@dataclass(slots=True)
class Grant:
    """Leave to send one request. Set `tokens` to what it took once that is known."""

    sent_s: float
    tokens: float


class Limiter:
    """Lets requests through in the order in which they come, no more within any `window_s` than the limits allow."""

    def __init__(self, limits: Limits, window_s: float = 60.0):
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
            async with self._turn:
                while (wait_s := self._wait_s(tokens)) > 0:
                    await asyncio.sleep(wait_s)
                grant = Grant(self._clock(), tokens)
                self._recent.append(grant)
            yield grant

    def _wait_s(self, tokens: float) -> float:
        """How long until the oldest request leaves the window, 0 if there is room. One alone always has room."""
        now_s = self._clock()
        while self._recent and self._recent[0].sent_s + self._window_s <= now_s:
            self._recent.popleft()
        used = sum(grant.tokens for grant in self._recent) if self._tokens < math.inf else 0.0
        if not self._recent or (len(self._recent) + 1 <= self._requests and used + tokens <= self._tokens):
            return 0.0
        return max(self._recent[0].sent_s + self._window_s - now_s, 0.001)


def _or_infinite(limit: float | None) -> float:
    return math.inf if limit is None else limit
