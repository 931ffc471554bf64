"""The table of turns that every estimator reads: how it is made from groups of trajectories, and the building blocks of
estimators, statistics by segment and sums along trajectories."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from flowjax.fields import Interval
from flowjax.records import COUNTED_STATUSES, LARGEST_NUMBER, Group

# Rows of a padded table. Every estimator is compiled once for each size, so there are few: each four times the one
# before.
SMALLEST_TABLE, TABLE_GROWTH = 256, 4


class TableError(ValueError):
    """A table that no estimator may read; the message names the column and the row."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TurnTable:
    """Turns as a struct of arrays, one row per turn in the order of the groups' trajectories, then padding.

    Ids are dense and start at zero. A *group* here is what gets compared: the turns of one policy on one task. An
    *episode* is one play of it. A *trajectory* is the policy's turns in an episode, or in one of its parts where a
    workflow gives an agent several. States are unique over the table: equal ids mean the same state of the same group.
    `score` is the reward of the whole trajectory, equal on all its rows. Rows with `mask` False
    (padding, episodes that failed for reasons outside the policy) count in no statistic and get advantage zero.
    """

    group: Int[Array, "turns"]  # which task, so which state graph, the turn belongs to
    episode: Int[Array, "turns"]
    trajectory: Int[Array, "turns"]
    step: Int[Array, "turns"]  # position of the turn in its trajectory
    successor: Int[Array, "turns"]  # row of the trajectory's next turn; the row itself when it is the last
    state: Int[Array, "turns"]  # that the turn started in
    next_state: Int[Array, "turns"]  # that the turn led to
    reward: Float[Array, "turns"]  # the environment's reward for this turn
    score: Float[Array, "turns"]
    valid: Bool[Array, "turns"]  # the reply could be read as an action
    terminal: Bool[Array, "turns"]  # the environment ended the episode with this turn
    mask: Bool[Array, "turns"]


_COLUMNS: dict[str, type] = {
    "group": np.int32,
    "episode": np.int32,
    "trajectory": np.int32,
    "step": np.int32,
    "successor": np.int32,
    "state": np.int32,
    "next_state": np.int32,
    "reward": np.float32,
    "score": np.float32,
    "valid": np.bool_,
    "terminal": np.bool_,
    "mask": np.bool_,
}


