"""cuDNN's flash attention of packed rows, for Hopper GPUs and newer ones."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from flowjax.models.flash import flash_attend
from flowjax.models.shape import ModelError

try:
    from jax._src.cudnn import fused_attention_stablehlo as CUDNN  # the public call takes no segments
except ImportError:  # it is private, and may move
    CUDNN: Any = None

PACKED_SEGMENTS = 16  # of one row, at most, for cuDNN, whose time grows with the room set aside for them


class _Packed(NamedTuple):
    """The constants of a call."""

    segments: int  # of a row, at most
    groups: int  # heads of queries that share one of keys
    scale: float
    window_tokens: int | None


def cudnn_attend(
    query: Float[Array, "rows tokens heads dim"],
    key: Float[Array, "rows tokens kv_heads dim"],
    value: Float[Array, "rows tokens kv_heads dim"],
    segments: Int[Array, "rows tokens"],
    *places: Int[Array, "rows tokens"],
    window_tokens: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "rows tokens heads dim"]:
    """Attention within the segments of packed rows, by where each starts and how long it is; padding gives zeros.

    Rows with more than PACKED_SEGMENTS segments go through flash attention instead, decided while running; `places` are
    what it takes after `segments`.
    """
    if soft_cap is not None:
        raise ModelError("cuDNN's attention has no soft cap: set config.model.attention to 'xla'")
    scale = float(query.shape[3] ** -0.5) if scale is None else scale
    form = _Packed(min(PACKED_SEGMENTS, segments.shape[1]), query.shape[2] // key.shape[2], scale, window_tokens)

    def ours(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"window_tokens": window_tokens, "scale": scale, "interpret": interpret}
        return flash_attend(query, key, value, segments, *places, **options)

    def fused(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return _fused(form, query, key, value, segments)

    few = segment_count(segments).max() <= form.segments
    return jax.lax.cond(few, fused, ours, query, key, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
    return _fused_forward(form, query, key, value, segments)[0]


def _fused_forward(
    form: _Packed, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array
) -> tuple[jax.Array, Any]:
    lengths, starts = segment_bounds(segments, max(form.segments, 2))

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

    # JAX turns the starts of keys into memory offsets by the number of query heads: keys need as many.
    mixed, pull = jax.vjp(run, query, *(jnp.repeat(x, form.groups, axis=2) for x in (key, value)))
    # What only this pass can give is named for those who keep it: the result, and the sums of the softmax.
    arrays, structure = jax.tree.flatten(pull)
    arrays = [checkpoint_name(x, "mixed") if x is mixed or x.dtype == jnp.float32 else x for x in arrays]
    # cuDNN leaves places outside all segments unwritten, here and in the gradients.
    return _real(mixed, segments), (jax.tree.unflatten(structure, arrays), segments)


def _fused_backward(form: _Packed, kept: tuple[Any, jax.Array], g: jax.Array) -> tuple[jax.Array | None, ...]:
    pull, segments = kept
    by_query, *by_key = (_real(x, segments) for x in pull(_real(g, segments)))
    # In float32: rounded to 16 bits on the way, the sums were off by 0.4 % on an H200, in place of 0.3.
    shared = (x.reshape(*x.shape[:2], -1, form.groups, x.shape[3]) for x in by_key)
    return by_query, *(x.sum(axis=3, dtype=jnp.float32).astype(g.dtype) for x in shared), None


_fused.defvjp(_fused_forward, _fused_backward)


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
    owner = jnp.where(segments != 0, index, count)  # padding belongs to nobody: beyond the last
    member = owner[:, None, :] == jnp.arange(count)[:, None]
    lengths = member.sum(axis=2, dtype=jnp.int32)
    starts = jnp.where(member, jnp.arange(tokens), tokens).min(axis=2).astype(jnp.int32)
    there = lengths > 0
    return jnp.where(there, lengths, -1), jnp.pad(jnp.where(there, starts, -1), ((0, 0), (0, 1)), constant_values=-1)


def segment_count(segments: Int[Array, "rows tokens"]) -> Int[Array, "rows"]:
    """Runs of equal numbers other than 0 in each row."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return jnp.sum((segments != before) & (segments != 0), axis=1)
