"""New weights under replies of a real vLLM: python -m tests.benchmarks.swap [--replies=16] [--tokens=6000] [--swaps=3]

Long replies are streamed from an engine that serves all weights of a nano model, short ones are asked for one after
another beside them, and version after version is loaded. Prints a line in Markdown for each load: seconds that it took,
tokens per second in the second after it began and on average before, and the longest time that a short reply took that
was under way then. Then which versions the long replies are of.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from flowjax.config import default_config
from flowjax.models.hf import load_decoder
from flowjax.models.nano import create_nano
from flowjax.rollout.client import EngineClient, Partial, SamplingOptions, UnknownModel, completion_body, read_event
from flowjax.run import resolve
from flowjax.weights.hand_over import FullHandOver, model_name
from tests.benchmarks.runs import serving

_REPLIES = flags.DEFINE_integer("replies", 16, "Long replies that are under way at once.")
_TOKENS = flags.DEFINE_integer("tokens", 6000, "Tokens of each.")
_SWAPS = flags.DEFINE_integer("swaps", 3, "Versions that are loaded meanwhile.")
PROMPT_TOKENS, BETWEEN_S = 64, 8.0


async def measure(url: str, folder: Path) -> None:
    prompts = np.random.default_rng(0).integers(3, 40, (_REPLIES.value + 1, PROMPT_TOKENS)).tolist()
    partials, came_s = [Partial() for _ in range(_REPLIES.value)], []
    shorts: list[tuple[float, float]] = []  # when each was asked for, and had
    serving = 0

    async def long() -> None:
        body = completion_body("agent@0", SamplingOptions(1.0, _TOKENS.value), prompts[:-1], stream=True)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as response,
        ):
            async for line in response.content:
                for choice in (read_event(line) or {}).get("choices", ()):
                    partial = partials[choice["index"]]
                    held = len(partial.sampled_ids)
                    partial.extend(choice, "agent@0")
                    came_s.extend([time.monotonic()] * (len(partial.sampled_ids) - held))

    async def short() -> None:
        while True:
            asked_s = time.monotonic()
            try:
                await engine.generate(model_name("agent", serving), prompts[-1], SamplingOptions(1.0, 4))
            except UnknownModel:  # the answer to the load is on its way
                await asyncio.sleep(0.001)
            else:
                shorts.append((asked_s, time.monotonic()))

    async with EngineClient(url) as engine:
        await engine.load_weights("agent@0", folder / "agent@0")
        talk, aside = asyncio.create_task(long()), asyncio.create_task(short())
        loads = []
        for version in range(1, _SWAPS.value + 1):
            await asyncio.sleep(BETWEEN_S)
            began_s = time.monotonic()
            await engine.load_weights(model_name("agent", version), folder / model_name("agent", version))
            loads.append((began_s, time.monotonic()))
            serving = version
        await asyncio.sleep(BETWEEN_S)
        if talk.done():
            raise SystemExit("the long replies have ended before the last load: give more --tokens")
        print("| load | s | tokens/s in its first second | before | longest short reply then | median |")
        print("|---|---|---|---|---|---|")
        median_s = float(np.median([had_s - asked_s for asked_s, had_s in shorts]))
        for version, (began_s, ended_s) in enumerate(loads, 1):
            here = sum(began_s <= at_s < began_s + 1 for at_s in came_s)
            before = sum(began_s - 5 <= at_s < began_s for at_s in came_s) / 5
            longest_s = max(had - asked for asked, had in shorts if asked < ended_s and had > began_s)
            cells = (f"{ended_s - began_s:.3f}", f"{here} ({here / before:.0%})", f"{before:.0f}", f"{longest_s:.3f} s")
            print(f"| {version} | {' | '.join(cells)} | {median_s:.3f} s |")
        aside.cancel()
        await talk
    print("\nversions of the long replies:", Counter(tuple(partial.completion().spans) for partial in partials))


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), default_config()
        config.model.path = str(folder / "model")
        config.policy.train, config.engine.dtype = "full", "float32"
        config.engine.max_model_tokens, config.engine.kv_cache_bytes = _TOKENS.value + PROMPT_TOKENS, 2**29
        words = [f"word{index}" for index in range(60)]
        positions = config.engine.max_model_tokens
        create_nano(words, config.model.path, key=jax.random.key(0), max_positions=positions)
        decoder = load_decoder(config.model.path, dtype=jnp.float32)
        state, form = nnx.state(decoder, nnx.Param), FullHandOver(decoder.config, "float32")
        for version in range(_SWAPS.value + 1):
            moved = jax.tree.map(lambda leaf, by=version: leaf * (1 + 0.01 * by), state)
            form.writer(moved)(folder / model_name("agent", version))
        served = sum(path.stat().st_size for path in (folder / "agent@0").glob("*.safetensors"))
        print(f"{served:,} bytes are written by the trainer for a version, and read by an engine\n")
        run = resolve(config, folder)
        with serving(run, run.engines) as (engine,):
            asyncio.run(measure(engine.url, folder))
        for line in (folder / f"{run.engines[0].name}.log").read_text().splitlines():
            if "in which nothing was sampled" in line:
                print(line[line.index("agent@") :])


if __name__ == "__main__":
    app.run(main)
