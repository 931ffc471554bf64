"""Faults of the published executor (FlowSteer, commit 1c9f2ab) that this one must not have, each named and tested."""

import pytest

from flowjax.canvas.cache import Cache
from flowjax.canvas.operators import OperatorError
from flowjax.canvas.values import Field, Problem
from tests.canvas.toy_operators import Ask, Echo, Plan, appending, checking, failing, go, merging, operator, order, runs

A, B, C = appending("A", "a"), appending("B", "b"), appending("C", "c")
VERIFY = checking("Verify", lambda answer: "!" in answer)
REVISE, FORMAT = appending("Revise", "!"), appending("Format", ".")
CODE = Problem("Write it.", "code", entry_point="f")


def programmer(name: str):
    """Writes version 0, or one more than the version that failed, and what the program printed."""

    def work(given, context):
        version = int(given["code"].removeprefix("v")) + 1 if "feedback" in given else 0
        return {"code": f"v{version}", "answer": f"printed by v{version}"}

    inputs = (Field("code", "code", required=False), Field("feedback", required=False))
    return operator(name, inputs, (Field("code", "code"), Field("answer")), work)


def test_conditional_runs_the_first_branch_where_the_check_passes():
    """Fault: `X ? Y : Z` ran Y where the check failed, against what the policy was told."""
    assert go("A -> (Verify ? B : Revise)", A, B, VERIFY, REVISE).answer == "a!"
    assert go("Revise -> (Verify ? B : Revise)", B, VERIFY, REVISE).answer == "!b"


def test_loops_are_true_loops_of_any_count():
    """Fault: loops were unrolled to at most 5 repeats and 15 steps; what came after was dropped without a word."""
    result = go("Plan -> (A -> B -> C) * 10 -> Verify -> Format", Plan, A, B, C, VERIFY, FORMAT)
    assert result.answer == "abc" * 10 + "."
    assert runs(result) == {"Plan": 1, "A": 10, "B": 10, "C": 10, "Verify": 1, "Format": 1}


def test_equal_neighbours_both_run():
    """Fault: an operator after an equal one was removed, so that `(Revise) * 3` revised once."""
    assert go("(Revise) * 3", REVISE).answer == "!!!"
    assert go("A -> A -> [A, A -> A] -> Merge", A, merging()).answer == "aaa+aaaa"


def test_loops_end_when_a_check_passes():
    """Fault: loops had no early exit."""
    result = go("A -> (Verify -> Revise) * 5 -> Format", A, VERIFY, REVISE, FORMAT)
    assert order(result) == "A Verify Revise Verify Format"
    assert go("Revise -> (Verify) * 5", VERIFY, REVISE).answer == "!"


def test_a_check_deeper_in_the_body_does_not_end_the_loop():
    """Only a direct step of the body does, as the policy is told."""
    result = go("(Revise -> (Verify ? done : A)) * 3", A, VERIFY, REVISE)
    assert runs(result) == {"Revise": 3, "Verify": 3}


def test_steps_after_an_aggregate_count():
    """Fault: with an Aggregate anywhere, its result was the run's, and later Verify and Format were thrown away."""
    aggregate = merging("Aggregate")
    result = go("[A, B] -> Aggregate -> Verify -> Format", A, B, aggregate, VERIFY, FORMAT)
    assert result.answer == "a+b."


def test_an_operator_used_only_in_the_second_branch_exists():
    """Fault: the second branch's operator was never made, which was an AttributeError when the branch was taken."""
    assert go("A -> (Verify ? done : Revise)", A, VERIFY, REVISE).answer == "a!"


@pytest.mark.parametrize("kind", ["Plan", "Decompose", "AnswerGenerate", "ScEnsemble", "MdEnsemble", "Aggregate"])
def test_a_new_instruction_runs_the_operator_again(kind):
    """Fault: the cache's key left out the instruction for these six, so that re-prompting them changed nothing."""

    class Prompted(Ask):
        name, inputs = kind, (Field("problem"), Field("candidates", "texts", required=False))

    cache, backend = Cache(), Echo()

    def answer(instruction: str) -> str:
        workflow = f'[A, B] -> {kind}{{"{instruction}"}}'
        return go(workflow, A, B, Prompted, cache=cache, backends={"small": backend}).answer

    first = answer("In words.")
    assert "In words." in first
    assert "In digits." in answer("In digits.")
    assert answer("In words.") == first
    assert len(backend.asked) == 2


def test_a_failed_run_says_so():
    """Fault: failures became the text WORKFLOW_ERROR, reported as a success whose answer that text was."""
    result = go("Fail", failing("Fail", OperatorError("no such thing")))
    assert (result.status, result.answer) == ("error", "")
    assert result.error == "n1 Fail: no such thing"


@pytest.mark.parametrize("prose", ["The error is in line 3", "WORKFLOW_ERROR: none", "It FAILED", "timeout"])
def test_an_answer_that_speaks_of_errors_is_an_answer(prose):
    """Fault: a result with such a word in it was taken for a failure."""
    result = go("Say", operator("Say", (), (Field("answer"),), lambda *_: {"answer": prose}))
    assert (result.status, result.error, result.answer) == ("ok", "", prose)


def test_every_node_can_have_its_own_backend():
    """Fault: one backend answered for all nodes."""
    small, large = Echo("small"), Echo("large")
    backends = {"small": small, "large": large}
    result = go("Plan@large -> [Ask, Ask@large] -> Merge", Plan, Ask, merging(), backends=backends)
    assert (len(small.asked), len(large.asked)) == (1, 2)
    assert result.answer.startswith("small/0(")
    assert "+large/0(" in result.answer


def test_cost_is_what_was_paid():
    """Fault: cost was always 0."""
    small, large = Echo("small", tokens=10, cost=0.25), Echo("large", tokens=100, cost=2.0)
    result = go("Plan@large -> [Ask, Ask]", Plan, Ask, backends={"small": small, "large": large})
    assert (result.usage.calls, result.usage.cost) == (3, 2.5)
    assert result.usage.prompt_tokens + result.usage.sampled_tokens == 120
    assert [node.usage.cost for node in result.trace] == [2.0, 0.25, 0.25]


def test_the_program_fixed_in_a_conditional_is_the_answer():
    """Fault: in `Programmer -> (Test ? ... )` the test got what the program had printed, not the program, the fixed
    program never came back, and a step after the conditional was a NameError."""
    test = checking("Test", lambda program: program == "v1", reads="code")
    result = go("Programmer -> (Test ? done : Programmer) -> Test", programmer("Programmer"), test, problem=CODE)
    assert (result.status, result.answer) == ("ok", "v1")
    assert [node.inputs["code"] for node in result.trace if node.operator == "Test"] == ["v0", "v1"]
    assert result.state["passed"] is True


@pytest.mark.parametrize(
    "prompt", ["Solve x: Math y: List[int]", "import os\nfrom sys import *", "q: 'a' \"b\" \\n {x!r}"]
)
def test_instructions_arrive_as_they_were_written(prompt):
    """Fault: they were pasted into generated source, over which regular expressions went (": Math" -> "Any")."""

    class Prompted(Ask):
        name, instruction = "Prompted", prompt

    backend = Echo()
    go("Prompted", Prompted, backends={"small": backend})
    assert backend.asked[0].messages[0]["content"].startswith(f"{prompt}|problem=")
    assert backend.asked[0].tags["instruction"] == prompt
