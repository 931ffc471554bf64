"""Estimators that look forward from each turn: discounted returns, REINFORCE++, GiGPO."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flowjax.credit.episode import grpo
from flowjax.credit.segments import (
    Discount,
    Norm,
    Weight,
    discounted_sums,
    is_last_turn,
    normalise,
    segment_statistics,
    state_visits,
    whiten,
)
from flowjax.credit.table import TurnTable

Rewards = Literal["score", "reward"]


def turn_rewards(table: TurnTable, rewards: Rewards) -> Float[Array, "turns"]:
    """Reward of each turn: the environment's, or the trajectory's score all at its last turn."""
    if rewards == "reward":
        return jnp.where(table.mask, table.reward, 0.0)
    return jnp.where(table.mask & is_last_turn(table), table.score, 0.0)


@partial(jax.jit, static_argnames=("rewards", "norm"))
def discounted_return(
    table: TurnTable, *, gamma: Discount = 0.95, rewards: Rewards = "score", norm: Norm = "mean"
) -> Float[Array, "turns"]:
    """G_t = r_t + gamma G_{t+1} over the turns of a trajectory, centred over all turns of the group."""
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    _, mean, deviation = segment_statistics(value, table.group, table.mask)
    return jnp.where(table.mask, normalise(value, mean, deviation, norm), 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def reinforce_plus_plus(
    table: TurnTable, *, gamma: Discount = 1.0, rewards: Rewards = "score"
) -> Float[Array, "turns"]:
    """Discounted return, whitened over all turns of the table. REINFORCE++ (arXiv 2501.03262), turns as actions."""
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    return jnp.where(table.mask, whiten(value, table.mask), 0.0)


@partial(jax.jit, static_argnames=("rewards", "norm"))
def gigpo(
    table: TurnTable,
    *,
    gamma: Discount = 0.95,
    step_weight: Weight = 1.0,
    invalid_penalty: Weight = 0.0,
    rewards: Rewards = "reward",
    norm: Norm = "mean",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step. GiGPO (arXiv 2505.10978).

    A_step compares a turn's return G_t = r_t + gamma G_{t+1} with those of all turns of the group that started in the
    same state; a turn with no such companion gets zero. A_episode is `grpo`.

    Args:
        table: the turns.
        gamma: discount per turn.
        step_weight: w.
        invalid_penalty: taken from the return of a turn whose reply could not be read, from no other.
        rewards: the environment's rewards, or the score at the last turn.
        norm: of both parts.
    """
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    # After the sum, not before: a penalty inside it would also blame the turns that led here.
    value = value - invalid_penalty * ~table.valid
    _, mean, deviation = segment_statistics(value, state_visits(table), table.mask)
    step_part = normalise(value, mean, deviation, norm)
    return jnp.where(table.mask, grpo(table, norm=norm) + step_weight * step_part, 0.0)
