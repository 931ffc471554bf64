"""Search with state-graph credit."""

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
    """An agent that answers questions over several documents with the help of a search engine.

    nano          2 CPU cores   python -m flowjax.launch --config=configs/search.py:nano
                  questions of two hops; the base answers from the first document, the trained agent reads on:
                  held-out success, greedy, three seeds: 0.00 -> 0.77 [0.73, 0.81], 0.78, 0.66
    nano_append   the same, an episode being one growing conversation   (no full run measured)
    qwen3_8b      8 x A100 80 GB, and a retrieval server, without thinking   (not run by us)
                  files and the server's command: docs/worlds/search.md, "Real data"
                  python -m flowjax.launch --config=configs/search.py:qwen3_8b
    qwen3_8b_v5e  the same on one host of 8 TPU chips, v5e: docs/trainer.md   (never run)
    qwen3_0_6b    1 GPU of 16 GB, the same server, without thinking   (never run)
    published,rewardflow | published,gigpo | published,grpo | published,rloo
                  2 x A100 80 GB: constants, reading of replies and estimators as published, an adapter in place
                  of all weights (`flowjax.recipes.published_on_two_gpus`). There is no script for RLOO: it has GRPO's
                  constants   (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.search:Search"
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "rewardflow"
    config.credit.options = ConfigDict({"gamma": 0.95})
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "search")
    config.env.options = ConfigDict({"documents": 10_000, "hops": 2, "topk": 1})
    config.env.max_turns = 5
    config.env.train_tasks = 60_000
    config.engine.max_model_tokens = 36
    config.rollout.max_prompt_tokens = 28  # a question of two hops and one document
    config.rollout.max_new_tokens = 5
    config.loss.entropy_coefficient = 0.01
    config.trainer.steps = 100
    config.trainer.row_tokens = 34
    config.optimizer.schedule = "linear"  # to 0
    config.warm_start.env_options = ConfigDict({"hops": (1, 2)})
    config.warm_start.tasks = 60_000  # it takes that many names until the base copies names that it has never seen
    config.warm_start.states = 90_000
    config.warm_start.steps = 800
    config.warm_start.label_noise = 0.0
    # The base is taught to read on, then given the habit of answering from the first document.
    config.warm_start.noisy_share = 0.15
    config.warm_start.noisy_env_options = ConfigDict({"early_share": 0.9})
    config.eval.tasks = 512


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    as_one_conversation(config)
    config.engine.max_model_tokens = 112
    config.rollout.max_prompt_tokens = 100  # a conversation of five turns
    config.trainer.steps = 50
    config.trainer.row_tokens = 106
    config.trainer.micro_batch_rows = 64
    config.optimizer.schedule = "constant"
    config.warm_start.batch_rows = 48  # conversations
    config.warm_start.noisy_share = 0.25
    config.warm_start.label_noise = 0.2
    config.warm_start.noisy_env_options = ConfigDict()


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "search")
    without_thinking(config)
    _real_questions(config)
    config.engine.max_model_tokens = 5120
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_new_tokens = 512
    config.rollout.group_size = 5
    config.trainer.groups_per_step = 64
    config.trainer.steps = 200
    config.trainer.row_tokens = 8192
    config.model.remat = "dots"  # faster than "layer", and rows this short leave the memory for it


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "search")
    _real_questions(config)
    lengths(config, prompt_tokens=3584, reply_tokens=512)


def _real_questions(config: ConfigDict) -> None:
    config.env.options = ConfigDict({"path": "data/nq", "retriever": "http://127.0.0.1:8000", "topk": 3})
    config.env.max_turns = 4
    config.env.history = 4
    config.env.workers = 8
    config.env.train_tasks = 170_000


_BESIDE: dict[str, Any] = {"tasks": 64, "steps": 202, "held_out": 128}
_COMMON: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-3B-Instruct",
    "copies": 5,
    "turns": 4,
    "prompt_tokens": 4096,
    "mini_batch_turns": 512,
    "history": 4,
    "kl": 0.001,
    "entropy": 0.0,
    "warmup": 0.1,
    "held_out_temperature": 0.0,
}
PUBLISHED = {
    "rewardflow": PublishedRun(
        "rewardflow",
        tasks=256,
        steps=200,
        options={"gamma": 0.95, "invalid_penalty": 0.01},
        held_out=512,
        held_out_every=10,
        **_COMMON,
    ),
    "gigpo": PublishedRun(
        "gigpo",
        tasks=256,
        steps=200,
        options={"gamma": 0.95, "norm": "mean_std", "invalid_penalty": 0.01},
        held_out=512,
        **_COMMON,
    ),
    "grpo": PublishedRun("grpo", options={"norm": "mean_std", "invalid_penalty": 0.01}, **_BESIDE, **_COMMON),
    "rloo": PublishedRun("rloo", options={"invalid_penalty": 0.01}, **_BESIDE, **_COMMON),
}


def _published(config: ConfigDict, name: str) -> None:
    _real_questions(config)
    config.env.name = "flowjax.published.worlds:PublishedSearch"


VARIANTS = {
    "nano": _nano,
    "nano_append": _nano_append,
    "qwen3_8b": _qwen3_8b,
    "qwen3_8b_v5e": on_8_v5e_chips(_qwen3_8b),
    "qwen3_0_6b": _qwen3_0_6b,
    **published_variants("search", PUBLISHED, _published),
}
