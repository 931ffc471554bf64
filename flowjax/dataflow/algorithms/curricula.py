"""Curricula: tasks are played or passed over by how earlier plays of them went.

What is learned about a task is kept for each policy apart: no policy's results stand for another's. A task is played
when any of the policies that have spoken in it has a use for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowjax.dataflow.algorithms.base import Algorithm, Result, Table, share_of, task_name
from flowjax.records import Task

EASY, HARD = "easy", "hard"


class SkipSolved(Algorithm):
    """Passes over tasks that are solved nearly always.

    Each task keeps a moving average s <- decay * s + (1 - decay) * share of rewards above `solved_above`, from 0, and
    is played while s < threshold. AstraFlow's solved-task filter (arXiv 2605.15565).
    """

    def __init__(self, *, seed: int, decay: float = 0.9, threshold: float = 0.95, solved_above: float = 0.0):
        del seed
        _check_shares(decay=decay, threshold=threshold)
        self._decay, self._threshold, self._solved_above = decay, threshold, solved_above
        self._averages: Table[str, dict[str, float]] = Table()  # task -> policy -> s

    def choose(self, task: Task, position: int) -> bool:
        del position
        averages = self._averages.get(task_name(task))
        return not averages or min(averages.values()) < self._threshold

    def keep(self, result: Result) -> bool:
        name = task_name(result.task)
        averages = self._averages.get(name, {})
        now = result.share_above(self._solved_above)
        average = self._decay * averages.get(result.policy, 0.0) + (1 - self._decay) * now
        self._averages[name] = averages | {result.policy: average}
        return True

    def metrics(self) -> dict[str, float]:
        return {"tasks": len(self._averages)}

    def state(self) -> dict[str, Any]:
        return {"_averages": self._averages}


class Difficulty(Algorithm):
    """Prefers tasks whose success rate is near `target`.

    With p a task's moving average of the share of rewards above `solved_above` (weight `rate` for the newest), the task
    is played with probability max(floor, 1 - |p - target| / max(target, 1 - target)); one never seen is always played.
    A smooth form of the window of balanced online difficulty filtering (arXiv 2504.03380), which is widest in
    information at a success rate of one half, since the variance of outcomes p (1 - p) is.
    """

    def __init__(
        self, *, seed: int, target: float = 0.5, floor: float = 0.1, rate: float = 0.5, solved_above: float = 0.0
    ):
        _check_shares(target=target, floor=floor, rate=rate)
        self._seed, self._target, self._floor, self._rate = seed, target, floor, rate
        self._solved_above = solved_above
        self._averages: Table[str, dict[str, float]] = Table()  # task -> policy -> p

    def choose(self, task: Task, position: int) -> bool:
        averages = self._averages.get(task_name(task))
        if not averages:
            return True
        off = min(abs(average - self._target) for average in averages.values()) / max(self._target, 1 - self._target)
        return share_of(self._seed, "difficulty", position) < max(self._floor, 1 - off)

    def keep(self, result: Result) -> bool:
        name = task_name(result.task)
        averages = self._averages.get(name, {})
        now = result.share_above(self._solved_above)
        before = averages.get(result.policy, now)
        self._averages[name] = averages | {result.policy: before + self._rate * (now - before)}
        return True

    def metrics(self) -> dict[str, float]:
        return {"tasks": len(self._averages)}

    def state(self) -> dict[str, Any]:
        return {"_averages": self._averages}


class Greso(Algorithm):
    """Passes over tasks that have lately been all right or all wrong, before they are played. GRESO (arXiv 2506.02177).

    A task's streak z counts its last groups with equal rewards, all of one kind (easy: mean reward above
    `easy_above`; hard: not). It is played with probability max(p_kind ** z, floor_kind). After each `window` groups,
    p_kind falls by `step` where the share of groups of that kind is at least its target, else rises by it; p stays
    within [0.01, 0.99]. Groups of tasks played for the first time, which nothing could have passed over, do not count
    in that share, as in the first epoch of the authors' program. The floors are AstraFlow's. The paper's third part,
    batches of rollouts as large as the share that is kept makes needful, is what `flowjax.dataflow.leases` opens.
    """

    least_group_size = 2

    def __init__(
        self,
        *,
        seed: int,
        target_easy: float = 0.083,
        target_hard: float = 0.167,
        floor_easy: float = 0.1,
        floor_hard: float = 0.4,
        start: float = 0.5,
        step: float = 0.01,
        window: int = 64,
        easy_above: float = 0.5,
    ):
        _check_shares(
            target_easy=target_easy, target_hard=target_hard, floor_easy=floor_easy, floor_hard=floor_hard, start=start
        )
        if window < 1:
            raise ValueError(f"window is {window}: give a number of groups")
        self._seed, self._step, self._window, self._easy_above = seed, step, window, easy_above
        self._start = start
        self._targets = {EASY: target_easy, HARD: target_hard}
        self._floors = {EASY: floor_easy, HARD: floor_hard}
        self._verdicts: Table[str, dict[str, list[Any]]] = Table()  # task -> policy -> [kind, z]
        self._streaks = 0  # tasks with z > 0 for some policy
        self._chances: dict[str, dict[str, float]] = {}  # policy -> kind -> p
        self._counts: dict[str, dict[str, int]] = {}  # policy -> kind -> groups of the window

    def choose(self, task: Task, position: int) -> bool:
        verdicts = self._verdicts.get(task_name(task))
        if not verdicts:
            return True
        chance = max(self._chance(policy, kind, streak) for policy, (kind, streak) in verdicts.items())
        return share_of(self._seed, "greso", position) < chance

    def _chance(self, policy: str, kind: str, streak: int) -> float:
        return max(self._chances[policy][kind] ** streak, self._floors[kind])

    def keep(self, result: Result) -> bool:
        self._chances.setdefault(result.policy, {EASY: self._start, HARD: self._start})
        name = task_name(result.task)
        verdicts = self._verdicts.get(name, {})
        before = verdicts.get(result.policy)
        kind = EASY if np.mean(result.rewards) > self._easy_above else HARD
        longer = before[1] + 1 if before and before[0] == kind else 1
        self._verdicts[name] = verdicts | {result.policy: [kind, 0 if result.informative else longer]}
        self._streaks += _has_streak(self._verdicts[name]) - _has_streak(verdicts)
        if before:
            self._count(result.policy, None if result.informative else kind)
        return True

    def _count(self, policy: str, kind: str | None) -> None:
        counts = self._counts.setdefault(policy, {EASY: 0, HARD: 0, "all": 0})
        counts["all"] += 1
        if kind:
            counts[kind] += 1
        if counts["all"] < self._window:
            return
        chances = self._chances[policy]
        for name, target in self._targets.items():
            down = counts[name] / counts["all"] >= target
            chances[name] = float(np.clip(chances[name] + (-self._step if down else self._step), 0.01, 0.99))
        del self._counts[policy]

    def metrics(self) -> dict[str, float]:
        several = len(self._chances) > 1
        chances = {
            f"p_{kind}{f'_{policy}' if several else ''}": chance
            for policy, of_kind in self._chances.items()
            for kind, chance in of_kind.items()
        }
        return {**chances, "streaks": self._streaks}

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_verdicts", "_streaks", "_chances", "_counts")}


def _has_streak(verdicts: Mapping[str, Sequence[Any]]) -> bool:
    return any(streak for _, streak in verdicts.values())


def _check_shares(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: give a share from 0 to 1")
