"""What a step costs in floating-point operations, and what the devices could do."""

import resource
import sys
from collections.abc import Sequence

import jax
import numpy as np

from flowjax.models.lora import Lora
from flowjax.models.params import matrix_sizes, owners
from flowjax.models.shape import ModelConfig
from flowjax.records import TokenRow

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


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or None where it is not known (every CPU)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device_kind.lower()), None)


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


def memory_metrics() -> dict[str, int]:
    """Most bytes that a device of this process has held, where its platform counts them, and the process itself."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if known := [peak for peak in peaks if peak]:
        found["device_peak_bytes"] = max(known)
    return found
