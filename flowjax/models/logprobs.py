"""Log-probabilities of chosen tokens without ever holding the logits of all of them."""

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
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """log softmax(hidden @ head / temperature)[target] and the entropy of that distribution, in float32 nats.

    At most `chunk_tokens` rows of logits exist at once, in the backward pass too: each chunk is recomputed there
    (jax.checkpoint), which costs one more product with the head. Entropies are zeros unless asked for. With
    `soft_cap` (the model's `config.logit_soft_cap`) logits become cap * tanh(logit / cap) before the temperature.
    """
    n, d = hidden.shape
    chunks = max(1, -(-n // chunk_tokens))
    chunk = -(-n // chunks)
    padding = chunks * chunk - n
    # Token i goes to chunk i % chunks: on a mesh that splits tokens, every chunk then has a share of each device.
    hidden_chunks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunk, chunks, d).swapaxes(0, 1)
    target_chunks = jnp.pad(targets, (0, padding)).reshape(chunk, chunks).swapaxes(0, 1)

    @jax.checkpoint
    def score(hidden: Float[Array, "chunk d"], targets: Int[Array, "chunk"]) -> tuple[jax.Array, jax.Array]:
        logits = jnp.dot(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = logits / temperature
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        # A comparison instead of a gather: a gather along a vocabulary split over devices would collect the logits.
        chosen = jnp.arange(logits.shape[-1]) == targets[:, None]
        logprobs = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1) - normaliser
        if not entropy:
            return logprobs, jnp.zeros_like(logprobs)
        mean_logit = jnp.sum(jnp.exp(logits - normaliser[:, None]) * logits, axis=-1)
        return logprobs, normaliser - mean_logit

    _, (logprobs, entropies) = jax.lax.scan(lambda _, xs: (None, score(*xs)), None, (hidden_chunks, target_chunks))
    return logprobs.swapaxes(0, 1).reshape(-1)[:n], entropies.swapaxes(0, 1).reshape(-1)[:n]
