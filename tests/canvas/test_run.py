"""What a run of a workflow does, construct by construct, and what becomes of failures."""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from flowjax.canvas.backends import Completion, Request
from flowjax.canvas.context import Sandbox
from flowjax.canvas.graph import Call, Parallel, Sequence, Workflow
from flowjax.canvas.operators import Context, Operator
from flowjax.canvas.run import run
from flowjax.canvas.values import Field, Problem, State, Value, WorkflowRun
from flowjax.grading.sandbox import Limits
from tests.canvas.toy_operators import (
    PROBLEM,
    Ask,
    Echo,
    Plan,
    appending,
    checking,
    failing,
    go,
    going,
    merging,
    operator,
    order,
    runs,
    step,
    text_in,
    until,
)

A, B, C = appending("A", "a"), appending("B", "b"), appending("C", "c")
MERGE = merging()
YES, NO = checking("Yes", lambda _: True), checking("No", lambda _: False)


def test_a_call_reads_its_inputs_from_the_state_and_writes_its_outputs():
    result = go("Plan -> Ask", Plan, Ask)
    assert result.status == "ok"
    assert result.answer == result.state["answer"] == step(result, "Ask").outputs["answer"]
    assert step(result, "Plan").inputs == {"problem": PROBLEM.text}
    assert step(result, "Ask").inputs == {"problem": PROBLEM.text, "plan": result.state["plan"]}
    assert [node.node_id for node in result.trace] == ["n1", "n2"]


def test_the_answer_of_a_code_problem_is_its_newest_code():
    code = operator("Code", (), (Field("code", "code"),), lambda *_: {"code": "x = 1"})
    result = go("A -> Code -> B", A, B, code, problem=Problem("Write it.", "code"))
    assert result.answer == "x = 1"
    assert result.state["answer"] == "ab"
    assert go("A -> Code -> B", A, B, code).answer == "ab"


def test_branches_work_on_copies_and_leave_candidates():
    result = go("A -> [B, C -> C, Yes] -> Merge", A, B, C, YES, MERGE)
    assert result.state["candidates"] == ("ab", "acc")  # Yes wrote no answer
    assert "passed" not in result.state  # what a branch writes stays in it
    assert step(result, "Merge").inputs == {"candidates": ("ab", "acc")}
    assert result.answer == "ab+acc"


def test_after_a_parallel_nothing_but_the_candidates_is_new():
    result = go("A -> [B]", A, B)
    assert result.state == {"problem": PROBLEM.text, "answer": "a", "candidates": ("ab",)}
    assert result.answer == "a"


def test_candidates_are_those_of_the_last_parallel():
    assert go("[A, B] -> [Yes]", A, B, YES).state == {"problem": PROBLEM.text}
    nested = go("[[A, B] -> Merge, C]", A, B, C, MERGE)
    assert nested.state["candidates"] == ("a+b", "c")


def test_a_failing_call_ends_its_branch_and_no_other():
    result = go("[A -> Fail -> B, C] -> Merge", A, B, C, failing("Fail"), MERGE)
    assert (result.status, result.answer) == ("ok", "c")
    assert order(result) == "A Fail C Merge"  # reading order; B was not reached
    assert step(result, "Fail").error == "it cannot be done"


def test_a_failing_call_outside_a_parallel_ends_the_run_and_keeps_the_answer():
    result = go("A -> ((B -> Fail -> C)) * 2 -> C", A, B, C, failing("Fail"))
    assert (result.status, result.answer, order(result)) == ("error", "ab", "A B Fail")
    assert result.error == "n5 Fail: it cannot be done"


def test_a_combiner_without_candidates_says_what_is_missing():
    result = go("[Fail, Fail] -> Merge", failing("Fail"), MERGE)
    assert result.status == "error"
    assert "Merge needs candidates" in result.error
    assert "a parallel" in result.error


def test_a_missing_input_names_the_operators_that_write_it():
    result = go("Yes", YES, A, B)
    assert result.status == "error"
    assert "Yes needs answer" in result.error
    assert "A, B" in result.error


def test_nested_parallels_with_one_slot_do_not_wait_for_each_other():
    deep = "[[[Ask, Ask], [Ask, Ask]] -> A, [Ask, [Ask, Ask] -> A]] -> Merge"
    backend = Echo(delay_s=0.001)
    result = go(deep, Ask, A, MERGE, backends={"small": backend}, max_concurrent=1)
    assert result.status == "ok"
    assert runs(result)["Ask"] == 7
    assert backend.most_in_flight == 1


