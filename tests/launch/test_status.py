"""What `--status` tells of a run folder."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from flowjax.config import ConfigError, default_config, save_run
from flowjax.launch.machine import hold
from flowjax.launch.status import render_status
from flowjax.monitor.metrics import MetricsWriter, write_status


def text(run: Path, now_s: float) -> str:
    console = Console(width=160, record=True, file=(run / "screen").open("w"))
    console.print(render_status(run, now_s))
    return console.export_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = default_config()
    config.policies = {"solver": {}, "verifier": {"trainer": {"steps": 40}}}
    save_run(config, tmp_path)
    return tmp_path


def test_roles_queues_versions_and_ages_are_shown(run: Path):
    rollout = {
        "time_s": 995.0,
        "in_flight": 12,
        "serving_versions": {"solver": 6, "verifier": 3},
        "bases": {"base": {"up": True}},
    }
    dataflow: dict = {"time_s": 900.0, "leased": 12, "failed": {"env_error": 3}}
    dataflow["workers"] = {"node-7": {"heard_s_ago": 2.0, "serving": {"solver": 6, "verifier": 3}, "episodes": 41}}
    dataflow["policies"] = {
        "solver": {
            "committed": 7,
            "ready_groups": 4,
            "dropped_groups": 1,
            "dropped": {"too_old": 1},
            "trained_ages": {"0": 30, "1": 10},
        }
    }
    for role, status in (("rollout", rollout), ("dataflow", dataflow)):
        (run / f"status-{role}.json").write_text(json.dumps(status))
    metrics = MetricsWriter(run)
    metrics.write("train", step=3, policy="verifier", success_rate=0.75, staleness_mean=0.5, staleness_max=1)
    metrics.write(
        "train", step=7, policy="solver", success_rate=0.25, staleness_mean=1.25, staleness_max=2, invalid_share=0.125
    )
    metrics.write("eval", step=0, versions={"solver": 0, "verifier": 0}, success_rate=0.5, low=0.4, high=0.6)
    lines = text(run, 1000.0).splitlines()
    (solver,) = [line for line in lines if line.startswith("│ solver")]
    assert [cell.strip() for cell in solver.strip("│").split("│")] == [
        "solver", "7/100", "7", "6", "1", "4", "", "1 (1 too old)", "0: 75 %, 1: 25 %", "2", "25.0 %",
        "12.5 %",
    ]  # fmt: skip
    (worker,) = [line for line in lines if "node-7" in line]
    assert "solver@6, verifier@3" in worker and "41" in worker and "0:02 ago" in worker
    (verifier,) = [line for line in lines if line.startswith("│ verifier")]
    assert "3/40" in verifier and "75.0 %" in verifier
    assert any("rollout" in line and "12 episodes in flight" in line and "engine up" in line for line in lines)
    assert any("dataflow" in line and "(away)" in line and "3 failed (env error)" in line for line in lines)
    assert any("solver@0, verifier@0" in line and "50.0 %" in line for line in lines)


def test_a_role_that_is_down_is_told_with_the_cause_and_its_restarts(run: Path):
    roles = {
        "engine": {"phase": "waiting", "restarts": 1, "detail": "killed by SIGKILL"},
        "dataflow": {"phase": "up", "restarts": 2, "detail": "exit status 1"},
        "trainer-solver": {"phase": "done", "restarts": 0, "detail": ""},
    }
    write_status(run, "launch", {"roles": roles})
    MetricsWriter(run).write("train", step=3, policy="solver", tokens_per_s=7.0)
    with hold(run):
        engine, dataflow, trainer = _states(text(run, 1000.0))
    assert engine == ["engine", "waiting, 1 restart (killed by SIGKILL)", "", ""]
    assert dataflow[:2] == ["dataflow", "up, 2 restarts"]
    assert trainer[:2] == ["trainer-solver", "done"] and "step 3" in trainer[3]
    engine, dataflow, trainer = _states(text(run, 1000.0))  # the launcher has been killed
    assert engine[1] == "gone, 1 restart (nothing supervises this run: go on with --resume)"
    assert dataflow[1].startswith("gone, 2 restarts")
    assert trainer[1] == "done"


def _states(shown: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    return [row for row in rows if row[0].startswith(("engine", "dataflow", "trainer"))]


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config.json cannot be read .* give the folder of a run"):
        render_status(tmp_path)
