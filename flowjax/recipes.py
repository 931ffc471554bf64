"""Presets that recipes share: settings that follow from the machine and the size of the model, not from the world.

A recipe calls one first and then sets its own fields, which overwrite those of the preset.
"""

import math
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.credit import ESTIMATORS

Variant = Callable[[ConfigDict], None]
T = TypeVar("T")


def find_variant(variants: Mapping[str, T], name: str, recipe: str) -> T:
    """The variant of that name; `recipe` is the recipe's `__file__`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in variants:
        path, meant = "/".join(Path(recipe).parts[-2:]), f"{next(iter(variants))},{name}"
        hint = f" (an estimator comes after one: {meant})" if name in ESTIMATORS else ""
        raise ConfigError(f"{path} has no variant {name!r}{hint}: use one of {', '.join(variants)}")
    return variants[name]


def recipe_beside(recipe: str, name: str, variant: str) -> ConfigDict:
    """The config of a variant of `<name>.py`, a recipe in the folder of `recipe` (a recipe's `__file__`): for a recipe
    that is another one with some changes."""
    return runpy.run_path(str(Path(recipe).with_name(f"{name}.py")))["get_config"](variant)


def nano_on_two_cores(config: ConfigDict, world: str) -> None:
    """A model of 0.8 M parameters in float32, with engine and trainer on two CPU cores: the shortest prompts, large
    batches of short rows, and a high learning rate for the adapter."""
    config.name = f"{world}-nano"
    config.model.path = f"models/nano-{world}"
    config.model.nano = ConfigDict({"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_size": 384})
    config.model.dtype = config.engine.dtype = "float32"
    config.model.remat = "none"
    config.engine.kv_cache_bytes = 256 * 1024**2
    config.env.prompt = "compact"
    config.rollout.group_size = 8
    config.trainer.groups_per_step = 16
    config.trainer.updates_per_step = 2
    config.trainer.micro_batch_rows = 128
    config.optimizer.learning_rate = 1e-3


def as_one_conversation(config: ConfigDict) -> None:
    """An episode as one growing conversation. It needs a nano base of its own, whose warm start is on conversations."""
    config.name += "-append"
    config.model.path += "-append"
    config.env.context = "append"


def one_node_8_gpus(config: ConfigDict, world: str) -> None:
    """Qwen3-8B with an adapter of rank 64 on eight GPUs of 80 GB: the engine on four, the trainer on the other four.

    Each GPU of the trainer has the whole base, 16 GB (data parallel): only the adapter's gradients are then exchanged.
    """
    config.name = f"{world}-qwen3-8b"
    config.model.path = "Qwen/Qwen3-8B"
    config.policy.lora.rank = 64
    config.policy.lora.alpha = 64.0
    config.engine.tensor_parallel = 4
    config.engine.prompts_per_request = 1  # a request is answered as a whole: replies wait for the longest
    config.mesh.data, config.mesh.fsdp = 4, 1
    config.rollout.max_concurrent_episodes = 256
    patient(config)
    config.trainer.micro_batch_rows = 4
    config.optimizer.learning_rate = 2e-5


def on_8_v5e_chips(variant: Variant) -> Variant:
    """A variant for `one_node_8_gpus` on one host of eight TPU chips (v5e, 16 GB each): the engine on four, the trainer
    on the other four. The base is sharded over these (fsdp), since no chip has room for all of it."""

    def build(config: ConfigDict) -> None:
        variant(config)
        config.name += "-v5e"
        config.mesh.data, config.mesh.fsdp = 1, 4
        config.model.remat = "layer"

    return build


def one_gpu_16_gb(config: ConfigDict, world: str) -> None:
    """Qwen3-0.6B with an adapter of rank 32 on one GPU of 16 GB, which engine and trainer share; without thinking.
    `--dry_run --devices=1` plans for it."""
    config.name = f"{world}-qwen3-0-6b"
    config.model.path = "Qwen/Qwen3-0.6B"
    without_thinking(config)
    config.engine.gpu_memory_fraction = 0.45
    # Some 27,000 tokens. Fixed, because vLLM would else measure free memory at its start, which depends on how much the
    # trainer on the same GPU holds at that moment.
    config.engine.kv_cache_bytes = 3 * 1024**3
    config.engine.max_concurrent_sequences = config.rollout.max_concurrent_episodes = 64
    config.engine.prompts_per_request = 1  # see `one_node_8_gpus`
    config.mesh.fsdp = 1
    config.trainer.groups_per_step = 8
    config.trainer.steps = 100
    patient(config)
    config.trainer.micro_batch_rows = 1
    config.trainer.logprob_chunk_tokens = 512
    config.optimizer.learning_rate = 1e-4
    config.eval.tasks = 128


def without_thinking(config: ConfigDict) -> None:
    """Switch Qwen3's thinking off: its thoughts are several times as long as the replies that these recipes allow, and
    a reply that is cut within its thoughts is an invalid action."""
    config.model.template_options = ConfigDict({"enable_thinking": False})


def patient(config: ConfigDict) -> None:
    """Time limits for a real model and its episodes, each of which gets some ten tokens a second in a full batch.

    The longest episodes are mostly failures: with short limits these would be missing in training, which biases it.
    """
    config.engine.start_timeout_s = 1800.0  # weights from a slow disk, kernels that are compiled for the first time
    config.rollout.episode_timeout_s = 1800.0
    config.trainer.step_timeout_s = 7200.0  # for a batch, whose episodes may take an hour


def lengths(config: ConfigDict, *, prompt_tokens: int, reply_tokens: int) -> None:
    """Longest prompt and reply of a turn, and what must hold both: the engine's context, the trainer's rows."""
    config.rollout.max_prompt_tokens = prompt_tokens
    config.rollout.max_new_tokens = reply_tokens
    config.engine.max_model_tokens = config.trainer.row_tokens = prompt_tokens + reply_tokens


@dataclass(frozen=True)
class PublishedRun:
    """Constants of one of verl-agent's example scripts, those of RewardFlow and GiGPO among them.

    tasks, copies: tasks of a batch, and episodes of each task.
    turns: most turns of an episode (`env.max_steps`).
    steps: batches of the run.
    mini_batch_turns: turns of an optimiser update (`ppo_mini_batch_size`).
    options: those of the estimator, `published.<estimator>`.
    history: past turns that a prompt shows.
    kl, entropy: coefficients in the loss.
    warmup: share of the run's updates.
    held_out, held_out_temperature, held_out_every: tasks of an evaluation, their temperature, steps between two.
    """

    estimator: str
    model: str
    tasks: int
    turns: int
    steps: int
    mini_batch_turns: int
    prompt_tokens: int
    options: Mapping[str, float | str]
    copies: int = 8
    reply_tokens: int = 512
    history: int = 2
    kl: float = 0.01
    entropy: float = 0.001
    warmup: float = 0.0
    held_out: int = 128
    held_out_temperature: float = 0.4
    held_out_every: int = 5


def published_variants(
    world: str, runs: Mapping[str, PublishedRun], choose: Callable[[ConfigDict, str], None]
) -> dict[str, Variant]:
    """Variants `published,<estimator>` of a recipe; `choose(config, name)` sets the world's own fields."""

    def build(config: ConfigDict, name: str) -> None:
        published_on_two_gpus(config, world, runs[name])
        choose(config, name)

    return {f"published,{name}": partial(build, name=name) for name in runs}


def published_on_two_gpus(config: ConfigDict, world: str, run: PublishedRun) -> None:
    """A published run on two GPUs of 80 GB, one for the engine and one for the trainer.

    Differences from its script: an adapter of rank 64 is trained instead of all weights, because the KL penalty needs
    the base unchanged, at the scripts' learning rate for adapters (3e-6; 1e-6 for all weights). The number of updates
    per batch is fixed: as many as the script makes of a batch in which every episode takes all its turns. Ratios are
    taken against the engine's log-probabilities; the scripts compute them again before the first update. A prompt that
    is too long ends its episode; the scripts of Search cut it on the left, the others fail.

    The published faults of the estimators (docs/credit) and of reading replies are kept. Those of states are not, since
    a world's keys here hold the whole state: right and wrong answers end in two states, a clicked option is part of the
    state, and looking around does not change it. Validity is the world's, too: an impossible command is penalised in
    ALFWorld and WebShop, a reply without thoughts is not, and a reply with two tags is valid in Search.
    """
    config.name = f"{world}-published-{run.estimator}"
    config.model.path = run.model
    config.policy.lora.rank = 64
    config.policy.lora.alpha = 64.0
    config.mesh.fsdp = 1
    config.engine.prompts_per_request = 1  # see `one_node_8_gpus`
    lengths(config, prompt_tokens=run.prompt_tokens, reply_tokens=run.reply_tokens)
    patient(config)
    config.env.max_turns = run.turns
    config.env.history = run.history
    config.rollout.group_size = run.copies
    config.reward.components = ConfigDict({"env_return": 1.0})  # what the published estimators read from the turns
    config.credit.name = f"published.{run.estimator}"
    config.credit.options = ConfigDict(dict(run.options))
    config.loss.options = ConfigDict({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token_mean"})
    config.loss.kl_coefficient = run.kl
    config.loss.entropy_coefficient = run.entropy
    config.dataflow.max_staleness = 0  # on-policy: each batch is played by the version that it trains
    config.trainer.groups_per_step = run.tasks
    config.trainer.updates_per_step = math.ceil(run.tasks * run.copies * run.turns / run.mini_batch_turns)
    config.trainer.steps = run.steps
    config.trainer.micro_batch_rows = 8
    config.optimizer.learning_rate = 3e-6
    config.optimizer.warmup_steps = round(run.warmup * run.steps * config.trainer.updates_per_step)
    config.optimizer.betas = (0.9, 0.999)
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.eval.tasks = run.held_out
    config.eval.temperature = run.held_out_temperature
    config.eval.every_steps = run.held_out_every
