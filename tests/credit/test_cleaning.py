"""Noise: runs bridged as RewardFlow's rule for ALFWorld says, and hidden states that keep their value."""

import dataclasses
import itertools

import numpy as np
import pytest
from credit_tables import Path, paths_table
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.credit.cleaning import clean
from flowjax.credit.rewardflow import rewardflow, state_values
from flowjax.credit.values import Graph


def bridged_by_hand(path: Path, noise: list[bool]) -> list[tuple[int, int]]:
    """The rule in words, transition by transition."""
    edges, run = [], None
    for source, target, noisy in zip(path.states, path.states[1:], noise, strict=False):
        if run is None:
            if noisy or source == target:
                run = source
            else:
                edges.append((source, target))
        elif not (noisy or target == run):
            edges.append((run, target))
            run = None
    return edges


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=8), min_size=1, max_size=4
    )
)  # fmt: skip
def test_bridging_is_the_rule(walks):
    paths = [Path([s for s, _ in walk], [0.0] * (len(walk) - 1), terminal=False) for walk in walks]
    noise = [[noisy for _, noisy in walk[:-1]] for walk in walks]
    table = paths_table(paths, pad_to=64, noise=list(itertools.chain(*noise)))
    ids = {s: i for i, s in enumerate(sorted({s for path in paths for s in path.states}))}
    graph = clean(table, Graph(table.state, table.next_state, table.mask, 192), "noise_runs").graph
    kept = np.asarray(graph.kept)
    got = list(zip(np.asarray(graph.source)[kept].tolist(), np.asarray(graph.target)[kept].tolist(), strict=True))
    expected = [edge for path, flags in zip(paths, noise, strict=True) for edge in bridged_by_hand(path, flags)]
    assert got == [(ids[source], ids[target]) for source, target in expected]


LOOKED = Path([0, 7, 1, 2], [0, 0, 1.0])  # looks around (state 7), then goes on
NOISE = [True, False, False]


def test_a_hidden_state_has_the_value_of_what_it_hides():
    table = paths_table([LOOKED], noise=NOISE)
    zero = state_values(table, cleaning="noise_runs", missing_node_value="zero")
    np.testing.assert_allclose((zero.after - zero.before)[:3], [-0.81, 0.9, 0.1], rtol=1e-5)  # spikes
    kept = state_values(table, cleaning="noise_runs")
    np.testing.assert_allclose((kept.after - kept.before)[:3], [0, 0.09, 0.1], rtol=1e-5, atol=1e-7)


def test_looking_does_not_lengthen_the_way():
    table = paths_table([LOOKED], noise=NOISE)
    assert float(state_values(table, cleaning="noise_runs").before[0]) == pytest.approx(0.81)
    assert float(state_values(table, cleaning="self_loops").before[0]) == pytest.approx(0.729)


def test_without_noise_all_cleanings_agree():
    paths = [Path([0, 1, 1, 2], [0, 0, 1.0]), Path([0, 3, 0], [0, 0], terminal=False)]
    table = paths_table(paths)
    first, *others = (rewardflow(table, cleaning=cleaning) for cleaning in ("none", "self_loops", "noise_runs"))
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-6)
    noisy = dataclasses.replace(table, noise=table.mask)
    assert not np.asarray(
        clean(noisy, Graph(table.state, table.next_state, table.mask, 192), "noise_runs").graph.kept
    ).any()
