"""What each worker serves decides what it is given to play."""

import asyncio
import errno

import pytest

from flowjax.broker import Busy, Evicted
from flowjax.dataflow.leases import Capabilities
from flowjax.dataflow.policies import Mismatches, RolloutWorkers
from flowjax.dataflow.service import DataflowService
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.token import bearer, invite, known_node
from flowjax.records import WireError
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, play, played


def test_a_worker_that_is_too_far_behind_is_given_no_training_until_it_has_caught_up(tmp_path):
    config = configuration(max_staleness=1)
    config.eval.update({"tasks": 4, "every_steps": 0})
    flow = make_flow(tmp_path, config)
    service = DataflowService(flow)

    async def lease(worker):
        answer = await service.answer("lease", {"worker": worker, "slots": 8}, hold_s=0.01)
        return [lease.kind for lease in answer["leases"]]

    async def serve(worker, version):
        await service.answer("versions", {"worker": worker, "policy": "agent", "serving": version})

    async def scenario():
        flow.policies["agent"].committed = 3
        await serve("near", 3)
        await serve("far", 1)
        assert "train" not in await lease("far")
        assert "train" in await lease("near")
        assert "train" in await lease("never said what it serves")
        waiting = asyncio.create_task(service.answer("lease", {"worker": "far", "slots": 1}, hold_s=60.0))
        await asyncio.sleep(0)
        await serve("far", 2)
        answer = await asyncio.wait_for(waiting, 30)
        assert [lease.kind for lease in answer["leases"]] == ["train"], "it waits no longer than it has to"
        await serve("far", 1)
        assert "train" not in await lease("far"), "its engine was restarted on an older version"

    asyncio.run(scenario())
    workers = flow.status()["workers"]
    assert workers["near"]["serving"] == {"agent": 3} and workers["far"]["serving"] == {"agent": 1}


def test_one_that_is_sent_away_plays_no_more_and_what_it_played_goes_to_others(tmp_path):
    flow = make_flow(tmp_path, configuration())
    service = DataflowService(flow)

    async def lease(worker, **options):
        return await service.answer("lease", {"worker": worker, "slots": 2}, **options)

    async def scenario():
        for worker in ("good", "bad"):
            said = {"worker": worker, "policy": "agent", "serving": 0}
            await service.answer("versions", said)
        (first, second) = (await lease("bad"))["leases"]
        with pytest.raises(WireError, match="no worker 'bed' plays for this run: there is good, bad"):
            await service.answer("evict", {"evicted": "bed"})
        waiting = asyncio.create_task(service.answer("lease", {"worker": "bad", "slots": 100}, hold_s=60.0))
        await asyncio.sleep(0)
        held = len((await asyncio.wait_for(waiting, 30))["leases"]) + 2
        waiting = asyncio.create_task(service.answer("lease", {"worker": "bad", "slots": 1}, hold_s=0.5))
        await asyncio.sleep(0)
        assert await service.answer("evict", {"evicted": "bad"}) == {"given_back": held}
        assert not (await waiting)["leases"], "it waited for episodes when it was sent away, and gets none"
        messages = {"lease": {"slots": 1}, "renew": {"lease_ids": [first.lease_id]}, "episodes": {"items": []}}
        for name, message in messages.items():
            with pytest.raises(Evicted):
                await service.answer(name, {"worker": "bad", **message})
        taken = {
            lease.episode_id for lease in (await service.answer("lease", {"worker": "good", "slots": 2}))["leases"]
        }
        assert taken == {first.episode_id, second.episode_id}

    asyncio.run(scenario())
    assert set(flow.status()["workers"]) == {"good"}


class Comparing:
    """A dataflow whose trainer says what it found; `here` is the run's own worker, the others are of nodes."""

    def __init__(self, folder, most):
        config = configuration(max_staleness=1)
        config.dataflow.max_mismatch_kl = most
        self.now_s = 0.0
        self.flow = make_flow(folder, config, lambda: self.now_s)
        self.service = DataflowService(self.flow)
        self.episodes: dict[str, list[str]] = {}

    async def play(self, *workers):
        claim = {"trainer": "t", "policies": {"agent": 0}, "after": 0}
        self.epoch = (await self.service.answer("claim", claim))["epoch"]
        for worker in workers:
            said = {"worker": worker, "policy": "agent", "serving": 0}
            await self.service.answer("versions", said)
            leases = (await self.service.answer("lease", {"worker": worker, "slots": 4}))["leases"]
            items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in leases]
            await self.service.answer("episodes", {"worker": worker, "items": items})
            self.episodes[worker] = [lease.episode_id for lease in leases]

    async def find(self, means, tokens=250):
        """A commit with so much k3 a token in each of four trajectories of a worker."""
        self.now_s += 1.0
        mismatches = {
            episode: [mean * tokens + self.now_s * 1e-6, tokens]
            for worker, mean in means.items()
            for episode in self.episodes[worker]
        }
        await self.say(mismatches)

    async def say(self, mismatches):
        message = {"policy": "agent", "version": 0, "epoch": self.epoch, "mismatches": mismatches}
        await self.service.answer("committed", message)

    async def asks(self, worker):
        return await self.service.answer("lease", {"worker": worker, "slots": 1})


