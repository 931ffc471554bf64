"""Parameters declared once: shape, logical axes, initialiser and dtype together; arrays and placements derive from it.

Matrices are stored [in, out], and those of the layers stacked [layers, in, out], so that few scans run all layers and
a checkpoint holds few, big arrays. Layers that differ in their parameters are scanned as blocks of repeating periods.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from flowjax.models.shape import ModelConfig

Initializer = Callable[..., jax.Array]
# An array of JAX once it is placed or traced; of numpy on the host, and where JAX passes a constant of the program on.
# Type checkers see JAX's alone, whose arithmetic the code uses.
if TYPE_CHECKING:
    Placeable = Array
else:
    Placeable = Array | np.ndarray


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension, see sharding.ShardingRules
    init: Initializer
    dtype: DTypeLike


@dataclass(frozen=True)
class Normal:
    """N(0, std^2). A dataclass, not a closure, so that equal ones hash alike and share one compiled initialiser."""

    std: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return self.std * jax.random.normal(key, shape, dtype)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # of every layer
DENSE = ("gate_proj", "up_proj", "down_proj")  # of layers with an ordinary feed-forward map
EXPERT = tuple(f"expert_{name}" for name in DENSE)  # of each expert
SPARSE = ("router", *EXPERT)  # of layers with experts
ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def matrix_sizes(config: ModelConfig) -> dict[str, tuple[tuple[int, str | None], tuple[int, str | None]]]:
    """(size, logical axis) of input and output of every linear map in a layer, by the parameter's name: Hugging Face's,
    except for router and experts. For experts, the map of a single one."""
    embed, heads = (config.hidden_size, "embed"), (config.query_size, "heads")
    kv_heads, ffn = (config.kv_size, "kv_heads"), (config.ffn_size, "ffn")
    maps: dict[str, tuple[tuple[int, str | None], tuple[int, str | None]]] = {
        "q_proj": (embed, heads),
        "k_proj": (embed, kv_heads),
        "v_proj": (embed, kv_heads),
        "o_proj": (heads, embed),
        "gate_proj": (embed, ffn),
        "up_proj": (embed, ffn),
        "down_proj": (ffn, embed),
    }
    if experts := config.experts:
        hidden, inner = (config.hidden_size, "expert_embed"), (experts.ffn_size, "expert_ffn")
        maps["router"] = embed, (experts.count, None)
        maps |= dict(zip(EXPERT, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
    return maps


def owners(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The layers that have the stacked parameter `name`, in the order of its first axis."""
    if name in DENSE:
        return config.dense_layers
    return config.sparse_layers if name in SPARSE else tuple(range(config.layers))


def stacked_experts(name: str, config: ModelConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and logical axes in front of a matrix's own, in one layer: the experts' for their maps, none for others."""
    return ((config.experts.count,), ("experts",)) if name in EXPERT and config.experts else ((), ())


@functools.cache  # a planner asks thousands of times
def layer_specs(config: ModelConfig, dtype: DTypeLike) -> Mapping[str, ParamSpec]:
    """The stacked parameters of all layers; one that some layers lack is stacked over the layers that have it."""
    std = 0.02
    residual_std = std / (2 * config.layers) ** 0.5  # GPT-2: the residual sum of 2 * layers branches keeps its scale
    norm = zeros if config.norm_offset else ones
    specs = {}

    def add(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Initializer) -> None:
        if layers := len(owners(name, config)):
            specs[name] = ParamSpec((layers, *shape), ("layers", *axes), init, dtype)

    for name, ((size_in, axis_in), (size_out, axis_out)) in matrix_sizes(config).items():
        init = Normal(residual_std if name in ("o_proj", "down_proj", "expert_down_proj") else std)
        each, axis = stacked_experts(name, config)
        add(name, (*each, size_in, size_out), (*axis, axis_in, axis_out), init)
    for name in ("input_norm", "ffn_norm", *(("attention_post_norm", "ffn_post_norm") if config.post_norms else ())):
        add(name, (config.hidden_size,), (None,), norm)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            add(name, (config.head_dim,), (None,), norm)
    if config.qkv_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            size, axis = matrix_sizes(config)[name][1]
            add(f"{name}_bias", (size,), (axis,), zeros)
    return specs


def outer_specs(config: ModelConfig, dtype: DTypeLike) -> dict[str, ParamSpec]:
    """The parameters outside the layers."""
    specs = {
        "embedding": ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), Normal(0.02), dtype),
        "final_norm": ParamSpec((config.hidden_size,), (None,), zeros if config.norm_offset else ones, dtype),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec((config.hidden_size, config.vocab_size), ("embed", "vocab"), Normal(0.02), dtype)
    return specs


# --------------------------------------------------------------------------- layers as few scans over repeating periods

LONGEST_PERIOD = 8  # most layers in a scan's body, which is compiled once


@dataclass(frozen=True)
class Block:
    """`repeats` periods of layers, from `start` on; `sparse` is one period, True for a layer with experts."""

    start: int
    sparse: tuple[bool, ...]
    repeats: int

    @property
    def layers(self) -> range:
        return range(self.start, self.start + len(self.sparse) * self.repeats)


def layer_blocks(config: ModelConfig) -> list[Block]:
    """All layers in order, as blocks; one block of period 1 where all are alike, as in every dense model.

    Ten layers of which every fourth has experts are a block of 2 times 4 layers and one of 2 times 1.
    """
    with_experts = config.sparse_layers
    sparse = tuple(layer in with_experts for layer in range(config.layers))
    blocks, start = [], 0
    while start < len(sparse):
        block = max(
            (_repeating(sparse, start, period) for period in range(1, LONGEST_PERIOD + 1)),
            key=lambda block: (len(block.layers), -len(block.sparse)),
        )
        blocks.append(block)
        start = block.layers.stop
    return blocks


def _repeating(sparse: tuple[bool, ...], start: int, period: int) -> Block:
    """The block of this period at `start`; of a single layer where nothing repeats."""
    group = sparse[start : start + period]
    repeats = 1
    while sparse[start + repeats * period : start + (repeats + 1) * period] == group:
        repeats += 1
    return Block(start, group, repeats) if repeats > 1 else Block(start, group[:1], 1)
