"""Policy-gradient objectives on sampled tokens, each as a sum and its denominator."""

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flowjax.fields import Interval, NotNegative, Positive, Share, declared_types, nearest, option_problems
from flowjax.losses.ratios import (
    LARGEST_LOG_RATIO,
    Correction,
    Scalar,
    at_least_float32,
    check_choice,
    check_dimensions,
    correction_weights,
    m2po_bounds,
    masked_sum,
    sequence_means,
    sequence_sums,
)

# -------------------------------------------------------------------------------------------------------------- options

Kind = Literal[
    "ppo", "gspo", "sapo", "cispo", "m2po", "dppo", "ipo", "rollout_is", "importance", "reinforce", "cross_entropy"
]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "trajectory_mean_token_mean", "constant"
]


@dataclass(frozen=True)
class LossOptions:
    """Options of `policy_loss` (config.loss.options); objectives that do not clip ignore the clip bounds.

    clip_low, clip_high: how far the ratio may fall below and rise above 1; for dppo and ipo, how far the probability
        may fall and rise.
    aggregation: how tokens are averaged, see `aggregate`; None is sequence_mean_token_mean for gspo, else token_mean.
    sequence_tokens: for aggregation constant: the fixed length that each sequence's sum is divided by (Dr. GRPO).
    correction: weight for the mismatch between proximal policy and sampler, see `correction_weights`.
    correction_low, correction_high: edges of the band that it keeps to; truncation is at the upper one alone.
    dual_clip: for ppo: bound on the loss of tokens with negative advantage, in units of |A|; 3 is usual, None is off.
    tau_positive, tau_negative: for sapo: steepness of the gate for positive advantages and for the others.
    pull: for dppo and ipo: weight of the squared log-ratio.
    m2_threshold: for m2po: largest second moment of the log-ratio.
    """

    clip_low: Share = 0.2  # ratios go down to 1 - clip_low, and no ratio is negative
    clip_high: NotNegative = 0.28
    aggregation: Aggregation | None = None
    sequence_tokens: Positive | None = None
    correction: Correction = "none"
    correction_low: NotNegative = 0.5
    correction_high: NotNegative = 2.0
    dual_clip: Annotated[float, Interval(above=1)] | None = None
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    pull: NotNegative = 1e-3
    m2_threshold: Positive = 0.01

    @property
    def needs_proximal(self) -> bool:
        """True if the correction needs the trainer's log-probs from the start of the step: weights do, masks do not."""
        return self.correction != "none" and not self.correction.endswith("mask")

    def aggregation_of(self, kind: Kind) -> Aggregation:
        """The way in which an objective averages its tokens: as stated, or the usual one."""
        return self.aggregation or ("sequence_mean_token_mean" if kind == "gspo" else "token_mean")


DEFAULTS = LossOptions()

# Options that one objective has and others have not.
_ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "dual_clip": ("ppo",),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "pull": ("dppo", "ipo"),
    "m2_threshold": ("m2po",),
}


class LossError(ValueError):
    """An objective or option that does not exist or does not fit; the message names field, value and remedy."""


