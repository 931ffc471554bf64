"""The counter of `unruly_world` as a world whose steps wait: adding takes as many tenths of a second."""

import time

from unruly_world import OUTCOMES, Counter

from flowjax.envs.base import Step

__all__ = ["OUTCOMES", "STEPS_WAIT", "make"]

STEPS_WAIT = True


class SlowCounter(Counter):
    def step(self, action: str) -> Step:
        if action.isdigit():
            time.sleep(int(action) / 10)
        return super().step(action)


def make(**options) -> SlowCounter:
    return SlowCounter(**options)
