"""Compare two evaluations, or two sets of seeds, on the held-out tasks that both have played:

    python -m flowjax.compare A B [--metric=success]

A and B are each a run folder (its newest evaluation beside training is taken), the folder of an evaluation that
`flowjax.evaluate` has made, or a file of `held_out/`.
Several seeds of a method are named with commas between them: a0,a1,a2 b0,b1,b2. Prints mean, difference with its 95 %
interval, p-value, probability of improvement, and what may be concluded; see `flowjax.monitor.statistics.difference`.
`--metric` is `success`, `reward`, `turns`, `sampled_tokens`, or an outcome of the world.

Exit status: 0 compared, 2 something to correct in what was asked for.
"""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from jaxtyping import Float
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from flowjax.config import ConfigError, asks_help, load_run
from flowjax.envs import WorldError, find_world
from flowjax.envs.demonstrations import no_shares_of
from flowjax.fields import shown
from flowjax.monitor.held_out import METRICS, by_task, evaluation_of, is_share, read_held_out
from flowjax.monitor.statistics import Difference, difference, task_interval
from flowjax.monitor.token import known_run_id
from flowjax.monitor.trouble import in_words
from flowjax.run import resolve
from flowjax.workflows import episode_outcomes

_ALPHA = 0.05
SAMPLING_FIELDS = ("eval.temperature", "eval.top_p", "eval.top_k", "eval.min_p")
_PLAY = (  # results depend on them, and on the world's options, whatever the policy
    *SAMPLING_FIELDS, "workflow", "env.name", "env.max_turns", "env.prompt", "env.context", "env.history",
    "rollout.stop", "rollout.max_prompt_tokens", "rollout.max_new_tokens", "rollout.max_episode_turns",
    "rollout.structured_outputs",
)  # fmt: skip
_PLAY_OF_BASE = ("model.template_options", "engine.dtype", "engine.quantize")
_LEFT_OUT = object()
_COMPARED = object()  # in place of a policy's name where the base that it is trained on plays instead


def evaluations_named(side: str) -> list[Path]:
    """The file of each evaluation that a side of the comparison names, with commas between them.

    Raises:
        ConfigError: there is none, or one is named twice, which would count as two seeds.
    """
    files, parts = [], side.split(",")
    while parts:  # a path may have commas in it, as evaluations of several policies do ("a@40,b@40")
        counts = (count for count in range(len(parts), 1, -1) if os.access(",".join(parts[:count]), os.F_OK))
        count = next(counts, 1)
        files.append(evaluation_of(Path(",".join(parts[:count]))))
        parts = parts[count:]
    known: dict[str, Path] = {}
    for file in files:
        run = _run_of(file.resolve())
        marks = [mark for mark in (str(file.resolve()), str(run), known_run_id(run)) if mark]
        for mark in marks:
            if (other := known.get(mark)) is not None:
                same = "is named twice" if other.resolve() == file.resolve() else f"is of the same run as {other}"
                raise ConfigError(f"{file} {same} on one side: give each seed of a method once")
        for mark in marks:
            known[mark] = file
    return files


def _run_of(evaluation: Path) -> Path:
    return evaluation.parent.parent  # <run>/held_out/<evaluation>.jsonl


def read_scores(path: Path, metric: str) -> dict[str, float]:
    """Mean of a metric over the samples of each held-out task, by the task's content.

    Raises:
        ConfigError: there is no evaluation, it cannot be read, or its episodes have no such number.
    """
    return {task: float(np.mean(values)) for task, values in by_task(read_held_out(path), metric).items()}


def rewarded_policies(path: Path) -> list[str]:
    """Names of the policies that got a reward in an evaluation."""
    return sorted({name for played in read_held_out(path) for name in played.rewards})


def comparable_rewards(policies: Collection[str], others: Collection[str]) -> bool:
    """True if rewards that are means over these policies and over those can be compared.

    One policy alone may have another name: a base model that plays alone is rewarded as its policy.
    """
    return set(policies) == set(others) or len(policies) == len(others) == 1


