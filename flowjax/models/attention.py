"""Attention within the segments of packed rows: masks, and grouped-query attention in four forms.

XLA's plain attention runs everywhere. Flash attention (`flash.py`) and cuDNN's, for NVIDIA GPUs, and splash attention,
for TPUs, are fused, and keep a row's segments apart without a [tokens, tokens] mask in memory. tests/models check the
calls and the results without such a device. On an H200 the first three are as near to float32 as bfloat16 allows
(docs/benchmarks/accelerators.md); no TPU has run the fourth.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from flowjax.models.cudnn import CUDNN, cudnn_attend
from flowjax.models.flash import SeenKeys, flash_attend, seen_keys
from flowjax.models.shape import ModelConfig, ModelError

Form = Literal["xla", "cudnn", "flash", "splash"]
CHOICES = ("auto", "xla", "cudnn", "flash", "splash")
FUSED_FROM_TOKENS = 1024  # below, XLA's plain attention is about as fast as a fused one
SPLASH_BLOCK_TOKENS = 512
LANES = 128  # splash attention's rows are multiples of it
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
BLOCK_TOKENS = 1024  # queries whose scores exist at once, at most
# Blocks of queries in a row, each of which takes the keys up to its own end: with 8, 36 of 64 blocks of scores.
BLOCKS = 8
# By platform: a CPU is fast while the scores that exist at once stay in its second cache. Below such a block nothing is
# gained.
SMALL_BLOCK_TOKENS = {"cpu": 64}  # least block
CACHED_BYTES = {"cpu": 2**20}  # scores at once
MASKED = -1e30  # finite, so that a query that sees no key gets a mean of the values and not NaN


# ------------------------------------------------------------------------------------------------ XLA's plain attention


def attend(
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
    block_tokens: int | None = None,
) -> Float[Array, "rows queries heads dim"]:
    """softmax(scale q k) v with float32 scores; heads share keys in groups, never repeated in memory (GQA).

    With `soft_cap` scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118). `scale` is 1 / sqrt(dim) unless
    stated. Queries are processed in blocks of `block_tokens`, whose scores the backward pass computes again, so that
    memory grows with keys * block_tokens and not with keys * queries; on a CPU a few rows and heads at a time, too. If
    there are as many keys as queries, they are taken for the queries' own tokens: no query sees a key later in the row,
    and a block skips the keys after its end. A segment is one run of tokens, in which positions count up by one; 0 is
    padding, which gets a mean of the values.
    """
    rows, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    scale = dim**-0.5 if scale is None else scale
    scaled = (query * jnp.float32(scale)).astype(query.dtype)  # the scale itself is not rounded to the model's type
    query = scaled.reshape(rows, tokens, kv_heads, heads // kv_heads, dim)
    # Heads before tokens: otherwise XLA's CPU backend transposes the scores instead.
    query, key, value = query.transpose(0, 2, 3, 1, 4), key.swapaxes(1, 2), value.swapaxes(1, 2)
    is_self = key.shape[2] == tokens  # the keys are the queries' own tokens
    size = block_tokens or default_block_tokens(tokens if is_self else 0)
    pairs = pairs_at_once(rows, kv_heads, 4 * heads // kv_heads * min(size, tokens) * key.shape[2])
    form = _Blockwise(size, pairs, is_self, soft_cap)
    seen = seen_keys(segments, positions, key_segments, key_positions, window_tokens)
    mixed: Any = _mix(form, query, key, value, seen)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, tokens, heads, dim)


class _Blockwise(NamedTuple):
    """The constants of a call that processes its queries block by block."""

    block_tokens: int
    pairs: tuple[int, int]  # rows and heads of keys that are processed at once
    is_self: bool
    soft_cap: float | None

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        scores = jnp.einsum("rkgtd,rksd->rkgts", query, key, preferred_element_type=jnp.float32)
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def each(self, block: Callable, seen: SeenKeys, by_query: tuple, by_key: tuple, sums: tuple) -> tuple[tuple, tuple]:
        """Call `block(seen, by_query, by_key)` for each block of queries (axis 3) of each few rows and heads, with the
        keys (axis 2) that these may see, and `seen` as a mask.

        Returns its results for queries, concatenated, and its results for keys, added to `sums`.
        """
        rows, kv_heads = by_key[0].shape[:2]
        at_once, heads = self.pairs
        runs = tuple(jnp.broadcast_to(x[:, None, None, :, None], (rows, kv_heads, 1, x.shape[1], 1)) for x in seen)

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(rows // at_once, at_once, kv_heads // heads, heads, *x.shape[2:]).swapaxes(1, 2)
            return x.reshape(-1, at_once, heads, *x.shape[4:])

        def merge(x: jax.Array) -> jax.Array:
            x = x.reshape(rows // at_once, kv_heads // heads, at_once, heads, *x.shape[3:]).swapaxes(1, 2)
            return x.reshape(rows, kv_heads, *x.shape[4:])

        of_pairs = functools.partial(self._each_block, block)
        if self.pairs == (rows, kv_heads):
            return of_pairs((runs, by_query, by_key, sums))
        return jax.tree.map(merge, jax.lax.map(of_pairs, jax.tree.map(split, (runs, by_query, by_key, sums))))

    def _each_block(self, block: Callable, arrays: tuple[tuple, tuple, tuple, tuple]) -> tuple[tuple, tuple]:
        runs, by_query, by_key, sums = arrays
        tokens, keys = by_query[0].shape[3], by_key[0].shape[2]
        size = min(self.block_tokens, tokens)
        cut = (*runs, *by_query)

        def visit(sums: tuple, blocks: Sequence[jax.Array], keys: int) -> tuple[tuple, tuple]:
            first, last, *of_queries = blocks
            # Counted, and no array of the keys' own (their segments, say): XLA's CPU code is then three times as fast.
            place = jnp.arange(keys)
            seen = (first <= place) & (place <= last)
            per_query, per_key = block(seen, of_queries, [x[:, :, :keys] for x in by_key])
            return tuple(map(_add_first, sums, per_key)), per_query

        starts = range(0, tokens, size)
        # A few blocks are unrolled, each with its own number of keys. Many are a scan, where all have one shape, and so
        # all keys.
        if self.is_self and len(starts) <= BLOCKS:
            parts: list[tuple] = []
            for start in starts:
                end = min(start + size, tokens)
                sums, per_query = visit(sums, [x[:, :, :, start:end] for x in cut], end)
                parts.append(per_query)
            whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *parts)
        else:
            beyond = (0, -tokens % size)
            padded = [jnp.pad(x, [beyond if axis == 3 else (0, 0) for axis in range(x.ndim)]) for x in cut]

            def step(sums: tuple, start: jax.Array) -> tuple[tuple, tuple]:
                return visit(sums, [jax.lax.dynamic_slice_in_dim(x, start, size, 3) for x in padded], keys)

            sums, found = jax.lax.scan(step, sums, jnp.asarray(starts))
            whole = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[-1]), found)
        return tuple(x[:, :, :, :tokens] for x in whole), sums


def _add_first(total: jax.Array, found: jax.Array) -> jax.Array:
    """`total` with `found` added to its first keys (axis 2).

    For all keys it is a plain sum: `.at` on a whole array has an index array without elements, which JAX makes an input
    of `shard_map`, and the compiler of JAX 0.11 crashes on such an input.
    """
    keys = found.shape[2]
    return total + found if keys == total.shape[2] else total.at[:, :, :keys].add(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(form: _Blockwise, query: jax.Array, key: jax.Array, value: jax.Array, seen: SeenKeys) -> jax.Array:
    """Mixed values [rows, kv_heads, group, queries, dim] of keys and values [rows, kv_heads, keys, dim]."""
    return _mix_forward(form, query, key, value, seen)[0]


def _mix_forward(form: _Blockwise, query: jax.Array, key: jax.Array, value: jax.Array, seen: SeenKeys) -> tuple:
    def block(seen: jax.Array, by_query: Sequence[jax.Array], by_key: Sequence[jax.Array]) -> tuple:
        (query,), (key, value) = by_query, by_key
        scores = jnp.where(seen, form.scores(query, key), MASKED)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        # Sums of undivided weights are beyond float16 with a few hundred keys; other types have the range.
        wide = jnp.float32 if value.dtype == jnp.float16 else None
        mixed = jnp.einsum("rkgts,rksd->rkgtd", weights.astype(value.dtype), value, preferred_element_type=wide)
        # Divided after the product: [tokens, dim] numbers and not [tokens, keys]; in float32, as the sum is.
        return ((mixed / total).astype(value.dtype), top + jnp.log(total)), ()

    # Named for the remat policies that keep it: then the backward pass does not run this again.
    mixed, log = (checkpoint_name(x, "mixed") for x in form.each(block, seen, (query,), (key, value), ())[0])
    return mixed, (query, key, value, seen, mixed, log)


def _mix_backward(form: _Blockwise, kept: tuple, pull: jax.Array) -> tuple:
    """Gradients from each query's log-sum of weights and scores computed again (FlashAttention-2, arXiv 2307.08691).

    JAX's own derivative of the forward pass takes one more product, runs the softmax again, and adds up gradients of
    the whole row's size, one for each block.
    """
    query, key, value, seen, mixed, log = kept
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # sum_k weight_k d_weight_k, which the gradient of a softmax subtracts: equal to pull . mixed, so no sum over keys.
    drop = product("rkgtd,rkgtd->rkgt", pull, mixed)[..., None]

    def block(seen: jax.Array, by_query: Sequence[jax.Array], by_key: Sequence[jax.Array]) -> tuple:
        (query, pull, log, drop), (key, value) = by_query, by_key
        scores = form.scores(query, key)
        # Masked before exp: an unseen score may be so far above `log` that exp gives infinity.
        weights = jnp.exp(jnp.where(seen, scores - log, MASKED))
        slope = 1.0 if form.soft_cap is None else 1 - (scores / form.soft_cap) ** 2
        d_weights = product("rkgtd,rksd->rkgts", pull, value)
        d_scores = (weights * (d_weights - drop) * slope).astype(key.dtype)
        d_query = product("rkgts,rksd->rkgtd", d_scores, key).astype(query.dtype)
        # [dim, keys], not [keys, dim]: XLA's CPU backend would first transpose the scores.
        d_value = product("rkgtd,rkgts->rkds", pull, weights.astype(pull.dtype)).swapaxes(2, 3)
        d_key = product("rkgtd,rkgts->rkds", query, d_scores).swapaxes(2, 3)
        return (d_query,), (d_key, d_value)

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    (d_query,), (d_key, d_value) = form.each(block, seen, (query, pull, log, drop), (key, value), sums)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_mix.defvjp(_mix_forward, _mix_backward)


def pairs_at_once(rows: int, kv_heads: int, score_bytes: int) -> tuple[int, int]:
    """Rows and heads of keys that are processed at once, with so many bytes of scores in a block of queries each."""
    fits = CACHED_BYTES.get(jax.default_backend(), rows * kv_heads * score_bytes) / score_bytes
    return _part(rows, fits / kv_heads), _part(kv_heads, fits)


def _part(whole: int, wanted: float) -> int:
    """The divisor of `whole` that is nearest to `wanted` as a ratio."""
    divisors = [x for x in range(1, whole + 1) if whole % x == 0]
    return min(divisors, key=lambda x: abs(math.log(x / wanted)))


def default_block_tokens(tokens: int) -> int:
    """Queries in a block of a row of `tokens`."""
    smallest = SMALL_BLOCK_TOKENS.get(jax.default_backend(), BLOCK_TOKENS)
    return min(max(-(-tokens // BLOCKS), smallest), BLOCK_TOKENS)


# ----------------------------------------------------------------------------------------------------- choice of a form


def cuda_capability(device: Any) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU, (8, 0) of an A100; (0, 0) of any other device."""
    numbers = str(getattr(device, "compute_capability", "")).split(".")
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else (0, 0)


