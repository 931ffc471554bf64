"""ALFWorld with state-graph credit."""

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import as_one_conversation, find_variant, nano_on_two_cores, one_node_8_gpus


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that does chores in a household described in text: find, clean, heat, cool, light up, put away.

    nano          2 CPU cores, two kinds of chores in bathrooms; each turn a prompt with the last four turns
                  python -m flowjax.launch --config=configs/alfworld.py:nano
    nano_append   the same, an episode being one growing conversation
    qwen3_8b      8 x A100 80 GB, the real games   (not run by us)
                  alfworld-download && export ALFWORLD_DATA=~/.cache/alfworld
                  python -m flowjax.launch --config=configs/alfworld.py:qwen3_8b
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
    config.env.max_turns = 10
    config.env.history = 4
    config.env.train_tasks = 96
    config.engine.max_model_tokens = 104
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_new_tokens = 8  # "clean soapbar 1 with sinkbasin 1" and the end
    config.trainer.groups_per_step = 8
    config.trainer.steps = 10
    config.trainer.row_tokens = 104
    config.trainer.micro_batch_rows = 64
    config.warm_start.states = 8000
    config.warm_start.steps = 250
    config.warm_start.batch_rows = 64
    config.warm_start.label_noise = 0.3
    config.eval.tasks = 128


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    as_one_conversation(config)
    config.engine.max_model_tokens = 208
    config.rollout.max_prompt_tokens = 200  # ten turns
    config.trainer.row_tokens = 208
    config.trainer.micro_batch_rows = 32
    config.warm_start.batch_rows = 24  # conversations


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "alfworld")
    config.env.max_turns = 25
    config.env.workers = 8
    config.env.train_tasks = 3553
    config.engine.max_model_tokens = 4096
    config.rollout.max_prompt_tokens = 3072
    config.rollout.max_new_tokens = 512
    config.reward.components.invalid_actions = 0.1
    config.trainer.groups_per_step = 16
    config.trainer.steps = 150
    config.trainer.row_tokens = 8192
    config.eval.tasks = 134


VARIANTS = {"nano": _nano, "nano_append": _nano_append, "qwen3_8b": _qwen3_8b}
