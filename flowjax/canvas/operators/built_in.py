"""The built-in operators.

Most are prompts: a question to a backend, and the field that its reply becomes. Some combine many answers into one. Two
run programs: Programmer writes and mends one, Test runs the public tests.
"""

import ast
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from flowjax.canvas.operators import (
    CHECKED,
    HINTS,
    PROBLEM,
    SOLUTION,
    VERDICT,
    VERDICT_SCHEMA,
    Context,
    Operator,
    OperatorError,
    answer_form,
    answer_of,
    ask_object,
    ask_solution,
    code_form,
    object_form,
    object_schema,
    plain,
    program_of,
    prompt,
    require_solution,
    same,
    section,
    solution_form,
)
from flowjax.canvas.values import Field, Message, Problem, State, Value
from flowjax.grading.answers import chosen, without_thoughts
from flowjax.grading.code import Suite, Verdict, from_assert, parse_quietly
from flowjax.grading.math import is_number
from flowjax.grading.sandbox import ProgramResult


class Plan(Operator):
    name = "Plan"
    description = "thinks out how to go about the problem, step by step, without solving it"
    role = "planner"
    inputs = (PROBLEM, *(field for field in HINTS if field.name not in ("plan", "candidates")))
    outputs = (Field("plan", "text", "all steps of the plan"),)
    instruction = (
        "Plan how to solve this problem: name what is asked, what is given and what is easily overlooked, and then "
        "list numbered steps that lead to the answer. Do not carry them out."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        plan = without_thoughts(await context.ask(prompt(context, inputs)))
        if not plan:
            raise OperatorError("the backend's plan is empty")
        return {"plan": plan}


_SCHEMA = object_schema(subproblems={"type": "array", "items": {"type": "string"}})


class Decompose(Operator):
    name = "Decompose"
    description = "splits the problem into smaller ones whose answers together give the answer"
    role = "planner"
    inputs = (PROBLEM, HINTS[0])
    outputs = (Field("subproblems", "texts", "what to solve first, in order"),)
    instruction = (
        "Split this problem into two to five smaller ones, each a question that can be answered by itself or from the "
        "answers before it, the last of which answers the whole. Do not answer them."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        found = await ask_object(context, prompt(context, inputs, object_form(_SCHEMA)), _SCHEMA)
        subproblems = tuple(text.strip() for text in found["subproblems"] if text.strip())
        if not subproblems:
            raise OperatorError("the backend found no subproblems")
        return {"subproblems": subproblems}


class Custom(Operator):
    name = "Custom"
    description = "does what its instruction says, with all that is known so far; the most flexible one"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = SOLUTION
    instruction = "Solve this problem carefully, step by step."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """The reply's answer line or program. Without either, the whole reply: the instruction may ask for any text."""
        reply = without_thoughts(await context.ask(prompt(context, inputs, solution_form(context.problem))))
        if not reply:
            raise OperatorError("the backend's reply is empty")
        if context.problem.kind == "code" and (program := program_of(reply)) is not None:
            return {"code": program}
        return {"answer": answer_of(reply) or reply}


class AnswerGenerate(Operator):
    name = "AnswerGenerate"
    description = "reasons aloud and then states a short answer"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = (Field("thought", "text", "the reasoning", required=False), *SOLUTION)
    instruction = "Think about this problem step by step, and then state the answer as shortly as you can."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        return await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))


class CustomCodeGenerate(Operator):
    name = "CustomCodeGenerate"
    description = "writes a program as its instruction says, and does not run it"
    role = "solver"
    inputs = (PROBLEM, *HINTS)
    outputs = (Field("code", "code", "the program"),)
    instruction = "Write a Python program that solves this problem."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        reply = await context.ask(prompt(context, inputs, code_form(context.problem)))
        program = program_of(reply)
        if program is None:
            raise OperatorError("the reply has no program in a ```python block")
        return {"code": program}


