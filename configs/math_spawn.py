"""An agent that may have parts of its problem answered by helpers, all of them one policy."""

from ml_collections import ConfigDict

from flowjax.recipes import find_variant, lengths, recipe_beside


def get_config(arg: str = "nano") -> ConfigDict:
    """`configs/math.py` with problems that an agent may split: `config.env.max_turns` replies for all that are asked.

    nano       2 CPU cores        python -m flowjax.launch --config=configs/math_spawn.py:nano
               sums of four two-digit numbers; the base answers at once, and the trained agent has them split
               (held-out success, greedy, three seeds: docs/workflows.md)
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_spawn.py:qwen3_8b
               problems: data/deepscaler.json, or --config.env.options.path=FILE            (never run)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                          (never run)
    """
    choose = find_variant(VARIANTS, arg, __file__)
    config = recipe_beside(__file__, "math", "nano_direct" if arg == "nano" else arg)
    config.name = f"math-spawn-{arg.replace('_', '-')}"
    config.workflow = "flowjax.workflows.spawn:play"
    config.agents = ConfigDict({"agent": "agent", "helper": "agent"})
    config.env.max_turns = 8
    choose(config)
    return config


def _nano(config: ConfigDict) -> None:
    config.model.path = "models/nano-math-spawn"
    config.env.max_turns = 12
    config.env.options = ConfigDict({"answer": "whole", "digits": 2, "terms": 4, "operators": "+"})
    config.engine.max_model_tokens = 64
    config.rollout.max_prompt_tokens = 32  # 13 of a sum, and a few answers that may be too long
    config.rollout.max_new_tokens = 20  # a spawn of two sums of two numbers has 16
    config.trainer.steps = 60
    config.trainer.row_tokens = 52
    config.optimizer.schedule = "linear"  # to 0, as in configs/math.py
    config.warm_start.steps = 1200
    config.warm_start.states = config.warm_start.tasks = 150_000
    # The base is taught to split sums, with the habit (noisy labels) of answering at once.
    config.warm_start.label_noise = 0.9


def _qwen3_8b(config: ConfigDict) -> None:
    lengths(config, prompt_tokens=8192, reply_tokens=4096)  # an episode has several replies, one after the other
    config.rollout.episode_timeout_s = 3600.0


def _qwen3_0_6b(config: ConfigDict) -> None:
    lengths(config, prompt_tokens=3072, reply_tokens=1024)


VARIANTS = {"nano": _nano, "qwen3_8b": _qwen3_8b, "qwen3_0_6b": _qwen3_0_6b}
