"""The update does not depend on how its rows are laid out: packed or not, in one micro-batch or in many."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flowjax.losses.policy import DEFAULTS, LossOptions
from flowjax.losses.ratios import m2po_bounds
from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.records import TokenRow
from flowjax.trainer.batch import pack
from flowjax.trainer.update import Objective, PolicyState, apply, first_pass, gradient_of, logprobs_of

CONFIG = nano_config(40, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=64)
LORA = Lora(rank=4, alpha=8.0, rslora=False, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def split():
    model = Decoder(CONFIG, lora=LORA, dtype=jnp.float32, remat="none", key=jax.random.key(0))
    graph, trained, frozen = nnx.split(model, LoraParam, ...)
    noise = jax.tree.map(lambda leaf: leaf + 0.05 * jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape), trained)
    return graph, noise, frozen


def rows(count: int = 12) -> list[TokenRow]:
    """Multi-turn rows of several lengths, with two sampled spans each."""
    rng = np.random.default_rng(1)
    made = []
    for index in range(count):
        length = int(rng.integers(6, 16))
        sampled = np.zeros(length, bool)
        sampled[[2, length - 2, length - 1]] = True
        tokens = rng.integers(0, 43, length).astype(np.int32)
        logprobs = np.where(sampled, rng.normal(-3.8, 0.1, length), 0).astype(np.float32)
        advantages = np.where(sampled, rng.normal(), 0).astype(np.float32)
        made.append(
            TokenRow("agent", tokens, sampled, logprobs, advantages, np.where(sampled, index % 2, -1), 5 + index)
        )
    return made


SGD = optax.sgd(1.0)


def objective_of(graph, *, options=DEFAULTS, **changes) -> Objective:
    settings = {
        "kind": "ppo",
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "temperature": 1.3,
        "chunk_tokens": 16,
    }
    dtypes = (np.dtype(np.float32),) * (2 * len(LORA.targets))
    return Objective(graph, dtypes, options=options, **(settings | changes))


def state_of(trained, frozen) -> PolicyState:
    """A state whose trained arrays may be donated."""
    return PolicyState(0, jax.tree.map(jnp.copy, trained), SGD.init(trained), frozen)


def gradient(split, *, row_tokens: int, micro_batch_rows: int, **changes):
    graph, trained, frozen = split
    objective, state, total = objective_of(graph, **changes), state_of(trained, frozen), None
    start = jax.tree.map(lambda leaf: leaf * 0.9, trained)
    batches = pack(rows(), row_tokens=row_tokens, micro_batch_rows=micro_batch_rows)
    for batch, known in zip(batches, first_pass(objective, state, batches, start=start), strict=True):
        total, _ = gradient_of(objective, state, batch, known, total=total)
    assert total is not None
    stepped, metrics = apply(SGD, state, total)
    moved = jax.tree.map(lambda before, after: before - after, trained, stepped.trained)
    return moved, jax.device_get(metrics)


def assert_close(one, other, *, atol=1e-5):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4)


@pytest.mark.parametrize(("row_tokens", "micro_batch_rows"), [(64, 2), (16, 3)])
def test_layout_changes_neither_gradient_nor_metrics(split, row_tokens, micro_batch_rows):
    expected = gradient(split, row_tokens=16, micro_batch_rows=16)  # one micro-batch, one sequence a row
    got = gradient(split, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows)
    assert_close(got[0], expected[0])
    for name, value in expected[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert expected[1]["gradient_norm"] > 1e-3


def test_leaves_that_stay_have_no_gradient_and_no_part_in_its_norm(split):
    sizes = {"row_tokens": 16, "micro_batch_rows": 16}
    (whole, _), (part, metrics) = (gradient(split, still=still, **sizes) for still in (frozenset(), frozenset({0, 3})))
    expected = [jnp.zeros_like(x) if i in (0, 3) else x for i, x in enumerate(jax.tree.leaves(whole))]
    assert_close(part, expected)
    assert metrics["gradient_norm"] == pytest.approx(float(optax.global_norm(expected)), rel=1e-4)


OBJECTIVES = [
    ("m2po", {"m2_threshold": 0.001}),
    ("ppo", {"correction": "token_truncate", "correction_high": 1.01}),
    ("gspo", {"clip_low": 0.01, "clip_high": 0.01}),
    ("ppo", {"aggregation": "trajectory_mean_token_mean"}),
]


@pytest.mark.parametrize(("kind", "options"), OBJECTIVES)
def test_layout_does_not_change_objectives_that_look_beyond_a_token(split, kind, options):
    changes = {"kind": kind, "options": LossOptions(**options), "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    expected = gradient(split, row_tokens=16, micro_batch_rows=16, **changes)
    got = gradient(split, row_tokens=64, micro_batch_rows=1, **changes)
    assert_close(got[0], expected[0])
    np.testing.assert_allclose(got[1]["loss"], expected[1]["loss"], rtol=1e-4)


@pytest.mark.parametrize("correction", ["none", "token_mask", "token_truncate"])
def test_m2po_is_bounded_by_the_ratio_that_it_clips(split, correction):
    graph, trained, frozen = split
    options = LossOptions(m2_threshold=1e-6, correction=correction)
    objective, state = objective_of(graph, kind="m2po", options=options), state_of(trained, frozen)
    (batch,) = pack(rows(), row_tokens=64, micro_batch_rows=16)
    start = jax.tree.map(lambda leaf: leaf * 0.9, trained)
    at_start = logprobs_of(objective, state_of(start, frozen), batch)
    for given, proximal in ((start, at_start), (None, logprobs_of(objective, state, batch))):
        old = proximal if options.needs_proximal else batch.behaviour_logprobs
        moved = map(jnp.asarray, (logprobs_of(objective, state, batch), old, batch.advantages, batch.mask))
        (known,) = first_pass(objective, state, [batch], start=given)
        assert known.ratio_bounds is not None
        np.testing.assert_allclose(known.ratio_bounds, m2po_bounds(*moved, threshold=1e-6), rtol=1e-5)
        assert (known.proximal_logprobs is not None) == (options.needs_proximal and given is not None)


@pytest.mark.parametrize("chunk_tokens", [5])
def test_chunks_of_log_probs_change_nothing(split, chunk_tokens):
    expected = gradient(split, row_tokens=16, micro_batch_rows=16)
    got = gradient(split, row_tokens=16, micro_batch_rows=16, chunk_tokens=chunk_tokens)
    assert_close(got[0], expected[0])


def test_log_probs_match_an_unpacked_full_softmax(split):
    graph, trained, frozen = split
    model, objective, state = nnx.merge(graph, trained, frozen), objective_of(graph), state_of(trained, frozen)
    for batch in pack(rows(4), row_tokens=64, micro_batch_rows=2):
        got = np.asarray(logprobs_of(objective, state, batch))
        for index in range(len(batch.tokens)):
            for segment in range(1, batch.segments[index].max() + 1):
                where = np.flatnonzero(batch.segments[index] == segment)
                tokens = jnp.asarray(batch.tokens[index, where])[None]
                ones = jnp.ones_like(tokens)
                hidden = model(tokens, jnp.arange(len(where))[None], ones)
                logits = np.asarray((hidden @ model.head())[0] / 1.3, np.float64)
                expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                for column in np.flatnonzero(batch.mask[index] & np.isin(batch.places[index], where)):
                    place = batch.places[index, column] - where[0]
                    np.testing.assert_allclose(
                        got[index, column], expected[place - 1, int(tokens[0, place])], atol=1e-5
                    )


def test_a_non_finite_gradient_changes_nothing_and_is_counted(split):
    graph, trained, frozen = split
    broken = rows(3)
    broken[0].advantages[broken[0].sampled] = np.nan
    state = state_of(trained, frozen)
    total, _ = gradient_of(objective_of(graph), state, pack(broken, row_tokens=16, micro_batch_rows=4)[0])
    stepped, metrics = apply(SGD, state, total)
    assert metrics["skipped"] == 1.0
    assert_close(stepped.trained, trained, atol=0)


def test_the_base_is_the_reference_policy(split):
    """With the adapter's B at zero the policy is the base: its KL to the reference is zero, with noise it is not."""
    graph, trained, frozen = split
    zeros = jax.tree.map(jnp.zeros_like, trained)
    batch = pack(rows(), row_tokens=16, micro_batch_rows=16)[0]
    kl = {
        name: float(gradient_of(objective_of(graph), state_of(arrays, frozen), batch)[0].sums["reference_kl"])
        for name, arrays in (("base", zeros), ("noisy", trained))
    }
    assert kl["base"] == pytest.approx(0.0, abs=1e-6)
    assert kl["noisy"] > 1e-4