def test_a_node_whose_engines_sample_from_another_policy_is_sent_away(tmp_path):
    key = invite(tmp_path, "far")

    async def scenario():
        run = Comparing(tmp_path, 0.01)
        await run.play("here", "far:1")
        await run.find({"here": 0.0, "far:1": 0.02})
        assert run.flow.status()["workers"]["far:1"]["mismatch_kl"] == pytest.approx(0.02, rel=1e-3)
        (held,) = (await run.asks("far:1"))["leases"]  # four trajectories are few
        await run.find({"here": 0.0, "far:1": 0.02})
        with pytest.raises(
            Evicted, match=r"another policy than agent, by 0.02 a token \(k3\); .*kl is 0.01, and others"
        ):
            await run.asks("far:1")
        (taken,) = (await run.asks("here"))["leases"]
        assert taken.episode_id == held.episode_id
        assert set(run.flow.status()["sent_away"]) == {"far"}
        node = known_node(tmp_path, bearer(key))
        assert node is not None and "another policy than agent" in node.sent_away, "a new start would play on"
        invite(tmp_path, "far")
        for _ in range(40):  # nothing of the node is compared, or only what it had played before
            await run.find({"here": 0.0, "far:1": 0.02})
            await run.find({"here": 0.0})
        assert not run.flow.status()["sent_away"]

    asyncio.run(scenario())


