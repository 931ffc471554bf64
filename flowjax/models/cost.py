"""Costs of a training run in plain arithmetic: device memory, which `--dry_run` prints before anything is allocated,
and floating-point operations of a step, with the peak rates of devices to compare them with."""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.sharding import AbstractMesh

from flowjax.models import params
from flowjax.models.attention import FUSED_FROM_TOKENS, default_block_tokens
from flowjax.models.lora import Lora, adapted, adapter_specs
from flowjax.models.moe import block_shape
from flowjax.models.params import matrix_sizes, owners
from flowjax.models.quantize import saved_bytes
from flowjax.models.shape import ModelConfig
from flowjax.models.sharding import MESH_AXES, Placement, default_rules
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
    remat: Literal["none", "dots", "layer"] = "layer",
    attention: str = "auto",
    quantize: str = "",
    versions: int = 0,
    moments: float = 2.0,
    offload: bool = False,
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
        attention: as in the config; unless it is "xla", 16-bit rows of FUSED_FROM_TOKENS or more are taken to use a
            fused form, which keeps no scores in memory.
        quantize: how the base's matrices are stored (`models.quantize`).
        versions: of the trained weights that are kept beside the newest, to compare log-probabilities with.
        moments: values that the optimiser keeps for each trained one; AdamW's are two.
        offload: these are on the host between updates, so that the device has room for passes or for them.
        data, fsdp, tensor, expert, sequence: sizes of the mesh.

    Arrays are counted as they are laid out. `activations` are kept of all layers for the backward pass; `working` is
    the greater of what it holds at once at the head and in one layer. Weights that are trained themselves are kept in
    float32. docs/benchmarks/accelerators.md compares this with XLA's own count for GPUs and TPUs. Of adapters on
    experts under remat "none", about half of the activations are counted (seen on CPUs; with "dots" and "layer" all
    are).
    """
    size = DTYPE_BYTES[dtype]
    mesh = AbstractMesh((data, fsdp, expert, sequence, tensor), MESH_AXES)
    placement = Placement(mesh, default_rules(config, mesh))
    shards = fsdp * tensor * expert * sequence
    specs = {**params.outer_specs(config, dtype), **params.layer_specs(config, dtype)}
    base = _local(specs.values(), placement)
    adapter = 0
    if lora is not None:
        adapter = _local((spec for ab in adapter_specs(config, lora).values() for spec in ab.values()), placement)
    trained = FLOAT32 * (adapter if lora else base)
    part = _DevicePart(math.ceil(rows / (data * fsdp * expert)), math.ceil(tokens / sequence), size, tensor, expert)
    chunk_tokens = min(chunk, rows * tokens) / (data * fsdp * expert * sequence)
    logits = math.ceil(chunk_tokens * config.vocab_size / tensor) * FLOAT32
    # Embedding and head, gathered over the devices or laid out anew for their products.
    tables = 2 * config.vocab_size * math.ceil(config.hidden_size / tensor) * size
    head = tables + 2 * logits + 4 * part.values * config.hidden_size * size
    layer = _backward_bytes(config, part) + _gathered_bytes(config, size, shards // tensor, tensor, expert) + trained
    if sequence > 1:  # a row's sampled hidden states for other devices; all of its keys, values and their gradients
        head += sequence * part.values * config.hidden_size * size
        layer += 4 * part.rows * tokens * math.ceil(config.kv_size / tensor) * size
    if attention == "xla" or size == FLOAT32 or tokens < FUSED_FROM_TOKENS:
        block = min(part.tokens, default_block_tokens(part.tokens))
        layer += 2 * part.rows * math.ceil(config.heads / tensor) * block * tokens * (FLOAT32 + size)
    activations = config.layers * _kept_bytes(config, part, remat)
    working = max(head, layer) + _turned_bytes(config, size, shards, shards // tensor)
    kept = math.ceil(moments * trained)
    return {
        "base": base * size - saved_bytes(config, quantize, size) // shards,
        "float32_weights": 0 if lora or size == FLOAT32 else trained,
        "adapter": FLOAT32 * adapter,
        "gradients": trained,
        "moments": max(kept - activations - working, 0) if offload else kept,
        "versions": versions * trained,
        "activations": activations,
        "working": working,
    }


def served_bytes(config: ModelConfig, dtype: str, quantize: str = "") -> int:
    """Bytes of the weights on an engine: in `dtype`, except matrices in 8 bits; with fp8, experts are among these."""
    size = DTYPE_BYTES.get(dtype, 2)
    saved = saved_bytes(config, "int8" if quantize else "", size)
    if quantize == "fp8" and (experts := config.experts):  # three maps of each
        values = 3 * experts.count * experts.ffn_size * config.hidden_size
        saved += len(config.sparse_layers) * values * (size - 1)
    return config.parameter_count() * size - saved


def adapter_slot_bytes(config: ModelConfig, lora: Lora, *, tensor: int, dtype: str) -> int:
    """Bytes that one adapter takes on each of an engine's `tensor` GPUs: of A and B, vLLM splits the one on the side
    where the map itself is split, and keeps the other whole."""
    values = 0
    for name, parts in adapter_specs(config, lora).items():
        split = "a" if name.endswith(("o_proj", "down_proj")) else "b"
        for part, spec in parts.items():
            values += math.prod(spec.shape) // (tensor if part == split else 1)
    return values * DTYPE_BYTES.get(dtype, 2)


@dataclass(frozen=True)
class _DevicePart:
    """A device's part of a micro-batch."""

    rows: int
    tokens: int
    size: int  # bytes of a value
    tensor: int
    expert: int

    @property
    def values(self) -> int:
        return self.rows * self.tokens


