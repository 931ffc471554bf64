"""Processor time as an amount of plain work: a bound on it holds on any machine, and on a busy one, where even the
processor time of a computation grows."""

import time


def million_additions_s() -> float:
    """Processor seconds of a million additions in a loop, now: about 0.03 on a fast machine, 0.1 to 0.4 on a busy one.

    The slowest of three, since the work that it is compared with may have met a slow moment.
    """
    spent_s = []
    for _ in range(3):
        total, started_s = 0, time.process_time()
        for number in range(1_000_000):
            total += number
        spent_s.append(time.process_time() - started_s)
    return max(spent_s)
