"""Fused attention without a GPU or TPU at hand: who gets it, what it is told, and what it must make of that.

cuDNN's call is lowered for CUDA here and never run; a stand-in that follows its documented meaning shows that the
arguments are right. Splash attention runs in Pallas' interpreter.
"""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packing import packed, segment_mask
from tiny_models import TINY

from flowjax.models import attention as kernels
from flowjax.models import cudnn
from flowjax.models import decoder as decoder_module
from flowjax.models.attention import attend
from flowjax.models.decoder import Decoder
from flowjax.models.logprobs import token_logprobs
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.rope import rope_frequencies
from flowjax.models.shape import LinearScaling, ModelError

BIG = dataclasses.replace(TINY, head_dim=64)
SOFT = dataclasses.replace(BIG, attention_soft_cap=50.0)
CPU, TPU = SimpleNamespace(platform="cpu"), SimpleNamespace(platform="tpu")
H100, A100, V100 = (SimpleNamespace(platform="gpu", compute_capability=x) for x in ("9.0", "8.0", "7.0"))
MI300 = SimpleNamespace(platform="gpu", compute_capability="gfx942")


@pytest.fixture
def hopper(monkeypatch):
    """JAX believes that there is a Hopper GPU with a cuDNN; nothing is run on it."""
    monkeypatch.setattr(cudnn.CUDNN, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91300))
    monkeypatch.setattr(cudnn.CUDNN, "check_compute_capability", lambda capability: capability == "9.0")
    monkeypatch.setattr(cudnn.CUDNN, "is_cuda_compute_capability_equal", lambda capability: capability == "9.0")


@pytest.mark.parametrize(
    ("device", "tokens", "dtype", "config", "parts", "form"),
    [
        (CPU, 4096, jnp.bfloat16, BIG, 1, "xla"),
        (H100, 4096, jnp.bfloat16, BIG, 1, "cudnn"),
        (H100, 512, jnp.bfloat16, BIG, 1, "xla"),
        (H100, 4096, jnp.float32, BIG, 1, "xla"),
        (H100, 4096, jnp.bfloat16, SOFT, 1, "flash"),
        (H100, 4096, jnp.bfloat16, BIG, 2, "flash"),
        (A100, 4096, jnp.bfloat16, BIG, 1, "flash"),
        (A100, 4096, jnp.float16, SOFT, 4, "flash"),
        (V100, 4096, jnp.float16, BIG, 1, "xla"),
        (MI300, 4096, jnp.bfloat16, BIG, 1, "xla"),
        (TPU, 4096, jnp.bfloat16, SOFT, 1, "splash"),
        (TPU, 4100, jnp.bfloat16, BIG, 1, "xla"),
    ],
)
def test_attention_is_chosen_by_device_and_length(device, tokens, dtype, config, parts, form):
    options: Any = {"device": device, "tokens": tokens, "dtype": dtype, "sequence_parts": parts}
    assert kernels.choose_attention("auto", config, **options) == form


@pytest.mark.parametrize(
    ("wanted", "changes", "message"),
    [
        ("fast", {}, "config.model.attention is 'fast': it must be one of auto, xla, cudnn, flash, splash"),
        ("cudnn", {"device": CPU}, "is 'cudnn', but this is a cpu and no NVIDIA GPU: set it to 'auto'"),
        ("cudnn", {"device": MI300}, "this is a gpu and no NVIDIA GPU"),
        ("cudnn", {"device": A100}, "keeps the segments of a packed row apart on Hopper GPUs and newer only"),
        ("cudnn", {"config": SOFT}, "cuDNN's attention has no soft cap"),
        ("cudnn", {"sequence_parts": 4}, "its mask does not work over config.mesh.sequence"),
        ("flash", {"device": V100}, "flash attention needs an Ampere GPU or a newer one"),
        ("cudnn", {"device": V100}, "cuDNN keeps the segments of a packed row apart on Hopper GPUs and newer only"),
        ("flash", {"dtype": jnp.float32}, "the model is in float32 and flash attention takes bfloat16 and float16"),
        ("splash", {}, "this is a gpu and no TPU"),
        ("splash", {"device": TPU, "tokens": 100}, "rows have 100 tokens and splash attention takes multiples of 128"),
    ],
)
def test_attention_that_cannot_keep_segments_apart_is_refused(wanted, changes, message):
    options: Any = {"config": BIG, "device": H100, "tokens": 2048, "dtype": jnp.bfloat16} | changes
    with pytest.raises(ModelError, match=message):
        kernels.choose_attention(wanted, options.pop("config"), **options)


