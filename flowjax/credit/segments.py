"""Statistics of masked rows by segment, and sums along trajectories: what estimators are made of."""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from flowjax.credit.table import TurnTable
from flowjax.fields import Interval

Norm = Literal["mean", "mean_std", "none"]
# Options of estimators are traced, so that another value needs no other program.
Number = float | Real[Array, ""]
Discount = Annotated[Number, Interval(at_least=0, at_most=1)]
Weight = Annotated[Number, Interval(at_least=0)]

EPSILON = 1e-6


def segment_total(
    values: Float[Array, "rows"], segment: Int[Array, "rows"], segments: int | None = None
) -> Float[Array, "rows"]:
    """For each row, the sum of `values` over the rows of its segment. By default at most as many segments as rows."""
    # A scatter into a static number of segments: how many there are is not known while tracing.
    totals = jnp.zeros(segments or values.shape[0], values.dtype).at[segment].add(values)
    return totals[segment]


def segment_statistics(
    values: Float[Array, "rows"], segment: Int[Array, "rows"], weight: Bool[Array, "rows"], segments: int | None = None
) -> tuple[Float[Array, "rows"], Float[Array, "rows"], Float[Array, "rows"]]:
    """Count, mean and unbiased standard deviation of the rows with `weight` in each row's segment.

    The mean of an empty segment is zero, as is the deviation of a segment with fewer than two such rows.
    """
    counted = weight.astype(values.dtype)
    count = segment_total(counted, segment, segments)
    mean = segment_total(counted * values, segment, segments) / jnp.maximum(count, 1)
    # From the deviations, not as E[x^2] - E[x]^2: in float32 that difference of large numbers may be below zero.
    squares = segment_total(counted * jnp.square(values - mean), segment, segments)
    return count, mean, jnp.sqrt(squares / jnp.maximum(count - 1, 1))


def is_last_turn(table: TurnTable) -> Bool[Array, "turns"]:
    """Turns after which their trajectory has no further one."""
    return table.successor == _row_numbers(table)


def state_visits(table: TurnTable) -> Int[Array, "turns"]:
    """Segment of each turn: the same for turns of one group that started in the same state. Ids are below the rows.

    Two policies of one task may act in the same state; what follows for one says nothing about the other, so the group
    is part of the segment.
    """
    # The last key leads: rows of a group come together, and among them those of a state.
    order = jnp.lexsort((table.state, table.group))
    group, state = table.group[order], table.state[order]
    differs = (group[1:] != group[:-1]) | (state[1:] != state[:-1])
    segment = jnp.concatenate([jnp.zeros(1, table.state.dtype), jnp.cumsum(differs, dtype=table.state.dtype)])
    return jnp.zeros_like(table.state).at[order].set(segment)


def first_rows(table: TurnTable) -> Bool[Array, "turns"]:
    """One counted row per trajectory, its first: statistics over these weigh an episode once, however long it is."""
    has_predecessor = jnp.zeros_like(table.mask).at[table.successor].max(table.successor != _row_numbers(table))
    return table.mask & ~has_predecessor


def normalise(
    values: Float[Array, "rows"], mean: Float[Array, "rows"], deviation: Float[Array, "rows"], norm: Norm
) -> Float[Array, "rows"]:
    """`values` less their mean, over their deviation, as `norm` says."""
    if norm == "none":
        return values
    centred = values - mean
    return centred / (deviation + EPSILON) if norm == "mean_std" else centred


def whiten(values: Float[Array, "rows"], mask: Bool[Array, "rows"]) -> Float[Array, "rows"]:
    """Zero mean and unit variance over all counted rows of the table."""
    count = jnp.maximum(mask.sum(), 1)
    mean = jnp.sum(values * mask) / count
    variance = jnp.sum(jnp.square(values - mean) * mask) / jnp.maximum(count - 1, 1)
    return (values - mean) * jax.lax.rsqrt(variance + 1e-8)


def discounted_sums(
    values: Float[Array, "turns"], successor: Int[Array, "turns"], gamma: Number
) -> Float[Array, "turns"]:
    """G_t = x_t + gamma G_{t+1} along each trajectory.

    By pointer doubling: after k rounds each row holds the sum of its next 2^k turns, so the rounds are the logarithm
    of the longest trajectory and rows may lie in any order.
    """
    is_last = successor == jnp.arange(successor.shape[0])
    decay = jnp.where(is_last, 0.0, jnp.asarray(gamma, values.dtype))

    # The last turn points to itself with factor 0, a fixed point: rows that are done add nothing in later rounds.
    def unfinished(carry: tuple[Array, Array, Array, Array]) -> Bool[Array, ""]:
        _, _, pointer, previous = carry
        return jnp.any(pointer != previous)

    def double(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        total, factor, pointer, _ = carry
        return total + factor * total[pointer], factor * factor[pointer], pointer[pointer], pointer

    start = (values, decay, successor, jnp.arange(successor.shape[0], dtype=successor.dtype))
    return jax.lax.while_loop(unfinished, double, start)[0]


def _row_numbers(table: TurnTable) -> Int[Array, "turns"]:
    return jnp.arange(table.mask.shape[0], dtype=table.successor.dtype)
