import re
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowjax.canvas.edits import EditError, add, delete, find, modify, set_instruction
from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow
from flowjax.canvas.text import parse, parse_piece, show
from tests.canvas.graphs import NODES, WORKFLOWS

START = "A -> [B, C -> D]#p -> (E ? F : done)#c -> (G)#x * 2#l"


def shown(workflow: Workflow) -> str:
    return show(workflow)


@pytest.mark.parametrize(
    ("into", "position", "after"),
    [
        ("", None, "A -> [B, C -> D] -> (E ? F : done) -> (G) * 2 -> X -> Y"),
        ("", 1, "A -> X -> Y -> [B, C -> D] -> (E ? F : done) -> (G) * 2"),
        ("p", None, "A -> [B, C -> D, X -> Y] -> (E ? F : done) -> (G) * 2"),
        ("p", 0, "A -> [X -> Y, B, C -> D] -> (E ? F : done) -> (G) * 2"),
        ("n2", 0, "A -> [X -> Y -> B, C -> D] -> (E ? F : done) -> (G) * 2"),
        ("n2", None, "A -> [B -> X -> Y, C -> D] -> (E ? F : done) -> (G) * 2"),
        ("n3", 1, "A -> [B, C -> X -> Y -> D] -> (E ? F : done) -> (G) * 2"),
        ("n4", None, "A -> [B, C -> X -> Y -> D] -> (E ? F : done) -> (G) * 2"),
        ("c.true", 0, "A -> [B, C -> D] -> (E ? (X -> Y -> F) : done) -> (G) * 2"),
        ("c.false", None, "A -> [B, C -> D] -> (E ? F : (X -> Y)) -> (G) * 2"),
        ("c.condition", 0, "A -> [B, C -> D] -> ((X -> Y -> E) ? F : done) -> (G) * 2"),
        ("l", 0, "A -> [B, C -> D] -> (E ? F : done) -> (X -> Y -> G) * 2"),
        ("n1", 0, "X -> Y -> A -> [B, C -> D] -> (E ? F : done) -> (G) * 2"),
    ],
)
def test_add_anywhere(into: str, position: int | None, after: str):
    """Defect: nothing could be added inside a node, and nodes could not be nested."""
    start = parse(START)
    edited = add(start, parse_piece("X -> Y"), into=into, position=position)
    assert shown(edited) == after
    kept = {node.id: type(node) for node in start.nodes()}
    assert kept.items() <= {node.id: type(node) for node in edited.nodes()}.items()


@pytest.mark.parametrize(
    ("into", "position", "says"),
    [
        ("", 9, "no position 9 in the canvas: use 0 to 4"),
        ("n77", None, "no node `n77`: there are n1, p, n2"),
        ("c", None, "is a conditional: say which part of it, `c.condition`, `c.true`, `c.false`"),
        ("c.then", None, "say which part"),
        ("p.true", None, "has no part `true`: write `p` alone"),
        ("n2", 2, "no position 2 in n2: use 0 to 1"),
    ],
)
def test_add_nowhere(into: str, position: int | None, says: str):
    with pytest.raises(EditError, match=re.escape(says)):
        add(parse(START), Call("X"), into=into, position=position)


def test_what_is_added_gets_new_ids_and_its_bindings_follow():
    workflow = add(parse("A -> B"), parse_piece("[C#n1, D] -> E#own -> F{answer=own.answer}"))
    assert show(workflow, ids=True) == "A#n1 -> B#n2 -> [C#n5, D#n6]#n4 -> E#n3 -> F{answer=n3.answer}#n7"
    bound = add(workflow, parse_piece("F{answer=n3.answer, code=n1.code}"))
    assert show(bound).endswith("F{answer=n3.answer, code=n1.code}")


@pytest.mark.parametrize(
    ("before", "target", "after"),
    [
        ("A -> B", "n1", "B"),
        ("A", "n1", ""),
        ("[A, B, C]", "n3", "[A, C]"),
        ("[A, B]", "n3", "A"),
        ("[A -> B, C] -> D", "n5", "A -> B -> D"),
        ("[A, B -> C]", "n5", "[A, B]"),
        ("A ? B : C", "n3", "A ? done : C"),
        ("A ? B : done", "n3", "A"),
        ("A ? B : C", "n1", ""),
        ("(A -> B) ? C : done", "n3", "B ? C : done"),
        ("(A) * 2 -> B", "n2", "B"),
        ("(A -> [B, (C) * 3]) * 2", "n6", "(A -> B) * 2"),
        ("[(A) * 2, (B ? C : done), D]", "n3", "[B ? C : done, D]"),
    ],
)
def test_delete_at_any_depth(before: str, target: str, after: str):
    """Defect: only nodes at the top could be deleted."""
    assert shown(delete(parse(before), target)) == after


