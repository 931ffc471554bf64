"""A planner, and a solver that reads its plan before it answers, which learn together."""

from ml_collections import ConfigDict

from flowjax.recipes import find_variant, recipe_beside


def get_config(arg: str = "nano") -> ConfigDict:
    """`configs/math_pair.py` with a planner before the solver instead of a verifier after it, both rewarded for the
    answer.

    nano       2 CPU cores        python -m flowjax.launch --config=configs/math_plan.py:nano
               sums of six one-digit numbers; the base leaves them to the solver, the trained planner plans
               (held-out success, greedy, three seeds: docs/workflows.md)
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_plan.py:qwen3_8b
               problems: data/deepscaler.json, or --config.env.options.path=FILE            (never run)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                          (never run)
    """
    choose = find_variant(VARIANTS, arg, __file__)
    config = recipe_beside(__file__, "math_pair", arg)
    config.name = f"math-plan-{arg.replace('_', '-')}"
    config.workflow = "flowjax.workflows.plan_solve:play"
    config.policies = ConfigDict({"planner": {}, "solver": {}})
    config.agents = ConfigDict({"planner": "planner", "solver": "solver"})
    choose(config)
    return config


def _nano(config: ConfigDict) -> None:
    config.model.path = "models/nano-math-plan"
    config.env.options = ConfigDict({"answer": "whole", "digits": 1, "terms": 6, "operators": "+"})
    config.rollout.max_prompt_tokens = 22  # 13 of a sum, a word, and a plan
    config.rollout.max_new_tokens = 8
    config.trainer.steps = 60
    config.trainer.row_tokens = 30
    config.warm_start.steps = 1200
    config.warm_start.states = config.warm_start.tasks = 150_000
    # The planner's base is taught to plan, with the habit (noisy labels) of leaving the sum to the solver.
    config.warm_start.label_noise = 0.9


def _as_the_pair(config: ConfigDict) -> None:
    del config


VARIANTS = {"nano": _nano, "qwen3_8b": _as_the_pair, "qwen3_0_6b": _as_the_pair}
