"""Held-out episodes of a run: `held_out/<policy>@<version>.jsonl`, one a line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flowjax.config import ConfigError
from flowjax.files import replace_file


@dataclass(frozen=True, slots=True)
class HeldOutEpisode:
    """One play of a held-out task."""

    task: str  # its content as a hash: equal tasks are one task, whatever their names
    task_id: str
    source: str
    seed: int
    status: str
    success: float  # 1 or 0
    turns: int  # of all agents, as are the tokens
    sampled_tokens: int
    outcome: Mapping[str, float]
    rewards: Mapping[str, float]  # by policy, mean over its trajectories
    prompt_tokens: int = 0  # that were read, in every turn anew
    kind: str = ""  # of task, within its world
    answer: str = ""  # equal for equal answers, "" where the world compares none

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


def read_held_out(path: Path) -> list[HeldOutEpisode]:
    """Episodes of a file of `held_out/`, or of the newest one in a run's folder.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if not path.is_file():
        files = sorted((path / "held_out").glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise ConfigError(
                f"{path} has no evaluation in held_out/: name a run that has evaluated (config.eval.tasks), or play "
                "one with python -m flowjax.evaluate"
            )
        path = files[-1]
    episodes: list[HeldOutEpisode] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            episodes.append(HeldOutEpisode(**json.loads(line)))
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
