"""Pictures of a run, from the files that a run leaves."""

import json
from pathlib import Path

import pytest

from flowjax.config import default_config, save_run
from flowjax.monitor.metrics import MetricsWriter
from flowjax.report import curves, divided_group, draw_state_graph, learning_curves, main, moving_average


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    config = default_config()
    config.reward.components = {"success": 1.0}
    save_run(config, folder)
    metrics = MetricsWriter(folder)
    metrics.write("eval", step=0, success_rate=0.2, low=0.1, high=0.3)
    for step in range(1, 5):
        metrics.write("train", step=step, success_rate=step / 5)
    (folder / "trajectories" / "agent").mkdir(parents=True)
    lines = [*episodes("even", [1, 0, 1, 0]), *episodes("lost", [0, 0, 0, 0])]
    (folder / "trajectories" / "agent" / "000003.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def episodes(group: str, successes: list[int]) -> list[dict]:
    def turn(state: int, following: int, terminal: bool) -> dict:
        keys = {"state_key": f"{state:016x}", "next_state_key": f"{following:016x}"}
        ids = {"prompt_ids": [1], "sampled_ids": [2], "logprobs": [-0.1]}
        return {"version": 0, "reward": 0.0, "valid": True, "terminal": terminal, **keys, **ids}

    return [
        {
            "trajectory_id": f"{group}/{index:03d}",
            "task_id": group,
            "status": "ok",
            "outcome": {"success": float(success)},
            "turns": [turn(10, 11 + success, False), turn(11 + success, 20 + success, bool(success))],
        }
        for index, success in enumerate(successes)
    ]


def test_moving_average_by_hand():
    assert moving_average([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_the_curve_has_a_line_and_its_evaluations(run: Path):
    picture = learning_curves([run])
    assert picture.count("<polyline") == 1
    assert picture.count("<circle") == 1
    assert ">run</text>" in picture


def test_every_policy_has_a_curve_of_its_own(tmp_path: Path):
    metrics = MetricsWriter(tmp_path)
    share = {"trajectories": 9, "success_rate": 0.5, "low": 0.4, "high": 0.6}
    policies = {"solver": share, "verifier": {"trajectories": 0}}
    metrics.write("eval", step=0, versions={"solver": 3, "verifier": 0}, policies=policies)
    for step in range(1, 4):
        metrics.write("train", step=step, policy="solver", success_rate=step / 5)
    metrics.write("train", step=1, policy="verifier", success_rate=0.9)
    solver, verifier = curves(tmp_path)
    assert [entry["success_rate"] for entry in solver.train] == [0.2, 0.4, 0.6]
    assert [entry["step"] for entry in solver.evaluations] == [3]
    assert [len(verifier.train), len(verifier.evaluations)] == [1, 0]
    assert learning_curves([tmp_path]).count("<polyline") == 2


def test_the_group_drawn_is_the_divided_one(run: Path):
    group = divided_group(run / "trajectories" / "agent" / "000003.jsonl")
    assert (group.group_id, len(group.trajectories)) == ("even", 4)
    picture = draw_state_graph(run)
    assert picture is not None
    assert picture.startswith("<svg")


def test_the_command_writes_both_pictures(run: Path, capsys):
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "learning_curve.svg"), str(run / "state_graph.svg")]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no training steps" in capsys.readouterr().err
