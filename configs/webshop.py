"""WebShop with state-graph credit."""

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import as_one_conversation, find_variant, nano_on_two_cores, one_node_8_gpus


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that searches a shop, chooses options and buys; each turn a prompt with the latest turns.

    nano          2 CPU cores       python -m flowjax.launch --config=configs/webshop.py:nano
                  40 generated products; shows that the world feeds the trainer, no result is claimed
    nano_append   the same, an episode being one growing conversation
    qwen3_8b      8 x A100 80 GB    python -m flowjax.launch --config=configs/webshop.py:qwen3_8b   (not run by us)
                  reads WebShop's own files (docs/worlds/webshop.md); --config.env.options.path says where from
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
    config.env.options = ConfigDict({"path": "", "products": 40})
    config.env.history = 2  # chosen options, two at most, are seen nowhere else
    config.env.max_turns = 8
    config.engine.max_model_tokens = 96
    config.rollout.max_prompt_tokens = 88
    config.rollout.max_new_tokens = 8
    config.warm_start.states = 10_000
    config.warm_start.steps = 120
    config.warm_start.batch_rows = 64
    config.warm_start.label_noise = 0.2
    config.warm_start.path_noise = 0.1
    config.trainer.groups_per_step = 8
    config.trainer.updates_per_step = 1
    config.trainer.steps = 10
    config.trainer.row_tokens = 96
    config.trainer.micro_batch_rows = 32
    config.optimizer.warmup_steps = 2
    config.eval.tasks = 24


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    as_one_conversation(config)
    config.engine.max_model_tokens = 512
    config.rollout.max_prompt_tokens = 496  # eight turns
    config.trainer.row_tokens = 504
    config.trainer.micro_batch_rows = 8
    config.warm_start.batch_rows = 16  # conversations


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "webshop")
    config.env.options = ConfigDict({"path": "data/webshop/real", "products": 1000, "goals": "synthetic"})
    config.engine.max_model_tokens = 5120
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_new_tokens = 1024
    config.trainer.groups_per_step = 16
    config.trainer.steps = 150
    config.trainer.row_tokens = 8192
    config.eval.tasks = 500


VARIANTS = {"nano": _nano, "nano_append": _nano_append, "qwen3_8b": _qwen3_8b}
