"""Kernels for accelerators against plain float32, and their speed: python -m tests.benchmarks.kernels

It needs an NVIDIA GPU. Printed are tables in Markdown, errors and then times, of

- attention: every form that `config.model.attention` takes there, on random packings of one row, forward and all
  gradients, beside plain attention in float32; then the time of 16,384 tokens in sequences of 2,048, and in one;
- experts: the grouped products of Qwen3-30B-A3B's layers, likewise.

An error is |ours - exact| / |exact| over the whole array, the greatest of all packings. The command fails beyond
1 %: bfloat16 alone is off by 0.2 to 0.4 %.
"""

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from flowjax.models.attention import HOPPER, Form, attend, attend_by, choose_attention, cuda_capability
from flowjax.models.cudnn import PACKED_SEGMENTS
from flowjax.models.moe import ExpertMap, lay_out, mix_experts
from flowjax.models.shape import ModelConfig, ModelError

TOLERANCE = 1e-2  # relative
REPEATS = 20  # calls that are timed, in five turns
EXPERTS, CHOSEN, HIDDEN, FFN = 128, 8, 2048, 768  # Qwen3-30B-A3B

_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a row that is timed.", lower_bound=256)
_PACKINGS = flags.DEFINE_integer("packings", 20, "Random packings that are compared.", lower_bound=1)
_HEADS = flags.DEFINE_list("heads", ["32/8/128", "16/8/128", "8/8/64"], "Heads of queries, of keys, and their width.")

Places = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # segments and positions of queries, and those of keys


def random_packing(rng: np.random.Generator, tokens: int) -> list[int]:
    """Lengths of the sequences of a row: few or many, with or without padding behind them."""
    most = PACKED_SEGMENTS  # more than cuDNN is given go another way
    count = int(rng.choice([1, 2, 5, most - 1, most, most + 1, 2 * most, 4 * most]))
    cuts = np.sort(rng.choice(np.arange(1, tokens + 1), count, replace=False))
    return np.diff(cuts, prepend=0).tolist()


def places(lengths: Sequence[int], tokens: int) -> Places:
    """Where one row's tokens stand, as attention takes it."""
    segments, positions = np.zeros((2, 1, tokens), np.int32)
    ends = np.cumsum(lengths)
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
        segments[0, end - length : end] = number
        positions[0, end - length : end] = np.arange(length)
    by_token = (jnp.asarray(segments), jnp.asarray(positions))
    return (*by_token, *by_token)


def arrays(key: int, tokens: int, heads: tuple[int, int, int]) -> list[jax.Array]:
    """Queries, keys, values and the gradient of what attention gives, in bfloat16."""
    queries, keys, dim = heads
    keys_by_array = jax.random.split(jax.random.key(key), 4)
    counts = (queries, keys, keys, queries)
    made = zip(keys_by_array, counts, strict=True)
    return [jax.random.normal(each, (1, tokens, count, dim), jnp.bfloat16) for each, count in made]


def with_gradients(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """(query, key, value, pull, places) -> the result and the gradients of the first three."""

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, pull: jax.Array, where: Places) -> tuple:
        result, back = jax.vjp(lambda *inputs: call(*inputs, *where), query, key, value)
        return result, *back(pull.astype(result.dtype))

    return run


