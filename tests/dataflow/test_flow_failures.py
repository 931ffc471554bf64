"""Episodes that their world breaks, by config: what becomes of their groups, and how it is told."""

import asyncio
from pathlib import Path
from typing import Any

import grain
import pytest

from flowjax.dataflow.algorithms import AlgorithmError
from flowjax.dataflow.built_in_algorithms import DynamicSampling
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.service import DataflowService
from flowjax.launch.session import UnusedGroups
from flowjax.monitor.held_out import read_held_out
from flowjax.monitor.metrics import read_metrics, write_status
from flowjax.records import Episode, Status, Task
from flowjax.run import resolve
from tests.dataflow import flows
from tests.dataflow.test_flow import batch, configuration, make_flow, played, train_leases

MEMBERS = 4


def flow_with(folder: Path, **dataflow: Any):
    config = configuration(**dataflow)
    config.rollout.group_size = MEMBERS
    config.trainer.groups_per_step = 2
    flow = make_flow(folder, config)
    flow.report_serving("agent", 0)
    return flow


def broken(lease, status: Status = "env_error") -> Episode:
    names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
    return Episode(*names, [], {}, status, "the world is gone")


def play(flow, leases, bad=()) -> None:
    """Play them; those in `bad` break."""
    for lease in leases:
        episode = broken(lease) if lease.episode_id in bad else played(lease, version=0)
        flows.accept(flow, lease.lease_id, episode)


def test_retry_plays_it_again_by_another_worker_and_then_goes_on_short(tmp_path):
    flow = flow_with(tmp_path, max_attempts=2)
    leases = train_leases(flow)
    assert flows.lease(flow, "other", 1, "train") == []  # there is another worker
    bad = leases[0].episode_id
    play(flow, leases, {bad})
    assert train_leases(flow) == [], "the worker that broke it leaves it to the other"
    (again,) = flows.lease(flow, "other", 10, "train")
    assert again.episode_id == bad
    play(flow, [again], {bad})
    status = flow.status()
    assert (status["failed"], status["quarantined"], status["short_groups"]) == ({"env_error": 2}, 1, 1)
    assert bad in status["last_failures"]["env_error"]
    assert batch(flow, 0)[0].totals["episodes"] == 2 * MEMBERS - 1


def test_a_worker_alone_plays_it_again_itself(tmp_path):
    flow = flow_with(tmp_path)
    leases = train_leases(flow)
    assert flows.lease(flow, "evaluates", 1, "eval"), "which is nobody to leave training to"
    play(flow, leases, {leases[0].episode_id})
    assert [lease.episode_id for lease in train_leases(flow)] == [leases[0].episode_id]


def test_short_fills_the_group_at_once(tmp_path):
    flow = flow_with(tmp_path, failed_episodes="short")
    leases = train_leases(flow)
    play(flow, leases, {leases[0].episode_id})
    assert flow.status()["short_groups"] == 1
    assert batch(flow, 0)[0].totals["episodes"] == 2 * MEMBERS - 1


def test_groups_of_which_none_can_be_trained_on_are_told_to_the_user(tmp_path):
    flow = flow_with(tmp_path, failed_episodes="drop")
    unused, said = UnusedGroups(tmp_path), []
    while not said and flow.status()["dropped_groups"] < 100:
        write_status(tmp_path, "dataflow", flow.status())
        said = [*unused.warnings()]
        leases = train_leases(flow)
        play(flow, leases, {lease.episode_id for lease in leases})
    (warning,) = said
    assert warning.startswith("none of the last 32 groups of agent can be trained on (32 with failed episodes); most")
    assert "env_error" in warning and "the world is gone" in warning


def test_a_group_that_became_too_small_is_dropped_and_replaced(tmp_path):
    flow = flow_with(tmp_path, failed_episodes="short", min_group_size=3, max_staleness=0)
    leases = train_leases(flow)
    play(flow, leases, {lease.episode_id for lease in leases[:2]})
    assert flow.status()["policies"]["agent"]["dropped"] == {"failed": 1}
    assert len(train_leases(flow)) == MEMBERS


def test_drop_gives_up_the_whole_group_and_tells_its_siblings(tmp_path):
    flow = flow_with(tmp_path, failed_episodes="drop", max_staleness=0)
    leases = train_leases(flow)
    bad, sibling = leases[:2]
    flows.accept(flow, bad.lease_id, broken(bad, "timeout"))
    assert flow.ledger.renew([sibling.lease_id]) == [sibling.lease_id], "whoever plays a sibling learns that it is over"
    assert not flows.accept(flow, sibling.lease_id, played(sibling, version=0))
    status = flow.status()
    assert status["policies"]["agent"]["dropped"] == {"failed": 1} and status["failed"] == {"timeout": 1}
    replacement = train_leases(flow)
    assert len(replacement) == MEMBERS and replacement[0].group_id not in {lease.group_id for lease in leases}


@pytest.mark.parametrize("failed", ["short", "drop"])
def test_a_worker_that_dies_never_costs_an_episode(tmp_path, failed):
    flow = flow_with(tmp_path, failed_episodes=failed)
    leases = train_leases(flow)
    flows.give_back(flow, [lease.lease_id for lease in leases], "the engine is gone")
    assert {lease.episode_id for lease in train_leases(flow)} == {lease.episode_id for lease in leases}
    assert flow.status()["failed"] == {"given_back": len(leases)}


