"""Number of episodes to play at once: as many as the engines manage, by vLLM's queue and cache."""

import math
from collections.abc import Mapping

from flowjax.rollout.client import Load

_DECREASE = 0.75
_INCREASES_TO_CEILING = 32
_TOLERATED_QUEUE = 0.25  # waiting requests for each running one
_FULL_CACHE = 0.9  # share of the key-value cache in use


def next_slots(slots: float, load: Load, preempted: int, *, playing: int, floor: int, ceiling: int) -> float:
    """Slots for the next interval: additive increase, multiplicative decrease (Chiu and Jain, 1989).

        slots <- slots                                while more are playing: the last decrease has not taken effect
        slots <- max(floor, 0.75 * slots)             if requests were preempted, or waiting > running / 4
        slots <- slots                                if any request waits, over 90 % of the cache is in use, or slots
                                                      are free already
        slots <- min(ceiling, slots + ceiling / 32)   otherwise

    `preempted` counts requests since the last look; `playing` are the episodes under way.
    """
    if playing > slots:
        return slots
    if preempted > 0 or load.waiting > _TOLERATED_QUEUE * load.running:
        return max(float(floor), _DECREASE * slots)
    if load.waiting or load.cache_share > _FULL_CACHE or playing < math.floor(slots):
        return slots
    return min(float(ceiling), slots + ceiling / _INCREASES_TO_CEILING)


class Admission:
    """The slots of a rollout service between `floor` and `ceiling`; a floor of 0 means all of them, always.

    Every episode may call on every base model, so that the one that manages least decides.
    """

    def __init__(self, *, floor: int, ceiling: int):
        self._floor, self._ceiling = floor, ceiling
        self._slots = float(floor or ceiling)
        self._loads: Mapping[str, Load] = {}  # by base model, as last seen

    @property
    def adaptive(self) -> bool:
        return self._floor > 0

    @property
    def slots(self) -> int:
        return math.floor(self._slots)

    def update(self, loads: Mapping[str, Load], playing: int) -> None:
        """Take a look at the engines of those bases that answered into account. An engine that was restarted counts its
        preemptions anew.
        """
        bounds = {"playing": playing, "floor": self._floor, "ceiling": self._ceiling}
        proposed = [
            next_slots(self._slots, load, load.preemptions - self._loads.get(base, load).preemptions, **bounds)
            for base, load in loads.items()
        ]
        self._slots = min(proposed, default=self._slots)
        self._loads = {**self._loads, **loads}
