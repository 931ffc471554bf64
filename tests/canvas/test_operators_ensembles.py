"""Operators that combine candidates: when they ask, and how votes are read."""

import json
import re

import pytest
from operator_context import use

from flowjax.canvas.operators import OperatorError
from flowjax.canvas.operators.built_in import groups
from flowjax.canvas.values import Problem, State

SUM = Problem("What is 2+3?", "math")
CODE = Problem("Double a number.", "code", entry_point="double")


def vote(letter: str) -> str:
    return json.dumps({"choice": letter})


def among(*candidates: str) -> State:
    return {"candidates": candidates}


@pytest.mark.parametrize("name", ["ScEnsemble", "MdEnsemble", "Aggregate"])
@pytest.mark.parametrize("candidates", [("5",), ("5", " $5$ ", "5.0"), ("5", "\\boxed{5}")])
def test_nobody_is_asked_where_candidates_agree(name: str, candidates: tuple[str, ...]):
    assert use(name, SUM, among(*candidates))[0] == {"answer": "5"}


@pytest.mark.parametrize("name", ["ScEnsemble", "MdEnsemble", "Aggregate"])
def test_no_candidates_are_said(name: str):
    with pytest.raises(OperatorError, match="no candidates"):
        use(name, SUM, among("", " "))


def test_a_majority_needs_no_vote():
    assert use("ScEnsemble", SUM, among("6", "5", "5.0"))[0] == {"answer": "5"}


def test_the_largest_group_wins_where_it_is_alone_and_a_tie_leaves_out_the_others():
    assert use("ScEnsemble", SUM, among("7", "5", "6", "5.0"))[0] == {"answer": "5"}
    outputs, context = use("ScEnsemble", SUM, among("7", "5", "6", "5.0", "6"), vote("B"))
    assert outputs == {"answer": "6"}
    assert "A.\n5\n\nB.\n6" in context.asked[0] and "\n7" not in context.asked[0]


def test_programs_are_the_same_whatever_their_spaces():
    same = ["def double(x):\n    return 2 * x", "def double(x): return 2*x  # twice"]
    assert len(groups([*same, "def double(x): return x"], CODE)) == 2
    assert use("ScEnsemble", CODE, among(*same))[0] == {"code": same[0]}


def test_words_and_options_are_compared_as_such():
    question = Problem("Who?", "qa")
    assert len(groups(["Jane Austen", "jane austen.", "-3", "3"], question)) == 3
    choice = Problem("Which?", "choice", options={"A": "Mars", "B": "Jupiter"})
    assert len(groups(["B", "(B) Jupiter", "Jupiter", "A"], choice)) == 2


def test_the_vote_decides_a_tie():
    outputs, context = use("ScEnsemble", SUM, among("5", "six", "7"), vote("B"))
    assert outputs == {"answer": "six"}
    assert "B.\nsix" in context.asked[0]


@pytest.mark.parametrize("reply", ["B", "I vote for B", vote("D"), vote("b"), ""])
def test_votes_are_read_strictly(reply: str):
    """Published: any letter found in the reply is a vote, and without one the first candidate wins."""
    with pytest.raises(OperatorError, match="choice"):
        use("ScEnsemble", SUM, among("5", "6", "7"), reply, reply)


def offered(asked: str) -> list[str]:
    return re.findall(r"^[A-Z]\.\n(\w+)", asked, re.MULTILINE)


def test_votes_see_other_orders_and_are_counted():
    outputs, context = use("MdEnsemble", SUM, among("5", "6", "7"), *map(vote, "ACBAB"))
    assert context.seeds == [0, 1, 2, 3, 4]
    orders = [offered(asked) for asked in context.asked]
    assert orders == [list("567"), list("675"), list("756"), list("765"), list("576")]
    assert outputs == {"answer": "5"}


def test_two_candidates_are_first_in_turn():
    _, context = use("MdEnsemble", SUM, among("5", "6"), *[vote("A")] * 5)
    assert [offered(asked)[0] for asked in context.asked] == list("56655")


def test_unread_votes_do_not_count():
    junk = ["none"] * 2
    outputs, context = use("MdEnsemble", SUM, among("5", "6"), *junk, *junk, *junk, *junk, vote("A"))
    assert outputs["answer"] == context.asked[-1].partition("A.\n")[2][0]
    with pytest.raises(OperatorError, match="none of 5 votes"):
        use("MdEnsemble", SUM, among("5", "6"), *junk * 5)


def test_aggregate_may_find_a_new_answer():
    outputs, context = use("Aggregate", SUM, {**among("2", "3"), "subproblems": ("first?", "second?")}, "Answer: 5")
    assert outputs["answer"] == "5"
    assert "2. second?" in context.asked[0] and "2. 3" in context.asked[0]


def test_a_vote_offers_every_candidate_however_many_there_are():
    candidates = tuple(str(number) for number in range(30))
    outputs, context = use("ScEnsemble", "?", {"candidates": candidates}, '{"choice": "AD"}')
    assert outputs == {"answer": "29"}
    schema = context.schemas[0]
    assert schema is not None
    offered = schema["properties"]["choice"]["enum"]
    assert len(set(offered)) == 30 and [offered[0], offered[25], offered[26]] == ["A", "Z", "AA"]
    assert "AD.\n29" in context.asked[0]
