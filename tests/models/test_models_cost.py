"""The estimate against the arrays and the compiler's own accounts."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flowjax.models.cost import estimate
from flowjax.models.decoder import Decoder, Remat
from flowjax.models.logprobs import token_logprobs
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config

CONFIG = nano_config(512, hidden_size=64, layers=4, ffn_size=160, head_dim=16)
LORA = Lora(8, 8.0)
SIZES = {"rows": 8, "tokens": 128, "chunk": 64, "dtype": "float32"}


def _decoder(remat: Remat = "layer"):
    return nnx.eval_shape(lambda: Decoder(CONFIG, lora=LORA, dtype=jnp.float32, remat=remat, key=jax.random.key(0)))


def _bytes(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def test_arrays_are_counted_exactly():
    _, adapter, base = nnx.split(_decoder(), LoraParam, ...)
    parts = estimate(CONFIG, LORA, **SIZES)
    assert parts["base"] == _bytes(base)
    assert parts["adapter"] == parts["gradients"] == _bytes(adapter)
    assert parts["moments"] == 2 * _bytes(adapter)
    full = estimate(CONFIG, None, **SIZES)
    assert (full["adapter"], full["gradients"]) == (0, _bytes(base))


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_activations_are_of_the_compilers_size(remat):
    graph, adapter, base = nnx.split(_decoder(remat), LoraParam, ...)
    tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)

    def loss(adapter, base, tokens):
        model = nnx.merge(graph, adapter, base)
        hidden = model(tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens))
        return token_logprobs(hidden.reshape(-1, 64), model.head(), tokens.reshape(-1), chunk_tokens=64)[0].sum()

    analysis = jax.jit(jax.grad(loss)).lower(adapter, base, tokens).compile().memory_analysis()
    assert analysis is not None
    parts = estimate(CONFIG, LORA, remat=remat, **SIZES)
    guess = parts["activations"] + parts["logprob_chunk"]
    assert 0.6 < guess / analysis.temp_size_in_bytes < 1.6


def test_a_mesh_divides_what_it_splits():
    alone = estimate(CONFIG, LORA, **SIZES)
    spread = estimate(CONFIG, LORA, **SIZES, data=2, fsdp=4)
    assert spread["base"] * 4 == pytest.approx(alone["base"], rel=1e-3)
    assert spread["activations"] * 8 == alone["activations"]
    assert estimate(CONFIG, LORA, **SIZES, tensor=2)["logprob_chunk"] * 2 == alone["logprob_chunk"]


def test_serving_needs_no_gradients():
    parts = estimate(CONFIG, LORA, **SIZES, train=False)
    assert parts["gradients"] == parts["moments"] == 0
    assert parts["activations"] < estimate(CONFIG, LORA, **SIZES)["activations"]