def exact(window_tokens: int | None, soft_cap: float | None) -> Callable[..., jax.Array]:
    """Plain attention with float32 products."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, *where: jax.Array) -> jax.Array:
        wide = (x.astype(jnp.float32) for x in (query, key, value))
        with jax.default_matmul_precision("highest"):  # otherwise GPUs round the operands of float32 products
            return attend(*wide, *where, window_tokens=window_tokens, soft_cap=soft_cap)

    return call


def relative_errors(ours: Sequence[jax.Array], known: Sequence[jax.Array]) -> list[float]:
    return [float(_relative_error(x, y)) for x, y in zip(ours, known, strict=True)]


@jax.jit
def _relative_error(ours: jax.Array, known: jax.Array) -> jax.Array:
    """On the device: gradients of experts are gigabytes. Its sums in float32 are good to six digits."""
    wide = ours.astype(jnp.float32), known.astype(jnp.float32)
    return jnp.linalg.norm((wide[0] - wide[1]).ravel()) / jnp.linalg.norm(wide[1].ravel())


def forms_there(heads: tuple[int, int, int], tokens: int, soft_cap: float | None) -> list[Form]:
    """Every form of attention that this device and these heads take."""
    shape = ModelConfig(256, 256, 1, *heads, 256, attention_soft_cap=soft_cap)
    found: list[Form] = []
    for name in ("xla", "flash", "cudnn"):
        try:
            found.append(choose_attention(name, shape, device=jax.devices()[0], tokens=tokens, dtype=jnp.bfloat16))
        except ModelError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def worst_errors(
    call: Callable[..., Any], known: Callable[..., Any], heads: tuple[int, int, int], packings: int, tokens: int
) -> list[float]:
    """The greatest error of the result and of each gradient over random packings; padding does not count."""
    rng, worst = np.random.default_rng(0), np.zeros(4)
    for number in range(packings):
        given = (*arrays(number, tokens, heads), places(random_packing(rng, tokens), tokens))
        real = (given[4][0] != 0)[:, :, None, None]
        ours, wanted = ([jnp.where(real, x, 0) for x in run(*given)] for run in (call, known))
        worst = np.maximum(worst, np.nan_to_num(relative_errors(ours, wanted), nan=np.inf))
    return worst.tolist()


def compare_attention(heads: tuple[int, int, int], packings: int, tokens: int = 2048) -> bool:
    """Print the errors of every form; False if one is beyond the tolerance."""
    good = True
    for window_tokens, soft_cap in ((None, None), (300, None), (None, 20.0)):
        known = with_gradients(exact(window_tokens, soft_cap))
        for form in forms_there(heads, tokens, soft_cap):
            options = {"window_tokens": window_tokens, "windowed": jnp.bool(window_tokens is not None)}
            call = with_gradients(functools.partial(attend_by, form, soft_cap=soft_cap, **options))
            try:
                errors = worst_errors(call, known, heads, packings, tokens)
            except Exception as error:  # a kernel that does not compile or run is a result, too
                print(f"{form}, heads {heads}: {error}", file=sys.stderr)
                errors = [math.inf]
            good &= max(errors) <= TOLERANCE
            where = f"window {window_tokens or '-'}, soft cap {soft_cap or '-'}"
            shown = " | ".join(f"{error:.2%}" for error in errors)
            print(f"| {'/'.join(map(str, heads))} | {where} | {form} | {shown} |", flush=True)
    return good


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """Median time of a call, once compiled."""
    jax.block_until_ready(call(*args))
    turns = []
    for _ in range(5):
        started_s = time.perf_counter()
        results = [call(*args) for _ in range(REPEATS // 5)]
        jax.block_until_ready(results)
        turns.append((time.perf_counter() - started_s) / len(results))
    return statistics.median(turns)


def product_rate(size: int = 8192) -> float:
    """Operations per second of a plain product in bfloat16: the ceiling that the others are held to."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    return 2 * size**3 / seconds(jax.jit(jnp.matmul), a, b)