# Of `here`, `far` and `near`, for so many commits of so many tokens: k3 a token; and who is sent away in the end.
CASES = {
    "far off": ([(20, 250, {"here": 0.0, "far:1": 1.0, "near:1": 0.0})], {"far"}),
    "beside its own service": ([(20, 250, {"here": 0.0, "far:1": 1.0})], {"far"}),
    "all are above: the trainer is off": ([(20, 250, {"here": 0.5, "far:1": 9.0, "near:1": 0.5})], set()),
    "the launch needs its own": ([(20, 250, {"here": 1.0, "far:1": 0.0, "near:1": 0.0})], set()),
    "twice as far": ([(20, 250, {"here": 0.009, "far:1": 0.018, "near:1": 0.009})], set()),
    "four times": ([(20, 250, {"here": 0.009, "far:1": 0.036, "near:1": 0.009})], {"far"}),
    "few tokens": ([(20, 6, {"here": 0.0, "far:1": 1.0})], set()),
    "few tokens, for long": ([(40, 6, {"here": 0.0, "far:1": 1.0})], {"far"}),
    "few trajectories": ([(1, 2000, {"here": 0.0, "far:1": 1.0})], set()),
    "not many": ([(2, 2000, {"here": 0.0, "far:1": 1.0})], {"far"}),
    "compared when the trainer was off, and then hardly": (
        [(20, 250, {"here": 0.5, "far:1": 0.5}), (29, 250, {"here": 0.0})],
        set(),
    ),
    "all were above when it was compared": (
        [(2, 250, {"here": 0.5, "far:1": 9.0}), (40, 5000, {"here": 0.0})],
        set(),
    ),
    "each in batches of its own": (
        [(1, 250, {"here": 0.0}), (1, 250, {"far:1": 1.0}), (1, 250, {"here": 0.0}), (1, 250, {"far:1": 1.0})],
        {"far"},
    ),
    "half of it long ago": (
        [(1, 250, {"here": 0.0, "far:1": 1.0}), (60, 250, {"here": 0.0}), (1, 250, {"here": 0.0, "far:1": 1.0})],
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_node_is_sent_away_for_what_is_its_own_fault_alone(tmp_path, case):
    stretches, expected = CASES[case]
    for node in ("far", "near"):
        invite(tmp_path, node)

    async def scenario():
        run = Comparing(tmp_path, 0.01)
        await run.play("here", "far:1", "near:1")
        for commits, tokens, means in stretches:
            for _ in range(commits):
                await run.find(means, tokens)
        assert set(run.flow.status()["sent_away"]) == expected
        assert set(run.flow.status()["workers"]) == {"here", "far:1", "near:1"} - {f"{node}:1" for node in expected}

    asyncio.run(scenario())


def test_only_nodes_are_judged():
    found = Mismatches()
    for _ in range(9):
        found.add(
            "agent", [("here", 1000.0, 1000), ("far:1", 500.0, 1000), ("far:2", 500.0, 1000), ("near:1", 0.0, 500)]
        )
    assert found.above("agent", 0.01) == {"far": 0.5}
    assert found.means() == {"here": 1.0, "far:1": 0.5, "far:2": 0.5, "near:1": 0.0}


def test_a_copy_of_a_message_counts_once_and_ends_what_it_had_begun(tmp_path, monkeypatch):
    invite(tmp_path, "far")

    async def scenario():
        run = Comparing(tmp_path, 0.01)
        await run.play("here", "far:1")
        found = {
            episode: [mean * 250, 250]
            for worker, mean in (("here", 0.0), ("far:1", 1.0))
            for episode in run.episodes[worker]
        }
        for _ in range(20):
            await run.say(found)
        assert run.flow.status()["sent_away"] == {}, "it has four trajectories, not eighty"
        with monkeypatch.context() as patch:
            patch.setattr("flowjax.dataflow.service.send_away", raising(OSError(errno.ENOSPC, "full")))
            again = {episode: [k3, 251] for episode, (k3, _) in found.items()}
            with pytest.raises(Busy):
                await run.say(again)
            assert (await run.asks("far:1"))["leases"]
        await run.say(again)
        assert set(run.flow.status()["sent_away"]) == {"far"}

    asyncio.run(scenario())


def raising(error):
    def raises(*_):
        raise error

    return raises


def test_found_mismatches_that_cannot_be_are_refused(tmp_path):
    async def scenario():
        run = Comparing(tmp_path, 0.01)
        await run.play("here")
        (first, *_) = run.episodes["here"]
        await run.say({"nobody's": [5.0, 1], f"{first}/judge/a": [1.0, 1000], first: [0.0, 1000]})
        assert run.flow.status()["workers"]["here"]["mismatch_kl"] == 0.0005, "both are of one episode"
        for bad in ({1: [0.0, 1]}, {"a": 1.0}, {"a": [0.0, 0]}, {"a": [-1.0, 2]}, {"a": [float("nan"), 2]}, [1]):
            with pytest.raises(WireError, match="field mismatches"):
                await run.say(bad)

    asyncio.run(scenario())


def test_workers_are_shown_while_they_say_something():
    now_s = [0.0]
    workers = RolloutWorkers(max_staleness=1, clock=lambda: now_s[0])
    assert workers.report("a", "agent", 0) and not workers.report("a", "agent", 0)
    for number in range(4):
        workers.ended("a", f"lease-{number}", counts=number < 3)
    now_s[0] = 50.0
    workers.left_free("b", 2)
    assert workers.status(within_s=60.0) == {
        "a": {"heard_s_ago": 50.0, "serving": {"agent": 0}, "episodes": 3, "free_slots": 0},
        "b": {"heard_s_ago": 0.0, "serving": {}, "episodes": 0, "free_slots": 2},
    }
    assert set(workers.status(within_s=20.0)) == {"b"}


def test_names_of_strangers_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("flowjax.dataflow.policies._MOST_KNOWN", 3)
    workers = RolloutWorkers(max_staleness=1, clock=lambda: 0.0)
    for name in "abcade":
        workers.left_free(name, 1)
    assert set(workers.status(within_s=1.0)) == {"a", "d", "e"}


def test_a_run_whose_trainer_has_gone_back_goes_on(tmp_path):
    """Workers that serve what there is were taken to be behind the versions that are lost, for good."""
    config = configuration(max_staleness=1)
    config.trainer.update({"steps": 20, "keep_checkpoints": 9})
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)

    def step(version):
        flow.workers.report("w", "agent", version)
        flow.report_serving("agent", version)
        play(flow, flows.lease(flow, "w", 1000), version=version)
        assert flows.take(flow, "agent", version), version
        flow.batches.commit("agent", version + 1)

    _, epoch = flow.batches.claim("first", {"agent": 0}, 0)
    for version in range(9):
        step(version)
    flow.workers.report("w", "agent", 9)
    flow.report_serving("agent", 9)
    flow.batches.claim("second", {"agent": 3}, epoch)
    for version in range(3, 12):
        step(version)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("back_to", [1, 3, 5])
def test_groups_that_were_opened_for_a_lost_version_are_played_with_what_there_is(tmp_path, max_staleness, back_to):
    """Nobody might lease them, and they counted as under way: no other was opened, and the run stood still for good."""
    config = configuration(max_staleness=max_staleness)
    config.trainer.update({"steps": 20, "keep_checkpoints": 9})
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)

    def report(version):
        flow.workers.report("w", "agent", version)
        flow.report_serving("agent", version)

    _, epoch = flow.batches.claim("first", {"agent": 0}, 0)
    for step in range(6):
        report(step)
        while leases := flows.lease(flow, "w", 2, "train"):
            play(flow, leases, version=step)
            if flows.take(flow, "agent", step):
                break
        flow.batches.commit("agent", step + 1)
    report(6)
    lost = flows.lease(flow, "w", 1000, "train")
    flow.batches.claim("second", {"agent": back_to}, epoch)
    flows.give_back(flow, [lease.lease_id for lease in lost], "")
    for step in range(back_to, 10):
        report(step)
        play(flow, flows.lease(flow, "w", 1000, "train"), version=step)
        assert flows.take(flow, "agent", step), step
        flow.batches.commit("agent", step + 1)


