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
from collections.abc import Iterator, Mapping, Sequence, Set
from operator import attrgetter
from pathlib import Path

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
from flowjax.launch.checks import differences
from flowjax.monitor.held_out import METRICS, by_task, evaluation_of, is_share, read_held_out
from flowjax.monitor.statistics import Difference, difference, task_interval
from flowjax.workflows import episode_outcomes

_ALPHA = 0.05
_OF_TASKS = ("env.name", "env.options", "env.sources", "env.data_seed")  # fields that make tasks
_SAMPLING = ("eval.temperature", "eval.top_p", "eval.top_k", "eval.min_p")
_PLAY = (*_SAMPLING, "env.max_turns", "rollout.max_new_tokens")  # fields that results depend on, whatever the policy


def evaluations_named(side: str) -> list[Path]:
    """The file of each evaluation that a side of the comparison names, with commas between them.

    Raises:
        ConfigError: there is none, or one is named twice, which would count as two seeds.
    """
    files, parts = [], side.split(",")
    while parts:  # what is there may have commas in its name, as evaluations of several policies have ("a@40,b@40")
        counts = (count for count in range(len(parts), 1, -1) if os.access(",".join(parts[:count]), os.F_OK))
        count = next(counts, 1)
        files.append(evaluation_of(Path(",".join(parts[:count]))))
        parts = parts[count:]
    known: set[Path] = set()
    for file in files:
        if file.resolve() in known:
            raise ConfigError(f"{file} is named twice on one side: give each seed of a method once")
        known.add(file.resolve())
    return files


def read_scores(path: Path, metric: str) -> dict[str, float]:
    """Mean of a metric over the samples of each held-out task, by the task's content.

    Raises:
        ConfigError: there is no evaluation, it cannot be read, or its episodes have no such number.
    """
    return {task: float(np.mean(values)) for task, values in by_task(read_held_out(path), metric).items()}


def metrics_of(config: ConfigDict) -> set[str]:
    """Numbers that held-out episodes of a run have; none where the workflow does not list its own, or the world is not
    to be had, which is said by the launcher's checks."""
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
    """Of sets of tasks by name, those that would leave fewer than two to the ones before them."""
    names, shared = [], None
    for name, these in tasks.items():
        both = these if shared is None else shared & these
        if shared is not None and len(both) < 2:
            names.append(name)
        else:
            shared = both
    return names


def sampled_otherwise(configs: Mapping[str, ConfigDict]) -> Iterator[tuple[str, str]]:
    """Variants of a sweep whose held-out episodes are sampled in another way than the first one's, and what differs."""
    first = next(iter(configs), "")
    for name, config in configs.items():
        for field, was, now in differences(configs[first], config):
            if field in _SAMPLING:
                values = f"config.{field} is {shown(now)}, not {shown(was)} as in VARIANTS[{first!r}]"
                remedy = "give them one value, or make another sweep of it"
                yield name, f"{values}, and greedy or narrow sampling is no better method: {remedy}"


def of_other_tasks(configs: Mapping[str, ConfigDict]) -> Iterator[tuple[str, str]]:
    """Variants of a sweep whose held-out tasks are others than those before them have, and what makes them so."""
    first = next(iter(configs), "")
    differing = {
        name: [found for found in differences(configs[first], config) if found[0].startswith(_OF_TASKS)]
        for name, config in configs.items()
    }
    if not any(differing.values()):
        return
    from flowjax.dataflow.tasks import held_out_contents  # which imports grain: most sweeps do without

    tasks: dict[str, set[str]] = {}
    for name, config in configs.items():
        if name == first or differing[name]:
            with contextlib.suppress(Exception):  # the launcher's checks say what is wrong with a world
                tasks[name] = held_out_contents(config)
    for name in apart(tasks) if first in tasks else ():
        values = "; ".join(f"config.{field} is {shown(now)}, not {shown(was)}" for field, was, now in differing[name])
        remedy = "a sweep compares by the same tasks, so give them one value, or make another sweep of it"
        yield name, f"{values} as in VARIANTS[{first!r}], and no two held-out tasks are the same: {remedy}"


def conclusion(found: Difference, metric: str) -> str:
    """One sentence: what the comparison shows, and of what."""
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
    scores = shared_tasks(*sides)
    try:
        found = difference(*scores)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    counts = no_shares_of(evaluation_of(first[0]).parent.parent)  # <run>/held_out/<evaluation>.jsonl
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


def _played_otherwise(first: Sequence[Path], second: Sequence[Path]) -> Iterator[str]:
    """A line on each setting of play in which the evaluations differ, of those whose config.json can be read."""
    configs: dict[str, list[ConfigDict]] = {"A": [], "B": []}
    for name, side in zip("AB", (first, second), strict=True):
        for path in side:
            with contextlib.suppress(ConfigError):
                configs[name].append(load_run(evaluation_of(path).parent.parent))
    for field in _PLAY:
        values = {name: sorted(set(map(attrgetter(field), of_side))) for name, of_side in configs.items()}
        if len(set().union(*values.values())) > 1:
            said = " and ".join(f"{', '.join(map(str, has))} in {name}" for name, has in values.items() if has)
            yield f"config.{field} is {said}: part of the difference may come from that"


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) != 3:
            raise ConfigError(f"give two sides to compare, not {len(argv) - 1}: python -m flowjax.compare A B")
        first, second = map(evaluations_named, argv[1:])
        compare(first, second, flags.FLAGS.metric, Console() if sys.stdout.isatty() else Console(width=140))
    except (ConfigError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


def _define() -> None:
    flags.DEFINE_string("metric", "success", "success, reward, turns, sampled_tokens, or an outcome of the world")


if __name__ == "__main__":
    if not asks_help(sys.argv, __doc__):
        _define()
        app.run(main)