def test_branches_run_at_the_same_time_up_to_the_bound():
    backend = Echo(delay_s=0.01)
    go(f"[{', '.join(['Ask'] * 9)}]", Ask, backends={"small": backend}, max_concurrent=4)
    assert backend.most_in_flight == 4


def test_requests_of_one_operator_keep_to_the_bound_too():
    class Votes(Ask):
        name = "Votes"

        async def run(self, inputs, context):
            message = [{"role": "user", "content": "vote"}]
            votes = await asyncio.gather(*(context.ask(message, seed=index) for index in range(6)))
            return {"answer": " ".join(votes)}

    backend = Echo(delay_s=0.002)
    result = go("Votes", Votes, backends={"small": backend}, max_concurrent=2, seed=5)
    assert backend.most_in_flight == 2
    assert [request.seed for request in backend.asked] == [5, 6, 7, 8, 9, 10]
    assert result.usage.calls == step(result, "Votes").usage.calls == 6


def test_equal_branches_get_seeds_of_their_own_and_others_do_not():
    def seeds(workflow: str, seed: int = 0) -> list[int]:
        backend = Echo()
        go(workflow, Ask, A, B, backends={"small": backend}, seed=seed)
        return [request.seed for request in backend.asked]

    three = seeds("[Ask, Ask, Ask]")
    assert len(set(three)) == 3
    assert three == seeds("[Ask, Ask, Ask]") == seeds("[Ask, Ask, Ask, Ask]")[:3]
    assert three[0] == 0
    assert seeds('[Ask, Ask{"else"}, Ask]') == [0, 0, three[1]]
    assert set(seeds("[Ask, Ask, Ask]", seed=1)).isdisjoint(three)
    assert len(set(seeds("[[Ask, Ask], [Ask, Ask]]"))) == 4
    assert seeds("[A -> Ask, A -> Ask]") == three[:2]  # equal whatever their nodes' ids are
    assert seeds("(Ask) * 3") == [0, 0, 0]
    # Written in another way, asked the same.
    assert seeds("[Ask, Ask@small]") == three[:2]
    assert seeds(f'[Ask, Ask{{"{Ask.instruction}"}}]') == three[:2]


def test_equal_branches_may_bind_to_their_own_nodes():
    def branch(node_id: str) -> Sequence:
        ask = Call("Ask", inputs=(("answer", f"{node_id}.answer"),), id=f"{node_id}a")
        return Sequence((Call("A", id=node_id), ask), f"{node_id}s")

    backend = Echo()
    workflow = Workflow(Sequence((Parallel((branch("n1"), branch("n2")), "n3"),)))
    options = {"operators": {"Ask": Ask, "A": A}, "backends": {"small": backend}, "default_backend": "small"}
    asyncio.run(run(workflow, PROBLEM, **options))
    assert len({request.seed for request in backend.asked}) == 2


def bound(operator: str, *inputs: tuple[str, str]) -> Call:
    return Call(operator, inputs=inputs, id=f"bound{operator}")


def run_steps(*steps, kinds: tuple[type[Operator], ...]):
    workflow = Workflow(Sequence(steps))
    operators = {kind.name: kind for kind in kinds}
    return asyncio.run(run(workflow, PROBLEM, operators=operators, backends={"b": Echo()}, default_backend="b"))


def test_a_binding_takes_the_output_of_the_node_that_it_names():
    a, b = Call("A", id="a"), Call("B", id="b")
    result = run_steps(a, b, bound("C", ("answer", "a.answer")), kinds=(A, B, C))
    assert result.answer == "ac"


def test_bindings_reach_into_a_finished_parallel_and_texts_take_several():
    branches = Parallel((Call("A", id="a"), Call("B", id="b")), "p")
    again = bound("Merge", ("candidates", "b.answer"), ("candidates", "a.answer"))
    assert run_steps(branches, again, kinds=(A, B, MERGE)).answer == "b+a"


def test_a_binding_to_a_branch_takes_the_output_of_this_turn_of_a_loop():
    assert go("([A#a, B] -> C{answer=a.answer}) * 3", A, B, C).answer == "acacac"


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (("answer", "later.answer"), "Yes needs answer, but later.answer was not written before it"),
        (("answers", "a.answer"), "Yes has no input answers to bind; it reads answer"),
        (("answer", "flag.passed"), "Yes reads answer as text, but it is flag"),
    ],
)
def test_bindings_that_make_no_sense(binding, message):
    flag = checking("Flag", lambda _: True)
    steps = (Call("A", id="a"), Call("Flag", id="flag"), bound("Yes", binding), Call("A", id="later"))
    result = run_steps(*steps, kinds=(A, flag, YES))
    assert (result.status, result.error) == ("error", f"boundYes Yes: {message}")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"answer": 42}, "declares answer as text, but gave a Python int"),
        ({"answer": None}, "declares answer as text, but gave a Python NoneType"),
        ({"anser": "42"}, "gave 'anser', but declares answer, sure"),
        ({"sure": True}, "did not give answer, which it declares"),
        ({"answer": "42", "sure": "yes"}, "declares sure as flag, but gave text"),
        ("42", "gave text instead of a mapping of answer, sure"),
        (None, "gave a Python NoneType instead of a mapping"),
    ],
)
def test_outputs_must_be_as_declared(outputs, message):
    declared = (Field("answer"), Field("sure", "flag", required=False))
    result = go("A -> Bad", A, operator("Bad", (), declared, lambda *_: outputs))
    assert (result.status, result.answer) == ("error", "a")
    assert message in result.error