def test_segment_bounds_by_hand():
    segments = jnp.array([[1, 1, 2, 3, 3, 3, 0, 0], [0, 4, 4, 0, 7, 0, 0, 0]])
    lengths, starts = cudnn.segment_bounds(segments, 4)
    np.testing.assert_array_equal(lengths, [[2, 1, 3, -1], [2, 1, -1, -1]])
    np.testing.assert_array_equal(starts, [[0, 2, 3, -1, -1], [1, 4, -1, -1, -1]])
    np.testing.assert_array_equal(cudnn.segment_count(segments), [3, 2])


def documented_cudnn(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, **options):
    """What JAX documents for packed rows: segment i starts at offsets[i] and has seqlen[i] tokens; else unwritten.

    The backward pass is made of what the forward pass keeps, the logarithm of each query's sum of weights among it, for
    which every segment has room for a whole row.
    """
    scale, window = options["scale"], options["sliding_window_length"]
    assert options["mask_type"] == cudnn.CUDNN.MaskType.PADDING_CAUSAL
    assert query.shape == key.shape == value.shape
    np.testing.assert_array_equal(q_seqlen, kv_seqlen)
    np.testing.assert_array_equal(q_offsets, kv_offsets)
    room = q_seqlen.shape[1]
    segments = [
        (row, slice(start, start + length), row * room + number)
        for row in range(query.shape[0])
        for number, (start, length) in enumerate(
            zip(np.asarray(q_offsets[row]), np.asarray(q_seqlen[row]), strict=False)
        )
        if length > 0
    ]

    def scores(query, key, place):
        far = jnp.arange(query[place].shape[0])[:, None] - jnp.arange(query[place].shape[0])
        seen = (far >= 0) & (far < (window or query.shape[1]))
        return jnp.where(seen, scale * jnp.einsum("thd,shd->hts", query[place], key[place]), -jnp.inf)

    def forward(query, key, value):
        mixed = jnp.full(query.shape, jnp.nan)
        sums = jnp.full((query.shape[0] * room, query.shape[2], query.shape[1]), jnp.nan)
        for row, cut, number in segments:
            here = scores(query, key, (row, cut))
            mixed = mixed.at[row, cut].set(jnp.einsum("hts,shd->thd", jax.nn.softmax(here, axis=-1), value[row, cut]))
            sums = sums.at[number, :, : cut.stop - cut.start].set(jax.nn.logsumexp(here, axis=-1))
        return mixed, (query, key, value, mixed, sums)

    def backward(kept, pull):
        query, key, value, mixed, sums = kept
        by_query, by_key, by_value = (jnp.full(query.shape, jnp.nan) for _ in range(3))
        for row, cut, number in segments:
            q, k, v, g = (x[row, cut] for x in (query, key, value, pull))
            weights = jnp.exp(scores(query, key, (row, cut)) - sums[number, :, : cut.stop - cut.start, None])
            drop = jnp.einsum("thd,thd->ht", g, mixed[row, cut])[..., None]
            slope = scale * weights * (jnp.einsum("thd,shd->hts", g, v) - drop)
            by_query = by_query.at[row, cut].set(jnp.einsum("hts,shd->thd", slope, k))
            by_key = by_key.at[row, cut].set(jnp.einsum("hts,thd->shd", slope, q))
            by_value = by_value.at[row, cut].set(jnp.einsum("hts,thd->shd", weights, g))
        return by_query, by_key, by_value

    attend = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    attend.defvjp(forward, backward)
    return attend(query, key, value)


def _inputs(tokens: int, dim: int = 8, heads: int = 4, kv_heads: int = 2, rows: int = 2) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(rows, tokens, n, dim)), jnp.float32) for n in (heads, kv_heads, kv_heads)]


