"""Token rows -> micro-batches of fixed shape.

Several sequences share a row, told apart by segment ids, each with positions from 0. Rows come in a few lengths only
(`row_tokens` and its halves), and the number of sampled tokens per row is a power of two, so that few shapes are ever
compiled. A micro-batch of shorter rows has more of them: its number of token slots stays the same. Trimmed
micro-batches (`plan`) have only as many slots as their tokens need, in more shapes.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from flowjax.models.params import Placeable
from flowjax.records import TokenRow

_SHORTEST_ROW_TOKENS = 16


class BatchError(ValueError):
    """Rows that cannot be trained on; the message names the config field to change."""


def unusable_rows(rows: Sequence[TokenRow], *, row_tokens: int, vocabulary: int) -> dict[str, str]:
    """By trajectory, why its rows cannot be trained on; empty where all can.

    Args:
        row_tokens: the longest row there is room for (config.trainer.row_tokens).
        vocabulary: tokens of the model; an id from there on has no logit, and its log-probability would mean nothing.
    """
    reasons = ((row, _unusable(row, row_tokens, vocabulary)) for row in rows)
    return {row.trajectory_id: reason for row, reason in reasons if reason}


def _unusable(row: TokenRow, row_tokens: int, vocabulary: int) -> str:
    length = len(row.tokens)
    columns = {"sampled": row.sampled, "logprobs": row.logprobs, "advantages": row.advantages, "versions": row.versions}
    for name, column in columns.items():
        if column.shape != (length,):
            return f"{name} have the shape {column.shape}, tokens ({length},)"
    if length > row_tokens:
        return f"{length} tokens, but config.trainer.row_tokens is {row_tokens}"
    if not length:
        return ""
    if row.sampled[0]:
        return "the first token is a sampled one: nothing before it predicts it"
    if row.tokens.min() < 0 or row.tokens.max() >= vocabulary:
        return f"tokens from {row.tokens.min()} to {row.tokens.max()}, but the model has {vocabulary}"
    for name in ("logprobs", "advantages"):
        if not np.isfinite(columns[name]).all():
            return f"{name} that are not finite"
    return ""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward-backward pass, on the host until it is placed. Padding has segment 0, and mask False.

    The axis "tokens" has all tokens of a row, the axis "sampled" a slot for each sampled one: only these have a loss.
    `places` are their indices in the row; a token is predicted from the place before it.
    `sequences` number the sequences of the micro-batch from 0, for losses that average over a sequence first;
    `trajectory_tokens` count the sampled tokens of each token's whole trajectory, for losses that average over that.
    """

    tokens: Int[Placeable, "rows tokens"]
    positions: Int[Placeable, "rows tokens"]
    segments: Int[Placeable, "rows tokens"]
    places: Int[Placeable, "rows sampled"]
    mask: Bool[Placeable, "rows sampled"]
    behaviour_logprobs: Float[Placeable, "rows sampled"]
    advantages: Float[Placeable, "rows sampled"]
    versions: Int[Placeable, "rows sampled"]  # of the weights that sampled the token; -1 in padding
    sequences: Int[Placeable, "rows sampled"]
    trajectory_tokens: Int[Placeable, "rows sampled"]


def swapped(
    places: Int[np.ndarray, "*rows sampled"], versions: Int[np.ndarray, "*rows sampled"]
) -> Bool[np.ndarray, "*rows sampled"]:
    """True for tokens sampled by other weights than their reply's first token: the engine changed weights on the way.

    The keys and values in the engine's cache were still of the older weights, so no forward pass over the row, under
    either version, gives the log-prob that such a token was sampled with.

    Args:
        places: indices of the sampled tokens within their row; those of a reply follow each other without a gap.
    """
    begins = np.diff(places, axis=-1, prepend=-1) != 1  # of a reply: there is a gap before it
    numbers = np.broadcast_to(np.arange(places.shape[-1]), places.shape)
    # A running maximum carries the index of a reply's first token on to its later ones.
    firsts = np.maximum.accumulate(np.where(begins, numbers, 0), axis=-1)
    return versions != np.take_along_axis(versions, firsts, axis=-1)