def test_a_plug_in_that_raises_is_the_error_of_its_node(caplog):
    with caplog.at_level(logging.WARNING):
        result = go("A -> Bad", A, failing("Bad", KeyError("colour")))
    assert (result.status, result.answer) == ("error", "a")
    assert step(result, "Bad").error == "KeyError: 'colour'"
    assert "Traceback" in caplog.text  # for whoever wrote it


@pytest.mark.parametrize("messages", ["What is it?", {"role": "user", "content": "?"}, [{"role": "user"}], ["?"]])
def test_what_are_no_messages_is_the_operators_error_and_no_outage(messages):
    class Plain(Ask):
        name = "Plain"

        async def run(self, inputs, context):
            return {"answer": await context.ask(messages)}

    result = go("A -> Plain", A, Plain)
    assert (result.status, result.answer, result.usage.calls) == ("error", "a", 0)
    assert 'takes a list of messages such as {"role": "user"' in result.error


@pytest.mark.parametrize("error", [RuntimeError(""), TimeoutError(), asyncio.CancelledError()])
def test_errors_without_words_are_errors_too(error):
    result = go("A -> Bad", A, failing("Bad", error))
    assert (result.status, result.answer) == ("error", "a")
    assert type(error).__name__ in result.error


def test_a_plug_in_that_cannot_be_made_is_the_error_of_its_node():
    class Bad(Ask):
        name = "Bad"

        def __init__(self):
            raise OSError("no model file")

    assert "OSError: no model file" in go("Bad", Bad).error


def test_an_operator_cannot_change_the_state_behind_the_back():
    def work(inputs, context):
        inputs["answer"] = "changed"
        return {"feedback": "none"}

    result = go("A -> Sly", A, operator("Sly", text_in("answer"), text_in("feedback"), work))
    assert result.answer == "a"
    assert step(result, "Sly").inputs == {"answer": "a"}


def test_names_that_do_not_exist_are_errors_in_words():
    assert go("A -> Nope", A).error == "n2 Nope: there is no operator Nope; there are A"
    assert go("A@nope", A).error == "n1 A: there is no backend nope; there are small"


def test_arguments_that_make_no_sense_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="default_backend is 'large', but the backends are"):
        go("A", A, default_backend="large")
    with pytest.raises(ValueError, match="max_concurrent is 0"):
        go("A", A, max_concurrent=0)


def test_an_empty_workflow_has_no_answer():
    result = go("", A)
    assert (result.status, result.answer, result.trace) == ("empty", "", ())


def test_nodes_without_ids_are_numbered_as_reading_order_has_it():
    workflow = Workflow(Sequence((Call("A"), Parallel((Call("B"), Call("C"))))))
    options = {"backends": {"b": Echo()}, "default_backend": "b"}
    result = asyncio.run(run(workflow, PROBLEM, operators={"A": A, "B": B, "C": C}, **options))
    assert [node.node_id for node in result.trace] == ["n1", "n3", "n4"]


def test_requests_carry_what_the_run_says_and_what_they_are_for():
    backend = Echo()
    options = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 64, "seed": 3}
    result = go('A -> Ask{"Be brief."}', A, Ask, backends={"small": backend}, **options)
    (request,) = backend.asked
    assert (request.temperature, request.top_p, request.max_new_tokens, request.seed) == (0.7, 0.9, 64, 3)
    assert request.tags == {
        "operator": "Ask",
        "instruction": "Be brief.",
        "input.problem": PROBLEM.text,
        "input.answer": "a",
    }
    assert result.status == "ok"


def test_a_loop_counts_its_turns_in_the_trace():
    result = go("(A -> B) * 2", A, B)
    assert [(node.operator, node.turn) for node in result.trace] == [("A", 1), ("B", 1), ("A", 2), ("B", 2)]


