"""Which groups a trainer may have."""

from flowjax.dataflow.algorithms.base import Algorithm, Result
from flowjax.records import Task, state_key


class DynamicSampling(Algorithm):
    """Only groups whose rewards differ: the others have zero advantage under every group-relative estimator.

    A group left out is replaced by another task, so that batches stay full, at the price of more rollouts. DAPO
    (arXiv 2503.14476), section 3.2. `accept_share` lets that share of the uninformative groups through.
    """

    def __init__(self, *, seed: int, accept_share: float = 0.0):
        if not 0 <= accept_share <= 1:
            raise ValueError(f"accept_share is {accept_share}: give a share from 0 to 1")
        self._seed, self._accept_share = seed, accept_share
        self.seen = self.left_out = 0

    def keep(self, result: Result) -> bool:
        self.seen += 1
        lucky = _share(self._seed, "accept", result.group_id) < self._accept_share
        kept = result.informative or lucky
        self.left_out += not kept
        return kept

    def metrics(self) -> dict[str, float]:
        return {"left_out_share": self.left_out / max(self.seen, 1)}

    def state(self) -> dict[str, int]:
        return {"seen": self.seen, "left_out": self.left_out}


class OverlongFilter(Algorithm):
    """Leaves out groups in which more than `share` of the trajectories have a reply of `limit_tokens` or more.

    A reply that was cut at the limit says little about the policy. DAPO (arXiv 2503.14476), section 3.4.
    """

    def __init__(self, *, seed: int, limit_tokens: int, share: float = 0.5):
        del seed
        self._limit_tokens, self._share = limit_tokens, share
        self.left_out = 0

    def keep(self, result: Result) -> bool:
        kept = bool((result.longest_reply_tokens >= self._limit_tokens).mean() <= self._share)
        self.left_out += not kept
        return kept

    def metrics(self) -> dict[str, float]:
        return {"left_out": self.left_out}

    def state(self) -> dict[str, int]:
        return {"left_out": self.left_out}


class Deduplicate(Algorithm):
    """Plays a task once: the same content under another name, or in a later epoch, is passed over."""

    def __init__(self, *, seed: int):
        del seed
        self._seen: dict[int, int] = {}  # content -> first position

    def choose(self, task: Task, position: int) -> bool:
        return self._seen.setdefault(_content(task), position) == position

    def state(self) -> dict[str, dict[int, int]]:
        return {"_seen": self._seen}

    def metrics(self) -> dict[str, float]:
        return {"distinct_tasks": len(self._seen)}


def _content(task: Task) -> int:
    return state_key(task.world, task.seed, *(f"{name}={value!r}" for name, value in sorted(task.payload.items())))


def _share(*parts: str | int) -> float:
    """A number from [0, 1) that the parts fix."""
    return state_key(*parts) / 2**64
