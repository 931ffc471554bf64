"""The operator: one class that declares what it reads and writes, and does its work; and prompts that operators share.

One message has the instruction, the problem, the inputs, and the form of the reply: every operator builds it here, so
that a call's instruction reaches all of them alike. A reply that cannot be read is an `OperatorError` in words: no
verdict, vote or answer is guessed from a substring.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from flowjax.canvas.values import Field, Message, Problem, State, Value
from flowjax.grading.answers import chosen, last_boxed, normalise_answer, options_of, without_thoughts
from flowjax.grading.code import Suite, Verdict, fenced_blocks, normal_form, parse_quietly
from flowjax.grading.math import plain_form
from flowjax.grading.sandbox import ProgramResult

Role = Literal["planner", "solver", "checker", "reviser", "combiner", "formatter"]


class OperatorError(RuntimeError):
    """An operator that cannot do its work; the policy reads the message."""


class Context(Protocol):
    """Interface of the interpreter to an operator, for one run of it."""

    @property
    def problem(self) -> Problem: ...

    @property
    def instruction(self) -> str:
        """The call's instruction, or else the operator's own."""
        ...

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        seed: int = 0,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        """The backend's answer. It counts against the budget; `seed` is added to the call's seed."""
        ...

    async def execute(self, program: str, stdin: bytes = b"") -> ProgramResult:
        """A program's run in the sandbox."""
        ...

    async def judge(self, program: str, suite: Suite) -> Verdict:
        """The program's verdict on tests: `flowjax.grading.code.judge` in the sandbox that `execute` uses."""
        ...


class Operator(ABC):
    """A kind of step. Subclasses say what they are in class attributes and implement `run`.

    The policy's prompt, the reward, the checks of a graph and the drawing read these attributes; nothing else has to
    know of an operator. `cacheable` is False where equal inputs may give another result. With `runs_programs`, a run
    on a machine that cannot isolate programs is refused before its first request.
    """

    name: ClassVar[str]
    description: ClassVar[str]  # one line, for the policy
    role: ClassVar[Role]
    inputs: ClassVar[tuple[Field, ...]]  # read from the state, or as the call binds them
    outputs: ClassVar[tuple[Field, ...]]  # written to the state; a checker writes the flag `passed`
    instruction: ClassVar[str]  # for the backend where the call says nothing
    cacheable: ClassVar[bool] = True
    runs_programs: ClassVar[bool] = False

    @abstractmethod
    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        """The outputs.

        Raises:
            OperatorError: they cannot be made from these inputs.
            BackendError: the backend has no answer.
        """


PROBLEM = Field("problem", "text", "the problem's text")
# Optional inputs of solving operators.
HINTS = (
    Field("plan", "text", "how to go about it", required=False),
    Field("subproblems", "texts", "what to solve first", required=False),
    Field("candidates", "texts", "what the branches of a parallel gave", required=False),
    Field("answer", "text", "the answer so far", required=False),
    Field("code", "code", "the program so far", required=False),
    Field("feedback", "text", "what a check found", required=False),
)
SOLUTION = (
    Field("answer", "text", "the answer", required=False),
    Field("code", "code", "the program, for a code problem", required=False),
)

CHECKED = (
    Field("answer", "text", "the answer to check", required=False),
    Field("code", "code", "the program to check", required=False),
)
VERDICT = (
    Field("passed", "flag", "whether the check passed"),
    Field("feedback", "text", "what was found, for whoever revises"),
)

_TITLES = {
    "plan": "Plan",
    "subproblems": "Subproblems",
    "candidates": "Candidates",
    "thought": "Reasoning so far",
    "answer": "Answer so far",
    "code": "Program so far",
    "passed": "Last check passed",
    "feedback": "Feedback",
}


def prompt(context: Context, inputs: State, form: str = "") -> list[Message]:
    """The message: instruction, problem, the given inputs under their titles, and the form of the reply.

    Empty inputs are left out; the problem's material (context, options, tests) is always shown.
    """
    problem = context.problem
    text = shown(inputs.get("problem", problem.text))
    sections = [context.instruction.strip(), section("Problem", text), *_material(problem, text)]
    names = [name for name in _TITLES if name in inputs]
    names += sorted(name for name in inputs if name not in _TITLES and name != "problem")
    for name in names:
        if inputs[name] not in ("", ()):
            sections.append(section(_TITLES.get(name, name), shown(inputs[name])))
    if form:
        sections.append(section("Reply", form))
    return [{"role": "user", "content": "\n\n".join(sections)}]


