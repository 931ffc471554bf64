"""Pictures: what is drawn, and that both ways of drawing give well-formed SVG."""

import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from flowjax.credit.estimators import estimate
from flowjax.report import pictures
from flowjax.report.pictures import GAIN, NEUTRAL, Edge, plain_svg, state_graph, to_dot, to_svg
from tests.credit.credit_tables import Path, paths_table

PATHS = [
    Path([0, 1, 2], [0, 1.0]),
    Path([0, 1, 1, 3], [0, 0, 0.0], terminal=False),
    Path([0, 1, 4], [0, 0.0]),
    Path([0, 5], [0.0], group=1),
]
TABLE = paths_table(PATHS)
GRAPH = state_graph(TABLE, np.asarray(estimate(TABLE, "rewardflow")), labels={1: 'a "door" <b>'})


def test_nodes_and_edges():
    nodes = {node.name: node for node in GRAPH.nodes}
    assert {node.kind for node in GRAPH.nodes} == {"start", "state", "success", "end"}
    assert nodes["s0"].kind == "start"
    assert nodes["won s2"].value == pytest.approx(1.0)
    assert nodes["end s4"].value == 0.0
    # Four turns from s1: won, stayed, left for good, lost. V(1) = (1 + 0.9 V(1)) / 4 = 1 / 3.1
    assert nodes["s1"].value == pytest.approx(1 / 3.1)
    assert nodes["s0"].value == pytest.approx(0.9 / 3.1)
    assert nodes["s0"].visits == 3
    assert nodes["s1"].visits == 4
    edges = {(edge.source, edge.target): edge for edge in GRAPH.edges}
    assert edges["s0", "s1"].visits == 3
    assert edges["s1", "won s2"].advantage > 0 > edges["s1", "end s4"].advantage
    assert edges["s1", "s1"].advantage < 0  # it stayed where it was
    assert len(nodes) == 5  # none of the other task


def test_an_ending_has_the_mean_of_what_was_earned_there():
    table = paths_table([Path([0, 1], [0.5]), Path([0, 1], [1.0])])
    graph = state_graph(table, np.zeros(len(table.mask)))
    assert {node.name: node.value for node in graph.nodes}["won s1"] == pytest.approx(0.75)


def test_a_move_leads_to_the_state_in_which_its_agent_acts_next():
    """Another agent acts in state 7, in between."""
    table = paths_table([Path([0, 1, 2], [0, 1.0])])
    apart = replace(table, next_state=table.next_state.at[0].set(7))
    assert state_graph(apart, np.zeros(len(table.mask))) == state_graph(table, np.zeros(len(table.mask)))


def test_an_advantage_that_is_shown_as_zero_is_neither_green_nor_signed():
    edges = [Edge("s0", "s1", visits=1, advantage=advantage) for advantage in (-0.004, 0.004, 0.006)]
    assert [(edge.text, edge.colour) for edge in edges] == [("0.00", NEUTRAL), ("0.00", NEUTRAL), ("+0.01", GAIN)]


def test_dot_escapes_labels():
    text = to_dot(GRAPH)
    assert 'a \\"door\\" <b>\\nV 0.323' in text
    assert text.count("->") == len(GRAPH.edges)


def test_plain_svg_is_well_formed():
    root = ElementTree.fromstring(plain_svg(GRAPH))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(GRAPH.nodes)
    assert 'a "door" <b>' in "".join(root.itertext())


def test_svg_with_and_without_graphviz(monkeypatch):
    ElementTree.fromstring(to_svg(GRAPH))
    monkeypatch.setattr(pictures.shutil, "which", lambda name: None)
    assert to_svg(GRAPH) == plain_svg(GRAPH)
    false = shutil.which("false") or "/bin/false"
    monkeypatch.setattr(pictures.shutil, "which", lambda name: false)
    assert to_svg(GRAPH) == plain_svg(GRAPH)  # a dot that fails
