"""The benchmark of data algorithms: what was spent until a target is met."""

import json
from pathlib import Path

import numpy as np
import pytest

from flowjax.config import default_config, save_run
from tests.benchmarks.data_algorithms import Curve, curve, row

RISING = Curve(np.array([0.2, 0.4, 0.8, 0.6]), {"rollouts": np.array([0.0, 100.0, 300.0, 500.0])})


@pytest.mark.parametrize(("target", "rollouts"), [(0.1, 0.0), (0.3, 50.0), (0.4, 100.0), (0.7, 250.0), (0.81, None)])
def test_what_was_spent_is_read_off_the_first_crossing(target: float, rollouts: float | None):
    spent = RISING.until(target)
    assert spent is None if rollouts is None else spent == pytest.approx({"rollouts": rollouts})


def test_a_run_is_read_from_its_own_lines(tmp_path: Path):
    config = default_config()
    config.rollout.group_size = 8
    save_run(config, tmp_path)
    lines = [
        {"kind": "eval", "step": 0, "success_rate": 0.2, "time_s": 10.0},
        {"kind": "batch", "step": 5, "tasks": 90, "time_s": 14.0},
        {"kind": "train", "step": 5, "time_s": 15.0},
        {
            "kind": "eval",
            "step": 5,
            "success_rate": 0.6,
            "time_s": 19.0,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = curve(tmp_path)
    assert found.until(0.4) == pytest.approx({"rollouts": 360.0, "steps": 2.5, "seconds": 2.5})
    assert row("nano_greso", [found, found], 0.4).startswith(
        "| greso | 20 20 % | 60 60 % | 2 of 2 | 360 ± 0 (360, 360) |"
    )
