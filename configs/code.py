"""Programs that pass tests."""

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import find_variant, lengths, nano_on_two_cores, one_gpu_16_gb, one_node_8_gpus


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that writes one Python program per problem, judged in a sandbox by tests that it does not see.

    Needs bubblewrap (apt-get install bubblewrap).

    nano       2 CPU cores   python -m flowjax.launch --config=configs/code.py:nano
               generated problems of one or two steps, programs of up to 26 words
               held-out success of greedy play 0.81 -> 0.96, 0.96, 1.00 on three seeds (docs/worlds/code.md)
    qwen3_8b   8 x A100 80 GB   python -m flowjax.launch --config=configs/code.py:qwen3_8b   (not run by us)
               problems in data/deepcoder.jsonl; held out: data/lcb_v5.jsonl (docs/worlds/code.md)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking   (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.code:Code"
    config.env.max_turns = 1
    config.env.workers = 2
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "grpo"
    config.env.step_timeout_s = 245.0  # time to judge twice a program that got no processor the first time
    config.dataflow.lease_s = 300.0
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "code")
    config.env.options = ConfigDict({"kinds": ("int",), "steps": 2})
    config.engine.max_model_tokens = 40
    config.rollout.max_prompt_tokens = 8
    config.rollout.max_new_tokens = 28
    config.trainer.steps = 30
    config.trainer.row_tokens = 36
    config.eval.tasks = 256
    config.warm_start.states = 20_000
    config.warm_start.steps = 200


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "code")
    _real_problems(config)
    config.env.workers = 16
    lengths(config, prompt_tokens=6144, reply_tokens=16384)
    config.trainer.groups_per_step = 32
    config.trainer.steps = 200


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "code")
    _real_problems(config)
    config.env.workers = 4
    lengths(config, prompt_tokens=3072, reply_tokens=2048)


def _real_problems(config: ConfigDict) -> None:
    config.env.options = ConfigDict(
        {
            "path": "data/deepcoder.jsonl",
            "held_out_path": "data/lcb_v5.jsonl",
            "cpu_s": 60.0,
            "case_cpu_s": 6.0,
            "wall_guard_s": 300.0,
        }
    )
    config.env.step_timeout_s = 605.0
    config.dataflow.lease_s = 660.0


VARIANTS = {"nano": _nano, "qwen3_8b": _qwen3_8b, "qwen3_0_6b": _qwen3_0_6b}
