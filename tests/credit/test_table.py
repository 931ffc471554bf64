"""The table: dense ids, padding, and every kind of bad input refused with its column and row."""

from dataclasses import replace

import numpy as np
import pytest

from flowjax.credit.estimators import CreditError, estimate
from flowjax.credit.table import (
    TableError,
    build_table,
    columns_of,
    segment_statistics,
    table_from_columns,
    table_rows,
)
from flowjax.records import Group, Task, Trajectory, Turn

ONE = np.array([1.0])


def turn(before: int, after: int, *, reward: float = 0.0, terminal: bool = False, policy: str = "agent") -> Turn:
    tokens = np.zeros(2, np.int32)
    return Turn(
        policy, 0, tokens, tokens, np.zeros(2, np.float32), "stop", before, after, reward, True, terminal
    )  # fmt: skip


def trajectory(*turns: Turn, name: str = "a", status: str = "ok") -> Trajectory:
    return Trajectory(name, "g", "t", 0, turns, {"success": 1.0}, status=status)  # pyright: ignore[reportArgumentType]


def group(*trajectories: Trajectory, name: str = "g") -> Group:
    return Group(name, Task("t", "world", 0), trajectories)


BIG = 2**64 - 1


def test_states_are_dense_and_kept_apart_by_group():
    first = group(trajectory(turn(BIG, 7), turn(7, 9, terminal=True)), trajectory(turn(BIG, 9), name="b"))
    second = group(trajectory(turn(BIG, 7)), name="h")
    columns = columns_of(build_table([first, second], np.array([1.0, 0.0, 0.5])))
    assert len(columns["state"]) == 256
    before, after = columns["state"][:4], columns["next_state"][:4]
    assert before[0] == before[2] != before[3]
    assert after[0] == before[1]
    assert after[1] == after[2]
    assert len(set(before) | set(after)) == 5
    assert set(before) | set(after) == set(range(5))
    np.testing.assert_array_equal(columns["group"][:4], [0, 0, 0, 1])
    np.testing.assert_array_equal(columns["trajectory"][:4], [0, 0, 1, 2])
    np.testing.assert_array_equal(columns["successor"][:5], [1, 1, 2, 3, 4])
    np.testing.assert_array_equal(columns["score"][:4], [1, 1, 0, 0.5])
    np.testing.assert_array_equal(np.flatnonzero(columns["mask"]), [0, 1, 2, 3])
    np.testing.assert_array_equal(np.flatnonzero(columns["terminal"]), [1])


def test_a_turns_own_reward_and_whether_it_could_be_read_are_kept():
    unreadable = replace(turn(1, 1, reward=0.25), valid=False)
    columns = columns_of(build_table([group(trajectory(unreadable, turn(1, 2, reward=-1.0)))], np.array([3.0])))
    np.testing.assert_array_equal(columns["valid"][:2], [False, True])
    np.testing.assert_array_equal(columns["reward"][:2], [0.25, -1.0])


def test_rows_are_padded_to_few_sizes():
    turns = [turn(i, i + 1) for i in range(65)]
    assert len(build_table([group(trajectory(*turns))], np.zeros(1)).state) == 256
    assert {table_rows(n) for n in range(1, 20_000)} == {256, 1024, 4096, 16_384, 65_536}
    assert all(table_rows(n) >= n for n in (1, 256, 257, 1024, 1025))
    assert len(build_table([group(trajectory(*turns))], np.zeros(1), pad_to=70).state) == 70
    with pytest.raises(TableError, match="pad_to is 64, the table has 65 rows"):
        build_table([group(trajectory(*turns))], np.zeros(1), pad_to=64)


