"""A router that learns which problems a small model solves, and sends the others to a large one."""

from ml_collections import ConfigDict

from flowjax.recipes import find_variant, recipe_beside, without_thinking


def get_config(arg: str = "nano") -> ConfigDict:
    """`configs/math.py` with a router that chooses which of two models answers. Only the router is trained.

    nano       2 CPU cores        python -m flowjax.launch --config=configs/math_router.py:nano
               sums of two to six one-digit numbers, of which the small model has seen those of two and three;
               held out 0.71 -> 0.91, 0.71 -> 0.93, 0.73 -> 0.92, the large model asked for 0.77 to 0.79 of them
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_router.py:qwen3_8b
               Qwen3-8B without thinking and with it; problems: data/deepscaler.json,
               or --config.env.options.path=FILE                                            (never run)
    qwen3_0_6b 2 GPUs of 16 GB, the same of Qwen3-0.6B                                      (never run)
    """
    choose = find_variant(VARIANTS, arg, __file__)
    config = recipe_beside(__file__, "math", "nano_direct" if arg == "nano" else arg)
    config.name = f"math-router-{arg.replace('_', '-')}"
    config.workflow = "flowjax.workflows.router:play"
    config.policies = ConfigDict({"router": {}})
    config.agents = ConfigDict({"router": "router", "small": "base", "large": "large"})
    config.reward.components = ConfigDict({"partial_score": 1.0})
    config.credit.name = "dr_grpo"
    choose(config)
    return config


def _nano(config: ConfigDict) -> None:
    config.model.path = "models/nano-math-router"
    config.env.options.update({"digits": 1, "terms": 6, "fewest_terms": 2})
    config.warm_start.steps = 1600
    config.warm_start.label_noise = 0.0
    shape = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_size": 192}
    small = {"path": "models/nano-math-router-small", "nano": shape}
    # The small model has seen no sum of more than three terms, so the router is trained on the large model's base.
    config.bases.small = ConfigDict({"model": small, "warm_start": {"steps": 600, "env_options": {"terms": 3}}})
    config.agents.small, config.agents.large = "small", "base"
    config.rollout.max_prompt_tokens = 14  # a sum, and a word
    config.trainer.row_tokens = 19


def _qwen3_8b(config: ConfigDict) -> None:
    config.engine.tensor_parallel = 2
    config.rollout.episode_timeout_s = 3600.0  # two answers, one after the other
    _with_and_without_thinking(config)


def _with_and_without_thinking(config: ConfigDict) -> None:
    """The large model is the small one with thinking switched on, which costs more tokens."""
    without_thinking(config)
    thinking = {"path": config.model.path, "template_options": {"enable_thinking": True}}
    config.bases.large = ConfigDict({"model": thinking})


VARIANTS = {"nano": _nano, "qwen3_8b": _qwen3_8b, "qwen3_0_6b": _with_and_without_thinking}