def build_table(
    groups: Sequence[Group], scores: Float[np.ndarray, "trajectories"], *, pad_to: int | None = None
) -> TurnTable:
    """The table of all turns of `groups`, in order, padded to one of few sizes (or to `pad_to`).

    Args:
        groups: any number of groups of any size.
        scores: one score per trajectory, in order.
        pad_to: number of rows of the result.

    Raises:
        TableError: a group without trajectories or of several policies, a trajectory that is there twice or counts
            without turns, no turns at all, a wrong number of scores, a state key that is no unsigned 64-bit number, or
            what `table_from_columns` refuses.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for index, group in enumerate(groups):
        if not group.trajectories:
            raise TableError(f"column group, row {index}: group {group.group_id!r} has no trajectories")
        if len(policies := sorted({trajectory.policy for trajectory in group.trajectories})) > 1:
            raise TableError(f"column group, row {index}: group {group.group_id!r} is of {' and '.join(policies)}")
        names = [trajectory.trajectory_id for trajectory in group.trajectories]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise TableError(f"column trajectory: group {group.group_id!r} has {repeated[0]!r} twice: number them")
    lengths = np.fromiter((len(t.turns) for t in trajectories), np.int64, len(trajectories))
    for index in np.flatnonzero(lengths == 0):
        if trajectories[index].status in COUNTED_STATUSES:
            name = trajectories[index].trajectory_id
            raise TableError(f"column trajectory, row {index}: {name!r} has status ok but no turns")
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if not turns:
        raise TableError("column trajectory: there is not a single turn in these groups")

    if np.shape(scores) != (len(trajectories),):
        raise TableError(
            f"column score has shape {np.shape(scores)}, there are {len(trajectories)} trajectories: give one for each"
        )

    # From here on one entry per turn. `owner` is the index of its trajectory.
    owner = np.repeat(np.arange(len(trajectories)), lengths)
    group = np.repeat(np.arange(len(groups)), [len(g.trajectories) for g in groups])[owner]
    counted = np.fromiter((t.status in COUNTED_STATUSES for t in trajectories), bool, len(trajectories))[owner]
    episodes = [(place, part.episode_id) for place, group in enumerate(groups) for part in group.trajectories]
    number_of = {episode: number for number, episode in enumerate(dict.fromkeys(episodes))}
    state_keys = _keys([turn.state_key for turn in turns], "state")
    next_keys = _keys([turn.next_state_key for turn in turns], "next_state")
    # Numbered together, because the state that one turn ends in is the one that another starts in.
    states = _state_ids(np.concatenate([group, group]), np.concatenate([state_keys, next_keys]))
    columns = {
        "group": _dense(group),
        "episode": _dense(np.array([number_of[episode] for episode in episodes])[owner]),
        "trajectory": _dense(owner),
        "step": np.arange(len(turns)) - np.repeat(np.cumsum(lengths) - lengths, lengths),  # less its trajectory's start
        "state": states[: len(turns)],
        "next_state": states[len(turns) :],
        "reward": np.fromiter((turn.env_reward for turn in turns), np.float64, len(turns)),
        "score": np.where(counted, np.asarray(scores, np.float64)[owner], 0.0),
        "valid": np.fromiter((turn.valid for turn in turns), bool, len(turns)),
        "terminal": np.fromiter((turn.terminal for turn in turns), bool, len(turns)),
        "mask": counted,
    }
    return table_from_columns(columns, pad_to=pad_to)


def table_from_columns(columns: Mapping[str, np.ndarray], *, pad_to: int | None = None) -> TurnTable:
    """A padded table from whole columns, checked.

    `successor` is derived; `episode` (each trajectory is one) and `mask` (all count) have defaults.

    Raises:
        TableError: an unknown or missing column, unequal lengths, an id out of range, a number that is not finite.
    """
    columns = {name: np.asarray(column) for name, column in columns.items()}
    if unknown := sorted(set(columns) - set(_COLUMNS)):
        raise TableError(f"column {unknown[0]} is not one of {', '.join(_COLUMNS)}")
    required = set(_COLUMNS) - {"successor", "episode", "mask"}
    if missing := sorted(required - set(columns)):
        raise TableError(f"column {missing[0]} is missing")
    turns = len(columns["group"])
    columns.setdefault("episode", columns["trajectory"])
    columns.setdefault("mask", np.ones(turns, bool))
    for name, column in columns.items():
        if column.shape != (turns,):
            raise TableError(f"column {name} has shape {column.shape}, column group has {turns} rows")
    _check_ids(columns, turns)
    _check_numbers(columns)
    columns["successor"] = _successors(columns["trajectory"], columns["step"])

    rows = pad_to if pad_to is not None else table_rows(turns)
    if rows < turns:
        raise TableError(f"pad_to is {rows}, the table has {turns} rows: raise pad_to or leave it out")
    padded: dict[str, np.ndarray] = {}
    for name, dtype in _COLUMNS.items():
        padded[name] = np.zeros(rows, dtype)
        padded[name][:turns] = columns[name]
    padded["successor"][turns:] = np.arange(turns, rows)  # each its own last turn; 0 would point into a trajectory
    return TurnTable(**jax.device_put(padded))  # moved once, not anew for each estimator


# Rows that do not count have score 0: a forgotten mask shows in the least of scores above 0, the greatest of others.
_TRIAL_SCORES = ((0.0, 1.0), (0.5, 1.0), (-1.0, -0.5))


def fault_at_trial(estimate: Callable[[TurnTable], np.ndarray]) -> str:
    """A fault of an estimator, "" for none: on small tables it has to give one finite number per row, the same ones
    when it is asked again, and whatever rows do not count. It may be for scores of 0 and 1 alone, and raise an error on
    others; on these it raises what the estimator does."""
    for number, scores in enumerate(_TRIAL_SCORES):
        try:
            if fault := _fault(estimate, *scores):
                return fault
        except Exception:
            if number == 0:
                raise
    return ""


def _fault(estimate: Callable[[TurnTable], np.ndarray], low: float, high: float) -> str:
    (table, with_uncounted), scores = _trial_tables(low, high), f"scores {low:g} and {high:g}"
    found, again, beside = (estimate(each) for each in (table, table, with_uncounted))
    if found.shape != table.mask.shape:
        return f"gives {found.shape} for a table of {table.mask.shape} rows"
    for given, group in ((found[:4], scores), (found[4:8], "equal scores"), (found[8:10], "one episode")):
        if low >= 0 and not np.isfinite(given).all():  # it may be for successes alone
            lost = " (the others of its group may fail: 0 is right there)" if group == "one episode" else ""
            return f"gives {given} for a group of {group}, of two turns each{lost}"
    alike = partial(np.isclose, rtol=1e-3, atol=1e-5, equal_nan=True)
    for row in np.flatnonzero(~alike(again, found))[:1]:
        return f"gives row {row} {found[row]:g}, then {again[row]:g} in a second call with equal arguments"
    expected = np.append(found[:10], [0, 0])
    for row in np.flatnonzero(~alike(beside[:12], expected))[:1]:
        why = f"gives row {row} {beside[row]:g} instead of {expected[row]:g} once a failed episode and padding join "
        return why + f"{scores}: let rows whose `mask` is False have 0, and no part in any statistic"
    return ""


def _trial_tables(low: float, high: float) -> tuple[TurnTable, TurnTable]:
    """Tables to try an estimator on: three groups, two episodes of which one has the higher score, two that have the
    lower one, and one alone with it, each of two turns; and the same rows before padding and a failed episode of the
    first group, whose score is 0 and whose rewards are beyond all others."""
    row = np.arange(12)
    episode, turn = row // 2, row % 2
    group = np.array([0, 0, 1, 1, 2, 0])[episode]
    counts = episode < 5
    score = np.where(episode == 1, high, low) * counts
    states = {"state": turn + 3 * group, "next_state": turn + 1 + 3 * group}
    columns = {"group": group, "trajectory": episode, "step": turn, "terminal": turn == 1} | states
    columns |= {"score": score, "mask": counts, "valid": row < 11}
    columns |= {"reward": np.where(counts, score * turn, 3 * (low + high))}
    counted = table_from_columns({name: column[:10] for name, column in columns.items()}, pad_to=10)
    return counted, table_from_columns(columns)


def table_rows(turns: int) -> int:
    """Rows of the smallest padded table that holds this number of turns."""
    rows = SMALLEST_TABLE
    while rows < turns:
        rows *= TABLE_GROWTH
    return rows


def columns_of(table: TurnTable) -> dict[str, np.ndarray]:
    """The table's columns on the host, padding included."""
    return {field.name: np.asarray(getattr(table, field.name)) for field in dataclasses.fields(table)}


