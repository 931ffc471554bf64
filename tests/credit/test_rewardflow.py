"""Credit from state values: the policy's own values, solved independently, and when doing nothing pays nothing."""

import numpy as np
import pytest
from credit_tables import Path, paths_table
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.credit.estimators import estimate, rewardflow, state_values, step_credit
from flowjax.credit.table import TurnTable, columns_of, table_from_columns
from flowjax.published.credit import rewardflow as published

ROWS = 1024
MEMBERS = 8


def solved_values(table: TurnTable, *, gamma: float) -> np.ndarray:
    """Value of the state of each row from the linear system of the observed process, in float64."""
    columns = columns_of(table)
    rows = np.flatnonzero(columns["mask"])
    lowest = {g: min(0.0, columns["score"][rows][columns["group"][rows] == g].min()) for g in columns["group"][rows]}
    key = {row: (columns["group"][row], columns["state"][row]) for row in rows}
    index = {name: i for i, name in enumerate(dict.fromkeys(key.values()))}
    system, right = np.eye(len(index)), np.zeros(len(index))
    visits = np.bincount([index[key[row]] for row in rows], minlength=len(index))
    for row in rows:
        at, following = index[key[row]], columns["successor"][row]
        if following == row:
            right[at] += (columns["score"][row] - lowest[columns["group"][row]]) / visits[at]
        else:
            system[at, index[key[following]]] -= gamma / visits[at]
    values = np.linalg.solve(system, right)
    return np.array([values[index[key[row]]] if row in key else 0.0 for row in range(len(columns["mask"]))])


def turn_limited_worlds(rng: np.random.Generator, groups: int) -> dict[str, np.ndarray]:
    """Groups of random walks, each group in a random graph with a turn limit, one action of which changes nothing.

    An episode that reaches the goal scores 1 (or what the graph pays), one that the limit cuts scores the least.
    """
    rows: list[tuple[int, int, int, int, int, float, bool]] = []
    scores: list[float] = []
    for group in range(groups):
        states, actions, limit = int(rng.integers(2, 8)), int(rng.integers(1, 4)), int(rng.integers(1, 9))
        ways = rng.integers(states + 1, size=(states, actions))  # the last state is the goal
        staying = rng.random() * 0.9
        pays, loses = float(rng.choice([1.0, 0.3, 10.0])), float(rng.choice([0.0, -1.0]))
        for _ in range(MEMBERS):
            state, trajectory = 0, len(scores)
            for step in range(limit):
                after = state if rng.random() < staying else int(ways[state, rng.integers(actions)])
                rows.append((group, trajectory, step, state, after, 0.0, after == states))
                state = after
                if after == states:
                    break
            scores.append(pays if state == states else loses)
    names = ("group", "trajectory", "step", "state", "next_state", "reward", "terminal")
    columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    for name in ("state", "next_state"):
        columns[name] = columns[name] + 10 * columns["group"]
    both = np.unique(np.concatenate([columns["state"], columns["next_state"]]), return_inverse=True)[1]
    columns["state"], columns["next_state"] = np.split(both, 2)
    columns["score"] = np.array(scores)[columns["trajectory"]]
    columns["valid"] = columns["state"] != columns["next_state"]
    return columns


def test_a_turn_that_changes_nothing_never_pays():
    """On 10,000 random graphs with a turn limit: staying earns at most nothing, real moves at least that on average."""
    rng = np.random.default_rng(0)
    stays = 0
    for _ in range(100):
        columns = turn_limited_worlds(rng, groups=100)
        turns = len(columns["group"])
        table = table_from_columns(columns, pad_to=8192)
        step_part = np.asarray(rewardflow(table, episode_norm="none", step_weight=1.0))[:turns] - columns["score"]
        stayed = ~columns["valid"]
        assert step_part[stayed].max() <= 1e-5
        stays += stayed.sum()
        moved = columns["state"][~stayed]
        mean = np.bincount(moved, step_part[~stayed]) / np.maximum(np.bincount(moved), 1)
        assert mean.min() >= -1e-3  # rounding of deviations near zero included
    assert stays > 100_000