def written_out(graph, arrays, frozen, batch, scale: float = 1.0) -> jax.Array:
    """[row, sampled, token] Log-probs over the whole vocabulary, with the adapter scaled."""
    model = nnx.merge(graph, jax.tree.map(lambda leaf: scale * leaf, arrays), frozen)
    hidden = model(batch.tokens, batch.positions, batch.segments)
    before = jnp.take_along_axis(hidden, batch.places[..., None] - 1, axis=1)
    return jax.nn.log_softmax((before @ model.head()) / 1.3)


@pytest.mark.parametrize(
    ("term", "aggregation"),
    [("entropy", None), ("kl", None), ("entropy", "trajectory_mean_token_mean"), ("kl", "sequence_mean_token_mean")],
)
def test_what_a_term_adds_to_the_gradient_is_that_of_its_formula(split, term, aggregation):
    """The entropy of the policy, and its k3 KL to the base, summed over the sampled tokens as the loss is: of a
    sequence or trajectory each has its share."""
    graph, trained, frozen = split
    trained = jax.tree.map(lambda leaf: 4 * leaf, trained)  # further from the base
    batch = pack(rows(3), row_tokens=16, micro_batch_rows=4)[0]
    sampled = jnp.take_along_axis(jnp.asarray(batch.tokens), batch.places, axis=1)[..., None]
    shares = {None: 1.0, "sequence_mean_token_mean": 1 / 3, "trajectory_mean_token_mean": 1 / batch.trajectory_tokens}

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def formula(arrays):
        values = per_token(arrays)
        return jnp.sum(shares[aggregation] * values, where=batch.mask), jnp.sum(values, where=batch.mask)

    def per_token(arrays):
        ours = written_out(graph, arrays, frozen, batch)
        if term == "entropy":
            return -jnp.sum(jnp.exp(ours) * ours, axis=-1)
        above = jnp.take_along_axis(ours - written_out(graph, arrays, frozen, batch, 0.0), sampled, axis=-1)[..., 0]
        return jnp.exp(-above) - 1 + above

    options = LossOptions(aggregation=aggregation)
    none: dict[str, Any] = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    half: dict[str, Any] = {**none, f"{term}_coefficient": 0.5}
    parts = [
        gradient_of(objective_of(graph, options=options, **coefficients), state_of(trained, frozen), batch)[0]
        for coefficients in (half, none)
    ]
    added = jax.tree.map(lambda with_term, without: with_term - without, parts[0].gradient, parts[1].gradient)
    (_, value), wanted = formula(trained)
    sign = -1 if term == "entropy" else 1  # entropy is sought, distance to the base avoided
    assert_close(added, jax.tree.map(lambda leaf: sign * 0.5 * leaf, wanted), atol=2e-4)
    assert optax.global_norm(wanted) > 0.01
    np.testing.assert_allclose(parts[0].sums["entropy" if term == "entropy" else "reference_kl"], value, rtol=1e-3)


