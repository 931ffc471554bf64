"""Flash attention of packed rows for NVIDIA GPUs from Ampere on, in Pallas through Triton, with its own backward pass.

Each query sees one run of its row's keys: within its segment, not after it, within the window. Where that run begins
and ends is found once per call (`seen_keys`); the kernels visit those blocks of keys alone, and mask only the blocks
at a run's edges. So padding, other segments and the causal upper half cost nothing but the rest of the blocks at their
edges; windows may be traced, and queries may be a part of the row (`config.mesh.sequence`). Heads of queries share
keys without copies (GQA).

Source: FlashAttention-2 (arXiv 2307.08691). Scores are in base 2 here: GPUs compute exp2, and exp with a product more.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

LOG2_E = math.log2(math.e)
MASKED = -1e30  # finite: where a query sees nothing in a block, the next block scales that to 0, and no NaN arises
SMALLEST_DIM = 16  # the least that Triton's dot takes


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Tokens of queries and keys that one program of a kernel holds at once, and its warps."""

    queries: int
    keys: int
    warps: int
    stages: int = 2  # steps of the loop over blocks whose loads overlap


@dataclasses.dataclass(frozen=True)
class FlashForm:
    """A call's constants: what the kernels are compiled for."""

    scale: float
    soft_cap: float | None
    forward: _Blocks
    of_queries: _Blocks  # the kernel of the queries' gradient
    of_keys: _Blocks  # the kernel of the gradients of keys and values
    interpret: bool

    @property
    def most(self) -> int:
        """Tokens of the largest block: rows are padded to a multiple of it."""
        return max(max(x.queries, x.keys) for x in (self.forward, self.of_queries, self.of_keys))

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """log2(e) times the scores of queries [q, dim] and keys [k, dim], in float32, before any mask."""
        products = plgpu.dot(q, k, trans_b=True)
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        return jnp.tanh(products * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)

    def slope(self, scores: jax.Array) -> jax.Array | float:
        """Derivative of a score by its product q k, from `scores`: scale, and less where the soft cap flattens it."""
        if self.soft_cap is None:
            return self.scale
        return self.scale * (1 - (scores / (self.soft_cap * LOG2_E)) ** 2)


class Places(NamedTuple):
    """Segments and positions, by which a query sees a key: what `seen_keys` takes."""

    segments: jax.Array
    positions: jax.Array
    key_segments: jax.Array
    key_positions: jax.Array
    window_tokens: int | jax.Array | None


class SeenKeys(NamedTuple):
    """First and last key that each query sees, [rows, queries]; none where first > last."""

    first: jax.Array
    last: jax.Array


# The forms of attention.py have one signature, and `attend_by` calls any of them.
def flash_attend(
    query: Float[Array, "rows queries heads dim"],
    key: Float[Array, "rows keys kv_heads dim"],
    value: Float[Array, "rows keys kv_heads dim"],
    segments: Int[Array, "rows queries"],
    positions: Int[Array, "rows queries"],
    key_segments: Int[Array, "rows keys"],
    key_positions: Int[Array, "rows keys"],
    *,
    window_tokens: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "rows queries heads dim"]:
    """softmax(scale q k) v within segments, as `attention.attend` has it; padding gives zeros.

    A segment is one run of tokens, in which positions count up by one. Memory beside the result is
    one float32 per query and head, forward and backward.
    """
    places = Places(segments, positions, key_segments, key_positions, window_tokens)
    mixed: Any = _flash(flash_form(query, scale, soft_cap, interpret), query, key, value, places)
    return mixed


