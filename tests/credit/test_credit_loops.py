"""Jitted estimators equal plain loops over turns, on the benchmark's random worlds."""

import numpy as np
import pytest
from credit_tables import Path, paths_table

from flowjax.credit.estimators import ESTIMATORS, estimate
from flowjax.credit.rewardflow import reference_compatible
from flowjax.credit.table import columns_of, table_from_columns
from tests.benchmarks import credit_loops
from tests.benchmarks.credit import as_turns, random_turns


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_to_the_loop(name):
    columns = random_turns(5, 6, 7, states=9)
    columns["score"] = columns["score"] + 0.07 * (columns["trajectory"] % 6)  # no ties
    got = np.asarray(estimate(table_from_columns(columns), name))[: len(columns["group"])]
    expected = getattr(credit_loops, name)(as_turns(columns))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected).max() > 0.05


def test_loop_with_a_fixed_number_of_sweeps_is_the_same():
    turns = as_turns(random_turns(3, 4, 6, states=7))
    assert credit_loops.rewardflow(turns) == credit_loops.rewardflow(turns, sweeps=50)


@pytest.mark.parametrize("seed", range(6))
def test_reference_compatible_is_the_published_computation(seed):
    """Random walks with costs, self-loops, unequal lengths, shared endings and states first seen with other rewards."""
    rng = np.random.default_rng(seed)
    paths = []
    for group in range(4):
        for _ in range(4):
            turns = int(rng.integers(1, 9))
            rewards = rng.choice([-0.1, 0.0, 0.9, -1.1, 10.9], size=turns, p=[0.5, 0.3, 0.1, 0.05, 0.05])
            states, valid = rng.integers(0, 6, size=turns + 1), rng.random(turns) < 0.8
            paths.append(Path(states.tolist(), rewards.tolist(), bool(rng.random() < 0.5), group, valid=valid.tolist()))
    table = paths_table(paths)
    turns = sum(len(path.rewards) for path in paths)
    names = ("group", "trajectory", "step", "state", "next_state", "reward", "score", "terminal", "valid")
    columns = columns_of(table)
    expected = credit_loops.rewardflow_published(
        as_turns({name: columns[name][:turns] for name in names}), invalid_penalty=0.1
    )
    got = estimate(table, "rewardflow", gamma=0.9, invalid_penalty=0.1, **reference_compatible())
    np.testing.assert_allclose(np.asarray(got)[:turns], expected, rtol=1e-4, atol=1e-5)
