"""A solver that answers twice, and a selector of its answers, which learn together."""

from ml_collections import ConfigDict

from flowjax.recipes import find_variant, recipe_beside


def get_config(arg: str = "nano") -> ConfigDict:
    """`configs/math_pair.py` with a selector in the verifier's place: it sees two answers and chooses one.

    nano       2 CPU cores        python -m flowjax.launch --config=configs/math_select.py:nano
               the solver learns, the selector adds nothing: docs/workflows.md
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_select.py:qwen3_8b
               problems: data/deepscaler.json, or --config.env.options.path=FILE            (never run)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                          (never run)
    """
    choose = find_variant(VARIANTS, arg, __file__)
    config = recipe_beside(__file__, "math_pair", arg)
    config.name = f"math-select-{arg.replace('_', '-')}"
    config.workflow = "flowjax.workflows.solve_select:play"
    # Pairs of equally good answers score 1/2 whichever is chosen: such a choice made no difference. Where few pairs of
    # a group differ, GRPO's division by its small deviation would weigh these choices more; Dr. GRPO does not divide.
    selector = {"reward": {"components": {"partial_score": 1.0}}, "credit": {"name": "dr_grpo"}}
    config.policies = ConfigDict({"solver": {}, "selector": selector})
    config.agents = ConfigDict({"solver": "solver", "selector": "selector"})
    choose(config)
    return config


def _nano(config: ConfigDict) -> None:
    config.model.path = "models/nano-math-select"
    config.rollout.max_prompt_tokens = 19  # a sum, two words, and two answers that may be too long
    config.trainer.row_tokens = 24


def _as_the_pair(config: ConfigDict) -> None:
    del config


VARIANTS = {"nano": _nano, "qwen3_8b": _as_the_pair, "qwen3_0_6b": _as_the_pair}
