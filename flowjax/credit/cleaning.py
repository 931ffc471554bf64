"""Which observed transitions become edges of the state graph: self-loops dropped, runs of noise bridged."""

import dataclasses
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from flowjax.credit.segments import first_rows
from flowjax.credit.table import TurnTable
from flowjax.credit.values import Graph

Cleaning = Literal["none", "self_loops", "noise_runs"]
NO_NODE = -1


class CleanGraph(NamedTuple):
    """A graph whose edges are rows of the table, and the node that noise hides behind, before and after each row."""

    graph: Graph
    hidden_before: Int[Array, "turns"]
    hidden_after: Int[Array, "turns"]


@partial(jax.jit, static_argnames=("cleaning",))
def clean(table: TurnTable, graph: Graph, cleaning: Cleaning) -> CleanGraph:
    """`graph`, whose edge r is turn r, without the transitions that tell nothing."""
    nowhere = jnp.full_like(graph.source, NO_NODE)
    if cleaning == "noise_runs":
        return bridge_noise(table, graph)
    if cleaning == "self_loops":
        graph = dataclasses.replace(graph, kept=graph.kept & (graph.source != graph.target))
    return CleanGraph(graph, nowhere, nowhere)


def bridge_noise(table: TurnTable, graph: Graph) -> CleanGraph:
    """Replace each run of noise by one edge from where the run began to where it led.

    A run opens at a transition that is noise (`table.noise`, or a self-loop), at its source a. While it is open,
    transitions that are `table.noise` or lead back to a are dropped; the next other one closes it and becomes the edge
    a -> target. A run that lasts to the end of the trajectory is dropped. RewardFlow's rule for ALFWorld.

    One pass over the steps, all trajectories at once, so that its cost does not grow with their number.
    """
    rows = table.mask.shape[0]
    starts = first_rows(table)
    cursor = jnp.where(starts, jnp.arange(rows), rows)
    cursor = jnp.full(rows, rows).at[table.trajectory].min(cursor)

    def open_cursor(carry):
        return jnp.any(carry[0] < rows)

    def advance(carry):
        cursor, run, source, kept, before, after = carry
        row = jnp.minimum(cursor, rows - 1)
        active = cursor < rows
        in_run = run != NO_NODE
        looped = jnp.where(in_run, graph.target[row] == run, graph.source[row] == graph.target[row])
        dropped = table.noise[row] | looped | ~graph.kept[row]
        opened = jnp.where(in_run, run, graph.source[row])
        left = jnp.where(dropped, opened, NO_NODE)
        where = jnp.where(active, row, rows)
        source = source.at[where].set(opened, mode="drop")
        kept = kept.at[where].set(~dropped, mode="drop")
        before = before.at[where].set(run, mode="drop")
        after = after.at[where].set(left, mode="drop")
        following = table.successor[row]
        return jnp.where(active & (following != row), following, rows), left, source, kept, before, after

    nowhere = jnp.full(rows, NO_NODE, graph.source.dtype)
    start = (cursor, nowhere, graph.source, jnp.zeros(rows, bool), nowhere, nowhere)
    _, _, source, kept, before, after = jax.lax.while_loop(open_cursor, advance, start)
    return CleanGraph(dataclasses.replace(graph, source=source, kept=kept & graph.kept), before, after)
