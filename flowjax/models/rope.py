"""Rotary positions (RoFormer, arXiv 2104.09864), with the scalings to longer contexts that several families use."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flowjax.models.shape import AnyScaling, LinearScaling, RopeScaling, YarnScaling


def rope_frequencies(head_dim: int, theta: float, scaling: AnyScaling | None) -> Float[Array, "half"]:
    """Radians per position, theta^(-2i/d), lowered as the model's family scales them."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    match scaling:
        case LinearScaling():
            return frequency / scaling.factor
        case RopeScaling():
            return _between(frequency, _llama3_kept(frequency, scaling), scaling.factor)
        case YarnScaling():
            return _between(frequency, _yarn_kept(head_dim, theta, scaling), scaling.factor)
        case _:
            return frequency


def _between(frequency: jax.Array, kept: jax.Array, factor: float) -> jax.Array:
    """Share `kept` of each frequency as it is, and the rest divided by `factor`."""
    return frequency * (kept + (1 - kept) / factor)


def _llama3_kept(frequency: Float[Array, "half"], scaling: RopeScaling) -> Float[Array, "half"]:
    """Share of each frequency that Llama 3.1 keeps.

    Wavelengths longer than original/low_frequency_factor are slowed by `factor`, those shorter than
    original/high_frequency_factor stay, those between are interpolated.
    """
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return jnp.clip((turns - low) / (high - low), 0.0, 1.0)


def _yarn_kept(head_dim: int, theta: float, scaling: YarnScaling) -> Float[Array, "half"]:
    """Share of each frequency that YaRN keeps: a ramp over dimensions (arXiv 2309.00071, eq. 22 and 23)."""

    def dimension(turns: float) -> float:
        # The i at which theta^(-2i/d) makes so many full turns over the original length.
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.fast_turns), dimension(scaling.slow_turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    return 1 - jnp.clip(ramp, 0.0, 1.0)


def rope_angles(
    positions: Int[Array, "rows tokens"], head_dim: int, theta: float, scaling: AnyScaling | None
) -> tuple[Float[Array, "rows tokens 1 half"], Float[Array, "rows tokens 1 half"]]:
    """Cosine and sine for each position, in float32: bfloat16 cannot tell positions beyond 256 apart."""
    angle = positions[..., None, None].astype(jnp.float32) * rope_frequencies(head_dim, theta, scaling)
    scale = 1.0
    if isinstance(scaling, YarnScaling):  # on queries and keys alike, so that scores are multiplied by its square
        scale = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    return scale * jnp.cos(angle), scale * jnp.sin(angle)


def rotate(
    x: Float[Array, "rows tokens heads dim"],
    cos: Float[Array, "rows tokens 1 half"],
    sin: Float[Array, "rows tokens 1 half"],
) -> Float[Array, "rows tokens heads dim"]:
    """Rotate pairs (i, i + dim/2) of every head in float32: Hugging Face's pairs, where the paper has neighbours."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
