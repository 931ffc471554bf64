"""Every process of a run is killed, again and again, and the run comes to the same sound end."""

import random
import time

import pytest
from chaos_run import ROLES, ChaosRun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_each_role_killed_once_in_a_run(tmp_path):
    with ChaosRun(tmp_path, steps=14, step_s=0.5) as run:
        for number, role in enumerate(("engine", "dataflow", "rollout", "trainer")):
            run.wait_for(2 + 3 * number, timeout_s=120)
            run.kill(role)
        run.finish(timeout_s=180)
        assert all(run.starts[role] >= 2 for role in ROLES)
        run.assert_sound()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_twenty_random_kills_in_a_run(tmp_path, seed):
    dice = random.Random(seed)
    with ChaosRun(tmp_path, steps=100, step_s=0.5) as run:
        run.wait_for(1, timeout_s=120)
        for _ in range(20):
            time.sleep(dice.uniform(0.1, 6.0))
            run.revive()
            assert run.version < run.steps, "the run was over before the last kill"
            run.kill(dice.choice(ROLES))
        run.finish(timeout_s=400)
        run.assert_sound()
