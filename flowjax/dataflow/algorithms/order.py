"""Which of the groups at hand a batch takes first. Without one of these: in the order of tasks."""

from collections.abc import Sequence

from flowjax.dataflow.algorithms.base import Algorithm, Candidate


class EarliestDeadline(Algorithm):
    """The group with the oldest token first, so that fewest grow too old to be used. AstraFlow's default order."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return sorted(fresh, key=lambda candidate: (-candidate.age_versions, candidate.arrival))


class FirstInFirstOut(Algorithm):
    """The group that came in first first, whatever its age: long episodes come in late and grow old waiting."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return sorted(fresh, key=lambda candidate: candidate.arrival)


class LastInFirstOut(Algorithm):
    """The group that came in last first: the youngest tokens, at the price of dropping more old ones."""

    def __init__(self, *, seed: int):
        del seed

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        del used, groups
        return sorted(fresh, key=lambda candidate: -candidate.arrival)


class Replay(Algorithm):
    """Fills `ratio` of a batch with groups that were trained on before, the newest first, each `times` times at most.

    Replayed tokens keep the log-probabilities of the version that sampled them, so that the objective's importance
    ratio accounts for their age. config.dataflow.max_staleness bounds fresh groups only; replayed ones may lag
    `max_age_versions`. Where there are too few, fresh groups fill the batch.
    """

    def __init__(self, *, seed: int, ratio: float = 0.25, times: int = 1, max_age_versions: int = 4):
        del seed
        if not 0 < ratio < 1:
            raise ValueError(f"ratio is {ratio}: give a share between 0 and 1")
        self._ratio, self._times, self._max_age = ratio, times, max_age_versions
        self.fresh_share = 1 - ratio

    def serve(self, fresh: Sequence[Candidate], used: Sequence[Candidate], groups: int) -> Sequence[Candidate]:
        fit = [each for each in used if each.batches <= self._times and each.age_versions <= self._max_age]
        fit.sort(key=lambda candidate: (candidate.age_versions, -candidate.arrival))
        return [*fit[: int(groups * self._ratio)], *fresh]
