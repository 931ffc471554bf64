"""GRPO, RLOO and GiGPO (arXiv 2505.10978) as verl-agent computes them, faults included. `config.credit.name`:
"published.grpo", "published.rloo", "published.gigpo"."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flowjax.credit.segments import (
    Discount,
    Norm,
    Weight,
    discounted_sums,
    normalise,
    segment_statistics,
    segment_total,
)
from flowjax.credit.table import TurnTable


@partial(jax.jit, static_argnames=("norm",))
def grpo(table: TurnTable, *, norm: Norm = "mean_std", invalid_penalty: Weight = 0.1) -> Float[Array, "turns"]:
    """A = (x - mean) / (std + 1e-6), x the episode's return less the penalty of the turn.

    Mean and deviation are over turns, so that long episodes weigh more. In a group of equal outcomes the penalty is all
    that differs, and is scaled up to 1. A group of one turn keeps its x: 0 is taken for its mean and 1 for its
    deviation.
    """
    returns = _penalised(table, invalid_penalty)
    count, mean, deviation = segment_statistics(returns, table.group, table.mask)
    compared = normalise(returns, mean, deviation, norm)
    alone = normalise(returns, jnp.zeros_like(mean), jnp.ones_like(deviation), norm)
    return jnp.where(table.mask, jnp.where(count == 1, alone, compared), 0.0)


@jax.jit
def rloo(table: TurnTable, *, invalid_penalty: Weight = 0.1) -> Float[Array, "turns"]:
    """A = n / (n - 1) (x - mean), n the turns of the group and x as in `grpo`; a group of one turn keeps its x.

    The others that a turn is compared with are mostly turns of its own episode, which share its return.
    """
    returns = _penalised(table, invalid_penalty)
    count, mean, _ = segment_statistics(returns, table.group, table.mask)
    compared = count / jnp.maximum(count - 1, 1) * (returns - mean)
    return jnp.where(table.mask, jnp.where(count == 1, returns, compared), 0.0)


def _penalised(table: TurnTable, invalid_penalty: Weight) -> Float[Array, "turns"]:
    """Return of each turn's episode, less the penalty of the turn."""
    returns = segment_total(jnp.where(table.mask, table.reward, 0.0), table.trajectory)
    return returns - invalid_penalty * ~table.valid


@partial(jax.jit, static_argnames=("norm",))
def gigpo(
    table: TurnTable,
    *,
    gamma: Discount = 0.95,
    step_weight: Weight = 1.0,
    invalid_penalty: Weight = 0.1,
    norm: Norm = "mean",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step: `grpo` above, and G_t = r_t + gamma G_{t+1} among the turns from the same state.

    The penalty is taken from both parts. States are told apart within a task alone: where several policies play it,
    they are compared with each other.
    """
    value = discounted_sums(jnp.where(table.mask, table.reward, 0.0), table.successor, gamma)
    value = value - invalid_penalty * ~table.valid
    # Two ids a row: the state that a turn started in, and the one that it led to.
    _, mean, deviation = segment_statistics(value, table.state, table.mask, 2 * value.shape[0])
    step_part = normalise(value, mean, deviation, norm)
    episode_part = grpo(table, norm=norm, invalid_penalty=invalid_penalty)
    return jnp.where(table.mask, episode_part + step_weight * step_part, 0.0)
