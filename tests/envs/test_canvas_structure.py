"""Measures of a workflow's structure, on workflows that really run: what took part counts, nothing else does."""

import asyncio
import math
from collections.abc import Mapping

import pytest

from flowjax.canvas.backends import OfflineBackend, Rule
from flowjax.canvas.graph import Workflow
from flowjax.canvas.operators import Context, Operator
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.run import run
from flowjax.canvas.text import parse
from flowjax.canvas.values import Field, Problem, State, Value, WorkflowRun
from flowjax.envs.canvas.structure import Structure, measure
from flowjax.published.canvas import operators_shown, structure_parts

OPERATORS = load_operators(entry_points=False)
ROLES = {name: operator.role for name, operator in OPERATORS.items()}
FAILS, PASSES = '{"feedback": "It is wrong.", "passed": false}', '{"feedback": "It is right.", "passed": true}'


def played(source: str, *, verdict: str = FAILS) -> tuple[Workflow, WorkflowRun]:
    """A workflow and its run, in which solvers answer differently and Review's verdict is given."""
    rules = [
        Rule(operator="Plan", answer="Count."),
        Rule(operator="Review", answer=verdict),
        Rule(operator="Format", answer="Answer: ten"),
        Rule(operator="Revise", answer="Answer: nine apples"),
        Rule(operator="Custom", answer=("Answer: ten apples", "Answer: a few", "Answer: no apples")),
        Rule(operator="AnswerGenerate", answer="Answer: ten apples"),
        Rule(answer='{"choice": "A"}'),
    ]
    workflow = parse(source)
    problem = Problem("How many apples?", "qa")
    backends = {"offline": OfflineBackend(rules)}
    operators = {**OPERATORS, "Critic": Critic, "Coder": Coder}
    played = run(workflow, problem, operators=operators, backends=backends, default_backend="offline")
    return workflow, asyncio.run(played)


class Critic(Operator):
    """Writes `passed`, and is no checker."""

    name, description, role, instruction = "Critic", "criticises", "reviser", ""
    inputs, outputs = (Field("answer"),), (Field("passed", "flag"), Field("feedback"))

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        return {"passed": True, "feedback": f"I looked at {inputs['answer']}."}


class Coder(Operator):
    """Writes a program, and no answer."""

    name, description, role, instruction = "Coder", "codes", "solver", ""
    inputs, outputs = (Field("problem"),), (Field("code", "code"),)

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        return {"code": "x = 1"}


def measured(source: str, **options: str) -> Structure:
    return measure(*played(source, **options), ROLES, ("answer",))


def test_plans_and_mentions_earn_nothing():
    """Flaw 5.1: the published score of this workflow is full, though nothing in it works on an answer."""
    source = "Plan -> Plan -> Plan -> [Plan, Verify] -> Format"
    assert sum(structure_parts(source).values()) == 4.0
    assert measured(source) == Structure()


def test_what_does_not_touch_the_answer_does_not_count():
    assert measured("Custom -> Review").operators == 1  # nobody reads what it found
    assert measured("Plan -> AnswerGenerate").distinct == 2
    assert measured("AnswerGenerate -> Plan").distinct == 1  # too late
    assert measured("[Custom, AnswerGenerate]") == Structure()  # nothing is made of the candidates
    after = measured('AnswerGenerate -> [Custom, Custom{"Guess."}] -> ScEnsemble')
    assert after.operators == 4 and after.branching == 1  # the branches read the first answer


def test_a_branch_that_was_no_candidate_does_not_count():
    assert measured("[Coder, Custom] -> ScEnsemble") == measured("[Custom] -> ScEnsemble")
    workflow, run = played("[Coder, Custom] -> ScEnsemble")
    candidates = run.state["candidates"]
    assert isinstance(candidates, tuple) and len(candidates) == 1
    assert measure(workflow, run, ROLES).branching == 1  # where the kind of problem is not known


def test_a_binding_from_which_nothing_was_read_does_not_count():
    source = "Custom -> [Custom#a, AnswerGenerate#b] -> Revise{} -> Format{}"
    plain, bound = (measured(source.format(*given)) for given in (("", ""), ("{code=a.code}", "{code=b.code}")))
    assert plain.branching == 0 and bound == plain


def test_failed_steps_do_not_count():
    assert measured("ScEnsemble -> Custom") == Structure()
    assert measured("Custom -> [Test, Format]").operators == 1