def check_loss_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown objective, an option that it does not take, or a value out of range.

    Raises:
        LossError: with the field, its value and what to write instead.
    """
    field, kinds = "config.loss.options", typing.get_args(Kind)
    if not isinstance(options, Mapping):
        raise LossError(f"{field} is {options!r}: give a map of options, {{}} for none")
    if kind not in kinds:
        no_path = "; a path is not taken here: your own goes into flowjax/losses/policy.py, see docs/losses.md"
        known = f"it is one of {', '.join(kinds)}{no_path if ':' in str(kind) else ''}"
        raise LossError(f"config.loss.kind is {kind!r}{nearest(kind, kinds)}; {known}")
    for option in options:
        if option in _ONLY_OF and kind not in _ONLY_OF[option]:
            raise LossError(
                f"{field}.{option} is no option of {kind!r}: it belongs to {' and '.join(_ONLY_OF[option])}"
            )
    declared = {name: of for name, of in declared_types(LossOptions).items() if kind in _ONLY_OF.get(name, kinds)}
    for problem in option_problems(field, options, declared, repr(kind)):
        raise LossError(problem)
    chosen = LossOptions(**options)
    if chosen.aggregation == "constant" and chosen.sequence_tokens is None:
        raise LossError(
            f"{field}.aggregation is 'constant', which divides by a fixed length: set {field}.sequence_tokens to the "
            "longest reply allowed"
        )
    unread = {"sequence_tokens": "aggregation is 'constant'"} if chosen.aggregation != "constant" else {}
    if chosen.correction == "none":
        unread |= dict.fromkeys(("correction_low", "correction_high"), "correction is another than 'none'")
    for option, where in unread.items():
        if option in options:
            raise LossError(
                f"{field}.{option} is {options[option]}, which is read only where {where}: set that, or leave it out"
            )
    if chosen.correction_low >= chosen.correction_high:
        raise LossError(
            f"{field}.correction_low is {chosen.correction_low}, it must be below correction_high, "
            f"{chosen.correction_high}"
        )


# ------------------------------------------------------------------------------------------------------------- the loss

RatioBounds = tuple[Scalar, Scalar]


def policy_loss(
    logprobs: Float[Array, "*tokens"],
    behaviour_logprobs: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    kind: Kind = "ppo",
    options: LossOptions = DEFAULTS,
    proximal_logprobs: Float[Array, "*tokens"] | None = None,
    ratio_bounds: RatioBounds | None = None,
    sequences: Int[Array, "*tokens"] | None = None,
    sequence_count: int | None = None,
    trajectory_tokens: Int[Array, "*tokens"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss to minimise as (sum, denominator, metrics); divide once, after adding up micro-batches.

    r = pi / pi_old, pi_old being `proximal_logprobs` where given and the sampler's log-probabilities otherwise. All is
    computed in float32 at least. Metrics are sums over tokens, too, to be divided by their `tokens`. `docs/losses.md`
    has the formulas, their sources and pictures of what each clip rule cuts away.

    Args:
        logprobs: of the sampled tokens under the policy being trained, at the sampling temperature.
        behaviour_logprobs: the engine's, from when the tokens were sampled.
        advantages: one per token.
        mask: tokens to train on. Everything else is ignored, NaN included.
        kind: objective.
        options: of the objective.
        proximal_logprobs: of the policy at the start of the step, for the decoupled objective.
        ratio_bounds: m2po: bounds from `m2po_bounds` over the whole optimiser batch; None finds them in these tokens.
        sequences: id of each token's sequence, below `sequence_count`; by default the row of a two-dimensional batch.
        sequence_count: static bound on those ids; by default the number of tokens, or of rows if ids are rows.
        trajectory_tokens: trajectory_mean_token_mean: sampled tokens of each token's whole trajectory, 1 or more.

    Raises:
        ValueError: an unknown objective, correction or aggregation; an argument is missing or has other dimensions.
    """
    check_choice("kind", kind, Kind)
    check_dimensions(logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages, mask=mask)
    mask = jnp.broadcast_to(mask.astype(bool), logprobs.shape)
    logprobs, behaviour_logprobs, advantages = map(at_least_float32, (logprobs, behaviour_logprobs, advantages))
    sequences, sequence_count = _sequence_ids(logprobs, sequences, sequence_count)
    old = behaviour_logprobs if proximal_logprobs is None else at_least_float32(proximal_logprobs)
    # Chosen by `where`, not by a product with the mask: 0 * NaN would be NaN, and a gradient of it too.
    old = jax.lax.stop_gradient(jnp.where(mask, old, 0.0))
    logprobs = jnp.where(mask, logprobs, 0.0)
    tokens = _Tokens(
        logprobs,
        old,
        jnp.clip(logprobs - old, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO),
        jnp.where(mask, advantages, 0.0),
        mask,
        sequences,
        sequence_count,
        ratio_bounds,
    )
    surrogate = _OBJECTIVES[kind](tokens, options)
    weights = _mismatch_weights(tokens, options, behaviour_logprobs, is_decoupled=proximal_logprobs is not None)
    total, denominator = aggregate(
        surrogate.loss * weights,
        mask,
        aggregation=options.aggregation_of(kind),
        sequences=sequences,
        sequence_count=sequence_count,
        sequence_tokens=options.sequence_tokens,
        trajectory_tokens=trajectory_tokens,
    )
    return total, denominator, _metrics(tokens, surrogate, weights)


