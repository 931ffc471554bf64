"""The wire format: what goes in comes out, and what cannot be read is refused."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowjax.records import SCHEMA_VERSION, Task, TokenRow, Trajectory, Turn, WireError, pack, state_key, unpack


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


def test_truncated_messages_are_refused():
    data = pack(Task("t", "w", 0))
    for length in range(0, len(data), 5):
        with pytest.raises(WireError):
            unpack(data[:length])


def test_state_keys_tell_parts_apart():
    assert state_key("ab", "c") != state_key("a", "bc")
    assert state_key("a", 1) == state_key("a", 1)
    assert 0 <= state_key("x") < 2**64
