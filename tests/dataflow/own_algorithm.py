"""A data algorithm as a user would write it."""

from flowjax.dataflow.algorithms import Algorithm, Result
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


class Raises(Algorithm):
    """Fails at the group after some."""

    def __init__(self, *, seed: int, after: int):
        del seed
        self._after, self._told = after, 0

    def keep(self, result: Result) -> bool:
        self._told += 1
        if self._told > self._after:
            return bool(result.task.payload["level"])
        return True

    def state(self) -> dict[str, int]:
        return {"_told": self._told}


class Refuses(Algorithm):
    """Fails at the first task."""

    def __init__(self, *, seed: int):
        del seed

    def choose(self, task: Task, position: int) -> bool:
        return bool(task.payload["level"])


class Forgets(Algorithm):
    """Has learnt what cannot be written down."""

    def __init__(self, *, seed: int):
        del seed
        self._seen: set[str] = set()

    def state(self) -> dict[str, set[str]]:
        return {"_seen": self._seen}


class Unmeasured(Algorithm):
    """Has metrics that are no numbers."""

    def __init__(self, *, seed: int):
        del seed

    def metrics(self) -> dict[str, float]:  # pyright: ignore[reportReturnType]
        pass


class Unfinished(Algorithm):
    """Has a share of nothing among its metrics."""

    def __init__(self, *, seed: int):
        del seed

    def metrics(self) -> dict[str, float]:
        return {"share": float("nan")}


class TooFew(Algorithm):
    """Is asked with more than it takes."""

    def __init__(self, *, seed: int):
        del seed

    def keep(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True


class Waiting(Algorithm):
    """Answers later, which nothing waits for."""

    def __init__(self, *, seed: int):
        del seed

    async def keep(self, result: Result) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        del result
        return True


class Forgetful(Algorithm):
    """Answers nothing."""

    def __init__(self, *, seed: int):
        del seed

    def choose(self, task: Task, position: int) -> bool:  # pyright: ignore[reportReturnType]
        del task, position


class Misspelt(Algorithm):
    """Has a hook that nobody calls."""

    def __init__(self, *, seed: int):
        del seed

    def score(self, task: Task) -> int:
        """No hook, and not like one."""
        return task.seed

    def chose(self, task: Task, position: int) -> bool:
        del position
        return self.score(task) > 0


class Divided(Algorithm):
    """Has helpers named as the hooks that they are for."""

    def __init__(self, *, seed: int):
        del seed

    def keep(self, result: Result) -> bool:
        return self._keep(result)

    def _keep(self, result: Result) -> bool:
        return result.informative


class MisspeltSetting(Divided):
    """Has a setting that nobody reads."""

    fresh_shares = 0.5


class Plain(Algorithm):
    """Has nothing to set up."""

    def keep(self, result: Result) -> bool:
        return result.informative


class CallsUp(Plain):
    """Sets up its base as Python classes usually do."""

    def __init__(self, *, seed: int):
        super().__init__()
        self._seed = seed


class Seedless(Algorithm):
    """Takes no seed."""

    def __init__(self, threshold: float = 0.2):
        self._threshold = threshold


class SharedAsText(Plain):
    """Has a setting of another type."""

    fresh_share = "0.5"  # pyright: ignore[reportAssignmentType]


class SharedTwice(Plain):
    """Has a setting out of its bounds."""

    fresh_share = 2


class OfAnySize(Plain):
    """Has no smallest size."""

    least_group_size = None  # pyright: ignore[reportAssignmentType]
