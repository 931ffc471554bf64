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
from flowjax.envs.base import ENGINES_VARIABLE, RUN_VARIABLE, WorldError

# An engine that restarts comes back at the same address: requests wait for it as long as the world lets them.
_PATIENT = {"timeout_s": 600.0, "retries": 10_000, "last_retry_s": 5.0, "failures_in_a_row": 1_000_000}
_NOWHERE = "http://127.0.0.1:9/v1"  # outside a run, such as while its config is checked: nobody listens at `discard`
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
    asked = json.dumps({name: dict(given) for name, given in config.items()}, sort_keys=True)
    return _opened(asked, run_folder(), os.environ.get(ENGINES_VARIABLE, ""))


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


def _of_run(name: str, options: dict[str, Any], run: str, urls: Mapping[str, list[str]]) -> dict[str, Any]:
    """Options of kind "run" as those of an endpoint: all replicas of the base model that they name."""
    if options.get("kind") != "run":
        return options
    given = {option: value for option, value in options.items() if option not in ("kind", "base")}
    if known := [option for option in ("base_url", "model", "identity") if option in given]:
        raise WorldError(
            f"env.options backends.{name}.{known[0]}: a backend of kind run has address and model from the run: leave "
            "it out, or give kind openai"
        )
    base = options.get("base", "base")
    addresses = [f"{url}/v1" for url in urls.get(base, ())] or [_NOWHERE]
    return {
        "kind": "openai",
        "base_url": addresses,
        "model": base,
        "identity": f"{base} of the run {run}",  # which has the same weights also after a restart
        **_PATIENT,
        **given,
    }


@functools.lru_cache(maxsize=8)
def _opened(config: str, run: str, engines: str) -> Mapping[str, Backend]:
    urls = json.loads(engines) if engines else {}
    given = {name: _of_run(name, options, run, urls) for name, options in json.loads(config).items()}
    try:
        backends = backends_from_config(given)
    except BackendConfigError as error:
        raise WorldError(f"env.options {error}") from error
    if not any(isinstance(backend, OpenAIBackend) for backend in backends.values()):
        return backends
    cache = Cache(path=Path(run) / _CACHE_FILE if run else None)
    return {
        name: RememberingBackend(backend, cache) if isinstance(backend, OpenAIBackend) else backend
        for name, backend in backends.items()
    }
