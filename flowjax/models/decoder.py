"""The decoder: embedding, a scan over stacked layers, final norm. It returns hidden states, never logits."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flowjax.models import params
from flowjax.models.attention import attend, rope_angles, rotate, segment_mask
from flowjax.models.config import ModelConfig, ModelError
from flowjax.models.lora import Lora, LoraParam, adapter_specs, lora_branch
from flowjax.models.sharding import Placement, ShardingRules

Remat = Literal["none", "layer"]
UNROLLED_LAYERS = 4  # a model this shallow compiles as fast unrolled, and does not copy what its backward pass keeps
Arrays = dict[str, jax.Array]


class Decoder(nnx.Module):
    """A decoder-only transformer with an optional LoRA adapter.

    The base is `nnx.Param`, the adapter `LoraParam`: `nnx.split(decoder, LoraParam, ...)` separates what is trained
    from what is frozen. With `lora=None` there is no adapter and all of it may be trained.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        lora: Lora | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        remat: Remat = "layer",
        key: jax.Array,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ):
        if remat not in ("none", "layer"):
            raise ModelError(f"config.model.remat is {remat!r}: it must be 'none' or 'layer'")
        self.config, self.lora, self.dtype, self.remat = config, lora, jnp.dtype(dtype), remat
        self.placement = make_placement(config, mesh, rules)
        base_key, adapter_key = jax.random.split(key)
        base = params.initialise(base_specs(config, dtype), base_key, self.placement)
        outer = {name: nnx.Param(base.pop(name)) for name in params.outer_specs(config, dtype)}
        self.embedding, self.final_norm = outer["embedding"], outer["final_norm"]
        self.lm_head = outer.get("lm_head")
        self.layers = nnx.Dict({name: nnx.Param(array) for name, array in base.items()})
        self.adapter = nnx.Dict({})
        if lora is not None:
            arrays = init_adapter(config, lora, adapter_key, self.placement)
            self.adapter = nnx.Dict(
                {target: nnx.Dict({p: LoraParam(x) for p, x in parts.items()}) for target, parts in arrays.items()}
            )

    def __call__(
        self,
        tokens: Int[Array, "rows tokens"],
        positions: Int[Array, "rows tokens"],
        segments: Int[Array, "rows tokens"],
        *,
        adapter_scale: float | Float[Array, ""] = 1.0,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "rows tokens hidden"]:
        """Hidden states after the final norm.

        Args:
            tokens: token ids, several sequences per row if packed.
            positions: position of each token within its own sequence.
            segments: number of its sequence in the row; 0 is padding. Attention stays within a segment.
            adapter_scale: multiplies the adapter's branch; 0.0 is the base model, the reference policy for free.
            dropout_key: turns the adapter's dropout on.
        """
        config = self.config
        table = self._constrain(self._base("embedding"), "vocab", None)  # gathered as head() is, not its look-ups
        x = self._constrain(table[tokens], "rows", "tokens", "act_embed")
        rope = rope_angles(positions, config)
        seen = segment_mask(segments, positions, config.sliding_window_tokens)

        def layer(x: jax.Array, xs: tuple[Arrays, dict[str, Arrays], jax.Array | None]) -> tuple[jax.Array, None]:
            weights, adapter, key = xs
            linear = self._linear(weights, adapter, adapter_scale, key)
            x = x + self._attention(
                rms_norm(x, weights["input_norm"], config.norm_epsilon), linear, weights, rope, seen
            )
            x = x + self._feed_forward(rms_norm(x, weights["ffn_norm"], config.norm_epsilon), linear)
            return self._constrain(x, "rows", "tokens", "act_embed"), None

        weights = {name: self._base(name) for name in self.layers}
        adapter = self._adapter()
        drops = self.lora is not None and self.lora.dropout > 0
        keys = jax.random.split(dropout_key, config.layers) if drops and dropout_key is not None else None
        # Unrolled, XLA's CPU backend merges a layer with its recomputation (despite prevent_cse), and nothing is saved.
        unroll = config.layers <= UNROLLED_LAYERS and self.remat == "none"
        body = jax.checkpoint(layer, prevent_cse=False) if self.remat == "layer" else layer
        x, _ = jax.lax.scan(body, x, (weights, adapter, keys), unroll=unroll)
        return rms_norm(x, self._base("final_norm"), config.norm_epsilon)

    def head(self) -> Float[Array, "hidden vocab"]:
        """The matrix from hidden states to logits, gathered over the hidden size once for all its uses."""
        tied = self.lm_head is None
        head = self._base("embedding").T if tied else self._base("lm_head")
        return self._constrain(head, None, "vocab")

    def _linear(
        self, weights: Arrays, adapter: dict[str, Arrays], adapter_scale: float | jax.Array, key: jax.Array | None
    ) -> Callable[[str, jax.Array], jax.Array]:
        """x -> x W + bias + adapter branch, for the linear map of a name.

        Rows and tokens are one axis here: XLA's CPU backend is three times slower at weight gradients summed over two.
        """

        def apply(name: str, x: jax.Array) -> jax.Array:
            return flat(name, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

        def flat(name: str, x: jax.Array) -> jax.Array:
            y = x @ weights[name]
            if f"{name}_bias" in weights:
                y = y + weights[f"{name}_bias"]
            if self.lora is None or name not in adapter:
                return y
            if key is not None:
                keep = 1 - self.lora.dropout
                own_key = jax.random.fold_in(key, self.lora.targets.index(name))
                x = jnp.where(jax.random.bernoulli(own_key, keep, x.shape), x / keep, 0).astype(x.dtype)
            return y + lora_branch(x, adapter[name]["a"], adapter[name]["b"], self.lora.scale * adapter_scale)

        return apply

    def _attention(
        self, x: jax.Array, linear: Callable, weights: Arrays, rope: tuple[jax.Array, jax.Array], seen: jax.Array
    ) -> jax.Array:
        config = self.config
        rows, tokens, _ = x.shape

        def heads(name: str, axis: str, norm: str) -> jax.Array:
            y = linear(name, x).reshape(rows, tokens, -1, config.head_dim)
            y = self._constrain(y, "rows", "tokens", axis, None)
            return rms_norm(y, weights[norm], config.norm_epsilon) if norm in weights else y

        query = rotate(heads("q_proj", "act_heads", "q_norm"), *rope)
        key = rotate(heads("k_proj", "act_kv_heads", "k_norm"), *rope)
        mixed = attend(query, key, heads("v_proj", "act_kv_heads", ""), seen)
        return linear("o_proj", mixed.reshape(rows, tokens, config.query_size))

    def _feed_forward(self, x: jax.Array, linear: Callable) -> jax.Array:
        gated = jax.nn.silu(linear("gate_proj", x)) * linear("up_proj", x)
        return linear("down_proj", self._constrain(gated, "rows", "tokens", "act_ffn"))

    def parameter(self, name: str) -> nnx.Param:
        """The base parameter that `base_specs` names so."""
        return self.layers[name] if name in self.layers else getattr(self, name)

    def _base(self, name: str) -> jax.Array:
        """The parameter, held to its own layout: its gradient then has that layout too, whatever XLA would choose."""
        return self._constrain(self.parameter(name).get_value(), *base_specs(self.config, self.dtype)[name].axes)

    def _adapter(self) -> dict[str, Arrays]:
        if self.lora is None:
            return {}
        return {
            target: {
                part: self._constrain(self.adapter[target][part].get_value(), *spec.axes)
                for part, spec in parts.items()
            }
            for target, parts in adapter_specs(self.config, self.lora).items()
        }

    def _constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        if self.placement is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.placement.of(axes))


