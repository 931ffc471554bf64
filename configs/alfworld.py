"""ALFWorld with state-graph credit."""

import os
from pathlib import Path
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


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that does chores in a household described in text: find, clean, heat, cool, light up, put away.

    nano          2 CPU cores, two kinds of chores in bathrooms; each turn a prompt with the last four turns
                  python -m flowjax.launch --config=configs/alfworld.py:nano   (no full run measured)
    nano_append   2 CPU cores        python -m flowjax.launch --config=configs/alfworld.py:nano_append
                  the same, an episode being one growing conversation: far fewer tokens to train on
                  held-out success, greedy, three seeds: 0.25 -> 0.44 [0.40, 0.48], 0.43, 0.38 (docs/worlds/alfworld.md)
    qwen3_8b      8 x A100 80 GB, the real games, without thinking   (not run by us)
                  alfworld-download
                  python -m flowjax.launch --config=configs/alfworld.py:qwen3_8b
    qwen3_8b_v5e  the same on one host of 8 TPU chips, v5e: docs/trainer.md   (never run)
    qwen3_0_6b    1 GPU of 16 GB, the real games, without thinking   (never run)
    published,rewardflow | published,gigpo | published,grpo | published,rloo
                  2 x A100 80 GB: constants, reading of replies and estimators as published, an adapter in place
                  of all weights (`flowjax.recipes.published_on_two_gpus`)   (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.alfworld:Alfworld"
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "rewardflow"
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "alfworld")
    config.env.options = ConfigDict(
        {
            "path": "generated",
            "held_out": "seen",
            "task_types": ("pick_and_place_simple", "pick_clean_then_place_in_recep"),
            "scenes": tuple(range(407, 431)),  # bathrooms, which have few receptacles
            "clutter": 0.4,
            "games_kept": 160,
        }
    )
    config.env.max_turns = 12
    config.env.history = 4
    config.env.train_tasks = 4000  # few are played twice: trained on 96 games, success on others stayed at 5 %
    config.reward.components.invalid_actions = 0.05  # without it half of all turns still did nothing after 40 steps
    config.engine.max_model_tokens = 104
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_new_tokens = 8  # "clean soapbar 1 with sinkbasin 1" and the end
    config.loss.entropy_coefficient = 0.01
    config.trainer.steps = 50
    config.trainer.row_tokens = 104
    config.trainer.micro_batch_rows = 64
    config.warm_start.tasks = 1200
    config.warm_start.states = 7500
    config.warm_start.steps = 250
    config.warm_start.batch_rows = 64
    config.warm_start.label_noise = 0.2
    config.eval.tasks = 256


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    as_one_conversation(config)
    config.engine.max_model_tokens = 256
    config.rollout.max_prompt_tokens = 248  # a conversation of twelve turns
    config.trainer.row_tokens = 256
    config.trainer.micro_batch_rows = 32
    config.warm_start.batch_rows = 24  # conversations
    config.warm_start.steps = 400
    config.warm_start.noisy_share = 0.4


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "alfworld")
    without_thinking(config)
    _real_games(config)
    config.engine.max_model_tokens = 4096
    config.rollout.max_prompt_tokens = 3072
    config.rollout.max_new_tokens = 512
    config.trainer.groups_per_step = 16
    config.trainer.steps = 150
    config.trainer.row_tokens = 8192
    config.model.remat = "dots"  # faster than "layer", and rows this short leave the memory for it
    config.eval.tasks = 134


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "alfworld")
    _real_games(config)
    lengths(config, prompt_tokens=2560, reply_tokens=512)
    config.eval.tasks = 134


def _real_games(config: ConfigDict) -> None:
    config.env.options = ConfigDict({"path": DOWNLOADED})
    config.env.max_turns = 25
    config.env.workers = 8
    config.env.train_tasks = 3553
    config.reward.components.invalid_actions = 0.1


# Folder into which alfworld-download writes the games. With an empty path, generated games would be played instead.
DOWNLOADED = str(Path(os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser())
_BESIDE: dict[str, Any] = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "steps": 150}
# GiGPO's script and those beside it ask for 50 turns. But a game ends at 50 commands, and every second one asks for the
# inventory, whatever the estimator: the agent has 25.
_COMMON: dict[str, Any] = {"tasks": 16, "turns": 25, "prompt_tokens": 2048, "mini_batch_turns": 256}
PUBLISHED = {
    "rewardflow": PublishedRun(
        "rewardflow",
        "Qwen/Qwen2.5-3B-Instruct",
        steps=200,
        options={"gamma": 0.9, "invalid_penalty": 0.1},
        held_out_every=10,
        **_COMMON,
    ),
    "gigpo": PublishedRun(
        "gigpo", options={"gamma": 0.95, "norm": "mean_std", "invalid_penalty": 0.1}, **_BESIDE, **_COMMON
    ),
    "grpo": PublishedRun("grpo", options={"norm": "mean_std", "invalid_penalty": 0.1}, **_BESIDE, **_COMMON),
    "rloo": PublishedRun("rloo", options={"invalid_penalty": 0.1}, **_BESIDE, **_COMMON),
}


def _published(config: ConfigDict, name: str) -> None:
    config.env.name = "flowjax.published.worlds:PublishedAlfworld"
    config.env.options = ConfigDict({"path": DOWNLOADED, "held_out": "seen"})
    config.env.workers = 8
    config.env.train_tasks = 3553


VARIANTS = {
    "nano": _nano,
    "nano_append": _nano_append,
    "qwen3_8b": _qwen3_8b,
    "qwen3_8b_v5e": on_8_v5e_chips(_qwen3_8b),
    "qwen3_0_6b": _qwen3_0_6b,
    **published_variants("alfworld", PUBLISHED, _published),
}