def metrics_of(config: ConfigDict) -> set[str]:
    """Names of the numbers in a run's held-out episodes. Empty if the workflow does not list its outcomes, or if the
    world cannot be found, which the launcher's checks report."""
    try:
        outcomes = episode_outcomes(config.workflow, find_world(config.env.name))
    except WorldError:
        return set()
    return {*METRICS, *outcomes} if outcomes else set()


def shared_tasks(*sides: Sequence[dict[str, float]]) -> list[Float[np.ndarray, "seeds tasks"]]:
    """The scores of each side on the tasks that every evaluation has.

    Raises:
        ConfigError: fewer than two tasks are shared by all.
    """
    tasks = sorted(set.intersection(*(set(scores) for side in sides for scores in side)))
    if len(tasks) < 2:
        raise ConfigError("the evaluations share no two held-out tasks: they need the same env and data seed")
    return [np.array([[scores[task] for task in tasks] for scores in side]) for side in sides]


def apart(tasks: Mapping[str, Set[str]]) -> list[str]:
    """Names of the sets of tasks that have fewer than two tasks, or fewer in common with all sets kept before them."""
    names, shared = [], None
    for name, these in tasks.items():
        both = these if shared is None else shared & these
        if len(both) < 2:
            names.append(name)
        else:
            shared = both
    return names


def conclusion(found: Difference, metric: str) -> str:
    """The result in words: what the comparison shows, of two policies or of two methods."""
    of_method = min(found.seeds) > 1
    between = f"over {found.seeds[0]} and {found.seeds[1]} seeds" if of_method else "between these two policies"
    if found.detectable == 0.0 == found.mean:
        text = f"A and B have the same {metric} on every task."
    elif found.p_value < _ALPHA:
        more = "higher" if found.mean > 0 else "lower"
        text = f"A's {metric} is {more} than B's by {abs(found.mean):.3f} {between}."
    elif found.detectable == 0.0:
        text = f"No difference in {metric} could be shown {between}: {found.tasks} tasks that all agree are too few."
    elif metric == "success" and found.detectable > 1.0:
        played = f"{found.tasks} tasks" + (f", played by {found.seeds[0]} and {found.seeds[1]} seeds," * of_method)
        text = f"No difference in {metric} could be shown {between}, nor could any: {played} are too few."
    else:
        text = (
            f"No difference in {metric} could be shown {between}; one of {found.detectable:.3f} would have been found "
            "four times in five."
        )
    if not of_method:
        text += " Of the methods that made them it says nothing: that takes several seeds of each."
    return text


