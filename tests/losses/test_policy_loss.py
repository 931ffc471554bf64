"""Objectives: values by hand, gradients against finite differences in float64, micro-batches that add up."""

import subprocess
import sys
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowjax.losses.policy import Kind, LossError, LossOptions, aggregate, check_loss_options, policy_loss
from flowjax.losses.ratios import (
    KlKind,
    correction_weights,
    kl_penalty,
    m2po_bounds,
    masked_sum,
    mismatch_metrics,
    mismatch_of_sequences,
    sequence_sums,
)

TOKENS = 40


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def batch(seed: int = 0, *, by_sequence: bool = False):
    """Log-probabilities now and then, advantages, mask and sequence ids of a few sequences."""
    rng = np.random.default_rng(seed)
    behaviour = np.log(rng.uniform(0.05, 0.9, TOKENS))
    logprobs = behaviour + rng.normal(0, 0.4, TOKENS)
    sequences = np.repeat(np.arange(5), [3, 12, 7, 10, 8])
    advantages = rng.normal(size=5)[sequences] if by_sequence else rng.normal(size=TOKENS)
    mask = rng.random(TOKENS) < 0.8
    return tuple(jnp.asarray(x) for x in (logprobs, behaviour, advantages, mask, sequences))


def mean_loss(logprobs, behaviour, advantages, mask, sequences, kind: Kind = "ppo", **options):
    total, denominator, _ = policy_loss(
        logprobs, behaviour, advantages, mask, kind=kind, options=LossOptions(**options), sequences=sequences,
        sequence_count=5,
    )  # fmt: skip
    return total / denominator


def numerical_gradient(function, at, step=1e-6):
    at = np.asarray(at, np.float64)
    gradient = np.zeros_like(at)
    for index in range(at.size):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (float(function(up)) - float(function(down))) / (2 * step)
    return gradient


def by_hand(kind, logprobs, behaviour, advantages, mask, sequences, weights_from):
    """Each objective from its formula in numpy; what has no gradient is taken at the log-probs `weights_from`."""
    ratio, frozen = np.exp(logprobs - behaviour), np.exp(weights_from - behaviour)
    low, high = 0.2, 0.28
    if kind == "m2po":
        arrays = map(jnp.asarray, (weights_from, behaviour, advantages, mask))
        low, high = (float(bound) for bound in m2po_bounds(*arrays, threshold=0.01))
    if kind in ("ppo", "m2po"):
        losses = -np.minimum(advantages * ratio, advantages * np.clip(ratio, 1 - low, 1 + high))
    elif kind == "gspo":
        losses = np.zeros(len(logprobs))
        for sequence in range(5):
            chosen = (sequences == sequence) & mask
            s = np.exp(np.mean((logprobs - behaviour)[chosen]))
            a = advantages[chosen][0]
            losses[sequences == sequence] = -min(a * s, a * np.clip(s, 1 - low, 1 + high))
    elif kind == "sapo":
        tau = np.where(advantages > 0, 1.0, 1.05)
        losses = -advantages * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    elif kind == "cispo":
        losses = -np.clip(frozen, 1 - low, 1 + high) * advantages * logprobs
    elif kind == "rollout_is":
        losses = -np.where((frozen > 1 - low) & (frozen < 1 + high), frozen, 0) * advantages * logprobs
    elif kind in ("dppo", "ipo"):
        moved = np.exp(weights_from) - np.exp(behaviour)
        up, down = moved > high, moved < -low
        dropped = up | down if kind == "ipo" else (up & (advantages > 0)) | (down & (advantages < 0))
        losses = -advantages * ratio * ~dropped + 1e-3 * (logprobs - behaviour) ** 2
    else:
        losses = {
            "importance": -advantages * ratio,
            "reinforce": -advantages * logprobs,
            "cross_entropy": -logprobs,
        }[kind]
    if kind == "gspo":
        return np.mean([losses[(sequences == s) & mask].mean() for s in range(5)])
    return losses[mask].mean()


