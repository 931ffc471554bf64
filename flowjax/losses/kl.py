"""Staying near a reference policy: estimates of the KL per token, in the loss or in the reward."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

KlKind = Literal["k1", "k2", "k3", "abs"]

LARGEST_KL = 10.0


def kl_penalty(
    logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"], kind: KlKind = "k3"
) -> Float[Array, "*tokens"]:
    """Estimate of KL(pi || reference) on each sampled token, d = log pi - log reference. Schulman 2020.

    k1   d                    unbiased, noisy, may be negative; its gradient as a loss is zero in expectation
    k2   d^2 / 2              its gradient is that of the KL
    k3   exp(-d) - 1 + d      unbiased and never negative; bounded at 10
    abs  |d|
    """
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        bounded = jnp.clip(difference, -LARGEST_KL, LARGEST_KL)
        return jnp.minimum(jnp.expm1(-bounded) + bounded, LARGEST_KL)
    if kind == "abs":
        return jnp.abs(difference)
    raise ValueError(f"kl kind is {kind!r}, it is one of k1, k2, k3, abs")


def kl_in_reward(
    advantages: Float[Array, "*tokens"],
    logprobs: Float[Array, "*tokens"],
    reference_logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    coefficient: float | Float[Array, ""],
    kind: KlKind = "k1",
) -> Float[Array, "*tokens"]:
    """Advantages less coefficient times the token's own KL, without gradient: the penalty as a reward per token."""
    penalty = jax.lax.stop_gradient(kl_penalty(logprobs, reference_logprobs, kind))
    return jnp.where(mask, advantages - coefficient * penalty, 0.0)


def adapted_coefficient(
    coefficient: float, mean_kl: float, *, target: float, sequences: int, horizon: int = 10_000
) -> float:
    """Next KL coefficient: up when the KL is above `target`, down when below. Ziegler et al. 2019, section 2.2.

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon)
    """
    error = min(max(mean_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * sequences / horizon)
