"""Turns become rows: window turns one each, append turns one together, advantages where the tokens were sampled."""

from dataclasses import replace
from itertools import chain, groupby

import numpy as np
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


def test_groups_whose_rewards_are_all_equal_are_counted():
    def group(name: str, *successes: float) -> Group:
        members = [
            Trajectory(f"{name}{i}", name, name, 0, (turn([1], [2]),), {"success": value})
            for i, value in enumerate(successes)
        ]
        return Group(name, Task(name, "w", 0), tuple(members))

    groups = [group("a", 1, 1, 1), group("b", 0, 1), group("c", 0), group("d", 0, 1, 0)]
    totals = credit_batch(groups, components={"success": 1.0}, estimator="grpo", options={}).totals
    assert (totals["groups"], totals["groups_without_signal"]) == (4, 2)


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