def _compare(form: Any, arrays: list[jax.Array], places: tuple[Any, Any], **options: Any) -> None:
    """Values and gradients of a form of attention are those of `attend`, wherever there is no padding."""
    segments, positions = (jnp.asarray(x) for x in places)
    pull = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)
    pull = pull * (segments != 0)[:, :, None, None]

    def run(function: Any) -> tuple[jax.Array, Any]:
        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(function(*arrays, segments, positions, segments, positions, **options) * pull)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*arrays)

    for mine, wanted in zip(jax.tree.leaves(run(form)), jax.tree.leaves(run(attend)), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("window", [None, 3])
def test_what_cudnn_is_told_means_the_segment_mask(monkeypatch, window):
    monkeypatch.setattr(cudnn.CUDNN, "dot_product_attention", documented_cudnn)
    monkeypatch.setattr(jax.lax, "cond", lambda fits, fused, plain, *arrays: fused(*arrays) if fits else plain(*arrays))
    places = packed([[5, 1, 7], [13]], 16)
    _compare(cudnn.cudnn_attend, _inputs(16), places, window_tokens=window, scale=0.3)


def test_rows_of_many_segments_do_not_go_to_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "PACKED_SEGMENTS", 2)

    def fused(query, *rest, q_seqlen, **options):
        rows, tokens, heads, _ = query.shape
        nothing = jnp.full((rows * q_seqlen.shape[1], heads, tokens), jnp.nan)
        attend = jax.custom_vjp(lambda *arrays: arrays[0] * jnp.nan)
        attend.defvjp(lambda *arrays: (arrays[0] * jnp.nan, nothing), lambda nothing, pull: (pull + nothing.sum(),) * 3)
        return attend(query, *rest)

    monkeypatch.setattr(cudnn.CUDNN, "dot_product_attention", fused)
    ours = functools.partial(cudnn.cudnn_attend, interpret=True)
    _compare(ours, _inputs(16), packed([[5, 1, 7], [13]], 16))


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (40, 2.0)])
def test_splash_attention_keeps_segments_apart(window, soft_cap):
    def splash(*arrays: jax.Array, **options: Any) -> jax.Array:
        return kernels.splash_attend(*arrays, **options, interpret=True)

    places = packed([[50, 60, 10]], 128)
    options = {"window_tokens": window, "soft_cap": soft_cap, "scale": 0.3}
    _compare(splash, _inputs(128, dim=16, heads=2, kv_heads=1, rows=1), places, **options)