def time_attention(heads: tuple[int, int, int], tokens: int) -> None:
    """Print the time of every form, forward and with gradients, and its rate; only pairs that are seen count."""
    queries, _, dim = heads
    for lengths in ([2048] * (tokens // 2048) or [tokens], [tokens]):
        given = (*arrays(0, sum(lengths), heads), places(lengths, sum(lengths)))
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        for form in forms_there(heads, tokens, None):
            call = functools.partial(attend_by, form, window_tokens=None, windowed=jnp.bool(False))
            forward = jax.jit(lambda q, k, v, _, where, call=call: call(q, k, v, *where))
            forward_s, both_s = seconds(forward, *given), seconds(with_gradients(call), *given)
            once = 4 * pairs * queries * dim
            print(
                f"| {'/'.join(map(str, heads))} | {len(lengths)} x {lengths[0]:,} | {form} "
                f"| {forward_s * 1e3:.2f} ms, {once / forward_s / 1e12:,.0f} TFLOP/s "
                f"| {both_s * 1e3:.2f} ms, {3.5 * once / both_s / 1e12:,.0f} TFLOP/s |",
                flush=True,
            )


def expert_layer(tokens: int, dtype: Any) -> tuple[list[jax.Array], ...]:
    """Tokens, their weights and choices, and the three maps of the layer."""
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (tokens, HIDDEN), dtype)
    scores = jax.random.normal(keys[1], (tokens, EXPERTS))
    weights, chosen = jax.lax.top_k(jax.nn.softmax(scores), CHOSEN)
    sizes = ((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN))
    maps = [
        jax.random.normal(key, (EXPERTS, *size), dtype) * size[0] ** -0.5
        for key, size in zip(keys[2:5], sizes, strict=True)
    ]
    return [x, weights.astype(dtype), chosen], maps


def mix(form: str, x: jax.Array, weights: jax.Array, chosen: jax.Array, *maps: jax.Array) -> jax.Array:
    """The layer, its products by one of `expert_forms`."""
    options: dict[str, Any] = {"activate": jax.nn.silu, "on_hopper": form == "hopper"}
    return mix_experts(x, weights, chosen, *(ExpertMap(each) for each in maps), **options)


def expert_forms() -> list[str]:
    """Every form of the experts' products that this device takes."""
    return ["any GPU", *(["hopper"] if cuda_capability(jax.devices()[0]) == HOPPER else [])]


def plain_mix(x: jax.Array, weights: jax.Array, chosen: jax.Array, *maps: jax.Array) -> jax.Array:
    """The same, every expert over every token, in float32."""

    def add(total: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        expert, gate, up, down = one
        share = jnp.where(chosen == expert, weights.astype(jnp.float32), 0).sum(axis=1, keepdims=True)
        return total + share * ((jax.nn.silu(wide @ gate) * (wide @ up)) @ down), None

    wide = x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        each = (jnp.arange(EXPERTS), *(matrix.astype(jnp.float32) for matrix in maps))
        return jax.lax.scan(add, jnp.zeros_like(wide), each)[0]


def expert_gradients(layer: Callable[..., jax.Array], wanted: Sequence[int]) -> Callable[..., tuple[jax.Array, ...]]:
    """The layer's result and its gradients by the arguments with these numbers."""

    @jax.jit
    def run(pull: jax.Array, *args: jax.Array) -> tuple[jax.Array, ...]:
        def of(*changed: jax.Array) -> jax.Array:
            given = list(args)
            for number, array in zip(wanted, changed, strict=True):
                given[number] = array
            return layer(*given)

        result, back = jax.vjp(of, *(args[number] for number in wanted))
        return result, *back(pull.astype(result.dtype))

    return run


def compare_experts(tokens: int = 2048) -> bool:
    """Print the errors of the layer with grouped products; False if one is beyond the tolerance."""
    inputs, maps = expert_layer(tokens, jnp.bfloat16)
    pull = jax.random.normal(jax.random.key(9), (tokens, HIDDEN), jnp.bfloat16)
    numbers = (0, 3, 4, 5)  # by the tokens and the three maps
    known = expert_gradients(plain_mix, numbers)(pull, *inputs, *maps)
    good = True
    for form in expert_forms():
        ours = expert_gradients(functools.partial(mix, form), numbers)(pull, *inputs, *maps)
        errors = relative_errors(ours, known)
        good &= all(error <= TOLERANCE for error in errors)  # not the greatest of them: NaN is none
        print(f"| {form} | {' | '.join(f'{error:.2%}' for error in errors)} |", flush=True)
    return good


def time_experts(tokens: int, rate: float) -> None:
    """Print the layer's time, forward and with the gradient of its tokens, and how near it is to plain products."""
    inputs, maps = expert_layer(tokens, jnp.bfloat16)
    pull = jax.random.normal(jax.random.key(9), (tokens, HIDDEN), jnp.bfloat16)
    layout_s = seconds(jax.jit(lambda chosen: lay_out(chosen, 0, EXPERTS, EXPERTS)), inputs[2])
    once = 3 * 2 * tokens * CHOSEN * HIDDEN * FFN
    for form in expert_forms():
        layer = functools.partial(mix, form)
        forward_s = seconds(jax.jit(layer), *inputs, *maps)
        both_s = seconds(expert_gradients(layer, (0,)), pull, *inputs, *maps)
        print(
            f"| {tokens:,} | {form} | {layout_s * 1e3:.2f} ms "
            f"| {forward_s * 1e3:.2f} ms, {once / forward_s / rate:.0%} of a plain product's rate "
            f"| {both_s * 1e3:.2f} ms, {2 * once / both_s / rate:.0%} |",
            flush=True,
        )


def read_heads(text: str) -> tuple[int, int, int]:
    try:
        queries, keys, dim = map(int, text.split("/"))
    except ValueError:
        problem = f"--heads: {text!r} is not three numbers, as 32/8/128 is: heads of queries, of keys, width"
        raise SystemExit(problem) from None
    return queries, keys, dim


def main(argv: list[str]) -> None:
    del argv
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"jax sees a {device.platform}: these are kernels for NVIDIA GPUs")
    shapes = [read_heads(text) for text in _HEADS.value]
    print(f"{device.device_kind}, jax {jax.__version__}\n")
    print("| heads | | form | result | by queries | by keys | by values |")
    print("|---|---|---|---|---|---|---|")
    good = [compare_attention(heads, _PACKINGS.value) for heads in shapes]
    rate = product_rate()
    print(f"\nA plain product in bfloat16: {rate / 1e12:,.0f} TFLOP/s\n")
    print("| heads | sequences | form | forward | with gradients |")
    print("|---|---|---|---|---|")
    for heads in shapes[:2]:
        time_attention(heads, _TOKENS.value)
    print("\n| experts | result | by tokens | by gate | by up | by down |")
    print("|---|---|---|---|---|---|")
    good.append(compare_experts())
    print("\n| tokens | experts | layout | forward | with the gradient of tokens |")
    print("|---|---|---|---|---|")
    time_experts(_TOKENS.value, rate)
    if not all(good):
        raise SystemExit(f"An error is beyond {TOLERANCE:.0%}.")


if __name__ == "__main__":
    app.run(main)
