"""Services that share no code with flowjax take the place of ours in a run, through the documented interface alone."""

import json
import subprocess
import sys
import time
from pathlib import Path

from flowjax.monitor.metrics import read_metrics

HERE = Path(__file__).parent
STEPS, GROUPS, MEMBERS = 6, 4, 4


def launched(runs: Path) -> subprocess.Popen[str]:
    """A launch of which only the dataflow is started."""
    command = [sys.executable, "-m", "flowjax.launch", "--config=configs/sokoban.py:nano", "--name=foreign"]
    options = {
        "runs": runs,
        "elsewhere": "('rollout', 'trainer')",
        "model.path": runs / "never-made",
        "rollout.group_size": MEMBERS,
        "trainer.groups_per_step": GROUPS,
        "trainer.steps": STEPS,
        "credit.name": "grpo",
        "credit.options": "{}",
        "eval.tasks": 40,
    }
    overrides = [f"--config.{name}={value}" for name, value in options.items()]
    return subprocess.Popen([*command, *overrides], cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True)


def started(folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *argv], cwd=folder, stdout=subprocess.PIPE, text=True)


def dataflow_url(run: Path) -> str:
    """Where the dataflow listens, once it does."""
    until = time.monotonic() + 90
    while not (run / "status-dataflow.json").exists():
        assert time.monotonic() < until, "the dataflow does not start"
        time.sleep(0.1)
    return json.loads((run / "endpoints.json").read_text())["dataflow"]


def test_a_foreign_rollout_service_and_a_foreign_trainer_finish_a_run(tmp_path: Path):
    versions, run = tmp_path / "version", tmp_path / "foreign"
    launch = launched(tmp_path)
    try:
        url = dataflow_url(run)
        trainer = started(tmp_path, str(HERE / "foreign_trainer.py"), url, str(versions), str(STEPS))
        rollout = started(tmp_path, str(HERE / "foreign_rollout.py"), url, str(versions))
        printed, _ = trainer.communicate(timeout=120)
        assert rollout.wait(timeout=60) == 0 == trainer.returncode
        told, _ = launch.communicate(timeout=60)
    finally:
        launch.terminate()
        launch.wait(timeout=30)
    assert launch.returncode == 0, told
    assert "held-out success after" in told
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["dataflow.log"]
    batches = [json.loads(line) for line in printed.splitlines()]
    assert [batch["version"] for batch in batches] == list(range(1, STEPS + 1))
    assert all(batch["rows"] == GROUPS * MEMBERS and batch["oldest"] <= 1 for batch in batches)
    evaluations = {line["version"]: line for line in read_metrics(run) if line["kind"] == "eval"}
    assert evaluations.keys() == {0, STEPS}
    assert evaluations[0]["high"] < evaluations[STEPS]["success_rate"]
