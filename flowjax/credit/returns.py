"""Estimators that look forward from each turn: discounted returns, REINFORCE++."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flowjax.credit.segments import Norm, discounted_sums, is_last_turn, normalise, segment_statistics, whiten
from flowjax.credit.table import TurnTable

Rewards = Literal["score", "reward"]


def turn_rewards(table: TurnTable, rewards: Rewards) -> Float[Array, "turns"]:
    """What each turn earns: the environment's reward, or the trajectory's score all at its last turn."""
    if rewards == "reward":
        return jnp.where(table.mask, table.reward, 0.0)
    return jnp.where(table.mask & is_last_turn(table), table.score, 0.0)


@partial(jax.jit, static_argnames=("rewards", "norm"))
def discounted_return(
    table: TurnTable, *, gamma: float = 0.95, rewards: Rewards = "score", norm: Norm = "mean"
) -> Float[Array, "turns"]:
    """G_t = r_t + gamma G_{t+1} over the turns of a trajectory, centred over all turns of the group."""
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    _, mean, deviation = segment_statistics(value, table.group, table.mask)
    return jnp.where(table.mask, normalise(value, mean, deviation, norm), 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def reinforce_plus_plus(table: TurnTable, *, gamma: float = 1.0, rewards: Rewards = "score") -> Float[Array, "turns"]:
    """Discounted return, whitened over all turns of the table. REINFORCE++ (arXiv 2501.03262), turns as actions."""
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    return jnp.where(table.mask, whiten(value, table.mask), 0.0)