@pytest.mark.parametrize(
    ("form", "platform", "calls"),
    [
        ("cudnn", "cuda", ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")),
        ("flash", "cuda", ("__gpu$xla.gpu.triton",)),
        ("splash", "tpu", ("tpu_custom_call",)),
    ],
)
def test_the_gradient_of_a_packed_step_calls_the_kernel(hopper, monkeypatch, form, platform, calls):
    monkeypatch.setattr(decoder_module, "choose_attention", lambda *args, **options: form)
    config = dataclasses.replace(BIG, sliding_window_tokens=200, full_attention_layers=(1,))
    model = nnx.eval_shape(lambda: Decoder(config, lora=Lora(4, 8.0), dtype=jnp.bfloat16, key=jax.random.key(0)))
    graph, trained, frozen = nnx.split(model, LoraParam, ...)

    def loss(trained: Any, frozen: Any, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        model = nnx.merge(graph, trained, frozen)
        hidden = model(tokens, positions, segments).reshape(-1, config.hidden_size)
        return token_logprobs(hidden, model.head(), tokens.reshape(-1))[0].sum()

    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    with hlo.described_gpu() if platform == "cuda" else contextlib.nullcontext():
        traced = jax.jit(jax.grad(loss)).trace(trained, frozen, ids, ids, ids)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert all(call in text for call in calls)
    assert "x1024x1024x" not in text  # no matrix of scores


@pytest.mark.parametrize(("remat", "passes"), [("none", 1), ("dots", 1), ("layer", 2)])
def test_cudnn_s_forward_pass_is_kept_with_what_linear_maps_give(hopper, monkeypatch, remat, passes):
    """Its result alone would not do: the backward pass wants the sums of the softmax, too."""
    monkeypatch.setattr(decoder_module, "choose_attention", lambda *args, **options: "cudnn")
    options: dict[str, Any] = {"lora": Lora(4, 8.0), "dtype": jnp.bfloat16, "remat": remat, "key": jax.random.key(0)}
    model = nnx.eval_shape(lambda: Decoder(BIG, **options))
    graph, trained, frozen = nnx.split(model, LoraParam, ...)

    def loss(trained: Any, frozen: Any, ids: jax.Array) -> jax.Array:
        return nnx.merge(graph, trained, frozen)(ids, ids, ids).sum()

    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    with hlo.described_gpu():
        traced = jax.jit(jax.grad(loss)).trace(trained, frozen, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = (text.count(f"@__cudnn$fmha{name}(") for name in ("Softmax", "SoftmaxBackward"))
    assert backward and forward == passes * backward  # layers share one text, or have one each


@pytest.mark.parametrize("tokens", [1023, 8192])
def test_float16_holds_the_sum_of_many_equal_values(tokens):
    """Undivided, they were added up to infinity."""
    query = jnp.zeros((1, 8, 1, 16), jnp.float16)
    key, value = jnp.zeros((1, tokens, 1, 16), jnp.float16), jnp.full((1, tokens, 1, 16), 70.0, jnp.float16)
    ones, places = jnp.ones((1, tokens), jnp.int32), jnp.arange(tokens)[None]
    found = kernels.attend(query, key, value, ones[:, -8:], places[:, -8:], ones, places)
    assert np.asarray(found) == pytest.approx(70.0, rel=2e-3)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (9, 5.0), (1, None)])
@pytest.mark.parametrize(("block_tokens", "queries"), [(3, 30), (8, 30), (30, 30), (4, 11)])
def test_the_backward_pass_is_that_of_a_plain_softmax(block_tokens, queries, window, soft_cap):
    """In blocks that are written out, in a loop, at once, and for the queries of a part of the row."""
    tokens = 30
    segments, positions = map(jnp.asarray, packed([[11, 19], [25]], tokens))
    part = (segments[:, -queries:], positions[:, -queries:])
    seen = segment_mask(*part, window, segments, positions)[:, None, None]
    random = np.random.default_rng(0)
    key, value = (random.normal(size=(2, tokens, 2, 4)).astype(np.float32) for _ in range(2))
    query, pull = (random.normal(size=(2, queries, 4, 4)).astype(np.float32) for _ in range(2))
    pull = pull * (part[0] != 0)[:, :, None, None]

    def plain(query, key, value):
        scores = jnp.einsum("rtkgd,rskd->rkgts", query.reshape(2, queries, 2, 2, 4), key) / 2
        scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
        weights = jax.nn.softmax(jnp.where(seen, scores, kernels.MASKED), axis=-1)
        return jnp.einsum("rkgts,rskd->rtkgd", weights, value).reshape(query.shape)

    def blockwise(query, key, value):
        options = {"window_tokens": window, "soft_cap": soft_cap, "block_tokens": block_tokens}
        return attend(query, key, value, *part, segments, positions, **options)

    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *arrays, form=form: jnp.sum(jnp.sin(form(*arrays)) * pull), (0, 1, 2)))(
            query, key, value
        )
        for form in (blockwise, plain)
    )
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_tokens", [3, 8, 30])
def test_no_array_without_elements_is_in_the_gradient(block_tokens):
    """The compiler of JAX 0.11 crashes where `shard_map` gets one, which a model on a mesh calls attention in."""
    places = [jnp.asarray(x) for x in packed([[11, 19], [25]], 30)] * 2

    def total(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays, *places, block_tokens=block_tokens).sum()

    text = jax.jit(jax.grad(total, (0, 1, 2))).lower(*_inputs(30)).as_text()
    assert "tensor<2x30x" in text  # shapes are written as they are looked for
    assert "tensor<0x" not in text and "x0x" not in text


