"""Two pictures as SVG, for pages and papers: learning curves of runs, and the state graph of a group.

The curve has one line per run and policy: training success, averaged over the last ten steps, and the held-out
evaluations with their 95 % intervals. The graph is that of the group of the last batch whose episodes differed most in
success, with the value of each state and the advantage of each move.
"""

import itertools
import math
import shutil
import subprocess
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from flowjax.credit.estimators import state_values
from flowjax.credit.table import TurnTable, build_table, columns_of
from flowjax.monitor.metrics import evaluation_lines, read_metrics
from flowjax.report.credit import signed, value_options
from flowjax.report.episodes import batches_of, most_divided, read_batch
from flowjax.report.overview import names_of
from flowjax.run import read_run

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 20, 44
_COLOURS = ("#1f6fb2", "#c4512d", "#3b8f4e", "#8458a6", "#8a6d1f", "#4a4a4a")
_WINDOW = 10  # steps of the moving average


def moving_average(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


@dataclass(frozen=True, slots=True)
class Curve:
    """Lines of `metrics.jsonl` of one policy in one run, with `step` and `success_rate`; evaluations also have `low`
    and `high`."""

    label: str
    train: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]


def curves(run: Path, name: str) -> list[Curve]:
    """The run's curves, one for each policy, labelled with `name` and, of several policies, the policy's name.

    Raises:
        ValueError: the folder has no training steps.
    """
    entries = read_metrics(run)
    train = [entry for entry in entries if entry["kind"] == "train" and "success_rate" in entry]
    evaluations = evaluation_lines(entries)
    if not train:
        raise ValueError(f"{run} has no training steps in metrics.jsonl: give the folder of a run")
    policies = list(dict.fromkeys(entry.get("policy", "") for entry in train))
    if len(policies) == 1:
        return [Curve(name, train, evaluations)]
    return [
        Curve(
            f"{name} {policy}",
            [entry for entry in train if entry["policy"] == policy],
            [
                {"step": entry["versions"][policy], **entry["policies"][policy]}
                for entry in evaluations
                if entry["policies"][policy]["trajectories"]
            ],
        )
        for policy in policies
    ]


def learning_curves(runs: Sequence[Path]) -> str:
    """The learning curves of runs as SVG text.

    Raises:
        ValueError: a folder has no training steps.
    """
    drawn = [curve for run, name in zip(runs, names_of(runs), strict=True) for curve in curves(run, name)]
    steps = max(entry["step"] for curve in drawn for entry in curve.train)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_axes(steps),
    ]
    for index, curve in enumerate(drawn):
        colour = _COLOURS[index % len(_COLOURS)]
        parts += _line(curve.train, steps, colour)
        parts += _evaluations(curve.evaluations, steps, colour, shift=4 * (index - (len(drawn) - 1) / 2))
        x, y = _WIDTH - _RIGHT + 16, _TOP + 14 + 18 * index
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{escape(curve.label)}</text>')
    return "\n".join([*parts, "</svg>"])


