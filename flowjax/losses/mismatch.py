"""Sampler and trainer disagree a little on log-probabilities: how much, and what to do about it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.losses.ratios import masked_max, masked_sum, sequence_sums

Correction = Literal[
    "none",
    "token_truncate",
    "token_clamp",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_geometric_mask",
    "sequence_outlier_mask",
]

LARGEST_LOG_RATIO = 20.0


def mismatch_metrics(
    trainer_logprobs: Float[Array, "*tokens"],
    engine_logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
) -> dict[str, Float[Array, ""]]:
    """How far the trainer's log-probabilities are from the engine's on the engine's own tokens.

    With d = log pi_trainer - log mu_engine on tokens sampled from mu: k1 = -d and k3 = exp(d) - 1 - d estimate
    KL(mu || pi). All are sums over tokens, to be divided by `tokens`, but for the maximum.
    """
    difference = jnp.where(mask, trainer_logprobs - engine_logprobs, 0.0).astype(jnp.float32)
    bounded = jnp.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return {
        "k1": -masked_sum(difference, mask),
        "k3": masked_sum(jnp.expm1(bounded) - bounded, mask),
        "abs": masked_sum(jnp.abs(difference), mask),
        "max": masked_max(jnp.abs(difference), mask),
        "tokens": masked_sum(jnp.ones_like(difference), mask),
    }


def correction_weights(
    log_ratio: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    correction: Correction,
    low: float | Float[Array, ""],
    high: float | Float[Array, ""],
    sequences: Int[Array, "*tokens"] | None = None,
    sequence_count: int | None = None,
) -> Float[Array, "*tokens"]:
    """Weight of each token from its ratio w = pi_anchor / mu, without gradient.

    token_truncate           min(w, high): truncated importance sampling
    token_clamp              w brought into [low, high]
    token_mask               w inside [low, high], else 0 (IcePop)
    sequence_truncate        min(product of the sequence's w, high)
    sequence_mask            1 where the product lies in [low, high], else 0
    sequence_geometric_mask  1 where the geometric mean lies in [low, high], else 0
    sequence_outlier_mask    1 where every token of the sequence lies in [low, high], else 0
    """
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, log_ratio, 0.0))
    log_ratio = jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    inside = (ratio >= low) & (ratio <= high)
    if correction == "none":
        return jnp.ones_like(ratio)
    if correction == "token_truncate":
        return jnp.minimum(ratio, high)
    if correction == "token_clamp":
        return jnp.clip(ratio, low, high)
    if correction == "token_mask":
        return jnp.where(inside, ratio, 0.0)
    if sequences is None or sequence_count is None:
        raise ValueError(f"correction {correction!r} needs `sequences` and `sequence_count`")
    if correction == "sequence_outlier_mask":
        outside, _ = sequence_sums((~inside).astype(ratio.dtype), mask, sequences, sequence_count)
        return (outside == 0)[sequences].astype(ratio.dtype)
    log_product, length = sequence_sums(log_ratio, mask, sequences, sequence_count)
    if correction == "sequence_geometric_mask":
        log_product = log_product / jnp.maximum(length, 1)
    product = jnp.exp(jnp.clip(log_product, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))[sequences]
    if correction == "sequence_truncate":
        return jnp.minimum(product, high)
    return ((product >= low) & (product <= high)).astype(ratio.dtype)
