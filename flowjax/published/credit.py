"""Credit as published code computes it, faults included. `config.credit.name`: "published.grpo", "published.rloo",
"published.gigpo" (as verl-agent has them), "published.rewardflow"."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.credit.table import (
    Discount,
    Norm,
    TurnTable,
    Weight,
    discounted_sums,
    is_last_turn,
    normalise,
    segment_statistics,
    segment_total,
)

# ---------------------------------------------------------------------------------------------------- GRPO, RLOO, GiGPO

# arXiv 2505.10978


@partial(jax.jit, static_argnames=("norm",))
def grpo(table: TurnTable, *, norm: Norm = "mean_std", invalid_penalty: Weight = 0.1) -> Float[Array, "turns"]:
    """A = (x - mean) / (std + 1e-6), x the episode's return less the penalty of the turn.

    Mean and deviation are over turns, so that long episodes weigh more. In a group of equal outcomes only the penalty
    differs, and the division scales it up to the size of any other advantage. A group of one turn keeps its x: its mean
    is taken as 0 and its deviation as 1.
    """
    returns = _penalised(table, invalid_penalty)
    count, mean, deviation = segment_statistics(returns, table.group, table.mask)
    compared = normalise(returns, mean, deviation, norm)
    alone = normalise(returns, jnp.zeros_like(mean), jnp.ones_like(deviation), norm)
    return jnp.where(table.mask, jnp.where(count == 1, alone, compared), 0.0)


@jax.jit
def rloo(table: TurnTable, *, invalid_penalty: Weight = 0.1) -> Float[Array, "turns"]:
    """A = n / (n - 1) (x - mean), n the turns of the group and x as in `grpo`; a group of one turn keeps its x.

    So the baseline of a turn holds the other turns of its own episode, which have the same return.
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

    The penalty is taken from both parts.
    """
    value = discounted_sums(jnp.where(table.mask, table.reward, 0.0), table.successor, gamma)
    value = value - invalid_penalty * ~table.valid
    # Two ids a row: the state that a turn started in, and the one that it led to.
    _, mean, deviation = segment_statistics(value, table.state, table.mask, 2 * value.shape[0])
    step_part = normalise(value, mean, deviation, norm)
    episode_part = grpo(table, norm=norm, invalid_penalty=invalid_penalty)
    return jnp.where(table.mask, episode_part + step_weight * step_part, 0.0)


# ----------------------------------------------------------------------------------------------------------- RewardFlow

# arXiv 2603.18859

SWEEPS = 1000  # of the propagation; where success is more turns away than this, the value is zero


class PublishedValues(NamedTuple):
    """Best reward within reach of the states around each turn."""

    before: Float[Array, "turns"]
    after: Float[Array, "turns"]


@partial(jax.jit, static_argnames=("edge_direction",))
def rewardflow(
    table: TurnTable,
    *,
    gamma: Discount = 0.9,
    step_weight: Weight = 1.0,
    invalid_penalty: Weight = 0.1,
    edge_direction: Literal["forward", "bidirectional"] = "forward",
) -> Float[Array, "turns"]:
    """A = (x - mean) + w (d - mean of d over the turns that started in the same state), d = V(s') - V(s).

    V(s) = max over s' of gamma^distance * reward(s'), the best that any sibling reached. A turn that stays has d = 0:
    where most other turns from its state led to states from which nobody succeeded, it gets a positive step part.
    The episode part is `grpo` above without the deviation. The whole table is taken for one rollout that ended with its
    longest episode.
    `edge_direction="bidirectional"` is how edges may have been walked when the paper's numbers were made.
    """
    found = published_values(table, gamma=gamma, edge_direction=edge_direction)
    # The last move of the longest episodes is not in the graph: its step part is the environment's reward.
    credit = jnp.where(_latest(table), table.reward, found.after - found.before)
    penalty = invalid_penalty * ~table.valid
    credit = jnp.where(table.mask, credit - penalty, 0.0)
    _, mean, _ = segment_statistics(credit, table.state, table.mask, 2 * credit.shape[0])
    episode_part = grpo(table, norm="mean", invalid_penalty=invalid_penalty)
    return jnp.where(table.mask, episode_part + step_weight * (credit - mean), 0.0)


@partial(jax.jit, static_argnames=("edge_direction",))
def published_values(
    table: TurnTable,
    *,
    gamma: Discount = 0.9,
    edge_direction: Literal["forward", "bidirectional"] = "forward",
) -> PublishedValues:
    """Values after at most `SWEEPS` rounds of V <- max(V, gamma V(successors)), each node starting from the reward that
    it was first seen with.

    Values are looked up by the state that a turn started in, not by the node that the turn before led to. Where the two
    keys disagree, as they do in the published WebShop and in no world here, a click on an option seems to lead nowhere.
    """
    source, target = _node_before(table), table.next_state
    kept = table.mask & ~_latest(table) & (source != target)
    both = edge_direction == "bidirectional"

    def sweep(values: Float[Array, "nodes"]) -> Float[Array, "nodes"]:
        reached = values.at[source].max(jnp.where(kept, gamma * values[target], -jnp.inf))
        if both:
            reached = reached.at[target].max(jnp.where(kept, gamma * values[source], -jnp.inf))
        return reached

    def changing(carry: tuple[Float[Array, "nodes"], Float[Array, "nodes"], Int[Array, ""]]) -> Bool[Array, ""]:
        return jnp.any(carry[0] != carry[1]) & (carry[2] < SWEEPS)

    base = _first_seen(table, source, target, kept)
    start = (sweep(base), base, jnp.asarray(1))
    values, _, _ = jax.lax.while_loop(changing, lambda c: (sweep(c[0]), c[0], c[2] + 1), start)
    after = jnp.where(is_last_turn(table), table.next_state, table.state[table.successor])
    return PublishedValues(values[table.state], values[after])


def _first_seen(
    table: TurnTable, source: Int[Array, "turns"], target: Int[Array, "turns"], kept: Bool[Array, "turns"]
) -> Float[Array, "nodes"]:
    """The reward at each node's first appearance in the list of edges, an edge's source before its target."""
    rows = table.reward.shape[0]
    never = 2 * rows
    numbers = jnp.arange(rows)
    predecessor, has_predecessor = _predecessors(table)
    arrived = jnp.where(has_predecessor, table.reward[predecessor], 0.0)
    # In the list of nodes, turn i's source is number 2 i and its target 2 i + 1.
    seen = jnp.stack([arrived, table.reward], axis=1).reshape(-1)
    first = jnp.full(2 * rows, never)
    first = first.at[source].min(jnp.where(kept, 2 * numbers, never))
    first = first.at[target].min(jnp.where(kept, 2 * numbers + 1, never))
    return jnp.where(first < never, seen[jnp.minimum(first, never - 1)], 0.0)


def _latest(table: TurnTable) -> Bool[Array, "turns"]:
    """Last turns of the trajectories that are as long as the longest."""
    longest = jnp.max(jnp.where(table.mask, table.step, -1))
    return table.mask & is_last_turn(table) & (table.step == longest)


def _predecessors(table: TurnTable) -> tuple[Int[Array, "turns"], Bool[Array, "turns"]]:
    """Row of each turn's predecessor in its trajectory (the row itself for the first), and where there is one."""
    numbers = jnp.arange(table.successor.shape[0], dtype=table.successor.dtype)
    where = jnp.where(is_last_turn(table), numbers.shape[0], table.successor)  # last turns: out of bounds, dropped
    predecessor = numbers.at[where].set(numbers, mode="drop")
    return predecessor, predecessor != numbers


def _node_before(table: TurnTable) -> Int[Array, "turns"]:
    """The node that a turn started from: the one that the turn before named as reached, for the first its own state."""
    predecessor, has_predecessor = _predecessors(table)
    return jnp.where(has_predecessor, table.next_state[predecessor], table.state)
