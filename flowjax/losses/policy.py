"""Policy-gradient objectives on sampled tokens, each as a sum and its denominator."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.losses.m2po import m2po_bounds
from flowjax.losses.mismatch import Correction, correction_weights
from flowjax.losses.ratios import masked_sum, sequence_means, sequence_sums

Kind = Literal[
    "ppo", "gspo", "sapo", "cispo", "m2po", "dppo", "ipo", "rollout_is", "importance", "reinforce", "cross_entropy"
]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "trajectory_mean_token_mean", "constant"
]
Scalar = float | Float[Array, ""]

LARGEST_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """Loss of each token, and which tokens its clip rule keeps from having a gradient."""

    loss: Float[Array, "*tokens"]
    clipped: Bool[Array, "*tokens"]


class _Inputs(NamedTuple):
    logprobs: Float[Array, "*tokens"]
    anchor: Float[Array, "*tokens"]  # log-probabilities that the ratio is taken against
    log_ratio: Float[Array, "*tokens"]
    advantages: Float[Array, "*tokens"]


def policy_loss(
    logprobs: Float[Array, "*tokens"],
    behaviour_logprobs: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    kind: Kind = "ppo",
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    dual_clip: Scalar | None = None,
    tau_positive: Scalar = 1.0,
    tau_negative: Scalar = 1.05,
    pull: Scalar = 1e-3,
    m2_threshold: Scalar = 0.01,
    ratio_bounds: tuple[Scalar, Scalar] | None = None,
    proximal_logprobs: Float[Array, "*tokens"] | None = None,
    correction: Correction = "none",
    correction_low: Scalar = 0.5,
    correction_high: Scalar = 2.0,
    aggregation: Aggregation | None = None,
    sequences: Int[Array, "*tokens"] | None = None,
    sequence_count: int | None = None,
    sequence_tokens: Scalar | None = None,
    trajectory_tokens: Int[Array, "*tokens"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss to minimise as (sum, denominator, metrics); divide once, after adding up micro-batches.

    r = pi / pi_anchor, the anchor being `proximal_logprobs` where given and the sampler's log-probabilities otherwise.
    `docs/losses.md` has the formulas, their sources and pictures of what each clip rule cuts away.

    Args:
        logprobs: of the sampled tokens under the policy being trained, at the sampling temperature.
        behaviour_logprobs: the engine's, from when the tokens were sampled.
        advantages: one per token.
        mask: tokens to train on. Everything else is ignored, NaN included.
        kind: objective.
        clip_low: how far r may fall below 1 (dppo, ipo: a probability below the anchor's).
        clip_high: how far r may rise above 1.
        dual_clip: ppo: bound on the loss of tokens with negative advantage, in units of |A|; 3 is usual, None is off.
        tau_positive: sapo: steepness for positive advantages.
        tau_negative: sapo: steepness for the others.
        pull: dppo, ipo: weight of the squared log-ratio.
        m2_threshold: m2po: largest second moment of the log-ratio.
        ratio_bounds: m2po: bounds from `m2po_bounds` over the whole optimiser batch; None finds them in these tokens.
        proximal_logprobs: of the policy at the start of the step, for the decoupled objective.
        correction: weight for the mismatch between anchor and behaviour, see `correction_weights`.
        correction_low: lower edge of its band.
        correction_high: its upper edge, or the value that weights are cut at.
        aggregation: how tokens are averaged; per token unless the objective is a sequence's (gspo).
        sequences: id of each token's sequence, below `sequence_count`; by default the row of a two-dimensional batch.
        sequence_count: static bound on those ids; by default the number of tokens.
        sequence_tokens: constant: the fixed length that each sequence's sum is divided by (Dr. GRPO).
        trajectory_tokens: trajectory_mean_token_mean: sampled tokens of each token's whole trajectory.
    """
    sequences, sequence_count = _sequence_ids(logprobs, sequences, sequence_count)
    log_ratio, anchor = _log_ratio(logprobs, behaviour_logprobs, proximal_logprobs, mask)
    inputs = _Inputs(jnp.where(mask, logprobs, 0.0), anchor, log_ratio, jnp.where(mask, advantages, 0.0))
    if kind == "gspo":
        surrogate = _gspo(inputs, mask, clip_low, clip_high, *_sequences(kind, sequences, sequence_count))
    elif kind == "m2po":
        bounds = ratio_bounds
        if bounds is None:
            bounds = m2po_bounds(inputs.logprobs, anchor, inputs.advantages, mask, threshold=m2_threshold)[:2]
        surrogate = _ppo(inputs, *bounds, None)
    elif kind == "sapo":
        surrogate = _sapo(inputs, tau_positive, tau_negative)
    elif kind == "ppo":
        surrogate = _ppo(inputs, clip_low, clip_high, dual_clip)
    elif kind in ("dppo", "ipo"):
        surrogate = _probability_mask(inputs, clip_low, clip_high, pull, both_signs=kind == "ipo")
    else:
        surrogate = _CLIPPED_BY_RATIO[kind](inputs, clip_low, clip_high)

    weights = _mismatch_weights(
        inputs, behaviour_logprobs, proximal_logprobs, mask, correction, correction_low, correction_high, sequences,
        sequence_count,
    )  # fmt: skip
    losses = surrogate.loss * weights
    mode = aggregation or default_aggregation(kind)
    total, denominator = aggregate(
        losses,
        mask,
        aggregation=mode,
        sequences=sequences,
        sequence_count=sequence_count,
        sequence_tokens=sequence_tokens,
        trajectory_tokens=trajectory_tokens,
    )
    return total, denominator, _metrics(inputs, surrogate, weights, mask)


