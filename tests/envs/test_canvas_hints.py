"""Hints of the published canvas are those of the published controller (`[NEXT]`), row for row."""

import pytest

from flowjax.canvas.actions import Add, Modify
from flowjax.canvas.graph import Call
from flowjax.canvas.text import parse
from flowjax.canvas.values import Problem, ProblemKind, RunStatus, Usage, WorkflowRun
from flowjax.published.canvas import hint


def told(
    source: str,
    kind: ProblemKind,
    answer: str = "42",
    *,
    last: str = "",
    status: RunStatus = "ok",
    passed: bool | None = None,
    tests: tuple[str, ...] = (),
) -> str:
    """The hint after `last`, or else the last operator of a workflow, was added."""
    workflow = parse(source)
    added = Call(last or [call.operator for call in workflow.calls()][-1])
    run = WorkflowRun(answer, status, {} if passed is None else {"passed": passed}, (), Usage(), 0.0)
    return hint(workflow, run, Problem("?", kind, public_tests=tests), Add(added))


def test_after_an_error():
    assert told("Programmer", "math", status="error") == "add Programmer"
    assert told("Programmer -> Test", "code", status="error") == "add Test ? done : Programmer"
    assert told("Custom", "qa", status="error") == "add Revise"
    assert told("Review", "qa", status="error") == "add Custom"
    assert told("Custom", "qa", "The battle failed.") == "add Revise", "by what stands in the result"
    assert told("[Custom, Custom]", "qa", "Timeout of 3 s") == "add Revise"


def test_before_a_solver():
    assert [told("Plan", kind) for kind in ("math", "code", "qa")] == ["add Programmer", "add Programmer", "add Custom"]
    assert [told("Review", kind) for kind in ("math", "code", "qa")] == ["add Programmer", "add Custom", "add Custom"]


@pytest.mark.parametrize(
    ("source", "kind", "following"),
    [
        ("Programmer", "math", "add Verify"),
        ("Programmer", "code", "add Test"),
        ("Custom", "qa", "add Review"),
        ("Custom", "general", "add Review"),
        ("Review -> Custom", "qa", "add Review"),  # a check is Verify or Test
        ("Verify -> Custom", "qa", "finish"),
        ("Programmer -> Test -> Programmer", "math", "add Verify"),
        ("Programmer -> Verify -> Programmer", "code", "finish"),  # no tests were given
    ],
)
def test_after_a_solver(source: str, kind: ProblemKind, following: str):
    assert told(source, kind) == following


def test_a_problem_with_tests_wants_them_run():
    assert told("Programmer -> Verify -> Programmer", "code", tests=("assert f(1) == 1",)) == "add Test"


def test_after_a_check():
    assert told("Custom -> Verify", "qa") == "add Revise"
    assert told("Custom -> Verify", "qa", passed=False) == "add Revise"
    assert told("Custom -> Verify", "qa", passed=True) == "add Format"
    assert told("Custom -> Format -> Verify", "qa", passed=True) == "finish"
    assert told("Custom -> Review", "qa") == "add Format"
    assert told("Custom -> Format -> Test", "qa") == "finish"


def test_an_operator_that_was_put_in_place_of_another_counts_as_one_added():
    workflow = parse("Custom -> Verify")
    run = WorkflowRun("Paris", "ok", {}, (), Usage(), 0.0)
    assert hint(workflow, run, Problem("?", "qa"), Modify("n2", operator="Verify")) == "add Revise"


@pytest.mark.parametrize("answer", ["To solve it, add 2 to 40", "First, take 3", "Step 1", "a\nb", "long " * 11])
def test_what_reads_like_prose_is_not_concise(answer: str):
    assert told("Custom -> Format", "qa", answer) == "add Revise"
    assert told("Custom -> Verify -> Custom", "qa", answer) == "add Format"
    assert told("Custom -> Revise", "qa", answer) == "add Format"
    assert told("Custom -> Revise", "qa", "42") == "finish"


def test_branches_are_combined():
    assert told("[Programmer, Custom]", "math") == "add ScEnsemble"
    assert told("[Custom, Custom]", "qa") == "add Aggregate"
    assert told("[Custom, Custom] -> MdEnsemble", "qa") == "finish"