def section(title: str, text: str) -> str:
    """A part of a message under its title."""
    return f"## {title}\n{text.strip()}"


def shown(value: Value) -> str:
    """A value as the text that a backend reads; several texts are numbered."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else numbered(value)


def numbered(texts: Sequence[str]) -> str:
    """The texts with their numbers, one below the other."""
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def solution_form(problem: Problem) -> str:
    """Instruction on how to end a reply that solves the problem; `solution` reads it."""
    if problem.kind == "code":
        return f"Reason first if you like. {code_form(problem)}"
    return f"Reason first if you like. End with one line: Answer: {answer_form(problem)}"


def code_form(problem: Problem) -> str:
    """Instruction on how to write a program."""
    if problem.part:
        return (
            "Give the Python 3 code that goes on where the program in the problem leaves off, and none of what stands "
            "there, in one ```python block; only the last such block counts."
        )
    wanted = (
        f"that defines the function {problem.entry_point}"
        if problem.entry_point
        else "that reads standard input and prints to standard output"
    )
    return f"Give the whole Python 3 program {wanted}, in one ```python block; only the last such block counts."


def answer_form(problem: Problem) -> str:
    """Description of a bare answer."""
    match problem.kind:
        case "math":
            return "the value alone, exact (fractions, roots and pi stay as they are), without units or an equation"
        case "qa":
            return "the shortest words that answer the question, without a sentence around them"
        case "choice":
            return f"the letter of one option ({', '.join(problem.options) or 'A, B, ...'}), and nothing else"
        case _:
            return "the answer alone"


def _material(problem: Problem, text: str) -> list[str]:
    parts = []
    if problem.context:
        parts.append(section("Context", problem.context))
    if problem.options and options_of(text) != dict(problem.options):  # unless the text lists the same ones
        options = "\n".join(f"{letter}. {option}" for letter, option in problem.options.items())
        parts.append(section("Options", options))
    if problem.public_tests:
        parts.append(section("Tests that it must pass", "\n".join(problem.public_tests)))
    return parts


_ANSWER = re.compile(
    r"^[ \t>*_#-]{0,16}(?:final )?answer[*_]{0,4}[ ]?:[*_]{0,4}[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE
)
# Backslashes of LaTeX, which models seldom escape in JSON: \frac would be read as a form feed and "rac", and \underline
# is no JSON at all.
_ESCAPE = re.compile(
    r"\\\\|\\(?=[bfr][a-zA-Z])|\\(?![\"\\/bfnrt]|u[0-9a-fA-F]{4})"
    r"|\\(?=(?:tan|tau|text\w*|theta|tilde|times|to|triangle|nabla|neq|not|notin)(?![a-zA-Z]))"
)
_OBJECT = re.compile(r'\{[ \t\r\n]*"')  # the beginning of an object with a field
# Failed attempts to read an object. Each may take as long as all before it, and blocks the event loop: a reply of
# braces alone would hold up every other run.
_MOST_FAILURES = 200
_SHOWN_CHARACTERS = 200


def answer_of(reply: str) -> str | None:
    r"""The answer on the last `Answer:` line, else in the last `\boxed{}`; None where there is neither."""
    text = without_thoughts(reply)
    if found := list(_ANSWER.finditer(text)):
        last = found[-1]
        answer = last.group(1).strip() or text[last.end() :].strip()
        if answer := _undecorated(answer):
            return answer
    return last_boxed(text)


def program_of(reply: str) -> str | None:
    """The last block of Python, or the whole reply where it is a program itself; None where there is none."""
    text = without_thoughts(reply)
    if blocks := fenced_blocks(text):
        return blocks[-1]
    module = parse_quietly(text)
    is_program = module is not None and any("=" in text or hasattr(node, "body") for node in module.body)
    return text if is_program else None


def solution(reply: str, problem: Problem) -> dict[str, Value]:
    """`code` for a code problem, else `thought` and `answer`, of a reply in the form of `solution_form`.

    Raises:
        OperatorError: the reply has no program (code problem), or neither an answer line nor just one line.
    """
    text = without_thoughts(reply)
    if problem.kind == "code":
        if (program := program_of(text)) is None:
            raise OperatorError(f"the reply has no program in a ```python block: {_short(text)}")
        return {"code": program}
    answer = answer_of(text)
    if problem.kind == "choice" and (letter := chosen(answer or text, problem.options)):
        answer = letter
    if answer is None:
        if not text or "\n" in text:
            raise OperatorError(f"the reply has no line that begins with Answer: {_short(text)}")
        answer = text
    return {"thought": text, "answer": answer}


def object_schema(**types: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with exactly these fields."""
    return {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}


