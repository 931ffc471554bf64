"""One optimiser update as two jitted functions: add a micro-batch's gradient sums, then divide once and apply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from flowjax.losses.kl import kl_penalty
from flowjax.losses.m2po import m2po_bounds
from flowjax.losses.options import needs_bounds, needs_proximal
from flowjax.losses.policy import Kind, aggregate, default_aggregation, policy_loss
from flowjax.models.logprobs import token_logprobs
from flowjax.trainer.batch import MicroBatch

Arrays = Any  # a pytree of arrays
Drops = Int[np.ndarray, "numbers"] | None  # what the dropout of one pass follows from; None is no dropout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What micro-batches add up to: gradient of the summed loss, and named sums over trained tokens."""

    gradient: Arrays
    values: dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Anchor:
    """What some objectives want to know before the gradient pass; None for those that do not.

    proximal_logprobs: of the policy at the start of the step, for the decoupled objective; None where that is the
        policy that is about to be trained, whose own log-probs then stand for them.
    ratio_bounds: M2PO's clip bounds, found over the whole update.
    """

    proximal_logprobs: Float[Array, "rows sampled"] | None = None
    ratio_bounds: tuple[Float[Array, ""], Float[Array, ""]] | None = None


@dataclass(frozen=True)
class UpdateFunctions:
    """The compiled pieces of an update.

    anchors: (trained at the start of the step or None if nothing has changed since, trained, frozen, batches) ->
        one anchor per batch
    add: (trained, frozen, batch, anchor, sums | None, dropout numbers | None) -> sums
    apply: (trained, optimizer_state, sums) -> (trained, optimizer_state, metrics)
    logprobs: (trained, frozen, batch) -> log-probabilities of the sampled tokens
    compile_count: () -> how many shapes the functions have been compiled for
    """

    anchors: Callable[..., list[Anchor]]
    add: Callable[..., Sums]
    apply: Callable[..., tuple[Arrays, Arrays, dict[str, Float[Array, ""]]]]
    logprobs: Callable[..., Float[Array, "rows sampled"]]
    compile_count: Callable[[], int]


def sampled_logprobs(
    model: Any,
    batch: MicroBatch,
    *,
    temperature: float,
    chunk_tokens: int,
    adapter_scale: float = 1.0,
    dropout_key: jax.Array | None = None,
    frozen_head: bool = False,
) -> tuple[Float[Array, "rows sampled"], Float[Array, "rows sampled"]]:
    """Log-probability and entropy at the sampled tokens only: other places never meet the vocabulary.

    `frozen_head`: see `token_logprobs`.
    """
    hidden = model(batch.tokens, batch.positions, batch.segments, adapter_scale=adapter_scale, dropout_key=dropout_key)
    before = jnp.take_along_axis(hidden, batch.places[..., None] - 1, axis=1)
    targets = jnp.take_along_axis(batch.tokens, batch.places, axis=1)
    logprobs, entropy = token_logprobs(
        before.reshape(-1, before.shape[-1]),
        model.head(),
        targets.reshape(-1),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy=True,
        soft_cap=model.config.logit_soft_cap,
        frozen_head=frozen_head,
    )
    return logprobs.reshape(targets.shape), entropy.reshape(targets.shape)


def _dropout_key(drops: Drops) -> jax.Array | None:
    if drops is None:
        return None
    key = jax.random.key(drops[0])
    for number in drops[1:]:
        key = jax.random.fold_in(key, number)
    return key


