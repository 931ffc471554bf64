"""Executors and judges of the canvas world, opened once per process.

The rollouts of a group send much the same requests, and run and hand in much the same programs: each is done once.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flowjax.canvas.backends import Backend, Completion, Prices, Request
from flowjax.canvas.backends.config import BackendConfigError, backends_from_config, close_backends
from flowjax.canvas.backends.openai import OpenAIBackend
from flowjax.canvas.cache import Cache, Outcome
from flowjax.canvas.context import Sandbox
from flowjax.canvas.values import Usage
from flowjax.envs import ENGINES_VARIABLE, RUN_VARIABLE, WorldError
from flowjax.grading.code import Suite, Verdict
from flowjax.grading.sandbox import ProgramResult
from flowjax.grading.scoring import Kind, Score, Scorer
from flowjax.records import state_key

# An engine that restarts comes back at the same address: requests wait for it as long as the world lets them.
_PATIENT = {"timeout_s": 600.0, "retries": 10_000, "last_retry_s": 5.0, "failures_in_a_row": 1_000_000}
_NOWHERE = "http://127.0.0.1:9/v1"  # outside a run, as when its config is checked: port 9, where no server listens
_CACHE_FILE = "executor-replies.sqlite"
_KEPT = 20_000
_SEEDS = 1 << 31  # that endpoints take
_results: dict[Any, Any] = {}
_writing = threading.Lock()
_opening = threading.Lock()
_CLOSING_S = 5.0
_Result = TypeVar("_Result")


class RememberingBackend:
    """A backend that gets no request twice: the rollouts of a group send much the same ones.

    A remembered reply states the usage of its first time, so that an episode's cost does not depend on which episode
    was first. Equal requests have equal messages, sampling settings and seeds.
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
            made = await self._backend.complete(_seeded_by_words(request))
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


def _seeded_by_words(request: Request) -> Request:
    """The request with a seed that depends on its messages: with the same seed for all problems, a sampler would draw
    the same random numbers for each, and replies would be correlated."""
    if not request.temperature:
        return request
    words = [message["content"] for message in request.messages]
    return dataclasses.replace(request, seed=state_key(request.seed, *words) % _SEEDS)


def open_executors(config: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Backend]:
    """The backends, shared by all environments of this process.

    Replies of endpoints are kept in the run's folder, where the run's other processes find them, or in memory where
    there is no run.

    Raises:
        WorldError: one is configured wrongly.
    """
    asked = json.dumps({name: dict(given) for name, given in config.items()}, sort_keys=True)
    with _opening:  # environments of a process are made in several threads: one file of replies, opened once
        return _opened(asked, run_folder(), os.environ.get(ENGINES_VARIABLE, ""))


def run_folder() -> str:
    """Folder of the run that this process belongs to, "" outside a run."""
    return os.environ.get(RUN_VARIABLE, "")


def bases_of_run(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The base models of the run that backends name."""
    return [given.get("base", "base") for given in config.values() if given.get("kind") == "run"]


def price_list(config: Mapping[str, Mapping[str, Any]], default: str) -> str:
    """The executors and their prices, a line each; "" where there is only one."""
    if len(config) < 2:
        return ""
    lines = []
    for name, given in config.items():
        prices = Prices(**(given.get("prices") or {}))
        cost = f"{prices.prompt:g} read, {prices.sampled:g} written" if prices != Prices() else "free"
        lines.append(f"{name}{' (unless one is named)' if name == default else ''}: {cost}")
    return "\n".join(lines)


def relative_prices(config: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Prices of sampled tokens, in units of the cheapest executor that is not free; 0 is free."""
    prices = {name: Prices(**(given.get("prices") or {})).sampled for name, given in config.items()}
    cheapest = min((price for price in prices.values() if price), default=1.0)
    return {name: round(price / cheapest) for name, price in prices.items()}


def _of_run(name: str, options: dict[str, Any], run: str, urls: Mapping[str, list[str]]) -> dict[str, Any]:
    """Options of kind "run" as options of an endpoint: all replicas of the base model that they name."""
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
        "identity": f"{base} of the run {run}",  # a base model's weights stay the same in a run, restarts included
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
    if any(isinstance(backend, OpenAIBackend) for backend in backends.values()):
        cache = Cache(path=Path(run) / _CACHE_FILE if run else None)
        backends = {
            name: RememberingBackend(backend, cache) if isinstance(backend, OpenAIBackend) else backend
            for name, backend in backends.items()
        }
    if any(hasattr(backend, "close") for backend in backends.values()):
        _close_at_exit(backends)
    return backends


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop in which all workflows of this process run, in a thread: connections and rate limits belong to one
    loop, and are shared only inside it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="workflows", daemon=True).start()
    return loop


def wait_for(work: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
    """Run a coroutine in the workflows' event loop, from any other thread, and wait for its result.

    Raises:
        TimeoutError: it takes longer; the work is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise


def _close_at_exit(backends: Mapping[str, Backend]) -> None:
    """Close the backends when this process ends. A fault of a user's own harms nothing any more."""

    def close_now() -> None:
        with contextlib.suppress(Exception):
            wait_for(close_backends(backends), _CLOSING_S)

    atexit.register(close_now)


class RememberingSandbox(Sandbox):
    """Runs each program once on each input. Results that a time limit may have cut short are not remembered."""

    def run(self, program: str, stdin: bytes) -> ProgramResult:
        """See `Sandbox`."""
        key = (program, stdin, self.limits, self.packages)
        if (known := _results.get(key)) is not None:
            return known
        result = super().run(program, stdin)
        return _keep(key, result) if result.status in ("ok", "error") else result

    def judge(self, program: str, suite: Suite) -> Verdict:
        """See `Sandbox`."""
        key = (program, repr(suite), self.judge_limits, self.packages)
        if (known := _results.get(key)) is not None:
            return known
        verdict = super().judge(program, suite)
        return verdict if _cut_short(verdict.remarks) else _keep(key, verdict)


def scored(
    answer: str,
    gold: tuple[str, ...] | Suite,
    kind: Kind,
    *,
    allow_none: bool,
    options: dict[str, str],
    packages: tuple[str, ...] = (),
) -> Score:
    """The grade of an answer; a blank one is wrong without grading."""
    if not answer.strip():
        return Score(False, 0.0)
    key = (answer, gold if isinstance(gold, tuple) else repr(gold), kind, tuple(options.items()), packages)
    if (known := _results.get(key)) is not None:
        return known
    score = _scorer(allow_none, packages).score(answer, gold, kind, options=options or None)
    return score if _cut_short((score.remark,)) else _keep(key, score)


@functools.cache
def _scorer(allow_none: bool, packages: tuple[str, ...]) -> Scorer:
    return Scorer(allow_none=allow_none, packages=packages)


def _keep(key: Any, result: Any) -> Any:
    with _writing:
        while len(_results) >= _KEPT:
            del _results[next(iter(_results))]  # the oldest: dicts keep the order of insertion
        _results[key] = result
    return result


def _cut_short(remarks: Iterable[str]) -> bool:
    """True if a time limit, or a grader that did not answer, had a part in the result: it may differ next time."""
    signs = ("time", "too long", "no verdict")  # "took too long" is the judge's remark
    return any(sign in remark for remark in remarks for sign in signs)