VERDICT_SCHEMA = object_schema(feedback={"type": "string"}, passed={"type": "boolean"})


async def ask_solution(context: Context, messages: Sequence[Message]) -> dict[str, Value]:
    """The backend's solution; the backend is asked once more, with the fault, where its first reply cannot be read.

    Raises:
        OperatorError: neither reply could be read.
    """
    reply = await context.ask(messages)
    try:
        return solution(reply, context.problem)
    except OperatorError as error:
        again = [*messages, *_reminder(reply, f"{error}. {solution_form(context.problem)}")]
        return solution(await context.ask(again), context.problem)


async def ask_object(context: Context, messages: Sequence[Message], schema: Mapping[str, Any], *, seed: int = 0):
    """The object in the backend's reply; the backend is asked once more, with the fault, where it cannot be read.

    Raises:
        OperatorError: neither reply could be read.
    """
    reply = await context.ask(messages, seed=seed, schema=schema)
    try:
        return object_of(reply, schema)
    except OperatorError as error:
        again = [*messages, *_reminder(reply, f"{error}. Reply with the JSON object alone.")]
        return object_of(await context.ask(again, seed=seed, schema=schema), schema)


def object_of(reply: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The one JSON object in a reply that has the schema's fields, in their types.

    Raises:
        OperatorError: there is none, or there are several that differ.
    """
    found = [value for value in _objects(without_thoughts(reply)) if _follows(value, schema)]
    names = ", ".join(f"{name} ({_type_name(kind)})" for name, kind in schema["properties"].items())
    if not found:
        raise OperatorError(f"the reply holds no JSON object with {names}: {_short(reply)}")
    if any(value != found[0] for value in found):
        raise OperatorError(f"the reply holds several JSON objects with {names} that differ: {_short(reply)}")
    return found[0]


def object_form(schema: Mapping[str, Any]) -> str:
    """Instruction to reply with an object of this schema."""
    names = ", ".join(f'"{name}": <{_type_name(kind)}>' for name, kind in schema["properties"].items())
    return f"One JSON object and nothing else: {{{names}}}"


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects in a text, in their order."""
    text = _ESCAPE.sub(r"\\\\", text)
    decoder, end, failures = json.JSONDecoder(strict=False), 0, 0  # line breaks in strings are allowed
    while failures < _MOST_FAILURES and (start := _OBJECT.search(text, end)):
        end = start.start() + 1
        try:
            value, end = decoder.raw_decode(text, start.start())
            yield value
        except (ValueError, RecursionError):
            failures += 1


def _follows(value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    types = schema["properties"]
    return types.keys() <= value.keys() and all(_is(value[name], kind) for name, kind in types.items())


def _is(value: Any, kind: Mapping[str, Any]) -> bool:
    if "enum" in kind:
        return isinstance(value, str) and value in kind["enum"]
    match kind["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case _:
            return isinstance(value, str)


def _type_name(kind: Mapping[str, Any]) -> str:
    if "enum" in kind:
        return " or ".join(kind["enum"])
    return {"boolean": "true or false", "array": "list of strings"}.get(kind["type"], "string")


def _undecorated(text: str) -> str:
    text = text.strip().strip("*_").strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == "`" else text


def _reminder(reply: str, text: str) -> list[Message]:
    reminder = {"role": "user", "content": f"That could not be read: {text}"}
    return [{"role": "assistant", "content": reply}, reminder]


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")


def plain(candidate: str, problem: Problem) -> str:
    """A normal form of a candidate: equal for candidates that are the same program, option, number or words."""
    if problem.kind == "code":
        return normal_form(candidate)
    if problem.kind == "choice" and (letter := chosen(candidate, problem.options)):
        return letter
    form = plain_form(candidate)
    # The candidate and not `form`, which has lost the spaces: articles are dropped as whole words.
    return normalise_answer(candidate) if problem.kind == "qa" and any(map(str.isalpha, form)) else form


def same(a: str, b: str, problem: Problem) -> bool:
    """True for two candidates that are plainly the same."""
    return plain(a, problem) == plain(b, problem)


def require_solution(inputs: State) -> None:
    """Check that there is an answer or a program.

    Raises:
        OperatorError: there is neither.
    """
    if not inputs.get("answer") and not inputs.get("code"):
        raise OperatorError("there is neither an answer nor a program yet: put a solving operator before this one")
