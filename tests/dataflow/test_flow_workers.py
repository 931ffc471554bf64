"""Who plays what: evaluation beside training, and workers that cannot play everything."""

import time

import pytest

from flowjax.dataflow.leases import Capabilities
from flowjax.monitor.metrics import read_metrics
from flowjax.records import Trajectory
from tests.dataflow import flows
from tests.dataflow.test_flow import batch, configuration, make_flow, play, played


def flow_with(folder, slots: float, tasks: int = 20, clock=time.monotonic, **dataflow):
    config = configuration(max_staleness=3, **dataflow)
    config.eval.update({"tasks": tasks, "slots": slots})
    flow = make_flow(folder, config, clock=clock)
    flow.report_serving("agent", 0)
    return flow


def kinds(leases) -> tuple[int, int]:
    return sum(lease.kind == "eval" for lease in leases), sum(lease.kind == "train" for lease in leases)


def test_evaluation_has_its_share_of_a_workers_slots_and_no_more(tmp_path):
    flow = flow_with(tmp_path, 0.25)
    leases = flows.lease(flow, "w", 8)
    assert kinds(leases) == (2, 6)
    play(flow, [lease for lease in leases if lease.kind == "train"][:3], version=0)
    assert kinds(flows.lease(flow, "w", 3)) == (0, 3), "its slots are taken"
    play(flow, [lease for lease in leases if lease.kind == "eval"], version=0)
    assert kinds(flows.lease(flow, "w", 2)) == (2, 0), "they are free again"
    assert kinds(flows.lease(flow, "another", 4)) == (1, 3)


@pytest.mark.parametrize(
    ("slots", "total", "evaluated"),
    [(0.25, 8, 2), (0.25, 9, 3), (0.28, 25, 7), (0.25, 1, 1), (0.0, 8, 0), (1.0, 8, 1), (3, 8, 3), (30, 8, 8)],
)
def test_a_share_of_slots_is_rounded_up(tmp_path, slots, total, evaluated):
    """So that a worker of one slot evaluates, too. From 1 on it is a number of slots, at most those there are."""
    assert kinds(flows.lease(flow_with(tmp_path, slots), "w", total)) == (evaluated, total - evaluated)


def test_neither_starves_and_nothing_idles(tmp_path):
    flow = flow_with(tmp_path, 1.0, tasks=3)
    evaluated = trained = 0
    while evaluated < 3 or trained < 24:
        leases = flows.lease(flow, "w", 4)
        assert len(leases) == 4 or trained + kinds(leases)[1] == 24
        evaluated, trained = evaluated + kinds(leases)[0], trained + kinds(leases)[1]
        play(flow, leases, version=0)
        assert kinds(leases)[0] <= 1 or kinds(leases)[1] == 0
    assert [line["episodes"] for line in read_metrics(tmp_path) if line["kind"] == "eval"] == [3]


def test_evaluation_takes_what_training_leaves(tmp_path):
    flow = flow_with(tmp_path, 0.1)
    assert kinds(flows.lease(flow, "w", 100)) == (20, 24), "all there is of both"


def test_training_goes_on_to_new_versions_while_an_old_one_is_evaluated(tmp_path):
    flow = flow_with(tmp_path, 0.5)
    held = flows.lease(flow, "slow", 1000, "eval")
    for step in range(3):
        play(flow, flows.lease(flow, "w", 1000), version=step)
        batch(flow, step)
        flow.batches.commit("agent", step + 1)
        assert flow.report_serving("agent", step + 1) == 0, "version 0 stays loaded"
    play(flow, held, version=0)
    assert flow.report_serving("agent", 3) == 0
    assert [line["version"] for line in read_metrics(tmp_path) if line["kind"] == "eval"] == [0]


def test_only_what_a_worker_can_play_is_leased(tmp_path):
    flow = flow_with(tmp_path, 0.5)
    assert flows.lease(flow, "w", 10, playable=Capabilities(worlds=frozenset({"chess"}))) == []
    assert flows.lease(flow, "w", 10, playable=Capabilities(policies=frozenset({"other"}))) == []
    assert kinds(flows.lease(flow, "w", 4, playable=Capabilities(kinds=frozenset({"eval"})))) == (4, 0)
    everything = Capabilities(worlds=frozenset({"toy", "chess"}), policies=frozenset({"agent", "other"}))
    assert kinds(flows.lease(flow, "v", 4, playable=everything)) == (2, 2)


def test_parts_of_a_frozen_model_belong_to_no_stream(tmp_path):
    config = configuration()
    config.eval.tasks = 0
    config.agents = {"player": "agent", "judge": "base"}
    flow = make_flow(tmp_path, config)
    assert set(flow.frozen) == {"base"}
    flow.report_serving("agent", 0)
    for lease in flows.lease(flow, "w", 1000, playable=Capabilities(policies=frozenset({"agent"}))):
        episode = played(lease, version=0)
        (part,) = episode.trajectories
        names = f"{lease.episode_id}/judge", lease.group_id, lease.task.task_id, lease.seed
        judge = Trajectory(*names, part.turns, part.outcome, policy="base")
        both = type(episode)(lease.episode_id, *names[1:], [part, judge], episode.outcome)
        assert flows.accept(flow, lease.lease_id, both)
    served, _ = batch(flow, 0)
    assert served.totals["episodes"] == 6 and {row.policy for row in served.rows} == {"agent"}


def test_an_evaluation_goes_to_those_that_have_its_versions(tmp_path):
    """One that joined late took its episodes, failed at them for want of the version, and used their attempts up."""
    flow = flow_with(tmp_path, 0.5)
    flow.workers.report("was there", "agent", 0, held=[0])
    flow.workers.report("says nothing", "agent", 3)
    flow.workers.report("joined late", "agent", 3, held=[2, 3])
    flow.report_serving("agent", 3)
    assert kinds(flows.lease(flow, "joined late", 4)) == (0, 4)
    assert kinds(flows.lease(flow, "says nothing", 4)) == (2, 2)
    assert kinds(flows.lease(flow, "was there", 4, "eval")) == (4, 0)
    flow.workers.report("joined late", "agent", 3, held=[0, 2, 3])
    assert kinds(flows.lease(flow, "joined late", 4)) == (4, 0), "it has fetched it"


def test_an_evaluation_whose_version_is_lost_is_tried_and_so_comes_to_its_end(tmp_path):
    now_s = [0.0]
    flow = flow_with(tmp_path, 0.5, clock=lambda: now_s[0])
    flow.workers.report("was there", "agent", 0, held=[0])
    flow.report_serving("agent", 3)
    flow.workers.report("joined late", "agent", 3, held=[2, 3])
    assert kinds(flows.lease(flow, "joined late", 4, "eval")) == (0, 0)
    now_s[0] += 700
    flow.workers.report("joined late", "agent", 3, held=[2, 3])
    assert kinds(flows.lease(flow, "joined late", 4, "eval")) == (4, 0), "nobody else has been heard of"
