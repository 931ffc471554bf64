"""Values of the states of a graph: how much reward can be reached from each, and how soon."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["source", "target", "kept"], meta_fields=["nodes"])
@dataclass(frozen=True)
class Graph:
    """A directed graph, the disjoint union of one graph per task. Rows with `kept` False are no edges."""

    source: Int[Array, "edges"]
    target: Int[Array, "edges"]
    kept: Bool[Array, "edges"]
    nodes: int

    def present(self) -> Bool[Array, "nodes"]:
        """Which nodes some edge touches."""
        touched = jnp.zeros(self.nodes, bool).at[self.source].max(self.kept)
        return touched.at[self.target].max(self.kept)


def decayed_values(
    graph: Graph,
    base: Float[Array, "nodes"],
    *,
    gamma: float | Float[Array, ""],
    bidirectional: bool = False,
    max_sweeps: int = 1000,
) -> Float[Array, "nodes"]:
    """Discounted best reward reachable from each node.

    V(n) = max over m of gamma^d(n, m) base(m), d in observed transitions: the fixed point of
    V <- max(V, max over edges n -> m of gamma V(m)), reached in as many sweeps as the longest shortest path has edges.
    RewardFlow (arXiv 2603.18859). `bidirectional` walks edges both ways. Negative rewards make longer walks better and
    may need all of `max_sweeps`; clamp them first.
    """

    def sweep(values: Float[Array, "nodes"]) -> Float[Array, "nodes"]:
        reached = values.at[graph.source].max(jnp.where(graph.kept, gamma * values[graph.target], -jnp.inf))
        if bidirectional:
            reached = reached.at[graph.target].max(jnp.where(graph.kept, gamma * values[graph.source], -jnp.inf))
        return reached

    return _fixed_point(sweep, base, max_sweeps)


def optimal_values(
    graph: Graph,
    reward: Float[Array, "edges"],
    *,
    gamma: float | Float[Array, ""],
    max_sweeps: int = 1000,
) -> Float[Array, "nodes"]:
    """Best discounted return from each node in the deterministic world that was observed.

    V(n) = max(0, max over edges n -> m of reward + gamma V(m)). Negative rewards are costs here, as they should be: a
    detour is worth less than the direct way. Stopping is always possible and worth nothing, so that a region from which
    no reward was observed has value zero, cycles included.
    """

    def sweep(values: Float[Array, "nodes"]) -> Float[Array, "nodes"]:
        return values.at[graph.source].max(jnp.where(graph.kept, reward + gamma * values[graph.target], -jnp.inf))

    return _fixed_point(sweep, jnp.zeros(graph.nodes, reward.dtype), max_sweeps)


def pagerank_values(
    graph: Graph,
    base: Float[Array, "nodes"],
    part: Int[Array, "nodes"],
    *,
    damping: float | Float[Array, ""],
    bidirectional: bool = True,
    max_sweeps: int = 100,
    tolerance: float = 1e-6,
) -> Float[Array, "nodes"]:
    """Personalised PageRank of each node within its task's graph, the rewards as preference. Brin & Page 1998.

    r = damping (transition^T r + dangling mass * p) + (1 - damping) p, with p proportional to the positive part of
    `base`, or uniform in a graph without any. Ranks flow along edges, so the walk must be able to go back from the
    reward: `bidirectional` by default. Edges count as often as they were observed. `part` names each node's graph.
    """
    present = graph.present()
    wanted = jnp.where(present, jnp.maximum(base, 0.0), 0.0)
    total = _by_part(wanted, part)
    uniform = present / jnp.maximum(_by_part(present.astype(base.dtype), part), 1)
    preference = jnp.where(total > 0, wanted / jnp.where(total > 0, total, 1.0), uniform)
    forward = graph.kept.astype(base.dtype)
    degree = jnp.zeros(graph.nodes, base.dtype).at[graph.source].add(forward)
    if bidirectional:
        degree = degree.at[graph.target].add(forward)
    share = jnp.where(degree > 0, 1.0 / jnp.maximum(degree, 1), 0.0)

    def step(carry):
        rank, _, sweeps = carry
        outflow = rank * share
        inflow = jnp.zeros_like(rank).at[graph.target].add(forward * outflow[graph.source])
        if bidirectional:
            inflow = inflow.at[graph.source].add(forward * outflow[graph.target])
        dangling = _by_part(jnp.where(present & (degree == 0), rank, 0.0), part)
        updated = damping * (inflow + dangling * preference) + (1 - damping) * preference
        return updated, jnp.max(jnp.abs(updated - rank)), sweeps + 1

    def unsettled(carry):
        return (carry[1] > tolerance) & (carry[2] < max_sweeps)

    start = (preference, jnp.asarray(jnp.inf, base.dtype), jnp.asarray(0))
    return jax.lax.while_loop(unsettled, step, start)[0]


def _by_part(values: Float[Array, "nodes"], part: Int[Array, "nodes"]) -> Float[Array, "nodes"]:
    return jnp.zeros_like(values).at[part].add(values)[part]


def _fixed_point(sweep, start: Float[Array, "nodes"], max_sweeps: int) -> Float[Array, "nodes"]:
    def changing(carry):
        values, previous, sweeps = carry
        return jnp.any(values != previous) & (sweeps < max_sweeps)

    def advance(carry):
        values, _, sweeps = carry
        return sweep(values), values, sweeps + 1

    return jax.lax.while_loop(changing, advance, (sweep(start), start, jnp.asarray(1)))[0]
