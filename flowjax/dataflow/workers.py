"""Rollout workers as the dataflow knows them: the versions that each serves, and when it was last heard of.

Which version is newest is known of each policy. Which one a worker plays with differs from node to node: one whose
weights come over a slow link is behind, and what it would play now would be too old for any batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_KNOWN = 10_000  # names; a worker that comes back has a new one


@dataclass(slots=True)
class _Seen:
    """State of one worker: version served by policy, when it last said something, and episodes that counted."""

    heard_s: float
    serving: dict[str, int] = field(default_factory=dict)
    episodes: int = 0


class RolloutWorkers:
    """All workers that have said something to this process. Nothing of it is kept: who is alive says it again.

    Args:
        max_staleness: versions that a worker may be behind the newest that any serves, and still be given training.
        clock: seconds that only grow.
    """

    def __init__(self, *, max_staleness: int, clock: Callable[[], float]):
        self._max_staleness, self._clock = max_staleness, clock
        self._seen: dict[str, _Seen] = {}  # in the order in which they were last heard of

    def heard(self, worker: str) -> None:
        self._of(worker)

    def report(self, worker: str, policy: str, version: int) -> bool:
        """Note what a worker serves: also an older version than before, as after a restart of its engine. Returns
        whether that is news."""
        serving = self._of(worker).serving
        is_news = serving.get(policy) != version
        serving[policy] = version
        return is_news

    def counted(self, worker: str, episodes: int) -> None:
        """Note that so many of its episodes have counted."""
        self._of(worker).episodes += episodes

    def may_train(self, worker: str, newest: Mapping[str, int]) -> bool:
        """True unless the worker is known to serve a version of a policy that is too far behind the newest."""
        seen = self._seen.get(worker)
        serving = seen.serving if seen else {}
        return all(version - serving.get(policy, version) <= self._max_staleness for policy, version in newest.items())

    def status(self, *, within_s: float) -> dict[str, dict[str, Any]]:
        """Workers that were heard of within so many seconds, by name."""
        now_s = self._clock()
        return {
            name: {"heard_s_ago": now_s - seen.heard_s, "serving": dict(seen.serving), "episodes": seen.episodes}
            for name, seen in self._seen.items()
            if now_s - seen.heard_s <= within_s
        }

    def _of(self, worker: str) -> _Seen:
        seen = self._seen.pop(worker, None) or _Seen(0.0)
        seen.heard_s = self._clock()
        self._seen[worker] = seen
        if len(self._seen) > _MOST_KNOWN:  # names are strangers' to choose: the longest silent one is forgotten
            del self._seen[next(iter(self._seen))]
        return seen