def test_parts_of_an_episode_are_trajectories_of_their_own():
    names = ["g/000/helper-0", "g/000/helper-1", "g/001/helper-0"]
    first = group(*(trajectory(turn(1, 2), turn(2, 3), name=name) for name in names))
    second = group(trajectory(turn(1, 2), name="g/000"), name="h")  # ids of episodes are unique within a group alone
    columns = columns_of(build_table([first, second], np.array([1.0, 0.5, 0.0, 0.0])))
    np.testing.assert_array_equal(columns["trajectory"][:7], [0, 0, 1, 1, 2, 2, 3])
    np.testing.assert_array_equal(columns["episode"][:7], [0, 0, 0, 0, 1, 1, 2])
    np.testing.assert_array_equal(columns["group"][:7], [0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(columns["score"][:7], [1, 1, 0.5, 0.5, 0, 0, 0])


@pytest.mark.parametrize("name", ["g", "sokoban/7", ""])
def test_episodes_are_told_apart_whatever_a_group_is_called(name):
    plays = (replace(trajectory(turn(1, 2), name=f"{name}/{number:03d}"), group_id=name) for number in range(4))
    columns = columns_of(build_table([group(*plays, name=name)], np.zeros(4)))
    np.testing.assert_array_equal(columns["episode"][:4], [0, 1, 2, 3])


def test_failed_episodes_do_not_count_and_may_be_empty():
    lost = trajectory(turn(1, 2), name="b", status="env_error")
    gone = trajectory(name="c", status="cancelled")
    table = build_table([group(trajectory(turn(1, 2)), lost, gone)], np.array([1.0, np.nan, np.nan]))
    np.testing.assert_array_equal(np.asarray(table.mask)[:2], [True, False])


@pytest.mark.parametrize(
    ("groups", "scores", "message"),
    [
        ([], np.zeros(0), "not a single turn"),
        ([group()], np.zeros(0), "column group, row 0: group 'g' has no trajectories"),
        ([group(trajectory(turn(1, 2)), trajectory(name="b"))], np.zeros(2), "column trajectory, row 1: 'b'"),
        ([group(trajectory(turn(1, 2)))], np.zeros(2), r"column score has shape \(2,\).* there are 1 trajectories"),
        ([group(trajectory(turn(1, 2)), trajectory(turn(1, 2)))], np.zeros(2), "group 'g' has 'a' twice: number them"),
        ([group(trajectory(turn(1, 2)))], np.array([np.nan]), "column score, row 0: nan is not a finite number"),
        ([group(trajectory(turn(1, 2), turn(2, 3, reward=np.inf)))], np.zeros(1), "column reward, row 1: inf"),
        ([group(trajectory(turn(1, 2), turn(-2, 3)))], np.zeros(1), "column state, row 1: key -2"),
        ([group(trajectory(turn(1, 2**64)))], np.zeros(1), "column next_state, row 0: key 18446744073709551616"),
    ],
)
def test_bad_groups_are_refused(groups, scores, message):
    with pytest.raises(TableError, match=message):
        build_table(groups, scores)


GOOD = {
    "group": np.array([0, 0, 0]),
    "trajectory": np.array([0, 0, 1]),
    "step": np.array([0, 1, 0]),
    "state": np.array([0, 1, 0]),
    "next_state": np.array([1, 2, 3]),
    "reward": np.array([0.0, 1.0, 0.0]),
    "score": np.array([1.0, 1.0, 0.0]),
    "valid": np.ones(3, bool),
    "terminal": np.array([False, True, False]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": np.array([0, 9, 0])}, r"column state, row 1: id 9 is not in \[0, 6\)"),
        ({"next_state": np.array([0, 1, -1])}, r"column next_state, row 2: id -1 is not in"),
        ({"group": np.array([0, 0, 3])}, r"column group, row 2: id 3 is not in \[0, 3\)"),
        ({"reward": np.array([0, np.nan, 0])}, "column reward, row 1: nan"),
        ({"valid": np.ones(2, bool)}, r"column valid has shape \(2,\), column group has 3 rows"),
        ({"step": np.array([0, 0, 0])}, "column step, row 1: step 0 occurs twice in trajectory 0"),
        ({"group": np.array([0, 1, 1])}, "column group, row 1: 1 differs from 0 in row 0 of the same trajectory"),
        ({"episode": np.array([0, 1, 1])}, "column episode, row 1: 1 differs from 0 in row 0 of the same trajectory"),
        (
            {"group": np.array([0, 0, 1]), "episode": np.array([0, 0, 0])},
            "column group, row 2: 1 differs from 0 in row 0 of the same episode",
        ),
        ({"score": np.array([1.0, 2.0, 0.0])}, "column score, row 1: 2.0 differs from 1.0 in row 0"),
        ({"state": np.array([0.0, 1.0, 0.0])}, "column state has type float64, ids are integers"),
        ({"colour": np.zeros(3)}, "column colour is not one of"),
    ],
)
def test_bad_columns_are_refused(change, message):
    table_from_columns(GOOD)
    with pytest.raises(TableError, match=message):
        table_from_columns({**GOOD, **change})


def test_a_missing_column_is_named():
    with pytest.raises(TableError, match="column reward is missing"):
        table_from_columns({name: column for name, column in GOOD.items() if name != "reward"})


@pytest.mark.parametrize("name", ["score", "reward"])
def test_a_number_whose_square_no_float32_holds_is_refused(name):
    columns = columns_of(build_table([group(trajectory(turn(1, 2)))], ONE))
    columns = {key: column[:1] for key, column in columns.items() if key != "successor"}
    with pytest.raises(TableError, match=rf"column {name}, row 0: -?2e\+20 is beyond 1e\+09: scale it"):
        table_from_columns(columns | {name: np.array([-2e20])})


def test_a_group_of_two_policies_is_refused():
    mixed = group(trajectory(turn(1, 2)), replace(trajectory(turn(1, 2), name="b"), policy="other"))
    with pytest.raises(TableError, match="column group, row 0: group 'g' is of agent and other"):
        build_table([mixed], np.array([1.0, 0.0]))


def test_states_may_be_segments_though_their_ids_exceed_the_rows():
    """Start and end states of each turn are numbered together: twice as many as turns."""
    groups = [group(*(trajectory(turn(0, 1 + i), name=str(i)) for i in range(8)), name=str(n)) for n in range(32)]
    table = build_table(groups, np.tile(np.arange(8.0), 32))
    assert table.state.max() >= len(table.state) == 256
    count, mean, _ = segment_statistics(table.score, table.state, table.mask)
    np.testing.assert_array_equal(count, 8)
    np.testing.assert_allclose(mean, 3.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"norm": "std"}, r"config\.credit\.options\.norm is 'std'"),
        ("gigpo", {"rewards": "env"}, r"config\.credit\.options\.rewards is 'env'"),
        ("rewardflow", {"gamma": 95}, r"config\.credit\.options\.gamma is 95"),
        ("best_of_group", {"norm": "none"}, r"config\.credit\.options\.norm is 'none'"),
        ("pass_at_k", {"k": 0}, r"config\.credit\.options\.k is 0"),
        ("grpo", {"gamma": 0.9}, r"config\.credit\.options\.gamma"),
    ],
)
def test_an_option_that_an_estimator_does_not_take_is_refused_where_it_is_called(name, options, message):
    table = build_table([group(trajectory(turn(1, 2)))], ONE)
    with pytest.raises(CreditError, match=message):
        estimate(table, name, **options)