def _dense(ids: Int[np.ndarray, "rows"]) -> Int[np.ndarray, "rows"]:
    return np.unique(ids, return_inverse=True)[1]


def _keys(keys: Sequence[int], column: str) -> np.ndarray:
    for row, key in enumerate(keys):
        if not 0 <= key < 2**64:
            raise TableError(f"column {column}, row {row}: key {key} is not an unsigned 64-bit number")
    return np.array(keys, np.uint64)


def _state_ids(group: Int[np.ndarray, "keys"], keys: np.ndarray) -> Int[np.ndarray, "keys"]:
    """Dense ids, equal where both the group and the key are equal."""
    # Keys become dense numbers first: 64-bit keys leave no bits for the group in one integer.
    distinct, key_ids = np.unique(keys, return_inverse=True)
    return _dense(group * len(distinct) + key_ids)


def _check_ids(columns: Mapping[str, np.ndarray], turns: int) -> None:
    limits = dict.fromkeys(("group", "episode", "trajectory", "step"), turns)
    limits |= dict.fromkeys(("state", "next_state"), 2 * turns)
    for name, limit in limits.items():
        column = columns[name]
        if column.dtype.kind not in "iu":
            raise TableError(f"column {name} has type {column.dtype}, ids are integers")
        for row in np.flatnonzero((column < 0) | (column >= limit))[:1]:
            raise TableError(f"column {name}, row {row}: id {column[row]} is not in [0, {limit}); ids must be dense")


def _check_numbers(columns: Mapping[str, np.ndarray]) -> None:
    for name in ("reward", "score"):
        numbers = columns[name].astype(np.float64)
        for row in np.flatnonzero(~np.isfinite(numbers))[:1]:
            raise TableError(f"column {name}, row {row}: {columns[name][row]} is not a finite number")
        for row in np.flatnonzero(np.abs(numbers) > LARGEST_NUMBER)[:1]:
            raise TableError(f"column {name}, row {row}: {columns[name][row]} is beyond {LARGEST_NUMBER:g}: scale it")
    _check_agree(columns, "trajectory", ("group", "episode", "score", "mask"))
    _check_agree(columns, "episode", ("group",))