@pytest.mark.parametrize("kind", typing.get_args(Kind))
def test_value_and_gradient(kind, float64):
    arrays = batch(by_sequence=kind == "gspo")
    logprobs, *rest = (np.asarray(array) for array in arrays)

    def formula(at):
        return by_hand(kind, at, *rest, weights_from=logprobs)

    value, gradient = jax.value_and_grad(mean_loss)(*arrays, kind=kind)
    assert float(value) == pytest.approx(formula(logprobs), rel=1e-9)
    expected = numerical_gradient(formula, logprobs)
    np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-5, atol=1e-8)
    assert np.abs(expected).max() > 1e-3
    assert not np.asarray(gradient)[~rest[2]].any()


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
)
def test_gradient_of_each_aggregation(aggregation, float64):
    logprobs, behaviour, advantages, mask, sequences = batch(1)
    options = {"kind": "ppo", "dual_clip": 1.5, "aggregation": aggregation, "sequence_tokens": 16.0}

    def loss(at):
        return mean_loss(jnp.asarray(at), behaviour, advantages, mask, sequences, **options)

    np.testing.assert_allclose(
        jax.grad(loss)(logprobs), numerical_gradient(jax.jit(loss), logprobs), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_gradient_of_kl(kind, float64):
    logprobs, reference, *_ = batch(2)

    def penalty(at):
        return kl_penalty(jnp.asarray(at), reference, kind).sum()

    np.testing.assert_allclose(
        jax.grad(penalty)(logprobs), numerical_gradient(jax.jit(penalty), logprobs), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("difference", [-2.6, -1.0, 0.0, 5.0, 9.9, 10.5, 10.99])
def test_k3_holds_the_policy_as_far_as_its_bound(difference, float64):
    value, slope = jax.value_and_grad(lambda d: kl_penalty(d, jnp.zeros(()), "k3"))(jnp.asarray(difference))
    assert float(value) == pytest.approx(np.exp(-difference) - 1 + difference)
    assert float(slope) == pytest.approx(1 - np.exp(-difference))


@pytest.mark.parametrize("difference", [-1e9, -2.7, 11.1, 1e9])
def test_k3_is_bounded(difference):
    value, slope = jax.value_and_grad(lambda d: kl_penalty(d, jnp.zeros(()), "k3"))(jnp.asarray(difference))
    assert (float(value), float(slope)) == (10.0, 0.0)


def test_kl_estimates_agree_with_the_kl():
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.full(6, 5.0)), rng.dirichlet(np.full(6, 5.0))
    exact = (policy * np.log(policy / reference)).sum()
    for kind in ("k1", "k3"):
        each = np.asarray(kl_penalty(jnp.log(policy), jnp.log(reference), kind))
        assert (policy * each).sum() == pytest.approx(exact, rel=1e-4)
    assert (np.asarray(kl_penalty(jnp.log(policy), jnp.log(reference), "k3")) >= 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 1.0, -1.28, False),  # raised enough already
        (0.5, 1.0, -0.5, True),  # lowered by mistake: pull back up
        (0.5, -1.0, 0.8, False),  # lowered enough already
        (1.5, -1.0, 1.5, True),  # raised by mistake
        (5.0, -1.0, 3.0, False),  # dual clip
    ],
)
def test_clip_regions(ratio, advantage, expected, has_gradient):
    def loss(logprob):
        total, _, metrics = policy_loss(
            logprob, jnp.zeros(1), jnp.array([advantage]), jnp.ones(1, bool), options=LossOptions(dual_clip=3.0)
        )
        return total, metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.log(jnp.array([ratio])))
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert bool(gradient[0] != 0) == has_gradient
    assert bool(metrics["clipped"]) != has_gradient


@pytest.mark.parametrize("kind", ["ppo", "dppo", "ipo", "cispo", "rollout_is", "sapo", "reinforce"])
def test_metrics_are_sums_over_trained_tokens_and_the_share_that_a_rule_cuts_is_its_own(kind):
    rng = np.random.default_rng(9)
    behaviour = np.log(rng.uniform(0.05, 0.6, 200))
    logprobs, advantages, mask = (
        behaviour + rng.normal(-0.2, 0.8, 200),
        rng.normal(0.5, 1.0, 200),
        rng.random(200) < 0.8,
    )
    _, _, sums = policy_loss(*map(jnp.asarray, (logprobs, behaviour, advantages, mask)), kind=kind)
    ratio, moved = np.exp(logprobs - behaviour), np.exp(logprobs) - np.exp(behaviour)
    far = moved if kind in ("dppo", "ipo") else ratio - 1
    above, below = far > 0.28, far < -0.2
    if kind in ("ppo", "dppo"):  # where the advantage pushes on
        above, below = above & (advantages > 0), below & (advantages < 0)
    cut = above | below if kind not in ("sapo", "reinforce") else np.zeros(200, bool)
    expected = {"tokens": np.ones(200), "ratio": ratio, "clipped": cut, "policy_kl": ratio - 1 - np.log(ratio)}
    expected |= {"correction_weight": np.ones(200), "advantage": advantages, "advantage_abs": np.abs(advantages)}
    assert sums.keys() == expected.keys() and (above & mask).any() and (below & mask).any()
    for name, values in expected.items():
        assert float(sums[name]) == pytest.approx(values[mask].sum(), rel=1e-4), name


