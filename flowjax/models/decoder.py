"""The decoder: embedding, scans over stacked layers, final norm. It returns hidden states, never logits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flowjax.models import params
from flowjax.models.attention import AMPERE, HOPPER, attend_by, choose_attention, cuda_capability, exchange_queries
from flowjax.models.lora import Lora, LoraParam, adapter_specs, lora_branch, lora_linear
from flowjax.models.moe import ExpertMap, mixture
from flowjax.models.params import Placeable
from flowjax.models.quantize import QuantizedMatrix
from flowjax.models.rope import rope_angles, rotate
from flowjax.models.shape import ModelConfig, ModelError
from flowjax.models.sharding import Placement, ShardingRules, default_rules

Remat = Literal["none", "dots", "layer"]
# A layer keeps for the backward pass: everything ("none"), the results of linear maps and attention ("dots"), or its
# input alone ("layer"). "dots" goes by name: products of a map and of its adapter, kept apart, would take twice the
# memory of their sum.
_PRODUCTS = jax.checkpoint_policies.save_only_these_names("linear", "mixed", "chosen")
_KEPT: dict[str, Callable | None] = {"dots": _PRODUCTS, "layer": None}
UNROLLED_LAYERS = 4  # so few layers compile as fast unrolled, and then what the backward pass keeps is not copied
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
Arrays = dict[str, jax.Array]
Weights = dict[str, Any]  # arrays, some of them quantised


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
        remat: str = "layer",
        attention: str = "auto",
        key: jax.Array,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ):
        if remat not in ("none", *_KEPT):
            raise ModelError(f"config.model.remat is {remat!r}: it must be 'none', 'dots' or 'layer'")
        self.config, self.lora, self.dtype = config, lora, jnp.dtype(dtype)
        self.remat, self.attention = remat, attention
        self.placement = make_placement(config, mesh, rules)
        base_key, adapter_key = jax.random.split(key)
        base = _initialise(base_specs(config, dtype), base_key, self.placement)
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
        tokens: Int[Placeable, "rows tokens"],
        positions: Int[Placeable, "rows tokens"],
        segments: Int[Placeable, "rows tokens"],
        *,
        adapter_scale: float | Float[Array, ""] = 1.0,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "rows tokens hidden"]:
        """Hidden states after the final norm.

        Args:
            tokens: token ids, several sequences per row if packed.
            positions: position of each token within its own sequence.
            segments: number of its sequence in the row; 0 is padding. Attention stays within a segment.
            adapter_scale: multiplies the adapter's branch; 0.0 is the base model, a reference policy without a copy.
            dropout_key: turns the adapter's dropout on.
        """
        config = self.config
        tokens, positions, segments = map(jnp.asarray, (tokens, positions, segments))
        if self.placement is not None:
            self.placement.check_batch(*tokens.shape)
        # The table is gathered over the hidden size, as in head(), and not the rows that are looked up.
        table = self._constrain(self._base("embedding"), "vocab", None)
        x = table[tokens]
        if config.embedding_scale != 1:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        x = self._constrain(x, "rows", "tokens", "act_embed")
        attention = self._make_attention(segments, positions)
        weights = {name: self._base(name) for name in self.layers}
        experts = {name: weights.pop(name) for name in params.EXPERT if name in weights and self._keeps_experts()}
        adapter = self._adapter()
        has_dropout = self.lora is not None and self.lora.dropout > 0
        by_layer: Arrays = {}  # what else differs from layer to layer
        if has_dropout and dropout_key is not None:
            by_layer["dropout_key"] = jax.random.split(dropout_key, config.layers)
        if len({config.window(i) for i in range(config.layers)}) > 1:
            by_layer["windowed"] = jnp.array([config.window(i) is not None for i in range(config.layers)])
        if experts:  # index of each layer in their stacks
            by_layer["place"] = jnp.cumsum(jnp.array([i in config.sparse_layers for i in range(config.layers)])) - 1

        def layer(x: jax.Array, xs: tuple[Weights, dict[str, Arrays], Arrays], sparse: bool) -> jax.Array:
            weights, adapter, others = xs
            linear = self._linear(weights, adapter, adapter_scale, others.get("dropout_key"))
            mix = functools.partial(attention, others.get("windowed"))
            y = self._attention(self._norm(x, weights["input_norm"]), linear, weights, mix)
            x = x + (self._norm(y, weights["attention_post_norm"]) if config.post_norms else y)
            y = self._norm(x, weights["ffn_norm"])
            if sparse:
                y = self._mixture(y, weights | experts, adapter, adapter_scale, others.get("place"))
            else:
                y = self._feed_forward(y, linear)
            x = x + (self._norm(y, weights["ffn_post_norm"]) if config.post_norms else y)
            return self._constrain(x, "rows", "tokens", "act_embed")

        def group(x: jax.Array, xs: list[Any], block: params.Block) -> tuple[jax.Array, None]:
            for sparse, arrays in zip(block.sparse, xs, strict=True):
                run = functools.partial(layer, sparse=sparse)
                if self.remat in _KEPT:  # prevent_cse is for unrolled code: in a scan its barriers would only cost time
                    run = jax.checkpoint(run, prevent_cse=False, policy=_KEPT[self.remat])
                x = run(x, arrays)
            return x, None

        # With remat, not unrolled: XLA's CPU backend would merge a layer with its recomputation (despite prevent_cse),
        # and no memory would be saved.
        unroll = config.layers <= UNROLLED_LAYERS and self.remat == "none"
        for block in params.layer_blocks(config):
            xs = [
                tuple(self._stack(arrays, block, member) for arrays in (weights, adapter, by_layer))
                for member in range(len(block.sparse))
            ]
            x, _ = jax.lax.scan(functools.partial(group, block=block), x, xs, unroll=unroll)
        return self._norm(x, self._base("final_norm"))

    def head(self) -> Float[Array, "hidden vocab"]:
        """The matrix from hidden states to logits, gathered over the hidden size once for all its uses."""
        tied = self.lm_head is None
        head = self._base("embedding").T if tied else self._base("lm_head")
        return self._constrain(head, None, "vocab")

    def _linear(
        self, weights: Weights, adapter: dict[str, Arrays], adapter_scale: float | jax.Array, key: jax.Array | None
    ) -> Callable[[str, jax.Array], jax.Array]:
        """A function (name, x) -> x W + bias + adapter branch, for the linear map of that name.

        Rows and tokens are one axis here: XLA's CPU backend is three times slower at weight gradients summed over two.
        Where both are split over devices they stay apart, since XLA would gather the tokens to merge the axes.
        """

        def apply(name: str, x: jax.Array) -> jax.Array:
            if self.placement is not None and self.placement.ways("tokens") > 1:
                return checkpoint_name(flat(name, x), "linear")
            return checkpoint_name(flat(name, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1), "linear")

        def flat(name: str, x: jax.Array) -> jax.Array:
            lora = self.lora if name in adapter else None
            if lora is not None and key is None and self._merges(x, weights[name], lora):
                scale = jnp.asarray(lora.scale * adapter_scale, x.dtype)
                y, lora = lora_linear(x, weights[name], adapter[name]["a"], adapter[name]["b"], scale), None
            else:
                y = x @ weights[name]
            if f"{name}_bias" in weights:
                y = y + weights[f"{name}_bias"]
            if lora is None:
                return y
            if key is not None:
                keep = 1 - lora.dropout
                map_key = jax.random.fold_in(key, lora.targets.index(name))  # no two maps drop the same inputs
                x = jnp.where(jax.random.bernoulli(map_key, keep, x.shape), x / keep, 0).astype(x.dtype)
            return y + lora_branch(x, adapter[name]["a"], adapter[name]["b"], lora.scale * adapter_scale)

        return apply

    def _merges(self, x: jax.Array, weight: jax.Array | QuantizedMatrix, lora: Lora) -> bool:
        """True where a linear map and its adapter are one product: in float32, on one device, over enough tokens."""
        alone = self.placement is None or self.placement.mesh.size == 1
        exact = isinstance(weight, jax.Array) and x.dtype == weight.dtype == jnp.float32
        return alone and exact and x.ndim == 2 and x.shape[0] >= 2 * lora.rank

    @property
    def _device(self) -> Any:
        """One of the devices that the program is for."""
        return jax.devices()[0] if self.placement is None else self.placement.device

    def _stack(self, arrays: Mapping[str, Any], block: params.Block, member: int) -> dict[str, Any]:
        """Arrays of the layers at place `member` of a block's periods, stacked over the periods."""
        layers, stacked = block.layers[member :: len(block.sparse)], {}
        for name, array in arrays.items():
            owners = params.owners(name, self.config)
            if layers[0] not in owners:
                continue
            # The stack holds only the layers that have the parameter: indices in it, evenly spaced as the layers are.
            places = [owners.index(layer) for layer in layers]
            cut = slice(places[0], places[-1] + 1, places[1] - places[0] if len(places) > 1 else 1)
            whole = len(layers) == len(owners)  # slices are copies
            stacked[name] = array if whole else jax.tree.map(lambda leaf, cut=cut: leaf[cut], array)
        return stacked

    def _make_attention(self, segments: jax.Array, positions: jax.Array) -> Callable[..., jax.Array]:
        """A function (windowed, query, key, value) -> mixed values; queries and keys are not yet rotated.

        `windowed`: whether the layer has a window. It may be traced, or None in models whose layers are alike in this.
        """
        config, placement = self.config, self.placement
        mesh = None if placement is None or placement.mesh.size == 1 else placement.mesh
        if config.experts is not None and (0, 0) < cuda_capability(self._device) < AMPERE:
            raise ModelError("models with experts need an Ampere GPU or a newer one, or the CPU: Triton has no other")
        form = choose_attention(
            self.attention,
            config,
            device=self._device,
            tokens=segments.shape[1],
            dtype=self.dtype,
            sequence_parts=1 if placement is None else placement.ways("tokens"),
        )
        options = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
        window = config.sliding_window_tokens

        split = placement.axes("tokens") if placement is not None and placement.ways("tokens") > 1 else ()

        def run(windowed: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, *places: jax.Array):
            if split:  # each device has a part of each row's queries, and gets all of its keys and values
                query, *query_places = (exchange_queries(x, split) for x in (query, *places[:2]))
                places = (*query_places, *places[2:])
                key, value = (jax.lax.all_gather(x, split, axis=1, tiled=True) for x in (key, value))
            mixed = attend_by(form, query, key, value, *places, window_tokens=window, windowed=windowed, **options)
            return exchange_queries(mixed, split) if split else mixed

        if placement is not None and mesh is not None:
            of, tokens = placement.rules.spec, ("rows", "tokens")
            heads, keys = of((*tokens, "act_heads", None)), of((*tokens, "act_kv_heads", None))
            specs = (of(()), heads, keys, keys, of(tokens), of(tokens), of(("rows", None)), of(("rows", None)))
            # Unchecked (check_vma): the forms' own backward passes know nothing of mesh axes. Gradients that the parts
            # of a row give for the same keys are summed.
            run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
        rope = rope_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        local_rope = rope
        if config.window_rope_theta is not None:
            local_rope = rope_angles(positions, config.head_dim, config.window_rope_theta, None)

        def mix(windowed: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            bound = jnp.asarray(config.window(0) is not None) if windowed is None else windowed
            angles = rope
            if config.window_rope_theta is not None:
                angles = [jnp.where(bound, local, far) for local, far in zip(local_rope, rope, strict=True)]
            return run(
                bound, rotate(query, *angles), rotate(key, *angles), value, segments, positions, segments, positions
            )

        return mix

    def _attention(self, x: jax.Array, linear: Callable, weights: Weights, mix: Callable) -> jax.Array:
        config = self.config
        rows, tokens, _ = x.shape

        def heads(name: str, axis: str, norm: str) -> jax.Array:
            y = linear(name, x).reshape(rows, tokens, -1, config.head_dim)
            y = self._constrain(y, "rows", "tokens", axis, None)
            return self._norm(y, weights[norm]) if norm in weights else y

        query, key = heads("q_proj", "act_heads", "q_norm"), heads("k_proj", "act_kv_heads", "k_norm")
        mixed = mix(query, key, heads("v_proj", "act_kv_heads", ""))
        return linear("o_proj", mixed.reshape(rows, tokens, config.query_size))

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.config.norm_epsilon, self.config.norm_offset)

    def _keeps_experts(self) -> bool:
        """True if each layer reads its experts' matrices in the stack of all layers, which saves a copy of them.

        The matrices must be frozen, and each device must hold those of its experts whole.
        """
        gathered = self.placement is not None and (
            self.placement.ways("experts") != self.placement.ways("act_experts")
            or self.placement.ways("expert_embed") > 1
        )
        return self.lora is not None and not gathered

    def _mixture(
        self,
        x: jax.Array,
        weights: Weights,
        adapter: dict[str, Arrays],
        adapter_scale: float | jax.Array,
        place: jax.Array | None,
    ) -> jax.Array:
        """`place`: index of the layer in the stacks of experts, where `weights` has the whole stacks."""
        assert self.config.experts is not None

        def mapped(name: str) -> ExpertMap:
            layer = place if name in params.EXPERT else None
            if self.lora is None or name not in adapter:
                return ExpertMap(weights[name], layer=layer)
            a, b = adapter[name]["a"], adapter[name]["b"]
            return ExpertMap(weights[name], self.lora.scale * adapter_scale * a, b, layer)

        router = mapped("router")
        if router.a is not None and router.b is not None:  # small: the merged map in float32 costs less than a branch
            router = ExpertMap(router.weight.astype(jnp.float32) + router.a @ router.b)
        return mixture(
            x,
            router.weight,
            *map(mapped, params.EXPERT),
            experts=self.config.experts,
            activate=ACTIVATIONS[self.config.activation],
            placement=self.placement,
            on_hopper=cuda_capability(self._device) == HOPPER,
        )

    def _feed_forward(self, x: jax.Array, linear: Callable) -> jax.Array:
        gated = ACTIVATIONS[self.config.activation](linear("gate_proj", x)) * linear("up_proj", x)
        return linear("down_proj", self._constrain(gated, "rows", "tokens", "act_ffn"))

    def parameter(self, name: str) -> nnx.Param:
        """The base parameter of this name in `base_specs`."""
        return self.layers[name] if name in self.layers else getattr(self, name)

    def _base(self, name: str) -> Any:
        """The parameter, constrained to its own layout, so that its gradient has that layout, too."""
        value = self.parameter(name).get_value()
        if isinstance(value, QuantizedMatrix):  # laid out when it was made, and without a gradient
            return value
        return self._constrain(value, *base_specs(self.config, self.dtype)[name].axes)

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


