"""Packing: every token of every sequence arrives once, beside the numbers that belong to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.records import TokenRow
from flowjax.trainer.batch import BatchError, _best_fit_decreasing, pack, plan, row_buckets, swapped


def row(length: int, sampled_places: list[int], start: int = 100) -> TokenRow:
    sampled = np.zeros(length, bool)
    sampled[sampled_places] = True
    values = np.arange(start, start + length, dtype=np.float32)
    return TokenRow(
        "agent",
        np.arange(start, start + length, dtype=np.int32),
        sampled,
        np.where(sampled, -values, 0).astype(np.float32),
        np.where(sampled, values / 7, 0).astype(np.float32),
        np.where(sampled, start, -1).astype(np.int32),
        start % 7,  # 0: the row is all of its trajectory
    )


def unpacked(micro_batches) -> dict[int, tuple]:
    """First token of each sequence -> its tokens and the (token, log-prob, advantage, version, sampled tokens of its
    trajectory) of its sampled ones."""
    found = {}
    for batch in micro_batches:
        for index in range(len(batch.tokens)):
            for segment in range(1, batch.segments[index].max() + 1):
                where = np.flatnonzero(batch.segments[index] == segment)
                assert (np.diff(where) == 1).all()
                np.testing.assert_array_equal(batch.positions[index, where], np.arange(len(where)))
                tokens = batch.tokens[index, where]
                inside = batch.mask[index] & np.isin(batch.places[index], where)
                assert len(set(batch.sequences[index, inside].tolist())) == 1
                places = batch.places[index, inside]
                assert (places > where[0]).all()
                sampled = zip(
                    batch.tokens[index, places].tolist(),
                    batch.behaviour_logprobs[index, inside].tolist(),
                    batch.advantages[index, inside].tolist(),
                    batch.versions[index, inside].tolist(),
                    batch.trajectory_tokens[index, inside].tolist(),
                    strict=True,
                )
                assert tokens[0] not in found
                found[int(tokens[0])] = (tokens.tolist(), list(sampled))
    return found


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(2, 32), min_size=1, max_size=40),
    st.integers(1, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_packing_loses_nothing_and_mixes_nothing(lengths, micro_batch_rows, trim, random):
    rows = [
        row(length, sorted(random.sample(range(1, length), random.randint(1, length - 1))), start=100 * (i + 1))
        for i, length in enumerate(lengths)
    ]
    found = unpacked(pack(rows, row_tokens=32, micro_batch_rows=micro_batch_rows, trim=trim))
    assert len(found) == len(rows)
    for original in rows:
        tokens, sampled = found[int(original.tokens[0])]
        assert tokens == original.tokens.tolist()
        places = np.flatnonzero(original.sampled)
        columns = (original.tokens, original.logprobs, original.advantages, original.versions)
        of_trajectory = original.trajectory_tokens or len(places)
        assert sampled == [(*(column[place].item() for column in columns), of_trajectory) for place in places]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 64), min_size=1, max_size=60))
def test_few_shapes_and_constant_slots(lengths):
    batches = pack([row(length, [length - 1]) for length in lengths], row_tokens=64, micro_batch_rows=4)
    for batch in batches:
        assert batch.tokens.size == 4 * 64
        assert batch.tokens.shape[1] in row_buckets(64)
        width = batch.mask.shape[1]
        assert width & (width - 1) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 64), min_size=1, max_size=60), st.sampled_from([1, 2, 4]))
def test_trimmed_micro_batches_have_few_shapes_and_hardly_more_slots_than_tokens(lengths, multiple):
    batches = pack(
        [row(length, [length - 1]) for length in lengths],
        row_tokens=64,
        micro_batch_rows=4,
        trim=True,
        rows_multiple=multiple,
    )
    for batch in batches:
        count, tokens = batch.tokens.shape
        assert tokens in row_buckets(64)
        assert count % multiple == 0
        assert batch.tokens.size <= 4 * 64
        filled = (batch.segments > 0).sum(axis=1)
        assert tokens == 16 or (filled[filled > 0] > tokens // 2).all()
        assert count < 2 * ((filled > 0).sum() + multiple)


def test_a_long_tail_is_packed_tightly():
    lengths = (64, 11, 9, 8)
    batches = pack([row(n, [n - 1]) for n in lengths], row_tokens=64, micro_batch_rows=4, trim=True)
    assert [batch.tokens.shape for batch in batches] == [(1, 64), (1, 32)]


def test_best_fit_decreasing_fills_rows():
    batches = pack([row(n, [1]) for n in (10, 22, 30, 2, 16, 16)], row_tokens=32, micro_batch_rows=3)
    assert len(batches) == 1
    assert (batches[0].segments > 0).sum() == 96  # 3 rows without a hole


def test_middle_spans_of_a_multi_turn_row_keep_its_whole_length():
    batch = pack([row(12, [3, 4, 8, 11])], row_tokens=16, micro_batch_rows=1)[0]
    assert (batch.segments[0] == 1).sum() == 12
    assert batch.places[0, batch.mask[0]].tolist() == [3, 4, 8, 11]


def test_a_sequence_without_a_sampled_token_takes_no_number():
    """Its number would push those after it beyond the slots, where a segment sum drops them without a word."""
    rows = [*(row(4, []) for _ in range(9)), *(row(2, [1]) for _ in range(3))]  # longer ones are laid out first
    for batch in pack(rows, row_tokens=64, micro_batch_rows=1):
        numbers = batch.sequences[batch.mask]
        assert len(set(numbers.tolist())) == batch.mask.sum() and numbers.max(initial=0) < batch.sequences.size
    mixed = [row(4, []), row(3, [1, 2]), row(2, [1])]
    (planned,) = plan(mixed, row_tokens=16, micro_batch_rows=1)
    (batch,) = pack(mixed, row_tokens=16, micro_batch_rows=1)
    assert [int(mixed[planned.numbered[number]].sampled.sum()) for number in batch.sequences[batch.mask]] == [2, 2, 1]


def test_a_sequence_longer_than_a_row_is_refused_with_both_numbers():
    with pytest.raises(BatchError, match=r"33 tokens.*row_tokens is 32"):
        pack([row(33, [1])], row_tokens=32, micro_batch_rows=1)


def test_a_batch_without_sampled_tokens_is_refused():
    with pytest.raises(BatchError, match="no sampled token"):
        pack([row(8, [])], row_tokens=32, micro_batch_rows=1)


def test_tokens_after_new_weights_came_are_told_from_a_later_reply_of_a_newer_version():
    first, second = row(9, [2, 3, 4, 6, 7]), row(4, [2, 3])
    first.versions[[3, 4]], first.versions[[6, 7]], second.versions[[2, 3]] = (5, 6), 6, (4, 5)
    (batch,) = pack([first, second], row_tokens=16, micro_batch_rows=1)
    masked = np.asarray(batch.mask)
    found = swapped(np.asarray(batch.places), np.asarray(batch.versions))
    assert found[masked].tolist() == [False, True, True, False, False, False, True]
    assert swapped(np.flatnonzero(first.sampled), first.versions[first.sampled]).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The longest first, each into the bin that it leaves the least room in; of several, the one filled last."""
    bins: list[tuple[list[int], int]] = []  # the last filled at the end
    opened: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [at for at, (_, room) in enumerate(bins) if room >= lengths[index]]
        if fitting:
            members, room = bins.pop(min(fitting, key=lambda at: (bins[at][1], -at)))
        else:
            members, room = [], capacity
            opened.append(members)
        members.append(index)
        bins.append((members, room - lengths[index]))
    return opened


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=60), st.integers(20, 45))
def test_each_sequence_goes_where_it_leaves_the_least_room(lengths, capacity):
    assert _best_fit_decreasing(lengths, capacity) == best_fit(lengths, capacity)


class Counted(int):
    """A length that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) > int(other)


def test_packing_many_sequences_into_long_rows_does_not_look_at_every_room_for_each():
    """25,600 of them into rows of 16,384 took 13 s, three times a step."""
    lengths = np.random.default_rng(0).integers(300, 2500, 3000).tolist()
    Counted.comparisons = 0
    bins = _best_fit_decreasing([Counted(length) for length in lengths], 16_384)
    assert sorted(index for members in bins for index in members) == list(range(3000))
    assert 0 < Counted.comparisons < 3000 * 20
