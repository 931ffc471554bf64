"""Problems of mathematics with group-relative credit."""

from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that answers problems whose answers can be checked, in one turn or with a calculator.

    nano             2 CPU cores         python -m flowjax.launch --config=configs/math.py:nano
                     sums of two numbers of at most two digits, digit by digit
                     Training only sharpens: played greedily the base solves 0.709, the trained agent 0.713 (README).
    nano_calculator  2 CPU cores         python -m flowjax.launch --config=configs/math.py:nano_calculator
                     three digits, + and -, one conversation with a calculator
    qwen3_8b         8 x A100 80 GB      python -m flowjax.launch --config=configs/math.py:qwen3_8b \\
                     --config.env.options.path=deepscaler.json                                   (not run by us)
    """
    recipes = {"nano": _nano, "nano_calculator": _nano_calculator, "qwen3_8b": _qwen3_8b}
    if arg not in recipes:
        raise ConfigError(f"configs/math.py has no variant {arg!r}: use one of {', '.join(recipes)}")
    config = default_config()
    config.env.name = "flowjax.envs.math:Math"
    config.env.max_turns = 1
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "grpo"
    recipes[arg](config)
    return config


def _nano(config: ConfigDict) -> None:
    config.name = "math-nano"
    config.model.path = "models/nano-math"
    config.model.dtype = "float32"
    config.model.remat = "none"
    config.model.nano = ConfigDict({"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_size": 384})
    config.env.prompt = "compact"
    config.env.options = ConfigDict({"answer": "whole", "digits": 2, "terms": 2, "operators": "+"})
    config.engine.dtype = "float32"
    config.engine.max_model_tokens = 32
    config.engine.kv_cache_bytes = 256 * 1024**2
    config.rollout.max_prompt_tokens = 7
    config.rollout.max_new_tokens = 5
    config.rollout.group_size = 8
    config.trainer.groups_per_step = 16
    config.trainer.steps = 60
    config.trainer.updates_per_step = 2
    config.trainer.row_tokens = 16
    config.trainer.micro_batch_rows = 128
    config.optimizer.learning_rate = 1e-3
    config.warm_start.label_noise = 0.4


def _nano_calculator(config: ConfigDict) -> None:
    _nano(config)
    config.name = "math-nano-calculator"
    config.model.path = "models/nano-math-calculator"
    config.env.context = "append"
    config.env.max_turns = 3
    config.env.options = ConfigDict({"calculator": 2, "digits": 1, "terms": 3, "operators": "+-"})
    config.rollout.max_new_tokens = 14
    config.rollout.max_prompt_tokens = 82
    config.engine.max_model_tokens = config.trainer.row_tokens = 96
    config.trainer.micro_batch_rows = 32
    config.warm_start.batch_rows = 64  # conversations
    config.warm_start.label_noise = 0.2


def _qwen3_8b(config: ConfigDict) -> None:
    config.name = "math-qwen3-8b"
    config.model.path = "models/Qwen3-8B"
    config.env.options = ConfigDict({"path": "", "answer": "boxed"})
    config.policy.lora.rank = 64
    config.policy.lora.alpha = 64.0
    config.engine.tensor_parallel = 4
    config.engine.prompts_per_request = 1  # long replies: none waits for another
    config.mesh.fsdp = 4
    config.engine.max_model_tokens = 16384
    config.rollout.max_prompt_tokens = 2048
    config.rollout.max_new_tokens = 14336
    config.rollout.max_concurrent_episodes = 256
    config.rollout.episode_timeout_s = 1800.0
    config.trainer.groups_per_step = 32
    config.trainer.steps = 200
    config.trainer.row_tokens = 16384
    config.trainer.micro_batch_rows = 4
    config.optimizer.learning_rate = 2e-5
