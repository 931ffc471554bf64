"""cuDNN's flash attention of packed rows, for Hopper GPUs and newer ones."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from flowjax.models.flash import FlashForm, Places, flash_backward, flash_form, flash_forward
from flowjax.models.shape import ModelError

try:
    from jax._src.cudnn import fused_attention_stablehlo as CUDNN  # the public call takes no segments
except ImportError:  # it is private, and may move
    CUDNN: Any = None

PACKED_SEGMENTS = 16  # most segments of a row for which cuDNN is used: its time grows with the room set aside for them


class _Packed(NamedTuple):
    """The constants of a call."""

    segments: int  # most in a row; at least two, since JAX takes one for a row without packing
    scale: float
    window_tokens: int | None
    flash: FlashForm  # for rows of more segments


class _Kept(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    places: Places
    mixed: jax.Array
    sums: jax.Array  # of each query's weights


# The forms of attention.py have one signature, and `attend_by` calls any of them.
def cudnn_attend(
    query: Float[Array, "rows tokens heads dim"],
    key: Float[Array, "rows tokens kv_heads dim"],
    value: Float[Array, "rows tokens kv_heads dim"],
    segments: Int[Array, "rows tokens"],
    positions: Int[Array, "rows tokens"],
    key_segments: Int[Array, "rows tokens"],
    key_positions: Int[Array, "rows tokens"],
    *,
    window_tokens: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads dim"]:
    """Attention within the segments of packed rows, by each one's start and length; padding gives zeros.

    If any row has more than PACKED_SEGMENTS segments, flash attention takes all rows, which is decided at run time.
    """
    if soft_cap is not None:
        raise ModelError("cuDNN's attention has no soft cap: set config.model.attention to 'xla'")
    flash = flash_form(query, scale, None, interpret)
    form = _Packed(max(2, min(PACKED_SEGMENTS, segments.shape[1])), flash.scale, window_tokens, flash)
    places = Places(segments, positions, key_segments, key_positions, window_tokens)
    mixed: Any = _mix(form, query, key, value, places)
    return mixed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, places: Places) -> jax.Array:
    return _mix_forward(form, query, key, value, places)[0]


# Both kernels keep the same arrays for the backward pass, the result and the sums of weights, and each pass has its own
# `cond`: JAX's derivative of one `cond` around both would keep what each of the two needs.
def _mix_forward(form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, places: Places) -> tuple:
    forward = functools.partial(_fused_forward, form), functools.partial(_flash_forward, form)
    kept = jax.lax.cond(_few(form, places), *forward, query, key, value, places)
    mixed, sums = (checkpoint_name(x, "mixed") for x in kept)  # for the remat policies that keep them
    return mixed, _Kept(query, key, value, places, mixed, sums)


def _mix_backward(form: _Packed, kept: _Kept, pull: jax.Array) -> tuple:
    backward = functools.partial(_fused_backward, form), functools.partial(_flash_backward, form)
    return *jax.lax.cond(_few(form, kept.places), *backward, kept, pull), None


_mix.defvjp(_mix_forward, _mix_backward)


def _few(form: _Packed, places: Places) -> Bool[Array, ""]:
    """True if no row has more segments than cuDNN is given room for."""
    return segment_count(places.segments).max() <= form.segments


def _fused(form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> tuple:
    """cuDNN's mixed values, and a function from their gradient to those of queries and of repeated keys and values."""
    lengths, starts = segment_bounds(segments, form.segments)

    def run(*inputs: jax.Array) -> Any:
        return CUDNN.dot_product_attention(
            *inputs,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=starts,
            kv_offsets=starts,
            scale=form.scale,
            mask_type=CUDNN.MaskType.PADDING_CAUSAL,
            sliding_window_length=form.window_tokens,
        )

    # JAX computes memory offsets of keys from their starts with the number of query heads: keys need as many heads.
    groups = query.shape[2] // key.shape[2]
    return jax.vjp(run, query, *(jnp.repeat(x, groups, axis=2) for x in (key, value)))


def _fused_forward(form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, places: Places) -> tuple:
    mixed, pull = _fused(form, query, key, value, places.segments)
    (sums,) = (x for x in jax.tree.leaves(pull) if _is_sums(x, form, query))
    # cuDNN leaves places outside all segments unwritten, here and in the gradients.
    return _real(mixed, places.segments), sums


def _fused_backward(form: _Packed, kept: _Kept, pull: jax.Array) -> tuple[jax.Array, ...]:
    # JAX's own backward pass, with the kept results put in place of those that its forward pass gives here again: that
    # forward kernel is then unused, and XLA leaves it out of the program.
    query, key, value, places, mixed, sums = kept
    again, backward = _fused(form, query, key, value, places.segments)
    arrays, structure = jax.tree.flatten(backward)
    arrays = [mixed if x is again else sums if _is_sums(x, form, query) else x for x in arrays]
    by_query, *by_key = jax.tree.unflatten(structure, arrays)(_real(pull, places.segments))
    # In float32: rounded to 16 bits on the way, the sums were off by 0.4 % on an H200, in place of 0.3.
    shared = (_real(x, places.segments).reshape(*key.shape[:3], -1, key.shape[3]) for x in by_key)
    by_key = (x.sum(axis=3, dtype=jnp.float32).astype(key.dtype) for x in shared)
    return _real(by_query, places.segments), *by_key


def _is_sums(kept: jax.Array, form: _Packed, query: jax.Array) -> bool:
    """True for the one array among those kept by JAX that has each query's sum of weights: a whole row for each
    segment."""
    rows, tokens, heads, _ = query.shape
    return kept.dtype == jnp.float32 and kept.shape == (rows * form.segments, heads, tokens)


def _flash_forward(form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, places: Places) -> tuple:
    mixed, log = flash_forward(form.flash, query, key, value, places)
    return mixed, jnp.pad(log, ((0, log.shape[0] * (form.segments - 1)), (0, 0), (0, 0)))  # to the shape of cuDNN's


def _flash_backward(form: _Packed, kept: _Kept, pull: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, places, mixed, sums = kept
    return flash_backward(form.flash, query, key, value, places, mixed, sums[: query.shape[0]], pull)


def _real(x: jax.Array, segments: jax.Array) -> jax.Array:
    """Zeros in place of padding."""
    return jnp.where((segments != 0)[:, :, None, None], x, 0)


def segment_bounds(
    segments: Int[Array, "rows tokens"], count: int
) -> tuple[Int[Array, "rows count"], Int[Array, "rows count_and_1"]]:
    """Length of each of a row's first `count` segments and where it starts; -1 where there is none.

    A segment is a run of equal numbers other than 0. This is what cuDNN wants: lengths [rows, count], starts
    [rows, count + 1].
    """
    tokens = segments.shape[1]
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    index = jnp.cumsum((segments != before) & (segments != 0), axis=1) - 1
    owner = jnp.where(segments != 0, index, count)  # padding: beyond the last segment, so in none
    member = owner[:, None, :] == jnp.arange(count)[:, None]
    lengths = member.sum(axis=2, dtype=jnp.int32)
    starts = jnp.where(member, jnp.arange(tokens), tokens).min(axis=2).astype(jnp.int32)
    there = lengths > 0
    return jnp.where(there, lengths, -1), jnp.pad(jnp.where(there, starts, -1), ((0, 0), (0, 1)), constant_values=-1)


def segment_count(segments: Int[Array, "rows tokens"]) -> Int[Array, "rows"]:
    """Runs of equal numbers other than 0 in each row."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return jnp.sum((segments != before) & (segments != 0), axis=1)
