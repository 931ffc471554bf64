"""Dynamic sampling keeps batches coming nearly as fast as if every group were kept."""

import random
from pathlib import Path

import pytest

from flowjax.records import Lease
from tests.dataflow import flows
from tests.dataflow.test_flow import configuration, make_flow, played

GROUPS, MEMBERS, STEPS, WARM_UP, SLOTS = 16, 2, 18, 3, 1000
INFORMATIVE = 0.4  # share of groups whose rewards differ
TICKS = (5, 15)  # that an episode lasts


def simulate(folder: Path, max_staleness: int, *, share: float, seed: int = 0) -> tuple[float, int]:
    """Ticks that a step takes, and groups that are played in all: a trainer that needs no time, workers with room for
    all that may be played."""
    folder.mkdir()
    config = configuration(max_staleness=max_staleness, algorithms={"dynamic_sampling": {}}, keep_trajectories=False)
    config.rollout.group_size, config.eval.tasks = MEMBERS, 0
    config.trainer.update({"steps": STEPS, "groups_per_step": GROUPS})
    step, tick, started = 0, 0, 0
    flow, rng = make_flow(folder, config, clock=lambda: tick), random.Random(seed)
    flow.report_serving("agent", 0)
    playing: list[tuple[int, Lease, int]] = []
    while step < STEPS:
        playing += [(tick + rng.randint(*TICKS), lease, step) for lease in flows.lease(flow, "w", SLOTS - len(playing))]
        tick += 1
        ended = [item for item in playing if item[0] <= tick]
        playing = [item for item in playing if item[0] > tick]
        flows.accept_all(flow, [(lease.lease_id, outcome(lease, version, share)) for _, lease, version in ended])
        while step < STEPS and flows.take(flow, "agent", step):
            step += 1
            flow.batches.commit("agent", step)
            flow.report_serving("agent", step)
            started = tick if step == WARM_UP else started
    played_groups = flow.ledger.count_groups()
    flow.close()
    return (tick - started) / (STEPS - WARM_UP), played_groups


def outcome(lease: Lease, version: int, share: float):
    informative = random.Random(lease.group_id).random() < share
    return played(lease, version=version, success=float(informative and lease.seed % 2), turns=1)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_replacements_are_played_before_they_are_missing(tmp_path, max_staleness):
    possible, _ = simulate(tmp_path / "all", max_staleness, share=1.0)
    found, groups = simulate(tmp_path / "some", max_staleness, share=INFORMATIVE)
    print(f"staleness {max_staleness}: {found:.1f} ticks a step, {possible:.1f} possible; {groups} groups")
    assert found <= 1.3 * possible, f"{found:.1f} ticks a step where {possible:.1f} are possible"
    assert groups <= 1.5 * GROUPS * STEPS / INFORMATIVE, "not many more are played than it takes"
