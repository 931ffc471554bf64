"""Programmer: a program that is written, run and mended."""

import ast
from collections.abc import Mapping

from flowjax.canvas.backends.base import Message
from flowjax.canvas.operators.base import Context, Operator, OperatorError
from flowjax.canvas.operators.prompts import HINTS, PROBLEM, SOLUTION, answer_form, code_form, prompt
from flowjax.canvas.operators.replies import program_of
from flowjax.canvas.values import Field, Problem, State, Value
from flowjax.grading.code_asserts import parse_quietly
from flowjax.grading.sandbox import Result

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
    """Why the program fails ("" where it does not), and the last line that it printed.

    For a code problem it has to load and define the function; one that reads standard input has only to be Python.
    """
    problem = context.problem
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


def failure_of(result: Result) -> str:
    """How a program ended that did not end well, in words."""
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
