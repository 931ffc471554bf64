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
_EXECUTORS = "\n\n## Executors (Operator@name asks that one; cost per million tokens)\n"
_WORKFLOW_SHARE = 0.25  # of an observation that is too long: a workflow with longer instructions is shown without them
_STEPS_ROOM = 600  # characters that are left to the steps of a run at least
_CUT = " ... (cut)"
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
    most: int,
    executors: str = "",
) -> str:
    """The text of an observation, of at most `most` characters.

    Args:
        operators: those on offer, a line each.
        refused: why the last action was, "" if it was not.
        failed_step: id of the step at the top in which the run failed, or "".
        usage: of the whole episode.
        left: what is left of the budget, in words.
        limit: characters shown of each output.
        most: characters shown in all: steps are left out first, then instructions, then of the problem.
        executors: who answers operators, a line each with its price; "" where there is one.
    """
    operators, limit = _cut(operators, most // 3), min(limit, most // 8)
    lines, steps = [], []
    if refused:
        lines.append(f"Refused: {_line(refused, 600)} Nothing was changed.")
    if run is None:
        lines.append("Run: none")
    else:
        status = f"failed in {failed_step}" if run.status == "error" and failed_step else run.status
        lines += [f"Run: {status}", f"Check: {_check(run)}"]
        if run.status == "budget":
            lines.append(f"Limit: {_line(run.error, limit)}.")
        lines.append(f"Answer: {_line(run.answer, limit) or 'none'}")
        steps = [_step(node_run, limit) for node_run in run.trace]
    spent = [f"Spent: {usage.calls} calls, {usage.prompt_tokens + usage.sampled_tokens} tokens, {usage.cost:g} cost"]
    if left:
        spent.append(f"Budget left: {', '.join(left)}")
    spent.append(f"Turns left: {turns_left}")
    if hint:
        spent.append(f"Hint: {hint}")
    told = f"{_EXECUTORS}{executors}" if executors else ""
    beginning = f"{_OPERATORS}{operators}{told}{_PROBLEM}{problem.kind})\n"
    question, shown = "".join(_problem(problem)), show(workflow, ids=True) or EMPTY
    fixed = len(beginning) + len(WORKFLOW) + len(RESULT) + sum(len(line) + 1 for line in (*lines, *spent))
    room = most - fixed - len(question) - len(shown)
    if room < sum(len(step) + 1 for step in steps) and len(shown) > _WORKFLOW_SHARE * most:
        room += len(shown)
        shown = _cut(show(workflow, ids=True, instructions=False), int(_WORKFLOW_SHARE * most))
        room -= len(shown)
    if room < _STEPS_ROOM:
        kept = max(0, len(question) + room - _STEPS_ROOM)
        question, room = _cut(question, kept), _STEPS_ROOM
    result = "\n".join([*lines, *_fitting(steps, room, most), *spent])
    return f"{beginning}{question}{WORKFLOW}{shown}{RESULT}{result}"


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


def _fitting(steps: Sequence[str], room: int, most: int) -> list[str]:
    """The first and the last steps, as many as there is room for."""
    if sum(len(step) + 1 for step in steps) <= room:
        return list(steps)
    left_out = f"- {{}} of {len(steps)} steps are not shown: an observation has at most {most} characters."
    room -= len(left_out) + len(str(len(steps))) + 1
    first, last = 0, len(steps)
    while first < last:
        from_end = first > len(steps) - last
        step = steps[last - 1] if from_end else steps[first]
        room -= len(step) + 1
        if room < 0:
            break
        first, last = (first, last - 1) if from_end else (first + 1, last)
    return [*steps[:first], left_out.format(last - first), *steps[last:]]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - len(_CUT))] + _CUT


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
