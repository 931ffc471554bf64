"""One training step as plain functions: gradients of micro-batches are added up, then divided once and applied.

    total = None
    for batch, known in zip(batches, first_pass(objective, state, batches, start=None)):
        total, _ = gradient_of(objective, state, batch, known, total=total)
    state, metrics = apply(optimizer, state, total)

The arrays that a step reads or writes are a `PolicyState`; what is static, and has programs compiled for it, is an
`Objective`. `logprobs_of`, `gradient_of` and `apply` call their compiled parts, each right below its caller; arguments
are not checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, UInt32

from flowjax.losses.policy import DEFAULTS, Kind, LossOptions, aggregate, policy_loss
from flowjax.losses.ratios import kl_penalty, m2po_bounds
from flowjax.models.logprobs import token_logprobs
from flowjax.models.sharding import split_tokens, take_tokens
from flowjax.trainer.batch import MicroBatch

Arrays = Any  # a pytree of arrays
DropoutSeed = UInt32[np.ndarray, "numbers"] | UInt32[Array, "numbers"]
Metrics = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyState:
    """All arrays of a policy in training.

    step: number of batches trained on, which is also the version that the weights are published as.
    trained: the adapter, or all weights, in float32 whatever the model computes in.
    optimizer: the optimiser's state for them.
    frozen: the rest of the model; several policies may share these very arrays.
    """

    step: int
    trained: Arrays
    optimizer: Arrays
    frozen: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientSum:
    """Sums over micro-batches: gradient of the summed loss in float32, and named sums over trained tokens."""

    gradient: Arrays
    sums: Metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FirstPass:
    """Results of forward passes that some objectives need before the gradient; None for those that do not.

    proximal_logprobs: under the policy at the start of the step, for the decoupled objective; None where that is still
        the current policy, whose own log-probs are then used.
    ratio_bounds: M2PO's clip bounds, found over the whole update.
    """

    proximal_logprobs: Float[Array, "rows sampled"] | None = None
    ratio_bounds: tuple[Float[Array, ""], Float[Array, ""]] | None = None


@dataclass(frozen=True)
class Objective:
    """A loss of a model, without arrays. Hashable: equal objectives share their compiled programs.

    graph: structure of the model whose arrays are `PolicyState.trained` and `.frozen`.
    dtypes: types that the model computes in, one for each leaf of `trained`.
    kind, options: of `policy_loss`.
    kl_coefficient: weight of the KL to the model without its adapter; 0 leaves out the forward pass for it.
    entropy_coefficient: weight of the entropy, which is subtracted from the loss.
    temperature: the sampling temperature, which the log-probs are taken at, too.
    chunk_tokens: tokens whose logits over the whole vocabulary exist at once.
    still: indices of the leaves of `trained` that rules freeze: their gradient is zero, at no cost.
    """

    graph: nnx.GraphDef
    dtypes: tuple[np.dtype, ...]
    kind: Kind
    options: LossOptions = DEFAULTS
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    temperature: float = 1.0
    chunk_tokens: int = 1024
    still: frozenset[int] = frozenset()


# --------------------------------------------------------------------------------------------------- log-probabilities


def logprobs_of(objective: Objective, state: PolicyState, batch: MicroBatch) -> Float[Array, "rows sampled"]:
    """Log-probabilities of a micro-batch's sampled tokens, without dropout."""
    return _logprobs_of(objective, state.trained, state.frozen, batch)


@partial(jax.jit, static_argnums=0)
def _logprobs_of(objective: Objective, trained: Arrays, frozen: Arrays, batch: MicroBatch) -> Array:
    return _model_logprobs(objective, trained, frozen, batch)[0]


def _model_logprobs(
    objective: Objective, trained: Arrays, frozen: Arrays, batch: MicroBatch, **options: Any
) -> tuple[Float[Array, "rows sampled"], Float[Array, "rows sampled"]]:
    leaves, structure = jax.tree.flatten(trained)
    cast_leaves = [leaf.astype(dtype) for leaf, dtype in zip(leaves, objective.dtypes, strict=True)]
    cast_leaves = [jax.lax.stop_gradient(x) if i in objective.still else x for i, x in enumerate(cast_leaves)]
    model = nnx.merge(objective.graph, jax.tree.unflatten(structure, cast_leaves), frozen)
    return sampled_logprobs(
        model,
        batch,
        temperature=objective.temperature,
        chunk_tokens=objective.chunk_tokens,
        # With an adapter nothing in the head is trained, and its part of the backward pass can be left out. Not with
        # an entropy term, whose gradient `frozen_head` does not have.
        frozen_head=model.lora is not None and not objective.entropy_coefficient,
        **options,
    )


