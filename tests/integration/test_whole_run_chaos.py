"""A launched run, all of it real, whose processes are killed twenty times and more, comes to the same sound end."""

import re
from collections import Counter

import pytest
from whole_run import POLICIES, STEPS, WholeRun, plan
from whole_run_checks import assert_sound

from flowjax.monitor.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Where the first run leaves the base model for those after it."""
    return tmp_path_factory.mktemp("base") / "nano"


CASES = [
    pytest.param(0, False, id="seed 0"),
    *(pytest.param(seed, False, id=f"seed {seed}", marks=pytest.mark.soak) for seed in (1, 2)),
    pytest.param(0, True, id="separate trainers", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("seed", "separate"), CASES)
def test_twenty_kills_in_a_whole_run(tmp_path, base, seed, separate):
    trainers = tuple(f"trainer-{policy}" for policy in POLICIES) if separate else ("trainer",)
    roles = ("engine", "dataflow", "rollout", *trainers)
    with WholeRun(tmp_path, base, seed, f"--config.separate_trainers={separate}") as run:
        run.wait_until_up()
        first, *others = plan(seed, roles)
        run.strike(first)
        run.wait_until_told(first.role)
        for kill in others:
            run.strike(kill)
        run.finish(timeout_s=900)
        print("\n".join(run.told))
    assert_sound(run.run_dir)
    for observer, versions in run.seen.items():
        assert versions == sorted(versions), f"{observer} went back: {versions}"
        assert versions[-1] == STEPS, observer
    events = [(entry["role"], entry["event"]) for entry in read_metrics(run.run_dir) if entry["kind"] == "run"]
    died = Counter(role for role, event in events if event == "down")
    assert all(0 < died[role] <= run.killed[role] for role in roles), f"{died} died, {run.killed} were killed"
    resumed = max(index for index, (_, event) in enumerate(events) if event == "start")
    restarted = Counter(role for role, event in events[resumed:] if event == "restart")
    (restarts,) = re.findall(r"restarts +│ (.*?) +│", run.output)  # in the summary
    assert {role: int(n) for role, n in (each.rsplit(" ", 1) for each in restarts.split(", "))} == restarted
