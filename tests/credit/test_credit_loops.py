"""Jitted estimators equal plain loops over turns, on the benchmark's random worlds."""

import numpy as np
import pytest

from flowjax.credit.estimators import ESTIMATORS, estimate
from flowjax.credit.table import table_from_columns
from tests.benchmarks.credit import as_turns, random_turns
from tests.benchmarks.credit_loops import LOOPS


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_to_the_loop(name):
    columns = random_turns(5, 6, 7, states=9)
    columns["score"] = columns["score"] + 0.07 * (columns["trajectory"] % 6)  # no ties
    got = np.asarray(estimate(table_from_columns(columns), name))[: len(columns["group"])]
    expected = LOOPS[name](as_turns(columns))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected).max() > 0.05
