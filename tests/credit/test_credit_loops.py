"""Jitted estimators equal plain loops over turns, on the benchmark's random worlds."""

import numpy as np
import pytest

from flowjax.credit.estimators import ESTIMATORS, estimate
from flowjax.credit.table import table_from_columns
from tests.benchmarks.credit import as_turns, random_turns
from tests.benchmarks.credit_loops import LOOPS

OPTIONS = {
    "gigpo": [{"invalid_penalty": 0.3}, {"rewards": "score", "norm": "mean_std"}],
    "rewardflow": [{"invalid_penalty": 0.3}, {"rewards": "reward"}],
    "gae": [{"rewards": "reward"}],
    "discounted_return": [{"rewards": "reward"}],
    "reinforce_plus_plus": [{"rewards": "reward", "gamma": 0.9}],
    "best_of_group": [{"norm": "mean_std"}],
    "published.gigpo": [{"invalid_penalty": 0.3}],
}
CASES = [(name, options) for name in sorted(ESTIMATORS) for options in ({}, *OPTIONS.get(name, ()))]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equal_to_the_loop(name, options):
    columns = random_turns(5, 6, 7, states=9)
    rng = np.random.default_rng(1)
    columns["score"] = columns["score"] + 0.07 * (columns["trajectory"] % 6)  # no ties
    columns["valid"] = rng.random(len(columns["group"])) < 0.8
    columns["reward"] = columns["reward"] / 10 + rng.integers(0, 3, len(columns["group"])) / 10  # that are no scores
    got = np.asarray(estimate(table_from_columns(columns), name, **options))[: len(columns["group"])]
    expected = LOOPS[name](as_turns(columns), **options)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected).max() > 0.05
