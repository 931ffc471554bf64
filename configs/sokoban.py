"""Sokoban with state-graph credit."""

from typing import Any

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import (
    PublishedRun,
    as_one_conversation,
    find_variant,
    lengths,
    nano_on_two_cores,
    on_8_v5e_chips,
    one_gpu_16_gb,
    one_node_8_gpus,
    published_variants,
    without_thinking,
)

_NEAR_MOVES = 3  # most moves in the shortest solution of a near room


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that pushes boxes onto targets, one move per turn, with credit from the group's state graph.

    nano       2 slow CPU cores, 6 min   python -m flowjax.launch --config=configs/sokoban.py:nano
               (10 min with the base model, which is made once)
               held-out success, greedy, five seeds: 0.24 -> 0.50 [0.45, 0.55], 0.51, 0.48, 0.52, 0.53 (README)
    nano_append  2 CPU cores        python -m flowjax.launch --config=configs/sokoban.py:nano_append
               an episode is one conversation, in rooms of any distance (no full run measured)
    qwen3_8b   8 x A100 80 GB, without thinking   (not run by us)
               python -m flowjax.launch --config=configs/sokoban.py:qwen3_8b
    qwen3_8b_v5e
               the same on one host of 8 TPU chips, v5e: docs/trainer.md   (never run)
    qwen3_0_6b 1 GPU of 16 GB       6 x 6, without thinking
               (on an H200, four steps with a random model of 10 M parameters: docs/benchmarks/accelerators.md)
    published,rewardflow | published,gigpo | published,grpo | published,rloo
               2 x A100 80 GB: constants, reading of replies and estimators as published, an adapter in place
               of all weights (`flowjax.recipes.published_on_two_gpus`), and text and Qwen2.5-3B-Instruct in place of
               pictures and Qwen2.5-VL-3B. There is no script for RLOO: it has GRPO's constants   (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({"rows": 6, "columns": 6, "boxes": 1})
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "rewardflow"
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    """The base's warm start has only rooms with short solutions; training and evaluation have longer ones."""
    _two_cores(config)
    config.model.path += "-near"
    config.env.options.update({"min_moves": _NEAR_MOVES + 1, "max_moves": config.env.max_turns})
    config.warm_start.env_options = ConfigDict({"min_moves": 1, "max_moves": _NEAR_MOVES})
    config.loss.entropy_coefficient = 0.02  # without it the policy explores less after ten steps, and learns less


def _two_cores(config: ConfigDict) -> None:
    nano_on_two_cores(config, "sokoban")
    config.env.max_turns = 12
    config.engine.max_model_tokens = 32
    config.rollout.max_prompt_tokens = 16
    config.rollout.max_new_tokens = 2
    config.trainer.steps = 60
    config.trainer.row_tokens = 18


def _nano_append(config: ConfigDict) -> None:
    _two_cores(config)
    as_one_conversation(config)
    turn_tokens = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    episode_tokens = config.env.max_turns * turn_tokens
    config.engine.max_model_tokens = config.trainer.row_tokens = episode_tokens
    config.rollout.max_prompt_tokens = episode_tokens - config.rollout.max_new_tokens
    config.trainer.micro_batch_rows = 16
    config.warm_start.batch_rows = 24  # conversations
    config.warm_start.steps = 400


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "sokoban")
    without_thinking(config)
    config.env.options.rows = config.env.options.columns = 8
    config.engine.max_model_tokens = 4096
    config.rollout.max_prompt_tokens = 2048
    config.rollout.max_new_tokens = 1024
    config.trainer.groups_per_step = 32
    config.trainer.steps = 200
    config.trainer.row_tokens = 8192
    config.model.remat = "dots"  # faster than "layer", and rows this short leave the memory for it


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "sokoban")
    lengths(config, prompt_tokens=1536, reply_tokens=512)


_BESIDE: dict[str, Any] = {"tasks": 32, "steps": 150, "mini_batch_turns": 64}
_COMMON: dict[str, Any] = {"model": "Qwen/Qwen2.5-3B-Instruct", "turns": 15, "prompt_tokens": 1024}
PUBLISHED = {
    "rewardflow": PublishedRun(
        "rewardflow",
        tasks=16,
        steps=200,
        mini_batch_turns=256,
        options={"gamma": 0.9, "invalid_penalty": 0.1},
        held_out_every=10,
        **_COMMON,
    ),
    "gigpo": PublishedRun(
        "gigpo", options={"gamma": 0.95, "norm": "mean", "invalid_penalty": 0.1}, **_BESIDE, **_COMMON
    ),
    "grpo": PublishedRun("grpo", options={"norm": "mean_std", "invalid_penalty": 0.1}, **_BESIDE, **_COMMON),
    "rloo": PublishedRun("rloo", options={"invalid_penalty": 0.1}, **_BESIDE, **_COMMON),
}


def _published(config: ConfigDict, name: str) -> None:
    config.env.name = "flowjax.published.worlds:PublishedSokoban"
    config.env.options.rows = config.env.options.columns = 8 if name == "rewardflow" else 6


VARIANTS = {
    "nano": _nano,
    "nano_append": _nano_append,
    "qwen3_8b": _qwen3_8b,
    "qwen3_8b_v5e": on_8_v5e_chips(_qwen3_8b),
    "qwen3_0_6b": _qwen3_0_6b,
    **published_variants("sokoban", PUBLISHED, _published),
}
