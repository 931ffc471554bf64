"""One optimiser update as two jitted functions: add a micro-batch's gradient sums, then divide once and apply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from flowjax.losses.kl import kl_penalty
from flowjax.losses.policy import policy_loss
from flowjax.models.logprobs import token_logprobs
from flowjax.trainer.batch import MicroBatch

Arrays = Any  # a pytree of arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What micro-batches add up to: gradient of the summed loss, and named sums over trained tokens."""

    gradient: Arrays
    values: dict[str, Float[Array, ""]]


@dataclass(frozen=True)
class UpdateFunctions:
    """The compiled pieces of an update.

    add: (trained, frozen, batch, sums | None) -> sums
    apply: (trained, optimizer_state, sums) -> (trained, optimizer_state, metrics)
    logprobs: (trained, frozen, batch) -> log-probabilities of the sampled tokens
    compile_count: () -> how many shapes the functions have been compiled for
    """

    add: Callable[..., Sums]
    apply: Callable[..., tuple[Arrays, Arrays, dict[str, Float[Array, ""]]]]
    logprobs: Callable[..., Float[Array, "rows sampled"]]
    compile_count: Callable[[], int]


def sampled_logprobs(
    model: Any, batch: MicroBatch, *, temperature: float, chunk_tokens: int, adapter_scale: float = 1.0
) -> tuple[Float[Array, "rows sampled"], Float[Array, "rows sampled"]]:
    """Log-probability and entropy at the sampled tokens only: other places never meet the vocabulary."""
    hidden = model(batch.tokens, batch.positions, batch.segments, adapter_scale=adapter_scale)
    before = jnp.take_along_axis(hidden, batch.places[..., None] - 1, axis=1)
    targets = jnp.take_along_axis(batch.tokens, batch.places, axis=1)
    logprobs, entropy = token_logprobs(
        before.reshape(-1, before.shape[-1]),
        model.head(),
        targets.reshape(-1),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy=True,
    )
    return logprobs.reshape(targets.shape), entropy.reshape(targets.shape)


def make_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    kind: str,
    options: dict[str, Any],
    kl_coefficient: float,
    entropy_coefficient: float,
    temperature: float,
    chunk_tokens: int,
) -> UpdateFunctions:
    """Compile-once functions for a loss and an optimiser.

    The loss of an update is sum(loss) / sum(denominator) over all its micro-batches, so neither packing nor
    the split into micro-batches changes it.
    """

    def logprobs_of(trained: Arrays, frozen: Arrays, batch: MicroBatch, adapter_scale: float = 1.0):
        model = nnx.merge(graph, trained, frozen)
        return sampled_logprobs(
            model, batch, temperature=temperature, chunk_tokens=chunk_tokens, adapter_scale=adapter_scale
        )

    def summed_loss(trained: Arrays, frozen: Arrays, batch: MicroBatch):
        logprobs, entropy = logprobs_of(trained, frozen, batch)
        loss, denominator, values = policy_loss(
            logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.mask,
            kind=kind,
            sequences=batch.sequences,
            sequence_count=batch.sequences.size,
            **options,
        )
        entropy_sum = jnp.sum(entropy, where=batch.mask)
        values = {**values, "loss": loss, "entropy": entropy_sum, "tokens": jnp.sum(batch.mask, dtype=jnp.float32)}
        total = loss - entropy_coefficient * entropy_sum
        if kl_coefficient:
            reference, _ = logprobs_of(trained, frozen, batch, adapter_scale=0.0)
            penalty = jnp.sum(kl_penalty(logprobs, jax.lax.stop_gradient(reference), kind="k3"), where=batch.mask)
            values["reference_kl"] = penalty
            total = total + kl_coefficient * penalty
        return total, {**values, "denominator": denominator}

    @jax.jit
    def first(trained: Arrays, frozen: Arrays, batch: MicroBatch) -> Sums:
        (_, values), gradient = jax.value_and_grad(summed_loss, has_aux=True)(trained, frozen, batch)
        return Sums(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient), values)

    def further(trained: Arrays, frozen: Arrays, batch: MicroBatch, sums: Sums) -> Sums:
        return jax.tree.map(jnp.add, sums, first(trained, frozen, batch))

    further = jax.jit(further, donate_argnames="sums")

    def add(trained: Arrays, frozen: Arrays, batch: MicroBatch, sums: Sums | None) -> Sums:
        return first(trained, frozen, batch) if sums is None else further(trained, frozen, batch, sums)

    def apply(trained: Arrays, optimizer_state: Arrays, sums: Sums):
        denominator = jnp.maximum(sums.values["denominator"], 1e-8)
        gradient = jax.tree.map(lambda leaf: leaf / denominator, sums.gradient)
        norm = optax.global_norm(gradient)
        finite = jnp.isfinite(norm)
        updates, next_state = optimizer.update(gradient, optimizer_state, trained)
        stepped = optax.apply_updates(trained, updates)

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(finite, new, old)

        metrics = {name: value / denominator for name, value in sums.values.items()}
        metrics |= {"gradient_norm": norm, "skipped": 1.0 - finite, "trained_tokens": sums.values["tokens"]}
        return jax.tree.map(keep, stepped, trained), jax.tree.map(keep, next_state, optimizer_state), metrics

    apply = jax.jit(apply, donate_argnums=(0, 1))
    logprobs = jax.jit(lambda trained, frozen, batch: logprobs_of(trained, frozen, batch)[0])

    def compile_count() -> int:
        return sum(function._cache_size() for function in (first, further, apply, logprobs))

    return UpdateFunctions(add, apply, logprobs, compile_count)