def make_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    kind: Kind,
    options: dict[str, Any],
    kl_coefficient: float,
    entropy_coefficient: float,
    temperature: float,
    chunk_tokens: int,
    dtypes: Arrays | None = None,
    layout: tuple[Arrays, Arrays] | None = None,
) -> UpdateFunctions:
    """Compile-once functions for a loss and an optimiser.

    The loss of an update is sum(loss) / sum(denominator) over all its micro-batches, so neither packing nor
    the split into micro-batches changes it. `dtypes`, a tree like the trained arrays, is what the model computes in
    where those are kept more precisely. `layout` is the shardings of the trained arrays and of the optimiser's state:
    an update then returns them as it took them, and the next one needs no other program.
    """

    aggregation = options.get("aggregation") or default_aggregation(kind)

    def logprobs_of(trained: Arrays, frozen: Arrays, batch: MicroBatch, **options: Any):
        if dtypes is not None:
            trained = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), trained, dtypes)
        model = nnx.merge(graph, trained, frozen)
        return sampled_logprobs(
            model,
            batch,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            frozen_head=model.lora is not None and not entropy_coefficient,
            **options,
        )

    def summed_loss(trained: Arrays, frozen: Arrays, batch: MicroBatch, anchor: Anchor, drops: Drops):
        logprobs, entropy = logprobs_of(trained, frozen, batch, dropout_key=_dropout_key(drops))
        proximal = anchor.proximal_logprobs
        if proximal is None and needs_proximal(options):
            proximal = jax.lax.stop_gradient(logprobs)
        loss, denominator, values = policy_loss(
            logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.mask,
            kind=kind,
            sequences=batch.sequences,
            sequence_count=batch.sequences.size,
            trajectory_tokens=batch.trajectory_tokens,
            proximal_logprobs=proximal,
            ratio_bounds=anchor.ratio_bounds,
            **options,
        )

        def added_up(per_token: Array) -> Array:
            return aggregate(
                per_token,
                batch.mask,
                aggregation=aggregation,
                sequences=batch.sequences,
                sequence_count=batch.sequences.size,
                sequence_tokens=options.get("sequence_tokens"),
                trajectory_tokens=batch.trajectory_tokens,
            )[0]

        values = {**values, "entropy": jnp.sum(entropy, where=batch.mask)}
        total = loss - entropy_coefficient * added_up(entropy)
        if kl_coefficient:
            reference, _ = logprobs_of(trained, frozen, batch, adapter_scale=0.0)
            penalty = kl_penalty(logprobs, jax.lax.stop_gradient(reference), kind="k3")
            values["reference_kl"] = jnp.sum(penalty, where=batch.mask)
            total = total + kl_coefficient * added_up(penalty)
        return total, {**values, "loss": loss, "denominator": denominator}

    @jax.jit
    def first(trained: Arrays, frozen: Arrays, batch: MicroBatch, anchor: Anchor, drops: Drops) -> Sums:
        (_, values), gradient = jax.value_and_grad(summed_loss, has_aux=True)(trained, frozen, batch, anchor, drops)
        return Sums(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient), values)

    def further(trained: Arrays, frozen: Arrays, batch: MicroBatch, anchor: Anchor, drops: Drops, sums: Sums) -> Sums:
        return jax.tree.map(jnp.add, sums, first(trained, frozen, batch, anchor, drops))

    further = jax.jit(further, donate_argnames="sums")

    def add(
        trained: Arrays,
        frozen: Arrays,
        batch: MicroBatch,
        anchor: Anchor,
        sums: Sums | None,
        drops: Drops = None,
    ) -> Sums:
        if sums is None:
            return first(trained, frozen, batch, anchor, drops)
        return further(trained, frozen, batch, anchor, drops, sums)

    def apply(trained: Arrays, optimizer_state: Arrays, sums: Sums):
        denominator = jnp.maximum(sums.values["denominator"], 1e-8)
        gradient = jax.tree.map(lambda leaf: leaf / denominator, sums.gradient)
        norm = optax.global_norm(gradient)
        finite = jnp.isfinite(norm)
        updates, next_state = optimizer.update(gradient, optimizer_state, trained)
        stepped = optax.apply_updates(trained, updates)

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(finite, new, old)

        tokens = sums.values["tokens"]
        metrics = {name: value / jnp.maximum(tokens, 1) for name, value in sums.values.items()}
        metrics |= {"loss": sums.values["loss"] / denominator, "gradient_norm": norm, "trained_tokens": tokens}
        metrics["skipped"] = 1.0 - finite
        return jax.tree.map(keep, stepped, trained), jax.tree.map(keep, next_state, optimizer_state), metrics

    placed: dict[str, Any] = {"out_shardings": (*layout, None)} if layout else {}
    apply = jax.jit(apply, donate_argnums=(0, 1), **placed)
    logprobs = jax.jit(lambda trained, frozen, batch: logprobs_of(trained, frozen, batch)[0])

    def anchors(start: Arrays | None, trained: Arrays, frozen: Arrays, batches: Sequence[MicroBatch]) -> list[Anchor]:
        bounds = None
        if needs_bounds(kind):
            ours = jnp.concatenate([logprobs(trained, frozen, batch).reshape(-1) for batch in batches])
            theirs, advantages, mask = (
                jnp.concatenate([jnp.reshape(getattr(batch, name), -1) for batch in batches])
                for name in ("behaviour_logprobs", "advantages", "mask")
            )
            bounds = m2po_bounds(ours, theirs, advantages, mask, threshold=options.get("m2_threshold", 0.01))[:2]
        if start is None or not needs_proximal(options):
            return [Anchor(None, bounds)] * len(batches)
        return [Anchor(logprobs(start, frozen, batch), bounds) for batch in batches]

    def compile_count() -> int:
        return sum(cast(Any, function)._cache_size() for function in (first, further, apply, logprobs))

    return UpdateFunctions(anchors, add, apply, logprobs, compile_count)
