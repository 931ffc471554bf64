"""Held-out episodes of a run, `held_out/<policy>@<version>.jsonl`, one a line; and the results of an evaluation that
are computed from them: means with intervals over tasks, pass@k, maj@k, as JSON and Markdown."""

import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.config import ConfigError
from flowjax.files import replace_file
from flowjax.monitor.statistics import majority_at_k, pass_at_k, task_interval

Interval = dict[str, float]
_FIRST = ("success", "reward")  # metrics that tables show first
METRICS = (*_FIRST, "turns", "sampled_tokens", "prompt_tokens")  # of every episode, beside its outcomes
# Metrics that are counts or sums, no shares between 0 and 1, in any world or workflow of flowjax. A world lists its
# own in COUNTS.
NO_SHARES = ("turns", "invalid_actions", "env_return", "helpers", "attempts", "sampled_tokens", "prompt_tokens")


@dataclass(frozen=True, slots=True)
class HeldOutEpisode:
    """One play of a held-out task."""

    task: str  # its content, by `content_of`: tasks of equal content are one task, whatever their names
    task_id: str
    source: str
    seed: int
    status: str
    success: float  # 1 or 0
    turns: int  # of all agents together, as are the tokens
    sampled_tokens: int
    outcome: Mapping[str, float]
    rewards: Mapping[str, float]  # by policy, mean over its trajectories
    prompt_tokens: int = 0  # read by the model; every turn's whole prompt counts
    kind: str = ""  # of task, within its world
    answer: str = ""  # the same text for equal answers; "" where the world compares none

    @property
    def metrics(self) -> dict[str, float]:
        """Its numbers by name; `reward` is the mean over policies, where any spoke."""
        rewards = {"reward": sum(self.rewards.values()) / len(self.rewards)} if self.rewards else {}
        counted = {"success": self.success, "turns": self.turns, "sampled_tokens": self.sampled_tokens}
        counted["prompt_tokens"] = self.prompt_tokens
        return {**self.outcome, **rewards, **counted}


def write_held_out(run_dir: Path, name: str, episodes: Sequence[HeldOutEpisode]) -> None:
    """Write the episodes of the evaluation with this name, all or none of them."""
    folder = run_dir / "held_out"
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"{name}.jsonl", "".join(json.dumps(asdict(episode)) + "\n" for episode in episodes))


def oldest_first(files: Iterable[Path]) -> list[Path]:
    """Files of `held_out/` by the versions in their names; by their times only where these are equal, since a copy of a
    run may have other times."""

    def age(file: Path) -> tuple[int, float]:
        named = file.name.removesuffix(".jsonl").removesuffix(".turns.gz").split(",")
        versions = [name.rpartition("@")[2] for name in named]
        return sum(int(version) for version in versions if version.isdecimal()), file.stat().st_mtime

    return sorted(files, key=age)


def evaluation_of(path: Path) -> Path:
    """The file itself, or the newest evaluation of a run's folder.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return path
    files = oldest_first((path / "held_out").glob("*.jsonl"))
    if not files:
        raise ConfigError(
            f"{path} has no evaluation in held_out/: name a run that has evaluated (config.eval.tasks), or play "
            "one with python -m flowjax.evaluate"
        )
    return files[-1]


def read_held_out(path: Path) -> list[HeldOutEpisode]:
    """Episodes of a file of `held_out/`, or of the newest one in a run's folder.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    path = evaluation_of(path)
    episodes: list[HeldOutEpisode] = []
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text ({error}): give a file of held_out/ that ends in .jsonl") from error
    for number, line in enumerate(lines, 1):
        try:
            episodes.append(HeldOutEpisode(**json.loads(line)))
            if wrong := [name for name, value in episodes[-1].metrics.items() if not math.isfinite(value)]:
                raise ValueError(f"not finite: {', '.join(wrong)}")
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: line {number} is no episode of an evaluation ({error})") from error
    if not episodes:
        raise ConfigError(f"{path}: no episode ended in this evaluation")
    return episodes


def by_task(episodes: Sequence[HeldOutEpisode], metric: str) -> dict[str, list[float]]:
    """A metric of the samples of each task, by the task's content.

    Raises:
        ConfigError: an episode has no such metric.
    """
    found: dict[str, list[float]] = {}
    for episode in episodes:
        if metric not in episode.metrics:
            raise ConfigError(f"metric {metric!r} is not known: use one of {', '.join(sorted(episode.metrics))}")
        found.setdefault(episode.task, []).append(episode.metrics[metric])
    return found


def is_share(metric: str, values: Iterable[float], no_shares: Collection[str]) -> bool:
    """True if a metric is a share of tasks, which has an interval even where all of its values are equal.

    A reward is one only if each value is 0 or 1: 0.25 in every task, as a mean over two policies may be, is not.
    """
    return metric not in no_shares and (metric != "reward" or all(value in (0.0, 1.0) for value in values))


