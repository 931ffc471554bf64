"""GiGPO: episodes compared within a group, and turns compared with turns that started in the same state."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flowjax.credit.episode import grpo
from flowjax.credit.returns import Rewards, turn_rewards
from flowjax.credit.segments import Norm, Pool, discounted_sums, normalise, segment_statistics
from flowjax.credit.table import TurnTable


@partial(jax.jit, static_argnames=("rewards", "norm", "pool"))
def gigpo(
    table: TurnTable,
    anchors: Int[Array, "turns"] | None = None,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    invalid_penalty: float = 0.0,
    rewards: Rewards = "reward",
    norm: Norm = "mean",
    pool: Pool = "trajectories",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step. GiGPO (arXiv 2505.10978).

    A_step compares a turn's return G_t = r_t + gamma G_{t+1} with those of all turns of the group that started in the
    same state; a turn with no such companion gets zero.

    Args:
        table: the turns.
        anchors: which turns count as the same state, ids below twice the rows; exact states by default,
            `flowjax.credit.similarity.similar_states` for near ones.
        gamma: discount per turn.
        step_weight: w.
        invalid_penalty: taken from the return of a turn whose reply could not be read, from no other.
        rewards: the environment's rewards, or the score at the last turn.
        norm: of both parts.
        pool: what the episode part counts.
    """
    anchors = table.state if anchors is None else anchors
    value = discounted_sums(turn_rewards(table, rewards), table.successor, gamma)
    value = value - invalid_penalty * ~table.valid
    _, mean, deviation = segment_statistics(value, anchors, table.mask, 2 * value.shape[0])
    step_part = normalise(value, mean, deviation, norm)
    return jnp.where(table.mask, grpo(table, norm=norm, pool=pool) + step_weight * step_part, 0.0)