def test_a_ratio_beyond_all_bounds_stays_a_number_and_has_no_gradient():
    """One token that the sampler held for impossible: its ratio is infinite in float32."""

    def loss(logprobs, kind, behaviour):
        return policy_loss(logprobs, behaviour, -jnp.ones((1, 2)), jnp.ones((1, 2), bool), kind=kind)[::2]

    for kind, moved, bound in (
        ("importance", 100.0, np.exp(20.0)),
        ("ppo", 100.0, np.exp(20.0)),
        ("gspo", 15.0, np.exp(10.0)),
    ):
        (value, sums), slope = jax.value_and_grad(loss, has_aux=True)(jnp.zeros((1, 2)), kind, jnp.full((1, 2), -moved))
        assert float(value) == pytest.approx(bound * (1 if kind == "gspo" else 2), rel=1e-5), kind
        assert not np.asarray(slope).any() and np.isfinite([float(each) for each in sums.values()]).all(), kind
    far = mismatch_metrics(jnp.zeros(2), jnp.array([-200.0, 0.0]), jnp.ones(2, bool))
    assert float(far["k3"]) == pytest.approx(np.exp(20.0), rel=1e-5) and float(far["max"]) == 200


def test_micro_batches_add_up():
    logprobs, behaviour, advantages, mask, sequences = batch(3)
    for aggregation in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
        options: dict = {"options": LossOptions(aggregation=aggregation), "sequence_count": 5}
        whole = policy_loss(logprobs, behaviour, advantages, mask, sequences=sequences, **options)
        cut = 15  # between the second and the third sequence
        parts = [
            policy_loss(*(x[s] for x in (logprobs, behaviour, advantages, mask)), sequences=sequences[s], **options)
            for s in (slice(0, cut), slice(cut, None))
        ]
        assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(whole[0]), rel=1e-5)
        assert float(parts[0][1] + parts[1][1]) == float(whole[1])
        assert float(parts[0][2]["ratio"] + parts[1][2]["ratio"]) == pytest.approx(float(whole[2]["ratio"]), rel=1e-5)


def test_what_is_masked_does_not_matter():
    logprobs, behaviour, advantages, mask, sequences = batch(4)
    spoilt = [jnp.where(mask, x, jnp.nan) for x in (logprobs, behaviour, advantages)]
    for kind in typing.get_args(Kind):
        clean = mean_loss(logprobs, behaviour, advantages, mask, sequences, kind=kind)
        value, gradient = jax.value_and_grad(mean_loss)(*spoilt, mask, sequences, kind=kind)
        assert float(value) == pytest.approx(float(clean), rel=1e-6), kind
        assert np.isfinite(gradient).all(), kind


def test_rows_are_sequences_in_two_dimensions():
    logprobs, behaviour, advantages, mask, _ = batch(5)
    flat = policy_loss(
        logprobs, behaviour, advantages, mask, kind="gspo", sequences=jnp.repeat(jnp.arange(4), 10), sequence_count=4
    )
    square = policy_loss(*(x.reshape(4, 10) for x in (logprobs, behaviour, advantages, mask)), kind="gspo")
    assert float(flat[0]) == pytest.approx(float(square[0]), rel=1e-6)
    assert float(flat[1]) == float(square[1]) == 4