def _local(specs: Iterable[params.ParamSpec], placement: Placement) -> int:
    """Number of parameter values that one device holds."""
    ways = functools.cache(placement.ways)
    return sum(
        math.prod(
            math.ceil(size / (1 if axis is None else ways(axis)))
            for size, axis in zip(spec.shape, spec.axes, strict=True)
        )
        for spec in specs
    )


def _kept_bytes(config: ModelConfig, part: _DevicePart, remat: str) -> int:
    """Bytes that one layer keeps until the backward pass comes to it."""
    query, kv, hidden = config.query_size, config.kv_size, config.hidden_size
    if remat == "layer":
        return part.values * hidden * part.size
    ffn = config.ffn_size if config.dense_layers else 0
    if remat == "dots":  # split: queries and mixed values, keys and values, the results of gate and up
        split, whole = 2 * query + 2 * kv + 2 * ffn, 2 * hidden
    else:  # norms and rotations leave float32 values as well
        wide = FLOAT32 // part.size
        split, whole = wide * (3 * query + 2 * kv) + 4 * ffn, 6 * wide * hidden
    dense = part.values * (math.ceil(split / part.tensor) + whole)
    sparse = _sparse_values(config, part, 2, 0) if remat == "dots" else _sparse_values(config, part, 4, 1)
    return (dense + sparse) * part.size


def _backward_bytes(config: ModelConfig, part: _DevicePart) -> int:
    """Bytes held at once in the backward pass of one layer, which begins with its forward pass again."""
    ffn = config.ffn_size if config.dense_layers else 0
    split = 2 * config.query_size + 2 * config.kv_size + 5 * ffn
    dense = part.values * (math.ceil(split / part.tensor) + 5 * config.hidden_size)
    return (dense + 2 * _sparse_values(config, part, 4, 1)) * part.size