def test_a_condition_is_not_deleted():
    with pytest.raises(EditError, match=r"cannot be without its condition: delete n1, or modify"):
        delete(parse("A ? B : C"), "n2")


def test_bindings_to_what_is_deleted_go_with_it():
    assert shown(delete(parse("A#a -> B#b -> C{answer=a.answer, code=b.code}"), "a")) == "B#b -> C{code=b.code}"


def test_deleted_ids_are_never_given_again():
    """Defect: ids were counted from the number of nodes, so that after a delete two nodes had the same one."""
    workflow = delete(parse("A -> B -> C"), "n1")
    assert show(add(workflow, Call("D")), ids=True) == "B#n2 -> C#n3 -> D#n4"
    emptied = delete(delete(workflow, "n2"), "n3")
    assert show(add(emptied, Call("D")), ids=True) == "D#n4"


def test_modify():
    start = parse('A{"do", answer=n9.answer}@small -> (B) * 2')
    assert shown(modify(start, "n1", operator="X")) == "X@small -> (B) * 2"
    assert shown(modify(start, "n1", operator="X", backend="")) == "X -> (B) * 2"
    assert 'A{"do", answer=n9.answer}@large' in shown(modify(start, "n1", backend="large"))
    assert shown(modify(start, "n2", count=5)).endswith("(B) * 5")
    assert shown(modify(start, "n3", operator="Y")).endswith("(Y) * 2")


@pytest.mark.parametrize(
    ("target", "change", "says"),
    [
        (
            "p",
            {"operator": "X"},
            "p `[B, C -> D]` is a parallel, no operator: modify one of the operators in it (n2, n4",
        ),
        ("c", {"operator": "X"}, "is a conditional, no operator"),
        ("l", {"operator": "X"}, "modify its count, or modify one of the operators in it (x)"),
        ("n3", {"backend": "small"}, "is a sequence, no operator"),
        ("n1", {"count": 2}, "is an operator and has no count"),
        ("n1", {}, "Nothing to modify"),
        ("n88", {"operator": "X"}, "no node `n88`"),
    ],
)
def test_what_cannot_be_modified_is_refused_at_once(target: str, change: dict[str, Any], says: str):
    """Defect: modifying a parallel, conditional or loop waited for ever for an instruction."""
    with pytest.raises(EditError, match=re.escape(says)):
        modify(parse(START), target, **change)


def test_set_instruction():
    assert shown(set_instruction(parse("A -> [B, C]"), "n3", "go")) == 'A -> [B{"go"}, C]'
    assert shown(set_instruction(parse('A{"go"}'), "n1", "")) == "A"
    with pytest.raises(EditError, match=r"is a loop, no operator: instruct one of the operators in it \(x\)"):
        set_instruction(parse(START), "l", "go")


def test_find():
    assert find(parse("A -> B"), "n2") == Call("B", id="n2")
    with pytest.raises(EditError, match="the canvas is empty"):
        find(Workflow(), "n1")


def needless(node: Node, top: bool = True) -> bool:
    """Whether the node has fewer parts than it needs, or a sequence directly in a sequence."""
    match node:
        case Sequence(steps):
            bad = any(isinstance(step, Sequence) for step in steps) or (len(steps) < 2 and not top)
            return bad or any(needless(step, False) for step in steps)
        case Parallel(branches):
            return len(branches) < 2 or any(needless(branch, False) for branch in branches)
        case Conditional(condition, then, otherwise):
            inside = [part for part in (condition, then, otherwise) if part is not None]
            return len(inside) < 2 or any(needless(part, False) for part in inside)
        case Loop(body):
            return needless(body, False)
        case Call():
            return False


@given(WORKFLOWS.filter(lambda workflow: not needless(workflow.root)), st.data())
@settings(max_examples=60)
def test_any_edits_keep_ids_unique_and_the_graph_small(workflow: Workflow, data: st.DataObject):
    ever = {node.id for node in workflow.nodes()}
    for _ in range(data.draw(st.integers(1, 6))):
        ids = [node.id for node in workflow.nodes()]
        before = set(ids)
        if ids and data.draw(st.booleans()):
            try:
                workflow = delete(workflow, data.draw(st.sampled_from(ids)))
            except EditError as refused:
                assert "condition" in str(refused)
        else:
            into = data.draw(st.sampled_from(["", *ids]))
            piece = data.draw(NODES.filter(lambda node: not needless(node)))
            try:
                workflow = add(workflow, piece, into=into)
            except EditError as refused:
                assert "say which part" in str(refused)
        now = [node.id for node in workflow.nodes()]
        assert len(now) == len(set(now)) and "" not in now
        assert not (set(now) - before) & ever
        ever |= set(now)
        assert not needless(workflow.root)
