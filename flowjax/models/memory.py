"""Device memory of a training run in plain arithmetic: what `--dry_run` prints before anything is allocated."""

import math
from collections.abc import Mapping
from typing import Literal

from flowjax.models.attention import BLOCK_TOKENS
from flowjax.models.lora import Lora, adapter_specs
from flowjax.models.shape import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32 = 4


def estimate(
    config: ModelConfig,
    lora: Lora | None,
    *,
    rows: int,
    tokens: int,
    chunk: int,
    dtype: str = "bfloat16",
    train: bool = True,
    remat: Literal["none", "layer"] = "layer",
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
) -> dict[str, int]:
    """Bytes per device by purpose, under the default sharding rules.

    Args:
        rows: rows of one forward-backward pass, over all devices.
        tokens: tokens per row.
        chunk: tokens whose full-vocabulary logits exist at once.
        data, fsdp, tensor: sizes of the mesh.

    Activations count what the backward pass keeps: one hidden state per layer with remat, all inputs of linear maps
    and attention weights without, plus one layer's gradients. XLA's own temporaries add to it: allow 20 %.
    """
    size = DTYPE_BYTES[dtype]
    shards = fsdp * tensor
    local_rows = math.ceil(rows / (data * fsdp))
    adapter = (
        0
        if lora is None
        else sum(math.prod(s.shape) for ab in adapter_specs(config, lora).values() for s in ab.values())
    )
    trained = (adapter if lora else config.parameter_count()) if train else 0
    kept = local_rows * tokens * config.hidden_size * size
    working = _layer_bytes(config, local_rows, tokens, size, tensor)
    layers = config.layers if train else 1
    held = layers if train and remat == "none" else 1  # layers whose inner values exist at once
    activations = kept * layers + working * (held + train)  # while training, the gradients of one layer's values too
    chunk_tokens = min(chunk, rows * tokens) / (data * fsdp)
    return {
        "base": math.ceil(config.parameter_count() / shards) * size,
        "gathered_layer": _gathered_bytes(config, size, fsdp, tensor),
        "adapter": math.ceil(adapter / shards) * FLOAT32,
        "gradients": math.ceil(trained / shards) * FLOAT32,
        "moments": 2 * math.ceil(trained / shards) * FLOAT32,
        "activations": activations,
        "logprob_chunk": math.ceil(chunk_tokens * config.vocab_size / tensor) * FLOAT32 * (3 if train else 2),
    }


def _layer_bytes(config: ModelConfig, rows: int, tokens: int, size: int, tensor: int) -> int:
    """What one layer's forward pass holds for its backward pass."""
    wide = 3 * config.ffn_size + 3 * config.query_size + 2 * config.kv_size
    linear = rows * tokens * (math.ceil(wide / tensor) + 4 * config.hidden_size) * size
    scores = rows * math.ceil(config.heads / tensor) * min(tokens, BLOCK_TOKENS) * tokens * (FLOAT32 + size)
    return linear + scores


def _gathered_bytes(config: ModelConfig, size: int, fsdp: int, tensor: int) -> int:
    """One layer and the head, collected over the fsdp axis while in use."""
    if fsdp == 1:
        return 0
    layer = 2 * config.hidden_size * (config.query_size + config.kv_size) + 3 * config.hidden_size * config.ffn_size
    return math.ceil((layer + config.vocab_size * config.hidden_size) / tensor) * size


def total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
