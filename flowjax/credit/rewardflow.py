"""Credit from the values of the states that a group's episodes went through: RewardFlow, and GAE over them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.credit.estimators import Rewards, grpo, turn_rewards
from flowjax.credit.table import (
    Discount,
    Norm,
    TurnTable,
    Weight,
    discounted_sums,
    is_last_turn,
    segment_statistics,
    segment_total,
    state_visits,
    whiten,
)

# Deviations of the step part below this share of the group's highest value are rounding, not signal.
_LEAST_DEVIATION = 1e-4
# Values have converged once a sweep moves none of them by more than this share of its group's highest one.
_TOLERANCE = 1e-6


class StateValues(NamedTuple):
    """Values of the states around each turn, and what the turn itself earned."""

    before: Float[Array, "turns"]  # value of the state that the turn started in
    after: Float[Array, "turns"]  # value of the state in which the trajectory's next turn starts; zero after the last
    earned: Float[Array, "turns"]  # reward of the turn: by default the trajectory's score, all at its last turn


@partial(jax.jit, static_argnames=("rewards", "episode_norm", "step_norm"))
def rewardflow(
    table: TurnTable,
    *,
    gamma: Discount = 0.9,
    step_weight: Weight = 1.0,
    rewards: Rewards = "score",
    invalid_penalty: Weight = 0.0,
    episode_norm: Norm = "mean_std",
    step_norm: Norm = "mean_std",
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step, A_step from the values of the states of the merged graph. After arXiv 2603.18859.

    A turn s -> s' earns d = r + gamma V(s') - V(s), V the policy's own value of a state (`state_values`), over the
    deviation of d within the group. In every state the mean of d is zero, and a turn that changes nothing earns
    -(1 - gamma) V(s), never more than zero. `flowjax.published.credit` has the published form, in which V is the
    best that any sibling reached; `docs/credit/rewardflow.md` says why not here.

    Args:
        table: the turns.
        gamma: discount per turn.
        step_weight: w.
        rewards: the trajectory's score at its last turn, or the environment's reward of every turn.
        invalid_penalty: taken from d of a turn whose reply could not be read.
        episode_norm: scale of the episode part.
        step_norm: scale of the step part; the mean of d is zero as it is.
    """
    found = state_values(table, gamma=gamma, rewards=rewards)
    credit = _differences(table, found, gamma) - invalid_penalty * ~table.valid
    if step_norm == "mean_std":
        _, _, deviation = segment_statistics(credit, table.group, table.mask)
        highest = _highest(table, found.before)
        # Zero where nothing was earned and nothing reached: 0 / 1, not 0 / 0.
        floor = _LEAST_DEVIATION * highest
        credit = credit / jnp.where(deviation + floor > 0, deviation + floor, 1.0)
    return jnp.where(table.mask, grpo(table, norm=episode_norm) + step_weight * credit, 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def step_credit(table: TurnTable, *, gamma: Discount = 0.9, rewards: Rewards = "score") -> Float[Array, "turns"]:
    """r + gamma V(s') - V(s) of each turn, the temporal difference under the policy's own values."""
    return _differences(table, state_values(table, gamma=gamma, rewards=rewards), gamma)


def _differences(table: TurnTable, found: StateValues, gamma: Discount) -> Float[Array, "turns"]:
    return jnp.where(table.mask, found.earned + gamma * found.after - found.before, 0.0)


@partial(jax.jit, static_argnames=("rewards",))
def state_values(table: TurnTable, *, gamma: Discount = 0.9, rewards: Rewards = "score") -> StateValues:
    """Expected discounted return of the policy from each state, estimated from all turns of the group at once.

    V(s) = mean over the group's turns from s of r + gamma V(s'): the exact value of the process whose transitions are
    the ones that were observed (the batch TD(0) solution: Sutton & Barto 2018, section 6.3). s' is where the *same
    policy* acts next, so that other agents' turns are part of its world. An episode that the turn limit cuts has an end
    like any other.

    Scores are counted from the lowest of the group where that is negative: otherwise discounting would make it pay to
    put a bad end off.
    """
    earned = turn_rewards(table, rewards)
    last = is_last_turn(table)
    if rewards == "score":
        lowest = jnp.zeros_like(earned).at[table.group].min(jnp.where(table.mask, table.score, 0.0))[table.group]
        earned = jnp.where(table.mask & last, earned - lowest, 0.0)
    state = state_visits(table)
    visits = segment_total(table.mask.astype(earned.dtype), state)

    def after(values: Float[Array, "turns"]) -> Float[Array, "turns"]:
        return jnp.where(last, 0.0, values[table.successor])

    def sweep(values: Float[Array, "turns"]) -> Float[Array, "turns"]:
        returns = jnp.where(table.mask, earned + gamma * after(values), 0.0)
        return segment_total(returns, state) / jnp.maximum(visits, 1)

    # Every observed way leads to an end, so this converges for gamma = 1 too. A path of n turns takes n sweeps, so the
    # bound grows with the table: it only guards against rounding that goes back and forth.
    bound = 10 * earned.shape[0] + 1000

    def changing(carry: tuple[Float[Array, "turns"], Float[Array, "turns"], Int[Array, ""]]) -> Bool[Array, ""]:
        values, previous, sweeps = carry
        moved = jnp.abs(values - previous) > _TOLERANCE * _highest(table, values)
        return jnp.any(moved & table.mask) & (sweeps < bound)

    start = jnp.zeros_like(earned)
    carry = (sweep(start), start, jnp.asarray(1))
    before, _, _ = jax.lax.while_loop(changing, lambda carry: (sweep(carry[0]), carry[0], carry[2] + 1), carry)
    before = jnp.where(table.mask, before, 0.0)
    return StateValues(before, after(before), earned)


@partial(jax.jit, static_argnames=("rewards", "whitened"))
def gae(
    table: TurnTable,
    *,
    gamma: Discount = 0.95,
    trace: Discount = 0.9,
    rewards: Rewards = "score",
    whitened: bool = True,
) -> Float[Array, "turns"]:
    """A_t = d_t + gamma trace A_{t+1} across turns, the state graph as critic. GAE (arXiv 1506.02438), eq. 16.

    d is `step_credit`. trace = 0 gives d itself, trace = 1 the turn's discounted return less its state's value.
    `whitened` brings the result to zero mean and unit variance over the table.
    """
    errors = step_credit(table, gamma=gamma, rewards=rewards)
    advantage = discounted_sums(errors, table.successor, gamma * trace)
    if whitened:
        advantage = whiten(advantage, table.mask)
    return jnp.where(table.mask, advantage, 0.0)


def _highest(table: TurnTable, values: Float[Array, "turns"]) -> Float[Array, "turns"]:
    """The largest absolute value among the counted rows of each row's group."""
    largest = jnp.zeros_like(values).at[table.group].max(jnp.where(table.mask, jnp.abs(values), 0.0))
    return largest[table.group]