def test_a_sequence_is_within_gspos_clip_or_beyond_it_as_a_whole():
    """Bounds are a few 1e-4 (docs/losses.md), and log-probs of -20 are rounded to 2e-6."""
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(6.0, 4096).astype(np.float32)
    behaviour = logprobs - np.float32(3e-4)
    arrays = [jnp.asarray(x) for x in (logprobs, behaviour, np.ones(4096, np.float32), np.ones(4096, bool))]
    moved = np.expm1(np.mean((logprobs - behaviour).astype(np.float64)))
    for bound, clipped in ((moved * 1.001, 0), (moved * 0.999, 4096)):
        options = LossOptions(clip_low=bound, clip_high=bound)
        _, _, sums = policy_loss(
            *arrays, kind="gspo", options=options, sequences=jnp.zeros(4096, jnp.int32), sequence_count=1
        )
        assert float(sums["clipped"]) == clipped


def test_m2po_bounds_by_exhaustive_search():
    logprobs, behaviour, advantages, mask, _ = batch(6)
    low, high = m2po_bounds(logprobs, behaviour, advantages, mask, threshold=0.02)
    difference = np.asarray(logprobs - behaviour)
    pushed = np.asarray(mask) & (np.sign(difference) == np.sign(advantages))
    squares = np.sort(difference[pushed] ** 2)[::-1]
    dropped = next(i for i in range(len(squares)) if squares[i:].mean() < 0.02)
    tau = np.sqrt(squares[dropped])
    assert float(low) == pytest.approx(1 - np.exp(-tau), rel=1e-4)
    assert float(high) == pytest.approx(np.exp(tau) - 1, rel=1e-4)


def test_m2po_bounds_at_the_edges():
    ones = jnp.ones(4)
    wide = pytest.approx((0.95, 20.0))
    assert tuple(map(float, m2po_bounds(ones, ones, ones, ones > 0, threshold=0.01))) == wide
    assert tuple(map(float, m2po_bounds(ones + 0.01, ones, ones, ones > 0, threshold=0.01))) == wide
    assert tuple(map(float, m2po_bounds(ones + 5.0, ones, ones, ones > 0, threshold=0.01))) == wide, "and no wider"
    low, _ = m2po_bounds(ones + 2.0, ones, ones, ones > 0, threshold=0.01)  # none small enough: keep the smallest
    assert float(low) == pytest.approx(1 - np.exp(-2.0), rel=1e-5)


def test_m2po_over_micro_batches_uses_bounds_of_the_whole():
    arrays = batch(7)[:4]
    whole = policy_loss(*arrays, kind="m2po")
    bounds = m2po_bounds(*arrays, threshold=0.01)
    halves = [
        policy_loss(*(x[s] for x in arrays), kind="m2po", ratio_bounds=bounds) for s in (slice(0, 20), slice(20, 40))
    ]
    assert float(halves[0][0] + halves[1][0]) == pytest.approx(float(whole[0]), rel=1e-5)


def test_decoupled_objective_is_weighted_by_truncated_importance():
    logprobs, behaviour, advantages, mask, _ = batch(8)
    proximal = behaviour + 0.5 * jnp.sin(jnp.arange(TOKENS))
    total, _, metrics = policy_loss(
        logprobs, behaviour, advantages, mask, proximal_logprobs=proximal,
        options=LossOptions(correction="token_truncate", correction_high=1.2),
    )  # fmt: skip
    ratio = np.exp(np.asarray(logprobs - proximal))
    weight = np.minimum(np.exp(np.asarray(proximal - behaviour)), 1.2)
    a = np.asarray(advantages)
    losses = -np.minimum(a * ratio, a * np.clip(ratio, 0.8, 1.28)) * weight
    assert float(total) == pytest.approx(losses[np.asarray(mask)].sum(), rel=1e-5)
    assert float(metrics["correction_weight"]) == pytest.approx(weight[np.asarray(mask)].sum(), rel=1e-5)
    with pytest.raises(ValueError, match="needs `proximal_logprobs`"):
        policy_loss(logprobs, behaviour, advantages, mask, options=LossOptions(correction="token_truncate"))


