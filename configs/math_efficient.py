"""Problems of mathematics with data algorithms that spend rollouts where something is learnt."""

from functools import partial

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import find_variant, lengths, nano_on_two_cores, one_gpu_16_gb, one_node_8_gpus

ALGORITHMS = {
    "greso": {"greso": {}},
    "dynamic_sampling": {"dynamic_sampling": {}},
    "replay": {"replay": {"ratio": 0.5}},
    "plain": {},
}
TOGETHER = {"greso": {}, "dynamic_sampling": {}, "replay": {"ratio": 0.5}}


def get_config(arg: str = "nano") -> ConfigDict:
    """The problems of `configs/math.py`, few enough to be met again: GRESO passes over tasks that lately taught
    nothing, dynamic sampling drops groups without a signal, replay uses groups a second time.

    nano       2 CPU cores        python -m flowjax.launch --config=configs/math_efficient.py:nano
               all three; nano_greso, nano_dynamic_sampling and nano_replay have one, nano_plain none
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_efficient.py:qwen3_8b \\
               --config.env.options.path=deepscaler.json                                   (never run)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                         (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.math:Math"
    config.env.max_turns = 1
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "grpo"
    config.dataflow.algorithms = ConfigDict(TOGETHER)
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "math")
    config.name = "math-efficient-nano"
    config.env.options = ConfigDict({"answer": "whole", "digits": 2, "terms": 2, "operators": "+"})
    config.env.train_tasks = 512
    config.engine.max_model_tokens = 32
    config.rollout.max_prompt_tokens = 7
    config.rollout.max_new_tokens = 5
    config.trainer.steps = 60
    config.trainer.row_tokens = 16
    config.warm_start.label_noise = 0.4


def _nano_with(config: ConfigDict, name: str) -> None:
    _nano(config)
    config.name += f"-{name.replace('_', '-')}"
    config.dataflow.algorithms = ConfigDict(ALGORITHMS[name])


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "math-efficient")
    config.env.options = ConfigDict({"path": "", "answer": "boxed"})
    config.env.train_tasks = 8000
    config.engine.max_model_tokens = 16384
    config.rollout.max_prompt_tokens = 2048
    config.rollout.max_new_tokens = 14336
    config.rollout.episode_timeout_s = 1800.0
    config.trainer.groups_per_step = 32
    config.trainer.steps = 200
    config.trainer.row_tokens = 16384


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "math-efficient")
    config.env.options = ConfigDict({"path": "", "answer": "boxed"})
    config.env.train_tasks = 8000
    lengths(config, prompt_tokens=1024, reply_tokens=3072)
    config.rollout.episode_timeout_s = 900.0


VARIANTS = {
    "nano": _nano,
    **{f"nano_{name}": partial(_nano_with, name=name) for name in ALGORITHMS},
    "qwen3_8b": _qwen3_8b,
    "qwen3_0_6b": _qwen3_0_6b,
}
