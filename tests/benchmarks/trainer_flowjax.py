"""flowjax's own update, from rows to stepped adapter, for `tests.benchmarks.trainer`."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from flowjax.losses.policy import LossOptions
from flowjax.models.decoder import set_adapter
from flowjax.models.hf import load_decoder
from flowjax.models.lora import ALL_TARGETS, Lora, LoraParam
from flowjax.records import TokenRow
from flowjax.trainer.batch import pack
from flowjax.trainer.log import memory_metrics
from flowjax.trainer.optimizer import make_optimizer
from flowjax.trainer.update import Objective, PolicyState, apply, first_pass, gradient_of
from tests.benchmarks.trainer_case import (
    CLIP,
    CLIP_NORM,
    LEARNING_RATE,
    Case,
    Rows,
    Trainer,
    make_rows,
    read_case,
    serve,
)


def token_rows(case: Case) -> list[TokenRow]:
    """The rows as the dataflow serves them."""
    rows = make_rows(case)
    made = []
    for tokens, behaviour, advantage in zip(rows.tokens, rows.behaviour, rows.advantages, strict=True):
        prompt = Rows.prompt_tokens(len(tokens))
        sampled = np.arange(len(tokens)) >= prompt
        logprobs = np.concatenate([np.zeros(prompt, np.float32), behaviour])
        made.append(TokenRow("agent", tokens, sampled, logprobs, advantage * sampled, np.where(sampled, 0, -1)))
    return made


def stacked(arrays: dict[str, np.ndarray], layers: int) -> dict[str, dict[str, np.ndarray]]:
    """Per-layer arrays as {target: {"a": [layers, in, rank], "b": [layers, rank, out]}}."""
    return {
        target: {part: np.stack([arrays[f"{layer}.{target}.{part}"] for layer in range(layers)]) for part in "ab"}
        for target in ALL_TARGETS
    }


def device_peak_bytes() -> int:
    return int(memory_metrics()["device_peak_bytes"])


def make(folder: Path) -> Trainer:
    case, arrays = read_case(folder)
    lora = Lora(rank=case.rank, alpha=float(case.rank))
    model = load_decoder(folder / "base", lora=lora, dtype=case.dtype, remat="dots")
    set_adapter(model, stacked(arrays, case.layers))
    graph, trained, frozen = nnx.split(model, LoraParam, ...)
    options = {"name": "adamw", "learning_rate": LEARNING_RATE, "betas": (0.9, 0.999), "weight_decay": 0.0}
    schedule = {"schedule": "constant", "warmup_steps": 0, "clip_norm": CLIP_NORM}
    optimizer = make_optimizer(ConfigDict({**options, **schedule}), 1000)
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(trained))
    clip = LossOptions(clip_low=CLIP, clip_high=CLIP)
    objective = Objective(graph, dtypes, kind="ppo", options=clip, chunk_tokens=1024 if case.on_gpu else 256)
    rows = token_rows(case)
    state = PolicyState(0, trained, optimizer.init(trained), frozen)

    def step() -> tuple[float, float]:
        nonlocal state
        total = None
        # On a GPU one row is as long as a forward pass should be; on CPUs short rows save attention its mask.
        size = (case.tokens, 1) if case.on_gpu else (max(case.lengths), len(case.lengths))
        batches = pack(rows, row_tokens=size[0], micro_batch_rows=size[1], trim=True)
        batches = [jax.device_put(batch) for batch in batches]
        for batch, known in zip(batches, first_pass(objective, state, batches, start=None), strict=True):
            total, _ = gradient_of(objective, state, batch, known, total=total)
        assert total is not None
        state, metrics = apply(optimizer, state, total)
        jax.block_until_ready(state)
        return float(metrics["loss"]), float(metrics["gradient_norm"])

    return Trainer(step, device_peak_bytes) if case.on_gpu else Trainer(step)


if __name__ == "__main__":
    serve(make)
