"""With a staleness of 0 the batches are, to the bit, those of a loop that plays, credits and trains in turn."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import grain
import numpy as np
import pytest

from flowjax.config import default_config
from flowjax.dataflow.batches import credit_batch
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.tasks import episode_seed, task_at
from flowjax.records import Episode, Group, Lease, Task, TokenRow, Trajectory, Turn
from flowjax.run import resolve
from tests.dataflow import flows

STEPS, GROUPS, MEMBERS = 4, 3, 4
TASKS = grain.MapDataset.range(10).map(lambda index: Task(f"task-{index}", "toy", index)).shuffle(7).repeat()


def configuration(policies: Sequence[str]):
    config = default_config()
    config.rollout.group_size = MEMBERS
    config.trainer.update({"steps": STEPS, "groups_per_step": GROUPS})
    config.policies = {policy: {} for policy in policies}
    config.eval.tasks = 0
    config.reward.components = {"success": 1.0}
    config.dataflow.max_staleness = 0
    return config


def trajectories(names: tuple[str, str, str, int], versions: Mapping[str, int]) -> list[Trajectory]:
    """What the policies of these versions do under a seed: other versions would sample otherwise."""
    made = []
    for number, (policy, version) in enumerate(versions.items()):
        rng = np.random.default_rng([names[3], version, number])
        turns = []
        for last in (False, True):
            prompt, sampled = (rng.integers(0, 99, rng.integers(1, 6)).astype(np.int32) for _ in range(2))
            logprobs = -rng.random(len(sampled), dtype=np.float32)
            turns.append(Turn(policy, version, prompt, sampled, logprobs, "stop", 1, 2, 0.0, True, last))
        outcome = {"success": float(rng.random() < 0.5)}
        made.append(Trajectory(f"{names[0]}/{policy}", *names[1:], turns, outcome, policy=policy))
    return made


def loop(config, policies: Sequence[str], step: int) -> dict[str, list[TokenRow]]:
    """Step `step` of a synchronous loop: the next tasks in their order, every policy at version `step`."""
    groups: dict[str, list[Group]] = {policy: [] for policy in policies}
    for position in range(step * GROUPS, (step + 1) * GROUPS):
        group_id, task = f"train-{position:08d}", task_at(TASKS, position)
        parts = []
        for member in range(MEMBERS):
            seed = episode_seed(config.seed, position, member)
            names = f"{group_id}/{member:03d}", group_id, task.task_id, seed
            parts += trajectories(names, dict.fromkeys(policies, step))
        for policy in policies:
            groups[policy].append(Group(group_id, task, [part for part in parts if part.policy == policy]))
    return {policy: list(credited(config, policy, groups[policy])) for policy in policies}


def credited(config, policy: str, groups: Sequence[Group]) -> Sequence[TokenRow]:
    own = resolve(config).policies[policy]
    components, options = own.reward.components.to_dict(), own.credit.options.to_dict()
    return credit_batch(groups, components=components, estimator=own.credit.name, options=options).rows


@pytest.mark.parametrize("policies", [("agent",), ("solver", "verifier")])
@pytest.mark.parametrize("seed", range(3))
def test_an_eager_run_is_the_loop(tmp_path: Path, policies, seed):
    """Workers lease at every chance and hand in in any order; the dataflow is killed now and then."""
    rng, config = random.Random(seed), configuration(policies)
    flow, playing = None, []
    for step in range(STEPS):
        served: dict[str, Sequence[TokenRow]] = {}
        while len(served) < len(policies):
            if flow is None or rng.random() < 0.1:
                if flow is not None:
                    flow.close()
                flow = Flow(resolve(config, tmp_path), train_tasks=TASKS, held_out_tasks=TASKS)
                for policy in policies:
                    flow.report_serving(policy, step)
            playing += flows.lease(flow, "w", rng.randint(1, 8))
            rng.shuffle(playing)
            for lease in [playing.pop() for _ in range(min(len(playing), rng.randint(0, 4)))]:
                flows.accept(flow, lease.lease_id, played(lease, dict.fromkeys(policies, step)))
            for policy in policies:
                if policy not in served and (batch := flows.credited(flow, policy, step)):
                    served[policy] = batch[0].rows
        assert flow is not None and not playing
        for policy, rows in loop(config, policies, step).items():
            assert_equal(served[policy], rows)
        for policy in policies:
            flow.batches.commit(policy, step + 1)
        for policy in policies:
            flow.report_serving(policy, step + 1)


def played(lease: Lease, versions: Mapping[str, int]) -> Episode:
    names = lease.episode_id, lease.group_id, lease.task.task_id, lease.seed
    return Episode(*names, trajectories(names, versions), {})


def assert_equal(rows: Sequence[TokenRow], others: Sequence[TokenRow]) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert (row.policy, row.trajectory_tokens) == (other.policy, other.trajectory_tokens)
        for name in ("tokens", "sampled", "logprobs", "advantages", "versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(other, name), name)
