"""Filters of groups and tasks, and the order in which a batch takes the groups at hand.

Without an order of its own a batch takes groups in the order of tasks. Orders are of the groups never trained on; what
a replay before them has put in front stays there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from flowjax.dataflow.algorithms.base import Algorithm, Candidate, Result, Table, share_of, task_name
from flowjax.records import Task, state_key


class DynamicSampling(Algorithm):
    """Only groups whose rewards differ: in the others no outcome is better than another, so that their advantages are
    zero under every estimator that compares outcomes alone (GRPO, RLOO and their kin).

    A group left out is replaced by another task, so that batches stay full, at the price of more rollouts: the
    constraint 0 < right answers < group size of DAPO (arXiv 2503.14476), eq. 11, for any reward. `accept_share` lets
    that share of the uninformative groups through, for estimators that also compare turns (GiGPO, RewardFlow).
    """

    least_group_size = 2

    def __init__(self, *, seed: int, accept_share: float = 0.0):
        if not 0 <= accept_share <= 1:
            raise ValueError(f"accept_share is {accept_share}: give a share from 0 to 1")
        self._seed, self._accept_share = seed, accept_share
        self.seen = self.left_out = 0

    def keep(self, result: Result) -> bool:
        self.seen += 1
        lucky = share_of(self._seed, "accept", result.group_id) < self._accept_share
        kept = result.informative or lucky
        self.left_out += not kept
        return kept

    def metrics(self) -> dict[str, float]:
        return {"left_out_share": self.left_out / max(self.seen, 1)}

    def state(self) -> dict[str, int]:
        return {"seen": self.seen, "left_out": self.left_out}


class OverlongFilter(Algorithm):
    """Leaves trajectories with a reply of `limit_tokens` or more out of the loss: one that was cut at the limit says
    little about the policy. They still count in the mean and spread of their group. DAPO (arXiv 2503.14476), section
    3.4, overlong filtering.

    A group with more than `share` of such trajectories is left out as a whole: too few came to an end to compare.
    """

    def __init__(self, *, seed: int, limit_tokens: int, share: float = 0.5):
        del seed
        if limit_tokens < 1:
            raise ValueError(f"limit_tokens is {limit_tokens}: give the tokens of a reply that was cut")
        if not 0 <= share < 1:
            raise ValueError(f"share is {share}: give a share from 0 to below 1")
        self._limit_tokens, self._share = limit_tokens, share
        self.left_out = self.masked = 0

    def keep(self, result: Result) -> bool:
        cut = ~self.trains(result)
        kept = bool(cut.mean() <= self._share)
        self.left_out += not kept
        self.masked += int(cut.sum()) if kept else 0
        return kept

    def trains(self, result: Result) -> Bool[np.ndarray, "trajectories"]:
        return result.longest_reply_tokens < self._limit_tokens

    def metrics(self) -> dict[str, float]:
        return {"left_out": self.left_out, "masked_trajectories": self.masked}

    def state(self) -> dict[str, int]:
        return {"left_out": self.left_out, "masked": self.masked}


class Deduplicate(Algorithm):
    """Plays a content under one name: tasks of another name or source with the same content are passed over.

    A task's content is what its payload says in `fields`, or all of its payload; where it has none, its seed and
    source. The name that was played first is played again in later epochs; with `once` nothing is.
    """

    def __init__(self, *, seed: int, fields: Sequence[str] = (), once: bool = False):
        del seed
        self._fields, self._once = tuple(fields), once
        self._played: Table[int, int] = Table()  # content -> name of the task

    def choose(self, task: Task, position: int) -> bool:
        del position
        played = self._played.get(self._content(task))
        return played is None or (not self._once and played == state_key(task_name(task)))

    def chosen(self, task: Task, position: int) -> None:
        del position
        self._played.setdefault(self._content(task), state_key(task_name(task)))

    def _content(self, task: Task) -> int:
        content = {name: task.payload[name] for name in self._fields if name in task.payload} or task.payload
        return state_key(task.world, *_written(content or {"seed": task.seed, "source": task.source}))

    def state(self) -> dict[str, Table[int, int]]:
        return {"_played": self._played}

    def metrics(self) -> dict[str, float]:
        return {"distinct_tasks": len(self._played)}


def _written(content: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in sorted(content.items())]


class EarliestDeadline(Algorithm):
    """The group with the oldest token first, so that fewest grow too old to be used. AstraFlow's default order."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return _ordered(fresh, lambda candidate: (-candidate.age_versions, candidate.arrival))


class FirstInFirstOut(Algorithm):
    """The group that came in first first, whatever its age: long episodes come in late and grow old waiting."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return _ordered(fresh, lambda candidate: (candidate.arrival,))


class LastInFirstOut(Algorithm):
    """The group that came in last first: the youngest tokens, at the price of dropping more old ones."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return _ordered(fresh, lambda candidate: (-candidate.arrival,))


class Replay(Algorithm):
    """Fills `ratio` of a batch with groups that were trained on before, the newest first, each `times` times at most.

    Replayed tokens keep the log-probabilities of the version that sampled them, so that the objective's importance
    ratio accounts for their age. config.dataflow.max_staleness bounds fresh groups only; replayed ones may lag
    `max_age_versions`. Where there are too few, fresh groups fill the batch. AstraFlow's replay (arXiv 2605.15565),
    with a bound on age and on use, which that has not.
    """

    def __init__(self, *, seed: int, ratio: float = 0.25, times: int = 1, max_age_versions: int = 4):
        del seed
        if not 0 < ratio < 1:
            raise ValueError(f"ratio is {ratio}: give a share between 0 and 1")
        if times < 1 or max_age_versions < 1:
            raise ValueError(f"times is {times} and max_age_versions {max_age_versions}: give at least 1 for each")
        self._ratio, self._times, self._max_age = ratio, times, max_age_versions
        self.fresh_share, self.keeps_used_versions = 1 - ratio, max_age_versions

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        first = {each.group_id for each in fresh}
        fit = [each for each in used if each.batches <= self._times and each.age_versions <= self._max_age]
        fit = sorted((each for each in fit if each.group_id not in first), key=_youngest)
        newly_played = math.ceil(round(groups * self.fresh_share, 6))  # 0.7 of 10 groups are 7
        return [*fit[: groups - newly_played], *fresh]


def _youngest(candidate: Candidate) -> tuple[int, int]:
    return candidate.age_versions, -candidate.arrival


def _ordered(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[int, ...]]) -> list[Candidate]:
    """Those trained on before as they are, then the others by `key`."""
    replayed = [candidate for candidate in candidates if candidate.batches]
    return replayed + sorted((candidate for candidate in candidates if not candidate.batches), key=key)
