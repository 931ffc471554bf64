"""A pool of real vLLMs of which one is slow: python -m tests.benchmarks.unequal_engines [--engines=2] [--slower=4]

Engines of a nano model, the last of them stopped and continued (SIGSTOP, SIGCONT) so that it has one part in `--slower`
of the time. Groups of conversations take turn after turn, each turn behind the tokens before it. Prints a row for each
of: each engine alone, the fast ones together, all with equal shares of the calls, all with shares by what a token takes
(`flowjax.rollout.engines.share_calls`). A row has tokens per second, these over the sum of what engines do alone, the
median and the longest time that a turn of a group took (its slowest call), and the latter over that of the fast ones.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import asyncio
import contextlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from flowjax.config import default_config
from flowjax.models.nano import create_nano
from flowjax.rollout import engines as engines_module
from flowjax.rollout.client import EngineClient, SamplingOptions
from flowjax.rollout.engines import EnginePool
from flowjax.run import resolve
from tests.benchmarks.runs import beside, serving

_ENGINES = flags.DEFINE_integer("engines", 2, "Engines, the last of them slow.", lower_bound=2)
_SLOWER = flags.DEFINE_float("slower", 4.0, "How many times slower it is.", lower_bound=1.0)
_GROUPS = flags.DEFINE_integer("groups", 16, "Groups of four conversations, shared out among engines alone.")
_SECONDS = flags.DEFINE_float("seconds", 40.0, "Of each row, after a quarter of it that is not counted.")
_MODEL = "base"
_GROUP_SIZE, _TURNS, _PROMPT_TOKENS, _REPLY_TOKENS = 4, 4, 32, 48
_PERIOD_S = 0.04


@dataclass(frozen=True)
class Row:
    tokens_per_s: float
    median_s: float
    slowest_s: float


def slowed(process: subprocess.Popen, times: float) -> contextlib.AbstractContextManager[None]:
    """The process and its children run for one part in `times` of each 40 ms."""

    def alternate(ended: threading.Event) -> None:
        while not ended.is_set():
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(_PERIOD_S * (1 - 1 / times))
            os.killpg(process.pid, signal.SIGCONT)
            time.sleep(_PERIOD_S / times)

    return beside(alternate)


async def measure(urls: Sequence[str], groups: int) -> Row:
    """Conversations of so many groups with engines at these addresses."""
    ends_s = time.monotonic() + 1.25 * _SECONDS.value
    counts_s = ends_s - _SECONDS.value
    rng = np.random.default_rng(0)
    tokens, took_s = 0.0, []
    sampling = SamplingOptions(1.0, _REPLY_TOKENS)

    async def group(pool: EnginePool, number: int) -> None:
        nonlocal tokens
        for episode in range(10_000):
            begun = rng.integers(3, 40, _PROMPT_TOKENS).tolist()
            conversations = [list(begun) for _ in range(_GROUP_SIZE)]
            for _ in range(_TURNS):
                began_s = time.monotonic()
                key = f"{number}-{episode}"
                calls = [pool.generate(_MODEL, ids, sampling, group=key) for ids in conversations]
                replies = await asyncio.gather(*calls)
                now_s = time.monotonic()
                # A turn's tokens are spread over its time, of which the part within the window counts.
                within_s = max(0.0, min(now_s, ends_s) - max(began_s, counts_s))
                tokens += sum(len(reply.sampled_ids) for reply in replies) * within_s / (now_s - began_s)
                if within_s:
                    took_s.append(now_s - began_s)
                if now_s > ends_s:
                    return
                for ids, reply in zip(conversations, replies, strict=True):
                    ids += reply.sampled_ids

    clients = [EngineClient(url, patient=False) for url in urls]
    async with EnginePool(clients) as pool:
        for member in pool.members:
            await member.models()
        await asyncio.gather(*(group(pool, number) for number in range(groups)))
    return Row(tokens / _SECONDS.value, float(np.median(took_s)), max(took_s))


def _shared_equally(*_: object) -> None:
    """In place of `share_calls`: every engine keeps its share."""


def compare(urls: Sequence[str]) -> None:
    alone = [asyncio.run(measure([url], _GROUPS.value // len(urls))) for url in urls]
    fast = asyncio.run(measure(urls[:-1], _GROUPS.value * (len(urls) - 1) // len(urls)))
    whole = sum(row.tokens_per_s for row in alone)
    by_pace = asyncio.run(measure(urls, _GROUPS.value))
    engines_module.share_calls, kept = _shared_equally, engines_module.share_calls
    equally = asyncio.run(measure(urls, _GROUPS.value))
    engines_module.share_calls = kept
    print("| engines | tokens/s | of the sum | a group's turn, median s | slowest, s | over the fast ones' |")
    print("|---|---|---|---|---|---|")
    rows = [*((f"number {number} alone", row) for number, row in enumerate(alone)), ("the fast ones", fast)]
    rows += [("all, equal shares", equally), ("all, shares by pace", by_pace)]
    for name, row in rows:
        print(
            f"| {name} | {row.tokens_per_s:.0f} | {row.tokens_per_s / whole:.2f} | {row.median_s:.2f} "
            f"| {row.slowest_s:.2f} | {row.slowest_s / fast.slowest_s:.2f} |"
        )


def main(argv: Sequence[str]) -> None:
    del argv
    if _GROUPS.value < _ENGINES.value:
        raise SystemExit(f"--groups is {_GROUPS.value}: give at least one for each of --engines={_ENGINES.value}")
    with tempfile.TemporaryDirectory() as folder:
        config = default_config()
        config.model.path = f"{folder}/base"
        config.engine.update({"max_model_tokens": 512, "dtype": "float32", "replicas": _ENGINES.value})
        config.engine.kv_cache_bytes = 256 * 1024**2
        create_nano([f"word{index}" for index in range(60)], config.model.path, key=jax.random.key(0))
        run = resolve(config, Path(folder))
        with serving(run, run.bases[_MODEL].engines) as served, slowed(served[-1].process, _SLOWER.value):
            compare([each.url for each in served])


if __name__ == "__main__":
    app.run(main)
