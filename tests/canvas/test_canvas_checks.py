from dataclasses import replace

import pytest
from hypothesis import given

from flowjax.canvas.checks import nearest, problems, unknown_name
from flowjax.canvas.graph import Call, Loop, Parallel, Sequence, Workflow
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.text import parse
from tests.canvas.graphs import LIBRARY, WORKFLOWS


def faults(source: str) -> list[str]:
    return problems(parse(source), LIBRARY, backends=("small", "large"))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "Custom",
        "Plan -> [Programmer, Custom@small] -> ScEnsemble -> (Verify ? done : Revise) -> Format",
        "(Review -> Revise) * 10",
        "[[Custom, Custom] -> ScEnsemble, Programmer] -> ScEnsemble",
        "Custom#a -> Plan -> Verify{answer=a.answer}",
        "Custom#a ? Verify{answer=a.answer} : done",
        "Custom#a ? Plan#b : Plan#c -> Verify{answer=b.plan}",
        "Custom#a -> Programmer#b -> ScEnsemble{candidates=a.answer, candidates=b.code}",
    ],
)
def test_good_workflows(source: str):
    assert faults(source) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("custom", ["n1 `custom`", "no operator `custom`", "Did you mean `Custom`?"]),
        ("Programer", ["Did you mean `Programmer`?", "There are: Aggregate, Custom"]),
        ("Zzz", ["no operator `Zzz`. There are:"]),
        ("[Custom]", ["n1 `[Custom]`", "two branches or more"]),
        ("[Custom, ScEnsemble]", ["n3 `ScEnsemble` is a branch", "`[A, B] -> ScEnsemble`"]),
        ("(Revise) * 99", ["1 to 10 times, not 99"]),
        ("(Revise) * 0", ["1 to 10 times, not 0"]),
        ("Verify ? done : done", ["one branch at least"]),
        ("Custom@smal", ["no backend `smal`", "Did you mean `small`?"]),
        ("Custom#a -> Plan#a", ["`a` is given twice"]),
        ("Custom -> Verify{answer=n9.answer}", ["bound to `n9.answer`", "no node `n9`"]),
        ("Verify{answer=b.answer} -> Custom#b", ["b `Custom` does not run before it"]),
        ("[Custom#a, Verify{answer=a.answer}]", ["does not run before it"]),
        ("Plan ? Custom#a : Verify{answer=a.answer}", ["does not run before it"]),
        ("Custom#a -> Verify{anser=a.answer}", ["no such input; it reads answer, code, problem"]),
        ("Custom#a -> Verify{answer=a.code}", ["a `Custom` writes answer"]),
        ("[Custom, Plan]#p -> Verify{answer=p.answer}", ["is no operator"]),
        ("Verify#v -> Revise{feedback=v.passed}", ["bound to `v.passed`, of kind flag", "reads `feedback` as text"]),
        ("Verify#v -> ScEnsemble{candidates=v.passed}", ["of kind flag", "reads `candidates` as texts"]),
        ("Custom#a -> Plan#b -> Revise{answer=a.answer, answer=b.plan}", ["`answer` is bound 2 times", "bind it once"]),
    ],
)
def test_faults_say_what_is_wrong_and_what_would_be_right(source: str, says: list[str]):
    (fault,) = faults(source)
    assert all(words in fault for words in says), fault


def test_several_texts_are_no_text():
    assert problems(parse("Decompose#d -> Revise{feedback=d.subproblems}"), load_operators()) == [
        "n1 `Revise`: the input `feedback` is bound to `d.subproblems`, of kind texts, "
        "but Revise reads `feedback` as text."
    ]


def test_an_empty_piece_and_too_deep_a_graph():
    empty = Workflow(Sequence((Parallel((Sequence((), "n2"), Call("Custom"))),)))
    assert problems(empty, LIBRARY) == ["n2 has no steps: put an operator in, or delete it."]
    nested = Call("Custom")
    for _ in range(60):
        nested = Loop(nested, 2)
    assert problems(Workflow(Sequence((nested,))), LIBRARY) == [
        "The nodes are inside one another 61 deep: use at most 50."
    ]


def test_every_fault_is_told_in_reading_order():
    assert [fault.split()[0] for fault in faults("custom -> [Custom] -> (Verify ? verify : done) * 11")] == [
        "n1",
        "n2",
        "n4",
        "n7",
    ]


def test_names():
    assert nearest("PROGRAMMER", LIBRARY) == "Programmer"
    assert nearest("scensembel", LIBRARY) == "ScEnsemble"
    assert nearest("x" * 1_000_000, LIBRARY) is None
    assert unknown_name("backend", "b", ()) == "There is no backend `b`. There are none."


@given(WORKFLOWS)
def test_any_workflow_is_judged(workflow: Workflow):
    for each in (workflow, replace(workflow, next_number=1)):
        problems(each, LIBRARY)
