"""WebShop with state-graph credit."""

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
    """An agent that searches a shop, chooses options and buys; each turn a prompt with the latest turns.

    nano          2 CPU cores       python -m flowjax.launch --config=configs/webshop.py:nano
                  500 generated products; held-out success, greedy, three seeds: 0.02 -> 0.64, 0.67, 0.67
                  (docs/worlds/webshop.md)
    nano_append   the same, an episode being one growing conversation   (no full run measured)
    qwen3_8b      8 x A100 80 GB, without thinking   (not run by us)
                  python -m flowjax.launch --config=configs/webshop.py:qwen3_8b
                  reads WebShop's own files (docs/worlds/webshop.md); --config.env.options.path says where from
    qwen3_8b_v5e  the same on one host of 8 TPU chips, v5e: docs/trainer.md   (never run)
    qwen3_0_6b    1 GPU of 16 GB, the same files, without thinking   (never run)
    published,rewardflow | published,gigpo | published,grpo | published,rloo
                  2 x A100 80 GB: constants, reading of replies and estimators as published, an adapter in place
                  of all weights (`flowjax.recipes.published_on_two_gpus`)   (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.webshop:WebShop"
    config.env.max_turns = 15
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "rewardflow"
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "webshop")
    config.env.options = ConfigDict({"path": "", "products": 500})
    config.env.history = 2  # a page does not show the options chosen on it, two at most: only past turns do
    config.env.max_turns = 12
    config.env.train_tasks = 1400
    config.reward.components.invalid_actions = 0.02
    # No division by the deviation: in a group without successes this penalty would weigh as much as one (docs/credit).
    config.credit.options = ConfigDict({"episode_norm": "mean", "step_norm": "mean"})
    config.engine.max_model_tokens = 110
    config.rollout.max_prompt_tokens = 94
    config.rollout.max_new_tokens = 14  # a search with all words of a goal
    config.rollout.temperature = 0.8  # at 1, 23 steps of training changed nothing
    config.warm_start.tasks = 1400
    config.warm_start.states = 40_000
    config.warm_start.steps = 900
    config.warm_start.batch_rows = 64
    config.warm_start.label_noise = 0.0
    # The base is taught to choose options and to leave items that do not fit, then given the habit of buying the first
    # item that it opens as it is.
    config.warm_start.noisy_share = 0.12
    config.warm_start.noisy_env_options = ConfigDict({"hasty_share": 0.9})
    config.warm_start.path_noise = 0.35  # so that demonstrations open items that do not fit, and leave them again
    config.trainer.steps = 40
    config.trainer.row_tokens = 110
    config.trainer.micro_batch_rows = 64
    config.optimizer.warmup_steps = 2
    config.eval.tasks = 370  # all there are


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    as_one_conversation(config)
    config.engine.max_model_tokens = 768
    config.rollout.max_prompt_tokens = 752  # a conversation of twelve turns
    config.trainer.row_tokens = 768
    config.trainer.micro_batch_rows = 8
    config.warm_start.states = 24_000
    config.warm_start.steps = 350
    config.warm_start.batch_rows = 16  # conversations
    config.warm_start.noisy_env_options = ConfigDict()
    # A conversation's labels are its actions, so that only noisy labels lead to items that do not fit.
    config.warm_start.noisy_share = 0.25
    config.warm_start.label_noise = 0.2


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "webshop")
    without_thinking(config)
    config.env.options = ConfigDict(REAL_SHOP)
    config.engine.max_model_tokens = 5120
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_new_tokens = 1024
    config.trainer.groups_per_step = 16
    config.trainer.steps = 150
    config.trainer.row_tokens = 8192
    config.model.remat = "dots"  # faster than "layer", and rows this short leave the memory for it
    config.eval.tasks = 500


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "webshop")
    config.env.options = ConfigDict(REAL_SHOP)
    lengths(config, prompt_tokens=3072, reply_tokens=512)


_BESIDE: dict[str, Any] = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "steps": 150}
_COMMON: dict[str, Any] = {"tasks": 16, "turns": 15, "prompt_tokens": 4096, "mini_batch_turns": 64}
PUBLISHED = {
    "rewardflow": PublishedRun(
        "rewardflow",
        "Qwen/Qwen2.5-3B-Instruct",
        steps=100,
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
    config.env.name = "flowjax.published.worlds:PublishedWebShop"
    config.env.options = ConfigDict({**REAL_SHOP, "split_by": "index"})


REAL_SHOP = {"path": "data/webshop/real", "products": 1000, "goals": "synthetic"}
VARIANTS = {
    "nano": _nano,
    "nano_append": _nano_append,
    "qwen3_8b": _qwen3_8b,
    "qwen3_8b_v5e": on_8_v5e_chips(_qwen3_8b),
    "qwen3_0_6b": _qwen3_0_6b,
    **published_variants("webshop", PUBLISHED, _published),
}
