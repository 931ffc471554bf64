"""The decoder agrees with itself however it is called: packed, padded, rematerialised, split, with its adapter off."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, logprobs, tiny_decoder

from flowjax.models.attention import attend
from flowjax.models.decoder import Decoder
from flowjax.models.logprobs import token_logprobs
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.rope import rope_angles
from flowjax.models.shape import ModelError, RopeScaling, YarnScaling

LORA = Lora(rank=4, alpha=8.0)


def test_packed_rows_give_what_separate_rows_give(tokens):
    decoder = tiny_decoder(LORA)
    lengths = (17, 5, 11)
    separate = [logprobs(decoder, tokens[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    packed = np.concatenate([tokens[i, :n] for i, n in enumerate(lengths)])[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    segments = np.repeat([1, 2, 3], lengths)[None]
    together = logprobs(decoder, packed, positions, segments)[0]
    np.testing.assert_allclose(together, np.concatenate(separate), atol=1e-5)


def test_padding_changes_nothing_whatever_tokens_it_holds(tokens):
    decoder = tiny_decoder(LORA)
    bare = logprobs(decoder, tokens)
    garbage = np.concatenate([tokens, tokens[:, ::-1]], axis=1)
    segments = np.concatenate([np.ones_like(tokens), np.zeros_like(tokens)], axis=1)
    padded = logprobs(decoder, garbage, segments=segments)
    np.testing.assert_allclose(padded[:, :17], bare, atol=1e-5)
    assert np.isfinite(padded).all()


def test_a_token_sees_no_later_one(tokens):
    decoder = tiny_decoder()
    changed = tokens.copy()
    changed[:, 10:] = 5
    np.testing.assert_allclose(logprobs(decoder, changed)[:, :10], logprobs(decoder, tokens)[:, :10], atol=1e-5)
    assert np.abs(logprobs(decoder, changed)[:, 10:] - logprobs(decoder, tokens)[:, 10:]).max() > 1e-3


def test_adapter_scale_zero_is_the_base_model(tokens):
    adapted, base = tiny_decoder(LORA), tiny_decoder()
    np.testing.assert_allclose(logprobs(adapted, tokens, adapter_scale=0.0), logprobs(base, tokens), atol=1e-5)
    assert np.abs(logprobs(adapted, tokens) - logprobs(base, tokens)).max() > 0.1


def test_a_fresh_adapter_changes_nothing(tokens):
    fresh = Decoder(TINY, lora=LORA, dtype=jnp.float32, remat="none", key=jax.random.key(0))
    assert all(np.ptp(parts["a"].get_value()) > 0 for parts in fresh.adapter.values())
    np.testing.assert_array_equal(logprobs(fresh, tokens), logprobs(fresh, tokens, adapter_scale=0.0))


def _loss(decoder, tokens):
    hidden = decoder(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones_like(tokens))
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    return -token_logprobs(flat, decoder.head(), tokens[:, 1:].reshape(-1), chunk_tokens=13)[0].mean()


def _gradients(decoder, kind, tokens):
    graph, trained, frozen = nnx.split(decoder, kind, ...)
    step = jax.jit(jax.value_and_grad(lambda trained: _loss(nnx.merge(graph, trained, frozen), jnp.asarray(tokens))))
    loss, gradients = step(trained)
    return loss, {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(gradients)}


def test_split_separates_the_adapter_and_only_it_gets_gradients(tokens):
    decoder = tiny_decoder(LORA)
    _, gradients = _gradients(decoder, LoraParam, tokens)
    assert {path[1:] for path in gradients} == {(t, part) for t in LORA.targets for part in ("a", "b")}
    assert all(np.abs(g).max() > 0 for g in gradients.values())


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_remat_changes_neither_loss_nor_gradients(tokens, remat):
    decoder = tiny_decoder()
    loss, gradients = _gradients(decoder, nnx.Param, tokens)
    decoder.remat = remat
    loss_remat, gradients_remat = _gradients(decoder, nnx.Param, tokens)
    assert loss == pytest.approx(float(loss_remat), rel=1e-6)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradients_remat[path], gradient, atol=1e-6)


def test_gradients_equal_finite_differences(tokens):
    decoder = tiny_decoder(LORA)
    _, gradients = _gradients(decoder, LoraParam, tokens)
    loss = jax.jit(lambda state: _loss(nnx.merge(graph, state), jnp.asarray(tokens)))
    graph, _ = nnx.split(decoder)
    for target, part in (("q_proj", "a"), ("down_proj", "b")):
        param = decoder.adapter[target][part]
        value, gradient = param.get_value(), gradients["adapter", target, part]
        direction = np.sign(gradient) * (np.abs(gradient) > np.median(np.abs(gradient)))
        losses = []
        for step in (1e-3, -1e-3):
            param.set_value(value + step * direction)
            losses.append(float(loss(nnx.state(decoder))))
        param.set_value(value)
        assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(float((gradient * direction).sum()), rel=2e-2)


def test_dropout_keeps_the_mean_and_no_two_maps_drop_alike():
    decoder, random = tiny_decoder(dataclasses.replace(LORA, dropout=0.4)), np.random.default_rng(0)
    x, weight, a, b = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((2, 6), (6, 5), (6, 3), (3, 5)))
    names = LORA.targets[:2]
    weights, adapter = dict.fromkeys(names, weight), {name: {"a": a, "b": b} for name in names}

    def dropped(name: str) -> np.ndarray:
        keys = jax.random.split(jax.random.key(0), 4000)
        return np.asarray(jax.vmap(lambda key: decoder._linear(weights, adapter, 1.0, key)(name, x))(keys))

    still = decoder._linear(weights, adapter, 1.0, None)(names[0], x)
    one, other = map(dropped, names)
    error = one.std(axis=0) / np.sqrt(len(one))
    assert (error > 0).all() and (np.abs(one.mean(axis=0) - still) < 4.5 * error).all()
    assert np.abs(one - other).max(axis=(1, 2)).min() > 0


def test_queries_in_blocks_equal_queries_at_once():
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(2, 37, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    segments = np.repeat([[1, 2, 0]], [15, 17, 5], axis=1).repeat(2, axis=0)
    places = (jnp.asarray(segments), jnp.broadcast_to(jnp.arange(37), (2, 37)))
    pull = jnp.asarray(random.normal(size=query.shape), jnp.float32)

    def value_and_gradients(block_tokens):
        def loss(query, key, value):
            return jnp.sum(
                attend(query, key, value, *places, *places, window_tokens=9, block_tokens=block_tokens) * pull
            )

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    for at_once, blocked in zip(
        jax.tree.leaves(value_and_gradients(64)), jax.tree.leaves(value_and_gradients(8)), strict=True
    ):
        np.testing.assert_allclose(blocked, at_once, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "given", "expected"),
    [
        (4.0, None, 0.1 * math.log(4.0) + 1),
        (4.0, 1.7, 1.7),
        (0.5, None, 1.0),
    ],
)
def test_yarn_sharpens_attention(factor, given, expected):
    scaling = YarnScaling(factor, 16, attention_factor=given)
    cos, sin = rope_angles(jnp.array([[0, 3]]), 8, 1e4, scaling)
    np.testing.assert_allclose(cos[0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)  # a longer arrow, turned as far


def test_rope_scaling_changes_the_model(tokens):
    plain = tiny_decoder()
    stretched = tiny_decoder(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))
    assert np.abs(logprobs(plain, tokens) - logprobs(stretched, tokens)).max() > 1e-3


def test_unknown_remat_is_refused():
    with pytest.raises(ModelError, match=r"config.model.remat is 'block': it must be 'none', 'dots' or 'layer'"):
        Decoder(TINY, remat="block", key=jax.random.key(0))  # type: ignore[arg-type]
