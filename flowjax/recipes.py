"""Presets that recipes share: what follows from the machine and the size of the model, not from the world.

A recipe calls one first and then sets what is its own; what it sets after the preset counts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.credit import ESTIMATORS

Variant = Callable[[ConfigDict], None]


def find_variant(variants: Mapping[str, Variant], name: str, recipe: str) -> Variant:
    """The variant of that name; `recipe` is the recipe's `__file__`.

    Raises:
        ConfigError: there is none.
    """
    if name not in variants:
        path, meant = "/".join(Path(recipe).parts[-2:]), f"{next(iter(variants))},{name}"
        hint = f" (an estimator comes after one: {meant})" if name in ESTIMATORS else ""
        raise ConfigError(f"{path} has no variant {name!r}{hint}: use one of {', '.join(variants)}")
    return variants[name]


def nano_on_two_cores(config: ConfigDict, world: str) -> None:
    """A model of 0.8 M parameters in float32, engine and trainer on two CPU cores: prompts as short as they come, large
    batches of short rows, and an adapter that learns fast."""
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
    """An episode as one growing conversation, with a nano base of its own: it is taught on conversations."""
    config.name += "-append"
    config.model.path += "-append"
    config.env.context = "append"


def one_node_8_gpus(config: ConfigDict, world: str) -> None:
    """Qwen3-8B with an adapter of rank 64 on eight GPUs of 80 GB: the engine on four, the trainer on the other four."""
    config.name = f"{world}-qwen3-8b"
    config.model.path = "models/Qwen3-8B"
    config.policy.lora.rank = 64
    config.policy.lora.alpha = 64.0
    config.engine.tensor_parallel = 4
    config.engine.prompts_per_request = 1  # long replies: none waits for another
    config.mesh.fsdp = 4
    config.rollout.max_concurrent_episodes = 256
    config.trainer.micro_batch_rows = 4
    config.optimizer.learning_rate = 2e-5
