"""Estimators that look forward from each turn: discounted returns, REINFORCE++, GAE; and a moving baseline."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flowjax.credit.segments import Norm, discounted_sums, first_rows, normalise, segment_statistics, whiten
from flowjax.credit.table import TurnTable

Rewards = Literal["score", "reward"]


def turn_rewards(table: TurnTable, rewards: Rewards) -> Float[Array, "turns"]:
    """What each turn earns: the environment's reward, or the trajectory's score all at its last turn."""
    if rewards == "reward":
        return jnp.where(table.mask, table.reward, 0.0)
    is_last = table.successor == jnp.arange(table.successor.shape[0])
    return jnp.where(table.mask & is_last, table.score, 0.0)


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


@partial(jax.jit, static_argnames=("rewards", "whitened"))
def gae(
    table: TurnTable,
    values: Float[Array, "turns"] | None = None,
    final_values: Float[Array, "turns"] | None = None,
    *,
    gamma: float = 1.0,
    trace: float = 1.0,
    rewards: Rewards = "score",
    whitened: bool = True,
) -> Float[Array, "turns"]:
    """Generalised advantage estimation across turns. arXiv 1506.02438, eq. 16.

    d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma trace A_{t+1}

    Args:
        table: the turns.
        values: a critic's value of the state before each turn; zero without a critic.
        final_values: its value after each turn, read only where a trajectory ends without the environment ending it.
        gamma: discount per turn.
        trace: lambda of the paper.
        rewards: the environment's rewards, or the score at the last turn.
        whitened: bring to zero mean and unit variance over the table.
    """
    if values is None:
        values = jnp.zeros_like(table.score)
    if final_values is None:
        final_values = jnp.zeros_like(values)
    is_last = table.successor == jnp.arange(table.successor.shape[0])
    after = jnp.where(is_last, jnp.where(table.terminal, 0.0, final_values), values[table.successor])
    errors = jnp.where(table.mask, turn_rewards(table, rewards) + gamma * after - values, 0.0)
    advantage = discounted_sums(errors, table.successor, gamma * trace)
    if whitened:
        advantage = whiten(advantage, table.mask)
    return jnp.where(table.mask, advantage, 0.0)


@jax.jit
def agent_baseline(table: TurnTable, baseline: Float[Array, "agents"] | None = None) -> Float[Array, "turns"]:
    """A = x - b(agent), b a moving average of the agent's scores over earlier tables. SPIRAL (arXiv 2506.24119).

    For self-play, where the members of a group are not alike. `update_baseline` gives the next b; it starts at zero.
    """
    if baseline is None:
        baseline = jnp.zeros_like(table.score)
    return jnp.where(table.mask, table.score - baseline[table.agent], 0.0)


@jax.jit
def update_baseline(
    table: TurnTable, baseline: Float[Array, "agents"], *, decay: float = 0.95
) -> Float[Array, "agents"]:
    """b <- decay^n b + (1 - decay^n) mean, n trajectories of the agent at once, so that their order does not matter."""
    members = first_rows(table)
    count = jnp.zeros_like(baseline).at[table.agent].add(members)
    total = jnp.zeros_like(baseline).at[table.agent].add(jnp.where(members, table.score, 0.0))
    keep = decay**count
    return keep * baseline + (1 - keep) * total / jnp.maximum(count, 1)
