"""A data algorithm as a user would write it."""

from flowjax.dataflow.algorithms.base import Algorithm, Result
from flowjax.records import Task


class OnlyEven(Algorithm):
    """Plays every `modulus`-th task."""

    def __init__(self, *, seed: int, modulus: int):
        del seed
        self._modulus = modulus

    def choose(self, task: Task, position: int) -> bool:
        return task.seed % self._modulus == 0


class EveryOther(Algorithm):
    """Keeps every other group, counted over new versions too."""

    def __init__(self, *, seed: int):
        del seed
        self._told = 0

    def keep(self, result: Result) -> bool:
        del result
        self._told += 1
        return self._told % 2 == 1

    def published(self, policy: str, version: int) -> None:
        self._told += version

    def state(self) -> dict[str, int]:
        return {"_told": self._told}