def test_the_loss_is_divided_by_what_it_is_averaged_over_and_metrics_by_tokens(split):
    graph, trained, frozen = split
    objective = objective_of(graph, options=LossOptions(aggregation="sequence_mean_token_sum"))
    batch = pack(rows(4), row_tokens=16, micro_batch_rows=4)[0]
    total, _ = gradient_of(objective, state_of(trained, frozen), batch)
    sums = {name: float(value) for name, value in total.sums.items()}
    _, metrics = apply(SGD, state_of(trained, frozen), total)
    assert (sums["denominator"], sums["tokens"], metrics["trained_tokens"]) == (4, 12, 12)
    assert metrics["loss"] == pytest.approx(sums["loss"] / 4, rel=1e-5)
    for name in ("ratio", "clipped", "policy_kl", "entropy", "reference_kl"):
        assert metrics[name] == pytest.approx(sums[name] / 12, rel=1e-5), name


def test_an_update_makes_praised_tokens_likelier(split):
    graph, trained, frozen = split
    objective = objective_of(graph, kl_coefficient=0.0, entropy_coefficient=0.0)
    batch = pack(rows(3), row_tokens=16, micro_batch_rows=4)[0]
    praise = np.where(batch.sequences % 2, 1.0, -1.0).astype(np.float32) * batch.mask
    before = logprobs_of(objective, state_of(trained, frozen), batch)
    batch = replace(batch, advantages=praise, behaviour_logprobs=np.asarray(before))  # the policy itself has sampled
    total, _ = gradient_of(objective, state_of(trained, frozen), batch)
    optimizer = optax.sgd(0.01)
    state = replace(state_of(trained, frozen), optimizer=optimizer.init(trained))
    stepped, metrics = apply(optimizer, state, total)
    gained = float(np.sum(praise * np.asarray(logprobs_of(objective, stepped, batch) - before)))
    # To first order the step's length, rate times gradient, times the slope, for the sum over tokens.
    assert gained == pytest.approx(0.01 * float(metrics["gradient_norm"]) ** 2 * batch.mask.sum(), rel=0.1)
    assert gained > 1e-4
