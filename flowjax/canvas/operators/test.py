"""Test: the program on the public tests, or a trial run where there are none."""

from collections.abc import Mapping

from flowjax.canvas.operators.base import Context, Operator
from flowjax.canvas.operators.checking import VERDICT
from flowjax.canvas.operators.programmer import try_program
from flowjax.canvas.operators.prompts import PROBLEM
from flowjax.canvas.values import Field, Problem, State, Value
from flowjax.grading.code import Suite, Verdict
from flowjax.grading.code_asserts import from_assert

_SHOWN_FAILURES = 5


class Test(Operator):
    name = "Test"
    description = "runs the program in the sandbox on the public tests and says which fail; it changes nothing"
    role = "checker"
    inputs = (PROBLEM, Field("code", "code", "the program to test"))
    outputs = VERDICT
    instruction = ""

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """Asks no backend. Expected results stay outside the sandbox, so a program cannot forge what it passes."""
        program, problem = str(inputs["code"]), context.problem
        if problem.public_tests:
            return _verdict(await context.judge(program, suite_of(problem)), problem)
        if problem.kind == "code" and not problem.entry_point:
            return {"passed": False, "feedback": "There are no public tests and no function to call: nothing is known."}
        failure, _ = await try_program(program, context)
        if failure:
            return {"passed": False, "feedback": f"The program fails: {failure}"}
        return {
            "passed": True,
            "feedback": "There are no public tests; the program runs, which says no more than that.",
        }


def suite_of(problem: Problem) -> Suite:
    """The public tests as the judge takes them."""
    cases = [case for test in problem.public_tests for case in from_assert(test, problem.entry_point)]
    return Suite(tuple(cases), problem.entry_point)


def _verdict(verdict: Verdict, problem: Problem) -> dict[str, Value]:
    if verdict.success:
        return {"passed": True, "feedback": f"All {len(verdict.passed)} public tests pass."}
    failures = [remark for passed, remark in zip(verdict.passed, verdict.remarks, strict=True) if not passed]
    listed = "\n".join(f"- {remark}" for remark in failures[:_SHOWN_FAILURES])
    return {"passed": False, "feedback": f"{len(failures)} of {len(verdict.passed)} public tests fail:\n{listed}"}
