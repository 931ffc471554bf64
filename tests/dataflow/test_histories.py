"""A small share of the random histories of a ledger; `python -m tests.dataflow.histories` runs as many as one likes."""

import pytest

from tests.dataflow.histories import run


@pytest.mark.parametrize("tenth", range(10))
def test_no_group_is_trained_twice_and_none_is_lost(tenth):
    for seed in range(10 * tenth, 10 * (tenth + 1)):
        run(seed)
