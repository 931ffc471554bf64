"""RewardFlow: credit from the values of the states of a task's merged state graph."""

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.credit.cleaning import NO_NODE, CleanGraph, Cleaning, clean
from flowjax.credit.episode import grpo
from flowjax.credit.segments import Norm, Pool, normalise, segment_statistics
from flowjax.credit.table import TurnTable
from flowjax.credit.values import Graph, decayed_values, optimal_values, pagerank_values

_VALUE_OPTIONS = (
    "propagation",
    "edge_direction",
    "node_reward",
    "negative_rewards",
    "sources",
    "source_reward",
    "terminal_key",
    "include_final_transition",
    "cleaning",
    "missing_node_value",
    "lookup",
    "max_sweeps",
)
_CREDIT_OPTIONS = ("step_shaping", "final_step_reward")
_OPTIONS = (
    *_VALUE_OPTIONS,
    *_CREDIT_OPTIONS,
    "step_baseline",
    "singleton_baseline",
    "penalise",
    "episode_norm",
    "step_norm",
    "pool",
    "lone_member",
)


class StateValues(NamedTuple):
    """The graph behind a table's credit. Node ids are state ids, then one absorbing node per turn."""

    graph: Graph
    values: Float[Array, "nodes"]
    before: Float[Array, "turns"]  # value of the state that the turn started in
    after: Float[Array, "turns"]  # value of the state that it led to
    earned: Float[Array, "turns"]  # reward on the edge itself; zero unless `node_reward="edge"`


@partial(jax.jit, static_argnames=_OPTIONS)
def rewardflow(
    table: TurnTable,
    *,
    gamma: float = 0.9,
    step_weight: float = 1.0,
    invalid_penalty: float = 0.0,
    damping: float = 0.5,
    propagation: Literal["decay", "pagerank"] = "decay",
    edge_direction: Literal["forward", "bidirectional"] = "forward",
    node_reward: Literal["max", "first_seen", "edge"] = "max",
    negative_rewards: Literal["clamp", "as_is"] = "clamp",
    sources: Literal["terminal", "any"] = "terminal",
    source_reward: Literal["score", "reward"] = "score",
    terminal_key: Literal["per_outcome", "shared"] = "per_outcome",
    include_final_transition: bool = True,
    final_step_reward: Literal["difference", "raw"] = "difference",
    cleaning: Cleaning = "self_loops",
    missing_node_value: Literal["inherit", "zero"] = "inherit",
    step_shaping: Literal["gamma_difference", "difference", "absolute"] = "gamma_difference",
    step_baseline: Literal["state", "group"] = "state",
    singleton_baseline: Literal["group", "self"] = "group",
    penalise: Literal["step", "both"] = "step",
    lookup: Literal["node", "state"] = "node",
    episode_norm: Norm = "mean_std",
    step_norm: Norm = "mean_std",
    pool: Pool = "trajectories",
    lone_member: Literal["zero", "score"] = "zero",
    max_sweeps: int = 1000,
) -> Float[Array, "turns"]:
    """A = A_episode + w A_step, A_step from differences of state values. RewardFlow (arXiv 2603.18859).

    The turns of a task form one graph of states; V(s) is the discounted best reward reachable in it (`values.py`). A
    turn s -> s' earns gamma V(s') - V(s), compared with the turns that started in s, or with the whole group where no
    other did. `docs/credit/rewardflow.md` tells what each option does and why the defaults are what they are;
    `reference_compatible` gives the published code's choices.
    """
    found = state_values(
        table,
        gamma=gamma,
        damping=damping,
        propagation=propagation,
        edge_direction=edge_direction,
        node_reward=node_reward,
        negative_rewards=negative_rewards,
        sources=sources,
        source_reward=source_reward,
        terminal_key=terminal_key,
        include_final_transition=include_final_transition,
        cleaning=cleaning,
        missing_node_value=missing_node_value,
        lookup=lookup,
        max_sweeps=max_sweeps,
    )
    credit = step_credit(table, found, gamma=gamma, step_shaping=step_shaping, final_step_reward=final_step_reward)
    penalty = invalid_penalty * ~table.valid
    step_part = compare_steps(
        table, credit - penalty, norm=step_norm, step_baseline=step_baseline, singleton_baseline=singleton_baseline
    )
    if penalise == "both":
        table = dataclasses.replace(table, score=table.score - penalty)
    episode_part = grpo(table, norm=episode_norm, pool=pool, lone_member=lone_member)
    return jnp.where(table.mask, episode_part + step_weight * step_part, 0.0)


