"""M2PO's clip bounds: chosen so that the second moment of the log-ratio stays below a threshold."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

WIDEST_LOW = 0.95
WIDEST_HIGH = 20.0
SLACK = 1e-5  # so that rounding never cuts the token that the bound was taken from


def m2po_bounds(
    logprobs: Float[Array, "*tokens"],
    behaviour_logprobs: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    threshold: float | Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """(clip_low, clip_high, second moment before clipping). M2PO (arXiv 2510.01161).

    Among the tokens whose ratio moved where the advantage pushes, drop the largest squared log-ratios until the mean of
    the rest is below `threshold`; the largest that stays is tau^2, and the ratio may go from exp(-tau) to exp(tau).

    Pass the tokens of the whole optimiser batch: bounds found in each micro-batch would depend on how it was split. So
    the trainer goes over the batch twice, forward for these bounds, then for the gradient with `ratio_bounds`.
    """
    log_ratio = jax.lax.stop_gradient(logprobs - behaviour_logprobs).reshape(-1)
    advantages, mask = advantages.reshape(-1), mask.reshape(-1)
    pushed = mask & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))
    squares = jnp.where(pushed, jnp.square(log_ratio), 0.0)
    count = jnp.sum(pushed)
    ascending = jnp.sort(squares)
    rank = jnp.arange(1, squares.shape[0] + 1) - (squares.shape[0] - count)  # the others sort to the front as zeros
    means = jnp.cumsum(ascending) / jnp.maximum(rank, 1)
    fits = (rank >= 1) & (means < threshold)
    smallest = ascending[jnp.clip(squares.shape[0] - count, 0, squares.shape[0] - 1)]
    largest_kept = jnp.where(jnp.any(fits), jnp.max(jnp.where(fits, ascending, 0.0)), smallest)
    second_moment = jnp.sum(squares) / jnp.maximum(count, 1)
    wide = (count == 0) | (second_moment <= threshold)
    tau = jnp.sqrt(largest_kept) * (1 + SLACK) + SLACK
    low = jnp.where(wide, WIDEST_LOW, jnp.minimum(-jnp.expm1(-tau), WIDEST_LOW))
    high = jnp.where(wide, WIDEST_HIGH, jnp.minimum(jnp.expm1(tau), WIDEST_HIGH))
    return low, high, second_moment