def test_the_last_turn_of_a_cut_episode_has_what_it_scores_above_the_states_value():
    """The example of docs/credit/rewardflow.md, for gamma 0.9: it stood still, and cost less than its sibling."""
    still, moved = Path([0, 0], [0.0], False, score=-0.1), Path([0, 1, 1], [0.0, 0.0], False, score=-0.5)
    np.testing.assert_allclose(np.asarray(step_credit(paths_table([still, moved])))[:3], [0.2, -0.2, 0.0], atol=1e-6)


def test_where_the_published_form_prefers_doing_nothing_to_trying():
    """Two siblings try another door and lose, one waits twice and then wins: its waiting is no merit of its own."""
    paths = [Path([0, 1], [0.0]), Path([0, 2], [0.0]), Path([0, 0, 0, 3], [0.0, 0.0, 1.0])]
    longer = Path([5] * 5, [0.0] * 4, terminal=False, group=1)
    table = paths_table([*paths, longer])
    then = [np.asarray(published(table, invalid_penalty=0.0, step_weight=weight)) for weight in (1.0, 0.0)]
    step_part = then[0] - then[1]
    waited, tried = [2, 3], [0, 1]
    assert step_part[waited].min() > 0 > step_part[tried].max()
    assert np.asarray(step_credit(table))[waited].max() < 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_values_solve_the_observed_process(seed, gamma):
    columns = turn_limited_worlds(np.random.default_rng(seed), groups=5)
    table = table_from_columns(columns, pad_to=ROWS)
    expected = solved_values(table, gamma=gamma)
    found = state_values(table, gamma=gamma)
    highest = max(float(np.abs(expected).max()), 1.0)
    np.testing.assert_allclose(found.before, expected, rtol=2e-3, atol=2e-4 * highest)


def test_values_of_a_path_longer_than_any_number_of_sweeps():
    """1,600 moves to success at gamma 0.999: 0.999^1599 = 0.202 at the start."""
    turns = 1600
    table = paths_table([Path([*range(turns), turns], [0.0] * (turns - 1) + [1.0])])
    before = np.asarray(state_values(table, gamma=0.999).before)[:turns]
    np.testing.assert_allclose(before, 0.999 ** np.arange(turns - 1, -1, -1), rtol=1e-4)


def test_the_move_that_leaves_the_way_is_blamed_and_the_one_after_it_is_not():
    paths = [Path([0, 1, 2], [0, 1.0]), Path([0, 1, 3, 4], [0, 0, 0.0]), Path([0, 5, 1, 2], [0, 0, 1.0])]
    credit = np.asarray(step_credit(paths_table(paths), gamma=0.9))
    # V(1) = 2/3 (two of three turns from it won), V(0) = (0.9 * 2/3 + 0.9 * 2/3 + 0.9 * 0.6) / 3
    value = (0.6 + 0.6 + 0.54) / 3
    np.testing.assert_allclose(credit[:2], [0.6 - value, 1 - 2 / 3], atol=1e-6)
    np.testing.assert_allclose(credit[2:5], [0.6 - value, -2 / 3, 0.0], atol=1e-6)
    np.testing.assert_allclose(credit[5:8], [0.54 - value, 0.0, 1 - 2 / 3], atol=1e-6)


def test_scale_and_shift_of_scores():
    """Advantages do not depend on the scale of scores, nor on where failure lies below zero."""
    rng = np.random.default_rng(3)
    paths = [Path([0, int(rng.integers(1, 4)), 9], [0, 0.0], score=float(rng.random() < 0.5)) for _ in range(12)]
    first = np.asarray(rewardflow(paths_table(paths)))

    def scored(change) -> np.ndarray:
        changed = [Path(p.states, p.rewards, score=change(p.score)) for p in paths]
        return np.asarray(rewardflow(paths_table(changed)))

    np.testing.assert_allclose(scored(lambda score: 100 * score), first, atol=1e-4)
    np.testing.assert_allclose(scored(lambda score: score - 1), first, atol=1e-4)


def test_equal_episodes_are_not_told_apart_by_rounding():
    paths = [Path([0, 1, 2, 3], [0, 0, 1.0]) for _ in range(7)]
    np.testing.assert_allclose(np.asarray(rewardflow(paths_table(paths))), 0.0, atol=1e-2)
    assert not np.asarray(rewardflow(paths_table([Path([0, 1], [0.0])] * 3))).any()