def test_padding_takes_and_gives_no_gradient():
    """Also where something pulls at it: a later layer's padding, say."""
    segments, positions = map(jnp.asarray, packed([[3]], 8))
    arrays = _inputs(8, rows=1)

    def pulled(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.sum(attend(query, key, value, segments, positions, segments, positions) ** 2)

    gradients = jax.grad(pulled, (0, 1, 2))(*arrays)
    for gradient in gradients:
        assert np.isfinite(gradient).all() and np.abs(gradient[:, :3]).max() > 0 and not np.abs(gradient[:, 3:]).any()


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("block_tokens", [3, 8])
def test_blocks_of_queries_change_neither_values_nor_gradients(block_tokens, soft_cap):
    """8 tokens a block: each with the keys up to its end. 3: more blocks than are written out; they come in a loop."""
    tokens = 30
    segments, positions = map(jnp.asarray, packed([[11, 19], [25]], tokens))
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(2, tokens, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    real = (segments != 0)[:, :, None, None]

    def total(query, key, value, block_tokens):
        own = (segments, positions, segments, positions)
        mixed = attend(query, key, value, *own, window_tokens=9, soft_cap=soft_cap, block_tokens=block_tokens)
        return jnp.sum(jnp.sin(mixed) * real)

    find = jax.jit(jax.value_and_grad(total, (0, 1, 2)), static_argnums=3)
    mine, whole = find(query, key, value, block_tokens), find(query, key, value, tokens)
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cached_bytes", "pairs"), [(1, (1, 1)), (2000, (1, 2)), (4000, (1, 4)), (16000, (3, 4)), (2**30, (6, 4))]
)
@pytest.mark.parametrize("block_tokens", [3, 8])
def test_some_rows_and_heads_at_a_time_change_neither_values_nor_gradients(
    monkeypatch, cached_bytes, pairs, block_tokens
):
    tokens, rows = 30, 6
    places = [jnp.asarray(x) for x in packed([[11, 19], [25], [30], [1, 1, 1], [], [4, 8, 15]], tokens)] * 2
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(rows, tokens, heads, 4)).astype(np.float32) for heads in (8, 4, 4))
    real = (places[0] != 0)[:, :, None, None]

    def found(most: dict[str, int]) -> Any:
        monkeypatch.setattr(kernels, "CACHED_BYTES", most)

        def total(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attend(*arrays, *places, window_tokens=9, block_tokens=block_tokens)) * real)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(query, key, value)

    part, whole = found({"cpu": cached_bytes}), found({})
    for one, other in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(kernels, "CACHED_BYTES", {"cpu": cached_bytes})
    assert kernels.pairs_at_once(rows, 4, 1000) == pairs


def test_a_number_of_rows_without_divisors_is_not_processed_one_by_one(monkeypatch):
    monkeypatch.setattr(kernels, "CACHED_BYTES", {"cpu": 64})
    assert kernels.pairs_at_once(67, 1, 1) == (67, 1)
    assert kernels.pairs_at_once(7, 1, 32) == (1, 1)


def plain_rows(tokens: int, dim: int, dtype: jnp.dtype, seed: int = 0) -> tuple[jax.Array, ...]:
    """Query, key and value of one row of one segment, and segments and positions, twice."""
    query, key, value = jax.random.normal(jax.random.key(seed), (3, 1, tokens, 2, dim)).astype(dtype)
    places = jnp.ones((1, tokens), jnp.int32), jnp.arange(tokens)[None]
    return query, key, value, *places, *places


@pytest.mark.parametrize(("tokens", "most_scores"), [(18, 18 * 18), (80, 64 * 64 + 16 * 80)])
def test_a_short_row_is_scored_at_its_own_length(tokens, most_scores):
    rows = plain_rows(tokens, 16, jnp.dtype("float32"))

    def loss(*qkv: jax.Array) -> jax.Array:
        return (attend(*qkv, *rows[3:]) ** 2).sum()

    counts = []
    for function, products in ((loss, 2), (jax.grad(loss, (0, 1, 2)), 6)):  # one program: scores are found once
        program = jax.jit(function).lower(*rows[:3]).compile()
        counts.append((program.cost_analysis() or {})["flops"] / (products * 2 * 16 * 2 * most_scores))
    assert all(1 < count < 1.5 for count in counts), counts  # beside products: softmax and masks


def test_the_scale_is_not_rounded_to_bfloat16():
    """Gemma 2 27B's 1/12 is 0.083496 there: every score would be 0.2 % too large, which weights show by 2 %."""
    rows, dim = 64, 128
    query = jax.random.uniform(jax.random.key(0), (rows, 2, 1, dim), jnp.bfloat16, 0.5, 1.5)
    key = jnp.broadcast_to(jnp.array([0.0, 1.0], jnp.bfloat16)[None, :, None, None], query.shape)
    places = jnp.ones((rows, 2), jnp.int32), jnp.broadcast_to(jnp.arange(2), (rows, 2))
    mixed = attend(query, key, 1 - key, *places, *places, scale=1 / 12)[:, 1, 0, 0]  # weight of the first key
    exact = jax.nn.sigmoid(-query[:, 1, 0].astype(jnp.float32).sum(axis=-1) / 12)
    assert abs(float((mixed.astype(jnp.float32) / exact).mean()) - 1) < 0.005


@pytest.mark.parametrize(("scaling", "stretch"), [(None, 1.0), (LinearScaling(4.0), 4.0)])
def test_rotary_frequencies_fall_from_one_to_nearly_one_over_theta(scaling, stretch):
    expected = [10_000.0 ** (-2 * i / 8) / stretch for i in range(4)]
    np.testing.assert_allclose(rope_frequencies(8, 10_000.0, scaling), expected, rtol=1e-6)
