"""The table and the picture of runs that learn the same thing in different ways, for benchmarks that compare them.

Held-out success, played greedily and sampled, with the 95 % interval over seeds and tasks, and of each seed; the area
under the learning curve (mean held-out success over the tokens sampled); tokens and seconds until held-out success
first meets nine tenths of what the first way gains; entropy and share of invalid replies over the last five steps. Then
sentences on each way beside the first one: success, paired over tasks, and tokens to the target, paired over seeds.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from scipy import stats

from flowjax.compare import conclusion, read_scores, shared_tasks
from flowjax.config import load_run
from flowjax.monitor.held_out import evaluation_of, oldest_first
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.statistics import difference, task_interval
from tests.benchmarks.runs import HOW, Curve, curve, evaluated, machine, spread

SHARE = 0.9  # of the first way's gain
LAST = 5  # steps
LEFT, TOP, HEIGHT = 60, 20, 300  # of pictures, in pixels
COLUMNS = (
    "greedy [95 %]", "each seed", "sampled [95 %]", "each seed", "area", "tokens to the target", "seconds", "entropy",
    "invalid",
)  # fmt: skip
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#333")


def area(found: Curve) -> float:
    """Mean of held-out success over the tokens sampled, by the trapezoid rule."""
    tokens = found.spent["tokens"]
    return float(np.trapezoid(found.success, tokens) / (tokens[-1] - tokens[0]))


def last_steps(run: Path, name: str) -> float:
    """Mean of a metric over the last training steps."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return float(np.mean([line[name] for line in lines[-LAST:]]))


def evaluation(run: Path, how: str, tasks: int) -> Path:
    """Where the newest checkpoint's evaluation lies; the sampled one is the last beside training."""
    return evaluated(run, how=how, base=False, tasks=tasks) if how == "greedy" else evaluation_of(run)


def base_evaluation(run: Path, how: str, tasks: int) -> Path:
    """Where the base's evaluation lies, of the same tasks: the sampled one is the first beside training."""
    beside = oldest_first((run / "held_out").glob("*.jsonl"))
    return evaluated(run, how=how, base=True, tasks=tasks) if how == "greedy" else beside[0]


def cells(evaluations: Sequence[Path]) -> str:
    """Mean success with its interval, and that of each seed."""
    scores, _ = shared_tasks(*([read_scores(each, "success") for each in evaluations],) * 2)
    # Against zero: the interval of a side alone, over its seeds as well as tasks. Scores that are all alike have no
    # spread to take it from.
    if len(scores) > 1 and np.ptp(scores):
        found = difference(scores, np.zeros_like(scores))
        mean, low, high = found.mean, max(found.low, 0.0), min(found.high, 1.0)  # of a share, which t does not know
    else:
        mean, low, high = task_interval(scores.mean(axis=0))
    each = " ".join(f"{100 * value:.1f}" for value in scores.mean(axis=1))
    return f"{100 * mean:.1f} % [{100 * low:.1f}, {100 * high:.1f}] | {each}"


def row(name: str, runs: Sequence[Path], target: float, tasks: int) -> str:
    """A line of the table."""
    played = [cells([evaluation(run, how, tasks) for run in runs]) for how in HOW]
    curves = [curve(run) for run in runs]
    met = [spent for each in curves if (spent := each.until(target)) is not None]
    missed = [f"{len(runs) - len(met)} never"] if len(met) < len(runs) else []
    spent = [
        ", ".join([*([spread([each[unit] for each in met])] if met else []), *missed]) for unit in ("tokens", "seconds")
    ]
    areas = f"{np.mean([area(each) for each in curves]):.3f}"
    ends = [f"{np.mean([last_steps(run, key) for run in runs]):.3f}" for key in ("entropy", "invalid_share")]
    return f"| {name} | {' | '.join([*played, areas, *spent, *ends])} |"


def compared(name: str, runs: Sequence[Path], first: str, others: Sequence[Path], tasks: int) -> list[str]:
    """What may be said of a way beside the first one."""
    said = []
    for how in HOW:
        sides = [[evaluation(run, how, tasks) for run in side] for side in (runs, others)]
        found = difference(*shared_tasks(*([read_scores(each, "success") for each in side] for side in sides)))
        more = f"{100 * found.mean:+.1f} points [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        said.append(
            f"{name} (A) and {first} (B), {how}: {more}, p = {found.p_value:.2g}. {conclusion(found, 'success')}"
        )
    return said