def sampled_logprobs(
    model: Any,
    batch: MicroBatch,
    *,
    temperature: float,
    chunk_tokens: int,
    adapter_scale: float | Float[Array, ""] = 1.0,
    dropout_key: jax.Array | None = None,
    frozen_head: bool = False,
) -> tuple[Float[Array, "rows sampled"], Float[Array, "rows sampled"]]:
    """Log-probability and entropy of the sampled tokens; logits are computed for no others.

    `frozen_head`: see `token_logprobs`.
    """
    hidden = model(batch.tokens, batch.positions, batch.segments, adapter_scale=adapter_scale, dropout_key=dropout_key)
    rows, sampled = batch.places.shape
    parts = 1 if model.placement is None else model.placement.ways("tokens")
    # A multiple of the devices that a row's tokens are split over; padding is place 1, as in `batch.lay_out`.
    places = jnp.pad(jnp.asarray(batch.places), ((0, 0), (0, -sampled % parts)), constant_values=1)
    before = take_tokens(hidden, places - 1, model.placement)  # a token is predicted one place earlier
    found = token_logprobs(
        before,
        model.head(),
        take_tokens(jnp.asarray(batch.tokens), places, model.placement),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy=True,
        soft_cap=model.config.logit_soft_cap,
        frozen_head=frozen_head,
    )
    logprobs, entropy = (split_tokens(x, rows, model.placement)[:, :sampled] for x in found)
    return logprobs, entropy


# ---------------------------------------------------------------------------------------------------------- first pass


def first_pass(
    objective: Objective, state: PolicyState, batches: Sequence[MicroBatch], *, start: Arrays | None
) -> list[FirstPass]:
    """Forward passes that the objective needs before an update, one result for each micro-batch of it.

    `start` are the trained arrays at the start of the step; None where they are those about to be trained.
    """
    proximal: list[Array | None] = [None] * len(batches)
    if start is not None and objective.options.needs_proximal:
        proximal = [logprobs_of(objective, replace(state, trained=start), batch) for batch in batches]
    bounds = _m2po_bounds(objective, state, batches, proximal) if objective.kind == "m2po" else None
    return [FirstPass(known, bounds) for known in proximal]


