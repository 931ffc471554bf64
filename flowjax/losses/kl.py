"""Estimates of the KL to a reference policy, per token."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

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