def choose_attention(
    wanted: str, config: ModelConfig, *, device: Any, tokens: int, dtype: DTypeLike, sequence_parts: int = 1
) -> Form:
    """The form of attention for rows of `tokens` tokens on a device, which may be a mere description of one.

    Raises:
        ModelError: the wanted form cannot keep the segments of a packed row apart here, or does not exist on this
            platform.
    """
    if wanted not in CHOICES:
        raise ModelError(f"config.model.attention is {wanted!r}: it must be one of {', '.join(CHOICES)}")
    if wanted == "xla":
        return "xla"
    obstacles: dict[Form, str | None] = {  # "auto" takes the first form that has none
        "cudnn": _cudnn_obstacle(config, device, jnp.dtype(dtype), sequence_parts),
        "flash": _flash_obstacle(device, jnp.dtype(dtype)),
        "splash": _splash_obstacle(config, device, tokens, sequence_parts),
    }
    for form, obstacle in obstacles.items():
        if wanted == form and obstacle:
            raise ModelError(f"config.model.attention is {wanted!r}, but {obstacle}: set it to 'auto'")
        if wanted == form or (wanted == "auto" and obstacle is None and tokens >= FUSED_FROM_TOKENS):
            return form
    return "xla"


def _nvidia_obstacle(name: str, device: Any, dtype: Any) -> str | None:
    if cuda_capability(device) == (0, 0):
        return f"this is a {device.platform} and no NVIDIA GPU"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the model is in {dtype} and {name} takes bfloat16 and float16"
    return None


