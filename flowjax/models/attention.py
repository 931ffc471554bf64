"""Grouped-query attention within segments, in XLA alone; attention_kernels.py has the faster forms for GPU and TPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK_TOKENS = 1024  # longer rows attend block after block of queries
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
    block_tokens: int = BLOCK_TOKENS,
) -> Float[Array, "rows queries heads dim"]:
    """softmax(scale q k) v with float32 scores; heads share keys in groups, never repeated in memory (GQA).

    With `soft_cap` scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118). `scale` is 1 / sqrt(dim) unless
    stated. More queries than `block_tokens` go block after block, recomputed in the backward pass, so that memory
    grows with keys * block_tokens and not with keys * queries.
    """
    rows, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    scale = dim**-0.5 if scale is None else scale
    query = query.reshape(rows, tokens, kv_heads, heads // kv_heads, dim) * jnp.asarray(scale, query.dtype)

    def block(query: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        seen = segment_mask(segments, positions, window_tokens, key_segments, key_positions)
        scores = jnp.einsum("rtkgd,rskd->rkgts", query, key, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(value.dtype)
        return jnp.einsum("rkgts,rskd->rtkgd", weights, value)

    if tokens <= block_tokens:
        return block(query, segments, positions).reshape(rows, tokens, heads, dim)
    padding = -tokens % block_tokens

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))
        return x.reshape(rows, -1, block_tokens, *x.shape[2:]).swapaxes(0, 1)

    mixed = jax.lax.map(lambda xs: jax.checkpoint(block)(*xs), (blocks(query), blocks(segments), blocks(positions)))
    return mixed.swapaxes(0, 1).reshape(rows, -1, heads, dim)[:, :tokens]
