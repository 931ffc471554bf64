"""What an observation of the canvas says, as a text with headings, and that text taken apart again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowjax.canvas.graph import Workflow
from flowjax.canvas.text import show
from flowjax.canvas.values import NodeRun, Problem, Run, Usage, Value

TEMPLATES = (
    "add <workflow>",
    "delete <id>",
    "modify <id> <operator>",
    "prompt <id> <instruction>",
    "finish",
)
WORKFLOW, RESULT = "\n\n## Workflow\n", "\n\n## Result\n"
EMPTY = "(empty)"
_OPERATORS, _PROBLEM = "## Operators (what they need and write)\n", "\n\n## Problem ("
_LONG_WORDS = 3  # of an answer that reads like a sentence


@dataclass(frozen=True, slots=True)
class Shown:
    """An observation's text taken apart. `facts` are the lines `name: value` of the result."""

    operators: str
    kind: str
    problem: str
    workflow: str
    facts: Mapping[str, str]
    result: str


def observe(
    operators: str,
    problem: Problem,
    workflow: Workflow,
    run: Run | None,
    *,
    refused: str,
    failed_step: str,
    usage: Usage,
    turns_left: int,
    left: Sequence[str],
    hint: str,
    limit: int,
) -> str:
    """The text of an observation.

    Args:
        operators: those on offer, a line each.
        refused: why the last action was, "" if it was not.
        failed_step: id of the step at the top in which the run failed, or "".
        usage: of the whole episode.
        left: what is left of the budget, in words.
        limit: characters shown of each output.
    """
    parts = [_OPERATORS, operators, _PROBLEM, problem.kind, ")\n", *_problem(problem)]
    parts += [WORKFLOW, show(workflow, ids=True) or EMPTY, RESULT]
    lines = []
    if refused:
        lines.append(f"Refused: {_line(refused, 600)} Nothing was changed.")
    if run is None:
        lines.append("Run: none")
    else:
        status = f"failed in {failed_step}" if run.status == "error" and failed_step else run.status
        lines += [f"Run: {status}", f"Check: {_check(run)}"]
        lines.append(f"Answer: {_line(run.answer, limit) or 'none'}")
        lines += [_step(node_run, limit) for node_run in run.trace]
    lines.append(
        f"Spent: {usage.calls} calls, {usage.prompt_tokens + usage.sampled_tokens} tokens, {usage.cost:g} cost"
    )
    if left:
        lines.append(f"Budget left: {', '.join(left)}")
    lines.append(f"Turns left: {turns_left}")
    if hint:
        lines.append(f"Hint: {hint}")
    return "".join([*parts, "\n".join(lines)])


def read(text: str) -> Shown:
    """The parts of an observation's text."""
    before, _, result = text.rpartition(RESULT)
    problem, _, workflow = before.rpartition(WORKFLOW)
    operators, _, problem = problem.removeprefix(_OPERATORS).partition(_PROBLEM)
    kind, _, problem = problem.partition(")\n")
    facts: dict[str, str] = {}
    for line in result.split("\n"):
        name, found, value = line.partition(": ")
        if found and not line.startswith("- "):
            facts.setdefault(name, value)
    return Shown(operators, kind, problem, "" if workflow == EMPTY else workflow, facts, result)


def answer_length(answer: str) -> str:
    """none, short, or long for what reads like a sentence."""
    if answer in ("", "none"):
        return "none"
    return "long" if len(answer.split()) > _LONG_WORDS and "def " not in answer else "short"


def _problem(problem: Problem) -> list[str]:
    parts = [problem.text.strip()]
    if problem.context:
        parts.append(f"\n\nContext:\n{problem.context}")
    if problem.options:
        parts.append("\n\nOptions:\n" + "\n".join(f"{letter}. {text}" for letter, text in problem.options.items()))
    if problem.public_tests:
        parts.append("\n\nPublic tests:\n" + "\n".join(problem.public_tests))
    return parts


def _check(run: Run) -> str:
    passed = run.state.get("passed")
    return "none" if passed is None else "passed" if passed is True else "not passed"


def _step(node_run: NodeRun, limit: int) -> str:
    again = f", turn {node_run.turn}" if node_run.turn > 1 else ""
    if node_run.status == "ok":
        said = "; ".join(f"{name} = {_line(_shown(value), limit)}" for name, value in node_run.outputs.items())
    else:
        said = f"{node_run.status}: {_line(node_run.error, limit)}"
    return f"- {node_run.node_id} {node_run.operator}{again}: {said}"


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else " | ".join(value)


def _line(text: str, limit: int) -> str:
    """On one line, cut at the limit: no output can pass for a heading."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}..."