class Review(Operator):
    name = "Review"
    description = "reads the newest answer or program critically and says what is wrong with it"
    role = "checker"
    inputs = (PROBLEM, Field("plan", "text", "how it was to be done", required=False), *CHECKED)
    outputs = VERDICT
    instruction = (
        "Read the answer (or the program) below critically: does it answer what was asked, and is every step right? "
        "Let it pass unless you find a definite mistake; if you do, say what it is and how to mend it."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        require_solution(inputs)
        messages = prompt(context, inputs, object_form(VERDICT_SCHEMA))
        found = await ask_object(context, messages, VERDICT_SCHEMA)
        return {"passed": found["passed"], "feedback": found["feedback"]}


class Verify(Operator):
    name = "Verify"
    description = "solves the problem anew without seeing the newest solution, then says whether that one holds"
    role = "checker"
    inputs = (PROBLEM, *CHECKED)
    outputs = VERDICT
    instruction = "Check by an independent solution of your own."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """One request where the independent answer is the same; else a second one, which compares the two."""
        require_solution(inputs)
        problem = context.problem
        alone = {"problem": inputs.get("problem", problem.text)}
        reply = without_thoughts(await context.ask(prompt(context, alone, solution_form(problem))))
        result = (program_of if problem.kind == "code" else answer_of)(reply)
        proposed = inputs.get("code" if problem.kind == "code" else "answer")
        if result and isinstance(proposed, str) and same(proposed, result, problem):
            return {"passed": True, "feedback": "An independent solution gives the same."}
        form = (
            "The solution above is proposed. An independent one, which may be wrong itself, gives:\n\n"
            f"{reply}\n\nFind out where they differ and which is right, by the problem alone. "
            f"passed: whether the proposed one is right; feedback: why.\n{object_form(VERDICT_SCHEMA)}"
        )
        found = await ask_object(context, prompt(context, inputs, form), VERDICT_SCHEMA)
        return {"passed": found["passed"], "feedback": found["feedback"]}


class Revise(Operator):
    name = "Revise"
    description = "mends the newest answer or program as the feedback of a check says"
    role = "reviser"
    inputs = (PROBLEM, *CHECKED, Field("feedback", "text", "what a check found", required=False))
    outputs = (Field("thought", "text", "the reasoning", required=False), *SOLUTION)
    instruction = (
        "Mend the solution below: put right what the feedback names, keep what is right, and where there is no "
        "feedback, look for the mistakes yourself."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        require_solution(inputs)
        return await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))


class Format(Operator):
    name = "Format"
    description = "reduces the newest answer to the bare final answer: a value, a few words, a letter, a program"
    role = "formatter"
    inputs = (
        PROBLEM,
        Field("answer", "text", "the answer in whatever words", required=False),
        Field("code", "code", "the program, for a code problem", required=False),
    )
    outputs = SOLUTION
    instruction = "Copy the final answer out of the solution below. Do not solve the problem again."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """No request where the answer is bare already: a number, an option, a program."""
        problem = context.problem
        if problem.kind == "code":
            return {"code": _program(inputs)}
        answer = str(inputs.get("answer", ""))
        if not answer.strip():
            raise OperatorError("there is no answer yet: put a solving operator before this one")
        if (bare := _bare(answer, problem)) is not None:
            return {"answer": bare}
        form = f"One line: Answer: {answer_form(problem)}"
        reply = await context.ask(prompt(context, {**inputs, "code": ""}, form))
        text = answer_of(reply) or without_thoughts(reply)
        if not text or "\n" in text:
            raise OperatorError(f"the backend's final answer is not one line: {text[:200]!r}")
        return {"answer": chosen(text, problem.options) or text}


def _program(inputs: State) -> str:
    for name in ("code", "answer"):
        text = str(inputs.get(name, ""))
        if text and (program := program_of(text) or (text if name == "code" else None)):
            return program
    raise OperatorError("there is no program yet: put an operator that writes code before this one")


def _bare(answer: str, problem: Problem) -> str | None:
    if problem.kind == "choice":
        return chosen(answer, problem.options)
    return answer.strip() if is_number(answer) else None


CANDIDATES = Field("candidates", "texts", "answers or programs to choose from, one per branch of a parallel")


def read_candidates(inputs: State) -> tuple[str, ...]:
    """The candidates that are not blank.

    Raises:
        OperatorError: there are none.
    """
    given = inputs["candidates"]
    candidates = tuple(text for text in given if text.strip()) if isinstance(given, tuple) else ()
    if not candidates:
        raise OperatorError("there are no candidates: put a parallel of solving operators before this one")
    return candidates


def groups(candidates: Sequence[str], problem: Problem) -> list[list[str]]:
    """Groups of equal candidates, in order of first appearance."""
    found: dict[str, list[str]] = {}
    for candidate in candidates:
        found.setdefault(plain(candidate, problem), []).append(candidate)
    return list(found.values())


def largest_groups(candidates: Sequence[str], problem: Problem) -> list[str]:
    """The first candidate of each largest group: one, or several in a tie."""
    found = groups(candidates, problem)
    most = max(map(len, found))
    return [group[0] for group in found if len(group) == most]


