"""Operators that run programs: Programmer writes and mends one, Test runs the public tests."""

import ast
from collections.abc import Mapping

from flowjax.canvas.operators import (
    HINTS,
    PROBLEM,
    SOLUTION,
    VERDICT,
    Context,
    Operator,
    OperatorError,
    answer_form,
    code_form,
    program_of,
    prompt,
)
from flowjax.canvas.values import Field, Message, Problem, State, Value
from flowjax.grading.code import Suite, Verdict
from flowjax.grading.code_asserts import from_assert, parse_quietly
from flowjax.grading.sandbox import ProgramResult

ROUNDS = 3
_ERROR_CHARACTERS = 1500
_PRINTING = """Write a Python 3 program that computes the answer and prints it, once and with nothing else: {answer}. \
Only the standard library is sure to be there; no input, no files. Give it in one ```python block."""


class Programmer(Operator):
    name = "Programmer"
    description = "writes a program, runs it and mends it: for a code problem the program, otherwise what it prints"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = (*SOLUTION, Field("feedback", "text", "why the program still fails, where it does", required=False))
    instruction = "Solve this problem with a program."
    runs_programs = True

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """Up to `ROUNDS` programs, each after the failure of the one before."""
        problem = context.problem
        wanted = code_form(problem) if problem.kind == "code" else _PRINTING.format(answer=answer_form(problem))
        messages = prompt(context, inputs, wanted)
        outputs: dict[str, Value] = {}
        for _ in range(ROUNDS):
            reply = await context.ask(messages)
            program = program_of(reply)
            if program is None:
                failure = "the reply has no program in a ```python block"
            else:
                outputs = {"code": program}
                failure, printed = await try_program(program, context)
                if not failure:
                    return outputs if problem.kind == "code" else {**outputs, "answer": printed}
            outputs["feedback"] = failure
            messages = [*messages, *_again(reply, failure)]
        if "code" not in outputs:
            raise OperatorError(f"no program in {ROUNDS} rounds: {outputs['feedback']}")
        return outputs


async def try_program(program: str, context: Context) -> tuple[str, str]:
    """Reason why the program fails ("" where it does not), and the last line that it printed.

    For a code problem it has to load and define the function; one that reads standard input has only to be Python, and
    a part of a program has no sense by itself.
    """
    problem = context.problem
    if problem.part:
        return "", ""
    if parse_quietly(program) is None:
        return f"it is no Python: {_syntax_error(program)}", ""
    if problem.kind == "code" and not problem.entry_point:
        return "", ""
    result = await context.execute(program + _definition_check(problem))
    printed = result.stdout.decode(errors="replace").strip()
    if result.status != "ok":
        return failure_of(result), ""
    if problem.kind != "code" and not printed:
        return "it printed nothing: print the answer", ""
    return "", printed.splitlines()[-1].strip() if printed else ""


def failure_of(result: ProgramResult) -> str:
    """Words for the end of a program that did not end well."""
    ways = {"timeout": "it took too long", "output": "it printed too much", "killed": "it was killed (memory or time)"}
    error = result.stderr.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
    return ways.get(result.status, f"it ended with an error:\n{error}")


def _definition_check(problem: Problem) -> str:
    name = problem.entry_point
    if problem.kind != "code" or not name.isidentifier():
        return ""
    found = f"globals().get({name!r}, globals().get('Solution'))"
    return f"\n\nif not callable({found}):\n    raise NameError('there is no function {name}')\n"


def _syntax_error(program: str) -> str:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError) as error:
        return str(error)
    return "it is nested too deeply"


def _again(reply: str, failure: str) -> list[Message]:
    return [
        {"role": "assistant", "content": reply},
        {"role": "user", "content": f"Your program failed: {failure}\n\nMend it and give the whole program again."},
    ]


_SHOWN_FAILURES = 5


class Test(Operator):
    name = "Test"
    description = "runs the program in the sandbox on the public tests and says which fail; it changes nothing"
    role = "checker"
    inputs = (PROBLEM, Field("code", "code", "the program to test"))
    outputs = VERDICT
    instruction = ""
    runs_programs = True

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
