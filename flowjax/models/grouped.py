"""Grouped products: blocks of rows, each times the matrix of its own group, on every platform, with gradients.

The work is that of the rows, whatever the number of groups. Groups are experts here (`flowjax.models.moe`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

TILE = 128  # rows and columns of an expert's gradient that one program of a GPU kernel computes
WIDE_TILE = 256  # columns of a product: on an H200 7 % faster than 128
DEPTH_BYTES = 128  # of each row of a tile, in one step of a product's inner sum
HOPPER_ROWS, HOPPER_COLUMNS, HOPPER_STAGES = 128, 256, 4  # a program's tile, and the steps that are fetched ahead
HOPPER_CORES = 132  # programs, one for each streaming multiprocessor of an H100 or H200


def grouped_product(
    x: Float[Array, "blocks size in"],
    weights: Float[Array, "*layers experts in out"],
    starts: Int[Array, "experts_and_1"],
    layer: Int[Array, ""] | None = None,
    *,
    on_hopper: bool = False,
) -> Float[Array, "blocks size out"]:
    """Each block times the matrix of its expert, summed in float32; the values in unused blocks are not defined.

    An expert e has the blocks from starts[e] up to starts[e + 1]. `jax.lax.ragged_dot` computes the same, but on GPUs
    and CPUs XLA multiplies every row with every expert for it.

    Args:
        layer: index of the layer whose matrices are used, where `weights` has those of all layers. They get no
            gradient, and are read in place except on TPUs: a slice of them would be a copy.
        on_hopper: the program is for a GPU of compute capability 9.0, which has a kernel of its own.
    """
    # In shard_map all inputs must be marked as varying over the same mesh axes. Of a matrix that is the same on several
    # devices, this also sums the gradients.
    given = (x, weights, starts) if layer is None else (x, weights, starts, layer)
    axes = frozenset[str]().union(*map(_varying, given))
    return _grouped_product(on_hopper, *(_vary(array, axes) for array in given))


def _varying(array: jax.Array) -> frozenset[str]:
    """Mesh axes along which devices hold different values."""
    return jax.typeof(array).manual_axis_type.varying


def _vary(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(axes - _varying(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_product(
    on_hopper: bool, x: jax.Array, weights: jax.Array, starts: jax.Array, layer: jax.Array | None = None
) -> jax.Array:
    return _multiply(on_hopper, x, weights, starts, layer, transposed=False)


def _grouped_forward(
    on_hopper: bool, x: jax.Array, weights: jax.Array, starts: jax.Array, layer: jax.Array | None = None
) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_product(on_hopper, x, weights, starts, layer), (x, weights, starts, layer)


def _grouped_backward(on_hopper: bool, kept: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    x, weights, starts, layer = kept
    # Two products: where the matrices are frozen, nothing uses their gradient `pairs`, and XLA drops it.
    pairs = _multiply_pairs(x, g, starts) if layer is None else None
    return _multiply(on_hopper, g, weights, starts, layer, transposed=True), pairs, None, None


_grouped_product.defvjp(_grouped_forward, _grouped_backward)


def _multiply(
    on_hopper: bool, x: jax.Array, weights: jax.Array, starts: jax.Array, layer: jax.Array | None, *, transposed: bool
) -> jax.Array:
    """Blocks times matrices [experts, in, out], or times their transposes."""
    first = jnp.zeros_like(starts[0]) if layer is None else layer * (starts.size - 1)
    matrices = weights.reshape(-1, *weights.shape[-2:])
    on_gpu = hopper_product if on_hopper and _hopper_takes(x, matrices, transposed) else gpu_product
    forms = {"cuda": on_gpu, "tpu": ragged_product, "default": loop_product}
    return _by_platform(forms, x, matrices, starts, first, transposed=transposed)


def _multiply_pairs(x: jax.Array, g: jax.Array, starts: jax.Array) -> jax.Array:
    """Sum over each expert's blocks of x^T g: [experts, in, out], zeros where it has none."""
    forms = {"cuda": gpu_pairs, "tpu": tpu_pairs, "default": loop_pairs}
    return _by_platform(forms, x, g, starts)


def _by_platform(forms: dict[str, Callable[..., jax.Array]], *args: jax.Array, **options: bool) -> jax.Array:
    """The form for the platform that the program is compiled for, which may be another than where it is traced."""
    return jax.lax.platform_dependent(
        *args, **{name: functools.partial(form, **options) for name, form in forms.items()}
    )


