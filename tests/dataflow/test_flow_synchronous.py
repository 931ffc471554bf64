"""With a staleness of 0 training is exactly synchronous, however eager the workers are."""

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flowjax.dataflow.flow import Flow
from flowjax.dataflow.service import DataflowService
from flowjax.monitor.metrics import read_metrics
from flowjax.records import WireError
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, played

STEPS, GROUPS, MEMBERS, SAMPLED = 5, 3, 4, 2


@pytest.mark.parametrize("seed", range(5))
def test_every_trained_token_is_of_the_version_being_trained(tmp_path, seed):
    """An eager worker: it leases at every chance, hands in late and in any order, and is told of versions late."""
    rng = random.Random(seed)
    config = configuration(max_staleness=0)
    config.rollout.group_size = MEMBERS
    config.trainer.update({"steps": STEPS, "groups_per_step": GROUPS})
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)
    flow.report_serving("agent", 0)
    served, trained, playing = 0, 0, []
    while trained < STEPS:
        playing += [(lease, served) for lease in flows.lease(flow, "w", rng.randint(1, 8))]
        rng.shuffle(playing)
        for lease, version in [playing.pop() for _ in range(min(len(playing), rng.randint(0, 4)))]:
            assert flows.accept(flow, lease.lease_id, played(lease, version=version))
        if served < trained and rng.random() < 0.2:
            served = trained
            flow.report_serving("agent", served)
        if taken := flows.credited(flow, "agent", trained):
            rows = taken[0].rows
            assert taken[1] == 0, "nothing was played in vain"
            assert len(rows) == GROUPS * MEMBERS * SAMPLED
            assert {int(version) for row in rows for version in row.versions[row.sampled]} == {trained}
            trained += 1
            flow.batches.commit("agent", trained)
    assert not playing and flows.lease(flow, "w", 100) == []
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "batch"]
    assert [line["ages"] for line in lines] == [{"0": GROUPS * MEMBERS * SAMPLED}] * STEPS


def test_ages_of_all_trained_tokens_are_told(tmp_path):
    flow = make_flow(tmp_path, configuration(max_staleness=2))
    flow.report_serving("agent", 0)
    leases = flows.lease(flow, "w", 1000, "train")
    for lease in leases[:6]:
        flows.accept(flow, lease.lease_id, played(lease, version=0, turns=3))
    assert flows.credited(flow, "agent", 0)
    flow.batches.commit("agent", 1)
    flow.report_serving("agent", 1)
    for index, lease in enumerate(leases[6:12]):
        flows.accept(flow, lease.lease_id, played(lease, version=index % 2))
    status = flow.status()["policies"]["agent"]
    assert (status["ages"], status["trained_ages"]) == ({"1": 3}, {"0": 18})
    assert flows.credited(flow, "agent", 1)
    assert flow.status()["policies"]["agent"]["trained_ages"] == {"0": 6, "1": 6}
    flow.close()
    flow = make_flow(tmp_path, configuration(max_staleness=2))
    assert flow.status()["policies"]["agent"]["trained_ages"] == {"0": 6, "1": 6}


def after_three_batches(tmp_path: Path) -> Flow:
    """A dataflow whose trainer has committed version 3, which is served; up to three versions may be behind."""
    config = configuration(max_staleness=3)
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)
    flow.report_serving("agent", 0)
    for step in range(3):
        for lease in flows.lease(flow, "w", 6):
            flows.accept(flow, lease.lease_id, played(lease, version=step))
        assert flows.credited(flow, "agent", step)
        flow.batches.commit("agent", step + 1)
        flow.report_serving("agent", step + 1)
    return flow


def test_a_group_that_a_lost_version_has_begun_is_not_trained_on(tmp_path):
    """By the time that its last episode is in, another version has the number of the lost one."""
    flow = after_three_batches(tmp_path)
    first, first_rest, second, second_rest = flows.lease(flow, "w", 4)
    assert (first_rest.group_id, second_rest.group_id) == (first.group_id, second.group_id) != (second.group_id,) * 2
    for lease, version in ((first, 2), (second, 3)):
        assert flows.accept(flow, lease.lease_id, played(lease, version=version))
    assert flow.batches.claim("restarted", {"agent": 1}, 0) == (True, 1)
    assert flow.status()["policies"]["agent"]["dropped"] == {"lost_version": 1}
    assert flow.ledger.renew([first_rest.lease_id, second_rest.lease_id]) == [second_rest.lease_id]
    assert not flows.accept(flow, second_rest.lease_id, played(second_rest, version=1))
    assert flows.accept(flow, first_rest.lease_id, played(first_rest, version=1))
    assert flow.status()["policies"]["agent"]["ready_groups"] == 4, "those of batch 2, which is undone, and the first"


@pytest.mark.parametrize("turns", [[3, 3], [1, 3]])
def test_what_a_lost_version_has_played_is_not_trained_on(tmp_path, turns):
    """The trainer has gone back to version 1: what version 3 did, also in a part of an episode, is nobody's future."""
    flow = after_three_batches(tmp_path)
    for lease in flows.lease(flow, "w", 6):
        episode = played(lease, version=0, turns=2)
        (part,) = episode.trajectories
        parts = [replace(turn, version=version) for turn, version in zip(part.turns, turns, strict=True)]
        assert flows.accept(flow, lease.lease_id, replace(episode, trajectories=[replace(part, turns=parts)]))
    assert flow.batches.claim("restarted", {"agent": 1}, 0) == (True, 1)
    served = flows.credited(flow, "agent", 1)
    assert served and all((row.versions[row.sampled] <= 1).all() for row in served[0].rows)
    assert flows.credited(flow, "agent", 2), "made of what version 2 played: that was batch 2, as it was"
    assert flow.status()["policies"]["agent"]["dropped"] == {"lost_version": 3}