@pytest.mark.parametrize("score", [1.0, 0.7, 100.1])
@pytest.mark.parametrize(("name", "options"), [("rewardflow", {}), ("gae", {}), ("gae", {"whitened": False})])
def test_without_a_discount_ways_that_all_succeed_are_not_told_apart(name: str, options: dict, score: float):
    """Also where they come back to the same states so often that values are slow to converge."""
    rng, paths = np.random.default_rng(0), []
    for _ in range(8):
        states = [0]
        while states[-1] < 16:
            states.append(max(states[-1] + int(rng.choice([-1, 1])), 0))
        paths.append(Path(states, [0.0] * (len(states) - 2) + [score]))
    assert not np.asarray(estimate(paths_table(paths), name, gamma=1.0, **options)).any()


@pytest.mark.parametrize("name", ["rewardflow", "gae"])
@pytest.mark.parametrize("score", [0.7, 1.0, 3000.0])
def test_rounding_is_no_signal(name: str, score: float):
    """Equal scores, no state twice: values that differ from 0.9 V(s') by rounding alone earn nothing at all."""
    paths = [Path(list(range(40 * one, 40 * one + 31)), [0.0] * 29 + [score]) for one in range(8)]
    assert not np.asarray(estimate(paths_table(paths), name)).any()


def test_another_agents_turns_are_part_of_the_world():
    """Planner and actor in the same states, rewarded differently: each has values of its own, and passing on is no
    turn that changed nothing."""
    columns = {
        "group": [0, 1, 0, 1],
        "trajectory": [0, 1, 0, 1],
        "step": [0, 1, 2, 3],
        "state": [0, 0, 1, 1],
        "next_state": [0, 1, 1, 2],
        "reward": [0.0, 0.0, 0.0, 1.0],
        "score": [1.0, 0.5, 1.0, 0.5],
        "valid": [True] * 4,
        "terminal": [False, False, False, True],
    }
    table = table_from_columns({name: np.array(column) for name, column in columns.items()})
    found = state_values(table, gamma=0.9)
    np.testing.assert_allclose(np.asarray(found.before)[:4], [0.9, 0.45, 1.0, 0.5], atol=1e-6)
    np.testing.assert_allclose(np.asarray(step_credit(table))[:4], 0.0, atol=1e-6)


def test_penalty_of_an_unreadable_reply_is_its_own_turns():
    paths = [Path([0, 0, 1], [0, 1.0], valid=[False, True]), Path([0, 2, 3], [0, 0], terminal=False)]
    table = paths_table(paths)
    free, fined = (rewardflow(table, step_norm="none", invalid_penalty=c) for c in (0.0, 1.0))
    np.testing.assert_allclose(np.asarray(fined - free)[:4], [-1, 0, 0, 0], atol=1e-6)


def test_gae_between_the_temporal_difference_and_the_return():
    paths = [Path([0, 1, 2], [0, 1.0]), Path([0, 1, 3, 4], [0, 0, 0.0]), Path([0, 5, 1, 2], [0, 0, 1.0])]
    table = paths_table(paths)
    values = np.asarray(state_values(table, gamma=0.9).before)
    difference = np.asarray(estimate(table, "gae", gamma=0.9, trace=0.0, whitened=False))
    np.testing.assert_allclose(difference, step_credit(table, gamma=0.9), atol=1e-6)
    returns = np.array([0.9, 1, 0, 0, 0, 0.81, 0.9, 1.0])
    whole = np.asarray(estimate(table, "gae", gamma=0.9, trace=1.0, whitened=False))
    np.testing.assert_allclose(whole[:8], returns - values[:8], atol=1e-6)


@pytest.mark.parametrize("name", ["rewardflow", "gigpo", "grpo", "rloo"])
def test_a_group_of_one_keeps_its_score_in_the_published_form_alone(name):
    table = paths_table([Path([0, 1], [3.0])])
    assert float(estimate(table, name)[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(estimate(table, f"published.{name}")[0]) == pytest.approx(3.0)