# ---------------------------------------------------------------------------------------------------------- objectives


class Surrogate(NamedTuple):
    """Loss of each token, and the tokens that the clip rule acts on; under most rules these have no gradient."""

    loss: Float[Array, "*tokens"]
    clipped: Bool[Array, "*tokens"]


class _Tokens(NamedTuple):
    """Tokens as objectives see them; numbers are 0 where the mask is False."""

    logprobs: Float[Array, "*tokens"]
    old: Float[Array, "*tokens"]  # log-probabilities that the ratio is taken against, without gradient
    log_ratio: Float[Array, "*tokens"]
    advantages: Float[Array, "*tokens"]
    mask: Bool[Array, "*tokens"]
    sequences: Int[Array, "*tokens"] | None
    sequence_count: int
    ratio_bounds: RatioBounds | None


def _ppo(tokens: _Tokens, options: LossOptions) -> Surrogate:
    return _clipped(tokens, options.clip_low, options.clip_high, options.dual_clip)


def _clipped(tokens: _Tokens, low: Scalar, high: Scalar, dual_clip: float | None = None) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)). PPO (arXiv 1707.06347), eq. 7; clip-higher is DAPO (arXiv 2503.14476).

    With dual clip, min(that, -A c) where A < 0 (arXiv 1912.09729).
    """
    ratio, advantages = jnp.exp(tokens.log_ratio), tokens.advantages
    free, held = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - low, 1 + high)
    clipped = held > free
    loss = jnp.where(clipped, held, free)  # on the edge the gradient is the free one, not half of it as in a maximum
    if dual_clip is not None:
        limit = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > limit)
        loss, clipped = jnp.where(beyond, limit, loss), clipped | beyond
    return Surrogate(loss, clipped)


def _m2po(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """PPO's clip with bounds from the batch itself, see `m2po_bounds`."""
    bounds = tokens.ratio_bounds
    if bounds is None:
        moved = (tokens.logprobs, tokens.old, tokens.advantages, tokens.mask)
        bounds = m2po_bounds(*moved, threshold=options.m2_threshold)
    return _clipped(tokens, *bounds)


def _gspo(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """PPO's clip on s = exp(mean log-ratio of the sequence). GSPO-token (arXiv 2507.18071).

    s_t = sg(s) pi_t / sg(pi_t): equal to s, with the gradient at the token, so that turns may have advantages of their
    own.
    """
    sequences = _needed("gspo", tokens.sequences)
    mean = sequence_means(tokens.log_ratio, tokens.mask, sequences, tokens.sequence_count)
    # The difference comes first: it is exactly 0, but has a gradient. If the mean were added to a log-prob first, it
    # would be rounded as the log-prob is: for one of -20 by up to 0.6 % of a clip bound as narrow as GSPO's (3e-4).
    at_token = jax.lax.stop_gradient(mean) + (tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs))
    held = tokens._replace(log_ratio=jnp.minimum(at_token, 10.0))  # verl's bound, above only: exp(-large) is just 0
    return _clipped(held, options.clip_low, options.clip_high)