def row_buckets(row_tokens: int) -> list[int]:
    """Allowed row lengths, longest first: `row_tokens` halved while it stays even and not below 16."""
    buckets = [row_tokens]
    while buckets[-1] % 2 == 0 and buckets[-1] // 2 >= _SHORTEST_ROW_TOKENS:
        buckets.append(buckets[-1] // 2)
    return buckets


class Planned(NamedTuple):
    """Sequences of a micro-batch, by their index, and its shape."""

    bins: list[list[int]]  # for each filled row, the sequences that share it
    rows: int  # rows beyond the bins stay empty
    tokens: int  # length of a row
    sampled: int  # slots for the sampled tokens of a row
    numbered: list[int]  # the sequences, in the order of their numbers in `MicroBatch.sequences`


def pack(
    rows: Sequence[TokenRow], *, row_tokens: int, micro_batch_rows: int, trim: bool = False, rows_multiple: int = 1
) -> list[MicroBatch]:
    """Rows in micro-batches: `plan`, then `lay_out`.

    Raises:
        BatchError: see `plan`.
    """
    planned = plan(
        rows, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows, trim=trim, rows_multiple=rows_multiple
    )
    return [lay_out(rows, each) for each in planned]


def plan(
    rows: Sequence[TokenRow], *, row_tokens: int, micro_batch_rows: int, trim: bool = False, rows_multiple: int = 1
) -> list[Planned]:
    """Sequences packed into as few rows as best-fit-decreasing finds, and these into micro-batches.

    With `trim`, rows that are filled to half or less go into micro-batches of shorter rows, and a micro-batch has
    1, 2, 3, 4, 6, 8, 12, ... times `rows_multiple` rows (what the mesh divides them by), not always the full number.
    For long-tailed lengths, and batches small beside `row_tokens * micro_batch_rows`.

    Raises:
        BatchError: a sequence is longer than `row_tokens` or begins with a sampled token, or none was sampled at all.
    """
    longest = max((len(row.tokens) for row in rows), default=0)
    if longest > row_tokens:
        raise BatchError(f"a sequence has {longest} tokens, but config.trainer.row_tokens is {row_tokens}: raise it")
    # In a packed row, the place before it may hold the last token of another sequence.
    if any(len(row.sampled) and row.sampled[0] for row in rows):
        raise BatchError("a sequence begins with a sampled token, which nothing predicts: give it a prompt")
    counts = [int(np.count_nonzero(row.sampled)) for row in rows]
    if not any(counts):
        raise BatchError("the batch has no sampled token to train on: check config.rollout.max_new_tokens")
    bins = _best_fit_decreasing([len(row.tokens) for row in rows], row_tokens)
    lengths = [sum(len(rows[index].tokens) for index in members) for members in bins]
    widths = [min(bucket for bucket in row_buckets(row_tokens) if bucket >= length) for length in lengths]
    if not trim:
        widths = [max(widths)] * len(widths)
    batches = []
    for tokens in sorted(set(widths), reverse=True):
        alike = [members for members, width in zip(bins, widths, strict=True) if width == tokens]
        sampled = max(sum(counts[index] for index in members) for members in alike)
        sampled = 1 << max(sampled - 1, 0).bit_length()  # the next power of two, so that few shapes are compiled
        most = micro_batch_rows * (row_tokens // tokens)
        for start in range(0, len(alike), most):
            part = alike[start : start + most]
            count = min(_row_count(len(part), rows_multiple), most) if trim else most
            # Only sequences with a sampled token are numbered: so there are no more numbers than slots, as `update`
            # relies on.
            numbered = [index for members in part for index in members if counts[index]]
            batches.append(Planned(part, count, tokens, sampled, numbered))
    return batches


def _row_count(rows: int, multiple: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, ... times `multiple` that `rows` fit into."""
    groups = -(-rows // multiple)
    power = 1 << (groups - 1).bit_length()
    return multiple * (power * 3 // 4 if power >= 4 and groups <= power * 3 // 4 else power)


def _best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices per bin: the longest first, each into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # open bins, by the room that is left
    rooms: list[int] = []  # the keys of `by_room`, ascending, for the binary search
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, lengths[index])
        if place == len(rooms):
            bins.append([])
            chosen, room = len(bins) - 1, capacity
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bins[chosen].append(index)
        left = room - lengths[index]
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(chosen)
    return bins


def lay_out(rows: Sequence[TokenRow], planned: Planned) -> MicroBatch:
    """One of the micro-batches that were planned for `rows`."""
    tokens, sampled = planned.tokens, planned.sampled

    def empty(width: int, dtype: type, value: int = 0) -> np.ndarray:
        return np.full((planned.rows, width), value, dtype)

    by_token = {name: empty(tokens, np.int32) for name in ("tokens", "positions", "segments")}
    # Padding is computed with before the mask removes it, and must do no harm there: place 1 has a place before it, and
    # 1 may be divided by.
    by_sampled = {
        "places": empty(sampled, np.int32, 1),
        "mask": empty(sampled, np.bool_),
        "behaviour_logprobs": empty(sampled, np.float32),
        "advantages": empty(sampled, np.float32),
        "versions": empty(sampled, np.int32, -1),
        "sequences": empty(sampled, np.int32),
        "trajectory_tokens": empty(sampled, np.int32, 1),
    }
    sequence = 0
    for index, members in enumerate(planned.bins):
        start = filled = 0
        for segment, row in enumerate([rows[member] for member in members], start=1):
            span = slice(start, start + len(row.tokens))
            by_token["tokens"][index, span] = row.tokens
            by_token["positions"][index, span] = np.arange(len(row.tokens))
            by_token["segments"][index, span] = segment
            places = np.flatnonzero(row.sampled)
            to = slice(filled, filled + len(places))
            by_sampled["places"][index, to] = start + places
            by_sampled["mask"][index, to] = True
            by_sampled["behaviour_logprobs"][index, to] = row.logprobs[places]
            by_sampled["advantages"][index, to] = row.advantages[places]
            by_sampled["versions"][index, to] = row.versions[places]
            by_sampled["sequences"][index, to] = sequence
            by_sampled["trajectory_tokens"][index, to] = row.trajectory_tokens or len(places)
            # One without a sampled token takes no number: see `Planned.numbered`.
            start, filled, sequence = span.stop, to.stop, sequence + bool(len(places))
    arrays: dict[str, Any] = by_token | by_sampled
    return MicroBatch(**arrays)
