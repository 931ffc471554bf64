"""Several policies over one flow: each at its own rate, with its own groups, ages and batches."""

from pathlib import Path

import grain
import numpy as np
import pytest

from flowjax.config import default_config
from flowjax.dataflow.flow import Flow
from flowjax.monitor.metrics import read_metrics
from flowjax.records import Episode, Lease, Task, Trajectory, Turn
from flowjax.run import resolve
from tests.dataflow import flows

GROUPS, MEMBERS, STEPS = 2, 2, 6


def make_flow(
    folder: Path, eval_every_steps: int = 0, *, alike: bool = False, separate: bool = False, **dataflow
) -> Flow:
    """`alike`: both policies have the same number of steps and groups; `separate`: each has its own trainer."""
    config = default_config()
    config.separate_trainers = separate
    config.eval.every_steps = eval_every_steps
    config.rollout.group_size = MEMBERS
    config.trainer.update({"steps": STEPS, "groups_per_step": GROUPS})
    other = {} if alike else {"trainer": {"groups_per_step": 2 * GROUPS, "steps": 3}}
    config.policies = {"solver": {}, "verifier": other}
    config.eval.tasks = 3
    config.reward.components = {"success": 1.0}
    config.dataflow.update({"max_staleness": 1, **dataflow})
    tasks = grain.MapDataset.range(100).map(lambda index: Task(f"task-{index}", "toy", index))
    return Flow(resolve(config, folder), train_tasks=tasks, held_out_tasks=tasks)


def episode(lease: Lease, versions: dict[str, int], *, both: bool = False) -> Episode:
    """The solver is right in odd episodes; the verifier speaks only then, or always."""
    ids, logprobs = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
    right = float(lease.seed % 2)
    parts = []
    for policy, version in versions.items():
        turn = Turn(policy, version, ids, ids, logprobs, "stop", 1, 2, 0.0, True, True)
        if policy == "solver" or right or both:
            parts.append(Trajectory(f"{names[0]}/{policy}", *names[1:], [turn], {"success": right}, policy=policy))
    return Episode(*names, parts, {"success": right})


def play(flow: Flow, versions: dict[str, int], *, both: bool = False) -> int:
    leases = flows.lease(flow, "w", 1000)
    for lease in leases:
        flows.accept(flow, lease.lease_id, episode(lease, {**versions, **lease.versions}, both=both))
    return sum(lease.kind == "train" for lease in leases)


def serve(flow: Flow, policy: str, version: int) -> None:
    flow.batches.commit(policy, version)
    flow.report_serving(policy, version)


def test_nothing_is_played_until_every_policy_is_served(tmp_path):
    flow = make_flow(tmp_path)
    flow.report_serving("solver", 0)
    assert flows.lease(flow, "w", 10) == []
    flow.report_serving("verifier", 0)
    assert flows.lease(flow, "w", 10)


def test_a_policy_goes_on_while_another_stands_still(tmp_path):
    flow = make_flow(tmp_path)
    versions = {"solver": 0, "verifier": 0}
    for policy in versions:
        serve(flow, policy, 0)
    for step in range(STEPS):
        while (served := flows.credited(flow, "solver", step)) is None:
            assert play(flow, versions) > 0, "the verifier's trainer holds the solver up"
        rows = served[0].rows
        assert len(rows) == GROUPS * MEMBERS and {row.policy for row in rows} == {"solver"}
        assert all(step - row.versions.max() <= 1 for row in rows)
        versions["solver"] = step + 1
        serve(flow, "solver", step + 1)
    assert flow.status()["policies"]["verifier"]["committed"] == 0
    served, dropped = flows.credited(flow, "verifier", 0) or (None, 0)
    assert served is not None and dropped == 0
    assert {row.policy for row in served.rows} == {"verifier"}
    assert len(served.rows) == 2 * GROUPS * MEMBERS // 2, "one verdict in two episodes"


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("ahead", [False, True], ids=["fetched in time", "fetched ahead"])
def test_policies_that_take_turns_have_their_groups_in_common(tmp_path, ahead, max_staleness):
    """Each new version of one had as many groups opened as a step takes, which were too old at the other's turn."""
    flow = make_flow(tmp_path, alike=True, max_staleness=max_staleness)
    versions = {"solver": 0, "verifier": 0}
    for policy in versions:
        serve(flow, policy, 0)
    play(flow, versions, both=True)
    turns = [(policy, step) for step in range(STEPS) for policy in versions]
    fetched = 0
    for trained, (policy, step) in enumerate(turns):
        while fetched <= min(trained + ahead, len(turns) - 1):
            assert flows.credited(flow, *turns[fetched]), "nobody waits"
            fetched += 1
        play(flow, versions, both=True)
        serve(flow, policy, step + 1)
        versions[policy] = step + 1
        play(flow, versions, both=True)
    assert flow.ledger.count_groups() == GROUPS * STEPS
    assert [flow.ledger.count_dropped(policy) for policy in versions] == [0, 0]
    flow.close()