def reference_compatible() -> dict[str, Any]:
    """Options under which `rewardflow` computes what the published code computes, its faults included.

    The published code counts on scores being episode returns, and treats the whole table as one rollout that ended when
    its longest episode did. The faults that lie in its state keys are in `flowjax.credit.states`.
    """
    return {
        "propagation": "decay",
        "edge_direction": "forward",
        "node_reward": "first_seen",
        "negative_rewards": "as_is",
        "sources": "any",
        "source_reward": "reward",
        "terminal_key": "shared",
        "include_final_transition": False,
        "final_step_reward": "raw",
        "cleaning": "self_loops",
        "missing_node_value": "zero",
        "step_shaping": "difference",
        "singleton_baseline": "self",
        "penalise": "both",
        "lookup": "state",
        "episode_norm": "mean",
        "step_norm": "mean",
        "pool": "rows",
        "lone_member": "score",
        "max_sweeps": 1000,
    }


@partial(jax.jit, static_argnames=_VALUE_OPTIONS)
def state_values(
    table: TurnTable,
    *,
    gamma: float | Float[Array, ""] = 0.9,
    damping: float | Float[Array, ""] = 0.5,
    propagation: Literal["decay", "pagerank"] = "decay",
    edge_direction: Literal["forward", "bidirectional"] = "forward",
    node_reward: Literal["max", "first_seen", "edge"] = "max",
    negative_rewards: Literal["clamp", "as_is"] = "clamp",
    sources: Literal["terminal", "any"] = "terminal",
    source_reward: Literal["score", "reward"] = "score",
    terminal_key: Literal["per_outcome", "shared"] = "per_outcome",
    include_final_transition: bool = True,
    cleaning: Cleaning = "self_loops",
    missing_node_value: Literal["inherit", "zero"] = "inherit",
    lookup: Literal["node", "state"] = "node",
    max_sweeps: int = 1000,
) -> StateValues:
    """The state graph of every task of the table, and the value of each state. Options as in `rewardflow`."""
    rows = table.mask.shape[0]
    numbers = jnp.arange(rows, dtype=table.state.dtype)
    target = table.next_state
    if terminal_key == "per_outcome":
        target = jnp.where(table.terminal, 2 * rows + numbers, target)
    source = _node_before(table) if lookup == "state" else table.state
    kept = table.mask if include_final_transition else table.mask & ~_latest(table)
    cleaned = clean(table, Graph(source, target, kept, 3 * rows), cleaning)
    graph = cleaned.graph

    reward = _turn_sources(table, sources, source_reward)
    bidirectional = edge_direction == "bidirectional"
    if node_reward == "edge":
        values = optimal_values(graph, reward, gamma=gamma, max_sweeps=max_sweeps)
    else:
        base = _first_seen(table, graph, reward) if node_reward == "first_seen" else _largest(graph, reward)
        if negative_rewards == "clamp":
            base = jnp.maximum(base, 0.0)
        if propagation == "pagerank":
            part = jnp.zeros(3 * rows, table.task.dtype).at[source].max(table.task).at[target].max(table.task)
            values = pagerank_values(graph, base, part, damping=damping, bidirectional=bidirectional)
        else:
            values = decayed_values(graph, base, gamma=gamma, bidirectional=bidirectional, max_sweeps=max_sweeps)
    before, after = _turn_values(table, cleaned, target, values, missing_node_value, lookup)
    if node_reward == "edge":
        return StateValues(graph, values, before, after, reward)
    return StateValues(graph, values, before, after, jnp.zeros_like(reward))


@partial(jax.jit, static_argnames=_CREDIT_OPTIONS)
def step_credit(
    table: TurnTable,
    found: StateValues,
    *,
    gamma: float | Float[Array, ""],
    step_shaping: Literal["gamma_difference", "difference", "absolute"] = "gamma_difference",
    final_step_reward: Literal["difference", "raw"] = "difference",
) -> Float[Array, "turns"]:
    """What each turn earns: r + gamma V(s') - V(s), r + V(s') - V(s) or r + V(s'), r nonzero where edges carry reward.

    gamma V(s') - V(s) is potential-based shaping (Ng et al. 1999), zero on every shortest way to success.
    """
    if step_shaping == "gamma_difference":
        credit = found.earned + gamma * found.after - found.before
    elif step_shaping == "difference":
        credit = found.earned + found.after - found.before
    else:
        credit = found.earned + found.after
    if final_step_reward == "raw":
        credit = jnp.where(_latest(table), table.reward, credit)
    return jnp.where(table.mask, credit, 0.0)