def _flash_obstacle(device: Any, dtype: Any) -> str | None:
    older = "flash attention needs an Ampere GPU or a newer one" if cuda_capability(device) < AMPERE else None
    return _nvidia_obstacle("flash attention", device, dtype) or older


def _cudnn_obstacle(config: ModelConfig, device: Any, dtype: Any, sequence_parts: int) -> str | None:
    if obstacle := _nvidia_obstacle("cuDNN's attention", device, dtype):
        return obstacle
    if CUDNN is None:
        return f"JAX {jax.__version__} keeps cuDNN's attention in another place than flowjax looks for it"
    if cuda_capability(device) < HOPPER:
        return "cuDNN keeps the segments of a packed row apart on Hopper GPUs and newer only"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"its head_dim is {config.head_dim} and cuDNN's attention takes multiples of 8 up to 256"
    if config.attention_soft_cap is not None:
        return "cuDNN's attention has no soft cap"
    return "its mask does not work over config.mesh.sequence" if sequence_parts > 1 else None


def _splash_obstacle(config: ModelConfig, device: Any, tokens: int, sequence_parts: int) -> str | None:
    if device.platform != "tpu":
        return f"this is a {device.platform} and no TPU"
    if tokens % LANES:
        return f"rows have {tokens} tokens and splash attention takes multiples of {LANES}"
    return "its mask does not work over config.mesh.sequence" if sequence_parts > 1 else None


