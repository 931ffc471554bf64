"""Any number of rollout services play what the trainer has a use for, and hardly anything that is too old for it."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from flowjax.dataflow.service import DataflowService
from tests.dataflow import flows
from tests.dataflow.services import Figures, Service, Simulation
from tests.dataflow.test_flow import batch, configuration, make_flow, play

MOST_TOO_OLD = 0.05  # of the groups that are in
STEPS, SEEDS = 16, (0, 1)


def simulate(folder: Path, services: Sequence[Service], *, step_s: float, steps: int = STEPS) -> Figures:
    """The sums over the runs of two seeds."""
    found = []
    for seed in SEEDS:
        (of_seed := folder / f"{len(services)} {step_s} {seed}").mkdir()
        fresh = [Service(one.name, one.slots, one.turn_s, one.lag_s, one.joins_s) for one in services]
        found.append(Simulation(of_seed, fresh, step_s=step_s, steps=steps, seed=seed).run())
    figures = Figures(*(sum(getattr(one, each.name) for one in found) for each in fields(Figures)))
    print(
        f"{len(services)} services, steps of {step_s} s: {figures.too_old_share:.1%} too old, the trainer waits "
        f"{figures.waited_share:.0%}, {figures.total_s / steps / len(SEEDS):.2f} s a step"
    )
    return figures


def equal(count: int) -> list[Service]:
    return [Service(f"service {number}") for number in range(count)]


MIXED = {
    "one gets its versions late": [*equal(1), Service("late", lag_s=0.5)],
    "most get their versions late": [*equal(1), *(Service(f"late {number}", lag_s=0.5) for number in range(3))],
    "one is always a version behind": [*equal(1), Service("behind", lag_s=1.5)],
    "one joins in the middle": [*equal(1), Service("joined", joins_s=6.0)],
}


@pytest.mark.parametrize("step_s", [0.5, 1.5], ids=["pool-bound", "trainer-bound"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_more_services_make_nothing_more_that_is_too_old(tmp_path, count, step_s):
    alone = simulate(tmp_path, equal(1), step_s=step_s)
    (tmp_path / "pool").mkdir()
    found = simulate(tmp_path / "pool", equal(count), step_s=step_s)
    assert found.too_old_share < MOST_TOO_OLD
    assert found.total_s <= 1.02 * alone.total_s, "the trainer waits no longer than with one of them"


@pytest.mark.parametrize("step_s", [0.5, 1.5], ids=["pool-bound", "trainer-bound"])
@pytest.mark.parametrize("name", MIXED)
def test_services_that_differ_make_nothing_more_either(tmp_path, name, step_s):
    alone = simulate(tmp_path, equal(1), step_s=step_s)
    (tmp_path / "pool").mkdir()
    found = simulate(tmp_path / "pool", MIXED[name], step_s=step_s)
    assert found.too_old_share < MOST_TOO_OLD
    assert found.total_s <= 1.02 * alone.total_s, "the trainer waits no longer than with the first alone"


@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("policies", [("solver", "verifier"), ("a", "b", "c")], ids=["two", "three"])
def test_policies_in_turns_play_and_take_no_more_than_one_alone(tmp_path, policies, step_s):
    """As long as all their steps together take as long as its."""
    (tmp_path / "alone").mkdir()
    alone = Simulation(tmp_path / "alone", equal(1), step_s=step_s, steps=STEPS, seed=0).run()
    found = Simulation(tmp_path, equal(1), step_s=step_s / len(policies), steps=STEPS, seed=0, policies=policies).run()
    assert found.too_old_share < MOST_TOO_OLD
    assert found.opened <= 1.02 * alone.opened
    assert found.total_s <= 1.05 * alone.total_s


@pytest.mark.parametrize("step_s", [0.5, 1.5], ids=["pool-bound", "trainer-bound"])
def test_a_slow_service_hardly_holds_the_others_up(tmp_path, step_s):
    """Its first episodes are waited for: they show that it is slow."""
    alone = simulate(tmp_path, equal(3), step_s=step_s, steps=30)
    found = simulate(tmp_path, [*equal(3), Service("slow", turn_s=0.4)], step_s=step_s, steps=30)
    assert found.too_old_share < MOST_TOO_OLD
    assert found.total_s <= 1.2 * alone.total_s


def test_a_slow_service_leaves_training_to_faster_ones_that_have_room(tmp_path):
    now_s = [0.0]
    flow = make_flow(tmp_path, configuration(max_staleness=1), clock=lambda: now_s[0])
    for worker, episode_s in (("slow", 3.0), ("fast", 1.0)):
        serve(flow, worker, 0)
        takes(flow, now_s, worker, episode_s)
    start_s = now_s[0]
    assert flows.lease(flow, "slow", 1, "train"), "nobody else asks"
    flows.lease(flow, "fast", 1, "train")
    flow.workers.left_free("fast", 1)
    assert not flows.lease(flow, "slow", 1, "train")
    assert flows.lease(flow, "slow", 1, "eval"), "what is pinned to a version is late for nobody"
    flow.workers.left_free("fast", 0)
    assert flows.lease(flow, "slow", 1, "train"), "it has no room left"
    flow.workers.left_free("fast", 1)
    now_s[0] = start_s + 4.0
    assert flows.lease(flow, "slow", 1, "train"), "it has not asked for a while, as when its engine is away"
    flows.lease(flow, "fast", 1, "train")
    assert not flows.lease(flow, "slow", 1, "train")
    now_s[0] = start_s + 200.0
    flows.lease(flow, "fast", 1, "train")
    assert flows.lease(flow, "slow", 1, "train"), "it may be as fast as the others by now"


def takes(flow, now_s: list[float], worker: str, episode_s: float, *, counts: bool = True) -> None:
    """Have the worker end so many episodes one after the other that its time for one is known."""
    for number in range(16):
        flow.workers.began(worker, [f"{worker} {number}"])
        now_s[0] += episode_s
        flow.workers.ended(worker, f"{worker} {number}", counts=counts)


def test_one_that_breaks_episodes_at_once_is_no_fast_one(tmp_path):
    """Those that play well left training to it."""
    now_s = [0.0]
    flow = make_flow(tmp_path, configuration(max_staleness=1), clock=lambda: now_s[0])
    for worker, episode_s in (("good", 3.0), ("broken", 0.1)):
        serve(flow, worker, 0)
        takes(flow, now_s, worker, episode_s, counts=worker == "good")
    flows.lease(flow, "broken", 1, "train")
    flow.workers.left_free("broken", 9)
    assert flows.lease(flow, "good", 1, "train")


def test_a_slow_service_does_not_leave_training_to_one_whose_version_is_older(tmp_path):
    """That one may not play what was opened for the newer version: nobody played anything for ten minutes."""
    now_s = [0.0]
    flow = make_flow(tmp_path, configuration(max_staleness=1), clock=lambda: now_s[0])
    for worker, episode_s in (("slow", 30.0), ("fast", 10.0)):
        serve(flow, worker, 0)
        takes(flow, now_s, worker, episode_s)
    play(flow, flows.lease(flow, "fast", 1000, "train"), version=0)
    batch(flow, 0)
    flow.batches.commit("agent", 1)
    serve(flow, "slow", 1)
    flows.lease(flow, "fast", 8, "train")
    flow.workers.left_free("fast", 8)
    assert not flows.lease(flow, "slow", 1, "train"), "it may get the version at any moment"
    now_s[0] += 5.0
    flows.lease(flow, "fast", 8, "train")
    assert flows.lease(flow, "slow", 1, "train")


def serve(flow, worker: str, version: int) -> None:
    flow.workers.report(worker, "agent", version)
    flow.report_serving("agent", version)


def test_what_a_new_version_admits_is_not_played_with_an_older_one(tmp_path):
    """It was: whoever had slots free was given it, and its groups were too old for their batch."""
    flow = make_flow(tmp_path, configuration(max_staleness=1))
    for worker in ("near", "far"):
        serve(flow, worker, 0)
    play(flow, flows.lease(flow, "near", 1000, "train"), version=0)
    for step in range(2):
        batch(flow, step)
    serve(flow, "near", 1)
    assert flows.lease(flow, "far", 4, "train") == [], "for batch 2 version 0 is too old"
    (first,) = flows.lease(flow, "near", 1, "train")
    assert flows.lease(flow, "far", 4, "train") == [], "nor does it spoil a group that another has begun"
    serve(flow, "far", 1)
    assert [lease.group_id for lease in flows.lease(flow, "far", 2, "train")] == [first.group_id, "train-00000007"]


def test_a_worker_behind_is_admitted_as_far_as_its_version_reaches(tmp_path):
    config = configuration(max_staleness=3)
    config.trainer.steps = 9
    flow = make_flow(tmp_path, config)
    serve(flow, "far", 0)
    assert len(flows.lease(flow, "far", 1000, "train")) == 4 * 3 * 2, "batches 0 to 3"
    serve(flow, "near", 2)
    assert flows.lease(flow, "far", 1000, "train") == []
    assert len(flows.lease(flow, "near", 1000, "train")) == 2 * 3 * 2, "batches 4 and 5"


def overtaken(folder: Path, **dataflow):
    """A flow at 10 s, whose batch 2 could be made of the groups of version 2 alone, which are in. Those of version 1,
    which no later batch may have, are played. Batch 1 came 2 s after batch 0. With its clock and their leases."""
    now_s = [2.0]
    flow = make_flow(folder, configuration(max_staleness=1, **dataflow), clock=lambda: now_s[0])
    serve(flow, "slow", 0)
    play(flow, flows.lease(flow, "slow", 1000, "train"), version=0)
    batch(flow, 0)
    flow.batches.commit("agent", 1)
    serve(flow, "slow", 1)
    old = flows.lease(flow, "slow", 1000, "train")
    now_s[0] = 4.0
    batch(flow, 1)
    flow.batches.commit("agent", 2)
    serve(flow, "fast", 2)
    young = flows.lease(flow, "fast", 1000, "train")
    now_s[0] = 10.0
    play(flow, young, version=2)
    assert len(old) == len(young) == 3 * 2
    return flow, now_s, old


def groups_of(leases) -> set[str]:
    return {lease.group_id for lease in leases}


def test_a_batch_waits_for_groups_that_no_later_one_may_have(tmp_path):
    flow, now_s, old = overtaken(tmp_path)
    assert flows.take(flow, "agent", 2) is None
    now_s[0] = 10.6
    play(flow, old, version=1)
    taken = flows.take(flow, "agent", 2)
    assert taken is not None and {group.group_id for group in taken.groups} == groups_of(old)
    later = flows.take(flow, "agent", 3)
    assert later is not None and not later.dropped, "the younger ones are the next batch"


def test_it_waits_no_longer_than_a_third_of_the_time_that_a_batch_takes(tmp_path):
    """Who plays them may have died, which is known only when their leases run out."""
    flow, now_s, old = overtaken(tmp_path)
    assert flow.batches.patience_s(["agent"]) == math.inf
    for now_s[0] in (10.0, 10.6):
        assert flows.take(flow, "agent", 2) is None
    assert flow.batches.patience_s(["agent"]) == pytest.approx(2 / 3 - 0.6)
    now_s[0] = 10.7
    taken = flows.take(flow, "agent", 2)
    assert taken is not None and not {group.group_id for group in taken.groups} & groups_of(old)
    assert flow.batches.patience_s(["agent"]) == math.inf


def test_a_pause_of_the_trainer_makes_no_batch_patient(tmp_path):
    """After an hour without its trainer a batch waited for ten minutes."""
    now_s, config = [0.0], configuration(max_staleness=1)
    config.trainer.steps = 9
    flow = make_flow(tmp_path, config, clock=lambda: now_s[0])
    for step in range(6):
        for worker in ("fast", "hung"):
            serve(flow, worker, step)
        if step == 5:
            now_s[0] += 3600.0
            assert flows.lease(flow, "hung", 1, "train")
        play(flow, flows.lease(flow, "fast", 1000, "train"), version=step)
        assert flows.take(flow, "agent", step)
        flow.batches.commit("agent", step + 1)
        now_s[0] += 2.0
    for worker in ("fast", "hung"):
        serve(flow, worker, 6)
    play(flow, flows.lease(flow, "fast", 1000, "train"), version=6)
    now_s[0] += 2.0
    if flows.take(flow, "agent", 6) is None:
        now_s[0] += 2 / 3 + 0.01
        assert flows.take(flow, "agent", 6)


def test_patience_does_not_feed_itself(tmp_path):
    """With two episodes of a hundred that take very long, a bound of 16 versions and short steps, each batch waited
    longer than the one before, without end."""

    class Stragglers(Simulation):
        def _turns(self, lease):
            straggles = random.Random(f"{lease.group_id} {lease.seed}").random() < 0.02
            return 2000 if straggles else super()._turns(lease)

    simulation = Stragglers(tmp_path, [Service("one", slots=256)], step_s=0.5, steps=90, seed=0, max_staleness=16)
    assert simulation.run().total_s < 90 * 0.5 * 1.1


# -------------------------------------------------------------------------------------------------- through the service


async def say(service: DataflowService, worker: str, version: int) -> None:
    await service.answer("versions", {"worker": worker, "policy": "agent", "serving": version})


def test_a_batch_is_made_when_its_patience_is_over_and_not_when_something_else_happens(tmp_path):
    flow, now_s, _ = overtaken(tmp_path)
    service = DataflowService(flow)

    async def scenario():
        said = {"trainer": "t", "policies": {"agent": 2}, "after": 0}
        epoch = (await service.answer("claim", said))["epoch"]
        asked = {"policy": "agent", "step": 2, "epoch": epoch}
        waiting = asyncio.create_task(service.answer("batch", asked, hold_s=60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        now_s[0] = 10.7
        assert (await waiting)["state"] == "run"

    asyncio.run(scenario())


def test_whoever_can_be_given_something_is_found_behind_many_who_cannot(tmp_path):
    """Three were asked in turn; with more of them, whose versions came late, it waited until it asked anew."""
    config = configuration(max_staleness=0)
    config.trainer.steps = 9
    flow = make_flow(tmp_path, config)
    service = DataflowService(flow)

    async def scenario():
        late = [f"late {number}" for number in range(12)]
        for worker in (*late, "ready"):
            await say(service, worker, 0)
        play(flow, flows.lease(flow, "ready", 1000), version=0)
        batch(flow, 0)
        flow.batches.commit("agent", 1)
        waiting = []
        for worker in (*late, "ready"):
            message = {"worker": worker, "slots": 8, "kind": "train"}
            waiting.append(asyncio.create_task(service.answer("lease", message, hold_s=60.0)))
            await asyncio.sleep(0)
        await say(service, "ready", 1)
        assert (await asyncio.wait_for(waiting[-1], 30.0))["leases"]
        for task in waiting[:-1]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())
