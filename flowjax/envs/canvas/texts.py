"""Observations of the canvas as data, and as text for language models and for nano models; and reading of actions."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowjax.canvas import actions
from flowjax.canvas.actions import Action, Add, Modify, SetPrompt, Unreadable
from flowjax.canvas.draw import output_text, shortened, svg
from flowjax.canvas.forms import from_json, to_json
from flowjax.canvas.graph import Call, Node, Workflow, children, with_children
from flowjax.canvas.operators import Operator
from flowjax.canvas.text import tokens, unquoted
from flowjax.canvas.values import NodeRun, ProblemKind, State, Usage, Value, WorkflowRun
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
_WORKFLOW_SHARE = 0.25  # of an observation that is too long: a longer workflow is shown without instructions
_STEPS_ROOM = 600  # characters that the steps of a run get at least
_CUT = " ... (cut)"
_TRACE_CHARACTERS = 8000  # of the inputs and outputs of a run's calls; also of its answer, and of each error
_LONG_WORDS = 3  # an answer with more words reads like a sentence
LARGEST = 20  # largest number of turns, of a price and of tens of words in a compact prompt
LONGEST_WORKFLOW = 40  # words of a workflow in a compact prompt; of longer ones the beginning is left out

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
class StepView:
    """One run of one call: its outputs by name, or its error; both on one line and cut."""

    node_id: str
    operator: str
    turn: int
    status: str
    outputs: tuple[tuple[str, str], ...]
    error: str


@dataclass(frozen=True, slots=True)
class RunView:
    """A run of the workflow: status, verdict of the latest check (None without one), answer and error on one line and
    cut, and its steps in reading order."""

    status: str
    passed: bool | None
    answer: str
    error: str
    steps: tuple[StepView, ...]


@dataclass(frozen=True, slots=True)
class CanvasView:
    """An observation as data.

    kind ... public_tests   the problem, as in `flowjax.canvas.values.Problem`
    workflow, outline       text form with ids; the outline without instructions; "" for none
    nodes                   id and kind ("call", "loop", ...) of its nodes, in reading order
    run                     the current workflow's run; None before the first edit
    failed_step             id of the top-level step in which the run failed, or ""
    refused                 reason why the last action was refused, "" if it was not
    calls, tokens, cost     spent in the episode
    left                    rest of the budget, by name
    """

    kind: ProblemKind
    problem: str
    context: str
    options: tuple[tuple[str, str], ...]
    public_tests: tuple[str, ...]
    workflow: str
    outline: str
    nodes: tuple[tuple[str, str], ...]
    run: RunView | None
    failed_step: str
    refused: str
    calls: int
    tokens: int
    cost: float
    left: tuple[tuple[str, float], ...]
    turns_left: int


def view_run(run: WorkflowRun | None, limit: int) -> RunView | None:
    """View of a run, with at most `limit` characters of each text."""
    if run is None:
        return None
    passed = run.state.get("passed")
    steps = tuple(
        StepView(
            node.node_id,
            node.operator,
            node.turn,
            node.status,
            tuple((name, one_line(_shown(value), limit)) for name, value in node.outputs.items()),
            one_line(node.error, limit),
        )
        for node in run.trace
    )
    verdict = None if passed is None else passed is True
    return RunView(run.status, verdict, one_line(run.answer, limit), one_line(run.error, limit), steps)


def one_line(text: str, limit: int) -> str:
    """A text on one line, cut at the limit. On one line, no output can look like a heading of the prompt."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}..."


@dataclass(frozen=True, slots=True)
class Offer:
    """The part that is the same in every observation of a world.

    operators   the offered operators, a line each
    executors   the backends that answer, a line each with its price; "" where there is only one
    most        most characters of an observation
    """

    operators: str
    executors: str
    most: int


class ObservationText(NamedTuple):
    """Text of an observation in its parts: operators, executors and problem; workflow, "" for none; result."""

    beginning: str
    workflow: str
    result: str

    @property
    def whole(self) -> str:
        return f"{self.beginning}{WORKFLOW}{self.workflow or EMPTY}{RESULT}{self.result}"


