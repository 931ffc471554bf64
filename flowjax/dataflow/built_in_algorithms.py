"""The data algorithms that a config names: curricula of tasks, filters of groups, the order of batches, and replay.

Curricula play a task or pass over it, by how its earlier plays went. They keep the results of each policy apart, and
play a task if it is useful to any of the policies that have played in it.

If the config names no order, a batch takes groups in the order of tasks. An order sorts only groups never trained on;
groups that a replay before it in the chain has put in front stay there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool
from ml_collections import ConfigDict

from flowjax.config import task_options
from flowjax.dataflow.algorithms import (
    Algorithm,
    Candidate,
    Result,
    Table,
    build_algorithms,
    fresh_groups,
    share_of,
    task_name,
)
from flowjax.dataflow.tasks import task_at, written
from flowjax.envs import find_world
from flowjax.fields import nearest, shown
from flowjax.records import Task, state_key

EASY, HARD = "easy", "hard"
_FIRST_TASKS = 16  # of each source, whose payloads are read


class SkipSolved(Algorithm):
    """Passes over tasks that are solved nearly always.

    Each task keeps a moving average s <- decay * s + (1 - decay) * share of rewards above `solved_above`, from 0, and
    is played while s < threshold. AstraFlow's solved-task filter (arXiv 2605.15565), except that `solved_above` is 0
    there: its rewards have no component for the format, which a wrong answer can earn, too. With the default options a
    task that is solved each time is passed over after 29 groups; s changes only by playing, so it does not come back.
    """

    def __init__(self, *, seed: int, decay: float = 0.9, threshold: float = 0.95, solved_above: float = 0.5):
        del seed
        _check_shares(decay=decay, threshold=threshold)
        self._decay, self._threshold, self._solved_above = decay, threshold, solved_above
        self._averages: Table[str, dict[str, float]] = Table()  # task -> policy -> s

    def choose(self, task: Task, position: int) -> bool:
        del position
        averages = self._averages.get(task_name(task))
        return not averages or min(averages.values()) < self._threshold  # some policy does not solve it yet

    def keep(self, result: Result) -> bool:
        name = task_name(result.task)
        averages = self._averages.get(name, {})
        now = result.share_above(self._solved_above)
        average = self._decay * averages.get(result.policy, 0.0) + (1 - self._decay) * now
        self._averages[name] = averages | {result.policy: average}  # a new map: a Table sees no change inside a value
        return True

    def metrics(self) -> dict[str, float]:
        return {"tasks": len(self._averages)}

    def state(self) -> dict[str, Any]:
        return {"_averages": self._averages}


class Difficulty(Algorithm):
    """Prefers tasks whose success rate is near `target`.

    With p a task's moving average of the share of rewards above `solved_above` (weight `rate` for the newest), the task
    is played with probability max(floor, 1 - |p - target| / max(target, 1 - target)); one never seen is always played.
    A smooth form of the window of balanced online difficulty filtering (arXiv 2504.03380): a group says most at a
    success rate of one half, where the variance p (1 - p) of its outcomes is largest.
    """

    def __init__(
        self, *, seed: int, target: float = 0.5, floor: float = 0.1, rate: float = 0.5, solved_above: float = 0.5
    ):
        _check_shares(target=target, floor=floor, rate=rate)
        self._seed, self._target, self._floor, self._rate = seed, target, floor, rate
        self._solved_above = solved_above
        self._averages: Table[str, dict[str, float]] = Table()  # task -> policy -> p

    def choose(self, task: Task, position: int) -> bool:
        averages = self._averages.get(task_name(task))
        if not averages:
            return True
        # Distance from the target, of the policy that is nearest to it, as a share of the largest that there can be.
        off = min(abs(average - self._target) for average in averages.values()) / max(self._target, 1 - self._target)
        # By position and not by task: chance is drawn anew each time that the task comes up.
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
    in that share, as in the first pass over the data of the authors' program. The floors are AstraFlow's. The paper's
    third part, a rollout batch whose size follows the share that is kept, is in `flowjax.dataflow.leases`. A group of
    which all trajectories but one failed is ignored: one reward cannot show whether rewards differ.
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
            target_easy=target_easy,
            target_hard=target_hard,
            floor_easy=floor_easy,
            floor_hard=floor_hard,
            start=start,
            step=step,
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
        if len(result.rewards) < 2:
            return True
        self._chances.setdefault(result.policy, {EASY: self._start, HARD: self._start})
        name = task_name(result.task)
        verdicts = self._verdicts.get(name, {})
        before = verdicts.get(result.policy)
        kind = EASY if np.mean(result.rewards) > self._easy_above else HARD
        longer = before[1] + 1 if before and before[0] == kind else 1
        self._verdicts[name] = verdicts | {result.policy: [kind, 0 if result.informative else longer]}
        self._streaks += _has_streak(self._verdicts[name]) - _has_streak(verdicts)
        if before:  # the first play of a task is not in the share: nothing could have passed it over
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
            down = counts[name] / counts["all"] >= target  # too many such groups were played: pass over more
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


# ---------------------------------------------------------------------------------------------- filters, orders, replay


class DynamicSampling(Algorithm):
    """Keeps only groups whose rewards differ: in the others no outcome is better than another, so that their advantages
    are zero under every estimator that compares outcomes alone (GRPO, RLOO and the like).

    A group left out is replaced by another task, so that batches stay full, at the price of more rollouts: the
    constraint 0 < right answers < group size of DAPO (arXiv 2503.14476), eq. 11, for any reward. `accept_share` lets
    that share of the uninformative groups through, for estimators that also compare turns (GiGPO, RewardFlow).
    """

    least_group_size = 2

    def __init__(self, *, seed: int, accept_share: float = 0.0):
        _check_shares(accept_share=accept_share)
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
    """Plays each content under one name: tasks of another name or source with the same content are passed over.

    A task's content is its payload's `fields`, or all of its payload; without a payload, its seed and source. The name
    that was played first is played again in later passes over the tasks; with `once` no content is played twice.
    """

    def __init__(self, *, seed: int, fields: Sequence[str] = (), once: bool = False):
        del seed
        self.fields, self._once = tuple(fields), once
        self._played: Table[int, int] = Table()  # hash of the content -> hash of the task's name

    def choose(self, task: Task, position: int) -> bool:
        del position
        played = self._played.get(self._content(task))
        return played is None or (not self._once and played == state_key(task_name(task)))

    def chosen(self, task: Task, position: int) -> None:
        del position
        self._played.setdefault(self._content(task), state_key(task_name(task)))

    def _content(self, task: Task) -> int:
        content = {name: task.payload[name] for name in self.fields if name in task.payload} or task.payload
        return state_key(task.world, *_written(content or {"seed": task.seed, "source": task.source}))

    def state(self) -> dict[str, Table[int, int]]:
        return {"_played": self._played}

    def metrics(self) -> dict[str, float]:
        return {"distinct_tasks": len(self._played)}


def unknown_fields(config: ConfigDict) -> Iterator[str]:
    """Messages on fields to compare that no payload of the first tasks has: without one, whole payloads would be."""
    asked = {name: each for name, each in build_algorithms(config).items() if isinstance(each, Deduplicate)}
    known = set[str]()
    for source in config.env.sources or ("",) if any(each.fields for each in asked.values()) else ():
        world = find_world(config.env.name)(**task_options(config, source))
        tasks = world.tasks("train", config.env.data_seed)
        known.update(*(task_at(tasks, index).payload for index in range(min(_FIRST_TASKS, len(tasks)))))
    for name, field in ((name, field) for name, each in asked.items() for field in each.fields if field not in known):
        yield (
            f"config.dataflow.algorithms.{name}.fields is {shown(asked[name].fields)}, but the payload of no task has "
            f"{field!r}{nearest(field, known)}; they have {', '.join(sorted(map(str, known))) or 'nothing'}: name one "
            "of these, or leave fields out to compare whole payloads"
        )


def _written(content: Mapping[str, Any]) -> list[str]:
    return [f"{name}={written(value)}" for name, value in sorted(content.items())]


class EarliestDeadline(Algorithm):
    """The group with the oldest token first, so that fewest grow too old to be used. AstraFlow's default order."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return _ordered(fresh, lambda candidate: (-candidate.age_versions, candidate.arrival))


class FirstInFirstOut(Algorithm):
    """The group that was complete first comes first, whatever its age: groups of long episodes come in late, then wait
    behind the others and grow older."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return _ordered(fresh, lambda candidate: (candidate.arrival,))


class LastInFirstOut(Algorithm):
    """The group that was complete last comes first: young tokens, at the price of dropping more old groups."""

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
    with bounds on age and on the number of uses, which AstraFlow does not have.
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
        in_front = {each.group_id for each in fresh}  # a replay before this one may have put used groups there
        # `batches` counts the first use too: `times` replays make times + 1.
        fit = [each for each in used if each.batches <= self._times and each.age_versions <= self._max_age]
        fit = sorted((each for each in fit if each.group_id not in in_front), key=_youngest)
        return [*fit[: groups - fresh_groups(groups, self.fresh_share)], *fresh]


def _youngest(candidate: Candidate) -> tuple[int, int]:
    return candidate.age_versions, -candidate.arrival


def _ordered(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[int, ...]]) -> list[Candidate]:
    """Those trained on before as they are, then the others by `key`."""
    replayed = [candidate for candidate in candidates if candidate.batches]
    return replayed + sorted((candidate for candidate in candidates if not candidate.batches), key=key)