def _check_agree(columns: Mapping[str, np.ndarray], segment: str, names: Sequence[str]) -> None:
    """Rows of one segment must have one value in each of these columns: that of the segment's first row, `head`."""
    _, first, place = np.unique(columns[segment], return_index=True, return_inverse=True)
    head = first[place]
    for name in names:
        for row in np.flatnonzero(columns[name] != columns[name][head])[:1]:
            raise TableError(
                f"column {name}, row {row}: {columns[name][row]} differs from {columns[name][head[row]]} in row "
                f"{head[row]} of the same {segment}"
            )


def _successors(trajectory: Int[np.ndarray, "turns"], step: Int[np.ndarray, "turns"]) -> Int[np.ndarray, "turns"]:
    """Row of each turn's next turn in its trajectory, its own row for the last; rows may be in any order."""
    order = np.lexsort((step, trajectory))  # by trajectory, then by step: the last key leads
    ordered = trajectory[order]
    follows = ordered[1:] == ordered[:-1]
    repeated = np.flatnonzero(follows & (step[order][1:] == step[order][:-1]))
    for position in repeated[:1]:
        row = order[position + 1]
        raise TableError(f"column step, row {row}: step {step[row]} occurs twice in trajectory {trajectory[row]}")
    successor = np.arange(len(trajectory))
    successor[order[:-1][follows]] = order[1:][follows]
    return successor


# ---------------------------------------------------------------------------------------------- statistics over a table

Norm = Literal["mean", "mean_std", "none"]
# Options of estimators are traced arguments, not static ones: another value needs no other program.
Number = float | Real[Array, ""]
Discount = Annotated[Number, Interval(at_least=0, at_most=1)]
Weight = Annotated[Number, Interval(at_least=0)]

EPSILON = 1e-6
ROUNDING = 2e-6  # share of the largest by which equal scores may differ: 0.1 * 21 + 1 is not 0.1 * 1 + 3 in float32


def are_equal(scores: Float[np.ndarray, "scores"]) -> bool:
    """True if scores, one or more, differ by rounding alone, by the rule of `segment_statistics`."""
    return bool(np.ptp(scores) <= ROUNDING * np.abs(scores).max())


def segment_total(
    values: Float[Array, "rows"], segment: Int[Array, "rows"], segments: int | None = None
) -> Float[Array, "rows"]:
    """For each row, the sum of `values` over the rows of its segment. By default ids are below twice the number of
    rows, as those of a table's columns are."""
    # A scatter into a static number of segments: how many there are is not known while tracing.
    totals = jnp.zeros(segments or 2 * values.shape[0], values.dtype).at[segment].add(values)
    return totals[segment]


def segment_statistics(
    values: Float[Array, "rows"],
    segment: Int[Array, "rows"],
    weight: Bool[Array, "rows"] | Float[Array, "rows"],
    segments: int | None = None,
) -> tuple[Float[Array, "rows"], Float[Array, "rows"], Float[Array, "rows"]]:
    """Count, mean and unbiased standard deviation of the rows with `weight` in each row's segment.

    Weights are zero or one, or shares of one (`episode_weights`), and their sum is the count. The mean of an empty
    segment is zero, as is the deviation of a segment with fewer than two such rows. Values that differ by rounding
    alone are equal: each is its own mean, and their deviation is zero.
    """
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))  # shares of one are no integers
    counted = weight.astype(values.dtype)
    weight = counted > 0
    count = jnp.round(segment_total(counted, segment, segments))  # three thirds are not quite one
    unbounded = jnp.full(segments or 2 * values.shape[0], jnp.inf, values.dtype)
    lowest = unbounded.at[segment].min(jnp.where(weight, values, jnp.inf))[segment]
    highest = (-unbounded).at[segment].max(jnp.where(weight, values, -jnp.inf))[segment]
    lowest, highest = (jnp.where(count > 0, bound, 0.0) for bound in (lowest, highest))
    # Summed from the lowest value on: float32 would lose small differences in a sum of large values.
    mean = lowest + segment_total(counted * (values - lowest), segment, segments) / jnp.maximum(count, 1)
    # Otherwise values that differ by rounding, divided by a deviation that is rounding, too, would be large advantages.
    equal = highest - lowest <= ROUNDING * jnp.maximum(jnp.abs(lowest), jnp.abs(highest))
    mean = jnp.where(equal & (lowest <= values) & (values <= highest), values, mean)
    # From differences to the mean, not as E[x^2] - E[x]^2: in float32 that difference of large numbers may be negative.
    squares = segment_total(counted * jnp.square(values - mean), segment, segments)
    return count, mean, jnp.sqrt(squares / jnp.maximum(count - 1, 1))