def compare_steps(
    table: TurnTable,
    credit: Float[Array, "turns"],
    *,
    norm: Norm,
    step_baseline: Literal["state", "group"] = "state",
    singleton_baseline: Literal["group", "self"] = "group",
) -> Float[Array, "turns"]:
    """`credit` less the mean of the turns that started in the same state, over the deviation within the group.

    A turn with no companion is compared with all turns of its group, or (`self`) with itself, which gives zero.
    `step_baseline="group"` compares every turn with its group.
    """
    visits, state_mean, _ = segment_statistics(credit, table.state, table.mask, 2 * credit.shape[0])
    _, group_mean, group_deviation = segment_statistics(credit, table.group, table.mask)
    lone = group_mean if singleton_baseline == "group" else credit
    mean = group_mean if step_baseline == "group" else jnp.where(visits > 1, state_mean, lone)
    return jnp.where(table.mask, normalise(credit, mean, group_deviation, norm), 0.0)


def _turn_sources(table: TurnTable, sources: str, source_reward: str) -> Float[Array, "turns"]:
    """The reward that each turn's transition carries into the graph."""
    if source_reward == "score":
        return jnp.where(table.mask & table.terminal, table.score, 0.0)
    return jnp.where(table.mask & (table.terminal if sources == "terminal" else True), table.reward, 0.0)


def _largest(graph: Graph, reward: Float[Array, "turns"]) -> Float[Array, "nodes"]:
    """The largest reward with which each node was reached; zero where it never was."""
    base = jnp.full(graph.nodes, -jnp.inf).at[graph.target].max(jnp.where(graph.kept, reward, -jnp.inf))
    return jnp.where(jnp.isfinite(base), base, 0.0)


def _first_seen(table: TurnTable, graph: Graph, reward: Float[Array, "turns"]) -> Float[Array, "nodes"]:
    """The reward at each node's first appearance in the list of edges, an edge's source before its target."""
    rows = reward.shape[0]
    never = 2 * rows
    numbers = jnp.arange(rows)
    predecessor, has_predecessor = _predecessors(table)
    arrived = jnp.where(has_predecessor, reward[predecessor], 0.0)
    seen = jnp.stack([arrived, reward], axis=1).reshape(-1)
    first = jnp.full(graph.nodes, never)
    first = first.at[graph.source].min(jnp.where(graph.kept, 2 * numbers, never))
    first = first.at[graph.target].min(jnp.where(graph.kept, 2 * numbers + 1, never))
    return jnp.where(first < never, seen[jnp.minimum(first, never - 1)], 0.0)


def _turn_values(
    table: TurnTable,
    cleaned: CleanGraph,
    target: Int[Array, "turns"],
    values: Float[Array, "nodes"],
    missing: str,
    lookup: str,
) -> tuple[Float[Array, "turns"], Float[Array, "turns"]]:
    """Values before and after each turn; a state that cleaning removed has that of the state it hides behind."""
    if lookup == "state":
        target = jnp.where(_is_last(table), target, table.state[table.successor])
    if missing == "zero":
        return values[table.state], values[target]
    present = cleaned.graph.present()
    before_hidden = jnp.where(cleaned.hidden_before != NO_NODE, values[cleaned.hidden_before], 0.0)
    before = jnp.where(present[table.state], values[table.state], before_hidden)
    after_hidden = jnp.where(cleaned.hidden_after != NO_NODE, values[cleaned.hidden_after], before)
    return before, jnp.where(present[target], values[target], after_hidden)


def _is_last(table: TurnTable) -> Bool[Array, "turns"]:
    return table.successor == jnp.arange(table.successor.shape[0])


def _latest(table: TurnTable) -> Bool[Array, "turns"]:
    """Last turns of the trajectories that are as long as the longest."""
    longest = jnp.max(jnp.where(table.mask, table.step, -1))
    return table.mask & _is_last(table) & (table.step == longest)


def _predecessors(table: TurnTable) -> tuple[Int[Array, "turns"], Bool[Array, "turns"]]:
    numbers = jnp.arange(table.successor.shape[0], dtype=table.successor.dtype)
    where = jnp.where(_is_last(table), numbers.shape[0], table.successor)
    predecessor = numbers.at[where].set(numbers, mode="drop")
    return predecessor, predecessor != numbers


def _node_before(table: TurnTable) -> Int[Array, "turns"]:
    """The node that a turn left, as the turn before it named it."""
    predecessor, has_predecessor = _predecessors(table)
    return jnp.where(has_predecessor, table.next_state[predecessor], table.state)
