"""How many episodes are played at once, on simulated engines."""

import pytest

from flowjax.rollout.client import Load, read_load
from flowjax.rollout.engines import SlotControl, next_slots

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 12.0
vllm:num_requests_running{engine="1",model_name="base"} 5.0
vllm:num_requests_waiting{engine="0",model_name="base"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="base"} 0.5
vllm:num_preemptions_total{engine="0",model_name="base"} 7.0
vllm:num_preemptions_created{engine="0",model_name="base"} 1.7e+09
process_cpu_seconds_total 1.0
"""
BOUNDS = {"floor": 2, "ceiling": 64}


def test_metrics_are_read_over_all_ranks():
    assert read_load(METRICS) == Load(running=17, waiting=3, preemptions=7, cache_share=0.5)
    assert read_load("") == Load()


@pytest.mark.parametrize(
    ("slots", "load", "preempted", "playing", "expected"),
    [
        (32.0, Load(running=32), 0, 32, 34.0),
        (63.5, Load(running=63), 0, 63, 64.0),
        (32.0, Load(running=16, waiting=5), 0, 32, 24.0),
        (32.0, Load(running=32), 1, 32, 24.0),
        (2.0, Load(running=1, waiting=9), 3, 2, 2.0),
        (24.0, Load(running=32, waiting=32), 4, 30, 24.0),  # the last decrease has not taken effect
        (32.0, Load(running=32, waiting=1), 0, 32, 32.0),
        (32.0, Load(running=32, cache_share=0.95), 0, 32, 32.0),
        (32.0, Load(running=10), 0, 10, 32.0),  # more would not be used
    ],
)
def test_the_rule(slots, load, preempted, playing, expected):
    assert next_slots(slots, load, preempted, playing=playing, **BOUNDS) == expected


class Simulated:
    """An engine that does one unit of work a second for each running request, up to `best`; beyond, requests preempt
    each other and the work is done over: throughput falls with the square of the overload.
    """

    def __init__(self, best: int):
        self.best, self.preemptions = best, 0

    def throughput(self, playing: int) -> float:
        return playing if playing <= self.best else self.best * (self.best / playing) ** 2

    def step(self, playing: int) -> Load:
        over = max(0, playing - self.best)
        self.preemptions += over
        return Load(min(playing, self.best), over // 2, self.preemptions, min(1.0, playing / self.best / 1.1))


@pytest.mark.parametrize("best", [3, 10, 24, 50])
def test_settles_near_the_best_load_where_all_slots_would_collapse(best):
    engine, control = Simulated(best), SlotControl(**BOUNDS)
    done, seen = [], []
    for _ in range(600):
        playing = control.slots
        done.append(engine.throughput(playing))
        seen.append(playing)
        control.update({"base": engine.step(playing)}, playing)
    settled = sum(done[100:]) / len(done[100:])
    assert settled > 0.75 * best
    assert settled > 1.3 * engine.throughput(BOUNDS["ceiling"])
    assert min(seen) >= BOUNDS["floor"]
    assert max(seen[100:]) <= best + BOUNDS["ceiling"] / 32 + 1


def test_an_engine_that_manages_everything_gets_everything():
    control = SlotControl(**BOUNDS)
    for _ in range(40):
        control.update({"base": Simulated(1000).step(control.slots)}, control.slots)
    assert control.slots == BOUNDS["ceiling"]


def test_episodes_that_take_their_time_to_end_are_not_cut_twice():
    control = SlotControl(floor=2, ceiling=64)
    for _ in range(40):
        control.update({"base": Load(running=1)}, control.slots)
    assert control.slots == 64
    for _ in range(10):  # still congested, while 64 go on
        control.update({"base": Load(running=1, waiting=63)}, 64)
    assert control.slots == 48


def test_never_starves_and_recovers():
    control = SlotControl(floor=1, ceiling=32)
    for _ in range(100):
        control.update({"base": Load(running=1, waiting=100)}, control.slots)
    assert control.slots == 1
    for _ in range(40):
        control.update({"base": Load(running=1)}, control.slots)
    assert control.slots == 32


def test_a_restarted_engine_has_not_preempted_less_than_nothing():
    control = SlotControl(floor=1, ceiling=32)
    control.update({"base": Load(preemptions=90)}, 1)
    before = control.slots
    control.update({"base": Load(preemptions=0)}, 1)
    assert control.slots >= before


def test_without_a_floor_all_slots_are_there():
    control = SlotControl(floor=0, ceiling=64)
    assert (control.slots, control.adaptive) == (64, False)
