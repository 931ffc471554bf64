"""A quantised base: how far it is from the whole one, and that an adapter trains on it as on the whole one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, randomise_adapter, tiny_decoder

from flowjax.models import quantize as quantising
from flowjax.models.decoder import Decoder, with_adapter
from flowjax.models.hf import load_decoder, merged_tensors, save_decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.quantize import NF4_VALUES, quantized_matrix, saved_bytes
from flowjax.models.shape import ModelError

LORA = Lora(rank=4, alpha=8.0)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def matrix():
    return jax.random.normal(jax.random.key(0), (2, 128, 24)) * jnp.linspace(0.1, 2.0, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_decoder(tiny_decoder(), folder, dtype=jnp.float32)
    return folder


def test_int8_is_within_half_a_step_of_every_weight(matrix):
    quantized = quantized_matrix(matrix, "int8")
    assert quantized.shape == matrix.shape and quantized.codes.dtype == jnp.int8
    step = np.abs(matrix).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(quantized.dequantized() - matrix) <= step / 2 * 1.0001)


def test_nf4_takes_the_nearest_of_sixteen_values_of_each_block(matrix):
    quantized = quantized_matrix(matrix, "nf4")
    assert quantized.shape == matrix.shape and quantized.codes.shape == (2, 64, 24)
    blocks = np.asarray(matrix, np.float64).reshape(2, 2, 64, 24)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    choices = np.array(NF4_VALUES)
    nearest = choices[np.abs((blocks / top)[..., None] - choices).argmin(-1)] * top
    np.testing.assert_allclose(quantized.dequantized(), nearest.reshape(matrix.shape), rtol=1e-5, atol=1e-6)
    error = np.asarray(quantized.dequantized() - matrix).std() / np.asarray(matrix).std()
    assert 0.05 < error < 0.12, "QLoRA's code loses about a tenth of a normal weight's spread"
    np.testing.assert_allclose(quantized[1], quantized.dequantized()[1])


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_products_and_their_gradients_are_those_of_the_whole_matrix(matrix, kind):
    quantized = quantized_matrix(matrix, kind)[0]
    held = jax.tree.map(lambda leaf: leaf[0], quantized_matrix(matrix, kind))
    x = jax.random.normal(jax.random.key(1), (5, 128))
    ours = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x @ held)))(x)
    theirs = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x @ quantized)))(x)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-4)


def gradient(decoder: Decoder):
    graph, adapter, base = nnx.split(decoder, LoraParam, ...)

    @jax.jit
    def of(adapter, base):
        def loss(adapter):
            decoder = nnx.merge(graph, adapter, base)
            positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
            hidden = decoder(jnp.asarray(TOKENS), positions, jnp.ones(TOKENS.shape, jnp.int32))
            return jax.nn.log_softmax(hidden @ decoder.head())[..., 3].sum()

        return jax.value_and_grad(loss)(adapter)

    return of(adapter, base)


@pytest.mark.parametrize(("kind", "remat", "closeness"), [("int8", "layer", 0.999), ("nf4", "none", 0.9)])
def test_an_adapter_has_nearly_the_gradient_that_the_whole_base_gives(folder, kind, remat, closeness):
    found = []
    for quantize in ("", kind):
        decoder = load_decoder(folder, lora=LORA, dtype=jnp.float32, remat=remat, quantize=quantize)
        randomise_adapter(decoder)
        found.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient(decoder)[1])]))
    whole, quantized = found
    assert whole @ quantized / np.linalg.norm(whole) / np.linalg.norm(quantized) > closeness


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_merging_makes_the_base_whole_again(folder, kind):
    base = load_decoder(folder, dtype=jnp.float32, remat="none", quantize=kind)
    decoder = with_adapter(base, LORA, jax.random.key(0))
    randomise_adapter(decoder)
    tensors = dict(merged_tensors(decoder, jnp.float32))
    q_proj: Any = base.layers["q_proj"].get_value()
    adapter = decoder.adapter["q_proj"]
    a, b = (np.asarray(adapter[part].get_value()[1]) for part in ("a", "b"))
    expected = np.asarray(q_proj.dequantized()[1]) + LORA.scale * a @ b
    np.testing.assert_allclose(tensors["model.layers.1.self_attn.q_proj.weight"].T, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_what_is_saved_is_counted_exactly(folder, kind):
    def held(quantize: str) -> int:
        state = nnx.state(load_decoder(folder, dtype=jnp.bfloat16, quantize=quantize))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    assert held("") - held(kind) == saved_bytes(TINY, kind, 2)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_stack_is_quantised_one_layer_at_a_time(kind):
    """All of it at once took twelve times the base, where the codes of nf4 are a quarter of it."""
    stack = jax.random.normal(jax.random.key(1), (12, 256, 128), jnp.bfloat16)
    found = quantized_matrix(stack, kind)
    for layer in range(12):
        alone = quantized_matrix(stack[layer : layer + 1], kind)
        assert np.array_equal(found.codes[layer], alone.codes[0])
        assert np.array_equal(found.scales[layer], alone.scales[0])
    quantizer = quantising._quantizer(kind, None, quantising._blocks(kind, 256))
    compiled = quantizer.lower((found.codes, found.scales), stack, 3).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 3 * stack[0].size * 4


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(ModelError, match=r"config\.model\.quantize is 'int3': use one of '', 'int8', 'nf4'"):
        quantized_matrix(jnp.ones((1, 2, 2)), "int3")
    with pytest.raises(ModelError, match="a matrix has 3 inputs, an odd number: use 'int8'"):
        quantized_matrix(jnp.ones((1, 3, 2)), "nf4")