def rms_norm(
    x: Float[Array, "*batch dim"], weight: Float[Array, "dim"], epsilon: float, offset: float = 0.0
) -> Float[Array, "*batch dim"]:
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467), the mean in float32.

    With an offset the factor is offset + weight, in float32 too, as Gemma has it.
    """
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    if offset:
        return (normed * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * weight


def base_specs(config: ModelConfig, dtype: DTypeLike) -> dict[str, params.ParamSpec]:
    """Every base parameter by name: those outside the layers, and the stacked ones of the layers."""
    return {**params.outer_specs(config, dtype), **params.layer_specs(config, dtype)}


def make_placement(
    config: ModelConfig, mesh: Mesh | AbstractMesh | None, rules: ShardingRules | None = None
) -> Placement | None:
    """The model's placement, by the given rules or the default ones; None without a mesh.

    Raises:
        ModelError: the mesh does not divide the model.
    """
    if mesh is None:
        return None
    placement = Placement(mesh, rules or default_rules(config, mesh))
    placement.check(config)
    return placement


def init_adapter(
    config: ModelConfig, lora: Lora, key: jax.Array, placement: Placement | None = None
) -> dict[str, dict[str, Any]]:
    """A fresh adapter {parameter: {"a", "b"}} that changes nothing yet."""
    specs = adapter_specs(config, lora)
    flat = {f"{name}.{part}": spec for name, parts in specs.items() for part, spec in parts.items()}
    arrays = _initialise(flat, key, placement)
    return {name: {part: arrays[f"{name}.{part}"] for part in parts} for name, parts in specs.items()}


def with_adapter(base: Decoder, lora: Lora, key: jax.Array) -> Decoder:
    """A decoder with a fresh adapter on the very arrays of `base`, which has none, so that policies share them."""
    decoder = nnx.eval_shape(lambda: Decoder(base.config, lora=lora, dtype=base.dtype, remat=base.remat, key=key))
    decoder.attention, decoder.placement = base.attention, base.placement
    for name in base_specs(base.config, base.dtype):
        decoder.parameter(name).set_value(base.parameter(name).get_value())
    for target, parts in init_adapter(base.config, lora, key, base.placement).items():
        for part, array in parts.items():
            decoder.adapter[target][part].set_value(array)
    return decoder


def set_adapter(decoder: Decoder, adapter: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the arrays {parameter: {"a", "b"}} in place of the decoder's adapter, keeping its shardings."""
    for target, parts in decoder.adapter.items():
        for part, param in parts.items():
            old = param.get_value()
            param.set_value(jax.device_put(jnp.asarray(adapter[target][part], old.dtype), old.sharding))


def _initialise(
    specs: Mapping[str, params.ParamSpec], key: jax.Array, placement: Placement | None
) -> dict[str, jax.Array]:
    """Random arrays for `specs`, made in place on the devices that hold them; the same on every mesh."""
    keys = jax.random.split(key, len(specs))
    return {
        name: _maker(spec, placement and placement.of(spec.axes))(key)
        for key, (name, spec) in zip(keys, specs.items(), strict=True)
    }


@functools.cache
def _maker(spec: params.ParamSpec, sharding: NamedSharding | None) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: spec.init(key, spec.shape, spec.dtype), out_shardings=sharding)
