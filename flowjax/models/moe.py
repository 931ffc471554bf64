"""A mixture of experts without capacity: every token reaches every expert it chose, and none is dropped.

Choices are sorted by expert, and each expert's run of rows is padded to whole blocks. A block then belongs to one
expert, and the layer's maps are products of blocks with their expert's matrix: the work is that of what was chosen.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from flowjax.models.shape import Experts
from flowjax.models.sharding import Placement

Activate = Callable[[jax.Array], jax.Array]


class ExpertMap(NamedTuple):
    """A linear map of every expert, x W, or x W + (x A) B where it has an adapter."""

    weight: Float[Array, "experts in out"]
    a: Float[Array, "experts in rank"] | None = None
    b: Float[Array, "experts rank out"] | None = None


BLOCK_ROWS = (16, 128)  # fewest, which is the least that a tensor core takes, and most rows of a block
TILE = 128  # columns that one program of a GPU kernel computes
DEPTH_BYTES = 128  # of one row of a tile that is multiplied at a time


def route(
    x: Float[Array, "*tokens hidden"], router: Float[Array, "hidden experts"], experts: Experts
) -> tuple[Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]]:
    """Weights and numbers of each token's `per_token` likeliest experts, by a softmax over all of them in float32."""
    scores = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(scores, experts.per_token)
    if experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(x.dtype), chosen


# ---------------------------------------------------------------------------------------------------- choices in blocks


class Layout(NamedTuple):
    """Rows of choices in the order of their experts, each expert's in blocks of its own.

    An expert's last block is padded with rows of nobody. Blocks after the last one in use belong to no expert: what
    products leave there is not defined, and nothing reads it.
    """

    place: Int[Array, "tokens chosen"]  # row of a choice; the number of rows where its expert is not at hand
    source: Int[Array, "blocks size"]  # choice of a row, counted token by token; the number of choices where none
    starts: Int[Array, "experts_and_1"]  # first block of each expert; the last number is that of the blocks in use


def block_shape(choices: int, experts: int, at_hand: int | None = None) -> tuple[int, int]:
    """Number of blocks for any choice of experts, `at_hand` of them on this device, and the rows of each.

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
    # From its number in the sorted order to its row is the same step for all choices of an expert.
    step = jnp.append(starts[:-1] * size - (jnp.cumsum(sizes) - sizes), 0)
    place = jnp.where(local < count, sorted_number + step[local], rows)
    source = jnp.full(rows, choices, jnp.int32).at[place].set(numbers, mode="drop")
    return Layout(place.reshape(chosen.shape), source.reshape(blocks, size), starts)


@jax.custom_vjp
def spread(
    x: Float[Array, "tokens dim"], place: Int[Array, "tokens chosen"], source: Int[Array, "blocks size"]
) -> Float[Array, "blocks size dim"]:
    """Each row's token, zeros in rows of nobody. Its transpose is `collect`, so that neither pass scatters."""
    padded = jnp.pad(x, ((0, 1), (0, 0)))  # what rows of nobody read; filling them in afterwards is a pass more on TPUs
    return padded.at[source // place.shape[1]].get(mode="promise_in_bounds")


@jax.custom_vjp
def collect(
    y: Float[Array, "blocks size dim"], place: Int[Array, "tokens chosen"], source: Int[Array, "blocks size"]
) -> Float[Array, "tokens dim"]:
    """Sum over the rows of each token."""
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
) -> Float[Array, "tokens hidden"]:
    """sum over a token's chosen experts e of weight_e * (activate(x G_e) * x U_e) D_e, for the experts at hand.

    Those are `first` and the following, of `total`; choices of others add nothing. The weight is put before the last
    map, which is linear: the backward pass then needs nothing of what that map gave.
    """
    at_hand = gate.weight.shape[0]
    place, source, starts = lay_out(chosen, first, at_hand, total or at_hand)
    grouped = spread(x, place, source)
    opened, passed = (checkpoint_name(grouped_map(grouped, each, starts), "chosen") for each in (gate, up))
    by_row = spread(weights.reshape(-1, 1), place.reshape(-1, 1), source)
    return collect(grouped_map(activate(opened) * passed * by_row, down, starts), place, source)


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
) -> Float[Array, "rows tokens hidden"]:
    """The feed-forward map of a layer with experts, on any mesh.

    On a mesh each device holds some experts: it gathers the tokens of its neighbours along `expert`, adds what its
    experts make of them, and the sums are scattered back.
    """
    maps = (gate, up, down)
    if placement is None or placement.mesh.size == 1:
        flat = x.reshape(-1, x.shape[-1])
        return mix_experts(flat, *route(flat, router, experts), *maps, activate=activate).reshape(x.shape)
    rules = placement.rules

    def local(x: jax.Array, router: jax.Array, *maps: ExpertMap) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        arrays = (flat, *route(flat, router, experts))
        if rules.expert_ffn is not None:  # each part of the maps has its own gradient of x: they are summed here
            arrays = tuple(jax.lax.pcast(array, rules.expert_ffn, to="varying") for array in arrays)
        gathered = (jax.lax.all_gather(array, "expert", tiled=True) for array in arrays)
        first = jax.lax.axis_index("expert") * maps[0].weight.shape[0]
        mixed = mix_experts(*gathered, *maps, activate=activate, first=first, total=experts.count)
        mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return (mixed if rules.expert_ffn is None else jax.lax.psum(mixed, rules.expert_ffn)).reshape(x.shape)

    by_token = rules.spec(("rows", "tokens", None))

    def laid_out(each: ExpertMap, axis_in: str | None, axis_out: str | None) -> ExpertMap:
        axes = ((axis_in, axis_out), (axis_in, "rank"), ("rank", axis_out))
        specs = (rules.spec(("act_experts", *pair)) for pair in axes)
        return ExpertMap(*(None if array is None else spec for array, spec in zip(each, specs, strict=True)))

    outward, inward = (None, "expert_ffn"), ("expert_ffn", None)
    of_maps = (laid_out(each, *axes) for each, axes in zip(maps, (outward, outward, inward), strict=True))
    specs = (by_token, rules.spec((None, None)), *of_maps)
    return jax.shard_map(local, mesh=placement.mesh, in_specs=specs, out_specs=by_token)(x, router, *maps)


