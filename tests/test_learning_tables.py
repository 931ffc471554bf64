"""Benchmarks that compare what runs learn: curves, what was spent until a target is met, and the tables."""

import json
from pathlib import Path

import numpy as np
import pytest

from flowjax.config import default_config, save_run
from flowjax.credit.estimators import check_options
from flowjax.launch import command_line
from flowjax.launch.checks import check_config
from flowjax.monitor.held_out import HeldOutEpisode, write_held_out
from tests.benchmarks import algorithms, learning, staleness
from tests.benchmarks.data_algorithms import row
from tests.benchmarks.runs import Curve, curve

RISING = Curve(np.array([0.2, 0.4, 0.8, 0.6]), {"rollouts": np.array([0.0, 100.0, 300.0, 500.0])})


@pytest.mark.parametrize(("target", "rollouts"), [(0.1, 0.0), (0.3, 50.0), (0.4, 100.0), (0.7, 250.0), (0.81, None)])
def test_what_was_spent_is_read_off_the_first_crossing(target: float, rollouts: float | None):
    spent = RISING.until(target)
    assert spent is None if rollouts is None else spent == pytest.approx({"rollouts": rollouts})


def finished(tmp_path: Path) -> Path:
    """A run folder as a finished run leaves it, as far as the tables read it."""
    ends = {"entropy": 0.2, "invalid_share": 0.1}
    config = default_config()
    config.rollout.group_size = 8
    save_run(config, tmp_path)
    lines = [
        {"kind": "eval", "step": 0, "success_rate": 0.2, "time_s": 10.0},
        {"kind": "batch", "step": 5, "tasks": 90, "time_s": 14.0},
        {"kind": "train", "step": 4, "trained_tokens": 300.0, "time_s": 14.5, **ends},
        {"kind": "train", "step": 5, "trained_tokens": 500.0, "time_s": 15.0, **ends},
        {"kind": "eval", "step": 5, "success_rate": 0.6, "time_s": 19.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"code": {"commit": "0123456789ab"}, "machine": {"cpus_allowed": 2, "cpu": "Some CPU"}}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [start]}))
    return tmp_path


def test_a_run_is_read_from_its_own_lines(tmp_path: Path):
    found = curve(finished(tmp_path))
    assert found.until(0.4) == pytest.approx({"rollouts": 360.0, "steps": 2.5, "tokens": 400.0, "seconds": 2.5})
    assert row("nano_greso", [found, found], 0.4).startswith(
        "| greso | 20 20 % | 60 60 % | 2 of 2 | 360 ± 0 (360, 360) |"
    )


def test_area_is_the_mean_over_tokens_not_over_evaluations():
    uneven = Curve(np.array([0.0, 1.0, 1.0]), {"tokens": np.array([0.0, 100.0, 400.0])})
    assert learning.area(uneven) == pytest.approx((0.5 * 100 + 300) / 400)


@pytest.mark.parametrize("name", algorithms.ESTIMATORS)
def test_compared_estimators_exist_with_their_options(name: str):
    check_options(name, algorithms.OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", staleness.OBJECTIVES)
def test_compared_objectives_are_runs_that_the_launcher_takes(name: str):
    fields = [f"--config.{field}={value}" for field, value in staleness.OBJECTIVES[name].items()]
    config, _ = command_line.parse(["--config=configs/sokoban.py:nano", *fields])
    assert check_config(config) == []


def test_the_table_says_what_the_evaluations_hold(tmp_path: Path):
    rng = np.random.default_rng(0)
    runs: dict[str, list[Path]] = {"rewardflow": [], "grpo": []}
    for name, chance in (("rewardflow", 0.8), ("grpo", 0.3)):
        for seed in range(3):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            runs[name].append(finished(folder))
            for side in ("base", "trained"):
                for how in ("greedy", "sampled"):
                    own = (side, how) == ("trained", "sampled")  # the last one beside training
                    evaluation = folder if own else folder / "skills" / f"{side}-{how}"
                    evaluation.mkdir(parents=True, exist_ok=True)
                    (evaluation / "results.json").touch()
                    wins = rng.random(200) < (chance if side == "trained" else 0.1)
                    episodes = [
                        HeldOutEpisode(str(task), "", "", 0, "ok", float(won), 3, 6, {}, {})
                        for task, won in enumerate(wins)
                    ]
                    write_held_out(evaluation, "agent@5", episodes)
    text = learning.table("estimator", runs, tasks=200)
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines] == ["estimator", "(base)", "rewardflow", "grpo"]
    assert {len(line) for line in lines} == {len(learning.COLUMNS) + 3}
    shares = [float(line[2].split("%")[0]) for line in lines[1:]]
    assert shares == pytest.approx([10, 80, 30], abs=6)
    assert "grpo (A) and rewardflow (B), greedy: -" in text and "is lower than B's" in text
    assert (
        learning.picture({name: [curve(run) for run in found] for name, found in runs.items()}).count("<polyline") == 2
    )