@pytest.mark.parametrize(
    ("correction", "low", "high", "expected"),
    [
        ("token_truncate", 0.0, 2.0, [0.5, 2.0, 1.0, 1.0]),
        ("token_clamp", 0.8, 2.0, [0.8, 2.0, 1.0, 1.0]),
        ("token_mask", 0.6, 2.0, [0.0, 0.0, 1.0, 1.0]),
        ("token_mask", 0.4, 2.0, [0.5, 0.0, 1.0, 1.0]),
        ("sequence_truncate", 0.0, 1.5, [1.5, 1.5, 1.0, 1.0]),
        ("sequence_mask", 0.9, 1.1, [0.0, 0.0, 1.0, 1.0]),
        ("sequence_geometric_mask", 0.9, 1.5, [1.0, 1.0, 1.0, 1.0]),
        ("sequence_geometric_mask", 0.9, 1.3, [0.0, 0.0, 1.0, 1.0]),
        ("sequence_outlier_mask", 0.1, 3.0, [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_corrections(correction, low, high, expected):
    log_ratio = jnp.log(jnp.array([0.5, 4.0, 1.0, 1.0]))
    weights = correction_weights(
        log_ratio, jnp.ones(4, bool), correction=correction, low=low, high=high, sequences=jnp.array([0, 0, 1, 1]),
        sequence_count=2,
    )  # fmt: skip
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_mask_without_proximal_log_probs_only_says_which_tokens_count():
    """By pi / mu; the objective has that ratio already, and what is masked stays in the denominator."""
    log_ratio = jnp.log(jnp.array([0.4, 1.0, 1.5, 3.0]))
    advantages = jnp.array([1.0, 2.0, -4.0, 8.0])
    options = LossOptions(correction="token_mask", correction_low=0.5, correction_high=2.0)
    total, denominator, sums = policy_loss(
        log_ratio - 5.0, jnp.full(4, -5.0), advantages, jnp.ones(4, bool), kind="importance", options=options
    )
    assert float(total) == pytest.approx(-(2.0 * 1.0 - 4.0 * 1.5), rel=1e-5)
    assert float(denominator) == 4 and float(sums["correction_weight"]) == 2


def test_mismatch_is_zero_only_where_both_agree():
    ours, theirs = jnp.log(jnp.array([0.5, 0.3, 0.9])), jnp.log(jnp.array([0.5, 0.2, jnp.nan]))
    metrics = mismatch_metrics(ours, theirs, jnp.array([True, True, False]))
    ratio = 0.3 / 0.2
    assert float(metrics["k1"]) == pytest.approx(-np.log(ratio), rel=1e-5)
    assert float(metrics["k3"]) == pytest.approx(ratio - 1 - np.log(ratio), rel=1e-4)
    assert float(metrics["max"]) == pytest.approx(np.log(ratio), rel=1e-5)
    swapped = mismatch_metrics(theirs, ours, jnp.array([True, True, False]))  # ours are the less likely ones
    assert float(metrics["abs"]) == float(swapped["abs"]) == pytest.approx(np.log(ratio), rel=1e-5)
    assert float(swapped["max"]) == float(metrics["max"]) and float(swapped["k1"]) == -float(metrics["k1"])
    assert float(metrics["tokens"]) == 2
    same = mismatch_metrics(ours, ours, jnp.ones(3, bool))
    assert float(same["k3"]) == float(same["max"]) == 0


def test_the_mismatch_of_sequences_adds_up_to_that_of_all_but_for_its_bound():
    rng = np.random.default_rng(0)
    ours, theirs = jnp.log(jnp.array(rng.uniform(0.1, 1.0, (2, 3, 8))))
    mask, sequences = jnp.array(rng.random((3, 8)) < 0.7), jnp.array(rng.integers(0, 5, (3, 8)))
    sums, tokens = mismatch_of_sequences(ours, theirs, mask, sequences, 6)
    whole = mismatch_metrics(ours, theirs, mask)
    assert float(sums.sum()) == pytest.approx(float(whole["k3"]), rel=1e-5)
    assert tokens.tolist() == [int((mask & (sequences == number)).sum()) for number in range(6)]
    absurd = jnp.full((1, 2), -20.0)  # sampled against all odds, by the engine's own word
    sums, _ = mismatch_of_sequences(jnp.zeros((1, 2)), absurd, jnp.array([[True, False]]), jnp.zeros((1, 2), int), 1)
    assert sums.tolist() == [10.0]


def test_aggregates_are_sums_and_denominators():
    values = jnp.array([1.0, 3.0, 5.0])
    ids = {"sequences": jnp.array([0, 0, 1]), "sequence_count": 2}
    everything = jnp.ones(3, bool)
    expected = {"token_mean": (9, 3), "sequence_mean_token_mean": (7, 2), "sequence_mean_token_sum": (9, 2)}
    for name, (total, denominator) in expected.items():
        got = aggregate(values, everything, aggregation=name, **ids)  # pyright: ignore[reportArgumentType]
        assert tuple(map(float, got)) == (total, denominator)
    got = aggregate(values, everything, aggregation="constant", sequence_tokens=4.0, **ids)
    assert tuple(map(float, got)) == (9, 8)


def test_a_trajectory_counts_once_however_its_tokens_are_spread():
    """Two trajectories of four and two tokens: the mean of their means, summed up over any split of the tokens."""
    values, lengths = jnp.array([1.0, 3.0, 5.0, 7.0, 2.0, 4.0]), jnp.array([4, 4, 4, 4, 2, 2])
    for mask in (jnp.array([True] * 6), jnp.array([True, False, True, False, True, False])):
        parts = [
            aggregate(values, part, aggregation="trajectory_mean_token_mean", trajectory_tokens=lengths)
            for part in (mask, ~mask)
        ]
        total, denominator = (float(sum(column)) for column in zip(*parts, strict=True))
        assert (total, denominator) == (4.0 + 3.0, 2.0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pop", {}, "config.loss.kind is 'pop' .did you mean 'ppo'"),
        ("ppo", {"clip_hihg": 0.2}, "clip_hihg is no option of 'ppo' .did you mean 'clip_high'"),
        ("ppo", {"tau_positive": 1.0}, "belongs to sapo"),
        ("ppo", {"clip_low": -0.1}, "must be at least 0 and at most 1"),
        ("ppo", {"clip_low": "0.2"}, "give a number"),
        ("ppo", {"dual_clip": 0.5}, "must be above 1"),
        ("ppo", {"aggregation": "tokens_mean"}, "did you mean 'token_mean'"),
        ("ppo", {"aggregation": "constant"}, "set config.loss.options.sequence_tokens"),
        ("ppo", {"correction": "token_mask", "correction_low": 3.0}, "must be below correction_high"),
        ("ppo", {"correction_high": 3.0}, "correction_high is 3.0, which is read only where correction is another"),
        ("ppo", {"sequence_tokens": 9.0}, "sequence_tokens is 9.0, which is read only where aggregation is 'constant'"),
        ("sapo", {"tau_negative": 0}, "must be positive"),
    ],
)
def test_bad_options_are_refused(kind, options, message):
    with pytest.raises(LossError, match=message):
        check_loss_options(kind, options)


def test_good_options_pass():
    for kind in typing.get_args(Kind):
        check_loss_options(kind, {"clip_low": 0.2, "clip_high": 0.28})
    check_loss_options("ppo", {"dual_clip": None, "aggregation": "constant", "sequence_tokens": 256})
    assert LossOptions(correction="token_truncate").needs_proximal
    assert not LossOptions(correction="token_mask").needs_proximal
    assert not LossOptions().needs_proximal


def long_batch(dtype: Any) -> tuple[Any, ...]:
    """Four rows of 600 tokens: log-probabilities, the sampler's, advantages, all rounded to `dtype`, and the mask."""
    random = np.random.default_rng(0)
    logprobs = -random.exponential(size=(4, 600))
    behaviour = logprobs - 0.1 * random.normal(size=logprobs.shape)
    rounded = (jnp.asarray(x, dtype) for x in (logprobs, behaviour, random.normal(size=logprobs.shape)))
    return *rounded, jnp.ones(logprobs.shape, bool)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ppo", {"aggregation": "sequence_mean_token_mean"}),
        ("gspo", {}),
        ("cross_entropy", {"aggregation": "sequence_mean_token_sum"}),
        ("ppo", {"correction": "sequence_geometric_mask"}),
        ("m2po", {}),
    ],
)
def test_numbers_of_16_bits_are_not_added_up_in_16_bits(dtype, kind, options):
    """bfloat16 counts to 256: longer sequences were divided by that."""
    *narrow, mask = long_batch(dtype)

    def mean(logprobs: jax.Array, *rest: jax.Array) -> jax.Array:
        total, denominator, _ = policy_loss(logprobs, *rest, kind=kind, options=LossOptions(**options))
        return total / denominator

    wide = [x.astype(jnp.float32) for x in narrow]
    (found, slope), (exact, expected) = (jax.value_and_grad(mean)(*x, mask) for x in (narrow, wide))
    assert float(found) == pytest.approx(float(exact), rel=1e-6)
    np.testing.assert_allclose(slope.astype(jnp.float32), expected, rtol=1e-2, atol=1e-7)  # rounded once, at the end


def test_a_ratio_beyond_float16_has_a_finite_gradient():
    logprobs, _, advantages, mask = long_batch(jnp.float16)

    def mean(logprobs: jax.Array) -> jax.Array:
        total, denominator, _ = policy_loss(logprobs, logprobs - 13, advantages, mask, kind="importance")
        return total / denominator

    assert jnp.isfinite(jax.grad(mean)(logprobs)).all()
    assert masked_sum(jnp.ones(131_072, jnp.float16), jnp.ones(131_072, bool)) == 131_072


def test_a_token_of_a_sequence_out_of_range_is_not_lost_in_silence():
    values, mask = jnp.ones((4, 6)), jnp.ones((4, 6), bool).at[0, 0].set(False)
    for ids in (jnp.arange(22, 26), jnp.arange(1, 5), -jnp.arange(4)):
        sequences = jnp.broadcast_to(ids[:, None], mask.shape)
        assert jnp.isnan(sequence_sums(values, mask, sequences, 4)[0]).all()
    sequences = jnp.broadcast_to(jnp.arange(4)[:, None], mask.shape).at[0, 0].set(99)  # which does not count
    np.testing.assert_array_equal(sequence_sums(values, mask, sequences, 4)[0], [5, 6, 6, 6])


# Types are checked inside tests, and so before this. A user's program checks none.
WRONG_CALLS = """
import jax.numpy as jnp
from flowjax.losses.policy import LossOptions, check_loss_options, policy_loss
tokens = jnp.arange(24.0).reshape(4, 6) / 9
mask = tokens < 2
for given in (
    {"kind": "grpo"},
    {"options": LossOptions(aggregation="token_means", sequence_tokens=10)},
    {"options": LossOptions(correction="token_maks")},
    {"advantages": jnp.ones(4)},
    {"mask": jnp.ones(6, bool)},
):
    try:
        policy_loss(tokens, **({"behaviour_logprobs": 0.9 * tokens, "advantages": tokens - 1, "mask": mask} | given))
    except ValueError as error:
        print(error)
for kind, options in (("ppo", None), (3, {})):
    try:
        check_loss_options(kind, options)
    except ValueError as error:
        print(error)
whole = tokens[:, :1] < 2
for same in ((mask, mask * 0.5, mask * 3), (jnp.broadcast_to(whole, mask.shape), whole)):
    found = [policy_loss(tokens, 0.9 * tokens, tokens - 1, each) for each in same]
    print(len({(float(total), float(count), float(of["tokens"])) for total, count, of in found}))
"""


def test_what_policy_loss_cannot_mean_is_refused_and_a_mask_counts_what_it_means():
    done = subprocess.run([sys.executable, "-c", WRONG_CALLS], capture_output=True, text=True, check=True)
    kind, aggregation, correction, advantages, mask, options, number, *distinct = done.stdout.splitlines()
    assert kind.startswith("kind is 'grpo'") and "it is one of ppo, gspo" in kind
    assert aggregation.startswith("aggregation is 'token_means' (did you mean 'token_mean'?); it is one of token_mean")
    assert correction.startswith("correction is 'token_maks' (did you mean 'token_mask'?)")
    assert advantages == "advantages has shape (4,), logprobs (4, 6): give one for each token"
    assert mask == "mask has shape (6,), logprobs (4, 6): give one for each token"
    assert options == "config.loss.options is None: give a map of options, {} for none"
    assert number.startswith("config.loss.kind is 3; it is one of ppo")
    assert distinct == ["1", "1"]


def test_the_kl_of_padding_is_zero_and_so_is_its_gradient():
    mask = jnp.array([True, False, False])
    reference = jnp.array([-2.0, jnp.nan, -jnp.inf])
    for kind in typing.get_args(KlKind):
        found = jax.value_and_grad(lambda x, kind=kind: kl_penalty(x, reference, kind, mask).sum())
        value, slope = found(jnp.array([-1.0, -1.0, -jnp.inf]))
        assert jnp.isfinite(value) and slope[0] != 0 and not slope[1:].any()
