"""Parameters declared once: shape, logical axes, initialiser and dtype together; arrays and placements derive from it.

Matrices are stored [in, out], and those of the layers stacked [layers, in, out], so that one scan runs all layers and
a checkpoint holds few, big arrays.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from flowjax.models.config import ModelConfig
from flowjax.models.sharding import Placement

Initializer = Callable[..., jax.Array]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension, see sharding.ShardingRules
    init: Initializer
    dtype: DTypeLike


@dataclass(frozen=True)
class Normal:
    """N(0, std^2). A dataclass and no closure: equal parameters then share one compiled initialiser."""

    std: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return self.std * jax.random.normal(key, shape, dtype)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def matrix_sizes(config: ModelConfig) -> dict[str, tuple[tuple[int, str], tuple[int, str]]]:
    """(size, logical axis) of input and output of every linear map in a layer, by Hugging Face's module name."""
    embed, heads = (config.hidden_size, "embed"), (config.query_size, "heads")
    kv_heads, ffn = (config.kv_size, "kv_heads"), (config.ffn_size, "ffn")
    return {
        "q_proj": (embed, heads),
        "k_proj": (embed, kv_heads),
        "v_proj": (embed, kv_heads),
        "o_proj": (heads, embed),
        "gate_proj": (embed, ffn),
        "up_proj": (embed, ffn),
        "down_proj": (ffn, embed),
    }


def layer_specs(config: ModelConfig, dtype: DTypeLike) -> dict[str, ParamSpec]:
    """The stacked parameters of all layers."""
    count, std = config.layers, 0.02
    residual_std = std / (2 * count) ** 0.5  # GPT-2: the residual sum of 2 * layers branches keeps its scale
    specs = {}
    for name, ((size_in, axis_in), (size_out, axis_out)) in matrix_sizes(config).items():
        init = Normal(residual_std if name in ("o_proj", "down_proj") else std)
        specs[name] = ParamSpec((count, size_in, size_out), ("layers", axis_in, axis_out), init, dtype)
    for name in ("input_norm", "ffn_norm"):
        specs[name] = ParamSpec((count, config.hidden_size), ("layers", None), ones, dtype)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            specs[name] = ParamSpec((count, config.head_dim), ("layers", None), ones, dtype)
    if config.qkv_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            size, axis = matrix_sizes(config)[name][1]
            specs[f"{name}_bias"] = ParamSpec((count, size), ("layers", axis), zeros, dtype)
    return specs


def outer_specs(config: ModelConfig, dtype: DTypeLike) -> dict[str, ParamSpec]:
    """The parameters outside the layers."""
    specs = {
        "embedding": ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), Normal(0.02), dtype),
        "final_norm": ParamSpec((config.hidden_size,), (None,), ones, dtype),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec((config.hidden_size, config.vocab_size), ("embed", "vocab"), Normal(0.02), dtype)
    return specs


def initialise(specs: Mapping[str, ParamSpec], key: jax.Array, placement: Placement | None) -> dict[str, jax.Array]:
    """Random arrays for `specs`, made in place on the devices that hold them; the same on every mesh."""
    keys = jax.random.split(key, len(specs))
    return {
        name: _maker(spec, placement and placement.of(spec.axes))(key)
        for key, (name, spec) in zip(keys, specs.items(), strict=True)
    }


@functools.cache
def _maker(spec: ParamSpec, sharding: NamedSharding | None) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: spec.init(key, spec.shape, spec.dtype), out_shardings=sharding)
