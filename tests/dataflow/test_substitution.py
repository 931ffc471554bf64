"""Services that share no code with flowjax take part in a run, through the documented interface alone."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from flowjax.config import default_config, save_run
from flowjax.launch.machine import free_port
from flowjax.monitor.metrics import read_metrics

HERE = Path(__file__).parent
STEPS, GROUPS, MEMBERS = 6, 4, 4


def run_folder(folder: Path, port: int) -> Path:
    config = default_config()
    config.name = "foreign"
    config.env.module = "flowjax.envs.sokoban"
    config.rollout.group_size = MEMBERS
    config.trainer.update({"steps": STEPS, "groups_per_step": GROUPS})
    config.eval.tasks = 40
    config.reward.components = {"success": 1.0}
    save_run(config, folder)
    (folder / "endpoints.json").write_text(json.dumps({"dataflow": f"http://127.0.0.1:{port}"}))
    return folder


def started(folder: Path, *argv: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, *argv], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def wait_until_up(url: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/status").close()
            return
        except OSError:
            assert time.monotonic() < until, "the dataflow does not start"
            time.sleep(0.1)


def test_a_foreign_rollout_service_and_a_foreign_trainer_finish_a_run(tmp_path: Path):
    port = free_port()
    url, versions = f"http://127.0.0.1:{port}", tmp_path / "version"
    run = run_folder(tmp_path, port)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    dataflow = subprocess.Popen([sys.executable, "-m", "flowjax.dataflow", f"--run={run}"], env=environment)
    try:
        wait_until_up(url)
        trainer = started(tmp_path, str(HERE / "foreign_trainer.py"), url, str(versions), str(STEPS))
        rollout = started(tmp_path, str(HERE / "foreign_rollout.py"), url, str(versions))
        printed, _ = trainer.communicate(timeout=120)
        assert rollout.wait(timeout=60) == 0 == trainer.returncode
    finally:
        dataflow.terminate()
        dataflow.wait(timeout=30)
    batches = [json.loads(line) for line in printed.splitlines()]
    assert [batch["version"] for batch in batches] == list(range(1, STEPS + 1))
    assert all(batch["rows"] == GROUPS * MEMBERS and batch["oldest"] <= 1 for batch in batches)
    evaluations = {line["version"]: line for line in read_metrics(run) if line["kind"] == "eval"}
    assert evaluations.keys() == {0, STEPS}
    assert evaluations[0]["high"] < evaluations[STEPS]["success_rate"]
