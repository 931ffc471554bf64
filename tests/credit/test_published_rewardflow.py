"""The published form: golden values of its own functions, and the faults that it keeps."""

import numpy as np
import pytest
from credit_tables import Path, paths_table

from flowjax.credit.estimators import estimate
from flowjax.credit.table import columns_of
from flowjax.published.credit import published_values
from tests.benchmarks import credit_loops
from tests.benchmarks.credit import as_turns

LONGER = Path([20, 21, 22, 23, 24, 25, 26, 27], [0.0] * 7, terminal=False, group=1)


def values_and_credit(paths: list[Path], *, gamma: float = 0.9, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values before and after each turn and their difference, `LONGER` being the rollout's longest episode."""
    found = published_values(paths_table([*paths, LONGER]), gamma=gamma, **options)
    turns = sum(len(path.rewards) for path in paths)
    before, after = (np.asarray(column)[:turns] for column in found)
    return before, after, after - before


@pytest.mark.parametrize(
    ("path", "before", "last"),
    [
        (Path([0, 1, 2, 3], [0, 0, 10.0]), [7.29, 8.1, 9], 10),
        (Path([0, 1, 2, 3], [-0.1, -0.1, 10.9]), [7.9461, 8.829, 9.81], 10.9),
        (Path([0, 1, 2, 3], [-0.1] * 3, terminal=False), [0, -0.081, -0.09], -0.1),
        (Path([0, 1, 2, 1], [-0.1] * 3, terminal=False), [0, 0, 0], 0),
    ],
)
def test_golden_values(path, before, last):
    found, after, _ = values_and_credit([path])
    np.testing.assert_allclose([*found, after[-1]], [*before, last], rtol=1e-6, atol=1e-30)


def test_golden_credit_of_sokoban():
    _, _, credit = values_and_credit([Path([0, 1, 2, 3], [-0.1, -0.1, 10.9])])
    np.testing.assert_allclose(credit, [0.8829, 0.981, 1.09], rtol=1e-5)


def test_a_click_on_an_option_seems_to_lead_nowhere():
    """WebShop: the chosen option is in the graph (state 3 after state 2), but values are looked up without it."""
    path = Path([0, 1, 2, 3, 4], [0, 0, 0, 10.0], lookup=[0, 1, 2, 2])
    np.testing.assert_allclose(values_and_credit([path])[2], [0.729, 0.81, 0, 1.9], rtol=1e-5, atol=1e-6)


def test_the_same_first_action_of_alfworld_earns_opposite_credit():
    """Keys pair an observation with the inventory of one action later, so the second states differ."""
    won = Path([0, 1, 2, 3, 4, 5, 6], [0.0] * 5 + [10.0])
    lost = Path([0, 7, 8, 9, 10, 11], [0.0] * 5, terminal=False)
    credit = values_and_credit([won, lost])[2]
    np.testing.assert_allclose(credit[:6], [0.590, 0.656, 0.729, 0.81, 0.9, 1.0], atol=6e-4)
    np.testing.assert_allclose(credit[6:9], [-5.314, 0, 0], atol=6e-4)


@pytest.mark.parametrize(("rewards", "credit"), [([1.0, 0.0], [0.09, 0.1] * 2), ([0.0, 1.0], [0.0] * 4)])
def test_answers_of_search_depend_on_their_order(rewards, credit):
    """Right and wrong answers end in one state, whose reward is the one seen first."""
    paths = [Path([0, 1, 2], [0, reward]) for reward in rewards]
    np.testing.assert_allclose(values_and_credit(paths)[2], credit, rtol=1e-5, atol=1e-7)


def test_success_at_the_last_allowed_step_is_not_in_the_graph():
    table = paths_table([Path([0, 1, 2, 3, 4], [0, 0, 0, 10.0])])
    found = published_values(table, gamma=0.9)
    assert not np.asarray(found.before).any()
    credit = estimate(table, "published.rewardflow", gamma=0.9, step_weight=1.0)
    assert float(credit[3]) == pytest.approx(0.0)  # 10 for itself, less itself as its own mean


def test_edges_walked_both_ways_reach_states_behind_the_start():
    paths = [Path([0, 1], [10.0]), Path([0, 2, 3], [0, 0], terminal=False)]
    np.testing.assert_allclose(values_and_credit(paths)[0], [9, 9, 0], rtol=1e-6)
    np.testing.assert_allclose(values_and_credit(paths, edge_direction="bidirectional")[0], [9, 9, 8.1], rtol=1e-6)


def test_a_way_longer_than_the_published_sweeps_is_worth_nothing():
    turns = 1100
    table = paths_table([Path([*range(turns), turns], [0.0] * (turns - 1) + [1.0]), Path([0] * 1201, [0.0] * 1200)])
    before = np.asarray(published_values(table, gamma=0.999).before)
    assert before[0] == 0 < before[200]


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_the_published_loop(seed):
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
    got = estimate(table, "published.rewardflow", gamma=0.9, invalid_penalty=0.1)
    np.testing.assert_allclose(np.asarray(got)[:turns], expected, rtol=1e-4, atol=1e-5)
