"""Log-probabilities of chosen tokens without ever holding the logits of all tokens at once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
    hidden: Float[Array, "n d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "n"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk_tokens: int = 1024,
    entropy: bool = False,
    soft_cap: float | None = None,
    frozen_head: bool = False,
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """log softmax(hidden @ head / temperature)[target] and the entropy of that distribution, both [n], in float32 nats.

    At most `chunk_tokens` rows of logits exist at once, in the backward pass too: each chunk is recomputed there
    (jax.checkpoint), which costs one more product with the head. Entropies are zeros unless asked for. With
    `soft_cap` (the model's `config.logit_soft_cap`) logits become cap * tanh(logit / cap) before the temperature.

    `frozen_head` says that gradients are wanted for `hidden` alone, and through the log-probabilities alone: each
    token's gradient is then computed in the forward pass, while its logits are there, and nothing is recomputed. All
    else counts as constant, the entropy too.
    """
    n, d = hidden.shape
    chunks = max(1, -(-n // chunk_tokens))
    chunk = -(-n // chunks)
    padding = chunks * chunk - n
    # Token i goes to chunk i % chunks: on a mesh that splits tokens, every chunk then has a share of each device.
    hidden_chunks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunk, chunks, d).swapaxes(0, 1)
    target_chunks = jnp.pad(targets, (0, padding)).reshape(chunk, chunks).swapaxes(0, 1)
    head = head.astype(hidden.dtype)
    if frozen_head:
        head, temperature = jax.lax.stop_gradient((head, temperature))
        score = functools.partial(_score_ahead, entropy, soft_cap)
    else:
        score = jax.checkpoint(functools.partial(_score, entropy=entropy, soft_cap=soft_cap))
    _, (logprobs, entropies) = jax.lax.scan(
        lambda _, xs: (None, score(*xs, head, jnp.asarray(temperature, jnp.float32))),
        None,
        (hidden_chunks, target_chunks),
    )
    return logprobs.swapaxes(0, 1).reshape(-1)[:n], entropies.swapaxes(0, 1).reshape(-1)[:n]


def _logits(hidden: jax.Array, head: jax.Array, soft_cap: float | None) -> Float[Array, "chunk v"]:
    logits = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _score(
    hidden: Float[Array, "chunk d"],
    targets: Int[Array, "chunk"],
    head: Float[Array, "d v"],
    temperature: Float[Array, ""],
    *,
    entropy: bool,
    soft_cap: float | None,
) -> tuple[Float[Array, "chunk"], Float[Array, "chunk"]]:
    logits = _logits(hidden, head, soft_cap) / temperature
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: a gather along a vocabulary split over devices would collect the logits.
    chosen = jnp.arange(logits.shape[-1]) == targets[:, None]
    logprobs = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1) - normaliser
    if not entropy:
        return logprobs, jnp.zeros_like(logprobs)
    # H = -sum p log p = normaliser - sum p logit
    mean_logit = jnp.sum(jnp.exp(logits - normaliser[:, None]) * logits, axis=-1)
    return logprobs, normaliser - mean_logit


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _score_ahead(
    entropy: bool,
    soft_cap: float | None,
    hidden: Float[Array, "chunk d"],
    targets: Int[Array, "chunk"],
    head: Float[Array, "d v"],
    temperature: Float[Array, ""],
) -> tuple[Float[Array, "chunk"], Float[Array, "chunk"]]:
    return _score(hidden, targets, head, temperature, entropy=entropy, soft_cap=soft_cap)


def _score_ahead_forward(
    entropy: bool,
    soft_cap: float | None,
    hidden: jax.Array,
    targets: jax.Array,
    head: jax.Array,
    temperature: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], Float[Array, "chunk d"]]:
    """Also d logprob / d hidden = (onehot(target) - softmax) / temperature * d capped / d logit @ head^T."""
    capped = _logits(hidden, head, soft_cap)
    logits = capped / temperature
    # logsumexp by hand: its weights are the softmax that the slope needs, and logits exist only here.
    greatest = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - greatest)
    total = weights.sum(axis=-1, keepdims=True)
    normaliser = greatest + jnp.log(total)
    chosen = jnp.arange(logits.shape[-1]) == targets[:, None]
    logprobs = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1) - normaliser[:, 0]
    entropies = jnp.zeros_like(logprobs)
    if entropy:
        entropies = (normaliser - jnp.sum(weights * logits, axis=-1, keepdims=True) / total)[:, 0]
    slope = (chosen - weights / total) / temperature
    if soft_cap is not None:
        slope = slope * (1 - (capped / soft_cap) ** 2)  # d tanh(x) / dx = 1 - tanh(x)^2
    gradient = jnp.dot(slope.astype(hidden.dtype), head.T, preferred_element_type=jnp.float32)
    return (logprobs, entropies), gradient.astype(hidden.dtype)


def _score_ahead_backward(
    entropy: bool, soft_cap: float | None, gradient: jax.Array, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    del entropy, soft_cap
    # None for targets, head and temperature, which are constants here, as is the entropy, whose cotangent is ignored.
    return (cotangents[0][:, None] * gradient).astype(gradient.dtype), None, None, None


_score_ahead.defvjp(_score_ahead_forward, _score_ahead_backward)
