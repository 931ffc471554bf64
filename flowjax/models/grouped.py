"""Grouped products: blocks of rows, each times the matrix of its own group, on every platform, with gradients.

The work is that of the rows, whatever the number of groups. Groups are experts here (`flowjax.models.moe`).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

TILE = 128  # rows and columns of an expert's gradient that one program of a GPU kernel computes
WIDE_TILE = 256  # columns of a product: on an H200 7 % faster than 128
DEPTH_BYTES = 128  # of one row of a tile that is multiplied at a time


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
    tile = _tile(columns, WIDE_TILE)
    kernel = functools.partial(
        _gpu_product_kernel,
        step=_tile(depth, DEPTH_BYTES // x.dtype.itemsize),
        tile=tile,
        transposed=transposed,
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(columns, tile), blocks),  # neighbours share rows, and next ones the expert's matrix
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
