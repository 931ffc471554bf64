"""Which tasks are worth playing, from how earlier plays of them went."""

from typing import Any

import numpy as np

from flowjax.dataflow.algorithms.base import Algorithm, Result
from flowjax.dataflow.algorithms.filters import _share
from flowjax.records import Task

EASY, HARD = "easy", "hard"


class SkipSolved(Algorithm):
    """Passes over tasks that are solved nearly always.

    Each task keeps a moving average s <- decay * s + (1 - decay) * share of positive rewards, from 0, and is played
    while s < threshold. AstraFlow's solved-task filter.
    """

    def __init__(self, *, seed: int, decay: float = 0.9, threshold: float = 0.95):
        del seed
        self._decay, self._threshold = decay, threshold
        self._solved: dict[str, float] = {}

    def choose(self, task: Task, position: int) -> bool:
        del position
        return self._solved.get(task.task_id, 0.0) < self._threshold

    def keep(self, result: Result) -> bool:
        before = self._solved.get(result.task.task_id, 0.0)
        now = float((result.rewards > 0).mean())
        self._solved[result.task.task_id] = self._decay * before + (1 - self._decay) * now
        return True

    def state(self) -> dict[str, Any]:
        return {"_solved": self._solved}


class Difficulty(Algorithm):
    """Prefers tasks whose success rate is near `target`.

    With p a task's moving average of the share of positive rewards (weight `rate` for the newest), the task is played
    with probability max(floor, 1 - |p - target| / max(target, 1 - target)); one never seen is always played.
    """

    def __init__(self, *, seed: int, target: float = 0.5, floor: float = 0.1, rate: float = 0.5):
        self._seed, self._target, self._floor, self._rate = seed, target, floor, rate
        self._success: dict[str, float] = {}

    def choose(self, task: Task, position: int) -> bool:
        if task.task_id not in self._success:
            return True
        off = abs(self._success[task.task_id] - self._target) / max(self._target, 1 - self._target)
        return _share(self._seed, "difficulty", position) < max(self._floor, 1 - off)

    def keep(self, result: Result) -> bool:
        now = float((result.rewards > 0).mean())
        before = self._success.get(result.task.task_id, now)
        self._success[result.task.task_id] = before + self._rate * (now - before)
        return True

    def state(self) -> dict[str, Any]:
        return {"_success": self._success}


class Greso(Algorithm):
    """Passes over tasks that have lately been all right or all wrong, before they are played. GRESO (arXiv 2506.02177).

    A task's streak z counts its last groups with equal rewards, all of one kind (easy: mean reward above
    `easy_above`; hard: not). It is played with probability max(p_kind ** z, floor_kind). After each `window` groups,
    p_kind falls by `step` where the share of groups of that kind is at least its target, else rises by it; p stays
    within [0.01, 0.99].
    """

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
        self._seed, self._step, self._window, self._easy_above = seed, step, window, easy_above
        self._targets = {EASY: target_easy, HARD: target_hard}
        self._floors = {EASY: floor_easy, HARD: floor_hard}
        self._streaks: dict[str, list[Any]] = {}  # task -> [kind, length]
        self._p = {EASY: start, HARD: start}
        self._counts = {EASY: 0, HARD: 0, "all": 0}

    def choose(self, task: Task, position: int) -> bool:
        if task.task_id not in self._streaks:
            return True
        kind, length = self._streaks[task.task_id]
        return _share(self._seed, "greso", position) < max(self._p[kind] ** length, self._floors[kind])

    def keep(self, result: Result) -> bool:
        self._counts["all"] += 1
        if result.informative:
            self._streaks.pop(result.task.task_id, None)
        else:
            kind = EASY if np.mean(result.rewards) > self._easy_above else HARD
            before = self._streaks.get(result.task.task_id, [kind, 0])
            self._streaks[result.task.task_id] = [kind, before[1] + 1 if before[0] == kind else 1]
            self._counts[kind] += 1
        if self._counts["all"] >= self._window:
            self._adjust()
        return True

    def _adjust(self) -> None:
        for kind, target in self._targets.items():
            down = self._counts[kind] / self._counts["all"] >= target
            self._p[kind] = float(np.clip(self._p[kind] + (-self._step if down else self._step), 0.01, 0.99))
        self._counts = {EASY: 0, HARD: 0, "all": 0}

    def metrics(self) -> dict[str, float]:
        return {"p_easy": self._p[EASY], "p_hard": self._p[HARD], "streaks": len(self._streaks)}

    def state(self) -> dict[str, Any]:
        return {"_streaks": self._streaks, "_p": self._p, "_counts": self._counts}
