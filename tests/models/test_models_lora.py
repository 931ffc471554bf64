"""Adapters: their strength, their refusals, and the shapes that checkpoints hand back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, logprobs, tiny_decoder

from flowjax.models.decoder import Decoder, set_adapter
from flowjax.models.lora import (
    Lora,
    LoraParam,
    adapter_arrays,
    adapter_from_peft,
    lora_branch,
    lora_linear,
    merge,
    peft_tensors,
)
from flowjax.models.nano import nano_config
from flowjax.models.shape import ModelError

LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "down_proj"))


def test_scale():
    assert Lora(16, 32.0).scale == 2.0
    assert Lora(16, 32.0, rslora=True).scale == 8.0
    with pytest.raises(ModelError, match=r"targets is .*: name each once"):
        Lora(16, 32.0, targets=("q_proj", "q_proj"))


def test_one_product_has_the_values_and_gradients_of_two():
    random = np.random.default_rng(0)
    shapes = ((9, 5), (5, 7), (5, 2), (2, 7), (9, 7))
    x, w, a, b, weight = (random.normal(size=shape).astype(np.float32) for shape in shapes)

    def one(x, w, a, b, scale):
        return (weight * lora_linear(x, w, a, b, scale)).sum()

    def two(x, w, a, b, scale):
        return (weight * (x @ w + lora_branch(x, a, b, scale))).sum()

    arguments = (x, w, a, b, jax.numpy.float32(0.7))
    mine, theirs = (jax.value_and_grad(function, range(5))(*arguments) for function in (one, two))
    for merged, apart in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(merged, apart, rtol=1e-4, atol=1e-5)


def test_merge_by_hand():
    merged = merge(np.array([[1.0, 2.0]]), np.array([[3.0]]), np.array([[4.0, 5.0]]), 0.5)
    np.testing.assert_array_equal(merged, [[7.0, 9.5]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ("q_proj", "qkv")}, r"config.policy.lora.targets is \['q_proj', 'qkv'\]: name at least one of"),
        ({"targets": ()}, r"config.policy.lora.targets is \[\]"),
        ({"rank": 0}, "config.policy.lora.rank is 0: it must be at least 1"),
        ({"dropout": 1.0}, r"config.policy.lora.dropout is 1.0: it must lie in \[0, 1\)"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ModelError, match=message):
        Lora(**({"rank": 4, "alpha": 4.0} | fields))


def test_every_form_of_an_adapter_gives_the_same_tensors():
    decoder = tiny_decoder(LORA)
    _, state, _ = nnx.split(decoder, LoraParam, ...)
    pure = nnx.to_pure_dict(state)
    with_values = {"adapter": {t: {p: {"value": x} for p, x in ab.items()} for t, ab in pure["adapter"].items()}}
    expected = peft_tensors(decoder.adapter, TINY, LORA)
    for form in (state, pure, with_values, adapter_arrays(state)):
        found = peft_tensors(form, TINY, LORA)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor, expected[name])


def test_layout_of_peft():
    decoder = tiny_decoder(LORA)
    tensors = peft_tensors(decoder.adapter, TINY, LORA)
    assert len(tensors) == 2 * 2 * TINY.layers
    a = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    b = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert (a.shape, b.shape, a.dtype) == ((3, 40), (24, 3), np.float32)
    np.testing.assert_array_equal(a.T, decoder.adapter["down_proj"]["a"].get_value()[1])


def test_set_adapter_takes_what_peft_gave():
    source, sink = tiny_decoder(LORA), tiny_decoder(LORA)
    for parts in sink.adapter.values():
        for param in parts.values():
            param.set_value(0 * param.get_value())
    set_adapter(sink, adapter_from_peft(peft_tensors(source.adapter, TINY, LORA), TINY, LORA))
    for target in LORA.targets:
        for part in ("a", "b"):
            np.testing.assert_array_equal(
                sink.adapter[target][part].get_value(), source.adapter[target][part].get_value()
            )


def test_foreign_adapters_are_refused():
    tensors = peft_tensors(tiny_decoder(LORA).adapter, TINY, LORA)
    with pytest.raises(ModelError, match=r"lacks base_model.*v_proj.lora_A.weight: its target_modules differ"):
        adapter_from_peft(tensors, TINY, Lora(3, 6.0, targets=("q_proj", "down_proj", "v_proj")))
    with pytest.raises(ModelError, match=r"lora_A.weight has shape \(3, 24\) and should have \(4, 24\): .*here is 4"):
        adapter_from_peft(tensors, TINY, Lora(4, 6.0, targets=LORA.targets))
    with pytest.raises(ModelError, match=r"tensors that lora.targets does not name, such as .*down_proj"):
        adapter_from_peft(tensors, TINY, Lora(3, 6.0, targets=("q_proj",)))
    with pytest.raises(ModelError, match=r"the adapter has no arrays for v_proj: it was made with other lora.targets"):
        peft_tensors(tiny_decoder(LORA).adapter, TINY, Lora(3, 6.0, targets=("v_proj",)))


def test_dropout_is_on_only_with_a_key_and_follows_from_it_alone():
    decoder = tiny_decoder(Lora(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), dropout=0.5))
    tokens = np.arange(12).reshape(2, 6)

    def run(seed: int | None) -> np.ndarray:
        return logprobs(decoder, tokens, dropout_key=None if seed is None else jax.random.key(seed))

    np.testing.assert_array_equal(run(0), run(0))
    assert np.abs(run(0) - run(None)).max() > 1e-3 and np.abs(run(0) - run(1)).max() > 1e-3


def test_a_long_rows_adapter_is_merged_as_it_is_kept_apart(monkeypatch):
    """XLA's CPU backend gets the merged product wrong here unless told not to use YNN (`flowjax/__init__.py`)."""
    shape = {"hidden_size": 256, "layers": 1, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn_size": 64}
    config = nano_config(64, **shape)
    model = Decoder(config, lora=Lora(16, 16.0), dtype=jnp.float32, remat="none", key=jax.random.key(0))
    graph, adapter, base = nnx.split(model, LoraParam, ...)
    keys = iter(jax.random.split(jax.random.key(1), 2 * 7))
    adapter = jax.tree.map(lambda leaf: 0.02 * jax.random.normal(next(keys), leaf.shape), adapter)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 64, (1, 512)))

    def hidden() -> np.ndarray:
        forward = jax.jit(lambda a, b: nnx.merge(graph, a, b)(tokens, jnp.arange(512)[None], jnp.ones_like(tokens)))
        return np.asarray(forward(adapter, base))

    merged = hidden()
    monkeypatch.setattr(Decoder, "_merges", lambda *_: False)
    np.testing.assert_allclose(merged, hidden(), atol=1e-4)