@pytest.mark.parametrize("separate", [False, True], ids=["one trainer", "two trainers"])
def test_a_policy_whose_trainer_has_no_batch_of_it_has_groups_of_its_own(tmp_path, separate):
    """The other one's turn may be long, or not come; with a trainer of its own a policy has no turn to wait for."""
    flow = make_flow(tmp_path, alike=True, separate=separate)
    versions = {"solver": 0, "verifier": 0}
    for policy in versions:
        serve(flow, policy, 0)
    play(flow, versions, both=True)
    for policy in versions:
        assert flows.credited(flow, policy, 0)
    play(flow, versions, both=True)
    versions["solver"] = 1
    serve(flow, "solver", 1)
    assert flows.credited(flow, "solver", 1)
    opened = play(flow, versions, both=True)
    assert opened == (GROUPS * MEMBERS if separate else 0), "the verifier's turn comes first where one has both"
    versions["solver"] = 2
    serve(flow, "solver", 2)
    assert opened + play(flow, versions, both=True) >= GROUPS * MEMBERS
    assert flows.credited(flow, "solver", 2)
    flow.close()


def test_groups_are_compared_within_a_policy(tmp_path):
    flow = make_flow(tmp_path)
    for policy in ("solver", "verifier"):
        serve(flow, policy, 0)
    play(flow, {"solver": 0, "verifier": 0})
    solver, _ = flows.credited(flow, "solver", 0) or (None, 0)
    verifier, _ = flows.credited(flow, "verifier", 0) or (None, 0)
    assert solver is not None and verifier is not None
    assert {float(np.sign(row.advantages[-1])) for row in solver.rows} == {-1.0, 1.0}
    assert all(abs(row.advantages[-1]) < 1e-3 for row in verifier.rows), "verdicts were all right: nothing to learn"


def test_an_evaluation_pins_all_versions_and_the_end_waits_for_all_policies(tmp_path):
    flow = make_flow(tmp_path)
    for policy in ("solver", "verifier"):
        serve(flow, policy, 0)
    evaluation = [lease for lease in flows.lease(flow, "w", 1000) if lease.kind == "eval"]
    assert [lease.versions for lease in evaluation] == [{"solver": 0, "verifier": 0}] * 3
    assert flow.report_serving("solver", 5) == 0, "its first version is still being evaluated"
    for lease in evaluation:
        flows.accept(flow, lease.lease_id, episode(lease, dict(lease.versions)))
    serve(flow, "solver", STEPS)
    assert not flow.finished
    serve(flow, "verifier", 3)
    assert not flow.finished
    play(flow, {"solver": STEPS, "verifier": 3})
    assert flow.finished
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "eval"]
    assert [line["versions"] for line in lines] == [{"solver": 0, "verifier": 0}, {"solver": 6, "verifier": 3}]
    right = [lease.seed % 2 for lease in evaluation]
    solver = lines[0]["policies"]["solver"]
    assert solver["reward_mean"] == solver["success_rate"] == np.mean(right)
    assert lines[0]["policies"]["verifier"]["trajectories"] == sum(right), "it spoke only then"


def test_evaluations_go_on_when_the_policy_with_the_fewest_steps_has_made_them(tmp_path):
    flow = make_flow(tmp_path, eval_every_steps=2)
    served = {"solver": 0, "verifier": 0}
    for policy, version in [("", 0), ("verifier", 2), ("solver", 2), ("verifier", 3), ("solver", 5), ("solver", STEPS)]:
        for name in [policy] if policy else served:
            served[name] = version
            serve(flow, name, version)
        for lease in flows.lease(flow, "w", 1000):
            if lease.kind == "eval":
                flows.accept(flow, lease.lease_id, episode(lease, dict(lease.versions)))
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "eval"]
    assert [line["versions"] for line in lines] == [
        {"solver": solver, "verifier": verifier} for solver, verifier in ((0, 0), (2, 2), (5, 3), (6, 3))
    ]
    assert [line["step"] for line in lines] == [0, 2, 5, 6]


def test_a_policy_far_behind_keeps_a_bounded_number_of_groups_and_the_rest_is_counted(tmp_path):
    flow = make_flow(tmp_path, max_ready_groups=4)
    versions = {"solver": 0, "verifier": 0}
    for policy in versions:
        serve(flow, policy, 0)
    for step in range(STEPS):
        while flows.credited(flow, "solver", step) is None:
            play(flow, versions)
        versions["solver"] = step + 1
        serve(flow, "solver", step + 1)
    verifier = flow.status()["policies"]["verifier"]
    assert verifier["ready_groups"] == 4
    assert verifier["dropped"]["overflow"] == verifier["dropped_groups"] > 0
    assert flows.credited(flow, "verifier", 0) is not None