def summarise(episodes: Sequence[HeldOutEpisode], no_shares: Collection[str] = NO_SHARES) -> dict[str, Any]:
    """Results as in `results.json`: means with intervals over tasks, pass@k; maj@k where the world compares answers.

    Equal values of a metric in `no_shares`, or of a reward between 0 and 1, get no interval (see `is_share`). The k are
    1, 2, 4 ... up to the number of samples that at least half of the tasks have; each pass@k is over the tasks that
    have k samples, whose number is its `tasks`.
    """
    tasks: dict[str, list[HeldOutEpisode]] = {}
    for episode in episodes:
        tasks.setdefault(episode.task, []).append(episode)
    usual = statistics.median_low(map(len, tasks.values()))  # a task may lack samples: episodes that failed
    ks = [1 << power for power in range(usual.bit_length())] if usual > 1 else []
    sampled = {k: {task: of for task, of in tasks.items() if len(of) >= k} for k in ks}
    names = [name for name in episodes[0].metrics if all(name in episode.metrics for episode in episodes)]
    compared = sampled if any(episode.answer for episode in episodes) else {}
    return {
        "tasks": len(tasks),
        "episodes": len(episodes),
        "truncated": sum(episode.status == "truncated" for episode in episodes),
        "metrics": {
            name: _interval(
                by_task(episodes, name),
                share=is_share(name, (episode.metrics[name] for episode in episodes), no_shares),
            )
            for name in names
        },
        "pass_at": {k: _over_tasks(of, lambda played, k=k: _pass_at(played, k)) for k, of in sampled.items()},
        "majority_at": {k: _over_tasks(of, lambda played, k=k: _majority_at(played, k)) for k, of in compared.items()},
        "sources": _success_by(episodes, lambda episode: episode.source),
        "kinds": _success_by(episodes, lambda episode: episode.kind),
        "tokens": {
            "prompt": sum(episode.prompt_tokens for episode in episodes),
            "sampled": sum(episode.sampled_tokens for episode in episodes),
        },
    }


def _pass_at(played: Sequence[HeldOutEpisode], k: int) -> float:
    return pass_at_k(len(played), int(sum(episode.success for episode in played)), k)


def _majority_at(played: Sequence[HeldOutEpisode], k: int) -> float:
    return majority_at_k([episode.answer for episode in played], [episode.success for episode in played], k)


def _success_by(episodes: Sequence[HeldOutEpisode], part: Callable[[HeldOutEpisode], str]) -> dict[str, Interval]:
    """Success on each named part of the tasks, by the name that `part` gives an episode ("": no part)."""
    return {
        name: _interval(by_task([episode for episode in episodes if part(episode) == name], "success"))
        for name in sorted({part(episode) for episode in episodes} - {""})
    }


def _over_tasks(
    tasks: Mapping[str, Sequence[HeldOutEpisode]], value: Callable[[Sequence[HeldOutEpisode]], float]
) -> Interval:
    return {**_interval({task: [value(played)] for task, played in tasks.items()}), "tasks": len(tasks)}


def _interval(samples: Mapping[str, Sequence[float]], *, share: bool = True) -> Interval:
    mean, low, high = task_interval(np.array([np.mean(values) for values in samples.values()]), share=share)
    return {"mean": mean, "low": low, "high": high}


def rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a table of results, as text; shares of tasks in per cent."""
    counts = f"of {results['tasks']} tasks, {results['episodes']} episodes"
    if results.get("unfinished"):
        counts += f" ({results['unfinished']} came to nothing and are left out)"
    if results.get("truncated"):
        over = "the model's context" if "endpoint" in results.get("played", {}) else "config.rollout.max_prompt_tokens"
        counts += f"; {results['truncated']} ended at a prompt over {over}"
    asked = results.get("asked", 0) * results.get("played", {}).get("samples", 1)
    if results["episodes"] + results.get("unfinished", 0) < asked:
        counts += f"; {results['asked']} tasks were asked for, and these are all there are"
    found = [("held-out success", f"{percent(results['metrics']['success'])} {counts}")]
    for name, label in (("pass_at", "pass"), ("majority_at", "maj")):
        for k, share in results[name].items():
            having = share.get("tasks", results["tasks"])
            few = f" of the {having} tasks with {k} samples or more" if having < results["tasks"] else ""
            found.append((f"{label}@{k}", percent(share) + few))
    for name, label in (("sources", "source"), ("kinds", "kind")):
        found += [(f"success, {label} {part}", percent(share)) for part, share in results[name].items()]
    ordered = sorted(results["metrics"], key=lambda name: (name not in _FIRST, name))
    for name in ordered:
        if name != "success":
            value = results["metrics"][name]
            found.append((name, f"{value['mean']:.3g} [{value['low']:.3g}, {value['high']:.3g}]"))
    tokens = "{prompt:,} read, {sampled:,} sampled".format(**results["tokens"])
    if lost := results.get("tokens_lost"):
        tokens += " ({prompt:,} and {sampled:,} of them by attempts that left no episode)".format(**lost)
    found.append(("tokens in all", tokens))
    if "cost" in results:
        found.append(("cost in all", f"{results['cost']:.6g}"))
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """The page beside `results.json`."""
    played = results.get("played", {})
    lines = [f"# {played.get('name', 'Evaluation')}", ""]
    lines += [f"- {name}: {value}" for name, value in played.items() if name != "name"]
    lines += ["", "| | mean [95 % over tasks] |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows(results)]
    return "\n".join(lines) + "\n"


def percent(found: Mapping[str, float]) -> str:
    """A share with its interval."""
    return f"{100 * found['mean']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
