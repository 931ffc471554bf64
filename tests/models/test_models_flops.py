"""FLOPs of a step against XLA's own count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flowjax.models.cost import peak_flops, step_flops
from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora
from flowjax.models.nano import nano_config
from flowjax.records import TokenRow

MODEL = nano_config(300, hidden_size=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn_size=512)


def row(tokens: int, sampled: int) -> TokenRow:
    nothing = np.zeros(tokens, np.float32)
    return TokenRow("", nothing.astype(np.int32), np.arange(tokens) >= tokens - sampled, nothing, nothing, nothing)


def test_forward_flops_are_those_that_xla_counts():
    tokens = 64
    decoder = Decoder(MODEL, dtype=jnp.float32, remat="none", key=jax.random.key(0))
    graph, state = nnx.split(decoder)

    def logits(state, tokens):
        model = nnx.merge(graph, state)
        return model(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)) @ model.head()

    compiled = jax.jit(logits).lower(state, jnp.zeros((1, tokens), jnp.int32)).compile()
    costs = compiled.cost_analysis()
    assert costs is not None
    ours = step_flops(MODEL, None, [row(tokens, tokens)]) / 3  # forward alone
    square = 2 * 4 * MODEL.query_size * tokens**2 / 2  # XLA multiplies what the mask hides too
    assert costs["flops"] == pytest.approx(ours + square, rel=0.05)


def test_an_adapter_spares_the_gradients_of_the_base():
    rows = [row(100, 50)]
    full, lora = step_flops(MODEL, None, rows), step_flops(MODEL, Lora(4, 4.0), rows)
    assert 0.65 < lora / full < 0.75


def test_packing_does_not_change_what_a_sequence_costs():
    alone = step_flops(MODEL, None, [row(40, 10)])
    assert step_flops(MODEL, None, [row(40, 10)] * 3) == pytest.approx(3 * alone)


def test_peaks_of_devices():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("TPU v5p") == 459e12 and peak_flops("cpu") is None
    # As JAX names them: a v5p says "TPU v5".
    assert (
        peak_flops("TPU v5") == 459e12 and peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v6 lite") == 918e12
    )
    assert (
        peak_flops("NVIDIA L40") == 181e12 and peak_flops("NVIDIA L4") == 121e12 and peak_flops("NVIDIA A10G") == 70e12
    )
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and peak_flops("NVIDIA RTX A1000") is None
