"""Every `:qwen3_*` recipe for three steps with a stand-in for Qwen3, thinking on and off, against a real vLLM on CPUs.

A recipe keeps its world, prompts, workflow, estimator, adapter and objective. What the machine lacks is replaced: data
by generated ones, GPUs by one core, lengths and batches by what fits it.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from flowjax.config import load_run
from flowjax.launch.__main__ import read_request
from flowjax.launch.checks import check_config
from flowjax.launch.probe import inspect_run
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.transcripts import read_lines, whole_prompts

sys.path.append(str(Path(__file__).parents[1] / "models"))

from qwen3_stand_in import make_stand_in

ROOT = Path(__file__).parents[2]
STEPS = 3
SUMS: dict[str, object] = {"env.options.path": ""}
# In place of data that are downloaded for a real run.
DATA: dict[str, dict[str, object]] = {
    "alfworld": {
        "env.options": {
            "path": "generated",
            "held_out": "seen",
            "task_types": ("pick_and_place_simple",),
            "scenes": tuple(range(407, 413)),
            "clutter": 0.2,
            "games_kept": 8,
        },
        "env.train_tasks": 8,
        "env.step_timeout_s": 60.0,
    },
    "canvas": {
        "env.options.path": "",
        "env.options.turns": 3,
        "env.options.step_s": 60.0,
        "env.step_timeout_s": 90.0,
        "engine.max_model_tokens": 8192,
    },
    "code": {"env.options": {"kinds": ("int",), "steps": 2}, "env.step_timeout_s": 245.0},
    "code_pair": {"env.options": {"kinds": ("int",), "steps": 2}, "env.step_timeout_s": 485.0},
    "math": SUMS,
    "math_efficient": SUMS,
    "math_pair": SUMS,
    "math_plan": SUMS,
    "math_router": {
        **SUMS,
        "bases": {},
        "agents": {"router": "router", "small": "base", "large": "base"},
    },  # one engine
    "math_select": SUMS,
    "math_spawn": SUMS,
    "search": {"env.options": {"documents": 200, "hops": 2, "topk": 1}, "env.train_tasks": 64},
    "sokoban": {},
    "webshop": {"env.options": {"path": "", "products": 40}},
}
MACHINE: dict[str, object] = {
    "model.dtype": "float32",
    "engine.dtype": "float32",
    "engine.tensor_parallel": 1,
    "engine.kv_cache_bytes": 1024**3,
    "engine.max_concurrent_sequences": 16,
    "engine.max_model_tokens": 3096,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "env.workers": 1,
    "env.max_turns": 3,
    "rollout.group_size": 2,
    "rollout.max_concurrent_episodes": 8,
    "rollout.max_prompt_tokens": 3072,
    "rollout.max_new_tokens": 24,
    "trainer.row_tokens": 3096,
    "trainer.groups_per_step": 2,
    "trainer.micro_batch_rows": 1,
    "trainer.trim_micro_batches": True,
    "trainer.steps": STEPS,
    "optimizer.warmup_steps": 0,
    "eval.tasks": 2,
}
RECIPES = [f"{world}:{size}" for world in DATA for size in ("qwen3_8b", "qwen3_0_6b")]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("model") / "Qwen3-10M")


def arguments(recipe: str, folder: Path, stand_in: Path, *, thinking: bool) -> list[str]:
    """Those of the recipe's launch in `folder`."""
    world, variant = recipe.split(":")
    fields = {"name": "run", "runs": str(folder), **MACHINE, **DATA[world]}
    fields |= {"model.path": str(stand_in), "model.template_options": {"enable_thinking": thinking}}
    return [f"--config={ROOT}/configs/{world}.py:{variant}", *(f"--config.{name}={fields[name]}" for name in fields)]


def train(folder: Path, given: list[str]) -> Path:
    """Three steps of a recipe; returns the run's folder."""
    command = [sys.executable, "-m", "flowjax.launch", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_real_size_is_ready_with_the_stand_in(tmp_path: Path, stand_in: Path, recipe: str):
    request = read_request([*arguments(recipe, tmp_path, stand_in, thinking=False), "--dry_run"])
    found = inspect_run(request.run, 1, None)
    assert check_config(request.run.config) == found["problems"] == found["here"] == []
    assert found["plan"]["bases"]["base"]["model"]["parameters"] == pytest.approx(10e6, rel=0.05)


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_real_size_takes_three_steps(tmp_path: Path, stand_in: Path, recipe: str, thinking: bool):
    run = train(tmp_path, arguments(recipe, tmp_path, stand_in, thinking=thinking))
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    policies = len(load_run(run).policies) or 1
    assert [line["step"] for line in lines] == [step for step in range(1, STEPS + 1) for _ in range(policies)]
    for line in lines:
        assert line["trained_tokens"] > 0 and line["skipped_updates"] == 0
        assert line["mismatch_kl"] < 1e-6, "sampler and trainer disagree"
    versions = {line["version"] for line in read_metrics(run) if line["kind"] == "eval"}
    assert versions == {0, STEPS}
    words = AutoTokenizer.from_pretrained(str(stand_in))
    files = sorted((run / "trajectories").rglob("*.jsonl.gz"))
    prompts = [ids for file in files for line in read_lines(file) for ids in whole_prompts(line["turns"])]
    assert prompts
    for ids in prompts:
        prompt = words.decode(ids)
        assert prompt.startswith("<|im_start|>")
        opening = "<|im_start|>assistant\n"
        assert prompt.endswith(opening if thinking else f"{opening}<think>\n\n</think>\n\n")
