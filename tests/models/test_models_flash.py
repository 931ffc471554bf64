"""Flash attention in Pallas' interpreter: the values and gradients of plain attention, and only the blocks it needs."""

import dataclasses
import functools
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packing import packed, segment_mask

from flowjax.models import flash
from flowjax.models.attention import attend
from flowjax.models.flash import flash_attend, seen_keys

TOKENS = 300  # no multiple of a block: two whole ones of queries and a part
ROWS = 2
flash_here = functools.partial(flash_attend, interpret=True)


def _random_places(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows of sequences of random lengths, from one of all tokens to many of a few; padding behind some."""
    rows = []
    for _ in range(ROWS):
        left, lengths, mean = TOKENS - int(rng.integers(0, 120)) * int(rng.integers(2)), [], rng.choice([5, 40, 400])
        while left > 0:
            lengths.append(min(left, 1 + int(rng.exponential(mean))))
            left -= lengths[-1]
        rows.append(lengths)
    return packed(rows, TOKENS)


def _find(function: Any, soft_cap: float | None) -> Any:
    """Jitted (arrays, pull, segments, positions, window) -> values and gradients, without padding."""

    @jax.jit
    def find(arrays, pull, segments, positions, window):
        real = (segments != 0)[:, :, None, None]

        def loss(*arrays):
            places = (segments, positions, segments, positions)
            mixed = function(*arrays, *places, window_tokens=window, soft_cap=soft_cap)
            mixed = jnp.where(real, mixed, 0)
            return jnp.sum((mixed * pull).astype(jnp.float32)), mixed

        gradients, mixed = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
        return mixed, gradients

    return find


def _size(x: jax.Array) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


@pytest.mark.parametrize("packings", [10, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "bound", "heads", "kv_heads", "dim", "soft_cap"),
    [
        (jnp.float32, 1e-5, 4, 4, 16, None),
        (jnp.float32, 1e-5, 4, 2, 32, 3.0),
        (jnp.float32, 1e-5, 7, 1, 24, None),
        (jnp.bfloat16, 2e-3, 4, 2, 64, None),
        (jnp.bfloat16, 2e-3, 3, 1, 80, 20.0),
    ],
)
def test_random_packings_and_windows(dtype, bound, heads, kv_heads, dim, soft_cap, packings):
    """Five head ratios, sizes and soft caps. The measure is float32; results are of size 1, and rounded."""
    ours, plain = _find(flash_here, soft_cap), _find(attend, soft_cap)
    rng = np.random.default_rng(heads)
    for _ in range(packings):
        segments, positions = _random_places(rng)
        window = int(rng.choice([1, 7, 64, 100, TOKENS]))
        shapes = [(ROWS, TOKENS, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
        *arrays, pull = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
        found = ours(arrays, pull, segments, positions, window)
        wide = [array.astype(jnp.float32) for array in (*arrays, pull)]
        wanted = plain(wide[:3], wide[3], segments, positions, window)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            rounded = theirs.astype(dtype).astype(jnp.float32)
            error, size, rounding = (_size(x) for x in (mine - theirs, theirs, rounded - theirs))
            assert error < np.hypot(bound * max(size, 1.0), rounding), (segments, window)


@pytest.mark.parametrize("window", [90, TOKENS])
def test_a_part_of_the_queries_gives_that_part_of_the_result(window):
    """As under config.mesh.sequence: a device has some queries of a row, in pieces, and all its keys."""
    segments, positions = map(jnp.asarray, packed([[60, 140, 70], [290]], TOKENS))
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, TOKENS, n, 16)), jnp.float32) for n in (4, 2, 2)]
    pull = jnp.asarray(rng.normal(size=(2, TOKENS, 4, 16)), jnp.float32) * (segments != 0)[:, :, None, None]

    @jax.jit
    def mixed(part):
        def mix(query, key, value):
            places = (segments[:, part], positions[:, part], segments, positions)
            return flash_here(query[:, part], key, value, *places, window_tokens=window)

        found, pull_back = jax.vjp(mix, *arrays)
        return found, pull_back(pull[:, part])

    whole, wanted = mixed(np.arange(TOKENS))
    sums = [jnp.zeros_like(x) for x in arrays]
    for part in np.split(np.arange(TOKENS).reshape(3, 2, 50).swapaxes(0, 1).ravel(), 2):  # every second fifty
        mine, gradients = mixed(part)
        np.testing.assert_allclose(mine, whole[:, part], rtol=1e-5, atol=1e-6)
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    for mine, theirs in zip(sums, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_padding_gives_zeros_and_no_gradient():
    segments, positions = map(jnp.asarray, packed([[50], [0]], 100))
    query, key, value = (jnp.full((2, 100, 2, 16), 3.0) for _ in range(3))

    def total(query, key, value):
        mixed = flash_here(query, key, value, segments, positions, segments, positions)
        return jnp.sum(mixed), mixed

    gradients, mixed = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    assert not mixed[0, 50:].any() and not mixed[1].any() and mixed[0, :50].all()
    for gradient in gradients:
        assert jnp.isfinite(gradient).all() and not gradient[0, 50:].any() and not gradient[1].any()


@pytest.mark.parametrize("part", [slice(None), slice(50, 105)])
@pytest.mark.parametrize("window", [None, 30])
def test_seen_keys_are_those_of_the_segment_mask(window, part):
    segments, positions = map(jnp.asarray, packed([[60, 40, 3], [100]], 110))
    seen = seen_keys(segments[:, part], positions[:, part], segments, positions, window)
    key = jnp.arange(110)
    run = (key >= seen.first[:, :, None]) & (key <= seen.last[:, :, None])
    np.testing.assert_array_equal(run, segment_mask(segments, positions, window)[:, part])


def test_the_segment_mask_by_hand():
    seen = segment_mask(jnp.array([[1, 1, 2, 2, 0]]), jnp.array([[0, 1, 0, 1, 0]]), None)[0]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(seen, np.array(expected, bool))


def test_blocks_of_other_segments_and_of_later_keys_are_not_visited():
    """Blocks visited: those with a pair that is seen and, at most, a few at the edges; unmasked ones are seen whole."""
    blocks = flash._Blocks(32, 16, 4)
    segments, positions = packed([[200, 30, 100, 150]], 512)
    mask = np.asarray(segment_mask(jnp.asarray(segments), jnp.asarray(positions), None))[0]
    segments, positions = jnp.asarray(segments), jnp.asarray(positions)
    seen = seen_keys(segments, positions, segments, positions, None)
    tiles = mask.reshape(16, 32, 32, 16).swapaxes(1, 2)
    some, every = tiles.any(axis=(2, 3)), tiles.all(axis=(2, 3))
    by_query = np.asarray(flash._key_blocks(seen, blocks))[0]
    by_key = np.asarray(flash._query_blocks(seen, blocks, 512))[0]
    for bounds, partly, wholly in ((by_query, some, every), (by_key, some.T, every.T)):
        number = np.arange(partly.shape[1])
        visited = (number >= bounds[:, :1]) & (number < bounds[:, 3:])
        unmasked = (number >= bounds[:, 1:2]) & (number < bounds[:, 2:3])
        np.testing.assert_array_equal(visited, partly)
        np.testing.assert_array_equal(unmasked, wholly)


def test_no_scores_and_no_copies_of_keys_are_in_the_program():
    """Lowered for a GPU: three kernels, no array of [queries, keys], keys with their own number of heads."""
    shapes = [(1, 2048, heads, 128) for heads in (8, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ids = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

    def total(query, key, value, segments, positions):
        return flash_attend(query, key, value, segments, positions, segments, positions).astype(jnp.float32).sum()

    with hlo.described_gpu():
        traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(arrays[0], arrays[1], arrays[2], ids, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3
    assert "2048x2048" not in text


def test_every_head_size_has_blocks_that_triton_takes():
    for dim in (16, 64, 96, 128, 256):
        form = flash.flash_form(jnp.zeros((1, 1, 1, dim)), None, None, False)
        for blocks in (form.forward, form.of_queries, form.of_keys):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (blocks.queries, blocks.keys))
            assert dataclasses.astuple(blocks)[2] in (4, 8)