def default_aggregation(kind: Kind) -> Aggregation:
    """How an objective averages its tokens unless told otherwise."""
    return "sequence_mean_token_mean" if kind == "gspo" else "token_mean"


def aggregate(
    values: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    aggregation: Aggregation = "token_mean",
    sequences: Int[Array, "*tokens"] | None = None,
    sequence_count: int | None = None,
    sequence_tokens: Scalar | None = None,
    trajectory_tokens: Int[Array, "*tokens"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum and denominator of per-token values.

    token_mean                  sum over tokens / tokens
    sequence_mean_token_mean    mean over sequences of each one's mean
    sequence_mean_token_sum     mean over sequences of each one's sum
    trajectory_mean_token_mean  mean over trajectories of each one's mean, all its turns together
    constant                    sum over tokens / (sequences * sequence_tokens), no bias by length (arXiv 2503.20783)

    A sequence must not be spread over micro-batches, or it counts once in each. A trajectory may.
    """
    if aggregation == "token_mean":
        return masked_sum(values, mask), jnp.sum(mask).astype(values.dtype)
    if aggregation == "trajectory_mean_token_mean":
        if trajectory_tokens is None:
            raise ValueError("aggregation 'trajectory_mean_token_mean' needs `trajectory_tokens`")
        share = 1.0 / jnp.maximum(trajectory_tokens, 1).astype(values.dtype)
        return masked_sum(values * share, mask), masked_sum(share, mask)
    sequences, sequence_count = _sequence_ids(values, sequences, sequence_count)
    ids, count = _sequences(aggregation, sequences, sequence_count)
    sums, lengths = sequence_sums(values, mask, ids, count)
    present = jnp.sum(lengths > 0).astype(values.dtype)
    if aggregation == "sequence_mean_token_mean":
        return jnp.sum(sums / jnp.maximum(lengths, 1)), present
    if aggregation == "sequence_mean_token_sum":
        return jnp.sum(sums), present
    if sequence_tokens is None:
        raise ValueError("aggregation 'constant' needs `sequence_tokens`, the longest reply allowed")
    return jnp.sum(sums), present * sequence_tokens


def _log_ratio(logprobs, behaviour_logprobs, proximal_logprobs, mask):
    anchor = behaviour_logprobs if proximal_logprobs is None else proximal_logprobs
    anchor = jax.lax.stop_gradient(jnp.where(mask, anchor, 0.0))
    difference = jnp.where(mask, logprobs, 0.0) - anchor
    return jnp.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO), anchor


def _ppo(inputs: _Inputs, low: Scalar, high: Scalar, dual_clip: Scalar | None) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)). PPO (arXiv 1707.06347), eq. 7; clip-higher is DAPO (arXiv 2503.14476).

    With dual clip, min(that, -A c) where A < 0 (arXiv 1912.09729).
    """
    ratio, advantages = jnp.exp(inputs.log_ratio), inputs.advantages
    free, held = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - low, 1 + high)
    clipped = held > free
    loss = jnp.where(clipped, held, free)  # on the edge the gradient is the free one, not half of it as in a maximum
    if dual_clip is not None:
        limit = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > limit)
        loss, clipped = jnp.where(beyond, limit, loss), clipped | beyond
    return Surrogate(loss, clipped)