def worded(view: CanvasView, offer: Offer, *more: str) -> ObservationText:
    """An observation as text, of at most `offer.most` characters: steps are left out first, then the workflow's
    instructions, then parts of the problem. `more` are further lines at its end."""
    most, run = offer.most, view.run
    lines, steps = [], []
    if view.refused:
        lines.append(f"Refused: {view.refused} Nothing was changed.")
    if run is None:
        lines.append("Run: none")
    else:
        check = "none" if run.passed is None else "passed" if run.passed else "not passed"
        lines += [f"Run: {f'failed in {view.failed_step}' if view.failed_step else run.status}", f"Check: {check}"]
        if run.status == "budget":
            lines.append(f"Limit: {run.error}.")
        lines.append(f"Answer: {run.answer or 'none'}")
        steps = [_step(step) for step in run.steps]
    spent = [f"Spent: {view.calls} calls, {view.tokens} tokens, {view.cost:g} cost"]
    if view.left:
        spent.append(f"Budget left: {', '.join(f'{amount:g} {name}' for name, amount in view.left)}")
    spent += [f"Turns left: {view.turns_left}", *more]
    priced = f"{_EXECUTORS}{offer.executors}" if offer.executors else ""
    beginning = f"{_OPERATORS}{_cut(offer.operators, most // 3)}{priced}{_PROBLEM}{view.kind})\n"
    question, shown = "".join(_problem(view)), view.workflow
    fixed = len(beginning) + len(WORKFLOW) + len(RESULT) + sum(len(line) + 1 for line in (*lines, *spent))
    room = most - fixed - len(question) - len(shown or EMPTY)
    if room < sum(len(step) + 1 for step in steps) and len(shown) > _WORKFLOW_SHARE * most:
        room += len(shown)
        shown = _cut(view.outline, int(_WORKFLOW_SHARE * most))
        room -= len(shown)
    if room < _STEPS_ROOM:
        room += len(question)
        question = _cut(question, max(0, room - _STEPS_ROOM))
        room -= len(question)
    return ObservationText(beginning + question, shown, "\n".join([*lines, *_fitting(steps, room, most), *spent]))


def _answer_length(answer: str) -> str:
    """Length of an answer in a word: none, short, or long if it reads like a sentence."""
    if not answer:
        return "none"
    return "long" if len(answer.split()) > _LONG_WORDS and "def " not in answer else "short"


def _problem(view: CanvasView) -> list[str]:
    parts = [view.problem.strip()]
    if view.context:
        parts.append(f"\n\nContext:\n{view.context}")
    if view.options:
        parts.append("\n\nOptions:\n" + "\n".join(f"{letter}. {text}" for letter, text in view.options))
    if view.public_tests:
        parts.append("\n\nPublic tests:\n" + "\n".join(view.public_tests))
    return parts


def _fitting(steps: Sequence[str], room: int, most: int) -> list[str]:
    """The first and the last steps, as many as fit, with a line for those left out between them."""
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
    return text if len(text) <= most else (text[: max(0, most - len(_CUT))] + _CUT)[:most]


def _step(step: StepView) -> str:
    again = f", turn {step.turn}" if step.turn > 1 else ""
    if step.status == "ok":
        said = "; ".join(f"{name} = {value}" for name, value in step.outputs)
    else:
        said = f"{step.status}: {step.error}"
    return f"- {step.node_id} {step.operator}{again}: {said}"


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else " | ".join(value)


def read_action(text: str) -> Action | Unreadable:
    """The action of a text, tagged or on one line. Text before a tagged action is not read as a line."""
    after = text.partition("</think>")[2] or text
    if "<action>" in after and "</action>" in after:
        return actions.parse(text)
    compact = actions.parse_compact(text)
    if not isinstance(compact, Unreadable) or "<" not in text:
        return compact
    return actions.parse(text)


