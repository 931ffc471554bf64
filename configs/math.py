"""Problems of mathematics with group-relative credit."""

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import find_variant, lengths, nano_on_two_cores, one_gpu_16_gb, one_node_8_gpus


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that answers problems whose answers can be checked, in one turn or with a calculator.

    nano             2 CPU cores         python -m flowjax.launch --config=configs/math.py:nano
                     sums of three numbers; the base guesses, the trained agent works them out:
                     held-out success, greedy, three seeds: 0.09 -> 0.81 [0.77, 0.84], 0.79, 0.83
    nano_direct      2 CPU cores         python -m flowjax.launch --config=configs/math.py:nano_direct
                     sums of two numbers of at most two digits, answered at once
                     Training only sharpens: played greedily the base solves 0.709, the trained agent 0.713 (README).
    nano_calculator  2 CPU cores         python -m flowjax.launch --config=configs/math.py:nano_calculator
                     three digits, + and -, one conversation with a calculator
    qwen3_8b         8 x A100 80 GB      python -m flowjax.launch --config=configs/math.py:qwen3_8b
                     problems: data/deepscaler.json, or --config.env.options.path=FILE           (not run by us)
    qwen3_0_6b       1 GPU of 16 GB, the same problems, without thinking                         (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.math:Math"
    config.env.max_turns = 1
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "grpo"
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "math")
    config.env.options = ConfigDict({"answer": "last_number", "digits": 2, "terms": 3, "operators": "+"})
    config.engine.max_model_tokens = 32
    config.rollout.max_prompt_tokens = 10
    config.rollout.max_new_tokens = 12  # room for a sum that is worked out step by step
    config.trainer.steps = 100
    config.trainer.row_tokens = 22
    config.optimizer.schedule = "linear"  # to 0: with a constant rate it also works sums out, but with more errors
    config.warm_start.steps = 1200
    config.warm_start.states = config.warm_start.tasks = 150_000
    config.warm_start.label_noise = 0.0
    # The base is taught to work sums out, then given the habit of answering at once: RL can find the skill again.
    config.warm_start.env_options = ConfigDict({"worked_share": 1.0})
    config.warm_start.noisy_env_options = ConfigDict({"worked_share": 0.1})


def _nano_direct(config: ConfigDict) -> None:
    nano_on_two_cores(config, "math-direct")
    config.env.options = ConfigDict({"answer": "whole", "digits": 2, "terms": 2, "operators": "+"})
    config.engine.max_model_tokens = 32
    config.rollout.max_prompt_tokens = 7
    config.rollout.max_new_tokens = 5
    config.trainer.steps = 60
    config.trainer.row_tokens = 16
    config.warm_start.label_noise = 0.4


def _nano_calculator(config: ConfigDict) -> None:
    _nano_direct(config)
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
    one_node_8_gpus(config, "math")
    config.env.options = ConfigDict({"path": "data/deepscaler.json", "answer": "boxed"})
    lengths(config, prompt_tokens=2048, reply_tokens=14336)
    config.trainer.groups_per_step = 32
    config.trainer.steps = 200


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "math")
    config.env.options = ConfigDict({"path": "data/deepscaler.json", "answer": "boxed"})
    lengths(config, prompt_tokens=1024, reply_tokens=3072)
    config.rollout.episode_timeout_s = 900.0


VARIANTS = {
    "nano": _nano,
    "nano_direct": _nano_direct,
    "nano_calculator": _nano_calculator,
    "qwen3_8b": _qwen3_8b,
    "qwen3_0_6b": _qwen3_0_6b,
}
