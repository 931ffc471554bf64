"""Executors of the canvas world: backends opened once per process, whose replies all its episodes share."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowjax.canvas.backends.base import Backend, Completion, Prices, Request
from flowjax.canvas.backends.config import BackendConfigError, backends_from_config
from flowjax.canvas.backends.openai import OpenAIBackend
from flowjax.canvas.cache import Cache, Outcome
from flowjax.canvas.values import Usage
from flowjax.envs.base import RUN_VARIABLE, WorldError

_CACHE_FILE = "executor-replies.sqlite"


class RememberingBackend:
    """A backend that is sent no request twice: the rollouts of a group ask much the same.

    A reply from memory states the usage that it took when it was made, so that what an episode is charged does not
    depend on who was first. Sampling and the seed are part of what makes requests equal.
    """

    def __init__(self, backend: OpenAIBackend, cache: Cache):
        self._backend, self._cache = backend, cache

    @property
    def identity(self) -> str:
        return self._backend.identity

    async def ready(self, limit_s: float) -> None:
        """See `OpenAIBackend`."""
        await self._backend.ready(limit_s)

    async def close(self) -> None:
        """See `OpenAIBackend`."""
        await self._backend.close()

    async def complete(self, request: Request) -> Completion:
        """See `Backend`."""

        async def ask() -> Outcome:
            made = await self._backend.complete(request)
            usage = made.usage
            spent = [usage.calls, usage.prompt_tokens, usage.sampled_tokens, usage.cost]
            return Outcome({"text": made.text, "usage": json.dumps(spent), "end": made.finish_reason}, keep=True)

        outcome, _ = await self._cache.through(self._key(request), ask)
        kept = {name: str(value) for name, value in outcome.outputs.items()}
        return Completion(kept["text"], Usage(*json.loads(kept["usage"])), kept["end"])

    def _key(self, request: Request) -> str:
        sampling = [request.temperature, request.top_p, request.max_new_tokens, request.seed]
        messages = [dict(message) for message in request.messages]
        text = json.dumps([self.identity, messages, sampling, request.schema], sort_keys=True)
        return f"reply {hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}"


def open_executors(config: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Backend]:
    """The backends, shared by all environments of this process.

    Replies of endpoints are kept in the run's folder, where the run's other processes find them, or in memory where
    there is no run.

    Raises:
        WorldError: one is configured wrongly.
    """
    return _opened(json.dumps({name: dict(given) for name, given in config.items()}, sort_keys=True), run_folder())


def run_folder() -> str:
    """Of the run that this process belongs to, "" if to none."""
    return os.environ.get(RUN_VARIABLE, "")


def price_list(config: Mapping[str, Mapping[str, Any]], default: str) -> str:
    """The executors and what they cost, a line each; nothing where there is no choice."""
    if len(config) < 2:
        return ""
    lines = []
    for name, given in config.items():
        prices = Prices(**(given.get("prices") or {}))
        cost = f"{prices.prompt:g} read, {prices.sampled:g} written" if prices != Prices() else "free"
        lines.append(f"{name}{' (unless one is named)' if name == default else ''}: {cost}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=8)
def _opened(config: str, run: str) -> Mapping[str, Backend]:
    try:
        backends = backends_from_config(json.loads(config))
    except BackendConfigError as error:
        raise WorldError(f"env.options {error}") from error
    if not any(isinstance(backend, OpenAIBackend) for backend in backends.values()):
        return backends
    cache = Cache(path=Path(run) / _CACHE_FILE if run else None)
    return {
        name: RememberingBackend(backend, cache) if isinstance(backend, OpenAIBackend) else backend
        for name, backend in backends.items()
    }