def with_phrases(action: Action) -> Action:
    """The action with every one-word instruction that names a phrase replaced by the phrase."""
    match action:
        case Add(piece):
            return dataclasses.replace(action, piece=_written_out(piece))
        case Modify() | SetPrompt():
            return dataclasses.replace(action, prompt=exercises.PHRASES.get(action.prompt, action.prompt))
    return action


def _written_out(node: Node) -> Node:
    if isinstance(node, Call):
        instruction = exercises.PHRASES.get(node.instruction, node.instruction)
        return dataclasses.replace(node, instruction=instruction)
    return with_children(node, tuple(map(_written_out, children(node))))


def state_words(view: CanvasView, prices: Sequence[str] = ()) -> list[str]:
    """Executors and their prices, the problem, the workflow, and the result of its run, in words of the vocabulary.

    A generated exercise is given in its own words, any other problem as its kind and its length in tens of words.
    """
    if exercises.read(view.problem):
        problem = exercises.words(view.problem)
    else:
        problem = [view.kind, str(min(len("".join(_problem(view)).split()) // 10, LARGEST))]
    words = _workflow_words(view.workflow)
    if len(words) > LONGEST_WORKFLOW:
        words = ["cut", *words[-LONGEST_WORKFLOW:]]
    return [*prices, *problem, ":", *(words or ["empty"]), *result_words(view)]


def _workflow_words(text: str) -> list[str]:
    """Words of a workflow's text form: ids after their nodes, an instruction by its phrase or as `instructed`."""
    words: list[str] = []
    detail = False  # inside the braces of a call
    for token in tokens(text)[:-1]:
        if token.kind in "{}":
            detail = token.kind == "{"
        elif token.kind == "string":
            words.append(exercises.PHRASE_OF.get(unquoted(text, token), "instructed"))
        elif not detail:
            words.append(token.text.removeprefix("#"))
    return words


def result_words(view: CanvasView) -> list[str]:
    """Words for the run's status, its check, its answer and the turns left."""
    refused = ["refused"] if view.refused else []
    run = view.run
    status = ["error", view.failed_step] if view.failed_step else [run.status if run else "none"]
    check = [] if run is None or run.passed is None else ["passed" if run.passed else "failed"]
    answer = _answer_length(run.answer if run else "")
    return ["=", *refused, *status, *check, answer, str(min(view.turns_left, LARGEST))]


# -------------------------------------------------------------------------------------------------- a run, for people


def trace_of(workflow: Workflow, run: WorkflowRun) -> dict[str, Any]:
    """A run for people: the workflow, and each call's inputs, outputs and usage."""
    room = _TRACE_CHARACTERS // max(2 * len(run.trace), 1)

    def words(state: State) -> str:
        share = max(room // max(len(state), 1), 40)
        lines = (f"{name}: {' | '.join(value) if isinstance(value, tuple) else value}" for name, value in state.items())
        return "\n".join(_marked(line, share) for line in lines)

    nodes = [
        {
            "id": node.node_id,
            "operator": node.operator,
            "status": node.status,
            "turn": node.turn,
            "cached": node.cached,
            # Left out for cached calls, which are most of a run: an earlier trace has them.
            **({} if node.cached else {"inputs": words(node.inputs), "outputs": words(node.outputs)}),
            "gave": shortened(output_text(node.outputs), 100),
            "error": _marked(node.error, _TRACE_CHARACTERS),
            "calls": node.usage.calls,
            "tokens": node.usage.prompt_tokens + node.usage.sampled_tokens,
            "cost": node.usage.cost,
            "seconds": round(node.seconds, 3),
        }
        for node in run.trace
    ]
    answer = _marked(run.answer, _TRACE_CHARACTERS)
    return {"workflow": to_json(workflow), "status": run.status, "answer": answer, "nodes": nodes}


def _marked(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def drawn(trace: Mapping[str, Any], operators: Mapping[str, type[Operator]]) -> str:
    """SVG of a trace that `trace_of` made."""
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
