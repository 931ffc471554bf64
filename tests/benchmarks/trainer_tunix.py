# pyright: reportMissingImports=false
"""Tunix's RL trainer with its GRPO loss and qwix LoRA, for `tests.benchmarks.trainer`; for the peers' environment."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params
from tunix.rl import algo_core
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.trainer import Trainer as RlTrainer
from tunix.sft.peft_trainer import TrainingConfig

from tests.benchmarks.trainer_case import (
    CLIP,
    CLIP_NORM,
    LEARNING_RATE,
    PAD,
    Case,
    Trainer,
    make_rows,
    padded,
    read_case,
    serve,
)


def _model(case: Case, folder: Path) -> nnx.Module:
    config = qwen3.ModelConfig(
        num_layers=case.layers,
        vocab_size=case.vocab_size,
        embed_dim=case.hidden_size,
        hidden_dim=case.ffn_size,
        num_heads=case.heads,
        head_dim=case.head_dim,
        num_kv_heads=case.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    # Its models put sharding constraints on their values, so that they want a mesh, if only of one device.
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = params.create_model_from_safe_tensors(str(folder / "base"), config, mesh, dtype=jnp.float32)
        provider = qwix.LoraProvider(
            module_path=".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
            rank=case.rank,
            alpha=float(case.rank),
        )
        model_with_adapter: Any = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(0))
        return model_with_adapter


def _set_adapter(model: nnx.Module, arrays: dict[str, np.ndarray]) -> None:
    """Put the case's arrays in place of what qwix drew; every LoRA parameter must be met."""
    left = set(arrays)
    for path, parameter in nnx.iter_graph(model):
        if not isinstance(parameter, nnx.LoRAParam):
            continue
        layer, target = next((str(part), str(path[i + 2])) for i, part in enumerate(path) if isinstance(part, int))
        name = f"{layer}.{target}.{str(path[-1])[-1]}"
        old = parameter.get_value()
        parameter.set_value(jnp.asarray(arrays[name].reshape(old.shape), old.dtype))
        left.discard(name)
    if left:
        raise ValueError(f"the model has no LoRA parameter for {sorted(left)[:3]}")


def make(folder: Path) -> Trainer:
    case, arrays = read_case(folder)
    model = _model(case, folder)
    _set_adapter(model, arrays)
    rows = padded(make_rows(case))
    example = TrainExample(
        prompt_ids=jnp.asarray(rows["prompt_ids"]),
        prompt_mask=jnp.asarray(rows["prompt_mask"]),
        completion_ids=jnp.asarray(rows["completion_ids"]),
        completion_mask=jnp.asarray(rows["completion_mask"]),
        advantages=jnp.asarray(rows["advantages"]),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(rows["behaviour"]),
    )
    config = GRPOConfig(beta=0.0, epsilon=CLIP, loss_agg_mode="token-mean")
    config.temperature = 1.0  # its learner sets it from the rollout's
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(LEARNING_RATE, weight_decay=0.0))
    trainer = RlTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=10**9), dict)
    trainer.with_loss_fn(
        lambda model, train_example: algo_core.grpo_loss_fn(
            model, train_example, algo_config=config, pad_id=PAD, eos_id=-1
        ),
        has_aux=True,
    ).with_gen_model_input_fn(lambda example: {"train_example": example})
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def step() -> tuple[float, float]:
        loss, _, norm = jax.block_until_ready(train_step(example))
        return float(loss), float(norm)

    return Trainer(step)


if __name__ == "__main__":
    serve(make)
