"""With a staleness of 0 training is exactly synchronous, however eager the workers are."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from flowjax.dataflow.flow import Flow
from flowjax.monitor.metrics import read_metrics
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
