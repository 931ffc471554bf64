"""Tiny models, and the same models in transformers: helpers of the tests in this folder."""

import dataclasses
import functools
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import AutoConfig, AutoModelForCausalLM

from flowjax.models.decoder import Decoder, set_adapter
from flowjax.models.lora import Lora
from flowjax.models.shape import ModelConfig

TINY = ModelConfig(
    vocab_size=64, hidden_size=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_size=40, rope_theta=1e4
)
HF_SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def make_hf_folder(folder: Path, model_type: str, **fields) -> Path:
    """A random transformers model, its norms and biases random too, saved in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **HF_SIZES | fields))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.float().save_pretrained(folder)
    return folder


def hf_logprobs(model, tokens: np.ndarray) -> np.ndarray:
    """[rows, tokens, vocab] log-probabilities of a transformers model."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(tokens)).logits, dim=-1).numpy()


def logprobs(decoder: Decoder, tokens: Any, positions: Any = None, segments: Any = None, **options) -> np.ndarray:
    """[rows, tokens, vocab] log-probabilities of a decoder; one sequence per row unless told otherwise."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segments = np.ones_like(tokens) if segments is None else segments
    return np.asarray(_logprobs(*nnx.split(decoder), tokens, positions, segments, **options))


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(graph: Any, state: Any, tokens: jax.Array, positions: jax.Array, segments: jax.Array, **options):
    decoder = nnx.merge(graph, state)
    return jax.nn.log_softmax(decoder(tokens, positions, segments, **options) @ decoder.head(), axis=-1)


def tiny_decoder(lora: Lora | None = None, **changes) -> Decoder:
    """A float32 decoder whose every array, the adapter's too, is random and depends on its name alone."""
    config = dataclasses.replace(TINY, **changes)
    decoder = nnx.eval_shape(lambda: Decoder(config, lora=lora, dtype=jnp.float32, remat="none", key=jax.random.key(0)))
    for path, param in nnx.to_flat_state(nnx.state(decoder)):
        shape = param.get_value().shape
        random = np.random.default_rng(zlib.crc32(repr(path).encode()))
        param.set_value(jnp.asarray(random.normal(float("norm" in str(path[-1])), 0.2, shape), jnp.float32))
    return decoder


def randomise_adapter(decoder: Decoder, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    arrays = {
        target: {part: random.normal(0, 0.3, param.get_value().shape) for part, param in parts.items()}
        for target, parts in decoder.adapter.items()
    }
    set_adapter(decoder, arrays)