def _owners(starts: jax.Array, blocks: int) -> Int[Array, "blocks"]:
    """Expert of each block; the number of experts where a block is not in use."""
    return jnp.searchsorted(starts[1:], jnp.arange(blocks, dtype=jnp.int32), side="right").astype(jnp.int32)


def _like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Type of a kernel's result, marked as varying over the mesh axes that its input varies over."""
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


# In all forms the experts' matrices are `weights[first]` and the following.
def loop_product(
    x: jax.Array, weights: jax.Array, starts: jax.Array, first: jax.Array, *, transposed: bool
) -> jax.Array:
    """Expert after expert and block after block in plain JAX."""

    def expert(e: jax.Array, y: jax.Array) -> jax.Array:
        # Transposed once, outside the inner loop: a product with a matrix that lies transposed takes twice as long.
        weight = weights[first + e].T if transposed else weights[first + e]

        def block(b: jax.Array, y: jax.Array) -> jax.Array:
            return y.at[b].set(jnp.dot(x[b], weight, preferred_element_type=jnp.float32).astype(y.dtype))

        return jax.lax.fori_loop(starts[e], starts[e + 1], block, y)

    y = jnp.zeros((*x.shape[:2], weights.shape[1 if transposed else 2]), x.dtype)
    return jax.lax.fori_loop(0, starts.size - 1, expert, _vary(y, _varying(x)))


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
    x: jax.Array,
    weights: jax.Array,
    starts: jax.Array,
    first: jax.Array,
    *,
    transposed: bool,
    interpret: bool = False,
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
        # The first axis runs fastest: consecutive programs share a block's rows, consecutive blocks a matrix.
        grid=(pl.cdiv(columns, tile), blocks),
        out_shape=_like(x, (blocks, size, columns)),
        compiler_params=_warps(size),
        interpret=interpret,
        name="grouped_product",
    )(_owners(starts, blocks) + first, starts[-1:], x, weights)


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
    """A mask of the tile's places that lie in the array; None where tiles divide all its axes."""
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
    """Size of tiles along an axis: Triton takes powers of two, and no products narrower than 16."""
    return min(max(pl.next_power_of_2(size), 16), most)


def _warps(rows: int) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=8 if rows > 64 else 4, num_stages=3)


# ------------------------------------------------------------------------------------- Hopper GPUs (Pallas, Mosaic GPU)