def rms_norm(x: Float[Array, "*batch dim"], weight: Float[Array, "dim"], epsilon: float) -> Float[Array, "*batch dim"]:
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467), the mean in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return normed.astype(x.dtype) * weight


def base_specs(config: ModelConfig, dtype: DTypeLike) -> dict[str, params.ParamSpec]:
    """Every base parameter, those of the layers by their own names."""
    return params.outer_specs(config, dtype) | params.layer_specs(config, dtype)


def make_placement(config: ModelConfig, mesh: Mesh | None, rules: ShardingRules | None) -> Placement | None:
    """Where the model lives; None without a mesh. Raises ModelError when the mesh does not divide the model."""
    if mesh is None:
        return None
    placement = Placement(mesh, rules or ShardingRules())
    placement.check(config)
    return placement


def init_adapter(
    config: ModelConfig, lora: Lora, key: jax.Array, placement: Placement | None = None
) -> dict[str, dict[str, Any]]:
    """A fresh adapter {target: {"a", "b"}} that changes nothing yet."""
    flat = {f"{t}.{part}": spec for t, parts in adapter_specs(config, lora).items() for part, spec in parts.items()}
    arrays = params.initialise(flat, key, placement)
    return {target: {part: arrays[f"{target}.{part}"] for part in ("a", "b")} for target in lora.targets}


def set_adapter(decoder: Decoder, adapter: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the arrays {target: {"a", "b"}} in place of the decoder's adapter, keeping its shardings."""
    for target, parts in decoder.adapter.items():
        for part, param in parts.items():
            old = param.get_value()
            param.set_value(jax.device_put(jnp.asarray(adapter[target][part], old.dtype), old.sharding))
