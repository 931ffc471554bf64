"""The counter of `unruly_world` with steps that wait: adding takes a second, and until `TOGETHER` add at once."""

import threading
import time

from unruly_world import Counter, Unruly

from flowjax.envs import Step

TOGETHER = 30
_MEETING = threading.Barrier(TOGETHER)


class SlowCounter(Counter):
    def step(self, action: str) -> Step:
        if action.isdigit():
            _MEETING.wait(60)
            time.sleep(1)
        return super().step(action)


class Waiting(Unruly):
    STEPS_WAIT = True

    def env(self) -> SlowCounter:
        return SlowCounter(fail_in_env=False)
