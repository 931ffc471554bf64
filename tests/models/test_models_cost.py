"""The estimate against the arrays and the compiler's own accounts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flowjax.models.cost import estimate, served_bytes
from flowjax.models.decoder import Decoder, Remat
from flowjax.models.logprobs import token_logprobs
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.shape import Experts, ModelConfig

CONFIG = nano_config(512, hidden_size=64, layers=4, ffn_size=160, head_dim=16)
LORA = Lora(8, 8.0)
SIZES = {"rows": 8, "tokens": 128, "chunk": 64, "dtype": "float32"}


def _decoder(remat: Remat = "layer", config: ModelConfig = CONFIG, lora: Lora = LORA):
    return nnx.eval_shape(lambda: Decoder(config, lora=lora, dtype=jnp.float32, remat=remat, key=jax.random.key(0)))


def _bytes(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def test_fp8_is_all_matrices_of_an_engine_but_int8_no_experts():
    sparse = dataclasses.replace(CONFIG, experts=Experts(count=8, per_token=2, ffn_size=32))
    attention = 4 * (2 * 64 * (CONFIG.query_size + CONFIG.kv_size))  # values of four layers' four maps
    scales = 4 * 4 * (64 + CONFIG.query_size + 2 * CONFIG.kv_size)
    assert served_bytes(sparse, "bfloat16") == 2 * sparse.parameter_count()
    int8 = 2 * sparse.parameter_count() - attention + scales
    assert served_bytes(sparse, "bfloat16", "int8") == int8
    assert served_bytes(sparse, "bfloat16", "fp8") == int8 - 4 * 8 * 3 * 64 * 32


def test_arrays_are_counted_exactly():
    _, adapter, base = nnx.split(_decoder(), LoraParam, ...)
    parts = estimate(CONFIG, LORA, **SIZES)
    assert parts["base"] == _bytes(base)
    assert parts["adapter"] == parts["gradients"] == _bytes(adapter)
    assert parts["moments"] == 2 * _bytes(adapter)
    full = estimate(CONFIG, None, **SIZES)
    assert (full["adapter"], full["gradients"]) == (0, _bytes(base))
    assert estimate(CONFIG, None, **SIZES, moments=0.5)["moments"] == _bytes(base) / 2
    offloaded = estimate(CONFIG, LORA, **SIZES, moments=1e4, offload=True)  # during an update nothing of a pass is left
    assert offloaded["moments"] + offloaded["activations"] + offloaded["working"] == 1e4 * _bytes(adapter)
    assert estimate(CONFIG, LORA, **SIZES, offload=True)["moments"] == 0


@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
@pytest.mark.parametrize("experts", [None, Experts(8, 2, 96), Experts(64, 8, 32)])
def test_activations_are_of_the_compilers_size(experts, remat):
    config = dataclasses.replace(CONFIG, experts=experts)
    # What is kept of adapters on experts where nothing is computed again is counted to a half only.
    lora = Lora(8, 8.0, targets=("q_proj", "k_proj", "v_proj", "o_proj")) if experts and remat == "none" else LORA
    graph, adapter, base = nnx.split(_decoder(remat, config, lora), LoraParam, ...)
    tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)

    def loss(adapter, base, tokens):
        model = nnx.merge(graph, adapter, base)
        hidden = model(tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens))
        return token_logprobs(hidden.reshape(-1, 64), model.head(), tokens.reshape(-1), chunk_tokens=64)[0].sum()

    analysis = jax.jit(jax.grad(loss)).lower(adapter, base, tokens).compile().memory_analysis()
    assert analysis is not None
    parts = estimate(config, lora, remat=remat, **SIZES)
    guess = parts["activations"] + parts["working"]
    assert 0.6 < guess / analysis.temp_size_in_bytes < 1.6


def test_a_mesh_divides_what_it_splits():
    alone = estimate(CONFIG, LORA, **SIZES)
    spread = estimate(CONFIG, LORA, **SIZES, data=2, fsdp=4)
    assert spread["base"] * 4 == pytest.approx(alone["base"], rel=2e-2)  # norms are on every device
    assert spread["activations"] * 8 == alone["activations"]
    # The part of an adapter's matrix that neighbours the hidden size is split, the other one is on every device.
    assert alone["adapter"] / 4 < spread["adapter"] < alone["adapter"]


def test_devices_of_a_row_share_its_logits_and_each_has_all_its_keys():
    sizes: Any = {**SIZES, "chunk": 1024}
    config = dataclasses.replace(CONFIG, vocab_size=65536)  # mostly logits
    alone, spread = estimate(config, LORA, **sizes), estimate(config, LORA, **sizes, sequence=4)
    assert spread["working"] == pytest.approx(estimate(config, LORA, **sizes, data=4)["working"], rel=0.2)
    assert spread["working"] < 0.5 * alone["working"]
    keys = [dataclasses.replace(CONFIG, heads=64, kv_heads=n) for n in (1, 64)]  # mostly keys and values
    sizes |= {"rows": 1, "tokens": 65536, "dtype": "bfloat16"}
    few, many = (estimate(each, LORA, **sizes, sequence=4)["working"] for each in keys)
    # Of 65,536 tokens, keys and values with their gradients; and two of these again of a device's own quarter.
    more = 65536 * 63 * CONFIG.head_dim * 2
    assert many - few == pytest.approx((4 + 2 / 4) * more, rel=0.05)


def test_kept_versions_are_counted():
    parts = estimate(CONFIG, None, **SIZES, versions=3)
    assert parts["versions"] == 3 * parts["gradients"]
