"""Grouped-query attention within segments, in XLA alone; attention_kernels.py has the faster forms for GPU and TPU."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK_TOKENS = 1024  # queries whose scores exist at once, at most
BLOCKS = 8  # that a row is cut into, each with the keys up to its own end: little more than half of all scores
SMALL_BLOCK_TOKENS = {"cpu": 64}  # smaller ones do not pay; by platform, its caches being small
MASKED = -1e30  # finite, so that a row that sees nothing gives a mean and not NaN


def segment_mask(
    segments: Int[Array, "rows queries"],
    positions: Int[Array, "rows queries"],
    window_tokens: int | Int[Array, ""] | None,
    key_segments: Int[Array, "rows keys"] | None = None,
    key_positions: Int[Array, "rows keys"] | None = None,
) -> Bool[Array, "rows queries keys"]:
    """[row, query, key] True where the query sees the key: same segment, not padding (0), not later, in the window.

    Keys are the queries' own tokens unless given. Positions grow within a segment.
    """
    key_segments = segments if key_segments is None else key_segments
    key_positions = positions if key_positions is None else key_positions
    distance = positions[:, :, None] - key_positions[:, None, :]
    seen = (segments[:, :, None] == key_segments[:, None, :]) & (segments[:, :, None] != 0) & (distance >= 0)
    return seen if window_tokens is None else seen & (distance < window_tokens)


def attend(
    query: Float[Array, "rows queries heads dim"],
    key: Float[Array, "rows keys kv_heads dim"],
    value: Float[Array, "rows keys kv_heads dim"],
    segments: Int[Array, "rows queries"],
    positions: Int[Array, "rows queries"],
    key_segments: Int[Array, "rows keys"],
    key_positions: Int[Array, "rows keys"],
    *,
    window_tokens: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    block_tokens: int | None = None,
) -> Float[Array, "rows queries heads dim"]:
    """softmax(scale q k) v with float32 scores; heads share keys in groups, never repeated in memory (GQA).

    With `soft_cap` scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118). `scale` is 1 / sqrt(dim) unless
    stated. Queries go block after block of `block_tokens`, recomputed in the backward pass, so that memory grows with
    keys * block_tokens and not with keys * queries. As many keys as queries are taken for the queries' own tokens:
    none then sees a key that stands after it in the row, and blocks leave out the keys after their end.
    """
    rows, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    scale = dim**-0.5 if scale is None else scale
    query = query.reshape(rows, tokens, kv_heads, heads // kv_heads, dim) * jnp.asarray(scale, query.dtype)
    # Heads before tokens: otherwise XLA's CPU backend transposes the scores instead.
    query, key, value = query.transpose(0, 2, 3, 1, 4), key.swapaxes(1, 2), value.swapaxes(1, 2)

    @functools.partial(jax.checkpoint, static_argnums=3)
    def block(query: jax.Array, segments: jax.Array, positions: jax.Array, keys: int) -> jax.Array:
        seen = segment_mask(segments, positions, window_tokens, key_segments[:, :keys], key_positions[:, :keys])
        scores = jnp.einsum("rkgtd,rksd->rkgts", query, key[:, :, :keys], preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        mixed = jnp.einsum("rkgts,rksd->rkgtd", weights.astype(value.dtype), value[:, :, :keys])
        return (mixed / weights.sum(axis=-1, keepdims=True)).astype(value.dtype)

    own = key.shape[2] == tokens
    size = block_tokens or default_block_tokens(tokens if own else 0)
    if own and tokens <= BLOCKS * size:
        ends = [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
        parts = [block(query[:, :, :, i:j], segments[:, i:j], positions[:, i:j], j) for i, j in ends]
        mixed = jnp.concatenate(parts, axis=3)
    else:
        padding = -tokens % size

        def blocks(x: jax.Array, axis: int) -> jax.Array:
            x = jnp.moveaxis(x, axis, 0)
            x = jnp.pad(x, ((0, padding), *((0, 0) for _ in x.shape[1:])))
            return jnp.moveaxis(x.reshape(-1, size, *x.shape[1:]), 1, axis + 1)

        xs = (blocks(query, 3), blocks(segments, 1), blocks(positions, 1))
        parts = jax.lax.map(lambda xs: block(*xs, key.shape[2]), xs)
        mixed = jnp.moveaxis(parts, 0, 3).reshape(*query.shape[:3], -1, dim)[:, :, :, :tokens]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, tokens, heads, dim)


def default_block_tokens(tokens: int) -> int:
    """Queries in a block of a row of `tokens`."""
    smallest = SMALL_BLOCK_TOKENS.get(jax.default_backend(), BLOCK_TOKENS)
    return min(max(-(-tokens // BLOCKS), smallest), BLOCK_TOKENS)