# ----------------------------------------------------------------------------------------------------- grouped products


def grouped_map(
    x: Float[Array, "blocks size in"], each: ExpertMap, starts: Int[Array, "experts_and_1"]
) -> Float[Array, "blocks size out"]:
    """Each block through the map of its expert, in the precision of x; see `grouped_product`."""
    y = grouped_product(x, each.weight, starts)
    if each.a is None or each.b is None:
        return y
    low = grouped_product(x, each.a.astype(x.dtype), starts)
    return y + grouped_product(low, each.b.astype(x.dtype), starts)


def grouped_product(
    x: Float[Array, "blocks size in"],
    weights: Float[Array, "experts in out"],
    starts: Int[Array, "experts_and_1"],
) -> Float[Array, "blocks size out"]:
    """Each block times the matrix of its expert, summed in float32; what stands in unused blocks is not defined.

    An expert e has the blocks starts[e] to starts[e + 1]. `jax.lax.ragged_dot` says the same, but XLA multiplies every
    row with every expert for it on GPUs and CPUs.
    """
    # On a mesh all must vary over the same devices; where a matrix is the same on several, its gradients are summed.
    axes = _varying(x) | _varying(weights) | _varying(starts)
    return _grouped_product(*(_vary(array, axes) for array in (x, weights, starts)))


def _varying(array: jax.Array) -> frozenset[str]:
    """Mesh axes along which devices hold different values."""
    return jax.typeof(array).manual_axis_type.varying