def _m2po_bounds(
    objective: Objective, state: PolicyState, batches: Sequence[MicroBatch], proximal: Sequence[Array | None]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Clip bounds over the whole update: those of a micro-batch alone would depend on how rows were split."""
    ours: list[Any] = [logprobs_of(objective, state, batch) for batch in batches]
    old: list[Any] = [batch.behaviour_logprobs for batch in batches]
    if objective.options.needs_proximal:  # then the clipped ratio is to the proximal policy; None: to the current one
        old = [now if known is None else known for now, known in zip(ours, proximal, strict=True)]
    columns = (ours, old, [batch.advantages for batch in batches], [batch.mask for batch in batches])
    return _bounds_of(columns, objective.options.m2_threshold)


# One program for each number of micro-batches: without jit each operation would be one, compiled in the midst of a run.
@jax.jit
def _bounds_of(
    columns: tuple[list[Array], ...], threshold: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    whole = [jnp.concatenate([jnp.reshape(part, -1) for part in column]) for column in columns]
    return m2po_bounds(*whole, threshold=threshold)


# ------------------------------------------------------------------------------------------------------------ gradient


def gradient_of(
    objective: Objective,
    state: PolicyState,
    batch: MicroBatch,
    known: FirstPass = FirstPass(),
    *,
    dropout_seed: DropoutSeed | None = None,
    total: GradientSum | None = None,
) -> tuple[GradientSum, Float[Array, "rows sampled"]]:
    """The gradient of a micro-batch's summed loss, added to `total`, whose buffers are donated; and the log-probs of
    its sampled tokens in this pass, for the comparison with those of the engine.

    `dropout_seed`: numbers that determine the dropout of this pass; None is no dropout.
    """
    return _gradient_of(objective, state.trained, state.frozen, batch, known, dropout_seed, total)


# `total` is donated: the new sum reuses its buffers, so that memory holds one gradient sum of the whole model.
@partial(jax.jit, static_argnums=0, donate_argnames="total")
def _gradient_of(
    objective: Objective,
    trained: Arrays,
    frozen: Arrays,
    batch: MicroBatch,
    known: FirstPass,
    dropout_seed: DropoutSeed | None,
    total: GradientSum | None,
) -> tuple[GradientSum, Array]:
    differentiated = jax.value_and_grad(partial(_summed_loss, objective), has_aux=True)
    (_, (sums, logprobs)), gradient = differentiated(trained, frozen, batch, known, dropout_seed)
    # Micro-batches add up in float32: in bfloat16 the later ones would be rounded away.
    found = GradientSum(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient), sums)
    return found if total is None else jax.tree.map(jnp.add, total, found), logprobs


# The arguments are those of `_gradient_of` above it in update.py, which differentiates this by `trained`.
def _summed_loss(
    objective: Objective,
    trained: Arrays,
    frozen: Arrays,
    batch: MicroBatch,
    known: FirstPass,
    dropout_seed: DropoutSeed | None,
) -> tuple[Float[Array, ""], tuple[Metrics, Float[Array, "rows sampled"]]]:
    """Loss summed over the micro-batch; divided only in `apply`, so that no split into micro-batches changes it."""
    options = objective.options
    logprobs, entropy = _model_logprobs(objective, trained, frozen, batch, dropout_key=_dropout_key(dropout_seed))
    proximal = known.proximal_logprobs
    if proximal is None and options.needs_proximal:  # a step's first update: the current policy is the proximal one
        proximal = jax.lax.stop_gradient(logprobs)
    loss, denominator, sums = policy_loss(
        logprobs,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.mask,
        kind=objective.kind,
        options=options,
        sequences=batch.sequences,
        sequence_count=batch.sequences.size,  # a static bound: each sequence fills at least one slot for sampled tokens
        trajectory_tokens=batch.trajectory_tokens,
        proximal_logprobs=proximal,
        ratio_bounds=known.ratio_bounds,
    )

    def aggregated(per_token: Array) -> Array:  # as the loss is, so that one denominator serves all
        return aggregate(
            per_token,
            batch.mask,
            aggregation=options.aggregation_of(objective.kind),
            sequences=batch.sequences,
            sequence_count=batch.sequences.size,
            sequence_tokens=options.sequence_tokens,
            trajectory_tokens=batch.trajectory_tokens,
        )[0]

    sums = {**sums, "entropy": jnp.sum(entropy, where=batch.mask)}
    total = loss - objective.entropy_coefficient * aggregated(entropy)
    if objective.kl_coefficient:
        # The reference policy is the base: the same arrays with the adapter scaled to nothing.
        reference, _ = _model_logprobs(objective, trained, frozen, batch, adapter_scale=0.0)
        penalty = kl_penalty(logprobs, jax.lax.stop_gradient(reference), kind="k3")
        sums["reference_kl"] = jnp.sum(penalty, where=batch.mask)
        total = total + objective.kl_coefficient * aggregated(penalty)
    return total, ({**sums, "loss": loss, "denominator": denominator}, logprobs)


def _dropout_key(seed: DropoutSeed | None) -> jax.Array | None:
    if seed is None:
        return None
    key = jax.random.key(seed[0])
    for number in seed[1:]:
        key = jax.random.fold_in(key, number)
    return key


# --------------------------------------------------------------------------------------------------------------- apply


def apply(
    optimizer: optax.GradientTransformation, state: PolicyState, total: GradientSum
) -> tuple[PolicyState, Metrics]:
    """Optimiser step with the summed gradient, divided once by the summed denominator.

    Buffers of `state.trained` and `.optimizer` are donated. A gradient that is not finite changes nothing; `skipped` in
    the metrics is then 1. The metrics stay on the devices.
    """
    # Outputs are laid out as inputs are: for another layout of XLA's choice, the next update would compile anew.
    layout = tuple(leaf.sharding for leaf in jax.tree.leaves((state.trained, state.optimizer)))
    trained, optimizer_state, metrics = _apply(optimizer, layout, state.trained, state.optimizer, total)
    return replace(state, trained=trained, optimizer=optimizer_state), metrics


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))  # the frozen arrays are shared: they are never donated
def _apply(
    optimizer: optax.GradientTransformation,
    layout: tuple[jax.sharding.Sharding, ...],
    trained: Arrays,
    optimizer_state: Arrays,
    total: GradientSum,
) -> tuple[Arrays, Arrays, Metrics]:
    # Without a trained token the sums are zero, and so is the gradient then, instead of 0 / 0.
    denominator = jnp.maximum(total.sums["denominator"], 1e-8)
    gradient = jax.tree.map(lambda leaf: leaf / denominator, total.gradient)
    norm = optax.global_norm(gradient)
    finite = jnp.isfinite(norm)  # one NaN or infinity anywhere reaches the norm
    updates, next_state = optimizer.update(gradient, optimizer_state, trained)
    stepped = optax.apply_updates(trained, updates)

    # Chosen on the device: asking the host whether the norm is finite would wait for the whole step.
    def keep(new: Array, old: Array) -> Array:
        return jnp.where(finite, new, old)

    tokens = total.sums["tokens"]
    metrics = {name: value / jnp.maximum(tokens, 1) for name, value in total.sums.items()}
    metrics |= {"loss": total.sums["loss"] / denominator, "gradient_norm": norm, "trained_tokens": tokens}
    metrics["skipped"] = 1.0 - finite
    kept = jax.tree.map(keep, (stepped, next_state), (trained, optimizer_state))
    leaves, structure = jax.tree.flatten(kept)
    placed = [_placed(leaf, sharding) for leaf, sharding in zip(leaves, layout, strict=True)]
    return *jax.tree.unflatten(structure, placed), metrics


def _placed(leaf: Array, sharding: jax.sharding.Sharding) -> Array:
    return jax.lax.with_sharding_constraint(leaf, sharding) if isinstance(sharding, NamedSharding) else leaf


def compile_count() -> int:
    """Programs that this process has compiled for training steps, of all policies and shapes."""
    return sum(cast(Any, function)._cache_size() for function in (_logprobs_of, _bounds_of, _gradient_of, _apply))
