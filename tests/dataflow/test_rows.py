"""Turns become rows: window turns one each, append turns one together, advantages where the tokens were sampled."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowjax.dataflow.batches import credit_batch, token_rows
from flowjax.records import Group, Task, Trajectory, Turn


def turn(prompt: list[int], sampled: list[int], version: int = 1) -> Turn:
    logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
    ids = (np.array(prompt, np.int32), np.array(sampled, np.int32))
    return Turn("agent", version, *ids, logprobs, "stop", 0, 1, 0.0, True, False)


def rows(*turns: Turn, advantages: list[float]):
    return token_rows(Trajectory("t", "g", "task", 0, turns, {}), advantages)


def test_window_turns_are_rows_of_their_own():
    first, second = rows(turn([1, 2], [3, 4]), turn([1, 9], [5], version=2), advantages=[0.5, -1.0])
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert first.sampled.tolist() == [False, False, True, True]
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5]
    assert first.logprobs.tolist() == [0, 0, -1, -2]
    assert second.tokens.tolist() == [1, 9, 5]
    assert second.versions.tolist() == [-1, -1, 2]


def test_a_turn_that_continues_the_tokens_extends_the_row():
    (row,) = rows(turn([1, 2], [3]), turn([1, 2, 3, 7, 8], [4, 5], version=2), advantages=[1.0, 2.0])
    assert row.tokens.tolist() == [1, 2, 3, 7, 8, 4, 5]
    assert row.sampled.tolist() == [False, False, True, False, False, True, True]
    assert row.advantages.tolist() == [0, 0, 1, 0, 0, 2, 2]
    assert row.versions.tolist() == [-1, -1, 1, -1, -1, 2, 2]


def test_a_conversation_whose_tokens_differ_anywhere_starts_a_new_row():
    first, second = rows(turn([1, 2], [3]), turn([1, 2, 4, 7], [5]), advantages=[1.0, 2.0])
    assert first.tokens.tolist() == [1, 2, 3]
    assert second.tokens.tolist() == [1, 2, 4, 7, 5]


def test_rows_know_how_many_tokens_their_trajectory_has():
    got = rows(turn([1], [2, 2]), turn([9], [6]), advantages=[1.0, 3.0])
    assert [(row.policy, row.trajectory_id, row.trajectory_tokens) for row in got] == [("agent", "t", 3)] * 2


def played(name: str, *successes: float, lengths: Sequence[int] = (1,)) -> Group:
    """A group whose episodes end so, of as many turns from one state each."""
    members = [
        Trajectory(f"{name}{i}", name, name, 0, (turn([1], [2]),) * length, {"success": value})
        for i, (value, length) in enumerate(zip(successes, cycle(lengths), strict=False))
    ]
    return Group(name, Task(name, "w", 0), tuple(members))


def without_signal(groups: Sequence[Group], estimator: str, has_rows: Sequence[bool] | None = None) -> float:
    batch = credit_batch(groups, components={"success": 1.0}, estimator=estimator, options={}, has_rows=has_rows)
    assert batch.totals["groups"] == len(groups)
    return batch.totals["groups_without_signal"]


@pytest.mark.parametrize(
    ("estimator", "count"),
    [("grpo", 3), ("reinforce_plus_plus_baseline", 3), ("rewardflow", 2), ("reinforce_plus_plus", 0)],
)
def test_groups_without_signal_are_those_whose_advantages_are_all_0(estimator: str, count: int):
    """Those that compare episodes learn nothing where all end alike; RewardFlow learns which way is shorter; over a
    batch even a group of one has more or less than others."""
    alike = [played("a", 1, 1, lengths=(1, 3)), played("b", 0, 0), played("c", 1)]
    assert without_signal([*alike, played("d", 0, 1), played("e", 0, 1, 0)], estimator) == count


def test_what_is_not_trained_on_gives_a_group_no_signal():
    groups = [played("a", 0, 1), played("b", 0, 1)]
    assert without_signal(groups, "grpo", has_rows=[False, False, False, True]) == 1


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_a_row_has_the_version_that_sampled_each_token(replies, append):
    """Of replies under which weights were replaced, given by the version of each of their tokens."""
    turns, prompt, expected = [], [7], []
    for versions in replies:
        runs = [(version, len(list(same))) for version, same in groupby(versions)]
        sampled = list(range(10, 10 + len(versions)))
        made = replace(turn(prompt, sampled, version=min(versions)), spans=runs if len(runs) > 1 else ())
        assert made.token_versions.tolist() == versions and set(made.versions) == set(versions)
        turns.append(made)
        expected.append([*[-1] * (len(prompt) if not append or not expected else 1), *versions])
        prompt = [*prompt, *sampled, 8] if append else [*prompt, 9]
    got = [row.versions.tolist() for row in rows(*turns, advantages=[1.0] * len(turns))]
    assert got == ([list(chain.from_iterable(expected))] if append else expected)
