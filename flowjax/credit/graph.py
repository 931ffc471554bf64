"""Pictures of a task's state graph for people: values, visits, and the advantage of every move."""

import math
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from flowjax.credit.graph_layout import layered_svg
from flowjax.credit.rewardflow import state_values
from flowjax.credit.table import TurnTable, columns_of

Kind = Literal["start", "state", "success", "end"]

GAIN, LOSS, NEUTRAL = "#1a7f5a", "#c2410c", "#8a8f98"
_SHADES = ("#f7f9fc", "#e3edf7", "#c8dcf0", "#a5c8e6", "#7fb0da", "#5b97cc")


@dataclass(frozen=True)
class Node:
    """A state: its value, how often turns started or ended in it."""

    name: str
    value: float
    visits: int
    kind: Kind
    label: str = ""

    @property
    def text(self) -> str:
        """What stands in the node, lines parted by newlines."""
        return f"{self.label or self.name}\nV {self.value:.3g}  ×{self.visits}"


@dataclass(frozen=True)
class Edge:
    """A move between two states: how often it was made, and the mean advantage it got."""

    source: str
    target: str
    visits: int
    advantage: float

    @property
    def text(self) -> str:
        return f"{self.advantage:+.2f}" + (f" ×{self.visits}" if self.visits > 1 else "")

    @property
    def colour(self) -> str:
        return NEUTRAL if abs(self.advantage) < 1e-3 else GAIN if self.advantage > 0 else LOSS

    @property
    def width(self) -> float:
        return 1.0 + math.log2(self.visits)


@dataclass(frozen=True)
class StateGraph:
    """What is drawn of one task."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def state_graph(
    table: TurnTable,
    advantages: Float[np.ndarray, "turns"],
    *,
    task: int = 0,
    labels: Mapping[int, str] | None = None,
    **options: Any,
) -> StateGraph:
    """The graph of one task of a table.

    Args:
        table: the turns.
        advantages: what any estimator gave them.
        task: which task's graph.
        labels: text to show for a state id, such as a drawing of the level.
        options: those of `state_values`.
    """
    found = state_values(table, **options)
    columns = columns_of(table)
    before, earned = np.asarray(found.before), np.asarray(found.earned)
    after = np.where(columns["terminal"], earned, np.asarray(found.after))  # an ending shows what it paid
    given = np.asarray(advantages)
    value: dict[str, float] = {}
    kind: dict[str, Kind] = {}
    visits: dict[str, int] = defaultdict(int)
    label: dict[str, str] = {}
    moves: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in np.flatnonzero(columns["mask"] & (columns["task"] == task)):
        state, target = int(columns["state"][row]), int(columns["next_state"][row])
        source_name, target_name = f"s{state}", f"s{target}"
        if columns["terminal"][row]:
            succeeded = earned[row] > 0
            target_name = f"{'won' if succeeded else 'end'} s{target}"
            kind[target_name] = "success" if succeeded else "end"
        first = columns["step"][row] == 0
        kind[source_name] = "start" if first else kind.get(source_name, "state")
        kind.setdefault(target_name, "state")
        value[source_name] = float(before[row])
        value.setdefault(target_name, float(after[row]))  # a state that some turn started in has that turn's word
        label |= {source_name: (labels or {}).get(state, ""), target_name: (labels or {}).get(target, "")}
        visits[source_name] += first
        visits[target_name] += 1
        moves[source_name, target_name].append(float(given[row]))
    nodes = (Node(name, value[name], visits[name], kind[name], label[name]) for name in value)
    edges = (Edge(*ends, len(all_given), float(np.mean(all_given))) for ends, all_given in moves.items())
    return StateGraph(tuple(nodes), tuple(edges))


def to_dot(graph: StateGraph) -> str:
    """The graph in Graphviz's language. Darker is worth more; green moves have positive advantage, orange negative."""
    highest = max((node.value for node in graph.nodes), default=0.0)
    lines = [
        "digraph states {",
        '  rankdir=LR; bgcolor="white"; nodesep=0.25; ranksep=0.7;',
        '  node [shape=box, style="rounded,filled", fontname="monospace", fontsize=9, color="#5a6472"];',
        '  edge [fontname="Helvetica", fontsize=9, arrowsize=0.7];',
    ]
    for node in graph.nodes:
        looks = [f'label="{_dot_text(node.text)}"', f'fillcolor="{shade(node.value, highest)}"']
        if node.kind == "start":
            looks.append("penwidth=2.2")
        elif node.kind == "success":
            looks.append(f'peripheries=2, color="{GAIN}"')
        elif node.kind == "end":
            looks.append(f'peripheries=2, color="{LOSS}"')
        lines.append(f'  "{node.name}" [{", ".join(looks)}];')
    for edge in graph.edges:
        looks = f'label="{_dot_text(edge.text)}", color="{edge.colour}", fontcolor="{edge.colour}"'
        lines.append(f'  "{edge.source}" -> "{edge.target}" [{looks}, penwidth={edge.width:.2f}];')
    return "\n".join([*lines, "}", ""])


def to_svg(graph: StateGraph, *, timeout_s: float = 20.0) -> str:
    """An SVG picture: laid out by Graphviz's `dot` where that is installed, in plain layers where it is not."""
    dot = shutil.which("dot")
    if dot is not None:
        try:
            drawn = subprocess.run(
                [dot, "-Tsvg"], input=to_dot(graph), capture_output=True, text=True, timeout=timeout_s, check=True
            )
            return drawn.stdout[drawn.stdout.index("<svg") :]
        except (subprocess.SubprocessError, ValueError):
            pass  # a broken or slow dot must not cost the report its picture
    return plain_svg(graph)


def plain_svg(graph: StateGraph) -> str:
    """The picture without Graphviz: states in layers by their distance from the start."""
    highest = max((node.value for node in graph.nodes), default=0.0)
    strokes: dict[Kind, tuple[str, float]] = {
        "start": ("#5a6472", 2.2), "state": ("#5a6472", 1.0), "success": (GAIN, 2.2), "end": (LOSS, 2.2)
    }  # fmt: skip
    boxes = {
        node.name: (escape(node.text), shade(node.value, highest), *strokes[node.kind], node.kind == "start")
        for node in graph.nodes
    }
    arrows = [(e.source, e.target, escape(e.text), e.colour, e.width) for e in graph.edges]
    return layered_svg(boxes, arrows)


def shade(value: float, highest: float) -> str:
    """Fill colour of a state: the darker, the nearer its value to the highest."""
    share = value / highest if highest > 0 else 0.0
    return _SHADES[round(min(max(share, 0.0), 1.0) * (len(_SHADES) - 1))]


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