def is_last_turn(table: TurnTable) -> Bool[Array, "turns"]:
    """Turns after which their trajectory has no further one."""
    return table.successor == _row_numbers(table)


def state_visits(table: TurnTable) -> Int[Array, "turns"]:
    """Segment of each turn: the same for turns of one group that started in the same state. Ids are below the number of
    rows.

    The group is part of the segment, so that this holds also in a table whose maker numbered the states of several
    groups together.
    """
    # The last key leads: rows of a group come together, and among them those of a state.
    order = jnp.lexsort((table.state, table.group))
    group, state = table.group[order], table.state[order]
    differs = (group[1:] != group[:-1]) | (state[1:] != state[:-1])
    segment = jnp.concatenate([jnp.zeros(1, table.state.dtype), jnp.cumsum(differs, dtype=table.state.dtype)])
    return jnp.zeros_like(table.state).at[order].set(segment)


def first_rows(table: TurnTable) -> Bool[Array, "turns"]:
    """One counted row per trajectory, its first: statistics over these weigh it once, however long it is."""
    has_predecessor = jnp.zeros_like(table.mask).at[table.successor].max(table.successor != _row_numbers(table))
    return table.mask & ~has_predecessor


def episode_weights(table: TurnTable) -> Float[Array, "turns"]:
    """A weight of one for each episode, in equal shares on the first rows of its counted trajectories: with these, an
    episode counts once in statistics, however many parts it has."""
    members = first_rows(table).astype(table.score.dtype)
    return members / jnp.maximum(segment_total(members, table.episode), 1)


def normalise(
    values: Float[Array, "rows"], mean: Float[Array, "rows"], deviation: Float[Array, "rows"], norm: Norm
) -> Float[Array, "rows"]:
    """`values` less their mean, over their deviation, as `norm` says."""
    if norm == "none":
        return values
    centred = values - mean
    return centred / (deviation + EPSILON) if norm == "mean_std" else centred


def whiten(values: Float[Array, "rows"], mask: Bool[Array, "rows"]) -> Float[Array, "rows"]:
    """Zero mean and unit variance over all counted rows of the table."""
    _, mean, deviation = segment_statistics(values, jnp.zeros_like(mask, jnp.int32), mask, 1)
    return (values - mean) * jax.lax.rsqrt(jnp.square(deviation) + 1e-8)


def discounted_sums(
    values: Float[Array, "turns"], successor: Int[Array, "turns"], gamma: Number
) -> Float[Array, "turns"]:
    """G_t = x_t + gamma G_{t+1} along each trajectory.

    By pointer doubling: after k rounds each row holds the sum of its next 2^k turns, so the rounds are the logarithm
    of the longest trajectory and rows may lie in any order.
    """
    is_last = successor == jnp.arange(successor.shape[0])
    decay = jnp.where(is_last, 0.0, jnp.asarray(gamma, values.dtype))

    # The last turn points to itself with factor 0, a fixed point: rows that are complete add nothing in later rounds.
    def unfinished(carry: tuple[Array, Array, Array, Array]) -> Bool[Array, ""]:
        _, _, pointer, previous = carry
        return jnp.any(pointer != previous)

    def double(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        total, factor, pointer, _ = carry
        return total + factor * total[pointer], factor * factor[pointer], pointer[pointer], pointer

    start = (values, decay, successor, jnp.arange(successor.shape[0], dtype=successor.dtype))
    return jax.lax.while_loop(unfinished, double, start)[0]


def _row_numbers(table: TurnTable) -> Int[Array, "turns"]:
    return jnp.arange(table.mask.shape[0], dtype=table.successor.dtype)
