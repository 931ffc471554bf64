"""Texts of the canvas: an observation in words, for language models and for nano models, and actions read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.canvas import actions
from flowjax.canvas.actions import Action, Unreadable
from flowjax.canvas.draw import output_text, shortened, svg
from flowjax.canvas.graph import Workflow
from flowjax.canvas.json_form import from_json, to_json
from flowjax.canvas.operators.base import Operator
from flowjax.canvas.text import show
from flowjax.canvas.values import NodeRun, Problem, State, Usage, Value, WorkflowRun
from flowjax.envs.canvas import exercises

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
_TRACE_CHARACTERS = 8000  # of what a run's calls were given and gave
_LONG_WORDS = 3  # of an answer that reads like a sentence
_LARGEST = 20  # number in a compact prompt
_LONGEST_WORKFLOW = 32  # words of it in a compact prompt; the beginning of longer ones is left out
_WORD = re.compile(r"->|[\w.]+|[^\w\s]")

RULES = """You build a workflow of operators that solves the problem below. You do not solve it yourself: after each of
your edits the workflow runs, and you see what every step gave. The answer of its last run counts.

A workflow is steps joined with ->. [A, B] runs branches side by side, after which a combining operator can choose
among their answers. C ? A : B runs A if the check C passes and B if it does not; done stands for no step.
(A -> B) * 2 repeats at most twice and stops where a check passes. Each step reads the newest plan, answer, program and
feedback before it."""
INSTRUCTION = """Think briefly if you like, then give exactly one action:
<action>add</action><operator>NAME</operator><prompt>what it is told (optional)</prompt>
<action>add</action><workflow>[A, B] -> C</workflow>
<action>delete</action><target>ID</target>
<action>modify</action><target>ID</target><operator>NAME</operator>
<action>set_prompt</action><target>ID</target><prompt>what it is told</prompt>
<action>finish</action>
add can end with <into>ID</into><position>NUMBER</position>. Turns are limited; what stands then is what counts."""


@dataclass(frozen=True, slots=True)
class CanvasView:
    """An observation as data, and in words.

    text          the whole of it, cut to the length that the world allows
    workflow      as it is shown; "" for none
    outline       the whole workflow without instructions
    result        what its run gave, the last part of the text
    topic, size   kind of a generated exercise and its size, or kind of another problem and its tens of words
    status        of the run: "none", "ok", "error", "budget"
    failed_step   id of the step at the top in which the run failed, or ""
    passed        verdict of the latest check, None without one
    answer        of the run, cut; "" for none
    """

    text: str
    workflow: str
    outline: str
    result: str
    topic: str
    size: int
    refused: bool
    status: str
    failed_step: str
    passed: bool | None
    answer: str
    turns_left: int


def observe(
    operators: str,
    problem: Problem,
    workflow: Workflow,
    run: WorkflowRun | None,
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
) -> CanvasView:
    """An observation, whose text has at most `most` characters.

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
    priced = f"{_EXECUTORS}{executors}" if executors else ""
    beginning = f"{_OPERATORS}{operators}{priced}{_PROBLEM}{problem.kind})\n"
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
    reading = exercises.read(problem.text)
    passed = None if run is None else run.state.get("passed")
    return CanvasView(
        text=f"{beginning}{question}{WORKFLOW}{shown}{RESULT}{result}",
        workflow="" if shown == EMPTY else shown,
        outline=show(workflow, instructions=False),
        result=result,
        topic=reading.source if reading else problem.kind,
        size=reading.size if reading else min(len(question.split()) // 10, _LARGEST),
        refused=bool(refused),
        status=run.status if run else "none",
        failed_step=failed_step if run and run.status == "error" else "",
        passed=None if passed is None else passed is True,
        answer=_line(run.answer, limit) if run else "",
        turns_left=turns_left,
    )


def _answer_length(answer: str) -> str:
    """none, short, or long for what reads like a sentence."""
    if not answer:
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


def _check(run: WorkflowRun) -> str:
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


def read_action(text: str) -> Action | Unreadable:
    """The action of a text, tagged or on one line."""
    compact = actions.parse_compact(text)
    if not isinstance(compact, Unreadable) or "<" not in text:
        return compact
    return actions.parse(text)


def state_words(view: CanvasView) -> list[str]:
    """The problem, the workflow, and what its run gave, in words of the vocabulary."""
    words = _WORD.findall(view.outline)
    if len(words) > _LONGEST_WORKFLOW:
        words = ["cut", *words[-_LONGEST_WORKFLOW:]]
    return [view.topic, str(view.size), ":", *(words or ["empty"]), *result_words(view)]


def result_words(view: CanvasView) -> list[str]:
    """Run, check, answer, turns left."""
    refused = ["refused"] if view.refused else []
    run = ["error", view.failed_step] if view.failed_step else [view.status]
    check = [] if view.passed is None else ["passed" if view.passed else "failed"]
    return ["=", *refused, *run, *check, _answer_length(view.answer), str(min(view.turns_left, _LARGEST))]


# -------------------------------------------------------------------------------------------------- a run, for people


def trace_of(workflow: Workflow, run: WorkflowRun) -> dict[str, Any]:
    """A run for people: the workflow, and what each of its calls was given, gave and cost."""
    room = _TRACE_CHARACTERS // max(2 * len(run.trace), 1)

    def words(state: State) -> str:
        share = max(room // max(len(state), 1), 40)
        lines = (f"{name}: {' | '.join(value) if isinstance(value, tuple) else value}" for name, value in state.items())
        return "\n".join(line if len(line) <= share else f"{line[:share]} …" for line in lines)

    nodes = [
        {
            "id": node.node_id,
            "operator": node.operator,
            "status": node.status,
            "turn": node.turn,
            "cached": node.cached,
            # A call that was not run again is in an earlier trace: most of every run is.
            **({} if node.cached else {"inputs": words(node.inputs), "outputs": words(node.outputs)}),
            "gave": shortened(output_text(node.outputs), 100),
            "error": node.error[:room],
            "calls": node.usage.calls,
            "tokens": node.usage.prompt_tokens + node.usage.sampled_tokens,
            "cost": node.usage.cost,
            "seconds": round(node.seconds, 3),
        }
        for node in run.trace
    ]
    return {"workflow": to_json(workflow), "status": run.status, "answer": run.answer[:room], "nodes": nodes}


def drawn(trace: Mapping[str, Any], operators: Mapping[str, type[Operator]]) -> str:
    """SVG of what `trace_of` kept."""
    nodes = tuple(
        NodeRun(
            each["id"],
            each["operator"],
            each["status"],
            each["turn"],
            each["cached"],
            outputs={"answer": each["gave"]},
            usage=Usage(each["calls"], each["tokens"], 0, each["cost"]),
            seconds=each["seconds"],
            error=each["error"],
        )
        for each in trace["nodes"]
    )
    run = WorkflowRun(trace["answer"], trace["status"], {}, nodes, Usage(), 0.0)
    return svg(from_json(trace["workflow"]), run, operators)