def _gspo(
    inputs: _Inputs, mask: Bool[Array, "*tokens"], low: Scalar, high: Scalar, sequences: Array, count: int
) -> Surrogate:
    """PPO's clip on s = exp(mean log-ratio of the sequence). GSPO-token (arXiv 2507.18071).

    s_t = sg(s) pi_t / sg(pi_t): equal to s, with the gradient at the token, so that turns may have advantages of their
    own.
    """
    mean = sequence_means(inputs.log_ratio, mask, sequences, count)
    at_token = jax.lax.stop_gradient(mean) + inputs.logprobs - jax.lax.stop_gradient(inputs.logprobs)
    return _ppo(inputs._replace(log_ratio=jnp.minimum(at_token, 10.0)), low, high, None)


def _sapo(inputs: _Inputs, tau_positive: Scalar, tau_negative: Scalar) -> Surrogate:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of the clip. SAPO (arXiv 2511.20347)."""
    tau = jnp.where(inputs.advantages > 0, tau_positive, tau_negative)
    gate = (4.0 / tau) * jax.nn.sigmoid(tau * (jnp.exp(inputs.log_ratio) - 1.0))
    return Surrogate(-inputs.advantages * gate, jnp.zeros(gate.shape, bool))


def _probability_mask(
    inputs: _Inputs, low: Scalar, high: Scalar, pull: Scalar, *, both_signs: bool
) -> Surrogate:  # fmt: skip
    """-keep A r + pull (log r)^2, keep where the probability has not moved too far.

    dppo drops a token when A pushes further: A > 0 and pi - mu > high, or A < 0 and pi - mu < -low. ipo drops it
    whatever the sign of A. prime-rl's default and its predecessor.
    """
    moved = jax.lax.stop_gradient(jnp.exp(inputs.logprobs) - jnp.exp(inputs.anchor))
    above, below = moved > high, moved < -low
    if not both_signs:
        above, below = above & (inputs.advantages > 0), below & (inputs.advantages < 0)
    keep = ~(above | below)
    loss = jnp.where(keep, -inputs.advantages * jnp.exp(inputs.log_ratio), 0.0)
    return Surrogate(loss + pull * jnp.square(inputs.log_ratio), ~keep)


def _cispo(inputs: _Inputs, low: Scalar, high: Scalar) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: weights are clipped, no token loses its gradient. arXiv 2506.13585."""
    ratio = jax.lax.stop_gradient(jnp.exp(inputs.log_ratio))
    loss = -jnp.clip(ratio, 1 - low, 1 + high) * inputs.advantages * inputs.logprobs
    return Surrogate(loss, (ratio < 1 - low) | (ratio > 1 + high))


def _rollout_is(inputs: _Inputs, low: Scalar, high: Scalar) -> Surrogate:
    """-sg(r [1 - low < r < 1 + high]) A log pi: tokens outside the band are dropped. SkyRL's rollout_is."""
    ratio = jax.lax.stop_gradient(jnp.exp(inputs.log_ratio))
    inside = (ratio > 1 - low) & (ratio < 1 + high)
    return Surrogate(-jnp.where(inside, ratio, 0.0) * inputs.advantages * inputs.logprobs, ~inside)


