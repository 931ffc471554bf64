"""ALFWorld with state-graph credit."""

from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that does chores in a household described in text: find, clean, heat, cool, light up, put away.

    nano          2 CPU cores, two kinds of chores in bathrooms; each turn a prompt with the last four turns
                  python -m flowjax.launch --config=configs/alfworld.py:nano
    nano_append   the same, an episode being one growing conversation
    qwen3_8b      8 x A100 80 GB, the real games   (not run by us)
                  alfworld-download && export ALFWORLD_DATA=~/.cache/alfworld
                  python -m flowjax.launch --config=configs/alfworld.py:qwen3_8b
    """
    recipes = {"nano": _nano, "nano_append": _nano_append, "qwen3_8b": _qwen3_8b}
    if arg not in recipes:
        raise ConfigError(f"configs/alfworld.py has no variant {arg!r}: use one of {', '.join(recipes)}")
    config = default_config()
    config.env.name = "flowjax.envs.alfworld:Alfworld"
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "rewardflow"
    recipes[arg](config)
    return config


def _nano(config: ConfigDict) -> None:
    config.name = "alfworld-nano"
    config.model.path = "models/nano-alfworld"
    config.model.dtype = "float32"
    config.model.remat = "none"
    config.model.nano = ConfigDict({"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_size": 384})
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
    config.env.prompt = "compact"
    config.env.max_turns = 10
    config.env.history = 4
    config.env.train_tasks = 96
    config.engine.dtype = "float32"
    config.engine.max_model_tokens = 104
    config.engine.kv_cache_bytes = 256 * 1024**2
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_new_tokens = 8  # "clean soapbar 1 with sinkbasin 1" and the end
    config.rollout.group_size = 8
    config.trainer.groups_per_step = 8
    config.trainer.steps = 10
    config.trainer.updates_per_step = 2
    config.trainer.row_tokens = 104
    config.trainer.micro_batch_rows = 64
    config.optimizer.learning_rate = 1e-3
    config.warm_start.states = 8000
    config.warm_start.steps = 250
    config.warm_start.batch_rows = 64
    config.warm_start.label_noise = 0.3
    config.eval.tasks = 128


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    config.name = "alfworld-nano-append"
    config.model.path = "models/nano-alfworld-append"
    config.env.context = "append"
    config.engine.max_model_tokens = 208
    config.rollout.max_prompt_tokens = 200  # ten turns
    config.trainer.row_tokens = 208
    config.trainer.micro_batch_rows = 32
    config.warm_start.batch_rows = 24  # conversations


def _qwen3_8b(config: ConfigDict) -> None:
    config.name = "alfworld-qwen3-8b"
    config.model.path = "models/Qwen3-8B"
    config.env.max_turns = 25
    config.env.workers = 8
    config.env.train_tasks = 3553
    config.policy.lora.rank = 64
    config.policy.lora.alpha = 64.0
    config.engine.tensor_parallel = 4
    config.engine.prompts_per_request = 1  # long replies: none waits for another
    config.mesh.fsdp = 4
    config.engine.max_model_tokens = 4096
    config.rollout.max_prompt_tokens = 3072
    config.rollout.max_new_tokens = 512
    config.rollout.max_concurrent_episodes = 256
    config.reward.components.invalid_actions = 0.1
    config.trainer.groups_per_step = 16
    config.trainer.steps = 150
    config.trainer.row_tokens = 8192
    config.trainer.micro_batch_rows = 4
    config.optimizer.learning_rate = 2e-5
    config.eval.tasks = 134
