"""What operators say to a backend: one message of the instruction, the problem, what the state holds, and the form.

Every operator builds its message here, so that a call's instruction reaches all of them alike.
"""

from collections.abc import Sequence

from flowjax.canvas.backends.base import Message
from flowjax.canvas.operators.base import Context
from flowjax.canvas.values import Field, Problem, State, Value

PROBLEM = Field("problem", "text", "the problem's text")
# What solving operators read where the state has it.
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
    """The message: instruction, problem, the given inputs by their titles, and how to reply.

    Only inputs that hold something are shown; the problem's own material (context, options, tests) always is.
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
    """One numbered text a paragraph."""
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def solution_form(problem: Problem) -> str:
    """How to end a reply that solves the problem; `flowjax.canvas.operators.replies.solution` reads it."""
    if problem.kind == "code":
        return f"Reason first if you like. {code_form(problem)}"
    return f"Reason first if you like. End with one line: Answer: {answer_form(problem)}"


def code_form(problem: Problem) -> str:
    """How to write a program."""
    wanted = (
        f"that defines the function {problem.entry_point}"
        if problem.entry_point
        else "that reads standard input and prints to standard output"
    )
    return f"Give the whole Python 3 program {wanted}, in one ```python block; only the last such block counts."


def answer_form(problem: Problem) -> str:
    """What a bare answer looks like."""
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
    if any(option not in text for option in problem.options.values()):
        options = "\n".join(f"{letter}. {option}" for letter, option in problem.options.items())
        parts.append(section("Options", options))
    if problem.public_tests:
        parts.append(section("Tests that it must pass", "\n".join(problem.public_tests)))
    return parts