def _sapo(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of the clip. SAPO (arXiv 2511.20347).

    By the factor 4 / tau its slope at r = 1 is that of -A r.
    """
    tau = jnp.where(tokens.advantages > 0, options.tau_positive, options.tau_negative)
    gate = (4.0 / tau) * jax.nn.sigmoid(tau * (jnp.exp(tokens.log_ratio) - 1.0))
    return Surrogate(-tokens.advantages * gate, jnp.zeros(gate.shape, bool))


def _dppo(tokens: _Tokens, options: LossOptions, *, both_signs: bool = False) -> Surrogate:
    """-keep A r + pull (log r)^2, keep where the probability has not moved too far.

    dppo drops a token when A pushes further: A > 0 and pi - mu > high, or A < 0 and pi - mu < -low. DPPO-Binary TV
    (arXiv 2602.04879), prime-rl's default. ipo drops it whatever the sign of A: INTELLECT Policy Optimization,
    prime-rl's default before, not the preference loss of that name. The pull is Kimi K2.5's (arXiv 2602.02276).
    """
    moved = jax.lax.stop_gradient(jnp.exp(tokens.logprobs) - jnp.exp(tokens.old))
    above, below = moved > options.clip_high, moved < -options.clip_low
    if not both_signs:
        above, below = above & (tokens.advantages > 0), below & (tokens.advantages < 0)
    keep = ~(above | below)
    loss = jnp.where(keep, -tokens.advantages * jnp.exp(tokens.log_ratio), 0.0)
    return Surrogate(loss + options.pull * jnp.square(tokens.log_ratio), ~keep)


def _cispo(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: weights are clipped, no token loses its gradient. arXiv 2506.13585."""
    ratio = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio))
    low, high = 1 - options.clip_low, 1 + options.clip_high
    loss = -jnp.clip(ratio, low, high) * tokens.advantages * tokens.logprobs
    return Surrogate(loss, (ratio < low) | (ratio > high))  # of these the weight is cut, not the gradient


def _rollout_is(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """-sg(r [1 - low < r < 1 + high]) A log pi: tokens outside the band are dropped. SkyRL's rollout_is."""
    ratio = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio))
    inside = (ratio > 1 - options.clip_low) & (ratio < 1 + options.clip_high)
    return Surrogate(-jnp.where(inside, ratio, 0.0) * tokens.advantages * tokens.logprobs, ~inside)