def attend_by(
    form: Form,
    *args: jax.Array,
    window_tokens: int | None,
    windowed: Bool[Array, ""],
    **options: Any,
) -> jax.Array:
    """`attention.attend` in one of its forms. `windowed`: whether this layer has the window; it may be traced.

    cuDNN's and splash attention need their window when they are compiled: a model with two kinds of layers compiles
    both kernels and chooses between them. The result is named "mixed" for the remat policies that keep it; "xla" and
    "flash" name what their own backward pass needs.
    """
    forms = {"xla": attend, "cudnn": cudnn_attend, "flash": flash_attend, "splash": splash_attend}
    kernel = functools.partial(forms[form], **options)
    if window_tokens is not None and form in ("xla", "flash"):
        # A window of all keys, in layers without one, is no window.
        kernel = functools.partial(kernel, window_tokens=jnp.where(windowed, window_tokens, args[1].shape[1]))
    elif window_tokens is not None:
        near, far = functools.partial(kernel, window_tokens=window_tokens), kernel
        kernel = functools.partial(jax.lax.cond, windowed, near, far)
    return kernel(*args) if form in ("xla", "flash") else checkpoint_name(kernel(*args), "mixed")


def exchange_queries(
    x: Shaped[Array, "rows queries *rest"], axes: Sequence[str]
) -> Shaped[Array, "rows queries *rest"]:
    """A device's part of each row after each device has sent the i-th piece of its part to the i-th device; its own
    inverse.

    This balances causal attention, where the last of eight parts of a row sees 1.9 times as many keys as the mean part:
    a piece of every part together sees 1.1 times. For use in `shard_map`, with the parts in order over the mesh axes;
    pieces stay in the order of the row. Parts that do not divide into as many pieces as devices are left as they are.
    """
    divides = x.shape[1] % jax.lax.axis_size(axes) == 0
    return jax.lax.all_to_all(x, axes, split_axis=1, concat_axis=1, tiled=True) if divides else x


# The forms of attention.py have one signature, and `attend_by` calls any of them.
def splash_attend(
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
    """Splash attention (Pallas, TPU), by the segment of each token. Padding, being one segment, sees the padding before
    it, which nothing reads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import, and of use on TPUs only

    del positions, key_positions  # a segment is a run of tokens: their order says who is earlier
    tokens, heads, dim = query.shape[1:]
    kernel = _splash_kernel(tokens, heads, window_tokens, soft_cap, interpret)
    query = (query * jnp.float32(dim**-0.5 if scale is None else scale)).astype(query.dtype)  # as in `attend`

    def row(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, keys: jax.Array) -> jax.Array:
        by_head = (x.swapaxes(0, 1) for x in (query, key, value))
        return kernel(*by_head, segment_ids=splash.SegmentIds(segments, keys)).swapaxes(0, 1)

    return jax.vmap(row)(query, key, value, segments, key_segments)


@functools.lru_cache(maxsize=32)
def _splash_kernel(tokens: int, heads: int, window_tokens: int | None, soft_cap: float | None, interpret: bool) -> Any:
    """The kernel for rows of a shape, cached: making its mask takes a while."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (tokens, tokens)
    one = splash.CausalMask(shape) if window_tokens is None else splash.LocalMask(shape, (window_tokens - 1, 0), 0)
    block = next(size for size in (SPLASH_BLOCK_TOKENS, 256, LANES) if tokens % size == 0)
    parts = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{part}": block for part in parts}
    with jax.ensure_compile_time_eval():  # a cached kernel outlives the trace that made it: it must hold no tracers
        return splash.make_splash_mha(
            splash.MultiHeadMask([one] * heads),
            block_sizes=splash.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