def _importance(inputs: _Inputs, low: Scalar, high: Scalar) -> Surrogate:
    """-A r, never clipped."""
    ratio = jnp.exp(inputs.log_ratio)
    return Surrogate(-inputs.advantages * ratio, jnp.zeros(ratio.shape, bool))


def _reinforce(inputs: _Inputs, low: Scalar, high: Scalar) -> Surrogate:
    """-A log pi. Williams 1992."""
    return Surrogate(-inputs.advantages * inputs.logprobs, jnp.zeros(inputs.logprobs.shape, bool))


def _cross_entropy(inputs: _Inputs, low: Scalar, high: Scalar) -> Surrogate:
    """-log pi, advantages ignored: imitation of the tokens."""
    return Surrogate(-inputs.logprobs, jnp.zeros(inputs.logprobs.shape, bool))


_CLIPPED_BY_RATIO: Mapping[str, Callable[[_Inputs, Scalar, Scalar], Surrogate]] = {
    "cispo": _cispo,
    "rollout_is": _rollout_is,
    "importance": _importance,
    "reinforce": _reinforce,
    "cross_entropy": _cross_entropy,
}


def _mismatch_weights(
    inputs: _Inputs, behaviour_logprobs, proximal_logprobs, mask, correction, low, high, sequences, sequence_count
) -> Float[Array, "*tokens"]:
    """Weights for the anchor not being what sampled. Without a proximal policy the ratio itself makes up for it, so
    that only masks are allowed, on pi / mu."""
    if correction == "none":
        return jnp.ones_like(inputs.logprobs)
    if proximal_logprobs is None and not correction.endswith("mask"):
        raise ValueError(
            f"correction {correction!r} weighs pi_proximal / mu and needs `proximal_logprobs`: without them the ratio "
            "is already taken against the sampler, so choose one of the masks"
        )
    anchor = inputs.logprobs if proximal_logprobs is None else inputs.anchor
    log_ratio = anchor - jnp.where(mask, behaviour_logprobs, 0.0)
    weights = correction_weights(
        log_ratio,
        mask,
        correction=correction,
        low=low,
        high=high,
        sequences=sequences,
        sequence_count=sequence_count,
    )
    return (weights > 0).astype(weights.dtype) if proximal_logprobs is None else weights


def _sequence_ids(
    tokens: Float[Array, "*tokens"], sequences: Int[Array, "*tokens"] | None, count: int | None
) -> tuple[Int[Array, "*tokens"] | None, int | None]:
    if sequences is None and tokens.ndim == 2:
        return jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape), tokens.shape[0]
    return sequences, tokens.size if count is None else count


def _sequences(what: str, sequences: Array | None, count: int | None) -> tuple[Int[Array, "*tokens"], int]:
    if sequences is None or count is None:
        raise ValueError(f"{what!r} works on sequences: pass `sequences`")
    return sequences, count


def _metrics(inputs: _Inputs, surrogate: Surrogate, weights: Array, mask: Array) -> dict[str, Float[Array, ""]]:
    """Sums over tokens; divide by `tokens`."""
    log_ratio = jax.lax.stop_gradient(inputs.log_ratio)
    ratio = jnp.exp(log_ratio)
    moved = surrogate.clipped.astype(ratio.dtype)
    sums: dict[str, Any] = {
        "tokens": jnp.ones_like(ratio),
        "ratio": ratio,
        "clipped": moved,
        "clipped_low": moved * (log_ratio < 0),
        "clipped_high": moved * (log_ratio > 0),
        "policy_kl": jnp.expm1(log_ratio) - log_ratio,
        "correction_weight": weights,
        "advantage": inputs.advantages,
        "advantage_abs": jnp.abs(inputs.advantages),
    }
    return {name: jax.lax.stop_gradient(masked_sum(values, mask)) for name, values in sums.items()}
