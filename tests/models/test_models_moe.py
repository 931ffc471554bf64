"""Experts: no token is dropped, gradients are exact, and layers with and without them go by in order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY

from flowjax.models.moe import mix_experts, route
from flowjax.models.params import Block, layer_blocks
from flowjax.models.shape import Experts, ModelError

TOKENS, HIDDEN, FFN, COUNT = 13, 6, 5, 4


def _arrays() -> list[jax.Array]:
    random = np.random.default_rng(0)
    shapes = ((TOKENS, HIDDEN), (HIDDEN, COUNT), (COUNT, HIDDEN, FFN), (COUNT, HIDDEN, FFN), (COUNT, FFN, HIDDEN))
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def _dense(x, router, gate, up, down, *, experts: Experts) -> jax.Array:
    """Every expert for every token, weighted by the router's choice or by zero."""
    scores = jax.nn.softmax(x @ router, axis=-1)
    kept = jnp.where(scores >= jnp.sort(scores, axis=-1)[:, -experts.per_token, None], scores, 0)
    if experts.normalise:
        kept = kept / kept.sum(axis=-1, keepdims=True)
    inner = jax.nn.silu(jnp.einsum("th,ehf->tef", x, gate)) * jnp.einsum("th,ehf->tef", x, up)
    return jnp.einsum("te,tef,efh->th", kept, inner, down)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_sorted_experts_equal_all_experts_and_a_mask(normalise, parts):
    """With two parts, each has half of the experts and their sum is the whole, as on a mesh."""
    experts, arrays = Experts(COUNT, 2, FFN, normalise), _arrays()
    pull = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)), jnp.float32)

    def ours(x, router, *matrices):
        weights, chosen = route(x, router, experts)
        size = COUNT // parts
        return sum(
            mix_experts(x, weights, chosen, *(m[i : i + size] for m in matrices), activate=jax.nn.silu, first=i)
            for i in range(0, COUNT, size)
        )

    def run(function):
        return jax.value_and_grad(lambda *arrays: jnp.sum(function(*arrays) * pull), argnums=(0, 1, 2, 3, 4))(*arrays)

    found, wanted = run(ours), run(functools.partial(_dense, experts=experts))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_one_expert_may_take_every_token():
    x, _, gate, up, down = _arrays()
    chosen = jnp.full((TOKENS, 1), 2)
    mixed = mix_experts(x, jnp.ones((TOKENS, 1)), chosen, gate, up, down, activate=jax.nn.silu)
    np.testing.assert_allclose(mixed, (jax.nn.silu(x @ gate[2]) * (x @ up[2])) @ down[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "dense", "blocks"),
    [
        (48, (), [Block(0, (True,), 48)]),
        (6, (0,), [Block(0, (False,), 1), Block(1, (True,), 5)]),
        (10, (0, 1, 2, 4, 5, 6, 8, 9), [Block(0, (False, False, False, True), 2), Block(8, (False,), 2)]),
        (4, (1,), [Block(0, (True,), 1), Block(1, (False,), 1), Block(2, (True,), 2)]),
    ],
)
def test_layers_become_few_scans(layers, dense, blocks):
    config = dataclasses.replace(TINY, layers=layers, experts=Experts(COUNT, 2, FFN, dense_layers=dense))
    assert layer_blocks(config) == blocks
    assert [layer for block in layer_blocks(config) for layer in block.layers] == list(range(layers))


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ModelError, match="experts per token is 5 and there are 4 experts"):
        dataclasses.replace(TINY, experts=Experts(4, 5, 8))
