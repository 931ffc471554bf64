"""Chunked log-probabilities equal the plain formula, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowjax.models.logprobs import token_logprobs


def _inputs(n=23):
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(n, 8)), jnp.float32)
    head = jnp.asarray(random.normal(size=(8, 31)), jnp.float32)
    return hidden, head, jnp.asarray(random.integers(0, 31, n))


def _plain(hidden, head, targets, temperature):
    logits = jax.nn.log_softmax(hidden @ head / temperature, axis=-1)
    return logits[jnp.arange(len(targets)), targets], -jnp.sum(jnp.exp(logits) * logits, axis=-1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 8, 23, 100])
def test_values_for_every_chunk_size(chunk_tokens):
    inputs = _inputs()
    mine = token_logprobs(*inputs, temperature=0.7, chunk_tokens=chunk_tokens, entropy=True)
    for chunked, plain in zip(mine, _plain(*inputs, 0.7), strict=True):
        np.testing.assert_allclose(chunked, plain, atol=1e-5)


@pytest.mark.parametrize("part", [0, 1])
def test_gradients(part):
    hidden, head, targets = _inputs()
    weights = jnp.linspace(-1, 2, len(targets))

    def chunked(hidden, head, temperature):
        return jnp.sum(
            weights * token_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=6, entropy=True)[part]
        )

    def plain(hidden, head, temperature):
        return jnp.sum(weights * _plain(hidden, head, targets, temperature)[part])

    arguments = (hidden, head, jnp.float32(1.3))
    for mine, theirs in zip(
        jax.grad(chunked, (0, 1, 2))(*arguments), jax.grad(plain, (0, 1, 2))(*arguments), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_logits_are_float32_when_hidden_states_are_bfloat16():
    hidden, head, targets = _inputs()
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    mine, _ = token_logprobs(hidden, head, targets, chunk_tokens=8)
    theirs, _ = _plain(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, 1.0)
    assert mine.dtype == jnp.float32
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_full_logits_never_exist():
    hidden, head, targets = jnp.ones((512, 4)), jnp.ones((4, 4096)), jnp.zeros(512, int)

    def loss(hidden, chunk_tokens):
        return token_logprobs(hidden, head, targets, chunk_tokens=chunk_tokens)[0].sum()

    def temporary_bytes(chunk_tokens):
        compiled = jax.jit(jax.grad(loss), static_argnums=1).lower(hidden, chunk_tokens).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(16) < 512 * 4096 * 4 / 4 < temporary_bytes(512)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_frozen_head_changes_neither_values_nor_the_gradient_of_hidden_states(soft_cap):
    hidden, head, targets = _inputs()
    weights = jnp.linspace(-1, 2, len(targets))

    def loss(hidden, frozen_head):
        options = {"temperature": 0.7, "chunk_tokens": 6, "soft_cap": soft_cap}
        logprobs, entropy = token_logprobs(hidden, head, targets, entropy=True, frozen_head=frozen_head, **options)
        return jnp.sum(weights * logprobs), entropy

    mine, theirs = (jax.value_and_grad(loss, has_aux=True)(hidden, frozen) for frozen in (True, False))
    for ahead, recomputed in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(ahead, recomputed, rtol=1e-4, atol=1e-5)
