"""Draw the learning curves of runs: `python -m flowjax.report runs/<name> [runs/<other> ...] [--svg=curve.svg]`.

One line per run: training success, averaged over the last ten steps, and the held-out evaluations with their 95 %
intervals. By default the picture goes to `learning_curve.svg` in the first run's folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowjax.monitor.metrics import read_metrics

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 20, 44
_COLOURS = ("#1f6fb2", "#c4512d", "#3b8f4e", "#8458a6", "#8a6d1f", "#4a4a4a")
_WINDOW = 10


def moving_average(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def learning_curves(runs: Sequence[Path]) -> str:
    """The picture as SVG text.

    Raises:
        ValueError: a folder without training steps.
    """
    curves = {run.name: read_metrics(run) for run in runs}
    for run in runs:
        if not any(entry["kind"] == "train" for entry in curves[run.name]):
            raise ValueError(f"{run} has no training steps in metrics.jsonl: give the folder of a run")
    steps = max(entry["step"] for entries in curves.values() for entry in entries if entry["kind"] == "train")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_axes(steps),
    ]
    for index, (name, entries) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        parts += _curve(entries, steps, colour)
        parts += _evaluations(entries, steps, colour, shift=4 * (index - (len(curves) - 1) / 2))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 16}" y="{_TOP + 14 + 18 * index}" fill="{colour}">{name}</text>')
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


def _curve(entries: Sequence[dict[str, Any]], steps: int, colour: str) -> list[str]:
    train = [entry for entry in entries if entry["kind"] == "train" and "success_rate" in entry]
    averages = moving_average([entry["success_rate"] for entry in train])
    points = " ".join(
        f"{_x(entry['step'], steps):.1f},{_y(average):.1f}" for entry, average in zip(train, averages, strict=True)
    )
    return [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>']


def _evaluations(entries: Sequence[dict[str, Any]], steps: int, colour: str, shift: float) -> list[str]:
    parts = []
    for entry in entries:
        if entry["kind"] != "eval":
            continue
        x = _x(entry["step"], steps) + shift
        low, high, share = (_y(entry[name]) for name in ("low", "high", "success_rate"))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{share:.1f}" r="4" fill="{colour}"/>')
    return parts


def main(argv: Sequence[str]) -> int:
    runs = [Path(argument) for argument in argv if not argument.startswith("--")]
    options = [argument for argument in argv if argument.startswith("--")]
    unknown = [option for option in options if not option.startswith("--svg=")]
    if unknown or not runs:
        print(__doc__ if not unknown else f"{unknown[0]} is not known: the only option is --svg=FILE", file=sys.stderr)
        return 2
    target = Path(options[-1].removeprefix("--svg=")) if options else runs[0] / "learning_curve.svg"
    try:
        target.write_text(learning_curves(runs))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
