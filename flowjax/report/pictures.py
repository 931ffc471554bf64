"""Two pictures as SVG, for pages and papers: learning curves of runs, and the state graph of a group.

The curve has one line per run and policy: training success, averaged over the last ten steps, and the held-out
evaluations with their 95 % intervals. The graph is that of the group of the last batch whose episodes differed most in
success, with the value of each state and the advantage of each move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.credit.estimators import estimate
from flowjax.credit.graph import state_graph, to_svg
from flowjax.credit.table import build_table
from flowjax.monitor.metrics import read_metrics
from flowjax.report.episodes import batches_of, most_divided, read_batch
from flowjax.run import read_run

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 20, 44
_COLOURS = ("#1f6fb2", "#c4512d", "#3b8f4e", "#8458a6", "#8a6d1f", "#4a4a4a")
_WINDOW = 10


def draw_state_graph(run: Path) -> str | None:
    """State graph of a group of the run's last batch as SVG text; None where no trajectories were kept."""
    newest = [(batches[-1], policy) for policy in read_run(run).policies if (batches := batches_of(run, policy))]
    if not newest:
        return None
    step, name = max(newest)
    policy, group = read_run(run).policies[name], most_divided(read_batch(run, name, step))
    table = build_table([group.as_group()], np.array(group.rewards))
    options = policy.credit.options.to_dict()
    advantages = np.asarray(estimate(table, policy.credit.name, **options))
    return to_svg(state_graph(table, advantages, gamma=options.get("gamma", 0.9)))


def moving_average(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's way through one run: lines of `metrics.jsonl` with `step` and `success_rate`, evaluations also with
    `low` and `high`."""

    label: str
    train: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]


def curves(run: Path) -> list[Curve]:
    """The run's, one for each policy.

    Raises:
        ValueError: a folder without training steps.
    """
    entries = read_metrics(run)
    train = [entry for entry in entries if entry["kind"] == "train" and "success_rate" in entry]
    evaluations = [entry for entry in entries if entry["kind"] == "eval"]
    if not train:
        raise ValueError(f"{run} has no training steps in metrics.jsonl: give the folder of a run")
    policies = list(dict.fromkeys(entry.get("policy", "") for entry in train))
    if len(policies) == 1:
        return [Curve(run.name, train, evaluations)]
    return [
        Curve(
            f"{run.name} {policy}",
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
    """The picture as SVG text.

    Raises:
        ValueError: a folder without training steps.
    """
    drawn = [curve for run in runs for curve in curves(run)]
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
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if steps / size <= 8)
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
