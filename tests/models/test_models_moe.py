"""Experts: no token is dropped, gradients are exact, and layers with and without them go by in order.

A GPU's and a TPU's kernels run in Pallas's interpreter here, where blocks that a kernel does not write are NaN.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # not public yet
from tiny_models import TINY

from flowjax.models import grouped
from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.moe import ExpertMap, block_shape, lay_out, mix_experts, mixture, route
from flowjax.models.params import Block, layer_blocks
from flowjax.models.shape import Experts, ModelError
from flowjax.models.sharding import MESH_AXES, Placement, ShardingRules

TOKENS, HIDDEN, FFN, COUNT = 13, 6, 5, 4


def _arrays(rank: int = 0) -> tuple[jax.Array, jax.Array, list[ExpertMap]]:
    """Tokens, router, and the maps of all experts; with adapters of that rank, if it has one."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    x, router = drawn(TOKENS, HIDDEN), drawn(HIDDEN, COUNT)
    sizes = ((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN))
    maps = [ExpertMap(drawn(COUNT, *size)) for size in sizes]
    if rank:
        maps = [
            ExpertMap(each.weight, drawn(COUNT, size[0], rank), drawn(COUNT, rank, size[1]))
            for each, size in zip(maps, sizes, strict=True)
        ]
    return x, router, maps


def _part(maps: list[ExpertMap], first: int, count: int) -> list[ExpertMap]:
    """The maps of some experts."""
    return jax.tree.map(lambda array: array[first : first + count], maps)


def _dense(x, router, maps: list[ExpertMap], *, experts: Experts) -> jax.Array:
    """Every expert for every token, weighted by the router's choice or by zero; adapters are added to the matrices."""
    gate, up, down = (weight if a is None or b is None else weight + a @ b for weight, a, b, _ in maps)
    scores = jax.nn.softmax(x @ router, axis=-1)
    kept = jnp.where(scores >= jnp.sort(scores, axis=-1)[:, -experts.per_token, None], scores, 0)
    if experts.normalise:
        kept = kept / kept.sum(axis=-1, keepdims=True)
    inner = jax.nn.silu(jnp.einsum("th,ehf->tef", x, gate)) * jnp.einsum("th,ehf->tef", x, up)
    return jnp.einsum("te,tef,efh->th", kept, inner, down)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rank", [0, 3])
