"""Properties that hold for any table: nothing depends on names or order, sums telescope, groups sum to zero."""

import numpy as np
import pytest
from credit_tables import Path, paths_table
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.credit.estimators import ESTIMATORS, estimate, state_values, step_credit

ROWS = 128  # all tables of this file share one shape, so that each estimator compiles once
FEW = settings(max_examples=25, deadline=None)


@st.composite
def groups_of_paths(draw, *, groups: int = 3, success: bool | None = None) -> list[Path]:
    paths = []
    for group in range(draw(st.integers(1, groups))):
        for _ in range(draw(st.integers(1, 4))):
            turns = draw(st.integers(1, 7))
            states = draw(st.lists(st.integers(0, 6), min_size=turns, max_size=turns))
            wins = draw(st.booleans()) if success is None else success
            ends = 100 if wins else draw(st.sampled_from([101, 102, states[-1]]))
            rewards = [0.0] * (turns - 1) + [float(wins)]
            valid = draw(st.lists(st.booleans(), min_size=turns, max_size=turns))
            mask = draw(st.integers(0, 5)) > 0
            paths.append(Path([*states, ends], rewards, ends > 99, group, valid=valid, mask=mask))
    return paths


def by_path(paths: list[Path], advantages) -> list[np.ndarray]:
    ends = np.cumsum([len(path.rewards) for path in paths])
    return np.split(np.asarray(advantages)[: ends[-1]], ends[:-1])


def options_of(name: str) -> dict:
    return {"step_weight": 0.7, "invalid_penalty": 0.1} if name in ("rewardflow", "gigpo") else {}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@FEW
@given(data=st.data())
def test_order_of_trajectories_changes_nothing(name, data):
    paths = data.draw(groups_of_paths())
    order = data.draw(st.permutations(range(len(paths))))
    first = by_path(paths, estimate(paths_table(paths, pad_to=ROWS), name, **options_of(name)))
    shuffled = [paths[index] for index in order]
    second = by_path(shuffled, estimate(paths_table(shuffled, pad_to=ROWS), name, **options_of(name)))
    for position, index in enumerate(order):
        np.testing.assert_allclose(second[position], first[index], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["gigpo", "rewardflow"])
@FEW
@given(data=st.data())
def test_names_of_states_change_nothing(name, data):
    paths = data.draw(groups_of_paths())
    states = sorted({s for path in paths for s in path.states})
    names = dict(zip(states, data.draw(st.permutations(range(len(states)))), strict=True))
    renamed = [
        Path([names[s] for s in p.states], p.rewards, p.terminal, p.group, valid=p.valid, mask=p.mask) for p in paths
    ]
    first, second = (estimate(paths_table(p, pad_to=ROWS), name) for p in (paths, renamed))
    np.testing.assert_allclose(first, second, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@FEW
@given(paths=groups_of_paths())
def test_padding_and_failed_members_get_nothing_and_change_nothing(name, paths):
    counted = [path for path in paths if path.mask]
    everything = np.asarray(estimate(paths_table(paths, pad_to=ROWS), name))
    for path, advantages in zip(paths, by_path(paths, everything), strict=True):
        assert path.mask or not advantages.any()
    assert not everything[sum(len(path.rewards) for path in paths) :].any()
    if counted:
        kept = [a for path, a in zip(paths, by_path(paths, everything), strict=True) if path.mask]
        alone = by_path(counted, estimate(paths_table(counted, pad_to=ROWS), name))
        for one, other in zip(kept, alone, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4, rtol=1e-3)


@FEW
@given(paths=groups_of_paths())
def test_step_credit_telescopes(paths):
    gamma = 0.9
    table = paths_table(paths, pad_to=ROWS)
    found = state_values(table, gamma=gamma)
    arrays = (by_path(paths, column) for column in (step_credit(table, gamma=gamma), *found))
    for path, credit, before, after, earned in zip(paths, *arrays, strict=True):
        if path.mask:
            powers = gamma ** np.arange(len(credit))
            expected = powers[-1] * earned[-1] - before[0]  # the trajectory's discounted return less its value
            assert (powers * credit).sum() == pytest.approx(expected, abs=1e-5)
            np.testing.assert_allclose(before[1:], after[:-1], atol=1e-6)
            assert after[-1] == 0


@FEW
@given(paths=groups_of_paths())
def test_groups_sum_to_zero(paths):
    table = paths_table(paths, pad_to=ROWS)
    group, state = np.asarray(table.group), np.asarray(table.state)
    mask = np.asarray(table.mask)
    once = mask & (np.asarray(table.step) == 0)
    for name, rows in (
        ("grpo", once),
        ("dr_grpo", once),
        ("rloo", once),
        ("published.grpo", mask),
        ("published.rloo", mask),
    ):
        advantage = np.asarray(estimate(table, name, **({"invalid_penalty": 0.0} if rows is mask else {})))
        for index in np.unique(group):
            alone = rows is mask and (mask & (group == index)).sum() == 1  # the published form keeps its score
            assert alone or abs(advantage[rows & (group == index)].sum()) < 1e-3
    credit = np.asarray(step_credit(table))
    for index in np.unique(state):
        assert abs(credit[mask & (state == index)].sum()) < 1e-4


@FEW
@given(paths=groups_of_paths(groups=1, success=True))
def test_on_a_chain_the_value_is_the_discounted_return(paths):
    chain = Path([*range(len(paths[0].rewards)), 100], paths[0].rewards)
    table = paths_table([chain], pad_to=ROWS)
    turns = len(chain.rewards)
    returns = [0.9 ** (turns - 1 - step) for step in range(turns)]
    np.testing.assert_allclose(state_values(table, gamma=0.9).before[:turns], returns, rtol=1e-5)
