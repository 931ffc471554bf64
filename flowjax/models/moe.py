"""A mixture of experts without capacity: every token reaches every expert it chose, and none is dropped.

Choices are sorted by expert, and each expert's run of rows is padded to whole blocks. A block then belongs to one
expert, and the layer's maps are products of blocks with their expert's matrix: the work is that of what was chosen.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from flowjax.models.grouped import grouped_product
from flowjax.models.shape import Experts
from flowjax.models.sharding import Placement

Activate = Callable[[jax.Array], jax.Array]
BLOCK_ROWS = (16, 128)  # fewest (the least that a tensor core takes) and most rows of a block


class ExpertMap(NamedTuple):
    """A linear map of every expert, x W, or x W + (x A) B where it has an adapter.

    With `layer`, `weight` has the frozen matrices W of all layers, and those of this layer are used.
    """

    weight: Float[Array, "*layers experts in out"]
    a: Float[Array, "experts in rank"] | None = None
    b: Float[Array, "experts rank out"] | None = None
    layer: Int[Array, ""] | None = None


def route(
    x: Float[Array, "*tokens hidden"], router: Float[Array, "hidden experts"], experts: Experts
) -> tuple[Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]]:
    """Weights and numbers of each token's `per_token` likeliest experts, by a softmax over all experts in float32."""
    scores = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(scores, experts.per_token)
    if experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(x.dtype), chosen


# ---------------------------------------------------------------------------------------------------- choices in blocks


class Layout(NamedTuple):
    """Choices as rows in the order of their experts, each expert's in blocks of its own.

    An expert's last block is padded with empty rows. Blocks after the last one in use belong to no expert: what
    products leave there is not defined, and nothing reads it. Shapes are static, for any choice of experts.
    """

    place: Int[Array, "tokens chosen"]  # row of a choice; the number of rows where its expert is not at hand
    source: Int[Array, "blocks size"]  # choice in a row, counted token by token; the number of choices in empty rows
    starts: Int[Array, "experts_and_1"]  # first block of each expert; the last number is that of the blocks in use


