"""Functions of tokens' log-ratios: sums over masked tokens and sequences, KL estimates, the mismatch between sampler
and trainer with weights that correct for it, M2PO's clip bounds."""

import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.fields import nearest

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
KlKind = Literal["k1", "k2", "k3", "abs"]
Scalar = float | Float[Array, ""]

LARGEST_LOG_RATIO = 20.0  # e^20 squared is still a float32; a ratio beyond it is noise, and must not become infinite
LARGEST_KL = 10.0
WIDEST_LOW, WIDEST_HIGH = 0.95, 20.0  # M2PO's bounds where nothing needs to be clipped
_SLACK = 1e-5  # so that rounding never clips the token that M2PO's bound was taken from


def check_choice(what: str, given: str, choices: Any) -> None:
    """Raises:
    ValueError: `given` is not one of a Literal's values.
    """
    if given not in (known := typing.get_args(choices)):
        raise ValueError(f"{what} is {given!r}{nearest(given, known)}; it is one of {', '.join(known)}")


def check_dimensions(tokens: jax.Array, **others: jax.Array) -> None:
    """Raises:
    ValueError: one of `others` has not one entry for each of `tokens`, nor one for each of its rows or columns.
    """
    for name, array in others.items():
        if array.ndim != tokens.ndim:
            raise ValueError(f"{name} has shape {array.shape}, logprobs {tokens.shape}: give one for each token")


# ---------------------------------------------------------------------------------------------------------- reductions


def at_least_float32(values: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """`values` in float32 if they have fewer bits: bfloat16 counts to 256, and float16 to 65,504."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def masked_sum(values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
    """Sum over the tokens with `mask`; values elsewhere are ignored, NaN included."""
    return jnp.sum(jnp.where(mask, at_least_float32(values), 0.0))


def masked_max(values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
    """Largest value of the tokens with `mask`, zero when there are none or all are negative."""
    return jnp.max(jnp.where(mask, values, 0.0), initial=0.0)


def sequence_sums(
    values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"], sequences: Int[Array, "*tokens"], count: int
) -> tuple[Float[Array, "sequences"], Float[Array, "sequences"]]:
    """Sum of `values` and number of tokens of each sequence; zeros for ids without a token.

    `count` bounds the ids. If a token with `mask` has another id, all sums are NaN: it would be missing in them.
    """
    values, ids = at_least_float32(values), sequences.reshape(-1)
    kept = jnp.where(mask, values, 0.0).reshape(-1)
    lost = jnp.any(mask.reshape(-1) & ((ids < 0) | (ids >= count)))
    sums = jnp.where(lost, jnp.nan, jnp.zeros(count, values.dtype).at[ids].add(kept))
    return sums, jnp.zeros(count, values.dtype).at[ids].add(mask.reshape(-1).astype(values.dtype))


def sequence_means(
    values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"], sequences: Int[Array, "*tokens"], count: int
) -> Float[Array, "*tokens"]:
    """For each token, the mean of `values` over its sequence."""
    sums, lengths = sequence_sums(values, mask, sequences, count)
    return (sums / jnp.maximum(lengths, 1))[sequences]


# ----------------------------------------------------------------------------------------------------------------- KL


def kl_penalty(
    logprobs: Float[Array, "*tokens"],
    reference_logprobs: Float[Array, "*tokens"],
    kind: KlKind = "k3",
    mask: Bool[Array, "*tokens"] | None = None,
) -> Float[Array, "*tokens"]:
    """Estimate of KL(pi || reference) on each sampled token, d = log pi - log reference. Schulman 2020.

    Where `mask` is False it is 0, and NaN there has no part in it, nor in its gradient.

    k1   d                    unbiased, noisy, may be negative; its gradient as a loss is zero in expectation
    k2   d^2 / 2              its gradient is that of the KL
    k3   exp(-d) - 1 + d      unbiased and never negative; as a loss its gradient is that of KL(reference || pi).
                              Bounded at 10, beyond which the gradient is zero: such a token is not pulled back
    abs  |d|
    """
    check_choice("kl kind", kind, KlKind)
    difference = at_least_float32(logprobs) - at_least_float32(reference_logprobs)
    difference = difference if mask is None else jnp.where(mask, difference, 0.0)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        bounded = jnp.maximum(difference, -LARGEST_KL)  # its exponential must not become infinite
        return jnp.minimum(jnp.expm1(-bounded) + bounded, LARGEST_KL)
    return jnp.abs(difference)


# ----------------------------------------------------------------------------------- mismatch of sampler and trainer


def mismatch_metrics(
    trainer_logprobs: Float[Array, "*tokens"],
    engine_logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
) -> dict[str, Float[Array, ""]]:
    """Distances of the trainer's log-probabilities from the engine's on the tokens that the engine sampled.

    With d = log pi_trainer - log mu_engine on tokens sampled from mu: k1 = -d and k3 = exp(d) - 1 - d estimate
    KL(mu || pi). All but the maximum are sums over tokens, to be divided by `tokens`.
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


def mismatch_of_sequences(
    trainer_logprobs: Float[Array, "*tokens"],
    engine_logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    sequences: Int[Array, "*tokens"],
    count: int,
) -> tuple[Float[Array, "sequences"], Float[Array, "sequences"]]:
    """k3 as in `mismatch_metrics`, but at most 10 a token, summed over each sequence; and its number of tokens.

    The bound keeps one very unlikely token from outweighing thousands of others.
    """
    return sequence_sums(kl_penalty(engine_logprobs, trainer_logprobs, "k3"), mask, sequences, count)


def correction_weights(
    log_ratio: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    correction: Correction,
    low: Scalar,
    high: Scalar,
    sequences: Int[Array, "*tokens"] | None = None,
    sequence_count: int | None = None,
) -> Float[Array, "*tokens"]:
    """Weight of each token from its ratio w = pi_proximal / mu, without gradient.

    The trainer gives masks no proximal policy: w is then pi / mu with the policy that is being trained, so that masks
    also drop tokens that training itself has moved out of the band.

    token_truncate           min(w, high): truncated importance sampling
    token_clamp              w clipped to [low, high]
    token_mask               w inside [low, high], else 0 (IcePop)
    sequence_truncate        min(product of the sequence's w, high)
    sequence_mask            1 where the product lies in [low, high], else 0
    sequence_geometric_mask  1 where the geometric mean lies in [low, high], else 0
    sequence_outlier_mask    1 where every token of the sequence lies in [low, high], else 0
    """
    check_choice("correction", correction, Correction)
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, at_least_float32(log_ratio), 0.0))
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
    # Products of ratios as sums of their logarithms: a long sequence's product would overflow or vanish on the way.
    log_product, length = sequence_sums(log_ratio, mask, sequences, sequence_count)
    if correction == "sequence_geometric_mask":
        log_product = log_product / jnp.maximum(length, 1)
    product = jnp.exp(jnp.clip(log_product, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))[sequences]
    if correction == "sequence_truncate":
        return jnp.minimum(product, high)
    return ((product >= low) & (product <= high)).astype(ratio.dtype)