def test_sorted_experts_equal_all_experts_and_a_mask(normalise, parts, rank):
    """With two parts, each has half of the experts and their sum is the whole, as on a mesh."""
    experts, arrays = Experts(COUNT, 2, FFN, normalise), _arrays(rank)
    pull = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)), jnp.float32)

    def ours(x, router, maps):
        weights, chosen = route(x, router, experts)
        size = COUNT // parts
        return sum(
            mix_experts(x, weights, chosen, *_part(maps, i, size), activate=jax.nn.silu, first=i)
            for i in range(0, COUNT, size)
        )

    def run(function):
        step = jax.value_and_grad(lambda *arrays: jnp.sum(function(*arrays) * pull), argnums=(0, 1, 2))
        return jax.jit(step)(*arrays)

    found, wanted = run(ours), run(functools.partial(_dense, experts=experts))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def _routings() -> list[list[int]]:
    """Blocks of each of six experts, at most fourteen in all: all to one, none to the first, to the last, to any."""
    random = np.random.default_rng(3)
    named = [[0, 0, 0, 14, 0, 0], [14, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [2] * 6, [0] * 6]
    return [*named, *(np.bincount(random.integers(0, 6, n), minlength=6).tolist() for n in range(14))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_form_of_a_grouped_product_is_each_experts_own(dtype):
    """Over sizes that no tile divides; what stands in unused blocks is NaN."""
    depth, columns = (100, 144) if dtype == "float32" else (144, 40)
    # Sums are in float32, and what is left is the rounding of the result.
    tolerance = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    interpreted = {"interpret": True}
    forms = [
        (grouped.loop_product, grouped.loop_pairs),
        (functools.partial(grouped.gpu_product, **interpreted), functools.partial(grouped.gpu_pairs, **interpreted)),
        (grouped.ragged_product, functools.partial(grouped.tpu_pairs, **interpreted)),
    ]

    @jax.jit
    def run(x, weights, g, starts, first):
        return [
            (
                multiply(x, weights, starts, first, transposed=False),
                multiply(g, weights, starts, first, transposed=True),
                multiply_pairs(x, g, starts),
            )
            for multiply, multiply_pairs in forms
        ]

    random = np.random.default_rng(0)
    shapes = ((14, 16, depth), (6, depth, columns), (14, 16, columns))
    x, weights, g = (jnp.asarray(random.normal(size=shape) / math.sqrt(depth), dtype) for shape in shapes)
    wide = [np.asarray(array, np.float64) for array in (x, weights, g)]
    among = jnp.concatenate([jnp.full_like(weights, jnp.nan), weights, jnp.full_like(weights, jnp.nan)])
    for counts in _routings():
        owner = np.repeat(np.arange(6), counts)
        used = len(owner)
        pairs = np.zeros(shapes[1])
        np.add.at(pairs, owner, np.einsum("bri,bro->bio", wide[0][:used], wide[2][:used]))
        wanted = (wide[0][:used] @ wide[1][owner], wide[2][:used] @ wide[1][owner].swapaxes(1, 2), pairs)
        starts = jnp.asarray([0, *np.cumsum(counts)], jnp.int32)
        undefined = (x.at[used:].set(jnp.nan), weights, g.at[used:].set(jnp.nan))
        for results in (*run(*undefined, starts, 0), *run(undefined[0], among, undefined[2], starts, 6)):
            for result, right in zip(results, wanted, strict=True):
                assert result.dtype == x.dtype
                bound = tolerance * max(np.abs(right).max(initial=0), 1)
                np.testing.assert_allclose(np.asarray(result, np.float64)[: len(right)], right, rtol=0, atol=bound)


def test_hoppers_product_is_each_experts_own(monkeypatch):
    """Two programs for three tiles, sums of more steps than are on their way, an expert without rows.

    The interpreter, which simulates a GPU's threads and their waiting for each other, knows no transposed matrices.
    """
    monkeypatch.setattr(grouped, "HOPPER_CORES", 2)
    random = np.random.default_rng(0)
    x, weights = (jnp.asarray(random.normal(size=shape) / 16, jnp.bfloat16) for shape in ((4, 128, 384), (6, 384, 256)))
    weights = weights.at[:2].set(jnp.nan).at[5].set(jnp.nan)  # of other layers
    starts = jnp.asarray([0, 1, 1, 3], jnp.int32)  # the fourth block is nobody's
    assert grouped._hopper_takes(x, weights, transposed=False)
    product = functools.partial(grouped.hopper_product, transposed=False, interpret=InterpretGPUParams())
    found = jax.jit(product)(x, weights, starts, jnp.int32(2))[:3]
    wide, own = (np.asarray(array, np.float64) for array in (x[:3], weights[2 + np.array([0, 2, 2])]))
    np.testing.assert_allclose(found.astype(np.float64), wide @ own, rtol=4e-3, atol=1e-4)


@pytest.mark.parametrize(("width", "kernels"), [(256, 5), (128, 2)])
def test_hoppers_product_is_in_both_passes_where_its_tiles_fit(width, kernels):
    """Of the experts' three maps forwards and three backwards, down's first one is not needed for gradients.

    Experts as wide as half a tile leave it the two with as many columns as tokens have numbers.
    """
    maps = [ExpertMap(jnp.zeros((2, COUNT, *size), jnp.bfloat16), layer=jnp.int32(1)) for size in ((256, width),) * 2]
    maps.append(ExpertMap(jnp.zeros((2, COUNT, width, 256), jnp.bfloat16), layer=jnp.int32(1)))
    x, weights, chosen = (
        jnp.zeros((1024, 256), jnp.bfloat16),
        jnp.ones((1024, 1), jnp.bfloat16),
        jnp.zeros((1024, 1), jnp.int32),
    )

    def total(x, maps):
        return mix_experts(x, weights, chosen, *maps, activate=jax.nn.silu, on_hopper=True).sum()

    lowered = jax.jit(jax.grad(total)).trace(x, maps).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", lowered)) == kernels


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("rank", [0, 3])
def test_what_kernels_leave_undefined_reaches_nothing(platform, rank, monkeypatch):
    experts, arrays = Experts(COUNT, 2, FFN), _arrays(rank)

    def interpreted(forms, *args, **options):
        form = forms[platform]
        options |= {} if form is grouped.ragged_product else {"interpret": True}
        return form(*args, **options)

    def ours(x, router, maps):
        weights, chosen = route(x, router, experts)
        return mix_experts(x, weights, chosen, *_part(maps, 1, 2), activate=jax.nn.silu, first=1, total=COUNT)

    def run():
        step = jax.value_and_grad(lambda *arrays: jnp.sum(ours(*arrays) ** 2), argnums=(0, 1, 2))
        return jax.jit(step)(*arrays)

    wanted = run()
    monkeypatch.setattr(grouped, "_by_platform", interpreted)
    for mine, plain in zip(jax.tree.leaves(run()), jax.tree.leaves(wanted), strict=True):
        # Sums of large terms of either sign, whose order is the processor's.
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6 * float(jnp.abs(plain).max()))


@pytest.mark.parametrize(
    ("platform", "rank", "kernels"), [("cuda", 0, 9), ("tpu", 0, 3), ("cuda", 16, 27), ("tpu", 16, 9)]
)
def test_kernels_are_called_on_a_mesh(platform, rank, kernels):
    """Lowered for the platform with the checks of what differs between devices, gradients of everything included."""
    mesh = hlo.described_mesh(platform, (1, 2, 2, 1, 2), MESH_AXES)
    placement = Placement(mesh, ShardingRules())

    def of(shape, *axes) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placement.of(axes))

    outward, inward = ("experts", "expert_embed", "expert_ffn"), ("experts", "expert_ffn", "expert_embed")
    x, router = of((4, 64, 32), "rows", "tokens", None), of((32, 4), "embed", None)

    def mapped(size_in: int, size_out: int, axes: tuple[str, ...]) -> ExpertMap:
        weight = of((4, size_in, size_out), *axes)
        if not rank:
            return ExpertMap(weight)
        a, b = of((4, size_in, rank), *axes[:2], "rank"), of((4, rank, size_out), axes[0], "rank", axes[2])
        return ExpertMap(weight, a, b)

    maps = [mapped(32, 128, outward)] * 2 + [mapped(128, 32, inward)]

    def loss(x, router, maps):
        options = {"experts": Experts(4, 2, 128), "activate": jax.nn.silu, "placement": placement}
        return mixture(x, router, *maps, **options).astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    lowered = step.trace(x, router, maps).lower(lowering_platforms=(platform,)).as_text()
    blocks, size = block_shape(2 * 2 * 64, 4, 2)  # two choices of the tokens of two devices; half of all experts
    assert f"tensor<{blocks}x{size}x32xbf16>" in lowered
    # Three products for each map and each part of its adapter; on a TPU two of them are XLA's own.
    assert len(re.findall(r"@__gpu\$xla.gpu.triton|@tpu_custom_call", lowered)) == kernels