def test_a_check_counts_where_it_decides():
    passed = measured("Custom -> (Review ? done : Revise)", verdict=PASSES)
    assert (passed.checks, passed.distinct, passed.branching) == (1, 2, 1)
    failed = measured("Custom -> (Review ? done : Revise)", verdict=FAILS)
    assert (failed.checks, failed.distinct, failed.branching) == (1, 3, 1)
    assert measured("Custom -> Review -> Revise").checks == 1  # its feedback is read
    assert measured("Custom -> Review -> Revise").branching == 0


@pytest.mark.parametrize("verdict", [FAILS, PASSES])
def test_a_check_between_equal_branches_decides_nothing(verdict: str):
    for source in (
        "Custom -> (Review ? Format : Format)",
        "Custom -> (Review ? (Format#n8 -> Format{answer=n8.answer}) : (Format#n9 -> Format{answer=n9.answer}))",
    ):
        equal = measured(source, verdict=verdict)
        assert (equal.checks, equal.branching, equal.depth) == (0, 0, 0)
    other = measured("Custom -> (Review ? Format : (Revise -> Format))", verdict=verdict)
    assert (other.checks, other.branching) == (1, 1)


def test_a_check_inside_a_parallel_decides_nothing_outside():
    inside = measured("Custom -> ([Review, AnswerGenerate] ? done : Revise)", verdict=PASSES)
    assert (inside.checks, inside.branching, inside.distinct) == (0, 0, 2)


def test_loops_count():
    """Flaw 5.1: the published score looks for `x2` and never sees a loop."""
    source = "Custom -> (Review -> Revise) * 2"
    assert structure_parts(source)["canvas_control"] == 0.0
    assert measured(source).branching == 1
    early = measured(source, verdict=PASSES)
    assert early.branching == 1 and early.distinct == 2
    assert measured("(Custom) * 1").branching == 0
    went_on = measured("Custom -> (Critic -> Format) * 2")  # as the interpreter does: a loop ends with a checker
    assert (went_on.branching, went_on.formats, went_on.checks) == (1, 1, 0)


def test_parallels_count_by_the_branches_that_matter():
    one = measured("[Custom, Plan] -> ScEnsemble")
    assert (one.branching, one.operators) == (0, 2)
    two = measured("[Custom, AnswerGenerate] -> ScEnsemble -> Format")
    assert (two.branching, two.distinct, two.formats, two.siblings) == (1, 4, 1, 1.0)


def test_siblings_differ_by_operator_instruction_or_backend():
    assert measured("[Custom, Custom, Custom] -> ScEnsemble").siblings == pytest.approx(1 / 3)
    assert measured('[Custom{"A."}, Custom{"B."}, Custom] -> ScEnsemble').siblings == 1.0


def test_entropy_of_kinds():
    assert measured("Custom").entropy == 0.0
    assert measured("Plan -> Custom").entropy == pytest.approx(1.0)
    three_and_one = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert measured("[Custom, Custom, Custom] -> ScEnsemble").entropy == pytest.approx(three_and_one)


def test_depth_of_structures_that_matter():
    assert measured("[Custom -> (Review ? done : Revise), AnswerGenerate] -> ScEnsemble").depth == 2
    assert measured("[Custom, AnswerGenerate] -> ScEnsemble").depth == 1


def test_bindings_are_followed():
    workflow = "Custom#n1 -> AnswerGenerate#n2 -> Format{answer=n1.answer}#n3"
    assert measured(workflow).operators == 2


def test_all_bindings_of_one_input_are_followed():
    two = measured("Custom#n1 -> AnswerGenerate#n2 -> ScEnsemble{candidates=n2.answer, candidates=n1.answer}#n3")
    assert (two.operators, two.distinct) == (3, 3)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", (0, 0, 0, 0)),
        ("Plan -> Programmer -> (Verify ? Revise : done) -> Format", (1, 1, 0, 1)),
        ("Plan -> Decompose -> [Programmer, Custom] -> ScEnsemble -> Verify -> Format", (1, 1, 1, 1)),
        ("Plan -> (Programmer -> Review -> Revise) * 2 -> Verify -> Custom -> Format", (1, 1, 1, 0)),
        ("MdEnsemble -> CustomCodeGenerate", (0, 0, 0, 0)),
        ("Custom@gpt-5.x2 -> Plan@qwen2-72x8", (0, 0, 0, 0)),  # backends are no loops,
        ('Custom@"[a] Verify?:" -> Plan@Format', (0, 0, 0, 0)),  # structures or operators,
        ("Custom#Verify -> Plan{plan=Verify.Format}", (0, 0, 0, 0)),  # nor are ids and bindings
    ],
)
def test_published_parts(source: str, expected: tuple[float, ...]):
    assert tuple(structure_parts(operators_shown(parse(source))).values()) == expected
