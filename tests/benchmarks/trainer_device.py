"""A LoRA policy-gradient step of Qwen3 shapes on the accelerator that jax sees, with random weights.

    python -m tests.benchmarks.trainer --device [--shapes qwen3-1.7b,qwen3-8b] [--tokens 4096,16384] [--steps 3]
        [--remats dots,layer] [--attention auto] [--trace FOLDER]

Rank 64 on all seven linear maps, or on those of attention where there are experts; bfloat16, AdamW; one row of so many
tokens, packed with sequences of at most 2,048, half of each prompt. Every measurement is a process of its own (memory
is counted from its start), with the first of `--remats` that fits. It needs no peers. With `--trace`, a profile of one
more step is left in the folder, for TensorBoard's or Perfetto's viewer.

MFU is `flowjax.models.cost.step_flops` (no recomputation, causal attention within each sequence, head at sampled
tokens) over step time and the device's dense bfloat16 peak. "plan" is `flowjax.models.cost.estimate` over the peak
of memory.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from flowjax.models.shape import Experts

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {"hidden_size": 2048, "layers": 28, "heads": 16, "ffn_size": 6144, "tie_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "layers": 36, "heads": 32, "ffn_size": 12288, "tie_embeddings": False},
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "layers": 48,
        "heads": 32,
        "kv_heads": 4,
        "ffn_size": 6144,
        "tie_embeddings": False,
        "experts": Experts(count=128, per_token=8, ffn_size=768),
    },
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_size": 128, "vocab_size": 512},
    "tiny-moe": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_size": 128, "vocab_size": 512}
    | {"experts": Experts(count=4, per_token=2, ffn_size=64)},
}
_COMMON: dict[str, Any] = {"vocab_size": 151936, "kv_heads": 8, "head_dim": 128}
REMATS = ("none", "dots", "layer")
LONGEST_SEQUENCE_TOKENS = 2048
RANK = 64
OUT_OF_MEMORY = 3  # exit status


@dataclasses.dataclass(frozen=True)
class Options:
    """What is the same in every measurement."""

    steps: int = 3
    remats: tuple[str, ...] = ("dots", "layer")  # the first that fits
    attention: str = "auto"
    trace: str = ""


def time_shapes(shapes: list[str], token_counts: list[int], options: Options) -> None:
    """Print a table in Markdown, one line for each shape and number of tokens."""
    for flag, given, known in (("shapes", shapes, SHAPES), ("remats", options.remats, REMATS)):
        if unknown := [name for name in given if name not in known]:
            raise SystemExit(f"--{flag}: {', '.join(unknown)} is none of {', '.join(known)}")
    columns = "shape, packed tokens, device, remat, attention, step, tokens/s, MFU, peak memory, plan, compilation"
    print(f"| {columns.replace(', ', ' | ')} |\n{'|---' * len(columns.split(', '))}|")
    for shape in shapes:
        for tokens in token_counts:
            found = _measure(shape, tokens, options)
            if found is None:
                print(f"| {shape} | {tokens:,} | out of memory with every remat |", flush=True)
                continue
            utilisation = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
            print(
                f"| {shape} | {tokens:,} | {found['device']} | {found['remat']} | {found['attention']} "
                f"| {found['step_s']:.3f} s ({found['least_s']:.3f} to {found['most_s']:.3f}) "
                f"| {tokens / found['step_s']:,.0f} | {utilisation} | {found['peak_bytes'] / 2**30:.1f} GiB "
                f"| {found['plan_bytes'] / found['peak_bytes']:.2f} x | {found['compile_s']:.0f} s |",
                flush=True,
            )


def _measure(shape: str, tokens: int, options: Options) -> dict[str, Any] | None:
    for remat in options.remats:
        given = json.dumps({"shape": shape, "tokens": tokens, "remat": remat, "options": dataclasses.asdict(options)})
        command = [sys.executable, "-m", "tests.benchmarks.trainer_device", given]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=dict(os.environ))
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        if done.returncode != OUT_OF_MEMORY:
            raise SystemExit(f"{' '.join(command[1:])} ended with status {done.returncode}: its messages stand above")
    return None


def sequence_rows(tokens: int, vocab_size: int) -> list[Any]:
    """Sequences that fill one row exactly: as many of the longest as fit, and one for the rest."""
    import numpy as np

    from flowjax.records import TokenRow

    rng = np.random.default_rng(0)
    lengths = [LONGEST_SEQUENCE_TOKENS] * (tokens // LONGEST_SEQUENCE_TOKENS) + [tokens % LONGEST_SEQUENCE_TOKENS]
    made = []
    for length in filter(None, lengths):
        sampled = np.arange(length) >= length // 2
        logprobs = (sampled * rng.normal(-np.log(vocab_size), 0.1, length)).astype(np.float32)
        ids = rng.integers(0, vocab_size, length).astype(np.int32)
        made.append(TokenRow("agent", ids, sampled, logprobs, (sampled * rng.normal()).astype(np.float32), sampled - 1))
    return made


def time_step(shape: str, tokens: int, remat: Any, options: Options) -> dict[str, Any]:
    """Median time of a step, its utilisation of the device, and the most memory held."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from flowjax.losses.policy import LossOptions
    from flowjax.models.attention import choose_attention
    from flowjax.models.cost import estimate, peak_flops, step_flops
    from flowjax.models.decoder import Decoder
    from flowjax.models.lora import ALL_TARGETS, Lora, LoraParam
    from flowjax.models.params import ATTENTION
    from flowjax.models.shape import ModelConfig
    from flowjax.trainer.batch import pack
    from flowjax.trainer.log import memory_metrics
    from flowjax.trainer.update import Objective, PolicyState, apply, gradient_of

    config = ModelConfig(**{**_COMMON, **SHAPES[shape]})
    # Adapters of every expert and their moments would be larger than the rest of what is trained here.
    lora = Lora(rank=RANK, alpha=float(RANK), targets=ATTENTION if config.experts else ALL_TARGETS)
    given: dict[str, Any] = {"dtype": jnp.bfloat16, "remat": remat, "attention": options.attention}
    model = Decoder(config, lora=lora, key=jax.random.key(0), **given)
    graph, trained, frozen = nnx.split(model, LoraParam, ...)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.0))
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(trained))
    objective = Objective(graph, dtypes, kind="ppo", options=LossOptions(clip_low=0.2, clip_high=0.28))
    rows = sequence_rows(tokens, config.vocab_size)
    batches = [jax.device_put(batch) for batch in pack(rows, row_tokens=tokens, micro_batch_rows=1)]
    state = PolicyState(0, trained, optimizer.init(trained), frozen)
    metrics: dict[str, Any] = {}

    def step() -> float:
        nonlocal state, metrics
        started_s = time.perf_counter()
        total = None
        for batch in batches:
            total, _ = gradient_of(objective, state, batch, total=total)
        assert total is not None
        state, metrics = apply(optimizer, state, total)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - started_s

    seconds = [step() for _ in range(options.steps + 2)]  # the first compiles, the second settles
    if options.trace:
        with jax.profiler.trace(options.trace):
            step()
    device = jax.devices()[0]
    step_s, peak = statistics.median(seconds[2:]), peak_flops(device.device_kind)
    held = memory_metrics()
    sizes: dict[str, Any] = {"rows": 1, "tokens": tokens, "chunk": objective.chunk_tokens, "remat": remat}
    return {
        "device": device.device_kind,
        "remat": remat,
        "attention": choose_attention(options.attention, config, device=device, tokens=tokens, dtype=jnp.bfloat16),
        "step_s": step_s,
        "least_s": min(seconds[2:]),
        "most_s": max(seconds[2:]),
        "compile_s": seconds[0] - step_s,
        "mfu": None if peak is None else step_flops(config, lora, rows) / step_s / peak,
        "peak_bytes": held.get("device_peak_bytes", held["host_peak_bytes"]),
        "plan_bytes": sum(estimate(config, lora, **sizes).values()),
        "loss": float(metrics["loss"]),
        "config": dataclasses.asdict(config),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    given["options"] = Options(**given["options"])
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    try:
        print(json.dumps(time_step(**given)))
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        print(f"{given['shape']}, {given['tokens']} tokens, remat {given['remat']}: out of memory", file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