def block_shape(choices: int, experts: int, at_hand: int | None = None) -> tuple[int, int]:
    """Number of blocks that suffices for any choice of experts, `at_hand` of them on this device, and rows of a block.

    Rows are a power of two, at most half of what an expert gets on average: its last block is half empty in the mean,
    so that padding adds a quarter at most, and less where an expert gets more than twice the largest block.
    """
    least, most = BLOCK_ROWS
    size = min(max(1 << (max(choices // (2 * experts), 1).bit_length() - 1), least), most)
    return max(min(choices, (choices + (at_hand or experts) * (size - 1)) // size), 1), size


def lay_out(chosen: Int[Array, "tokens chosen"], first: int | Int[Array, ""], count: int, total: int) -> Layout:
    """The layout for experts `first` and the following, `count` out of `total`."""
    choices = chosen.size
    blocks, size = block_shape(choices, total, count)
    rows = blocks * size
    local = chosen.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)  # others come last, in no block
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-sizes // size), dtype=jnp.int32)])
    numbers = jnp.arange(choices, dtype=jnp.int32)
    sorted_number = jnp.zeros(choices, jnp.int32).at[order].set(numbers, unique_indices=True)
    # A choice's row is its number in the sorted order, plus the padding before its expert's first block.
    step = jnp.append(starts[:-1] * size - (jnp.cumsum(sizes) - sizes), 0)
    place = jnp.where(local < count, sorted_number + step[local], rows)
    source = jnp.full(rows, choices, jnp.int32).at[place].set(numbers, mode="drop")
    return Layout(place.reshape(chosen.shape), source.reshape(blocks, size), starts)


@jax.custom_vjp
def spread(
    x: Float[Array, "tokens dim"], place: Int[Array, "tokens chosen"], source: Int[Array, "blocks size"]
) -> Float[Array, "blocks size dim"]:
    """The token of each row, zeros in empty rows. Its transpose is `collect`, so that neither pass scatters."""
    padded = jnp.pad(x, ((0, 1), (0, 0)))  # a row of zeros for empty rows: zeroing them later is a pass more on TPUs
    return padded.at[source // place.shape[1]].get(mode="promise_in_bounds")


@jax.custom_vjp
def collect(
    y: Float[Array, "blocks size dim"], place: Int[Array, "tokens chosen"], source: Int[Array, "blocks size"]
) -> Float[Array, "tokens dim"]:
    """Sum over the rows of each token; choices whose expert is not at hand add nothing."""
    return y.reshape(-1, y.shape[2]).at[place].get(mode="fill", fill_value=0).sum(axis=1)


spread.defvjp(lambda x, *maps: (spread(x, *maps), maps), lambda maps, g: (collect(g, *maps), None, None))
collect.defvjp(lambda y, *maps: (collect(y, *maps), maps), lambda maps, g: (spread(g, *maps), None, None))


# ------------------------------------------------------------------------------------------------------------ the layer


def mix_experts(
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens chosen"],
    chosen: Int[Array, "tokens chosen"],
    gate: ExpertMap,
    up: ExpertMap,
    down: ExpertMap,
    *,
    activate: Activate,
    first: int | Int[Array, ""] = 0,
    total: int | None = None,
    on_hopper: bool = False,
) -> Float[Array, "tokens hidden"]:
    """sum over a token's chosen experts e of weight_e * (activate(x G_e) * x U_e) D_e, for the experts at hand.

    Those are `first` and the following, of `total`; choices of others add nothing. The weight is applied before the
    last map, which is linear: so the backward pass does not need that map's result.
    """
    at_hand = gate.weight.shape[-3]
    place, source, starts = lay_out(chosen, first, at_hand, total or at_hand)
    grouped = spread(x, place, source)
    through = functools.partial(grouped_map, starts=starts, on_hopper=on_hopper)
    opened, passed = (checkpoint_name(through(grouped, each), "chosen") for each in (gate, up))
    by_row = spread(weights.reshape(-1, 1), place.reshape(-1, 1), source)
    return collect(through(activate(opened) * passed * by_row, down), place, source)


def grouped_map(
    x: Float[Array, "blocks size in"], each: ExpertMap, starts: Int[Array, "experts_and_1"], *, on_hopper: bool
) -> Float[Array, "blocks size out"]:
    """Each block through the map of its expert, in the precision of x; see `grouped_product`."""
    product = functools.partial(grouped_product, starts=starts, on_hopper=on_hopper)
    y = product(x, each.weight, layer=each.layer)
    if each.a is None or each.b is None:
        return y
    return y + product(product(x, each.a.astype(x.dtype)), each.b.astype(x.dtype))


def mixture(
    x: Float[Array, "rows tokens hidden"],
    router: Float[Array, "hidden experts"],
    gate: ExpertMap,
    up: ExpertMap,
    down: ExpertMap,
    *,
    experts: Experts,
    activate: Activate,
    placement: Placement | None,
    on_hopper: bool = False,
) -> Float[Array, "rows tokens hidden"]:
    """The feed-forward map of a layer with experts, on any mesh. `on_hopper`: see `grouped_product`.

    On a mesh each device holds some experts: it gathers the tokens of its neighbours along `expert`, adds what its
    experts make of them, and the sums are scattered back.
    """
    maps = (gate, up, down)
    options: Any = {"activate": activate, "on_hopper": on_hopper}
    if placement is None or placement.mesh.size == 1:
        flat = x.reshape(-1, x.shape[-1])
        return mix_experts(flat, *route(flat, router, experts), *maps, **options).reshape(x.shape)
    rules = placement.rules

    def local(x: jax.Array, router: jax.Array, *maps: ExpertMap) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        arrays = (flat, *route(flat, router, experts))
        if rules.expert_ffn is not None:  # each part of the maps has its own gradient of x: pcast's transpose sums them
            arrays = tuple(jax.lax.pcast(array, rules.expert_ffn, to="varying") for array in arrays)
        gathered = (jax.lax.all_gather(array, "expert", tiled=True) for array in arrays)
        first = jax.lax.axis_index("expert") * maps[0].weight.shape[-3]
        mixed = mix_experts(*gathered, *maps, first=first, total=experts.count, **options)
        mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return (mixed if rules.expert_ffn is None else jax.lax.psum(mixed, rules.expert_ffn)).reshape(x.shape)

    by_token = rules.spec(("rows", "tokens", None))

    def laid_out(each: ExpertMap, axis_in: str | None, axis_out: str | None) -> Any:
        """An `ExpertMap` of partition specs in place of its arrays."""
        before = ("layers",) * (each.weight.ndim - 3)
        pairs = ((*before, "act_experts", axis_in, axis_out), ("act_experts", axis_in, "rank"))
        axes: Any = (*pairs, ("act_experts", "rank", axis_out), ())
        specs: Any = (None if x is None else rules.spec(of) for x, of in zip(each, axes, strict=True))
        return ExpertMap(*specs)

    outward, inward = (None, "expert_ffn"), ("expert_ffn", None)
    of_maps = (laid_out(each, *axes) for each, axes in zip(maps, (outward, outward, inward), strict=True))
    specs = (by_token, rules.spec((None, None)), *of_maps)
    return jax.shard_map(local, mesh=placement.mesh, in_specs=specs, out_specs=by_token)(x, router, *maps)
