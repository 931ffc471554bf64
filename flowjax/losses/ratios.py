"""Reductions over masked tokens and over the sequences that tokens belong to."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def masked_sum(values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
    """Sum over the tokens with `mask`; what stands elsewhere, NaN included, does not enter."""
    return jnp.sum(jnp.where(mask, values, 0.0))


def masked_max(values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
    """Largest value of the tokens with `mask`, zero when there are none or all are negative."""
    return jnp.max(jnp.where(mask, values, 0.0), initial=0.0)


def sequence_sums(
    values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"], sequences: Int[Array, "*tokens"], count: int
) -> tuple[Float[Array, "sequences"], Float[Array, "sequences"]]:
    """Sum of `values` and number of tokens of each sequence."""
    ids = sequences.reshape(-1)
    kept = jnp.where(mask, values, 0.0).reshape(-1)
    sums = jnp.zeros(count, values.dtype).at[ids].add(kept)
    return sums, jnp.zeros(count, values.dtype).at[ids].add(mask.reshape(-1).astype(values.dtype))


def sequence_means(
    values: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"], sequences: Int[Array, "*tokens"], count: int
) -> Float[Array, "*tokens"]:
    """For each token, the mean of `values` over its sequence."""
    sums, lengths = sequence_sums(values, mask, sequences, count)
    return (sums / jnp.maximum(lengths, 1))[sequences]
