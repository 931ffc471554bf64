"""A writer of programs and a tester of them that learn together."""

from ml_collections import ConfigDict

from flowjax.recipes import find_variant, recipe_beside


def get_config(arg: str = "nano") -> ConfigDict:
    """`configs/code.py` with two policies on one base: one writes a program, the other writes tests for it, and a
    program that fails them is written again.

    Needs bubblewrap (apt-get install bubblewrap).

    nano       2 CPU cores        python -m flowjax.launch --config=configs/code_pair.py:nano
               generated problems of integers in one or two steps; three seeds: docs/worlds/code.md
               played greedily the base writes right tests for 10 % of held-out problems, the trained tester for 74 %;
               its writer gains a temperature only (93 and 100 %)
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/code_pair.py:qwen3_8b   (never run)
               problems with solutions in data/deepcoder.jsonl; held out: one in eight of them
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                                  (never run)
    """
    choose = find_variant(VARIANTS, arg, __file__)
    config = recipe_beside(__file__, "code", arg)
    config.name = f"code-pair-{arg.replace('_', '-')}"
    config.workflow = "flowjax.workflows.writer_tester:play"
    config.policies = ConfigDict({"writer": {}, "tester": {}})
    config.agents = ConfigDict({"writer": "writer", "tester": "tester"})
    # The tester's reward: half for right tests, half for a right verdict on the program. Without balance, tests that
    # every program passes would pay.
    half = {"weight": 0.5, "balanced": True, "most_weight": 4.0}
    config.policies.tester = ConfigDict(
        {"reward": {"components": {"partial_score": 0.5, "verdict": half}}, "credit": {"name": "dr_grpo"}}
    )
    choose(config)
    return config


def _nano(config: ConfigDict) -> None:
    config.model.path = "models/nano-code-pair"
    config.env.step_timeout_s = 485.0  # a step may judge two programs, and on a busy machine each of them twice
    config.rollout.episode_timeout_s = 1500.0  # three steps on a busy machine
    config.dataflow.lease_s = 600.0
    config.rollout.max_prompt_tokens = 9  # a problem of eight words, and a word that asks for a program or a test
    config.trainer.row_tokens = 37
    config.trainer.groups_per_step = 8
    config.trainer.steps = 60
    config.warm_start.steps = 1200  # after 400 one test in a thousand was right: results are harder than programs


def _real_problems(config: ConfigDict) -> None:
    config.env.options.held_out_path = ""  # the held-out file of configs/code.py has no solutions, which testers need
    config.env.step_timeout_s = 1205.0
    config.dataflow.lease_s = 1260.0
    config.rollout.episode_timeout_s = 3600.0


VARIANTS = {"nano": _nano, "qwen3_8b": _real_problems, "qwen3_0_6b": _real_problems}