def times_the_tokens(met: Sequence[float | None], others: Sequence[float | None]) -> str:
    """How many times as many tokens a way takes to the target as another one, from those of both by seed, None where a
    seed never meets it or begins there. The mean of the ratios' logarithms over seeds, with Student's 95 % interval."""
    both = [(a, b) for a, b in zip(met, others, strict=True) if a and b]
    if len(both) < len(met):
        return f"in {len(met) - len(both)} of {len(met)} seeds one of them never meets it, or begins there."
    if len(both) < 2:
        return f"{both[0][0] / both[0][1]:.2f} x in one seed."
    logs = np.log([a / b for a, b in both])
    mean, error, freedom = np.mean(logs), np.std(logs, ddof=1) / np.sqrt(len(logs)), len(logs) - 1
    low, high = np.exp(mean + error * stats.t.ppf([0.025, 0.975], freedom))
    p_value = 2 * stats.t.sf(abs(mean) / error, freedom) if error else float(mean == 0)
    return (
        f"{np.exp(mean):.2f} x [{low:.2f}, {high:.2f}], fewer in {np.sum(logs < 0)} of {len(logs)} seeds, "
        f"p = {p_value:.2g}."
    )


def axes(most: float, what: str, *, width: int, names: int, digits: int = 0) -> list[str]:
    """Head of an SVG of success over `what`, from 0 to `most`, with `names` pixels for a legend on its right."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + width + names} {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for percent in range(0, 101, 20):
        y = TOP + HEIGHT * (1 - percent / 100)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = LEFT + width * share, TOP + HEIGHT + 18
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{share * most:,.{digits}f}</text>')
    middle = LEFT + width / 2
    return [*parts, f'<text x="{middle}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{what}</text>']


def picture(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Held-out success over tokens as SVG: the mean over seeds, and their range as a band, where all seeds have been.

    Seeds are evaluated at steps of their own, so each is drawn by straight lines between its evaluations."""
    width = 520
    most = max(float(each.spent["tokens"][-1]) for found in curves.values() for each in found)

    def point(tokens: float, success: float) -> str:
        return f"{LEFT + width * tokens / most:.1f},{TOP + HEIGHT * (1 - success):.1f}"

    parts = axes(most, "tokens sampled and trained on", width=width, names=190)
    for index, (name, found) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        ends = min(each.spent["tokens"][-1] for each in found)
        tokens = np.unique(np.concatenate([each.spent["tokens"].clip(max=ends) for each in found]))
        seeds = np.stack([np.interp(tokens, each.spent["tokens"], each.success) for each in found])
        lows, highs, means = seeds.min(axis=0), seeds.max(axis=0), seeds.mean(axis=0)
        band = [point(*pair) for pair in zip(tokens, highs, strict=True)]
        band += [point(*pair) for pair in list(zip(tokens, lows, strict=True))[::-1]]
        line = " ".join(point(*pair) for pair in zip(tokens, means, strict=True))
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.12"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + width + 14}" y="{TOP + 14 + 20 * index}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write_comparison(target: Path, way: str, runs: Mapping[str, Sequence[Path]], tasks: int) -> str:
    """Write the table and the picture beside it (`.md` and `.svg`), and return the table."""
    text = table(way, runs, tasks)
    target.with_suffix(".md").write_text(text)
    target.with_suffix(".svg").write_text(
        picture({name: [curve(run) for run in found] for name, found in runs.items()})
    )
    return text


def table(way: str, runs: Mapping[str, Sequence[Path]], tasks: int) -> str:
    """The runs of each way, one for each seed, in a table whose first column is headed `way`, and what may be said of
    them. Each base is played through the first way's run of a seed that began with it."""
    first, *rest = runs
    curves = {name: [curve(run) for run in found] for name, found in runs.items()}
    start, end = (float(np.mean([each.success[place] for each in curves[first]])) for place in (0, -1))
    target = start + SHARE * (end - start)
    bases: dict[str, Path] = {}
    for run in runs[first]:
        bases.setdefault(load_run(run).model.path, run)
    base = [cells([base_evaluation(run, how, tasks) for run in bases.values()]) for how in HOW]
    rows = [f"| (base) | {' | '.join(base)} | | | | | |"]
    rows += [row(name, found, target, tasks) for name, found in runs.items()]
    met = {
        name: [spent["tokens"] if (spent := each.until(target)) else None for each in found]
        for name, found in curves.items()
    }
    said: list[str] = []
    for name in rest:
        said += compared(name, runs[name], first, runs[first], tasks)
        said.append(f"{name} over {first}, tokens to the target: {times_the_tokens(met[name], met[first])}")
    made = " ".join(dict.fromkeys(machine(run) for found in runs.values() for run in found))
    where = f"Target: {100 * target:.1f} % held out beside training, sampled. {made}"
    columns = (way, *COLUMNS)
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *rows, "", where, "", *said, ""])