def test_a_loop_ends_early_by_the_verdict_of_a_checker_alone():
    """A solver may write a flag of that name: that it has found something is no check that passed."""
    hopeful = operator("Hopeful", (), (Field("passed", "flag"),), lambda *_: {"passed": True}, role="solver")
    assert [node.operator for node in go("(A -> Hopeful) * 2", A, hopeful).trace] == ["A", "Hopeful"] * 2
    assert [node.operator for node in go("(A -> Yes) * 2", A, YES).trace] == ["A", "Yes"]


def test_programs_run_in_the_sandbox():
    class Execute(Ask):
        name, inputs = "Execute", ()

        async def run(self, inputs, context):
            result = await context.execute("print(input() * 2)", b"ab")
            return {"answer": result.stdout.decode().strip()}

    result = go("Execute", Execute, sandbox=Sandbox(Limits(idle_s=20.0), allow_none=True))
    assert result.answer == "abab"


def test_cancelling_a_run_leaves_no_task_behind():
    async def scenario():
        backend = Echo(delay_s=60.0)
        options = {"backends": {"small": backend}, "max_concurrent": 2}
        task = asyncio.create_task(going("[Ask, Ask, [Ask, A -> Ask]] -> Ask", Ask, A, **options))
        await until(lambda: backend.in_flight == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.in_flight == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_check_inside_a_parallel_does_not_decide_a_conditional():
    assert go("A -> ([Yes, Yes] ? B : C)", A, B, C, YES).answer == "ac"


def test_a_condition_of_several_steps_goes_by_its_last_check():
    assert go("A -> ((No -> Yes) ? B : C)", A, B, C, YES, NO).answer == "ab"
    assert go("A -> ((Yes -> No) ? B : C)", A, B, C, YES, NO).answer == "ac"


def test_a_check_before_the_condition_does_not_count():
    assert go("A -> Yes -> (B ? A : C)", A, B, C, YES).answer == "abc"


def test_values_of_other_kinds_are_no_inputs():
    flag = operator("Flag", (), (Field("answer", "flag"),), lambda *_: {"answer": True})
    result = go("Flag -> Yes", flag, YES)
    assert "Yes reads answer as text, but it is flag" in result.error
    assert result.answer == ""


def test_texts_must_be_a_tuple_of_texts():
    def giving(value: Value) -> str:
        declared = (Field("subproblems", "texts"),)
        return go("Split", operator("Split", (), declared, lambda *_: {"subproblems": value})).error

    assert giving(("one", "two")) == ""
    assert "as texts, but gave a Python list" in giving(["one"])  # pyright: ignore[reportArgumentType]
    assert "as texts, but gave a Python tuple" in giving((1,))  # pyright: ignore[reportArgumentType]


@dataclass
class Raising(Echo):
    error: BaseException = field(default_factory=Exception)

    async def complete(self, request: Request) -> Completion:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), ValueError("odd")])
def test_whatever_a_backend_raises_is_an_outage_and_other_workflows_go_on(error: BaseException):
    async def both() -> tuple[WorkflowRun, WorkflowRun]:
        raising = {"small": Raising(error=error)}
        return await asyncio.gather(going("Ask", Ask, backends=raising), going("Ask", Ask, backends={"small": Echo()}))

    away, fine = asyncio.run(both())
    assert away.status == "executor_error" and type(error).__name__ in away.error
    assert fine.status == "ok"


def test_an_operator_that_would_end_the_process_fails_alone():
    def leave(given: State, context: Context) -> Mapping[str, Value]:
        sys.exit("bye")

    result = go("A -> Leave", A, operator("Leave", (), text_in("feedback"), leave))
    assert (result.status, result.answer) == ("error", go("A", A).answer) and "SystemExit: bye" in result.error


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"seed": np.int64(3), "temperature": np.float32(0.5)}, ""),
        ({"schema": {"enum": {"A", "B"}}}, "TypeError: ask takes messages and a schema that JSON can hold"),
        ({"messages": [{"role": "user", "content": "x", "image": b"y"}]}, "TypeError: ask takes messages and a schema"),
    ],
)
def test_what_no_endpoint_could_be_sent_is_the_operator_s_fault(asked: dict[str, Any], error: str):
    class Odd(Ask):
        async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
            given = {"messages": [{"role": "user", "content": "x"}], **asked}
            return {"answer": await context.ask(given.pop("messages"), **given)}

    backend = Echo()
    result = go("Ask", Odd, backends={"small": backend}, seed=1)
    assert result.status == ("error" if error else "ok") and error in result.error
    for request in backend.asked:
        assert json.dumps([request.seed, request.temperature]) == "[4, 0.5]"