def _x(step: float, steps: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / steps


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _axes(steps: int) -> list[str]:
    parts = []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    every = next(
        size for power in itertools.count() for size in (10**power, 2 * 10**power, 5 * 10**power) if steps <= 8 * size
    )
    for step in range(0, steps + 1, every):
        parts.append(f'<text x="{_x(step, steps):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{step}</text>')
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">training step</text>')
    legend = _WIDTH - _RIGHT + 16
    parts.append(f'<text x="{legend}" y="{_HEIGHT - 58}" fill="#555">line: training success,</text>')
    parts.append(f'<text x="{legend}" y="{_HEIGHT - 42}" fill="#555">mean of {_WINDOW} steps</text>')
    parts.append(f'<text x="{legend}" y="{_HEIGHT - 22}" fill="#555">dot: held out, 95 %</text>')
    return parts


def _line(train: Sequence[Mapping[str, Any]], steps: int, colour: str) -> list[str]:
    averages = moving_average([entry["success_rate"] for entry in train])
    points = " ".join(
        f"{_x(entry['step'], steps):.1f},{_y(average):.1f}" for entry, average in zip(train, averages, strict=True)
    )
    return [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>']


def _evaluations(entries: Sequence[Mapping[str, Any]], steps: int, colour: str, shift: float) -> list[str]:
    parts = []
    for entry in entries:
        x = _x(entry["step"], steps) + shift
        low, high, share = (_y(entry[name]) for name in ("low", "high", "success_rate"))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{share:.1f}" r="4" fill="{colour}"/>')
    return parts


# --------------------------------------------------------------------------------------------------------- state graphs

Kind = Literal["start", "state", "success", "end"]

GAIN, LOSS, NEUTRAL = "#1a7f5a", "#c2410c", "#8a8f98"
_STROKES: dict[Kind, tuple[str, float]] = {
    "start": ("#5a6472", 2.2),
    "state": ("#5a6472", 1.0),
    "success": (GAIN, 2.2),
    "end": (LOSS, 2.2),
}
_BOX_WIDTH, _LINE_HEIGHT, _MARGIN, _LAYER_GAP, _ROW_GAP = 96, 13, 34, 96, 34  # of plain pictures, in pixels
_SHADES = ("#f7f9fc", "#e3edf7", "#c8dcf0", "#a5c8e6", "#7fb0da", "#5b97cc")


def draw_state_graph(run: Path) -> str | None:
    """State graph of a group of the run's last batch as SVG text; None where no trajectories were kept."""
    policies = read_run(run).policies
    newest = [(batches[-1], policy) for policy in policies if (batches := batches_of(run, policy))]
    if not newest:
        return None
    step, name = max(newest)
    # None where the file was cut off before its first group, or none of them has a turn.
    groups = [group for group in read_batch(run, name, step) if any(line["turns"] for line in group.lines)]
    if not groups:
        return None
    policy, group = policies[name], most_divided(groups)
    table = build_table([group.as_group()], np.array(group.rewards))
    # The advantages that were trained on, not those of the estimator on this group: some compare over the whole batch.
    advantages = np.array([turn.get("advantage", 0.0) for line in group.lines for turn in line["turns"]])
    won = np.array([line["outcome"].get("success", 0.0) >= 1.0 for line in group.lines for _ in line["turns"]])
    return to_svg(state_graph(table, advantages, won=won, **value_options(policy.credit)))


@dataclass(frozen=True)
class Node:
    """A state: its value, and how often episodes started in it or moves led to it."""

    name: str
    value: float
    visits: int
    kind: Kind
    label: str = ""

    @property
    def text(self) -> str:
        """Text in the node, with its lines separated by newlines."""
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
        return signed(self.advantage) + (f" ×{self.visits}" if self.visits > 1 else "")

    @property
    def colour(self) -> str:
        return NEUTRAL if signed(self.advantage) == "0.00" else GAIN if self.advantage > 0 else LOSS

    @property
    def width(self) -> float:
        return 1.0 + math.log2(self.visits)


@dataclass(frozen=True)
class StateGraph:
    """States and moves of one task, as they are drawn."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def state_graph(
    table: TurnTable,
    advantages: Float[np.ndarray, "turns"],
    *,
    group: int = 0,
    labels: Mapping[int, str] | None = None,
    won: Bool[np.ndarray, "turns"] | None = None,
    **options: Any,
) -> StateGraph:
    """The graph of one group of a table.

    Args:
        table: the turns.
        advantages: one for each turn, of any estimator.
        group: index of the group in the table.
        labels: text to show for a state id, such as a drawing of the level.
        won: True for turns of an episode that succeeded; if None, an ending with a positive reward counts as won.
        options: those of `state_values`.
    """
    found = state_values(table, **options)
    columns = columns_of(table)
    before, after, earned = np.asarray(found.before), np.asarray(found.after), np.asarray(found.earned)
    given = np.asarray(advantages)
    value: dict[str, float] = {}
    ended: dict[str, list[float]] = defaultdict(list)  # what was earned at each ending
    kind: dict[str, Kind] = {}
    visits: dict[str, int] = defaultdict(int)
    label: dict[str, str] = {}
    moves: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in np.flatnonzero(columns["mask"] & (columns["group"] == group)):
        state, onward = int(columns["state"][row]), columns["successor"][row]
        # To the state of the next turn: of several agents another one acts in the state that the move led to.
        target = int(columns["next_state"][row] if onward == row else columns["state"][onward])
        source_name, target_name = f"s{state}", f"s{target}"
        if columns["terminal"][row]:
            succeeded = earned[row] > 0 if won is None else won[row]
            target_name = f"{'won' if succeeded else 'end'} s{target}"
            kind[target_name] = "success" if succeeded else "end"
            ended[target_name].append(float(earned[row]))
        first = bool(columns["step"][row] == 0)
        kind[source_name] = "start" if first else kind.get(source_name, "state")
        kind.setdefault(target_name, "state")
        value[source_name] = float(before[row])
        value.setdefault(target_name, float(after[row]))  # a turn that starts in the state overwrites it, above
        label |= {source_name: (labels or {}).get(state, ""), target_name: (labels or {}).get(target, "")}
        visits[source_name] += first
        visits[target_name] += 1
        moves[source_name, target_name].append(float(given[row]))
    value |= {name: float(np.mean(rewards)) for name, rewards in ended.items()}
    nodes = (Node(name, value[name], visits[name], kind[name], label[name]) for name in value)
    edges = (Edge(*ends, len(all_given), float(np.mean(all_given))) for ends, all_given in moves.items())
    return StateGraph(tuple(nodes), tuple(edges))


def to_dot(graph: StateGraph) -> str:
    """The graph in Graphviz's language. Darker states have a higher value; green moves have a positive advantage,
    orange ones a negative one."""
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


def shade(value: float, highest: float) -> str:
    """Fill colour of a state: the darker, the nearer its value to the highest."""
    share = value / highest if highest > 0 else 0.0
    return _SHADES[round(min(max(share, 0.0), 1.0) * (len(_SHADES) - 1))]


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# -------------------------------------------------------------------------------------------------- without Graphviz


def plain_svg(graph: StateGraph) -> str:
    """The picture without Graphviz: states in layers by their distance from the start, straight arrows."""
    highest = max((node.value for node in graph.nodes), default=0.0)
    height = max((node.text.count("\n") + 1 for node in graph.nodes), default=1) * _LINE_HEIGHT + 12
    at = _positions(graph, height)
    width = max((x for x, _ in at.values()), default=0) + _BOX_WIDTH + _MARGIN
    depth = max((y for _, y in at.values()), default=0) + height + _MARGIN
    colours = sorted({edge.colour for edge in graph.edges})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{depth:.0f}" '
        f'viewBox="0 0 {width:.0f} {depth:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="10">',
        "<defs>",
        *(_arrow_head(colour) for colour in colours),
        "</defs>",
        *(_arrow(edge, at, height) for edge in graph.edges),
        *(_box(node, shade(node.value, highest), *at[node.name], height) for node in graph.nodes),
        "</svg>",
    ]
    return "\n".join(parts)


def _positions(graph: StateGraph, height: float) -> dict[str, tuple[float, float]]:
    """Left upper corner of each node's box."""
    onward: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for edge in graph.edges:
        onward[edge.source].append(edge.target)
    starts = [node.name for node in graph.nodes if node.kind == "start"]
    layer = dict.fromkeys(starts or list(onward)[:1], 0)
    queue = deque(layer)
    while queue:
        name = queue.popleft()
        for target in onward[name]:
            if target not in layer:
                layer[target] = layer[name] + 1
                queue.append(target)
    rows: dict[int, int] = defaultdict(int)
    at = {}
    for name in onward:
        column = layer.get(name, 0)
        at[name] = (_MARGIN + column * (_BOX_WIDTH + _LAYER_GAP), _MARGIN + rows[column] * (height + _ROW_GAP))
        rows[column] += 1
    return at


def _arrow_head(colour: str) -> str:
    return (
        f'<marker id="head-{colour.lstrip("#")}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
    )


def _box(node: Node, fill: str, x: float, y: float, height: float) -> str:
    stroke, width = _STROKES[node.kind]
    lines = escape(node.text).split("\n")
    top = y + (height - len(lines) * _LINE_HEIGHT) / 2 + _LINE_HEIGHT - 3
    spans = "".join(
        f'<tspan x="{x + _BOX_WIDTH / 2:.0f}" y="{top + i * _LINE_HEIGHT:.0f}">{line}</tspan>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{width}"/><text text-anchor="middle" xml:space="preserve">{spans}</text>'
    )


def _arrow(edge: Edge, at: Mapping[str, tuple[float, float]], height: float) -> str:
    (x0, y0), (x1, y1) = at[edge.source], at[edge.target]
    if edge.source == edge.target:
        start, end = (x0 + _BOX_WIDTH * 0.35, y0), (x0 + _BOX_WIDTH * 0.65, y0)
        path = (
            f"M{start[0]:.0f} {start[1]:.0f} C{x0:.0f} {y0 - 26:.0f} "
            f"{x0 + _BOX_WIDTH:.0f} {y0 - 26:.0f} {end[0]:.0f} {end[1]:.0f}"
        )
        label = (x0 + _BOX_WIDTH / 2, y0 - 22)
    else:
        forward = x1 > x0
        start = (x0 + _BOX_WIDTH, y0 + height * 0.4) if forward else (x0, y0 + height * 0.7)
        end = (x1, y1 + height * 0.4) if forward else (x1 + _BOX_WIDTH, y1 + height * 0.7)
        if x1 == x0:
            start, end = (x0 + _BOX_WIDTH, y0 + height / 2), (x1 + _BOX_WIDTH, y1 + height / 2)
        bend = 40 if forward or x1 == x0 else -40
        turn = bend if x1 == x0 else -bend
        path = (
            f"M{start[0]:.0f} {start[1]:.0f} C{start[0] + bend:.0f} {start[1]:.0f} "
            f"{end[0] + turn:.0f} {end[1]:.0f} {end[0]:.0f} {end[1]:.0f}"
        )
        label = ((start[0] + end[0]) / 2 + (bend / 2 if x1 == x0 else 0), (start[1] + end[1]) / 2 - 4)
    return (
        f'<path d="{path}" fill="none" stroke="{edge.colour}" stroke-width="{edge.width:.2f}" '
        f'marker-end="url(#head-{edge.colour.lstrip("#")})"/>'
        f'<text x="{label[0]:.0f}" y="{label[1]:.0f}" text-anchor="middle" font-size="9" '
        f'fill="{edge.colour}">{escape(edge.text)}</text>'
    )
