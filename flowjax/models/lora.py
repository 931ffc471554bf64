"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + scale * (x A) B, and their PEFT layout."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from flowjax.models import params
from flowjax.models.params import ParamSpec, Placeable, matrix_sizes, owners, zeros
from flowjax.models.shape import ModelConfig, ModelError

ALL_TARGETS = (*params.ATTENTION, *params.DENSE)
ROUTER = "gate"  # Hugging Face's name
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Lora:
    """An adapter: its rank and strength, and the linear maps that have it.

    In layers with experts, the targets of the feed-forward map are those of each expert; `router` is the map that
    chooses between experts.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = ALL_TARGETS
    dropout: float = 0.0  # probability that an input of the adapter branch is zeroed in training

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))  # hashable, for caches, where a config has a list
        known = (*ALL_TARGETS, "router")
        unknown = [target for target in self.targets if target not in known]
        if unknown or not self.targets:
            raise ModelError(
                f"config.policy.lora.targets is {list(self.targets)}: name at least one of {', '.join(known)}"
            )
        if len(set(self.targets)) < len(self.targets):
            raise ModelError(f"config.policy.lora.targets is {list(self.targets)}: name each once")
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
    """U(-1/sqrt(in), 1/sqrt(in)) for [..., in, rank]: PEFT's kaiming_uniform(a=sqrt(5))."""
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def adapted(config: ModelConfig, lora: Lora) -> tuple[str, ...]:
    """The parameters that have an adapter.

    Raises:
        ModelError: the model has not all of the adapter's targets, or experts would have one with dropout.
    """
    known = matrix_sizes(config)
    found: list[str] = []
    for target in lora.targets:
        # In a model that has dense layers beside those with experts, a target is both maps.
        names = [name for name in (target, f"expert_{target}") if name in known and owners(name, config)]
        if not names:
            raise ModelError(
                f"config.policy.lora.targets has {target}, which a {config.architecture} model does not have: "
                "leave it out"
            )
        found += names
    if lora.dropout and (inside := [name for name in found if name in params.SPARSE]):
        targets = ", ".join(name.removeprefix("expert_") for name in inside)
        raise ModelError(
            f"config.policy.lora.dropout is {lora.dropout}, but adapters of router and experts have none: set it to 0, "
            f"or leave {targets} out of config.policy.lora.targets"
        )
    return tuple(found)


@functools.cache
def adapter_specs(config: ModelConfig, lora: Lora) -> Mapping[str, dict[str, ParamSpec]]:
    """The stacked adapter arrays in float32, by parameter: {"a": [layers, in, rank], "b": [layers, rank, out]}; for
    experts [layers, experts, ...].

    B starts at zero, so that a fresh adapter changes nothing. Raises ModelError as `adapted` does.
    """
    sizes, specs = matrix_sizes(config), {}
    for name in adapted(config, lora):
        (size_in, axis_in), (size_out, axis_out) = sizes[name]
        each, axis = params.stacked_experts(name, config)
        stacked, axes = (len(owners(name, config)), *each), ("layers", *axis)
        a = ParamSpec((*stacked, size_in, lora.rank), (*axes, axis_in, "rank"), _uniform_kaiming, jnp.float32)
        b = ParamSpec((*stacked, lora.rank, size_out), (*axes, "rank", axis_out), zeros, jnp.float32)
        specs[name] = {"a": a, "b": b}
    return specs


def lora_branch(
    x: Float[Array, "*tokens in"],
    a: Float[Array, "in rank"],
    b: Float[Array, "rank out"],
    scale: float | Float[Array, ""],
) -> Float[Array, "*tokens out"]:
    """scale * (x A) B in the precision of x; the scale itself is not rounded to it."""
    # Scaled between the products, where a token has `rank` numbers and not `out`.
    low = (x @ a.astype(x.dtype)) * jnp.asarray(scale, jnp.float32)
    return low.astype(x.dtype) @ b.astype(x.dtype)


@jax.custom_vjp
def lora_linear(
    x: Float[Placeable, "tokens in"],
    w: Float[Placeable, "in out"],
    a: Float[Placeable, "in rank"],
    b: Float[Placeable, "rank out"],
    scale: Float[Placeable, ""],
) -> Float[Array, "tokens out"]:
    """x W + scale * (x A) B as one product, x (W + scale * A B).

    Saves two passes over the outputs, forward and backward. For float32 only: in bfloat16 the sum W + scale * A B would
    round most of a small adapter away.
    """
    return x @ (w + scale * (a @ b))


