"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + scale * (x A) B, and their PEFT layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from flowjax.models.params import DENSE, ParamSpec, Placeable, matrix_sizes, zeros
from flowjax.models.shape import ModelConfig, ModelError

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """An adapter: its rank and strength, and the linear maps that have it."""

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = ALL_TARGETS
    dropout: float = 0.0  # probability that an input of the adapter branch is zeroed in training

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))
        unknown = [target for target in self.targets if target not in ALL_TARGETS]
        if unknown or not self.targets:
            raise ModelError(
                f"config.policy.lora.targets is {list(self.targets)}: name at least one of {', '.join(ALL_TARGETS)}"
            )
        if self.rank < 1:
            raise ModelError(f"config.policy.lora.rank is {self.rank}: it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"config.policy.lora.dropout is {self.dropout}: it must lie in [0, 1)")

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoraParam(nnx.Param):
    """A trained adapter array; everything else of a LoRA policy is frozen."""


def _uniform_kaiming(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """U(-1/sqrt(in), 1/sqrt(in)) for [layers, in, rank]: PEFT's kaiming_uniform(a=sqrt(5))."""
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def adapter_specs(config: ModelConfig, lora: Lora) -> dict[str, dict[str, ParamSpec]]:
    """The stacked adapter arrays, {target: {"a": [layers, in, rank], "b": [layers, rank, out]}}, in float32.

    B starts at zero, so that a fresh adapter changes nothing.
    """
    sizes, specs = matrix_sizes(config), {}
    if config.experts and (beyond := [target for target in lora.targets if target in DENSE]):
        known = ", ".join(name for name in ALL_TARGETS if name not in DENSE)
        raise ModelError(
            f"config.policy.lora.targets has {', '.join(beyond)}, but in a model with experts only {known} can have an "
            "adapter: leave the others out (the router and the experts stay as they are)"
        )
    for target in lora.targets:
        (size_in, axis_in), (size_out, axis_out) = sizes[target]
        a = ParamSpec((config.layers, size_in, lora.rank), ("layers", axis_in, "rank"), _uniform_kaiming, jnp.float32)
        b = ParamSpec((config.layers, lora.rank, size_out), ("layers", "rank", axis_out), zeros, jnp.float32)
        specs[target] = {"a": a, "b": b}
    return specs


def lora_branch(
    x: Float[Array, "*tokens in"],
    a: Float[Array, "in rank"],
    b: Float[Array, "rank out"],
    scale: float | Float[Array, ""],
) -> Float[Array, "*tokens out"]:
    """scale * (x A) B in the precision of x."""
    low = (x @ a.astype(x.dtype)) * jnp.asarray(scale, x.dtype)
    return low @ b.astype(x.dtype)


@jax.custom_vjp
def lora_linear(
    x: Float[Placeable, "tokens in"],
    w: Float[Placeable, "in out"],
    a: Float[Placeable, "in rank"],
    b: Float[Placeable, "rank out"],
    scale: Float[Placeable, ""],
) -> Float[Array, "tokens out"]:
    """x W + scale * (x A) B as one product, x (W + scale * A B).

    Saves two passes over the outputs, forward and backward. For float32 only: in bfloat16 the sum of matrices would
    lose most of a small adapter.
    """
    return x @ (w + scale * (a @ b))


_Saved = tuple[Placeable, Placeable, Placeable, Placeable, Placeable]


def _lora_linear_forward(
    x: Placeable, w: Placeable, a: Placeable, b: Placeable, scale: Placeable
) -> tuple[Array, _Saved]:
    return lora_linear(x, w, a, b, scale), (x, w, a, b, scale)


def _lora_linear_backward(saved: _Saved, gradient: Array) -> tuple[Placeable, ...]:
    """Of A and B through their narrow side: the gradient of W, as large as W, is only there for who asks for it."""
    x, w, a, b, scale = saved
    low, low_gradient = x @ a, gradient @ b.T
    of_x = gradient @ (w + scale * (a @ b)).T
    of_scale = jnp.sum(low * low_gradient)
    return of_x, x.T @ gradient, scale * (x.T @ low_gradient), scale * (low.T @ gradient), of_scale


lora_linear.defvjp(_lora_linear_forward, _lora_linear_backward)


def merge(
    base: Float[np.ndarray, "in out"], a: Float[np.ndarray, "in rank"], b: Float[np.ndarray, "rank out"], scale: float
) -> Float[np.ndarray, "in out"]:
    """W + scale * A B in float32."""
    return base.astype(np.float32) + scale * (a.astype(np.float32) @ b.astype(np.float32))


def adapter_arrays(state: Any) -> dict[str, dict[str, Any]]:
    """{target: {"a": array, "b": array}} from an nnx state, or from the nested dict that a checkpoint restores to."""
    flat: dict[tuple[str, str], Any] = {}

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, nnx.Variable):
            node = node.get_value()
        if isinstance(node, Mapping):
            for name, child in node.items():
                visit(child, (*path, str(name)) if name not in ("adapter", "value") else path)
        else:
            flat[path[-2], path[-1]] = node

    visit(state, ())
    arrays: dict[str, dict[str, Any]] = {}
    for (target, part), array in flat.items():
        arrays.setdefault(target, {})[part] = array
    return arrays


def hf_module(target: str, layer: int) -> str:
    """Hugging Face's name of a linear map in a layer."""
    block = "self_attn" if target in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{block}.{target}"


def peft_tensors(adapter_state: Any, config: ModelConfig, lora: Lora) -> dict[str, np.ndarray]:
    """The adapter as PEFT names and lays it out: lora_A [rank, in], lora_B [out, rank] for each module, float32."""
    arrays = adapter_arrays(adapter_state)
    missing = [target for target in lora.targets if target not in arrays]
    if missing:
        raise ModelError(f"the adapter has no arrays for {', '.join(missing)}: it was made with other lora.targets")
    tensors = {}
    for target in lora.targets:
        a, b = (np.asarray(arrays[target][part], np.float32) for part in ("a", "b"))
        for layer in range(config.layers):
            name = f"base_model.model.{hf_module(target, layer)}"
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a[layer].T)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b[layer].T)
    return tensors


def adapter_from_peft(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, lora: Lora
) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of `peft_tensors`: stacked float32 arrays {target: {"a", "b"}}.

    Raises:
        ModelError: a tensor is missing, has another shape, or belongs to a module outside `lora.targets`.
    """
    left = set(tensors)
    adapter: dict[str, dict[str, np.ndarray]] = {}
    for target, parts in adapter_specs(config, lora).items():
        adapter[target] = {}
        for part, spec in parts.items():
            stacked = []
            for layer in range(config.layers):
                name = f"base_model.model.{hf_module(target, layer)}.lora_{part.upper()}.weight"
                if name not in tensors:
                    raise ModelError(f"the PEFT adapter lacks {name}: its target_modules differ from {lora.targets}")
                wanted = spec.shape[:0:-1]  # without the layers, and transposed, as PEFT has them
                if tensors[name].shape != wanted:
                    raise ModelError(
                        f"{name} has shape {tuple(tensors[name].shape)} and should have {wanted}: "
                        f"the adapter's rank or base model differs (rank here is {lora.rank})"
                    )
                stacked.append(np.asarray(tensors[name], np.float32).T)
                left.discard(name)
            adapter[target][part] = np.stack(stacked)
    if left:
        raise ModelError(f"the PEFT adapter has tensors that lora.targets does not name, such as {min(left)}")
    return adapter
