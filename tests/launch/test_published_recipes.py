"""The published variants have the constants of the scripts that they are named after.

The table is transcribed from the example scripts of RewardFlow's repository (a fork of verl-agent), in their own words.
Constants that no script sets are the defaults of its `ppo_trainer.yaml`.
"""

import math
from pathlib import Path

import pytest

from flowjax.config import ConfigError
from flowjax.launch.checks import check_config
from flowjax.launch.command_line import load_recipe

ROOT = Path(__file__).parents[2]
WORLDS = ("alfworld", "search", "sokoban", "webshop")
# train_data_size x group_size, val_data_size, max_prompt_length, ppo_mini_batch_size, gamma, mode, env.max_steps,
# total_epochs, test_freq. "-": the estimator has no such constant.
SCRIPTS = """
rewardflow/alfworld  Qwen2.5-3B-Instruct    16x8  128 2048 256 0.9  mean      25 200 10
rewardflow/webshop   Qwen2.5-3B-Instruct    16x8  128 4096 64  0.9  mean      15 100 10
rewardflow/sokoban   Qwen2.5-VL-3B-Instruct 16x8  128 1024 256 0.9  mean      15 200 10
rewardflow/search    Qwen2.5-3B-Instruct    256x5 512 4096 512 0.95 mean      4  200 10
gigpo/alfworld       Qwen2.5-1.5B-Instruct  16x8  128 2048 256 0.95 mean_std  50 150 5
gigpo/webshop        Qwen2.5-1.5B-Instruct  16x8  128 4096 64  0.95 mean      15 150 5
gigpo/sokoban        Qwen2.5-VL-3B-Instruct 32x8  128 1024 64  0.95 mean      15 150 5
gigpo/search         Qwen2.5-3B-Instruct    256x5 512 4096 512 0.95 mean_std  4  200 5
grpo/alfworld        Qwen2.5-1.5B-Instruct  16x8  128 2048 256 -    mean_std  50 150 5
grpo/webshop         Qwen2.5-1.5B-Instruct  16x8  128 4096 64  -    mean_std  15 150 5
grpo/sokoban         Qwen2.5-VL-3B-Instruct 32x8  128 1024 64  -    mean_std  15 150 5
grpo/search          Qwen2.5-3B-Instruct    64x5  128 4096 512 -    mean_std  4  202 5
rloo/alfworld        Qwen2.5-1.5B-Instruct  16x8  128 2048 256 -    -         50 150 5
rloo/webshop         Qwen2.5-1.5B-Instruct  16x8  128 4096 64  -    -         15 150 5
"""
# ALFWorld's engine ends a game at 50 commands (`config_tw.yaml`), and the rollout sends it `inventory` after each
# of the agent's own.
AGENTS_TURNS = 25
ROWS = {row.split()[0]: row.split()[1:] for row in SCRIPTS.strip().splitlines()}
for no_script in ("sokoban", "search"):  # of RLOO: GRPO's, without its mode
    grpo = ROWS[f"grpo/{no_script}"]
    ROWS[f"rloo/{no_script}"] = [*grpo[:6], "-", *grpo[7:]]


@pytest.mark.parametrize("script", sorted(ROWS))
def test_a_published_variant_has_its_scripts_constants(script: str):
    estimator, world = script.split("/")
    model, batch, held_out, prompt, mini, gamma, mode, turns, steps, test_freq = ROWS[script]
    tasks, copies = map(int, batch.split("x"))
    config = load_recipe(f"{ROOT}/configs/{world}.py:published,{estimator}")
    search = world == "search"
    turns = min(int(turns), AGENTS_TURNS) if world == "alfworld" else int(turns)
    assert config.model.path == f"Qwen/{model.replace('-VL', '')}", "worlds are read as text"
    assert (config.trainer.groups_per_step, config.rollout.group_size) == (tasks, copies)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens) == (int(prompt), 512)
    assert (config.env.max_turns, config.env.history) == (turns, 4 if search else 2)
    assert config.trainer.steps == int(steps)
    rows = tasks * copies * turns  # of a batch in which every episode takes all its turns
    assert config.trainer.updates_per_step == math.ceil(rows / int(mini))
    # algorithm.*: estimator, gamma, mode, and the penalty of an invalid action, taken from each row
    assert config.credit.name == f"published.{estimator}"
    options = {"invalid_penalty": 0.01 if search else 0.1}
    options |= {"gamma": float(gamma)} if gamma != "-" else {}
    options |= {"norm": mode} if mode != "-" and estimator != "rewardflow" else {}  # which has no other
    assert config.credit.options.to_dict() == options
    assert config.reward.components.to_dict() == {"env_return": 1.0}
    # actor_rollout_ref.actor.*
    assert config.loss.kind == "ppo"
    assert config.loss.options.to_dict() == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "aggregation": "token_mean",
    }
    assert config.loss.kl_coefficient == (0.001 if search else 0.01)
    assert config.loss.entropy_coefficient == (0.0 if search else 0.001)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.schedule, optimizer.clip_norm) == ("adamw", "constant", 1.0)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    warm_up = round(0.1 * int(steps) * config.trainer.updates_per_step) if search else 0
    assert optimizer.warmup_steps == warm_up
    # The scripts that train an adapter: rank 64, alpha 64, at 3e-6.
    assert (config.policy.train, config.policy.lora.rank, config.policy.lora.alpha) == ("lora", 64, 64.0)
    assert optimizer.learning_rate == 3e-6
    # Sampling, and synchronous batches
    rollout = config.rollout
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) == (1.0, 1.0, 0, 0.0)
    assert config.dataflow.max_staleness == 0 and config.seed == 0
    assert (config.eval.tasks, config.eval.temperature) == (int(held_out), 0.0 if search else 0.4)
    assert config.eval.every_steps == int(test_freq)
    assert config.env.name == f"flowjax.published.worlds:Published{_CLASSES[world]}"
    assert check_config(config) == []


_CLASSES = {"alfworld": "Alfworld", "search": "Search", "sokoban": "Sokoban", "webshop": "WebShop"}


def test_worlds_are_the_published_ones():
    options = {world: load_recipe(f"{ROOT}/configs/{world}.py:published,rewardflow").env.options for world in WORLDS}
    assert options["alfworld"].held_out == "seen", "eval_in_distribution"
    assert (options["webshop"].products, options["webshop"].goals, options["webshop"].split_by) == (
        1000,
        "synthetic",
        "index",
    )
    assert (options["sokoban"].rows, options["sokoban"].columns, options["sokoban"].boxes) == (8, 8, 1)
    small = load_recipe(f"{ROOT}/configs/sokoban.py:published,gigpo").env.options
    assert (small.rows, small.columns) == (6, 6), "RewardFlow alone is run on 8 x 8"
    assert options["search"].topk == 3


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_that_was_not_published_is_refused_with_those_that_were(world: str):
    with pytest.raises(ConfigError) as refused:
        load_recipe(f"{ROOT}/configs/{world}.py:published,maxrl")
    listed = str(refused.value).partition("use one of ")[2].split(", ")
    assert [name for name in listed if name.startswith("published")] == [
        f"published,{name}" for name in ("rewardflow", "gigpo", "grpo", "rloo")
    ]