def seen_keys(
    segments: Int[Array, "rows queries"],
    positions: Int[Array, "rows queries"],
    key_segments: Int[Array, "rows keys"],
    key_positions: Int[Array, "rows keys"],
    window_tokens: int | Int[Array, ""] | None,
) -> SeenKeys:
    """The run of keys that each query sees. A padding query sees none: its first key is `keys`, its last -1."""
    keys = key_segments.shape[1]
    place = jnp.arange(keys, dtype=jnp.int32)
    if segments.shape[1] == keys:  # the queries are the row's own tokens
        begins = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
        # A running maximum carries the place where a segment begins on to its later tokens.
        first, last = jax.lax.cummax(jnp.where(begins, place, 0), axis=1), jnp.broadcast_to(place, segments.shape)
    else:  # a part of them: each looks for itself among the keys (XLA makes no array of [queries, keys] of this)
        same = segments[:, :, None] == key_segments[:, None]
        itself = same & (positions[:, :, None] == key_positions[:, None])
        first, last = jnp.where(same, place, keys).min(axis=2), jnp.where(itself, place, -1).max(axis=2)
    if window_tokens is not None:
        first = jnp.maximum(first, last - window_tokens + 1)
    real = segments != 0
    return SeenKeys(jnp.where(real, first, keys).astype(jnp.int32), jnp.where(real, last, -1).astype(jnp.int32))


def flash_form(query: jax.Array, scale: float | None, soft_cap: float | None, interpret: bool) -> FlashForm:
    dim = query.shape[3]
    wide = dim > 128  # a program's share of registers and shared memory bounds its blocks
    return FlashForm(
        dim**-0.5 if scale is None else scale,
        soft_cap,
        forward=_Blocks(64, 32, 8) if wide else _Blocks(128, 64, 8 if dim > 64 else 4),
        of_queries=_Blocks(32, 32, 4) if wide else _Blocks(64, 64, 8 if dim > 64 else 4),
        of_keys=_Blocks(32, 32, 8) if wide else _Blocks(64, 64, 8 if dim > 64 else 4),
        interpret=interpret,
    )


# ------------------------------------------------------------------------------------------------------ blocks to visit


def _key_blocks(seen: SeenKeys, blocks: _Blocks) -> Int[Array, "rows query_blocks 4"]:
    """Four bounds of the blocks of keys that a block of queries visits: 0 to 1 and 2 to 3 with a mask, 1 to 2 without.

    In an unmasked block, every query of the block sees every key.
    """
    first, last = (x.reshape(x.shape[0], -1, blocks.queries) for x in seen)
    size = blocks.keys
    start, stop = first.min(axis=2) // size, last.max(axis=2) // size + 1
    full_start, full_stop = -(-first.max(axis=2) // size), (last.min(axis=2) + 1) // size
    return _ordered(start, full_start, full_stop, stop)


def _query_blocks(seen: SeenKeys, blocks: _Blocks, keys: int) -> Int[Array, "rows key_blocks 4"]:
    """The blocks of queries that visit each block of keys, as bounds like those of `_key_blocks`."""
    first, last = (x.reshape(x.shape[0], 1, -1, blocks.queries) for x in seen)
    begin = jnp.arange(0, keys, blocks.keys, dtype=jnp.int32)[:, None]
    end = begin + blocks.keys - 1
    some = (first.min(axis=3) <= end) & (last.max(axis=3) >= begin)
    every = (first.max(axis=3) <= begin) & (last.min(axis=3) >= end)
    number = jnp.arange(some.shape[2], dtype=jnp.int32)
    start = jnp.where(some, number, number.size).min(axis=2)
    stop = jnp.where(some, number + 1, 0).max(axis=2)
    # The unmasked blocks are one run: from the first of them up to the next masked one.
    full_start = jnp.where(every, number, number.size).min(axis=2)
    after = ~every & (number > full_start[:, :, None])
    return _ordered(start, full_start, jnp.where(after, number, number.size).min(axis=2), stop)


def _ordered(start: jax.Array, full_start: jax.Array, full_stop: jax.Array, stop: jax.Array) -> jax.Array:
    stop = jnp.maximum(start, stop)
    full_start = jnp.clip(full_start, start, stop)
    return jnp.stack([start, full_start, jnp.clip(full_stop, full_start, stop), stop], axis=-1).astype(jnp.int32)


def _visit(bounds: Any, visit: Any, carry: Any) -> Any:
    """carry after `visit(block, carry, masked)` for each block between the four bounds."""
    for part, masked in enumerate((True, False, True)):
        body = functools.partial(visit, masked=masked)
        carry = jax.lax.fori_loop(bounds[part], bounds[part + 1], body, carry)
    return carry


def _mask(scores: jax.Array, first: jax.Array, last: jax.Array, block: jax.Array, blocks: _Blocks) -> jax.Array:
    """[q, k] True where the query sees the key."""
    keys = block * blocks.keys + jnp.arange(scores.shape[1], dtype=jnp.int32)
    return (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])


