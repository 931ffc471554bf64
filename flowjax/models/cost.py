"""Costs of a training run in plain arithmetic: device memory, which `--dry_run` prints before anything is allocated,
and floating-point operations of a step, beside what a device can do."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from flowjax.models.attention import default_block_tokens
from flowjax.models.lora import Lora, adapter_specs
from flowjax.models.params import matrix_sizes, owners
from flowjax.models.quantize import saved_bytes
from flowjax.models.shape import ModelConfig
from flowjax.records import TokenRow

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
    remat: Literal["none", "dots", "layer"] = "layer",
    quantize: str = "",
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    sequence: int = 1,
) -> dict[str, int]:
    """Bytes per device by purpose, under the default sharding rules.

    Args:
        rows: rows of one forward-backward pass, over all devices.
        tokens: tokens per row.
        chunk: tokens whose full-vocabulary logits exist at once.
        quantize: how the base's matrices are stored (`models.quantize`).
        data, fsdp, tensor, expert, sequence: sizes of the mesh.

    Activations count what the backward pass keeps: one hidden state per layer with remat, all inputs of linear maps
    without (and with "dots", which keeps fewer), one layer's gradients and one block's attention weights. XLA's own
    temporaries add to it: allow 20 %. Weights that are trained themselves are kept in float32.
    """
    size = DTYPE_BYTES[dtype]
    shards = fsdp * tensor * expert * sequence
    local_rows, local_tokens = math.ceil(rows / (data * fsdp * expert)), math.ceil(tokens / sequence)
    adapter = (
        0
        if lora is None
        else sum(math.prod(s.shape) for ab in adapter_specs(config, lora).values() for s in ab.values())
    )
    trained = (adapter if lora else config.parameter_count()) if train else 0
    kept = local_rows * local_tokens * config.hidden_size * size
    working = _layer_bytes(config, local_rows, local_tokens, size, tensor, expert)
    block = min(local_tokens, default_block_tokens(local_tokens))
    scores = local_rows * math.ceil(config.heads / tensor) * block * tokens * (FLOAT32 + size)
    layers = config.layers if train else 1
    held = layers if train and remat != "layer" else 1  # layers whose inner values exist at once
    activations = kept * layers + working * (held + train)  # while training, the gradients of one layer's values too
    activations += scores * (1 + train)
    chunk_tokens = min(chunk, rows * tokens) / (data * fsdp * expert * sequence)
    return {
        "base": math.ceil(config.parameter_count() / shards) * size - saved_bytes(config, quantize, size) // shards,
        "float32_weights": 0 if lora or not train or size == FLOAT32 else math.ceil(trained / shards) * FLOAT32,
        "gathered_layer": _gathered_bytes(config, size, shards // tensor, tensor, expert),
        "adapter": math.ceil(adapter / shards) * FLOAT32,
        "gradients": math.ceil(trained / shards) * FLOAT32,
        "moments": 2 * math.ceil(trained / shards) * FLOAT32,
        "activations": activations,
        "logprob_chunk": math.ceil(chunk_tokens * config.vocab_size / tensor) * FLOAT32 * (3 if train else 2),
    }


def _layer_bytes(config: ModelConfig, rows: int, tokens: int, size: int, tensor: int, expert: int) -> int:
    """Bytes that one layer's forward pass holds for its backward pass."""
    attention = 3 * config.query_size + 2 * config.kv_size
    ffn = 3 * config.ffn_size if config.dense_layers else 0
    if experts := config.experts:  # every device has the tokens of its neighbours along `expert`, once per choice
        sparse = expert * experts.per_token * (3 * experts.ffn_size + 2 * config.hidden_size * tensor)
        ffn = max(ffn, sparse)
    return rows * tokens * (math.ceil((attention + ffn) / tensor) + 4 * config.hidden_size) * size


def _gathered_bytes(config: ModelConfig, size: int, ways: int, tensor: int, expert: int) -> int:
    """One layer and the head, collected over the axes that split the hidden size while in use."""
    if ways == 1:
        return 0
    ffn = 3 * config.hidden_size * config.ffn_size if config.dense_layers else 0
    if experts := config.experts:
        ffn = max(ffn, 3 * config.hidden_size * experts.ffn_size * experts.count // expert)
    layer = 2 * config.hidden_size * (config.query_size + config.kv_size) + ffn
    return math.ceil((layer + config.vocab_size * config.hidden_size) / tensor) * size


# ----------------------------------------------------------------------------------------------------------- operations

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets; the first name found in the device's kind counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5": 197e12,
    "TPU v4": 275e12,
}


def step_flops(model: ModelConfig, lora: Lora | None, rows: Sequence[TokenRow]) -> float:
    """Model FLOPs of one forward and backward pass over the rows: no recomputation, no padding, causal attention.

    A product of [n, in] with [in, out] is 2 n in out. The backward pass costs the same again for the gradient of the
    input, and once more for that of the weight where it is trained. Attention counts the pairs that are seen; the head
    only the sampled tokens, which are all that meet it.
    """
    lengths = np.array([len(row.tokens) for row in rows], np.float64)
    sampled = float(sum(int(row.sampled.sum()) for row in rows))
    tokens = lengths.sum()
    per_base = 2 if lora else 3  # passes over a base matrix
    base = per_base * 2 * tokens * _weights_per_token(model)
    head = per_base * 2 * sampled * model.hidden_size * model.vocab_size
    attention = 3 * sum(4 * model.query_size * _pairs(lengths, model.window(layer)) for layer in range(model.layers))
    return base + head + attention + (3 * 2 * tokens * _adapter_weights(model, lora) if lora else 0.0)


def _weights_per_token(model: ModelConfig) -> float:
    """Weights of the linear maps that one token goes through."""
    dense = sum(size_in * size_out * len(owners(name, model)) for name, ((size_in, _), (size_out, _)) in _maps(model))
    if model.experts is None:
        return dense
    experts = model.experts
    return dense + len(model.sparse_layers) * model.hidden_size * (
        experts.count + 3 * experts.per_token * experts.ffn_size
    )


def _adapter_weights(model: ModelConfig, lora: Lora) -> float:
    sizes = dict(_maps(model))
    return sum(
        lora.rank * (sizes[target][0][0] + sizes[target][1][0]) * len(owners(target, model)) for target in lora.targets
    )


def _maps(model: ModelConfig):
    return matrix_sizes(model).items()


def _pairs(lengths: np.ndarray, window_tokens: int | None) -> float:
    """Pairs (query, key) of causal attention: t keys for the t-th token, at most the window."""
    within = lengths if window_tokens is None else np.minimum(lengths, window_tokens)
    return float((within * (within + 1) / 2 + (lengths - within) * within).sum())


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or None where it is not known (every CPU)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device_kind.lower()), None)
