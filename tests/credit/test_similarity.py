"""Anchors by likeness of texts."""

import numpy as np
from credit_tables import Path, paths_table

from flowjax.credit.estimators import get_estimator
from flowjax.credit.similarity import similar_states

PAGE = "You are in the kitchen. You see a cabinet 1, a fridge 1, a stove 1 and a table. The clock says "
TABLE = paths_table([Path([0, 1, 9], [0, 1.0]), Path([2, 3, 8], [0, 0.0]), Path([0, 9], [0.0], group=1)])


def test_nearly_equal_texts_share_an_anchor_within_a_task():
    texts = [f"{PAGE}12:01.", "a hallway", f"{PAGE}12:02.", "a bedroom", f"{PAGE}12:01."]
    for linkage in ("components", "first"):
        anchors = similar_states(TABLE, texts, threshold=0.9, linkage=linkage)
        assert anchors[0] == anchors[2]
        assert len(set(anchors[:5].tolist())) == 4  # the hallway, the bedroom and the other task stay apart
    exact = similar_states(TABLE, texts, threshold=1.0)
    assert exact[0] != exact[2]


def test_linkage():
    """b is like both a and c, which are not like each other."""
    table = paths_table([Path([i, 9], [0.0]) for i in range(3)])
    a, b, c = "abcdefghij" * 3 + "0" * 8, "abcdefghij" * 3 + "0" * 4 + "1" * 4, "abcdefghij" * 3 + "1" * 8
    assert len(set(similar_states(table, [a, b, c], threshold=0.8)[:3])) == 1
    first = similar_states(table, [a, b, c], threshold=0.8, linkage="first")[:3]
    assert first[0] == first[1] != first[2]
    moved = similar_states(table, [b, a, c], threshold=0.8, linkage="first")[:3]
    assert len(set(moved)) == 1  # the order matters there


def test_gigpo_compares_turns_with_like_anchors():
    texts = [f"{PAGE}12:01.", "a hallway", f"{PAGE}12:02.", "a bedroom", "elsewhere"]
    gigpo = get_estimator("gigpo")
    near = gigpo(TABLE, similar_states(TABLE, texts, threshold=0.9), gamma=0.5)
    exact = gigpo(TABLE, gamma=0.5)
    np.testing.assert_allclose(np.asarray(near - exact)[:5], [0.25, 0, -0.25, 0, 0], atol=1e-6)