def _routing(tokens: int, experts: Experts, seed: int = 0) -> jax.Array:
    random = np.random.default_rng(seed)
    x, router = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((tokens, 64), (64, experts.count)))
    return route(x, router, experts)[1]


@pytest.mark.parametrize(
    ("tokens", "count", "per_token"), [(8192, 128, 8), (1024, 8, 2), (4096, 64, 8), (2048, 256, 8)]
)
def test_rows_are_little_more_than_choices(tokens, count, per_token):
    chosen = _routing(tokens, Experts(count, per_token, 1))
    blocks, size = block_shape(chosen.size, count)
    layout = lay_out(chosen, 0, count, count)
    assert layout.starts[-1] * size <= 1.3 * chosen.size
    assert layout.starts[-1] <= blocks
    owner = np.searchsorted(layout.starts[1:], np.asarray(layout.place) // size, side="right")
    np.testing.assert_array_equal(owner, chosen)  # each choice is in a block of its expert
    np.testing.assert_array_equal(layout.source.reshape(-1)[layout.place.reshape(-1)], np.arange(chosen.size))
    assert (layout.source < chosen.size).sum() == chosen.size


@pytest.mark.parametrize(
    "chosen",
    # The last: every expert has one row more than whole blocks, for which the bound is exact.
    [np.zeros(64), np.arange(64) % 2 * 7, np.arange(64) % 8, np.arange(64) // 16, [3], np.minimum(np.arange(72), 7)],
)
def test_rows_suffice_for_any_choice(chosen):
    chosen = jnp.asarray(chosen, jnp.int32).reshape(-1, 1)
    for first, at_hand in ((0, 8), (4, 4), (7, 1)):
        blocks, size = block_shape(chosen.size, 8, at_hand)
        layout = lay_out(chosen, first, at_hand, 8)
        here = np.asarray((chosen >= first) & (chosen < first + at_hand))
        assert layout.starts[-1] <= blocks
        assert (np.asarray(layout.place)[here] < layout.starts[-1] * size).all()
        assert (np.asarray(layout.place)[~here] == blocks * size).all()
        assert np.unique(np.asarray(layout.place)[here]).size == here.sum()


def test_products_are_of_the_chosen_experts_and_frozen_ones_have_no_gradient():
    """Counted in the compiled program, where the layer's products are of one block, in loops over used blocks."""
    experts, tokens, hidden = Experts(32, 4, 48), 512, 40
    shapes = ((1, tokens, hidden), (hidden, 32), (32, hidden, 48), (32, hidden, 48), (32, 48, hidden))
    abstract: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    x, router, *matrices = abstract
    arrays = (x, router, [ExpertMap(matrix) for matrix in matrices])
    chosen = _routing(tokens, experts)
    size = block_shape(chosen.size, experts.count)[1]
    used = int(lay_out(chosen, 0, experts.count, experts.count).starts[-1])
    ideal = 2 * chosen.size * hidden * experts.ffn_size

    def loss(x, router, maps):
        return mixture(x, router, *maps, experts=experts, activate=jax.nn.silu, placement=None).sum()

    for function, products in ((loss, 3), (jax.value_and_grad(loss), 6), (jax.value_and_grad(loss, range(3)), 9)):
        compiled = jax.jit(function).lower(*arrays).compile()
        cost = compiled.cost_analysis()
        assert cost is not None and cost["flops"] < 2 * ideal  # bodies of loops count once: no product is outside
        found = [flops for flops in _dots(compiled.as_text() or "") if flops == 2 * size * hidden * experts.ffn_size]
        assert len(found) == products
        assert used * sum(found) <= 1.3 * products * ideal


@pytest.mark.parametrize(("remat", "products"), [("layer", 8), ("dots", 6)])
def test_what_the_backward_pass_computes_again(remat, products):
    """The two maps that the gradients need, never the last one; with "dots" nothing."""
    experts = Experts(8, 2, 48)
    config = dataclasses.replace(TINY, layers=6, hidden_size=40, experts=experts)
    lora = Lora(2, 4.0, targets=("q_proj",))
    model = nnx.eval_shape(lambda: Decoder(config, lora=lora, dtype=jnp.float32, remat=remat, key=jax.random.key(0)))
    graph, adapter, base = nnx.split(model, LoraParam, ...)
    ids = jax.ShapeDtypeStruct((1, 64), jnp.int32)

    def loss(adapter, base, ids):
        return nnx.merge(graph, adapter, base)(ids, ids, ids).sum()

    text = jax.jit(jax.value_and_grad(loss)).lower(adapter, base, ids).compile().as_text()
    size = block_shape(64 * 2, 8)[1]
    assert _dots(text or "").count(2 * size * 40 * 48) == products


def _dots(text: str) -> list[int]:
    """FLOPs of every matrix product in a compiled program."""
    shape = {
        name: [int(size) for size in sizes.split(",")]
        for name, sizes in re.findall(r"%([\w.-]+) = f32\[([\d,]+)\]", text)
    }
    pattern = r"= f32\[([\d,]+)\]\S* dot\((?:f32\S* )?%([\w.-]+), .*?lhs_contracting_dims=\{(\d)\}"
    return [
        2 * math.prod(int(size) for size in result.split(",")) * shape[left][int(axis)]
        for result, left, axis in re.findall(pattern, text)
    ]


def test_one_expert_may_take_every_token():
    x, _, maps = _arrays()
    chosen = jnp.full((TOKENS, 1), 2)
    mixed = mix_experts(x, jnp.ones((TOKENS, 1)), chosen, *maps, activate=jax.nn.silu)
    gate, up, down = (each.weight for each in maps)
    np.testing.assert_allclose(mixed, (jax.nn.silu(x @ gate[2]) * (x @ up[2])) @ down[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "dense", "blocks"),
    [
        (48, (), [Block(0, (True,), 48)]),
        (6, (0,), [Block(0, (False,), 1), Block(1, (True,), 5)]),
        (10, (0, 1, 2, 4, 5, 6, 8, 9), [Block(0, (False, False, False, True), 2), Block(8, (False,), 2)]),
        (4, (1,), [Block(0, (True,), 1), Block(1, (False,), 1), Block(2, (True,), 2)]),
    ],
)
def test_layers_become_few_scans(layers, dense, blocks):
    config = dataclasses.replace(TINY, layers=layers, experts=Experts(COUNT, 2, FFN, dense_layers=dense))
    assert layer_blocks(config) == blocks
    assert [layer for block in layer_blocks(config) for layer in block.layers] == list(range(layers))


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ModelError, match="experts per token is 5 and there are 4 experts"):
        dataclasses.replace(TINY, experts=Experts(4, 5, 8))


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_experts_are_not_cut_out_of_their_stack(frozen):
    config = dataclasses.replace(TINY, layers=6, experts=Experts(COUNT, 2, 40))
    lora = Lora(4, 4.0, targets=("q_proj",)) if frozen else None
    model = Decoder(config, lora=lora, remat="layer", key=jax.random.key(0))
    graph, trained, rest = nnx.split(model, LoraParam if frozen else nnx.Param, ...)
    tokens = jnp.ones((1, 32), jnp.int32)

    def total(trained: Any) -> jax.Array:
        return nnx.merge(graph, trained, rest)(tokens, tokens, tokens).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(total)).trace(trained).lower(lowering_platforms=("cuda",)).as_text()
    one_layer = f"{COUNT}x{config.hidden_size}x40"
    assert f"tensor<6x{one_layer}x" in lowered
    assert (f"tensor<1x{one_layer}x" in lowered) != frozen
