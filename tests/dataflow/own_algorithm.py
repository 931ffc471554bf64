"""A data algorithm as a user would write it."""

from flowjax.dataflow.algorithms.base import Algorithm
from flowjax.records import Task


class OnlyEven(Algorithm):
    """Plays every `modulus`-th task."""

    def __init__(self, *, seed: int, modulus: int):
        del seed
        self._modulus = modulus

    def choose(self, task: Task, position: int) -> bool:
        return task.seed % self._modulus == 0
