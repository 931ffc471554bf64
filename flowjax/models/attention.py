"""Rotary positions and grouped-query attention within segments."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.models.config import ModelConfig, RopeScaling

BLOCK_TOKENS = 1024  # longer rows attend block after block of queries
MASKED = -1e30  # finite, so that a row that sees nothing gives a mean and not NaN


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, "half"]:
    """Radians per position, theta^(-2i/d) (RoFormer, arXiv 2104.09864), stretched as Llama 3.1 does.

    Wavelengths longer than original/low_frequency_factor are slowed by `factor`, those shorter than
    original/high_frequency_factor stay, those between are interpolated.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rope_angles(
    positions: Int[Array, "rows tokens"], config: ModelConfig
) -> tuple[Float[Array, "rows tokens 1 half"], Float[Array, "rows tokens 1 half"]]:
    """Cosine and sine for each position, in float32: bfloat16 cannot tell positions beyond 256 apart."""
    frequency = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "rows tokens heads dim"],
    cos: Float[Array, "rows tokens 1 half"],
    sin: Float[Array, "rows tokens 1 half"],
) -> Float[Array, "rows tokens heads dim"]:
    """Rotate pairs (i, i + dim/2) of every head, Hugging Face's order."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def segment_mask(
    segments: Int[Array, "rows tokens"], positions: Int[Array, "rows tokens"], window_tokens: int | None
) -> Bool[Array, "rows tokens tokens"]:
    """[row, query, key] True where the query sees the key: same segment, not padding (0), not later, in the window."""
    tokens = segments.shape[1]
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0) & causal
    if window_tokens is not None:
        seen &= positions[:, :, None] - positions[:, None, :] < window_tokens
    return seen


def attend(
    query: Float[Array, "rows tokens heads dim"],
    key: Float[Array, "rows tokens kv_heads dim"],
    value: Float[Array, "rows tokens kv_heads dim"],
    seen: Bool[Array, "rows tokens tokens"],
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Float[Array, "rows tokens heads dim"]:
    """softmax(q k / sqrt(dim)) v with float32 scores; heads share keys in groups, never repeated in memory (GQA).

    Rows longer than `block_tokens` go through block after block of queries, recomputed in the backward pass, so that
    memory grows with tokens * block_tokens and not with tokens squared.
    """
    rows, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(rows, tokens, kv_heads, heads // kv_heads, dim) * jnp.asarray(dim**-0.5, query.dtype)

    def block(query: jax.Array, seen: jax.Array) -> jax.Array:
        scores = jnp.einsum("rtkgd,rskd->rkgts", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1).astype(value.dtype)
        return jnp.einsum("rkgts,rskd->rtkgd", weights, value)

    if tokens <= block_tokens:
        return block(query, seen).reshape(rows, tokens, heads, dim)
    padding = -tokens % block_tokens
    queries = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))
    queries = queries.reshape(rows, -1, block_tokens, *query.shape[2:]).swapaxes(0, 1)
    visible = jnp.pad(seen, ((0, 0), (0, padding), (0, 0))).reshape(rows, -1, block_tokens, tokens).swapaxes(0, 1)
    blocks = jax.lax.map(lambda xs: jax.checkpoint(block)(*xs), (queries, visible))
    return blocks.swapaxes(0, 1).reshape(rows, -1, heads, dim)[:, :tokens]
