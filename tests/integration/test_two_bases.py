"""Two base models in one run, each with a vLLM of its own: policies on both, and a frozen judge."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flowjax.monitor.metrics import evaluation_lines, read_metrics
from flowjax.monitor.transcripts import batch_path, read_lines
from flowjax.report.episodes import batches_of

ROOT = Path(__file__).parents[2]
STEPS = 3


def run(folder: Path, name: str, *flags: str) -> dict[str, set[str]]:
    """A short run with hastily made base models. Returns the models that each engine has listed, by its role."""
    command = [
        sys.executable, "-m", "flowjax.launch", "--config=configs/math_pair.py:nano_two_bases", f"--name={name}",
        f"--config.runs={folder}", f"--config.model.path={folder / 'base'}",
        f"--config.bases.small.model.path={folder / 'small'}", "--config.warm_start.steps=10",
        "--config.warm_start.states=1500", f"--config.trainer.steps={STEPS}", "--config.trainer.groups_per_step=4",
        "--config.rollout.group_size=4", "--config.eval.tasks=16", "--config.optimizer.warmup_steps=0", *flags,
    ]  # fmt: skip
    listed: dict[str, set[str]] = {}
    with (folder / f"{name}.log").open("w") as log:
        launched = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while launched.poll() is None:
            for role, url in _engines(folder / name).items():
                listed.setdefault(role, set()).update(_models(url))
            time.sleep(0.1)
    assert launched.returncode == 0, (folder / f"{name}.log").read_text()[-4000:]
    return listed


def _engines(run_dir: Path) -> dict[str, str]:
    path = run_dir / "endpoints.json"
    endpoints = json.loads(path.read_text()) if path.exists() else {}
    return {role: url for role, url in endpoints.items() if role != "dataflow"}


def _models(url: str) -> set[str]:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=1) as answer:
            return {model["id"] for model in json.load(answer)["data"]}
    except OSError:  # not up yet, or busy
        return set()


def check_trained(run_dir: Path, policies: set[str]) -> None:
    """Each policy was trained to its end, on tokens that its engine had sampled from just these weights."""
    train = [line for line in read_metrics(run_dir) if line["kind"] == "train"]
    for policy in policies:
        lines = [line for line in train if line["policy"] == policy]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert all(line["trained_tokens"] > 0 and line["mismatch_kl"] < 1e-6 for line in lines), lines
        files = [batch_path(run_dir, policy, step) for step in batches_of(run_dir, policy)]
        turns = [turn for file in files for line in read_lines(file) for turn in line["turns"]]
        assert {turn["version"] for turn in turns} <= set(range(STEPS)) and any(turn["version"] for turn in turns)
    assert {line["policy"] for line in train} == policies
    evaluations = evaluation_lines(read_metrics(run_dir))
    assert [line["version"] for line in evaluations] == [0, STEPS]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_policies_on_two_bases_and_then_a_frozen_judge(tmp_path: Path):
    listed = run(tmp_path, "both")
    check_trained(tmp_path / "both", {"solver", "verifier"})
    assert listed["engine"] - {"base"} <= {f"solver@{version}" for version in range(STEPS + 1)}
    assert listed["engine-small"] - {"small"} <= {f"verifier@{version}" for version in range(STEPS + 1)}
    assert "solver@0" in listed["engine"] and "verifier@0" in listed["engine-small"]
    sizes = [json.loads((tmp_path / base / "config.json").read_text())["hidden_size"] for base in ("base", "small")]
    assert sizes == [128, 64]

    listed = run(
        tmp_path, "judged", "--config.policies={'solver': {}}", "--config.separate_trainers=False",
        "--config.agents={'solver': 'solver', 'verifier': 'small'}",
    )  # fmt: skip
    check_trained(tmp_path / "judged", {"solver"})
    assert listed["engine-small"] == {"small"}
    status = json.loads((tmp_path / "judged" / "status-rollout.json").read_text())
    assert status["failed_episodes"] == 0 and set(status["bases"]) == {"base", "small"}
