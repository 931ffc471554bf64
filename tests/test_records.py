"""The wire format: what goes in comes out, and what cannot be read is refused."""

from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowjax.records import (
    SCHEMA_VERSION,
    Bounds,
    Episode,
    Leased,
    Task,
    TokenRow,
    Trajectory,
    Turn,
    WireError,
    check_episode,
    check_lease,
    pack,
    state_key,
    unpack,
)


def turn() -> Turn:
    return Turn(
        policy="agent",
        version=3,
        prompt_ids=np.arange(5, dtype=np.int64),
        sampled_ids=np.array([7], np.int32),
        logprobs=np.array([-0.25], np.float64),
        finish_reason="stop",
        state_key=2**64 - 1,
        next_state_key=0,
        env_reward=-0.1,
        valid=True,
        terminal=False,
    )


def test_a_trajectory_survives_the_wire():
    sent = Trajectory("t", "g", "task", 5, [turn(), turn()], {"success": 1.0}, "truncated", "why")
    got = unpack(pack({"items": [sent]}))["items"][0]
    assert isinstance(got, Trajectory)
    assert (got.trajectory_id, got.status, got.error, got.outcome) == ("t", "truncated", "why", {"success": 1.0})
    first = got.turns[0]
    assert first.state_key == 2**64 - 1
    assert first.prompt_ids.dtype == np.int32
    assert first.logprobs.dtype == np.float32
    np.testing.assert_array_equal(first.prompt_ids, np.arange(5))
    np.testing.assert_array_equal(first.logprobs, np.array([-0.25], np.float32))


def test_two_dimensional_arrays_and_bools_survive():
    values = np.ones(3, np.float32)
    row = TokenRow("p", np.arange(3), np.array([True, False, True]), values, values, np.zeros(3, np.int32))
    got = unpack(pack(row))
    assert got.sampled.tolist() == [True, False, True]
    np.testing.assert_array_equal(unpack(pack(np.arange(6).reshape(2, 3))), np.arange(6).reshape(2, 3))


def raw(envelope: dict) -> bytes:
    packed = msgpack.packb(envelope)
    assert packed is not None
    return packed


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (np.zeros(2, np.uint8), "an array of uint8"),
        (np.array(["a"]), "an array of <U1"),
        (np.array([0, 2**31]), "from 0 to 2147483648"),
        (np.array([-(2**31) - 1]), "from -2147483649 to -2147483649"),
    ],
)
def test_an_array_that_the_wire_would_change_is_refused(array, fault):
    with pytest.raises(TypeError, match=f"{fault} cannot go on the wire: .*32 bits"):
        pack(Task("task", "toy", 0, {"pixels": array}))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_a_wire_error(data):
    with pytest.raises(WireError):
        unpack(data)


def test_another_schema_version_is_named():
    data = raw({"schema": SCHEMA_VERSION + 1, "body": {}})
    with pytest.raises(WireError, match=f"schema version {SCHEMA_VERSION + 1}"):
        unpack(data)


def test_a_record_with_missing_or_unknown_fields_is_refused():
    envelope = {"schema": SCHEMA_VERSION, "body": {"__record__": "Task", "task_id": "x"}}
    with pytest.raises(WireError):
        unpack(raw(envelope))
    envelope["body"] = {"__record__": "Nonsense"}
    with pytest.raises(WireError, match="Nonsense"):
        unpack(raw(envelope))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"__array__": "<i4", "data": b"12345678", "shape": [3]},
            "not a flowjax message .*array of <i4 cannot reshape .*; send its bytes as data",
        ),
        (
            {"__array__": "<i4", "data": b"12345678"},
            "array of <i4 lacks 'shape'; send its bytes as data, and shape",
        ),
        ({"__record__": ["Turn"]}, r"record \['Turn'\] is not one of"),
        ({"__record__": "Task", "world": "w"}, "record Task: it lacks seed, task_id: send all of seed, task_id, world"),
        ({"__record__": "Task", "task_id": "a", "world": "w", "seed": 1, "foo": 2}, "record Task: it has no field foo"),
    ],
)
def test_what_is_wrong_with_an_array_or_a_record_is_named(body, said):
    with pytest.raises(WireError, match=said):
        unpack(raw({"schema": SCHEMA_VERSION, "body": body}))


def test_truncated_messages_are_refused():
    data = pack(Task("t", "w", 0))
    for length in range(0, len(data), 5):
        with pytest.raises(WireError):
            unpack(data[:length])


def test_state_keys_tell_parts_apart():
    assert state_key("ab", "c") != state_key("a", "bc")
    assert state_key("a", 1) == state_key("a", 1)
    assert 0 <= state_key("x") < 2**64


def exchanged(spans, version: int = 3) -> Episode:
    """An episode of one turn of three tokens, as it comes over the wire."""
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    made = replace(turn(), version=version, sampled_ids=ids, logprobs=logprobs, spans=spans)
    return unpack(pack(Episode("e", "g", "task", 5, [Trajectory("e", "g", "task", 5, [made], {})], {})))


@pytest.mark.parametrize("spans", [(), [(3, 3)], [(3, 1), (4, 2)], [(5, 1), (3, 1), (5, 1)]])
def test_a_turn_says_which_versions_sampled_it(spans):
    episode = exchanged(spans)
    check_episode(episode, newest={"agent": 5}, bounds=Bounds(5, 3, 1))
    (made,) = episode.trajectories[0].turns
    assert made.versions == ([version for version, _ in spans] or [3])
    assert made.token_versions.tolist() == [version for version, tokens in spans for _ in range(tokens)] or not spans
    assert made.token_versions.dtype == np.int32 and len(made.token_versions) == 3
    leased = Leased("g", "task", 5, {"agent": 3})
    if set(made.versions) == {3}:
        check_lease(episode, leased)
    else:
        with pytest.raises(
            WireError, match=r"turns\[0\]\.version is .*[45].*, but its lease says 3: play that version"
        ):
            check_lease(episode, leased)
    check_lease(episode, replace(leased, versions={}))


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([(4, 3)], "has no token of version 3, the turn's: that is the oldest of them"),
        ([(3, 2), (2, 1)], r"spans\[1\] is 2, 1: it is a version from 3, the turn's, to 5, and how many tokens"),
        ([(3, 2), (6, 1)], r"spans\[1\] is 6, 1: it is a version from 3"),
        ([(3, 2), (4, 2)], "spans has 4 tokens, but 3 were sampled"),
        ([(3, 2), (4, 0), (5, 1)], r"spans\[1\] is 4, 0"),
        ([(3, 2), (4, True)], r"spans\[1\] is 4, True"),
        ([(3, 2), (4.0, 1)], r"spans\[1\] is 4\.0, 1"),
        ([3, 3, 3], r"spans\[0\] is 3: it is a version"),
        ("334", "spans is '334': it is a list of pairs"),
        ({"3": 3}, "spans is dict: it is a list of pairs"),
    ],
)
def test_spans_that_cannot_be_are_refused(spans, fault):
    with pytest.raises(WireError, match=fault):
        check_episode(exchanged(spans), newest={"agent": 5}, bounds=Bounds(5, 3, 1))


def test_a_turn_of_a_service_that_knows_no_spans_is_of_one_version():
    message = msgpack.unpackb(pack(exchanged(())))
    del message["body"]["trajectories"][0]["turns"][0]["spans"]
    (made,) = unpack(raw(message)).trajectories[0].turns
    assert made.token_versions.tolist() == [3, 3, 3]