def compare(first: Sequence[Path], second: Sequence[Path], metric: str, console: Console) -> Difference:
    """Print the comparison of two sides, each of one evaluation or of several seeds, and return it.

    Raises:
        ConfigError: an evaluation cannot be read, or the two cannot be compared.
    """
    sides = [[read_scores(path, metric) for path in side] for side in (first, second)]
    if metric == "reward":
        _check_rewarded([*first, *second])
    scores = shared_tasks(*sides)
    try:
        found = difference(*scores)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    counts = no_shares_of(_run_of(evaluation_of(first[0])))
    columns = ("", "seeds", "mean", "95 % over tasks", "each seed")
    table = Table(*columns, title=f"{metric} on {found.tasks} shared tasks", title_justify="left")
    for name, side in zip("AB", scores, strict=True):
        mean, low, high = task_interval(side.mean(axis=0), share=is_share(metric, side.flat, counts))
        each = " ".join(f"{value:.3f}" for value in side.mean(axis=1))
        table.add_row(name, str(len(side)), f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]", each)
    console.print(table)
    for name, side in zip("AB", (first, second), strict=True):
        console.print(
            f"{name} is {', '.join(str(evaluation_of(path)) for path in side)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"A - B  {found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]  p = {found.p_value:.3g}")
    console.print(f"probability that A does better on a task  {found.improvement:.3f}")
    if left_out := len(set().union(*sides[0], *sides[1])) - found.tasks:
        console.print(f"{left_out} tasks are left out that not every evaluation has")
    for text in _played_otherwise(first, second):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(conclusion(found, metric), highlight=False, soft_wrap=True)
    return found


def _check_rewarded(evaluations: Sequence[Path]) -> None:
    """Check that the rewards of all evaluations are means over the same policies, and the same functions.

    Raises:
        ConfigError: they are not.
    """
    first, policies = evaluations[0], [rewarded_policies(path) for path in evaluations]
    for path, these in zip(evaluations, policies, strict=True):
        if not comparable_rewards(these, policies[0]):
            of = f"{', '.join(these)} in {evaluation_of(path)}, but {', '.join(policies[0])} in {evaluation_of(first)}"
            raise ConfigError(f"--metric is 'reward', the mean over the policies, which are {of}: use another metric")
    known: dict[Path, list[Any]] = {}
    for path, these in zip(map(evaluation_of, evaluations), policies, strict=True):
        with contextlib.suppress(ConfigError):  # `_played_otherwise` says of which ones the config is not known
            known[path] = components_of(load_run(_run_of(path)), these)
    for path, components in known.items():
        if components != known[before := next(iter(known))]:
            of = f"{shown(components)} in {path}, but {shown(known[before])} in {before}"
            raise ConfigError(f"--metric is 'reward', and config.reward.components is {of}: use another metric")


def components_of(config: ConfigDict, rewarded: Sequence[str]) -> list[Any]:
    """Components of the reward of each of these models; a base model that plays alone is rewarded as the policy is."""
    policies = resolve(config).policies
    only = next(iter(policies.values()))
    return [policies.get(name, only).reward.components.to_dict() for name in rewarded]


def _played_otherwise(first: Sequence[Path], second: Sequence[Path]) -> Iterator[str]:
    """A line on each setting of play in which the evaluations differ, and one on those whose settings are not known."""
    settings: dict[str, list[dict[str, Any]]] = {"A": [], "B": []}
    unknown: dict[Path, str] = {}
    for name, side in zip("AB", (first, second), strict=True):
        for run in (_run_of(evaluation_of(path)) for path in side):
            try:
                settings[name].append(_play(load_run(run)))
            except ConfigError as error:
                unknown[run] = str(error)
    for run, error in unknown.items():
        yield f"{run}: its settings of play are not known, and may differ ({error})"
    for field in dict.fromkeys(field for side in settings.values() for play in side for field in play):
        values = {name: [_value(play, field) for play in side] for name, side in settings.items()}
        values = {name: [value for value in side if value is not _COMPARED] for name, side in values.items()}
        every = [value for side in values.values() for value in side]
        if any(value != every[0] for value in every):
            texts = {name: sorted({_said(value) for value in side}) for name, side in values.items() if side}
            said = " and ".join(f"{', '.join(has)} in {name}" for name, has in texts.items())
            yield f"config.{field} is {said}: part of the difference may come from that"


def _play(config: ConfigDict) -> dict[str, Any]:
    """Settings of play by field. Options of the world are there with their defaults, those of a source as given, and
    those of a further base model where they are not the run's own."""
    settings = {field: attrgetter(field)(config) for field in (*_PLAY, *_PLAY_OF_BASE)}
    run = resolve(config)
    for name, base in run.bases.items():
        of_base = {field: attrgetter(field)(base) for field in _PLAY_OF_BASE}
        settings |= {f"bases.{name}.{field}": value for field, value in of_base.items() if value != settings[field]}
    if config.agents:  # what speaks for them: a policy, which is compared, or a base model's weights as they are
        # In an evaluation of the untrained model no policy speaks, and the bases of policies are what is compared.
        untrained = run.bases.keys() >= set(run.agents.values())
        compared = {policy.base.name for policy in run.policies.values()} if untrained else set()
        for agent, model in run.agents.items():
            path = run.bases[model].model.path if model in run.bases else model
            settings[f"agents.{agent}"] = _COMPARED if model in compared else path
    options = config.env.options.to_dict()
    with contextlib.suppress(Exception):  # a user's world that is not here, or has changed since, may fail in any way
        made = find_world(config.env.name)(**options).options
        options = {each.name: getattr(made, each.name) for each in fields(made)}
    settings |= {f"env.options.{name}": value for name, value in options.items()}
    for source, given in config.env.sources.items():
        settings |= {f"env.sources.{source}.options.{name}": value for name, value in given.get("options", {}).items()}
    return settings


def _value(play: Mapping[str, Any], field: str) -> Any:
    """A setting of play. Where a source leaves an option out, or there is no such source, that of the world holds; in
    place of a base model's, the run's own."""
    shared = (
        field.split(".", 2)[-1] if field.startswith("bases.") else f"env.options.{field.rpartition('.options.')[2]}"
    )
    return play.get(field, play.get(shared, _LEFT_OUT))


def _said(value: Any) -> str:
    return "left out" if value is _LEFT_OUT else shown(value)


# -------------------------------------------------------------------------------------------------- variants of a sweep


@dataclass(frozen=True)
class VariantRow:
    """A variant in the table: its mean over tasks and seeds with the 95 % interval over tasks, and each seed's mean.

    The last three are of the comparison with the first variant, whose own are empty.
    """

    name: str
    seeds: Float[np.ndarray, "seeds"]
    mean: float
    low: float
    high: float
    more: str = ""
    p_value: str = ""
    improvement: str = ""


def compare_variants(evaluations: Mapping[str, Mapping[int, Path]], metric: str) -> tuple[list[VariantRow], list[str]]:
    """The rows of the table, and a sentence on each variant but the first.

    Args:
        evaluations: of each variant's seeds, by variant and seed; those without any have no row.
        metric: as `flowjax.compare --metric` has it.

    Raises:
        ConfigError: the evaluations cannot be compared.
    """
    scores = {
        name: {seed: read_scores(path, metric) for seed, path in seeds.items()}
        for name, seeds in evaluations.items()
        if seeds
    }
    if not scores:
        return [], []
    left = apart({name: set.intersection(*map(set, seeds.values())) for name, seeds in scores.items()})
    there = [name for name in scores if name not in left]
    if not there:
        raise ConfigError("no variant has two held-out tasks that all of its seeds have played: see config.eval.tasks")
    counts = no_shares_of(_run_of(next(iter(evaluations[there[0]].values()))))
    # One set of tasks for all rows: means and differences then agree.
    shared = dict(zip(there, shared_tasks(*(list(scores[name].values()) for name in there)), strict=True))
    rows, said = [], []
    for name, values in shared.items():
        mean, low, high = task_interval(values.mean(axis=0), share=is_share(metric, values.flat, counts))
        row = VariantRow(name, values.mean(axis=1), mean, low, high)
        if name != there[0]:
            pair = _to_compare(scores[name], scores[there[0]], values, shared[there[0]])
            if pair is None:
                said.append(f"{name} and {there[0]} have no seed in common yet.")
            else:
                found, of = difference(*pair[:2]), pair[2]
                more = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{of}"
                row = replace(row, more=more, p_value=f"{found.p_value:.3g}", improvement=f"{found.improvement:.3f}")
                said.append(f"{name} (A) and {there[0]} (B){of}: {conclusion(found, metric)}")
        rows.append(row)
    if left:
        said.append(f"Left out, for they share no two held-out tasks with the others: {', '.join(left)}.")
    tasks = shared[there[0]].shape[1]
    left_out = len({task for name in there for played in scores[name].values() for task in played}) - tasks
    others = f"; {left_out} others are left out" if left_out else ""
    said.append(f"All numbers are of the {tasks} tasks that every run in the table has played{others}.")
    return rows, said


def _to_compare(
    seeds: Collection[int],
    first_seeds: Collection[int],
    scores: Float[np.ndarray, "seeds tasks"],
    first_scores: Float[np.ndarray, "first_seeds tasks"],
) -> tuple[Float[np.ndarray, "a tasks"], Float[np.ndarray, "b tasks"], str] | None:
    """The scores of a variant and of the first one that are compared, and of which seed they are where that is one.

    A statement on methods needs several seeds of both. With one seed of either, the same seed of both is compared; None
    where they share none.
    """
    if min(len(seeds), len(first_seeds)) > 1:
        return scores, first_scores, ""
    if not (both := [seed for seed in first_seeds if seed in seeds]):
        return None
    seed = both[0]
    of = f", seed {seed} of each" if max(len(seeds), len(first_seeds)) > 1 else ""
    return scores[[list(seeds).index(seed)]], first_scores[[list(first_seeds).index(seed)]], of


def variants_table(name: str, metric: str, rows: Sequence[VariantRow], said: Sequence[str]) -> str:
    """The comparison in Markdown, under the sweep's name."""
    first = rows[0].name if rows else ""
    head = f"| variant | {metric} [95 % over tasks] | each seed | less {first} [95 %] | p | better on a task |"
    lines = [f"# {name}", "", head, "|---|---|---|---|---|---|"]
    for row in rows:
        seeds = " ".join(f"{value:.3f}" for value in row.seeds)
        mean = f"{row.mean:.3f} [{row.low:.3f}, {row.high:.3f}]"
        lines.append(f"| {row.name} | {mean} | {seeds} | {row.more} | {row.p_value} | {row.improvement} |")
    return "\n".join([*lines, "", *said]) + "\n"


def variants_figure(metric: str, rows: Sequence[VariantRow]) -> str:
    """The means with their intervals as SVG, a small circle for each seed."""
    left, width, each, top = 20 + max([140, *(8 * len(row.name) for row in rows)]), 480, 36, 40
    ends = [end for row in rows for end in (row.low, row.high, *row.seeds)]
    low, high = min(ends), max(ends)
    low, high = (low - 0.5, high + 0.5) if low == high else (low - 0.05 * (high - low), high + 0.05 * (high - low))

    def x(value: float) -> float:
        return round(left + width * (value - low) / (high - low), 1)

    height = top + each * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 40} {height}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>{escape(metric)} of the variants, 95 % over tasks</title>'
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="20">{escape(metric)}</text>'
    ]
    for tick in np.linspace(low, high, 5):
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{top - 10}" y2="{height - 25}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick)}" y="{height - 8}" text-anchor="middle">{tick:.3g}</text>')
    for index, row in enumerate(rows):
        y = top + each * index + each // 2
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(row.name)}</text>')
        parts.append(
            f'<line x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}" stroke="#1f77b4" stroke-width="3"/>'
        )
        parts += [f'<circle cx="{x(seed)}" cy="{y}" r="3" fill="none" stroke="#555"/>' for seed in row.seeds]
        parts.append(f'<circle cx="{x(row.mean)}" cy="{y}" r="5" fill="#1f77b4"/>')
    return "".join([*parts, "</svg>\n"])


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) != 3:
            raise ConfigError(f"give two sides to compare, not {len(argv) - 1}: python -m flowjax.compare A B")
        first, second = map(evaluations_named, argv[1:])
        compare(first, second, flags.FLAGS.metric, Console() if sys.stdout.isatty() else Console(width=140))
    except (ConfigError, OSError) as error:
        print(f"compare: {in_words(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2
    return 0


def _define() -> None:
    flags.DEFINE_string("metric", "success", "success, reward, turns, sampled_tokens, or an outcome of the world")


if __name__ == "__main__":
    if not asks_help(sys.argv, __doc__):
        _define()
        app.run(main)