def test_what_failed_is_in_the_log_with_its_cause_and_survives_a_restart(tmp_path):
    flow = flow_with(tmp_path, failed_episodes="short")
    leases = train_leases(flow)
    play(flow, leases, {leases[0].episode_id})
    flow.close()
    flow = flow_with(tmp_path, failed_episodes="short")
    batch(flow, 0)
    (line,) = [entry for entry in read_metrics(tmp_path) if entry["kind"] == "batch"]
    assert (line["step"], line["episodes"], line["failed"]) == (1, 2 * MEMBERS - 1, {"env_error": 1})
    assert (line["quarantined"], line["short_groups"]) == (1, 1)


def test_an_evaluation_that_was_in_when_the_process_died_is_told_of_by_the_next(tmp_path):
    flow = make_flow(tmp_path)
    flow.report_serving("agent", 0)
    for lease in flows.lease(flow, "w", 1000, "eval"):
        flow.ledger.accept(lease.lease_id, played(lease, version=0))  # and before anything else, the process dies
    flow.close()
    assert not [line for line in read_metrics(tmp_path) if line["kind"] == "eval"]
    flow = make_flow(tmp_path)
    flows.write_finished(flow)
    flow.close()
    assert [line["episodes"] for line in read_metrics(tmp_path) if line["kind"] == "eval"] == [5]


def test_an_evaluation_that_nobody_can_reward_is_told_of_without_rewards_and_the_run_goes_on(tmp_path):
    config = configuration()
    config.reward.components = {"mine": {"path": f"{__name__}:unrewardable"}}
    flow = make_flow(tmp_path, config)
    flow.report_serving("agent", 0)
    for lease in flows.lease(flow, "w", 1000, "eval"):
        assert flows.accept(flow, lease.lease_id, played(lease, version=0))
    flow.close()
    make_flow(tmp_path, config).close()
    (line,) = [line for line in read_metrics(tmp_path) if line["kind"] == "eval"]
    assert (line["episodes"], line["success_rate"]) == (5, 1.0) and "no such table" in line["unrewarded"]
    assert "reward_mean" not in line["policies"]["agent"]
    assert [(each.success, each.rewards) for each in read_held_out(tmp_path)] == [(1.0, {})] * 5


def unrewardable(success):
    raise KeyError("no such table")


def test_a_worker_is_credited_with_what_counts_alone(tmp_path):
    flow = flow_with(tmp_path)
    leases = train_leases(flow)[:3]
    items = [{"lease_id": lease.lease_id, "episode": played(lease, version=0)} for lease in leases[:2]]
    items += [{"lease_id": leases[2].lease_id, "episode": broken(leases[2])}]
    answer = asyncio.run(DataflowService(flow).answer("episodes", {"worker": "w", "items": items}))
    assert (answer["accepted"], answer["duplicate"]) == (3, 0)
    assert flow.status()["workers"]["w"]["episodes"] == 2


def test_an_evaluation_is_opened_whole_or_not_at_all(tmp_path):
    class Dies(Exception):
        pass

    def held_out(index: int) -> Task:
        if index == 3 and broken:
            raise Dies
        return Task(f"held-{index}", "toy", index)

    broken = True
    tasks = grain.MapDataset.range(100).map(held_out)
    flow = Flow(resolve(configuration(), tmp_path), train_tasks=tasks, held_out_tasks=tasks)
    with pytest.raises(Dies):
        flow.report_serving("agent", 0)
    flow.close()
    broken = False
    flow = Flow(resolve(configuration(), tmp_path), train_tasks=tasks, held_out_tasks=tasks)
    flow.report_serving("agent", 0)
    assert len(flows.lease(flow, "w", 1000, "eval")) == 5


def test_what_an_algorithm_stumbles_over_is_taken_in_all_the_same(tmp_path):
    """The message is not played again, and counts once; who has stumbled is asked again when the run goes on."""
    config = configuration(algorithms={"dynamic_sampling": {}})
    flow = make_flow(tmp_path, config)
    flow.report_serving("agent", 0)
    keep, keeping = DynamicSampling.keep, []

    def stumbles_once(self, result):
        keeping.append(result.group_id)
        if len(keeping) == 2:
            raise RuntimeError("no room left")
        return keep(self, result)

    items = [(lease.lease_id, played(lease, version=0)) for lease in train_leases(flow)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicSampling, "keep", stumbles_once)
        with pytest.raises(
            AlgorithmError, match=r"config\.dataflow\.algorithms\.dynamic_sampling\.keep .*no room left"
        ):
            flows.accept_all(flow, items)
        flow.close()
        flow = make_flow(tmp_path, config)
        assert not any(flows.accept_all(flow, items))
        assert flows.credited(flow, "agent", 0) is None, "nobody differs: nothing is kept"
    assert keeping == ["train-00000000", "train-00000001", "train-00000001", *keeping[3:]]
    assert flow.status()["algorithms"]["dynamic_sampling"] == {"left_out_share": 1.0}
