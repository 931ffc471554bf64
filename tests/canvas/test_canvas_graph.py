import pytest
from hypothesis import given

from flowjax.canvas.graph import (
    Call,
    Conditional,
    Loop,
    Parallel,
    Sequence,
    Workflow,
    children,
    depth,
    in_sequence,
    steps_of,
    walk,
    with_children,
)
from tests.canvas.graphs import NODES, WORKFLOWS

A, B, C = Call("A"), Call("B"), Call("C")


def test_numbers_are_given_in_reading_order_and_pass_over_those_taken():
    piece = Conditional(A, None, Loop(Call("B", id="n4"), 2))
    workflow = Workflow(Sequence((piece, C)), next_number=2).numbered()
    assert [node.id for node in workflow.nodes()] == ["n5", "n6", "n7", "n4", "n8"]
    assert workflow.next_number == 9
    assert workflow.root.id == ""
    assert workflow.numbered() == workflow


@given(WORKFLOWS)
def test_every_node_has_its_own_id(workflow: Workflow):
    ids = [node.id for node in workflow.nodes()]
    assert ids == [f"n{i + 1}" for i in range(len(ids))]
    assert workflow.next_number == len(ids) + 1


@given(NODES)
def test_children_and_with_children_agree(node):
    assert with_children(node, children(node)) == node


def test_with_children_keeps_done_where_it_is():
    assert with_children(Conditional(A, None, B), (C, A)) == Conditional(C, None, A)
    assert with_children(Conditional(A, B, None), (C, A)) == Conditional(C, A, None)


@pytest.mark.parametrize(
    ("node", "expected"),
    [(A, 1), (Loop(A, 2), 2), (Sequence(()), 1), (Parallel((A, Loop(Sequence((A, B)), 2))), 4)],
)
def test_depth(node, expected: int):
    assert depth(node) == expected


def test_depth_of_a_chain_that_recursion_could_not_follow():
    node = A
    for _ in range(10_000):
        node = Loop(node, 2)
    assert depth(node) == 10_001


def test_sequences_are_as_few_nodes_as_they_can():
    assert in_sequence([A, Sequence((B, C))]) == Sequence((A, B, C))
    assert in_sequence([A, B], "n7") == Sequence((A, B), "n7")
    assert in_sequence([A], "n7") == A
    assert in_sequence([Sequence((A, B), "n3")]) == Sequence((A, B), "n3")
    assert in_sequence([]) is None
    assert (steps_of(None), steps_of(A), steps_of(Sequence((A, B)))) == ((), (A,), (A, B))


def test_walk_is_in_reading_order():
    node = Sequence((A, Conditional(B, C, Parallel((A, B)))))
    assert [each.operator for each in walk(node) if isinstance(each, Call)] == ["A", "B", "C", "A", "B"]
