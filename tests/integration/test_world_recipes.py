"""Every world's nano recipe, a few steps from its expert to a trained adapter, against a real vLLM."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowjax.config import load_run
from flowjax.monitor.metrics import evaluation_lines, read_metrics
from flowjax.monitor.transcripts import read_lines, whole_prompts

ROOT = Path(__file__).parents[2]
WINDOW = ("alfworld:nano", "code:nano", "webshop:nano", "search:nano", "sokoban:nano", "math:nano", "canvas:nano")
APPEND = (
    "alfworld:nano_append",
    "canvas:nano_append",
    "math:nano_calculator",
    "search:nano_append",
    "sokoban:nano_append",
    "webshop:nano_append",
)
STEPS = 3


def train(recipe: str, folder: Path) -> Path:
    """A short run of the recipe with a hastily made base model; returns its folder."""
    world, variant = recipe.split(":")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "flowjax.launch",
            f"--config=configs/{world}.py:{variant}",
            "--config.name=run",
            f"--config.runs={folder}",
            f"--config.model.path={folder / 'base'}",
            "--config.warm_start.steps=10",
            "--config.warm_start.states=1500",
            f"--config.trainer.steps={STEPS}",
            "--config.trainer.groups_per_step=4",
            "--config.rollout.group_size=4",
            "--config.eval.tasks=16",
            "--config.optimizer.warmup_steps=0",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


def trained_turns(run: Path) -> list[list[dict[str, Any]]]:
    """Turns of every trajectory that was trained on, with whole prompts."""
    files = sorted((run / "trajectories").glob("*/*.jsonl.gz"))
    every = [line["turns"] for file in files for line in read_lines(file)]
    return [
        [{**turn, "prompt_ids": prompt} for turn, prompt in zip(turns, whole_prompts(turns), strict=True)]
        for turns in every
    ]


def check(run: Path) -> None:
    """The run trained on what it played, on the very tokens that the engine sampled."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["trained_tokens"] > 0 and line["skipped_updates"] == 0
        assert line["mismatch_kl"] < 1e-6, "sampler and trainer disagree"
    evaluations = evaluation_lines(read_metrics(run))
    assert [(line["version"], line["episodes"]) for line in evaluations] == [(0, 16), (STEPS, 16)]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("recipe", WINDOW)
def test_a_world_feeds_the_trainer_turn_by_turn(tmp_path: Path, recipe: str):
    run = train(recipe, tmp_path)
    check(run)
    assert load_run(run).env.context == "window"
    assert all(turns for turns in trained_turns(run))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("recipe", APPEND)
def test_a_world_feeds_the_trainer_in_one_conversation(tmp_path: Path, recipe: str):
    run = train(recipe, tmp_path)
    check(run)
    pairs = [(before, after) for turns in trained_turns(run) for before, after in itertools.pairwise(turns)]
    assert pairs, "no episode had a second turn"
    for before, after in pairs:
        so_far = before["prompt_ids"] + before["sampled_ids"]
        assert after["prompt_ids"][: len(so_far)] == so_far