# ---------------------------------------------------------------------------------------------------------------- M2PO


def m2po_bounds(
    logprobs: Float[Array, "*tokens"],
    old_logprobs: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    threshold: Scalar,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(clip_low, clip_high) for the ratio of `logprobs` to `old_logprobs`. M2PO (arXiv 2510.01161).

    Among the tokens whose ratio moved where the advantage pushes, drop the largest squared log-ratios until the mean of
    the rest is below `threshold`; the largest that stays is tau^2, and the ratio may go from exp(-tau) to exp(tau).
    The smallest always stays, even above the threshold.

    Pass the tokens of the whole optimiser batch: bounds found in each micro-batch would depend on how it was split. So
    the trainer goes over the batch twice, forward for these bounds, then for the gradient with `ratio_bounds`.

    Args:
        old_logprobs: denominator of the ratio: the sampler's log-probabilities, or the proximal policy's.
    """
    log_ratio = jax.lax.stop_gradient(at_least_float32(logprobs) - at_least_float32(old_logprobs)).reshape(-1)
    advantages, mask = advantages.reshape(-1), mask.reshape(-1)
    pushed = mask & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))
    squares = jnp.where(pushed, jnp.square(log_ratio), 0.0)
    count = jnp.sum(pushed)
    ascending = jnp.sort(squares)
    rank = jnp.arange(1, squares.shape[0] + 1) - (squares.shape[0] - count)  # the others sort to the front as zeros
    means = jnp.cumsum(ascending) / jnp.maximum(rank, 1)  # of the r smallest, for every rank r at once
    fits = (rank >= 1) & (means < threshold)
    # Where not even the smallest fits, it alone stays: bounds of 0 would drop every token.
    smallest = ascending[jnp.clip(squares.shape[0] - count, 0, squares.shape[0] - 1)]
    largest_kept = jnp.where(jnp.any(fits), jnp.max(jnp.where(fits, ascending, 0.0)), smallest)
    wide = (count == 0) | (jnp.sum(squares) / jnp.maximum(count, 1) <= threshold)
    tau = jnp.sqrt(largest_kept) * (1 + _SLACK) + _SLACK
    low = jnp.where(wide, WIDEST_LOW, jnp.minimum(-jnp.expm1(-tau), WIDEST_LOW))
    high = jnp.where(wide, WIDEST_HIGH, jnp.minimum(jnp.expm1(tau), WIDEST_HIGH))
    return low, high