def _hopper_takes(x: jax.Array, weights: jax.Array, transposed: bool) -> bool:
    """True for whole tiles of a type that Hopper's tensor cores multiply."""
    columns, itemsize = weights.shape[1 if transposed else 2], x.dtype.itemsize
    whole = x.shape[1] == HOPPER_ROWS and columns % HOPPER_COLUMNS == 0 and x.shape[2] % (DEPTH_BYTES // itemsize) == 0
    return whole and x.dtype == weights.dtype and x.dtype in (jnp.bfloat16, jnp.float16)


def hopper_product(
    x: jax.Array, weights: jax.Array, starts: jax.Array, first: jax.Array, *, transposed: bool, interpret: Any = None
) -> jax.Array:
    """Two groups of warps multiply the tiles that a third one fetches (warp specialisation). There is one program for
    each core, which goes from tile to tile (a persistent kernel).

    On an H200 a quarter faster than `gpu_product`, and equal to it bit by bit.
    """
    from jax.experimental.pallas import mosaic_gpu as hopper  # slow to import, and of use on Hopper only

    blocks, size, depth = x.shape
    columns = weights.shape[1 if transposed else 2]
    kernel = hopper.kernel(
        functools.partial(_hopper_product_kernel, hopper, transposed=transposed),
        out_type=jax.ShapeDtypeStruct((blocks * size, columns), x.dtype),
        grid=(HOPPER_CORES,),
        grid_names=("core",),
        num_threads=3,
        thread_name="warps",
        compiler_params=hopper.CompilerParams(lowering_semantics=hopper.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    y = kernel(_owners(starts, blocks) + first, starts[-1:], x.reshape(-1, depth), weights)
    # Without the barrier, XLA runs the kernel twice where a loop uses its result and keeps it, too: the second time to
    # write it in place.
    return _vary(jax.lax.optimization_barrier(y).reshape(blocks, size, columns), _varying(x))


def _hopper_product_kernel(hopper: Any, owner, used, x, weights, y, *, transposed: bool) -> None:
    size, columns, half = HOPPER_ROWS, HOPPER_COLUMNS, HOPPER_ROWS // 2
    step, part = DEPTH_BYTES // x.dtype.itemsize, DEPTH_BYTES // y.dtype.itemsize
    layout = (hopper.TilingTransform((8, step)), hopper.SwizzleTransform(DEPTH_BYTES))  # of all tiles in shared memory
    fetched = (columns, step) if transposed else (step, columns)

    def pipeline(multiply: Callable, around: Callable) -> Any:
        """Calls `multiply` for each step of the inner sum in turn, within `around`, which holds the sum."""
        return hopper.emit_pipeline_warp_specialized(
            multiply,
            grid=(x.shape[1] // step,),
            memory_registers=40,
            in_specs=[
                hopper.BlockSpec((size, step), lambda i: (0, i), transforms=layout, memory_space=hopper.SMEM),
                hopper.BlockSpec(
                    fetched,
                    lambda i: (0, i) if transposed else (i, 0),
                    transforms=layout,
                    memory_space=hopper.SMEM,
                ),
            ],
            wg_axis="warps",
            num_compute_wgs=2,
            max_concurrent_steps=HOPPER_STAGES,
            compute_context=around,
        )

    def nothing(*_: Any) -> None: ...  # asked for its allocations alone: fetched tiles need the same room in any case

    @functools.partial(
        pl.run_scoped,
        room=pipeline(nothing, nothing).get_allocations(x, weights.at[0]),
        written=hopper.SMEM((2, 2, half, part), y.dtype, transforms=layout),
        collective_axes="warps",
    )
    def _(room: Any, written: Any) -> None:
        warps = jax.lax.axis_index("warps")
        tiles = y.shape[1] // columns

        @hopper.nd_loop((used[0] * tiles,), collective_axes="core")
        def _(place: Any) -> None:
            # Consecutive tiles share a block's rows, and consecutive blocks an expert's matrix.
            block, tile = jax.lax.div(place.index[0], tiles), jax.lax.rem(place.index[0], tiles)
            rows, across = pl.ds(block * size, size), pl.ds(tile * columns, columns)
            mine = pl.ds(warps * half, half)  # rows of this group of warps

            def around(run: Callable) -> None:
                @functools.partial(pl.run_scoped, total=hopper.ACC((half, columns)))
                def _(total: Any) -> None:
                    run(total)
                    result = total[...].astype(y.dtype)
                    # `written` has room for two pieces: one is filled while the other is on its way to memory.
                    hopper.wait_smem_to_gmem(0, wait_read_only=True)
                    for number in range(columns // part):
                        hopper.wait_smem_to_gmem(1, wait_read_only=True)
                        piece, to = written.at[warps, number % 2], slice(number * part, (number + 1) * part)
                        piece[...] = result[:, to]
                        hopper.commit_smem()
                        hopper.copy_smem_to_gmem(piece, y.at[rows, across].at[mine].at[:, to])

            def multiply(_: Any, left: Any, right: Any, total: Any) -> Any:
                hopper.wgmma(total, left.at[mine], hopper.transpose_ref(right, (1, 0)) if transposed else right)
                hopper.wgmma_wait(0)
                return total

            matrix = weights.at[owner[block]]
            cut = matrix.at[across] if transposed else matrix.at[:, across]
            pipeline(multiply, around)(x.at[rows], cut, allocations=room)

    hopper.wait_smem_to_gmem(0, wait_read_only=True)


# ----------------------------------------------------------------------------------------------------------------- TPUs


def ragged_product(
    x: jax.Array, weights: jax.Array, starts: jax.Array, first: jax.Array, *, transposed: bool
) -> jax.Array:
    """XLA's own product; on TPUs its compiler multiplies each row with its own expert alone."""
    weights = jax.lax.dynamic_slice_in_dim(weights, first, starts.size - 1)
    flat, sizes = x.reshape(-1, x.shape[2]), jnp.diff(starts) * x.shape[1]
    y = jax.lax.ragged_dot(flat, weights.swapaxes(1, 2) if transposed else weights, sizes)
    return y.reshape(*x.shape[:2], -1)


def tpu_pairs(x: jax.Array, g: jax.Array, starts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Block after block for each tile of the gradients; XLA's own would multiply every row for every expert."""
    if x.dtype == jnp.float16:
        return loop_pairs(x, g, starts)  # TPU kernels cannot write it
    (blocks, size, depth), columns = x.shape, g.shape[2]
    tiles = (min(depth, 1024), min(columns, 512))
    owner = jnp.minimum(_owners(starts, blocks), starts.size - 2)  # unused blocks go to the last expert, adding nothing
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
    # A TPU core runs programs in order, `block` fastest: `total` adds up an expert's blocks, which lie together.
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
