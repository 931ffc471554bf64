"""Fused attention where the platform has it: cuDNN on NVIDIA GPUs, splash attention on TPUs; and who uses what.

Both leave a row's segments apart without a [tokens, tokens] mask in memory. Their call signatures and masks are
checked without such a device (tests/models/test_models_attention.py); no GPU or TPU has run them here.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flowjax.models.attention import attend
from flowjax.models.shape import ModelConfig, ModelError

try:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # the public call takes no segments
except ImportError:  # it is private, and may move
    cudnn: Any = None

Attention = Literal["auto", "xla", "cudnn", "splash"]
CHOICES = ("auto", "xla", "cudnn", "splash")
FUSED_FROM_TOKENS = 1024  # below, XLA's plain attention is about as fast as cuDNN's
PACKED_SEGMENTS = 32  # segments of one row that cuDNN is told of; a row with more goes through XLA
SPLASH_BLOCK_TOKENS = 512
LANES = 128  # splash attention's rows are multiples of it
HOPPER = (9, 0)


def choose_attention(
    wanted: str, config: ModelConfig, *, platform: str, tokens: int, dtype: DTypeLike, sequence_parts: int = 1
) -> Literal["xla", "cudnn", "splash"]:
    """The form of attention for rows of `tokens` tokens on "cpu", "cuda" or "tpu".

    Raises:
        ModelError: a form was asked for that cannot keep the segments of a packed row apart here, or does not exist
            on this platform.
    """
    if wanted not in CHOICES:
        raise ModelError(f"config.model.attention is {wanted!r}: it must be one of {', '.join(CHOICES)}")
    if wanted == "xla":
        return "xla"
    obstacles: dict[Literal["cudnn", "splash"], str | None] = {
        "cudnn": _cudnn_obstacle(config, platform, jnp.dtype(dtype), sequence_parts),
        "splash": _splash_obstacle(config, platform, tokens, sequence_parts),
    }
    if wanted != "auto":
        if obstacles[wanted]:
            raise ModelError(f"config.model.attention is {wanted!r}, but {obstacles[wanted]}: set it to 'auto'")
        return wanted
    if tokens >= FUSED_FROM_TOKENS:
        for form, obstacle in obstacles.items():
            if obstacle is None:
                return form
    return "xla"


def _cudnn_obstacle(config: ModelConfig, platform: str, dtype: Any, sequence_parts: int) -> str | None:
    if platform != "cuda":
        return f"this is a {platform} and no NVIDIA GPU"
    if cudnn is None:
        return f"JAX {jax.__version__} keeps cuDNN's attention in another place than flowjax looks for it"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the model is in {dtype} and cuDNN's attention takes bfloat16 and float16"
    if not cudnn.check_compute_capability("{}.{}".format(*HOPPER)):
        return "cuDNN keeps the segments of a packed row apart on Hopper GPUs and newer only"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"its head_dim is {config.head_dim} and cuDNN's attention takes multiples of 8 up to 256"
    if config.attention_soft_cap is not None:
        return "cuDNN's attention has no soft cap"
    return "its mask does not work over config.mesh.sequence" if sequence_parts > 1 else None


def _splash_obstacle(config: ModelConfig, platform: str, tokens: int, sequence_parts: int) -> str | None:
    if platform != "tpu":
        return f"this is a {platform} and no TPU"
    if tokens % LANES:
        return f"rows have {tokens} tokens and splash attention takes multiples of {LANES}"
    return "its mask does not work over config.mesh.sequence" if sequence_parts > 1 else None


def attend_by(
    form: Literal["xla", "cudnn", "splash"],
    *args: jax.Array,
    window_tokens: int | None,
    windowed: Bool[Array, ""],
    **options: Any,
) -> jax.Array:
    """`attention.attend` in one of its forms. `windowed`: whether this layer has the window; it may be traced.

    The kernels know their window when they are compiled: a model with two kinds of layers has both and takes one.
    """
    if window_tokens is None:
        return {"xla": attend, "cudnn": cudnn_attend, "splash": splash_attend}[form](*args, **options)
    if form == "xla":
        every_token = args[1].shape[1]
        return attend(*args, window_tokens=jnp.where(windowed, window_tokens, every_token), **options)
    kernel = functools.partial(cudnn_attend if form == "cudnn" else splash_attend, **options)
    near, far = functools.partial(kernel, window_tokens=window_tokens), kernel
    return jax.lax.cond(windowed, near, far, *args)


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
    owner = jnp.where(segments != 0, index, count)
    member = owner[:, None, :] == jnp.arange(count)[:, None]
    lengths = member.sum(axis=2, dtype=jnp.int32)
    starts = jnp.where(member, jnp.arange(tokens), tokens).min(axis=2).astype(jnp.int32)
    there = lengths > 0
    return jnp.where(there, lengths, -1), jnp.pad(jnp.where(there, starts, -1), ((0, 0), (0, 1)), constant_values=-1)


def segment_count(segments: Int[Array, "rows tokens"]) -> Int[Array, "rows"]:
    """Runs of equal numbers other than 0 in each row."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return jnp.sum((segments != before) & (segments != 0), axis=1)


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
) -> Float[Array, "rows tokens heads dim"]:
    """cuDNN's flash attention over packed rows, told where each segment starts and how long it is.

    Rows with more than PACKED_SEGMENTS segments go through XLA instead, decided while running. cuDNN leaves places
    outside all segments unwritten, forward and backward: they are set to zero here.
    """
    if soft_cap is not None:
        raise ModelError("cuDNN's attention has no soft cap: set config.model.attention to 'xla'")
    count = min(PACKED_SEGMENTS, segments.shape[1])
    groups = query.shape[2] // key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    real = (segments != 0)[:, :, None, None]

    def fused(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        lengths, starts = segment_bounds(segments, max(count, 2))
        # JAX turns the starts of keys into memory offsets by the number of query heads: keys need as many.
        key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
        mixed: Any = cudnn.dot_product_attention(
            *(jnp.where(real, x, 0) for x in (query, key, value)),
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=starts,
            kv_offsets=starts,
            scale=scale,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
            sliding_window_length=window_tokens,
        )
        return jnp.where(real, mixed, 0)

    def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays = (segments, positions, key_segments, key_positions)
        return attend(query, key, value, *arrays, window_tokens=window_tokens, scale=scale)

    return jax.lax.cond(segment_count(segments).max() <= count, fused, plain, query, key, value)


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
    """Splash attention (Pallas, TPU), told the segment of each token; padding sees the padding before it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import, and of use on TPUs only

    del positions, key_positions  # a segment is a run of tokens: their order says who is earlier
    tokens, heads, dim = query.shape[1:]
    kernel = _splash_kernel(tokens, heads, window_tokens, soft_cap, interpret)
    query = query * jnp.asarray(dim**-0.5 if scale is None else scale, query.dtype)

    def row(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, keys: jax.Array) -> jax.Array:
        by_head = (x.swapaxes(0, 1) for x in (query, key, value))
        return kernel(*by_head, segment_ids=splash.SegmentIds(segments, keys)).swapaxes(0, 1)

    return jax.vmap(row)(query, key, value, segments, key_segments)


@functools.lru_cache(maxsize=32)
def _splash_kernel(tokens: int, heads: int, window_tokens: int | None, soft_cap: float | None, interpret: bool) -> Any:
    """The kernel for rows of a shape; making its mask takes a while, so kernels are kept."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (tokens, tokens)
    one = splash.CausalMask(shape) if window_tokens is None else splash.LocalMask(shape, (window_tokens - 1, 0), 0)
    block = next(size for size in (SPLASH_BLOCK_TOKENS, 256, LANES) if tokens % size == 0)
    parts = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{part}": block for part in parts}
    with jax.ensure_compile_time_eval():  # kernels outlive the trace that asked for them first
        return splash.make_splash_mha(
            splash.MultiHeadMask([one] * heads),
            block_sizes=splash.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
