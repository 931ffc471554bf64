"""Workflows built step by step (CWRPO): the canvas, with credit by comparison within a group."""

from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.recipes import (
    as_one_conversation,
    find_variant,
    lengths,
    nano_on_two_cores,
    one_gpu_16_gb,
    one_node_8_gpus,
    without_thinking,
)


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that edits a workflow of operators, which runs after each edit; the answer of its last run counts.

    Needs bubblewrap (apt-get install bubblewrap): workflows run programs.

    nano          2 CPU cores          python -m flowjax.launch --config=configs/canvas.py:nano
                  two executors of different skill and price, simulated: docs/worlds/canvas.md
                  held-out correct 0.37 [0.33, 0.42] -> 0.69 [0.65, 0.73], mean reward -0.94 -> 0.51; one seed, 23 min
                  beside nine other processes, and 9 min for the base model, which is made once
    nano_append   the same, an episode being one growing conversation
    nano_grpo     the same as nano, rewarded for right answers alone
    nano_llm      2 CPU cores          python -m flowjax.launch --config=configs/canvas.py:nano_llm
                  the executor is a language model of 0.9 M parameters on an engine of its own, taught on what operators
                  ask
    nano_llm_grpo    the same, rewarded for right answers and few requests alone; 8 min, and 25 for the bases, once
                  held-out correct, greedy, 16.5 % [13.5, 20.2] -> 75.6 % [71.9, 79.2], five seeds; the best fixed
                  workflow has 67.8 % [63.7, 71.8]: docs/worlds/canvas.md
    nano_llm_sizes   two sizes of it at different prices, an engine each, and right answers less what they cost rewarded
                  held-out correct, greedy, 11.4 % [8.8, 14.3] -> 68.5 % [64.4, 72.3], one seed: docs/worlds/canvas.md
    qwen3_8b      8 x A100 80 GB, and an executor, without thinking   (not run by us)
                  python -m flowjax.launch --config=configs/canvas.py:qwen3_8b
                  problems: data/flowsteer (docs/worlds/canvas.md), or --config.env.options.path=FOLDER
                  the executor is the run's own base model, on all its engines; for another model name one of
                  config.bases in config.env.options.backends.executor.base, for an endpoint give it kind openai
    qwen3_0_6b    1 GPU of 16 GB, its model the executor as well, without thinking   (never run)
    """
    config = default_config()
    config.env.name = "flowjax.envs.canvas:Canvas"
    config.env.max_turns = 20
    config.env.options = ConfigDict(
        {
            "turns": 20,
            "path": "",
            "step_s": 8.0,
            "max_calls": 100,
            "max_tokens": 200_000,
        }
    )
    config.reward.components = ConfigDict({"canvas": {"weight": 1.0}, "invalid_actions": 0.05, "turn_penalty": 0.01})
    config.credit.name = "grpo"
    config.loss.options.clip_low = config.loss.options.clip_high = 0.2
    config.loss.options.aggregation = "trajectory_mean_token_mean"
    config.loss.kl_coefficient = 0.005
    find_variant(VARIANTS, arg, __file__)(config)
    return config


def _nano(config: ConfigDict) -> None:
    nano_on_two_cores(config, "canvas")
    config.env.max_turns = config.env.options.turns = 7
    config.env.options.expert = "plain"
    solver = "flowjax.envs.canvas.offline:SimulatedSolver"
    config.env.options.backends = ConfigDict(
        {
            "small": {"kind": solver, "reasoning_tokens": 60, "prices": {"prompt": 1.0, "sampled": 4.0}},
            "large": {
                "kind": solver,
                "skill": 0.15,
                "reasoning_tokens": 60,
                "prices": {"prompt": 5.0, "sampled": 20.0},
            },
        }
    )
    config.env.options.default_backend = "small"
    config.reward.components.executor_cost = ConfigDict({"weight": 1.0, "per_calls": 1e6, "per_cost": 0.05})
    config.engine.max_model_tokens = 128
    config.rollout.max_prompt_tokens = 108
    config.rollout.max_new_tokens = 20
    config.trainer.steps = 45
    config.trainer.row_tokens = 128
    config.trainer.micro_batch_rows = 64
    config.trainer.trim_micro_batches = True  # most prompts are far shorter than a row
    config.warm_start.states = 3000  # few, since the demonstrations' programs really run
    config.warm_start.steps = 300
    config.warm_start.batch_rows = 64
    config.warm_start.label_noise = 0.3


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    as_one_conversation(config)
    episode_tokens = 256  # the first prompt, and seven turns: a reply of at most twenty words, seven of an observation
    config.engine.max_model_tokens = config.trainer.row_tokens = episode_tokens
    config.rollout.max_prompt_tokens = episode_tokens - config.rollout.max_new_tokens
    config.trainer.micro_batch_rows = 32
    config.warm_start.batch_rows = 48  # conversations


def _nano_grpo(config: ConfigDict) -> None:
    _nano(config)
    config.name = "canvas-nano-grpo"
    _pay_right_answers(config)
    del config.reward.components.executor_cost


def _pay_right_answers(config: ConfigDict) -> None:
    """Reward right answers, and no longer the structure of workflows."""
    del config.reward.components.canvas
    config.reward.components.success = 1.0


def _nano_llm(config: ConfigDict) -> None:
    _nano(config)
    config.name = "canvas-nano-llm"
    config.model.path = "models/nano-canvas-llm"  # another vocabulary than nano's: there is only one executor to name
    config.bases = ConfigDict(
        {
            "executor": {
                "model": {"path": "models/nano-canvas-executor", "nano": config.model.nano.to_dict()},
                "engine": {"max_model_tokens": 512},  # a program that is corrected twice, with the prompts for it
                "warm_start": {"states": 60_000, "steps": 2500, "batch_rows": 56, "learning_rate": 1e-3},
            }
        }
    )
    # The executor is taught to reply in JSON where asked to; decoding under a schema would cost more than the reply.
    backend = {"kind": "run", "base": "executor", "structured": False, "prices": {"prompt": 1.0, "sampled": 4.0}}
    options = config.env.options
    options.backends, options.default_backend = ConfigDict({"executor": backend}), "executor"
    options.expert = "instructing"  # the base tells kinds of exercises apart, but gives them phrases that do not suit
    options.temperature = 0.7  # so that parallel branches differ
    options.max_new_tokens, options.retry_new_tokens = 128, 0
    options.step_s = 120.0  # all episodes of a batch ask the executor at the same time
    config.env.step_timeout_s = 150.0
    config.rollout.episode_timeout_s = 600.0
    config.dataflow.lease_s = 300.0
    config.env.train_tasks = config.warm_start.tasks = 40_000
    # Groups whose answers are all wrong differ only in their numbers of requests: small differences, which GRPO's
    # division by the deviation would blow up.
    config.credit.name = "dr_grpo"
    config.trainer.steps = 60
    config.reward.components.executor_cost = ConfigDict({"weight": 1.0, "per_calls": 50.0})


def _nano_llm_grpo(config: ConfigDict) -> None:
    _nano_llm(config)
    config.name = "canvas-nano-llm-grpo"
    _pay_right_answers(config)


def _nano_llm_sizes(config: ConfigDict) -> None:
    _nano_llm(config)
    config.name = "canvas-nano-llm-sizes"
    config.model.path = "models/nano-canvas-llm-sizes"  # a base of its own: its vocabulary has the executors' names
    large = config.bases.executor.to_dict()
    shape = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_size": 192}
    small = {**large, "model": {"path": "models/nano-canvas-executor-small", "nano": shape}}
    config.bases = ConfigDict({"small": small, "large": large})
    backend = config.env.options.backends.executor.to_dict()
    config.env.options.backends = ConfigDict(
        {
            "small": {**backend, "base": "small"},
            "large": {**backend, "base": "large", "prices": {"prompt": 5.0, "sampled": 20.0}},
        }
    )
    config.env.options.default_backend = "small"
    _pay_right_answers(config)  # minus costs: a request to the large model costs a tenth of a right answer
    config.reward.components.executor_cost = ConfigDict({"weight": 1.0, "per_calls": 1e6, "per_cost": 0.005})


def _qwen3_8b(config: ConfigDict) -> None:
    one_node_8_gpus(config, "canvas")
    without_thinking(config)
    _executor_of_the_run(config)
    config.policy.lora.targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    config.engine.max_model_tokens = 16384
    config.rollout.max_prompt_tokens = 15872
    config.rollout.max_new_tokens = 512
    config.rollout.temperature = config.eval.temperature = 0.6
    config.trainer.groups_per_step = 16
    config.trainer.steps = 300
    config.trainer.row_tokens = 16384
    config.optimizer.learning_rate = 1e-5
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.01


def _qwen3_0_6b(config: ConfigDict) -> None:
    one_gpu_16_gb(config, "canvas")
    _executor_of_the_run(config)
    lengths(config, prompt_tokens=7680, reply_tokens=512)
    config.rollout.temperature = config.eval.temperature = 0.6


def _executor_of_the_run(config: ConfigDict) -> None:
    config.env.options.backends = ConfigDict({"executor": {"kind": "run", "base": "base"}})
    config.env.options.path = "data/flowsteer"
    config.env.options.step_s = 550.0
    config.env.options.max_seconds = 3000.0
    config.env.options.max_tokens = 2_000_000
    config.env.context = "append"
    config.env.step_timeout_s = 600.0
    config.env.workers = 4
    config.rollout.episode_timeout_s = 3600.0
    config.dataflow.lease_s = 3900.0


VARIANTS = {
    "nano": _nano,
    "nano_append": _nano_append,
    "nano_grpo": _nano_grpo,
    "nano_llm": _nano_llm,
    "nano_llm_grpo": _nano_llm_grpo,
    "nano_llm_sizes": _nano_llm_sizes,
    "qwen3_8b": _qwen3_8b,
    "qwen3_0_6b": _qwen3_0_6b,
}