_Saved = tuple[Placeable, Placeable, Placeable, Placeable, Placeable]


def _lora_linear_forward(
    x: Placeable, w: Placeable, a: Placeable, b: Placeable, scale: Placeable
) -> tuple[Array, _Saved]:
    return lora_linear(x, w, a, b, scale), (x, w, a, b, scale)


def _lora_linear_backward(saved: _Saved, gradient: Array) -> tuple[Placeable, ...]:
    """Gradients of A and B by way of their narrow side, and not of the gradient of W, which is as large as W. That is a
    product of its own, which XLA drops where W is frozen."""
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
    """{parameter: {"a": array, "b": array}} from an nnx state, or from the nested dict that a checkpoint gives."""
    flat: dict[tuple[str, str], Any] = {}

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, nnx.Variable):
            node = node.get_value()
        if isinstance(node, Mapping):
            for name, child in node.items():
                # "adapter" and "value" are levels of nnx and of checkpoints, and no names of parameters.
                visit(child, (*path, str(name)) if name not in ("adapter", "value") else path)
        else:
            flat[path[-2], path[-1]] = node

    visit(state, ())
    arrays: dict[str, dict[str, Any]] = {}
    for (target, part), array in flat.items():
        arrays.setdefault(target, {})[part] = array
    return arrays


def hf_modules(name: str, config: ModelConfig) -> np.ndarray:
    """Hugging Face's names of a linear map: of each layer that has it [layers], or of each expert [layers, experts]."""
    layers = owners(name, config)
    if name in params.EXPERT and config.experts:
        module, experts = name.removeprefix("expert_"), range(config.experts.count)
        return np.array([[f"model.layers.{layer}.mlp.experts.{e}.{module}" for e in experts] for layer in layers])
    if name == "router":
        return np.array([f"model.layers.{layer}.mlp.{ROUTER}" for layer in layers])
    block = "self_attn" if name in params.ATTENTION else "mlp"
    return np.array([f"model.layers.{layer}.{block}.{name}" for layer in layers])


def hf_targets(lora: Lora) -> list[str]:
    """The adapter's targets as PEFT and vLLM name them."""
    return [ROUTER if target == "router" else target for target in lora.targets]


def peft_tensors(adapter_state: Any, config: ModelConfig, lora: Lora) -> dict[str, np.ndarray]:
    """The adapter as PEFT names and lays it out: lora_A [rank, in], lora_B [out, rank] for each module, float32."""
    arrays, names = adapter_arrays(adapter_state), adapted(config, lora)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ModelError(f"the adapter has no arrays for {', '.join(missing)}: it was made with other lora.targets")
    tensors = {}
    for name in names:
        modules = hf_modules(name, config)
        a, b = (np.asarray(arrays[name][part], np.float32) for part in ("a", "b"))
        for place in np.ndindex(modules.shape):
            prefix = f"{PEFT_PREFIX}{modules[place]}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(a[place].T)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(b[place].T)
    return tensors


def adapter_from_peft(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, lora: Lora
) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of `peft_tensors`: stacked float32 arrays, {parameter: {"a", "b"}}.

    Raises:
        ModelError: a tensor is missing, has another shape, or belongs to a module outside `lora.targets`.
    """
    left = set(tensors)
    adapter: dict[str, dict[str, np.ndarray]] = {}
    for target, parts in adapter_specs(config, lora).items():
        modules = hf_modules(target, config)
        adapter[target] = {}
        for part, spec in parts.items():
            stacked = np.empty(spec.shape, np.float32)
            for place in np.ndindex(modules.shape):
                name = f"{PEFT_PREFIX}{modules[place]}.lora_{part.upper()}.weight"
                if name not in tensors:
                    raise ModelError(f"the PEFT adapter lacks {name}: its target_modules differ from {lora.targets}")
                wanted = spec.shape[:-3:-1]  # transposed, as PEFT has them
                if tensors[name].shape != wanted:
                    raise ModelError(
                        f"{name} has shape {tuple(tensors[name].shape)} and should have {wanted}: "
                        f"the adapter's rank or base model differs (rank here is {lora.rank})"
                    )
                stacked[place] = tensors[name].T
                left.discard(name)
            adapter[target][part] = stacked
    if left:
        raise ModelError(f"the PEFT adapter has tensors that lora.targets does not name, such as {min(left)}")
    return adapter
