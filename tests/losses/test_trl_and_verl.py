"""The page for users of TRL and verl: its fields and defaults are those of the code, its losses those of TRL."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from flowjax.config import default_config
from flowjax.credit import ESTIMATORS
from flowjax.dataflow.algorithms import BUILT_IN
from flowjax.losses.policy import Aggregation, Kind, LossOptions, policy_loss
from flowjax.losses.ratios import kl_penalty

PAGE = (Path(__file__).parents[2] / "docs" / "from_trl_and_verl.md").read_text()


def rows() -> Iterator[tuple[str, str]]:
    """First cell and second cell of each row that has a default's column."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            yield cells[0], cells[1]


def test_every_default_is_the_configs():
    config, stated = default_config(), 0
    for first, default in rows():
        found = re.match(r"`([\w.]+)`", first)
        assert found, first
        section, _, name = found[1].rpartition(".")
        if section == "loss.options":
            assert name in {field.name for field in fields(LossOptions)}
        if default:
            value: Any = config
            for part in found[1].split("."):
                value = value[part]
            value = value.to_dict() if isinstance(value, ConfigDict) else value
            assert ast.literal_eval(default) == value, first
            stated += 1
        elif section != "loss.options":
            assert name in config[section], first
    assert stated > 40


def test_every_name_of_an_estimator_an_objective_and_an_algorithm_exists():
    known = {"credit.name": tuple(ESTIMATORS), "loss.kind": get_args(Kind), "loss.options.aggregation": AVERAGES}
    named = [(field, name) for first, _ in rows() for field, name in re.findall(r'`([\w.]+)` = "(\w+)"', first)]
    assert {field for field, _ in named} == set(known)
    assert all(name in known[field] for field, name in named)
    for name in ("replay", "dynamic_sampling", "overlong_filter"):
        assert f"`{name}`" in PAGE and name in BUILT_IN


AVERAGES = get_args(Aggregation)
ROWS, TOKENS = 6, 9
RNG = np.random.default_rng(0)
OLD = -RNG.exponential(1.0, (ROWS, TOKENS))
NEW = np.minimum(OLD + RNG.normal(0, 0.5, OLD.shape), -1e-3)
REFERENCE = np.minimum(NEW + RNG.normal(0, 0.5, OLD.shape), -1e-3)
ADVANTAGE = RNG.normal(0, 1, (ROWS, 1)) * np.ones((ROWS, TOKENS))
MASK = np.arange(TOKENS) < RNG.integers(3, TOKENS + 1, (ROWS, 1))
EPSILON, EPSILON_HIGH, DELTA, COMPLETION = 0.2, 0.28, 1.5, 32


def ours(kind: Kind, **options: Any) -> float:
    new, old, advantage = (jnp.asarray(each, jnp.float32) for each in (NEW, OLD, ADVANTAGE))
    given = LossOptions(**options)
    total, denominator, _ = policy_loss(new, old, advantage, jnp.asarray(MASK), kind=kind, options=given)
    return float(total / denominator)


def trl(loss_type: str, *, level: str = "token", delta: float = np.inf) -> float:
    """Loss of TRL 1.16 without accumulation, from its formulas, in float64."""
    log_ratio = NEW - OLD
    if level == "sequence":
        log_ratio = (log_ratio * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True) * np.ones_like(OLD)
    ratio = np.exp(log_ratio)
    if loss_type == "cispo":
        loss = -np.minimum(ratio, 1 + EPSILON_HIGH) * ADVANTAGE * NEW  # its epsilon_high is the bound itself
    elif loss_type == "sapo":
        steepness = np.where(ADVANTAGE > 0, 1.0, 1.05)
        loss = -ADVANTAGE * 4 / steepness / (1 + np.exp(-steepness * (ratio - 1)))
    else:
        clipped = np.clip(ratio, 1 - EPSILON, 1 + EPSILON_HIGH)
        loss = -np.minimum(np.minimum(ratio, delta) * ADVANTAGE, clipped * ADVANTAGE)
    if loss_type in ("grpo", "sapo"):
        return float(((loss * MASK).sum(1) / MASK.sum(1)).mean())
    return float((loss * MASK).sum() / (ROWS * COMPLETION if loss_type == "dr_grpo" else MASK.sum()))


BOUNDS = {"clip_low": EPSILON, "clip_high": EPSILON_HIGH}


@pytest.mark.parametrize(
    ("loss_type", "theirs", "kind", "options"),
    [
        ("dapo", {}, "ppo", BOUNDS),
        ("dapo", {"delta": DELTA}, "ppo", {**BOUNDS, "dual_clip": DELTA}),
        ("grpo", {}, "ppo", {**BOUNDS, "aggregation": "sequence_mean_token_mean"}),
        ("dr_grpo", {}, "ppo", {**BOUNDS, "aggregation": "constant", "sequence_tokens": float(COMPLETION)}),
        ("grpo", {"level": "sequence"}, "gspo", BOUNDS),
        ("cispo", {}, "cispo", {"clip_low": 1.0, "clip_high": EPSILON_HIGH}),
        ("sapo", {}, "sapo", {"aggregation": "sequence_mean_token_mean"}),
    ],
)
def test_a_loss_is_trls_of_the_same_row(loss_type: str, theirs: dict[str, Any], kind: Kind, options: dict[str, Any]):
    assert ours(kind, **options) == pytest.approx(trl(loss_type, **theirs), abs=1e-6)


def test_the_kl_is_trls_without_its_weight():
    d = REFERENCE - NEW
    found = kl_penalty(jnp.asarray(NEW, jnp.float32), jnp.asarray(REFERENCE, jnp.float32), "k3")
    np.testing.assert_allclose(found, np.exp(d) - d - 1, rtol=1e-4, atol=1e-5)