def _letters(place: int) -> str:
    """A to Z, then AA to AZ and so on, as spreadsheets name their columns."""
    before, last = divmod(place, len(string.ascii_uppercase))
    return (_letters(before - 1) if before else "") + string.ascii_uppercase[last]


async def vote(context: Context, inputs: State, choices: Sequence[str], *, seed: int = 0) -> int:
    """The index of the choice that the backend votes for.

    Raises:
        OperatorError: the vote could not be read.
    """
    letters = [_letters(place) for place in range(len(choices))]
    schema = object_schema(choice={"type": "string", "enum": letters})
    listed = "\n\n".join(f"{letter}.\n{text}" for letter, text in zip(letters, choices, strict=True))
    rest = {name: value for name, value in inputs.items() if name != "candidates"}
    messages = prompt(context, rest, f"{object_form(schema)}\n\n{section('Candidates', listed)}")
    found = await ask_object(context, messages, schema, seed=seed)
    return letters.index(found["choice"])


def solved(result: str, problem: Problem) -> dict[str, Value]:
    """The result as the output field of the problem's kind."""
    return {"code" if problem.kind == "code" else "answer": result}


class ScEnsemble(Operator):
    """Self-consistency: what most candidates say. After Wang et al. 2022 (arXiv 2203.11171)."""

    name = "ScEnsemble"
    description = "takes what most candidates of a parallel say; the backend votes only where there is a tie"
    role = "combiner"
    inputs = (PROBLEM, CANDIDATES)
    outputs = SOLUTION
    instruction = "Choose the candidate that agrees best with the others and with the problem."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        choices = largest_groups(read_candidates(inputs), context.problem)
        place = await vote(context, inputs, choices) if choices[1:] else 0
        return solved(choices[place], context.problem)


VOTES = 5


class MdEnsemble(Operator):
    """Several votes over the candidates, each in another order. After Medprompt (Nori et al. 2023, arXiv 2311.16452).

    Models favour some letters over others. Medprompt shuffles; here each vote starts one candidate later,
    and every second round is reversed, so that few votes spread each candidate over the letters as evenly as possible.
    """

    name = "MdEnsemble"
    description = f"lets the backend vote {VOTES} times over the candidates of a parallel, each time in another order"
    role = "combiner"
    inputs = (PROBLEM, CANDIDATES)
    outputs = SOLUTION
    instruction = "Choose the candidate that solves the problem best."

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """No vote where the candidates agree. An unreadable vote does not count; ties go to the earliest candidate."""
        candidates = read_candidates(inputs)
        choices = [group[0] for group in groups(candidates, context.problem)]
        if len(choices) == 1:
            return solved(choices[0], context.problem)
        votes: Counter[int] = Counter()
        unread: OperatorError | None = None
        for seed in range(VOTES):
            order = _order(len(choices), seed)
            try:
                votes[order[await vote(context, inputs, [choices[i] for i in order], seed=seed)]] += 1
            except OperatorError as error:
                unread = error
        if not votes:
            raise OperatorError(f"none of {VOTES} votes could be read: {unread}")
        return solved(choices[max(sorted(votes), key=votes.__getitem__)], context.problem)


def _order(choices: int, number: int) -> list[int]:
    """Order of the choices, as indices, in the vote with this number, from 0."""
    order = [(place + number) % choices for place in range(choices)]
    return order[::-1] if number // choices % 2 else order


class Aggregate(Operator):
    name = "Aggregate"
    description = "puts the candidates of a parallel together into one answer, which may be a new one"
    role = "combiner"
    inputs = (PROBLEM, CANDIDATES, *(field for field in HINTS if field.name in ("plan", "subproblems")))
    outputs = (Field("thought", "text", "the reasoning", required=False), *SOLUTION)
    instruction = (
        "Put the candidates together into one answer: keep what they agree on, and where they differ, take what the "
        "problem supports."
    )

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        candidates = read_candidates(inputs)
        if len(groups(candidates, context.problem)) == 1 and "subproblems" not in inputs:
            return solved(candidates[0], context.problem)
        return await ask_solution(context, prompt(context, inputs, solution_form(context.problem)))


# ------------------------------------------------------------------------------------------ operators that run programs

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
        """Up to `ROUNDS` programs; each request after the first has the failure of the program before."""
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

    For a code problem it has to load and define the function. A program that reads standard input has only to be valid
    Python, and a part of a program is not checked, since it cannot run by itself.
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
    """Message about a program that failed."""
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
        """Asks no backend. Expected results stay outside the sandbox, so a program cannot fake that it passes."""
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