def publish(flow: Flow, version: int, commit: str) -> None:
    """A version as it lies in the run's folder, made anew where there is one."""
    folder = flow.policies["agent"].checkpoints / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commit_success.txt").write_text(commit)


def test_what_a_lost_version_played_is_played_again_however_late_it_comes(tmp_path):
    """A node that was cut off while the trainer went back: by the number alone it would be the new version's."""
    flow = after_three_batches(tmp_path)
    service = DataflowService(flow)
    for version in range(4):
        publish(flow, version, f"1{version}")
    leases = flows.lease(flow, "w", 4)
    shutil.rmtree(flow.policies["agent"].checkpoints / "3")
    shutil.rmtree(flow.policies["agent"].checkpoints / "2")
    assert flow.batches.claim("restarted", {"agent": 1}, 0) == (True, 1)

    def send(lease, version, commit, worker="w"):
        episode = replace(played(lease, version=version), commits={"agent": {version: commit}})
        item = {"lease_id": lease.lease_id, "episode": episode}
        answer = asyncio.run(service.answer("episodes", {"worker": worker, "items": [item]}, hold_s=0.0))
        return {name: answer[name] for name in ("accepted", "duplicate")}

    assert send(leases[0], 3, "13") == {"accepted": 0, "duplicate": 1}, "there is no version 3 now"
    for version, commit in ((2, "22"), (3, "23")):
        publish(flow, version, commit)
    for lease, version in zip(leases[1:3], (2, 3), strict=True):
        assert send(lease, version, f"1{version}")["accepted"] == 0, "that number is another's now"
    assert flow.ledger.count_causes("failed") == {}, "it is no fault of the episodes"
    assert send(leases[3], 1, "11") == {"accepted": 1, "duplicate": 0}
    again = flows.lease(flow, "v", 3)
    assert {lease.episode_id for lease in again} == {lease.episode_id for lease in leases[:3]}
    assert send(leases[0], 3, "13")["accepted"] == 0
    assert send(again[0], 3, "23", "v")["accepted"] == 1
    publish(flow, 5, "25")
    assert send(again[1], 0, "10", "v")["accepted"] == 1
    shutil.rmtree(flow.policies["agent"].checkpoints / "1")
    assert send(again[2], 1, "11", "v")["accepted"] == 1, "thinned out, which says nothing"
    many = {"agent": dict.fromkeys(range(1001), "1")}
    for wrong in (many, {"agent": {-1: "1"}}, {"agent": ["1"]}, ["agent"], {"agent": {1: 11}}, {3: {1: "11"}}):
        item = {"lease_id": "x", "episode": replace(played(again[2], version=1), commits=wrong)}
        map_of = "is .*: it is a map of policies to maps of versions to texts"
        with pytest.raises(WireError, match="has 1001 versions of 'agent'" if wrong is many else map_of):
            asyncio.run(service.answer("episodes", {"worker": "v", "items": [item]}, hold_s=0.0))


def test_batches_are_kept_for_as_long_as_a_trainer_may_go_back(tmp_path):
    """It goes back to its newest checkpoint, or where that is damaged to one before, and gets their batches again."""
    config = configuration(max_staleness=1)
    config.trainer.update({"steps": 20, "keep_checkpoints": 2, "checkpoint_every": 4})
    config.eval.tasks = 0
    flow = make_flow(tmp_path, config)
    _, epoch = flow.batches.claim("first", {"agent": 0}, 0)
    made, trained = {}, []

    def step(version):
        flow.workers.report("w", "agent", version)
        flow.report_serving("agent", version)
        for lease in flows.lease(flow, "w", 1000):
            assert flows.accept(flow, lease.lease_id, played(lease, version=version))
        taken = flows.take(flow, "agent", version)
        assert taken, version
        flow.batches.commit("agent", version + 1)
        return {part.trajectory_id for group in taken.groups for part in group.trajectories}

    for version in range(11):
        made[version] = step(version)
    assert flow.ledger.batch("agent", 4), "that of the checkpoint before the newest one"
    assert flow.batches.claim("second", {"agent": 8}, epoch)[0]
    for version in range(8, 14):
        trained.append(step(version))
    assert trained[0] == made[8], "its batch is as it was"
    kept = [made[version] for version in range(8)] + trained
    assert len(set().union(*kept)) == sum(map(len, kept)), "no trajectory is in two batches that led to a version"


def test_what_a_version_played_that_is_lost_while_it_waits_for_room_is_played_again(tmp_path, monkeypatch):
    flow = after_three_batches(tmp_path)
    service = DataflowService(flow)
    for version in (1, 3):
        publish(flow, version, f"1{version}")
    (lease,) = flows.lease(flow, "w", 1)
    item = {"lease_id": lease.lease_id, "episode": replace(played(lease, version=3), commits={"agent": {3: "13"}})}
    asked = []

    def full(_) -> bool:
        asked.append(True)
        if len(asked) == 2:  # it waits
            shutil.rmtree(flow.policies["agent"].checkpoints / "3")
            assert flow.batches.claim("restarted", {"agent": 1}, 0) == (True, 1)
        return len(asked) < 3

    monkeypatch.setattr(type(flow.groups), "full", property(full))
    answer = asyncio.run(service.answer("episodes", {"worker": "w", "items": [item]}, hold_s=60.0))
    assert (answer["accepted"], answer["duplicate"]) == (0, 1)
    assert [again.episode_id for again in flows.lease(flow, "v", 1)] == [lease.episode_id]
