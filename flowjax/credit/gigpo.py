"""GiGPO: episodes compared within a group, and turns compared with turns that started in the same state."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flowjax.credit.episode import grpo
from flowjax.credit.returns import Rewards, turn_rewards
from flowjax.credit.segments import Norm, Pool, discounted_sums, normalise, segment_statistics, state_visits
from flowjax.credit.table import TurnTable


@partial(jax.jit, static_argnames=("rewards", "norm", "pool", "lone_member"))
def gigpo(
    table: TurnTable,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    invalid_penalty: float = 0.0,
    rewards: Rewards = "reward",
    norm: Norm = "mean",
    pool: Pool = "trajectories",
    lone_member: Literal["zero", "score"] = "zero",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step. GiGPO (arXiv 2505.10978).

    A_step compares a turn's return G_t = r_t + gamma G_{t+1} with those of all turns of the group that started in the
    same state; a turn with no such companion gets zero.

    Args:
        table: the turns.
        gamma: discount per turn.
        step_weight: w.
        invalid_penalty: taken from the return of a turn whose reply could not be read, from no other.
        rewards: the environment's rewards, or the score at the last turn.
        norm: of both parts.
        pool: what the episode part counts.
        lone_member: episode part of a group of one: zero, or its score.
    """
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    value = value - invalid_penalty * ~table.valid
    _, mean, deviation = segment_statistics(value, state_visits(table), table.mask)
    step_part = normalise(value, mean, deviation, norm)
    episode_part = grpo(table, norm=norm, pool=pool, lone_member=lone_member)
    return jnp.where(table.mask, episode_part + step_weight * step_part, 0.0)