def _vary(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(axes - _varying(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@jax.custom_vjp
def _grouped_product(x: jax.Array, weights: jax.Array, starts: jax.Array) -> jax.Array:
    return _multiply(x, weights, starts, transposed=False)


def _grouped_forward(x: jax.Array, weights: jax.Array, starts: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _grouped_product(x, weights, starts), (x, weights, starts)


def _grouped_backward(kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, starts = kept  # two calls: the gradient of frozen matrices, used by nobody, is then never computed
    return _multiply(g, weights, starts, transposed=True), _multiply_pairs(x, g, starts), None


_grouped_product.defvjp(_grouped_forward, _grouped_backward)


def _multiply(x: jax.Array, weights: jax.Array, starts: jax.Array, *, transposed: bool) -> jax.Array:
    """Blocks times matrices [experts, in, out], or times their transposes."""
    forms = {"cuda": gpu_product, "tpu": ragged_product, "default": loop_product}
    return _by_platform(forms, x, weights, starts, transposed=transposed)


def _multiply_pairs(x: jax.Array, g: jax.Array, starts: jax.Array) -> jax.Array:
    """Sum over each expert's blocks of x^T g: [experts, in, out], zeros where it has none."""
    forms = {"cuda": gpu_pairs, "tpu": tpu_pairs, "default": loop_pairs}
    return _by_platform(forms, x, g, starts)


def _by_platform(forms: dict[str, Callable[..., jax.Array]], *args: jax.Array, **options: bool) -> jax.Array:
    """The form of the platform that the program is compiled for, wherever it is traced."""
    return jax.lax.platform_dependent(
        *args, **{name: functools.partial(form, **options) for name, form in forms.items()}
    )


def _owners(starts: jax.Array, blocks: int) -> Int[Array, "blocks"]:
    """Expert of each block; the number of experts where a block is not in use."""
    return jnp.searchsorted(starts[1:], jnp.arange(blocks, dtype=jnp.int32), side="right").astype(jnp.int32)


def _like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Type of a kernel's result: on a mesh it differs between devices where its input does."""
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def loop_product(x: jax.Array, weights: jax.Array, starts: jax.Array, *, transposed: bool) -> jax.Array:
    """Expert after expert and block after block in plain JAX."""

    def expert(e: jax.Array, y: jax.Array) -> jax.Array:
        # Out of the inner loop: the product of a block with a matrix that lies transposed takes twice as long.
        weight = weights[e].T if transposed else weights[e]

        def block(b: jax.Array, y: jax.Array) -> jax.Array:
            return y.at[b].set(jnp.dot(x[b], weight, preferred_element_type=jnp.float32).astype(y.dtype))

        return jax.lax.fori_loop(starts[e], starts[e + 1], block, y)

    y = jnp.zeros((*x.shape[:2], weights.shape[1 if transposed else 2]), x.dtype)
    return jax.lax.fori_loop(0, weights.shape[0], expert, _vary(y, _varying(x)))


def loop_pairs(x: jax.Array, g: jax.Array, starts: jax.Array) -> jax.Array:
    """The matrices' gradients in plain JAX."""
    zeros = _vary(jnp.zeros((x.shape[2], g.shape[2]), jnp.float32), _varying(x))

    def expert(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        def block(b: jax.Array, total: jax.Array) -> jax.Array:
            pairs = (((0,), (0,)), ((), ()))
            return total + jax.lax.dot_general(x[b], g[b], pairs, preferred_element_type=jnp.float32)

        return jax.lax.fori_loop(*bounds, block, zeros).astype(x.dtype)

    return jax.lax.map(expert, (starts[:-1], starts[1:]))


# ----------------------------------------------------------------------------------------- NVIDIA GPUs (Pallas, Triton)


def gpu_product(
    x: jax.Array, weights: jax.Array, starts: jax.Array, *, transposed: bool, interpret: bool = False
) -> jax.Array:
    """One program for each block and tile of columns."""
    blocks, size, depth = x.shape
    columns = weights.shape[1 if transposed else 2]
    kernel = functools.partial(
        _gpu_product_kernel,
        step=_tile(depth, DEPTH_BYTES // x.dtype.itemsize),
        tile=_tile(columns),
        transposed=transposed,
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(columns, _tile(columns)), blocks),  # neighbours share rows, and next ones the expert's matrix
        out_shape=_like(x, (blocks, size, columns)),
        compiler_params=_warps(size),
        interpret=interpret,
        name="grouped_product",
    )(_owners(starts, blocks), starts[-1:], x, weights)


def _gpu_product_kernel(owner, used, x, weights, y, *, step: int, tile: int, transposed: bool) -> None:
    block, start = pl.program_id(1), pl.program_id(0) * tile
    depth, columns = x.shape[2], y.shape[2]

    @pl.when(block < used[0])
    def _() -> None:
        expert = owner[block]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            inner = i * step
            rows = _load(x.at[block, :, pl.ds(inner, step)], (None, (inner, depth)))
            if transposed:
                part = weights.at[expert, pl.ds(start, tile), pl.ds(inner, step)]
                matrix = _load(part, ((start, columns), (inner, depth)))
            else:
                part = weights.at[expert, pl.ds(inner, step), pl.ds(start, tile)]
                matrix = _load(part, ((inner, depth), (start, columns)))
            return total + plgpu.dot(rows, matrix, trans_b=transposed)

        total = jax.lax.fori_loop(0, pl.cdiv(depth, step), add, jnp.zeros((x.shape[1], tile), jnp.float32))
        _store(y.at[block, :, pl.ds(start, tile)], total, (None, (start, columns)))


def gpu_pairs(x: jax.Array, g: jax.Array, starts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """One program for each expert and tile of its gradient, over the expert's rows."""
    experts, depth, columns = starts.size - 1, x.shape[2], g.shape[2]
    step = min(x.shape[1], DEPTH_BYTES // x.dtype.itemsize)  # a whole block would fill the shared memory
    x, g, starts = x.reshape(-1, step, depth), g.reshape(-1, step, columns), starts * (x.shape[1] // step)
    return pl.pallas_call(
        functools.partial(_gpu_pairs_kernel, tiles=(_tile(depth), _tile(columns))),
        grid=(pl.cdiv(columns, _tile(columns)), pl.cdiv(depth, _tile(depth)), experts),
        out_shape=_like(x, (experts, depth, columns)),
        compiler_params=_warps(TILE),
        interpret=interpret,
        name="grouped_pairs",
    )(starts, x, g)


def _gpu_pairs_kernel(starts, x, g, out, *, tiles: tuple[int, int]) -> None:
    expert = pl.program_id(2)
    row, column = pl.program_id(1) * tiles[0], pl.program_id(0) * tiles[1]
    depth, columns = out.shape[1:]

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        left = _load(x.at[block, :, pl.ds(row, tiles[0])], (None, (row, depth)))
        right = _load(g.at[block, :, pl.ds(column, tiles[1])], (None, (column, columns)))
        return total + plgpu.dot(left, right, trans_a=True)

    total = jax.lax.fori_loop(starts[expert], starts[expert + 1], add, jnp.zeros(tiles, jnp.float32))
    part = out.at[expert, pl.ds(row, tiles[0]), pl.ds(column, tiles[1])]
    _store(part, total, ((row, depth), (column, columns)))


Edges = tuple[tuple[jax.Array, int] | None, tuple[jax.Array, int] | None]  # start of a tile, and the array's end


def _inside(shape: tuple[int, ...], edges: Edges) -> jax.Array | None:
    """A mask of what lies in the array; None where all tiles of its axes fit, which needs none."""
    mask = None
    for axis, edge in enumerate(edges):
        if edge is not None and edge[1] % shape[axis]:
            there = edge[0] + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < edge[1]
            mask = there if mask is None else mask & there
    return mask


def _load(part, edges: Edges) -> jax.Array:
    mask = _inside(part.shape, edges)
    return plgpu.load(part) if mask is None else plgpu.load(part, mask=mask, other=0)


def _store(part, value: jax.Array, edges: Edges) -> None:
    plgpu.store(part, value.astype(part.dtype), mask=_inside(part.shape, edges))


def _tile(size: int, most: int = TILE) -> int:
    """Sizes of tiles are powers of two, and no products are narrower than 16."""
    return min(max(pl.next_power_of_2(size), 16), most)


def _warps(rows: int) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=8 if rows > 64 else 4, num_stages=3)


# ----------------------------------------------------------------------------------------------------------------- TPUs


def ragged_product(x: jax.Array, weights: jax.Array, starts: jax.Array, *, transposed: bool) -> jax.Array:
    """XLA's own product, which its TPU compiler keeps grouped."""
    flat, sizes = x.reshape(-1, x.shape[2]), jnp.diff(starts) * x.shape[1]
    y = jax.lax.ragged_dot(flat, weights.swapaxes(1, 2) if transposed else weights, sizes)
    return y.reshape(*x.shape[:2], -1)


def tpu_pairs(x: jax.Array, g: jax.Array, starts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Block after block for each tile of the gradients; XLA's own would multiply every row for every expert."""
    if x.dtype == jnp.float16:
        return loop_pairs(x, g, starts)  # TPU kernels cannot write it
    (blocks, size, depth), columns = x.shape, g.shape[2]
    tiles = (min(depth, 1024), min(columns, 512))
    owner = jnp.minimum(_owners(starts, blocks), starts.size - 2)  # a block of nobody goes by, at the last expert
    found = pl.pallas_call(
        _tpu_pairs_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(depth, tiles[0]), pl.cdiv(columns, tiles[1]), blocks),
            in_specs=[
                pl.BlockSpec((None, size, tiles[0]), lambda i, j, block, owner, used: (block, 0, i)),
                pl.BlockSpec((None, size, tiles[1]), lambda i, j, block, owner, used: (block, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, *tiles), lambda i, j, block, owner, used: (owner[block], i, j)),
            scratch_shapes=[pltpu.VMEM(tiles, jnp.float32)],
        ),
        out_shape=_like(x, (starts.size - 1, depth, columns)),
        interpret=interpret,
        name="grouped_pairs",
    )(owner, starts[-1:], x, g)
    return jnp.where((jnp.diff(starts) > 0)[:, None, None], found, 0)  # nothing was written for experts without blocks


def _tpu_pairs_kernel(owner, used, x, g, out, total) -> None:
    block, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when((block == 0) | (owner[block] != owner[jnp.maximum(block - 1, 0)]))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(block < used[0])
    def _() -> None:
        pairs = (((0,), (0,)), ((), ()))
        total[...] += jax.lax.dot_general(x[...], g[...], pairs, preferred_element_type=jnp.float32)

    @pl.when((block == last) | (owner[block] != owner[jnp.minimum(block + 1, last)]))
    def _() -> None:
        out[...] = total[...].astype(out.dtype)
