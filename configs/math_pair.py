"""A solver and a verifier that learn together, each at its own rate."""

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import find_variant, lengths, nano_on_two_cores, one_gpu_16_gb, one_node_8_gpus


def get_config(arg: str = "nano") -> ConfigDict:
    """Two policies on one base: one answers sums, the other approves or rejects the answers.

    nano       2 CPU cores, 4 min     python -m flowjax.launch --config=configs/math_pair.py:nano
               (some minutes more for the base model, which is made once; how it was measured: docs/workflows.md)
               held out, solver 0.50 -> 0.97 [0.95, 0.98], verifier 0.67 -> 0.89 [0.86, 0.92];
               other seeds 0.50 -> 0.95 and 0.66 -> 0.93, 0.46 -> 0.96 and 0.64 -> 0.92
    nano_two_bases    2 CPU cores     python -m flowjax.launch --config=configs/math_pair.py:nano_two_bases
               the verifier on a smaller base of its own, with engine and trainer of its own (run by us for 5 steps)
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_pair.py:qwen3_8b
               problems: data/deepscaler.json, or --config.env.options.path=FILE   (not run by us)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                          (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.math:Math"
    config.env.max_turns = 1
    config.workflow = "flowjax.workflows.solver_verifier:play"
    config.policies = ConfigDict({"solver": {}, "verifier": {}})
    config.agents = ConfigDict({"solver": "solver", "verifier": "verifier"})
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "grpo"
    # Most answers are right: without balance, approving all of them would pay. Dr. GRPO, because dividing by a group's
    # deviation (GRPO) would undo the balancing weights.
    verdict = {"balanced": True, "most_weight": 4.0}
    config.policies.verifier = ConfigDict(
        {"reward": {"components": {"verdict": verdict}}, "credit": {"name": "dr_grpo"}}
    )
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "math-pair")
    config.env.options = ConfigDict({"answer": "whole", "digits": 2, "terms": 2, "operators": "+"})
    config.engine.max_model_tokens = 32
    config.rollout.max_prompt_tokens = 13  # the verifier's: a sum, the word before an answer, and the longest answer
    config.rollout.max_new_tokens = 5
    config.trainer.steps = 100
    config.trainer.row_tokens = 18
    config.optimizer.schedule = "linear"  # to 0: in the end few answers are wrong, and their large weights are noise
    config.warm_start.steps = 1600  # sums are hard to learn: after 800 neither could tell right from wrong
    config.warm_start.noisy_share = 0.15
    config.warm_start.label_noise = 0.5
    config.warm_start.path_noise = 0.5  # half of the answers in the verifier's demonstrations are wrong


def _nano_two_bases(config: ConfigDict) -> None:
    _nano(config)
    config.name = "math-pair-nano-two-bases"
    shape = {"hidden_size": 64, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_size": 192}
    config.bases.small = ConfigDict({"model": {"path": "models/nano-math-pair-small", "nano": shape}})
    config.policies.verifier.policy = ConfigDict({"base": "small"})
    config.separate_trainers = True


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "math-pair")
    config.env.options = ConfigDict({"path": "data/deepscaler.json", "answer": "boxed"})
    lengths(config, prompt_tokens=8192, reply_tokens=8192)
    config.trainer.groups_per_step = 32
    config.trainer.steps = 200


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "math-pair")
    config.env.options = ConfigDict({"path": "data/deepscaler.json", "answer": "boxed"})
    lengths(config, prompt_tokens=3072, reply_tokens=2048)
    config.rollout.episode_timeout_s = 900.0


VARIANTS = {"nano": _nano, "nano_two_bases": _nano_two_bases, "qwen3_8b": _qwen3_8b, "qwen3_0_6b": _qwen3_0_6b}
