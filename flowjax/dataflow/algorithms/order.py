"""Which of the groups at hand a batch takes first. Without one of these: in the order of tasks.

Orders are of the groups never trained on; what a replay before them has put in front stays there.
"""

import math
from collections.abc import Callable, Sequence

from flowjax.dataflow.algorithms.base import Algorithm, Candidate


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
        taken = {each.group_id for each in fresh}
        fit = [each for each in used if each.batches <= self._times and each.age_versions <= self._max_age]
        fit = sorted((each for each in fit if each.group_id not in taken), key=_youngest)
        newly_played = math.ceil(round(groups * self.fresh_share, 6))  # 0.7 of 10 groups are 7
        return [*fit[: groups - newly_played], *fresh]


def _youngest(candidate: Candidate) -> tuple[int, int]:
    return candidate.age_versions, -candidate.arrival


def _ordered(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[int, ...]]) -> list[Candidate]:
    """Those trained on before as they are, then the others by `key`."""
    replayed = [candidate for candidate in candidates if candidate.batches]
    return replayed + sorted((candidate for candidate in candidates if not candidate.batches), key=key)