# -------------------------------------------------------------------------------------------------------------- kernels


def _forward_kernel(*refs: Any, form: FlashForm) -> None:
    """One block of one head's queries: the running softmax of FlashAttention-2, algorithm 1."""
    q_ref, k_ref, v_ref, first_ref, last_ref, bounds_ref, out_ref, log_ref = refs
    blocks = form.forward
    q, first, last = q_ref[...], first_ref[...], last_ref[...]

    def visit(block: jax.Array, carry: tuple, masked: bool) -> tuple:
        mixed, top, total = carry
        keys = pl.ds(block * blocks.keys, blocks.keys)
        scores = form.scores(q, k_ref[keys, :])
        if masked:
            scores = jnp.where(_mask(scores, first, last, block, blocks), scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        # `shrunk` brings the sums so far, relative to the old maximum, to the new one.
        weights, shrunk = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        v = v_ref[keys, :]
        mixed = mixed * shrunk[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return mixed, new_top, total * shrunk + weights.sum(axis=1)

    rows = blocks.queries
    start = (jnp.zeros(q.shape, jnp.float32), jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32))
    mixed, top, total = _visit(bounds_ref, visit, start)
    sees = first <= last
    total = jnp.where(sees, total, 1.0)
    out_ref[...] = jnp.where(sees[:, None], mixed / total[:, None], 0.0).astype(out_ref.dtype)
    log_ref[...] = top + jnp.log2(total)


def _query_gradient_kernel(*refs: Any, form: FlashForm) -> None:
    """Gradient of one block of one head's queries."""
    q_ref, k_ref, v_ref, first_ref, last_ref, bounds_ref, pull_ref, log_ref, drop_ref, dq_ref = refs
    blocks = form.of_queries
    q, first, last, pull = q_ref[...], first_ref[...], last_ref[...], pull_ref[...]
    log, drop = log_ref[...], drop_ref[...]

    def visit(block: jax.Array, dq: jax.Array, masked: bool) -> jax.Array:
        keys = pl.ds(block * blocks.keys, blocks.keys)
        k = k_ref[keys, :]
        scores = form.scores(q, k)
        weights = jnp.exp2(scores - log[:, None])
        if masked:
            weights = jnp.where(_mask(scores, first, last, block, blocks), weights, 0.0)
        d_scores = weights * (plgpu.dot(pull, v_ref[keys, :], trans_b=True) - drop[:, None]) * form.slope(scores)
        return dq + plgpu.dot(d_scores.astype(k.dtype), k)

    dq_ref[...] = _visit(bounds_ref, visit, jnp.zeros(q.shape, jnp.float32)).astype(dq_ref.dtype)


def _key_gradient_kernel(*refs: Any, form: FlashForm, heads: int) -> None:
    """Gradients of one block of one head's keys and values, summed over the `heads` of queries that share it."""
    q_ref, k_ref, v_ref, first_ref, last_ref, bounds_ref, pull_ref, log_ref, drop_ref, dk_ref, dv_ref = refs
    blocks = form.of_keys
    k, v, mine = k_ref[...], v_ref[...], pl.program_id(0)

    def visit(block: jax.Array, carry: tuple, masked: bool, head: jax.Array) -> tuple:
        dk, dv = carry
        queries = pl.ds(block * blocks.queries, blocks.queries)
        q, pull = q_ref[queries, head, :], pull_ref[queries, head, :]
        scores = form.scores(q, k)
        weights = jnp.exp2(scores - log_ref[head, queries][:, None])
        if masked:
            seen = _mask(scores, first_ref[queries], last_ref[queries], mine, blocks)
            weights = jnp.where(seen, weights, 0.0)
        dv = dv + plgpu.dot(weights.astype(pull.dtype), pull, trans_a=True)
        d_scores = weights * (plgpu.dot(pull, v, trans_b=True) - drop_ref[head, queries][:, None]) * form.slope(scores)
        return dk + plgpu.dot(d_scores.astype(q.dtype), q, trans_a=True), dv

    def of_head(head: jax.Array, carry: tuple) -> tuple:
        return _visit(bounds_ref, functools.partial(visit, head=head), carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, heads, of_head, (zeros, zeros))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


# ---------------------------------------------------------------------------------------------------------------- calls


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(form: FlashForm, query: jax.Array, key: jax.Array, value: jax.Array, places: Places) -> jax.Array:
    return flash_forward(form, query, key, value, places)[0]


def _keep(form: FlashForm, query: jax.Array, key: jax.Array, value: jax.Array, places: Places) -> tuple:
    # Named as all forms' results are: under a remat policy that keeps them, the kernel is not run again.
    mixed, log = (checkpoint_name(x, "mixed") for x in flash_forward(form, query, key, value, places))
    return mixed, (query, key, value, places, mixed, log)


def _pull(form: FlashForm, kept: tuple, pull: jax.Array) -> tuple:
    query, key, value, places, mixed, log = kept
    return *flash_backward(form, query, key, value, places, mixed, log, pull), None


_flash.defvjp(_keep, _pull)


def _pad(form: FlashForm, *arrays: jax.Array) -> list[jax.Array]:
    """Arrays [rows, tokens, heads, dim] with whole blocks of tokens, as wide as Triton wants them."""
    dim = arrays[0].shape[3]
    width = max(SMALLEST_DIM, pl.next_power_of_2(dim))
    return [jnp.pad(x, ((0, 0), (0, -x.shape[1] % form.most), (0, 0), (0, width - dim))) for x in arrays]


def _seen(form: FlashForm, places: Places) -> SeenKeys:
    """The keys that each query of a padded row sees."""
    seen = seen_keys(*places)
    keys, beyond = places.key_segments.shape[1], ((0, 0), (0, -places.segments.shape[1] % form.most))
    return SeenKeys(jnp.pad(seen.first, beyond, constant_values=keys), jnp.pad(seen.last, beyond, constant_values=-1))


def flash_forward(
    form: FlashForm, query: jax.Array, key: jax.Array, value: jax.Array, places: Places
) -> tuple[jax.Array, jax.Array]:
    """Mixed values [rows, queries, heads, dim], and log2 of each query's sum of weights [rows, heads, queries]."""
    tokens, dim = query.shape[1], query.shape[3]
    query, key, value = _pad(form, query, key, value)
    seen = _seen(form, places)
    rows, queries, heads, _ = query.shape
    of = _Specs(query, key)
    shapes = (of.like(query), jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32))
    blocks = form.forward
    mixed, log = _call(
        functools.partial(_forward_kernel, form=form),
        "flash_attention",
        (queries // blocks.queries, rows, heads),
        blocks,
        form,
        in_specs=[of.q(blocks), of.all_k, of.all_k, *of.seen(blocks), of.bounds],
        outputs=[(shapes[0], of.q(blocks)), (shapes[1], of.per_q(blocks))],
    )(query, key, value, *seen, _key_blocks(seen, blocks))
    return mixed[:, :tokens, :, :dim], log[:, :, :tokens]


def flash_backward(
    form: FlashForm,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    places: Places,
    mixed: jax.Array,
    log: jax.Array,
    pull: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values from what `flash_forward` gave and the gradient of its mixed values."""
    tokens, key_tokens, dim = query.shape[1], key.shape[1], query.shape[3]
    query, key, value, mixed, pull = _pad(form, query, key, value, mixed, pull)
    log = jnp.pad(log, ((0, 0), (0, 0), (0, query.shape[1] - tokens)))
    seen = _seen(form, places)
    rows, queries, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    of = _Specs(query, key)
    # sum_k weight_k d_weight_k, which the gradient of a softmax subtracts: equal to pull . mixed, so no sum over keys.
    drop = jnp.einsum("rqhd,rqhd->rhq", pull, mixed, preferred_element_type=jnp.float32)
    blocks = form.of_queries
    dq = _call(
        functools.partial(_query_gradient_kernel, form=form),
        "flash_attention_dq",
        (queries // blocks.queries, rows, heads),
        blocks,
        form,
        in_specs=[
            of.q(blocks),
            of.all_k,
            of.all_k,
            *of.seen(blocks),
            of.bounds,
            of.q(blocks),
            of.per_q(blocks),
            of.per_q(blocks),
        ],
        outputs=[(of.like(query), of.q(blocks))],
    )(query, key, value, *seen, _key_blocks(seen, blocks), pull, log, drop)[0]
    blocks = form.of_keys
    dk, dv = _call(
        functools.partial(_key_gradient_kernel, form=form, heads=heads // kv_heads),
        "flash_attention_dkv",
        (keys // blocks.keys, rows, kv_heads),
        blocks,
        form,
        in_specs=[
            of.all_q,
            of.k(blocks),
            of.k(blocks),
            of.all_seen,
            of.all_seen,
            of.bounds,
            of.all_q,
            of.all_per_q,
            of.all_per_q,
        ],
        outputs=[(of.like(key), of.k(blocks)), (of.like(value), of.k(blocks))],
    )(query, key, value, *seen, _query_blocks(seen, blocks, keys), pull, log, drop)
    return dq[:, :tokens, :, :dim], dk[:, :key_tokens, :, :dim], dv[:, :key_tokens, :, :dim]


def _call(
    kernel: Any,
    name: str,
    grid: tuple[int, int, int],
    blocks: _Blocks,
    form: FlashForm,
    *,
    in_specs: list[pl.BlockSpec],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=form.interpret,
        name=name,
    )


class _Specs:
    """The part of each array that the program (block, row, head) of a kernel works on; None is an axis left out."""

    def __init__(self, query: jax.Array, key: jax.Array):
        self.queries, self.heads, self.dim = query.shape[1:]
        self.keys, kv_heads = key.shape[1:3]
        self.shared = self.heads // kv_heads  # heads of queries to a head of keys
        self.all_k = pl.BlockSpec((None, self.keys, None, self.dim), lambda b, r, h: (r, 0, h // self.shared, 0))
        self.all_q = pl.BlockSpec((None, self.queries, self.shared, self.dim), lambda b, r, h: (r, 0, h, 0))
        self.all_per_q = pl.BlockSpec((None, self.shared, self.queries), lambda b, r, h: (r, h, 0))
        self.all_seen = pl.BlockSpec((None, self.queries), lambda b, r, h: (r, 0))
        self.bounds = pl.BlockSpec((None, None, 4), lambda b, r, h: (r, b, 0))

    def like(self, x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def q(self, blocks: _Blocks) -> pl.BlockSpec:
        return pl.BlockSpec((None, blocks.queries, None, self.dim), lambda b, r, h: (r, b, h, 0))

    def k(self, blocks: _Blocks) -> pl.BlockSpec:
        return pl.BlockSpec((None, blocks.keys, None, self.dim), lambda b, r, h: (r, b, h, 0))

    def per_q(self, blocks: _Blocks) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, blocks.queries), lambda b, r, h: (r, h, b))

    def seen(self, blocks: _Blocks) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        spec = pl.BlockSpec((None, blocks.queries), lambda b, r, h: (r, b))
        return spec, spec