def _sparse_values(config: ModelConfig, part: _DevicePart, inner: int, outer: int) -> int:
    """Values in the rows of chosen experts: `inner` times an expert's inner size and `outer` times the hidden size."""
    if (experts := config.experts) is None:
        return 0
    # Every device has the tokens of its neighbours along `expert`, once per choice.
    choices = part.expert * part.values * experts.per_token
    blocks, block_rows = block_shape(choices, experts.count, experts.count // part.expert)
    return blocks * block_rows * (math.ceil(inner * experts.ffn_size / part.tensor) + outer * config.hidden_size)


def _gathered_bytes(config: ModelConfig, size: int, ways: int, tensor: int, expert: int) -> int:
    """Bytes of one layer's maps while in use: gathered over the axes that split the hidden size."""
    if ways == 1:
        return 0
    ffn = 3 * config.hidden_size * config.ffn_size if config.dense_layers else 0
    if experts := config.experts:
        ffn = max(ffn, 3 * config.hidden_size * experts.ffn_size * experts.count // expert)
    return math.ceil((2 * config.hidden_size * (config.query_size + config.kv_size) + ffn) / tensor) * size


def _turned_bytes(config: ModelConfig, size: int, shards: int, ways: int) -> int:
    """Bytes of copies of the maps whose outputs are split: XLA transposes them once a pass, to gather along the first
    axis."""
    if ways == 1:
        return 0
    inputs = config.layers * config.query_size + len(config.dense_layers) * config.ffn_size
    return math.ceil(inputs * config.hidden_size / shards) * size


# ----------------------------------------------------------------------------------------------------------- operations

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets; the first name that stands in the device's kind as
# whole words counts. A v5e calls itself "TPU v5 lite" and a v5p "TPU v5".
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "TPU v6": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def step_flops(model: ModelConfig, lora: Lora | None, rows: Sequence[TokenRow]) -> float:
    """Model FLOPs of one forward and backward pass over the rows: no recomputation, no padding, causal attention.

    A product of [n, in] with [in, out] is 2 n in out. The backward pass costs the same again for the gradient of the
    input, and once more for that of the weight where it is trained. Attention counts the pairs of query and key that
    are seen; the head only the sampled tokens, since logits are computed for no others.
    """
    lengths = np.array([len(row.tokens) for row in rows], np.float64)
    sampled = float(sum(int(row.sampled.sum()) for row in rows))
    tokens = lengths.sum()
    per_base = 2 if lora else 3  # passes over a base matrix
    base = per_base * 2 * tokens * weights_per_token(model)
    head = per_base * 2 * sampled * model.hidden_size * model.vocab_size
    # Scores and mixed values are 2 products a pair, of 2 query_size operations each; the backward pass has 4.
    attention = 3 * sum(4 * model.query_size * _pairs(lengths, model.window(layer)) for layer in range(model.layers))
    return base + head + attention + (3 * 2 * tokens * _adapter_weights(model, lora) if lora else 0.0)


def weights_per_token(model: ModelConfig) -> float:
    """Weights of the linear maps that one token goes through, of its chosen experts alone; without the head."""
    maps = matrix_sizes(model).items()
    return sum(size_in * size_out * _passes(name, model) for name, ((size_in, _), (size_out, _)) in maps)


def _adapter_weights(model: ModelConfig, lora: Lora) -> float:
    sizes = matrix_sizes(model)
    return sum(
        lora.rank * (sizes[name][0][0] + sizes[name][1][0]) * _passes(name, model) for name in adapted(model, lora)
    )


def _passes(name: str, model: ModelConfig) -> int:
    """Linear maps of that name that one token goes through, over all layers."""
    chosen = model.experts.per_token if name in params.EXPERT and model.experts else 1
    return chosen * len(owners(name, model))


def _pairs(lengths: np.ndarray, window_tokens: int | None) -> float:
    """Pairs (query, key) of causal attention: t keys for the t-th token, at most the window."""
    within = lengths if window_tokens is None else np.minimum(lengths, window_tokens)
    return float((within * (within + 1) / 2 + (lengths - within) * within).sum())


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or None where it is not known (every CPU)."""

    def has(name: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_kind, re.IGNORECASE) is not None

    return next((peak for name, peak in PEAK_FLOPS.items() if has(name)), None)