def test_slow_workers_do_not_hide_what_there_is_from_the_fast_one_behind_them(tmp_path):
    config = configuration()
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)
    service = DataflowService(flow)
    flow.workers.yields = lambda worker, newest: worker.startswith("slow")
    flow.workers.yielded = lambda worker: worker.startswith("slow")

    async def scenario():
        asked = [{"worker": worker, "slots": 1} for worker in (*(f"slow {n}" for n in range(4)), "fast")]
        waiting = [asyncio.create_task(service.answer("lease", message, hold_s=600.0)) for message in asked]
        await asyncio.sleep(0)
        await service.answer("versions", {"worker": "fast", "policy": "agent", "serving": 0})
        (lease,) = (await asyncio.wait_for(waiting[-1], 60))["leases"]
        assert lease.kind == "train"
        for task in waiting:
            task.cancel()

    asyncio.run(scenario())


def test_what_a_fast_worker_failed_at_goes_to_the_slow_one_that_leaves_it_the_rest(tmp_path):
    """Nobody played it for `lease_s`: the fast one may not have it so soon, and the slow one left all to it."""
    config = configuration(max_staleness=0)
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)
    flow.report_serving("agent", 0)
    flow.workers.yields = lambda worker, newest: worker == "slow"
    assert flows.lease(flow, "slow", 8) == []
    failed, *others = flows.lease(flow, "fast", 1000)
    flows.give_back(flow, [failed.lease_id], "its world broke")
    assert flows.lease(flow, "fast", 8) == []
    assert [lease.episode_id for lease in flows.lease(flow, "slow", 8)] == [failed.episode_id]
    flows.give_back(flow, [lease.lease_id for lease in others], "")
    assert len(flows.lease(flow, "fast", 1000)) == len(others), "given back without a fault: its own again"


def test_a_version_that_is_made_anew_is_evaluated_and_not_the_lost_one(tmp_path):
    """The lost weights were evaluated once more, at once and as the version to come, and that one never was."""
    config = configuration(max_staleness=1)
    config.eval.update({"tasks": 2, "every_steps": 3})
    config.trainer.update({"steps": 6, "keep_checkpoints": 9})
    flow = make_flow(tmp_path, config)

    def step(version, success):
        report(version)
        leases = flows.lease(flow, "w", 1000)
        assert all(lease.versions in ({}, {"agent": version}) for lease in leases)
        play(flow, leases, version=version, success=lambda lease: success if lease.kind == "eval" else 1.0)
        if version < 6:
            assert flows.take(flow, "agent", version)
            flow.batches.commit("agent", version + 1)

    def report(version):
        flow.workers.report("w", "agent", version)
        return flow.report_serving("agent", version)

    _, epoch = flow.batches.claim("first", {"agent": 0}, 0)
    for version in range(7):
        step(version, 0.0)
    flow.batches.claim("second", {"agent": 3}, epoch)
    flow.evaluations.read_ledger()
    assert report(3) == 2 and not flow.finished
    assert report(6) <= 3, "a node that has not heard of it yet: at most the version in the making"
    for version in range(3, 7):
        step(version, 1.0)
    assert flow.finished
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "eval" and line["version"] == 6]
    assert [line["success_rate"] for line in lines] == [0.0, 1.0]


def test_one_that_plays_training_alone_does_not_keep_a_lost_evaluation_open(tmp_path):
    now_s = [0.0]
    flow = make_flow(tmp_path, configuration(max_staleness=1), clock=lambda: now_s[0])
    flow.workers.report("gone", "agent", 0, held=[0])
    flow.report_serving("agent", 0)
    flow.report_serving("agent", 3)
    train_only = Capabilities(kinds=frozenset({"train"}))
    for _ in range(130):
        now_s[0] += 10.0
        flow.workers.report("trains", "agent", 3)
        flow.leases.lease("trains", 1, train_only)
        flow.workers.report("plays", "agent", 3, held=[3])
        leases = flow.leases.lease("plays", 4, Capabilities(kinds=frozenset({"eval"})))
        if leases:
            break
    assert 600.0 < now_s[0] < 700.0
