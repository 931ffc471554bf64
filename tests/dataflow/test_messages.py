"""Fields of messages that nothing else would miss."""

import pytest

from flowjax.dataflow.service import sender_of


@pytest.mark.parametrize(
    ("message", "sender"),
    [({"worker": "rollout-1"}, "rollout-1"), ({}, ""), ({"worker": 3}, ""), ({"worker": None}, "")],
)
def test_a_sender_is_named_where_a_message_names_one(message, sender):
    assert sender_of(message) == sender


def test_a_sender_of_any_length_cannot_fill_the_log():
    assert 0 < len(sender_of({"worker": "w" * 100_000})) <= 1000
