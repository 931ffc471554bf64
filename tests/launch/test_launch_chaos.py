"""A whole run with a real vLLM, and processes of it killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.transcripts import read_lines
from flowjax.rollout.episode import EpisodeFile

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
STEPS = 8
RECIPE = f"""
from ml_collections import ConfigDict
from flowjax.config import default_config

def get_config():
    config = default_config()
    config.name = "chaos"
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({{"rows": 6, "columns": 6, "boxes": 1}})
    config.env.prompt = "compact"
    config.env.max_turns = 6
    config.model.path = "nano"
    config.model.nano = ConfigDict({{"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_size": 128}})
    config.model.dtype = config.engine.dtype = "float32"
    config.warm_start.states, config.warm_start.steps, config.warm_start.batch_rows = 500, 60, 32
    config.engine.max_model_tokens = 128
    config.engine.kv_cache_bytes = 64 * 1024**2
    config.policy.lora.rank = 8
    config.rollout.max_prompt_tokens, config.rollout.max_new_tokens = 64, 2
    config.rollout.group_size, config.trainer.groups_per_step = 4, 4
    config.trainer.steps, config.trainer.row_tokens, config.trainer.micro_batch_rows = {STEPS}, 128, 8
    config.trainer.keep_checkpoints = {STEPS}
    config.reward.components = ConfigDict({{"success": 1.0}})
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 0
    config.eval.tasks = 16
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the runs of this file share a recipe and a base model."""
    place = tmp_path_factory.mktemp("chaos")
    (place / "recipe.py").write_text(RECIPE)
    return place


def launch(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flowjax.launch", *flags]
    out = (folder / "output.txt").open("w")
    return subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)


def wait_for(
    condition: Callable[[], object], run: subprocess.Popen[str], folder: Path, timeout_s: float = 600.0
) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert run.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < until, (folder / "output.txt").read_text()
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    below = parents.get(pid, [])
    return [*below, *(deeper for child in below for deeper in descendants(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_of(run_dir: Path) -> list[int]:
    return [entry["step"] for entry in read_metrics(run_dir) if entry["kind"] == "train"]


def assert_complete(run_dir: Path) -> None:
    """Every step once and in order, every episode trained on at most once, both evaluations in."""
    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    evals = {entry["step"]: entry["episodes"] for entry in read_metrics(run_dir) if entry["kind"] == "eval"}
    assert evals == {0: 16, STEPS: 16}
    files = sorted((run_dir / "trajectories").glob("*/*.jsonl.gz"))
    assert len(files) == STEPS
    trained = [line["trajectory_id"] for file in files for line in read_lines(file)]
    assert len(trained) == STEPS * 4 * 4
    assert len(set(trained)) == len(trained)
    train = [entry for entry in read_metrics(run_dir) if entry["kind"] == "train"]
    assert all(entry["staleness_max"] <= 1 for entry in train)
    compared = [entry["mismatch_kl"] for entry in train if "mismatch_kl" in entry]
    # A trainer that has just resumed has only its newest version at hand to compare with the engine's.
    assert len(compared) >= STEPS - 1
    assert max(compared) < 1e-5


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_the_run_finishes(folder):
    run_dir = folder / "runs" / "engine"
    run = launch(folder, f"--config={folder / 'recipe.py'}", "--name=engine")
    try:
        wait_for(lambda: len(steps_of(run_dir)) >= 2, run, folder)
        everything = descendants(run.pid)
        (engine,) = [
            pid
            for pid in everything
            if b"api_server" in (command := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"guard.py" not in command
        ]
        os.kill(engine, signal.SIGKILL)
        assert run.wait(timeout=600) == 0, (folder / "output.txt").read_text()
    finally:
        run.kill()
        run.wait()
    events = [(e["role"], e["event"]) for e in read_metrics(run_dir) if e["kind"] == "run"]
    assert events.count(("engine", "down")) == 1
    assert events.count(("engine", "restart")) == 1
    assert events.count(("engine", "up")) == 2
    assert not [event for event in events if event[0] != "engine" and event[1] in ("down", "restart")]
    assert_complete(run_dir)
    assert "held-out success after" in (folder / "output.txt").read_text()
    time.sleep(1)
    assert not [pid for pid in everything if alive(pid)]


def test_a_killed_run_leaves_nothing_behind_and_resumes(folder):
    run_dir = folder / "runs" / "whole"
    run = launch(folder, f"--config={folder / 'recipe.py'}", "--name=whole")
    try:
        wait_for(lambda: len(steps_of(run_dir)) >= 3, run, folder)
        everything = descendants(run.pid)
        assert len(everything) >= 8  # four roles behind four guards
    finally:
        run.kill()
        run.wait()
    until = time.monotonic() + 10
    while any(alive(pid) for pid in everything):
        assert time.monotonic() < until, "processes outlived their supervisor"
        time.sleep(0.1)
    assert len(steps_of(run_dir)) < STEPS
    losses = {e["step"]: e["loss"] for e in read_metrics(run_dir) if e["kind"] == "train"}
    resumed = launch(folder, f"--resume={run_dir}")
    try:
        assert resumed.wait(timeout=600) == 0, (folder / "output.txt").read_text()
    finally:
        resumed.kill()
        resumed.wait()
    assert_complete(run_dir)
    kept = {e["step"]: e["loss"] for e in read_metrics(run_dir) if e["kind"] == "train"}
    # The last step is taken again when its checkpoint was not committed, with the same batch.
    assert {step: kept[step] for step in losses} == pytest.approx(losses, rel=1e-3, abs=1e-6)
    output = (folder / "output.txt").read_text()
    assert "held out, version 0" not in output  # told by the first run
    assert output.count(f"step {STEPS}/{STEPS}") == 1


def evaluate(folder: Path, checkpoint: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return evaluate_as(folder, f"--config={folder / 'recipe.py'}", f"--checkpoint={checkpoint}", *flags)


def evaluate_as(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowjax.evaluate", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)


def test_a_checkpoint_plays_the_held_out_tasks_and_twice_the_same(folder):
    run_dir = folder / "runs" / "whole"
    asked = ["--config.eval.tasks=24", "--config.eval.samples=2"]
    done = evaluate(folder, run_dir / "checkpoints" / "agent" / str(STEPS), *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out success" in done.stdout
    results = json.loads((run_dir / "evaluations" / str(STEPS) / "results.json").read_text())
    assert (results["episodes"], results["unfinished"], results["played"]["name"]) == (48, 0, f"agent@{STEPS}")
    again = evaluate_as(folder, str(run_dir), *asked, f"--out={folder / 'again'}")
    assert again.returncode == 0, again.stdout + again.stderr
    lines = [(where / "held_out" / f"agent@{STEPS}.jsonl").read_text() for where in
             (run_dir / "evaluations" / str(STEPS), folder / "again")]  # fmt: skip
    assert lines[0] == lines[1] and lines[0].count("\n") == 48


def test_an_evaluation_that_is_killed_goes_on_and_one_that_is_done_is_only_shown(folder):
    run_dir, argv = folder / "runs" / "whole", ["--base", "--config.eval.temperature=0", "--config.eval.tasks=200"]
    command = [
        sys.executable,
        "-m",
        "flowjax.evaluate",
        str(run_dir),
        *argv,
        "--config.rollout.max_concurrent_episodes=1",
    ]
    with (folder / "output.txt").open("w") as out:
        killed = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)
    file = run_dir / "evaluations" / "base" / "episodes.msgpack"
    try:
        wait_for(lambda: file.exists() and file.stat().st_size > 20_000, killed, folder)
    finally:
        killed.kill()
        killed.wait()
    there = set(EpisodeFile(file).read())
    done = evaluate_as(folder, str(run_dir), *argv)
    assert done.returncode == 0 and f"base: {len(there)} of 200 episodes" in done.stdout, done.stdout + done.stderr
    assert 0 < len(there) < 200 == len(EpisodeFile(file).read())
    shown = evaluate_as(folder, str(run_dir), *argv)
    assert shown.returncode == 0 and "engine" not in shown.stdout and "held-out success" in shown.stdout


def test_what_cannot_be_evaluated_is_refused_in_a_line(folder):
    checkpoints = folder / "runs" / "whole" / "checkpoints" / "agent"
    missing = evaluate(folder, checkpoints / "77")
    assert missing.returncode == 2
    assert "not a committed checkpoint" in missing.stderr
    other = evaluate(folder, checkpoints / "1", "--config.policy.lora.rank=4")
    assert other.returncode == 2
    assert "config.policy" in other.stderr
    for file in (checkpoints / "1" / "adapter").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    broken = evaluate(folder, checkpoints / "1")
    assert broken.returncode == 2
    assert str(checkpoints / "1") in broken.stderr
    assert "Traceback" not in broken.stderr