def _importance(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """-A r, never clipped."""
    ratio = jnp.exp(tokens.log_ratio)
    return Surrogate(-tokens.advantages * ratio, jnp.zeros(ratio.shape, bool))


def _reinforce(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """-A log pi. Williams 1992."""
    return Surrogate(-tokens.advantages * tokens.logprobs, jnp.zeros(tokens.logprobs.shape, bool))


def _cross_entropy(tokens: _Tokens, options: LossOptions) -> Surrogate:
    """-log pi, advantages ignored: imitation of the tokens."""
    return Surrogate(-tokens.logprobs, jnp.zeros(tokens.logprobs.shape, bool))


_OBJECTIVES: Mapping[Kind, Callable[[_Tokens, LossOptions], Surrogate]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "sapo": _sapo,
    "cispo": _cispo,
    "m2po": _m2po,
    "dppo": _dppo,
    "ipo": partial(_dppo, both_signs=True),
    "rollout_is": _rollout_is,
    "importance": _importance,
    "reinforce": _reinforce,
    "cross_entropy": _cross_entropy,
}


# ------------------------------------------------------------------------------------- weights, averages and metrics


def _mismatch_weights(
    tokens: _Tokens, options: LossOptions, behaviour_logprobs: Float[Array, "*tokens"], *, is_decoupled: bool
) -> Float[Array, "*tokens"]:
    """Weights that correct for the engine's mu, which sampled the tokens. With a proximal policy they are made of
    proximal / mu. Without one, the objective's ratio pi / mu corrects already (`reinforce` and `cross_entropy` have no
    ratio, so there nothing does), and only masks are allowed: they keep or drop tokens by pi / mu."""
    check_choice("correction", options.correction, Correction)
    if options.correction == "none":
        return jnp.ones_like(tokens.logprobs)
    if not is_decoupled and options.needs_proximal:
        raise ValueError(
            f"correction {options.correction!r} weighs pi_proximal / mu and needs `proximal_logprobs`: without them "
            "the ratio is already taken against the sampler, so choose one of the masks"
        )
    proximal = tokens.old if is_decoupled else tokens.logprobs
    weights = correction_weights(
        proximal - jnp.where(tokens.mask, behaviour_logprobs, 0.0),
        tokens.mask,
        correction=options.correction,
        low=options.correction_low,
        high=options.correction_high,
        sequences=tokens.sequences,
        sequence_count=tokens.sequence_count,
    )
    # token_mask weighs a kept token by its ratio, which is in the objective already: here it is kept or not.
    return weights if is_decoupled else (weights > 0).astype(weights.dtype)


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
    check_choice("aggregation", aggregation, Aggregation)
    values, mask = at_least_float32(values), jnp.broadcast_to(mask.astype(bool), values.shape)
    if aggregation == "token_mean":
        return masked_sum(values, mask), jnp.sum(mask).astype(values.dtype)
    if aggregation == "trajectory_mean_token_mean":
        if trajectory_tokens is None:
            raise ValueError("aggregation 'trajectory_mean_token_mean' needs `trajectory_tokens`")
        # The shares of all of a trajectory's tokens add up to 1, in whichever micro-batches they are: their sum counts
        # trajectories.
        share = 1.0 / jnp.maximum(trajectory_tokens, 1).astype(values.dtype)
        return masked_sum(values * share, mask), masked_sum(share, mask)
    sequences, sequence_count = _sequence_ids(values, sequences, sequence_count)
    sums, lengths = sequence_sums(values, mask, _needed(aggregation, sequences), sequence_count)
    present = jnp.sum(lengths > 0).astype(values.dtype)  # `sequence_count` is only a bound: ids without a token
    if aggregation == "sequence_mean_token_mean":
        return jnp.sum(sums / jnp.maximum(lengths, 1)), present
    if aggregation == "sequence_mean_token_sum":
        return jnp.sum(sums), present
    if sequence_tokens is None:
        raise ValueError("aggregation 'constant' needs `sequence_tokens`, the longest reply allowed")
    return jnp.sum(sums), present * sequence_tokens


def _sequence_ids(
    tokens: Float[Array, "*tokens"], sequences: Int[Array, "*tokens"] | None, count: int | None
) -> tuple[Int[Array, "*tokens"] | None, int]:
    """Sequence ids and a static bound on them; by default each row of a two-dimensional batch is a sequence."""
    if sequences is None and tokens.ndim == 2:
        return jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape), tokens.shape[0]
    return sequences, tokens.size if count is None else count


def _needed(what: str, sequences: Int[Array, "*tokens"] | None) -> Int[Array, "*tokens"]:
    if sequences is None:
        raise ValueError(f"{what!r} works on sequences: pass `sequences`")
    return sequences


def _metrics(tokens: _Tokens, surrogate: Surrogate, weights: Float[Array, "*tokens"]) -> dict[str, Float[Array, ""]]:
    """Sums over tokens; divide by `tokens`."""
    log_ratio = jax.lax.stop_gradient(tokens.log_ratio)
    ratio = jnp.exp(log_ratio)
    sums: dict[str, Any] = {
        "tokens": jnp.ones_like(ratio),
        "ratio": ratio,
        "clipped": surrogate.clipped.astype(ratio.dtype),
        "policy_kl": jnp.expm1(log_ratio) - log_ratio,  # k3 of KL(old || pi): the tokens were sampled from old
        "correction_weight": weights,
        "advantage": tokens.advantages,
        "advantage_abs": jnp.abs(tokens.advantages),
    }
    return {name: jax.lax.stop_gradient(masked_sum(values, tokens.mask)) for name, values in sums.items()}
