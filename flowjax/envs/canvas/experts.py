"""Scripted experts that edit a workflow, and edits at random: demonstrations for nano models."""

from collections.abc import Mapping, Sequence

import numpy as np

from flowjax.canvas.graph import Call, Conditional, Node, Workflow
from flowjax.canvas.operators.registry import ADVERTISED
from flowjax.canvas.text import parse, show
from flowjax.canvas.values import WorkflowRun
from flowjax.envs.canvas import exercises
from flowjax.envs.canvas.texts import CanvasView
from flowjax.records import state_key

NAMES = tuple(operator.name for operator in ADVERTISED)
LOOP_COUNTS = (2, 3)
FINISHING = 0.15  # share of random actions that finish
_INSTRUCTED, _SENT = 0.3, 0.3  # of the calls of random edits: with a phrase, with a backend
_PLACED = 0.15  # of random pieces: not at the end
_PHRASES = tuple(exercises.PHRASES)
# What an expert builds who knows what helps with which kind of exercise, or of problem.
ABLE: Mapping[str, str] = {
    "arithmetic": "Plan -> Programmer -> (Verify ? done : Revise) -> Format",
    "words": "Plan -> Programmer -> (Verify ? done : Revise) -> Format",
    "list": "[AnswerGenerate, AnswerGenerate, AnswerGenerate] -> ScEnsemble -> (Verify ? done : Revise) -> Format",
    "program": "Plan -> Programmer -> (Test ? done : Revise) -> Format",
    "code": "Plan -> Programmer -> (Test ? done : Revise) -> Format",
    "": "Plan -> [Custom, AnswerGenerate] -> ScEnsemble -> (Verify ? done : Revise) -> Format",
}
# What a plain one builds, whatever the problem; which of them is drawn by the problem's words.
PLAIN = (
    *("Custom", "AnswerGenerate", "Plan -> Custom") * 3,
    *("Custom -> Review", "Custom -> Format", "Plan -> AnswerGenerate", "Programmer") * 2,
    "[Custom, Custom] -> ScEnsemble",
    "[AnswerGenerate, Custom] -> ScEnsemble -> Format",
    "AnswerGenerate -> (Review ? done : Revise)",
    "Custom -> (Verify ? done : Revise) -> Format",
    "Programmer -> (Test ? done : Revise)",
    "Plan -> Programmer -> Format",
)
HABITS = 8  # of the plain one: two end with an instruction, one with another executor, one with a plan put first


def wanted(text: str, kind: str, *, plain: bool) -> tuple[Node, ...]:
    """The steps that the expert wants for a problem."""
    if plain:
        return parse(PLAIN[state_key("plain", text) % len(PLAIN)]).root.steps
    reading = exercises.read(text)
    return parse(ABLE.get(reading.source if reading else kind, ABLE[""])).root.steps


def next_action(steps: tuple[Node, ...], workflow: Workflow, run: WorkflowRun | None, failed_step: str) -> str:
    """A compact action: the next step that is missing; a step that fails, or does not belong there, is deleted."""
    if run is not None and failed_step:
        return f"delete {failed_step}"
    built = [show(step, instructions=False) for step in workflow.root.steps]
    missing = [show(step) for step in steps]
    while built and missing and built[0] == missing[0]:
        built, missing = built[1:], missing[1:]
    if not missing or (run is not None and run.answer and built):
        return "finish"  # what somebody else has added stays
    return f"add {missing[0]}"


def habit(text: str, workflow: Workflow, others: Sequence[str]) -> str:
    """Edit that the plain expert adds to what it has built, "" for most problems; drawn by the problem's words.

    `others` are the executors that answer only where they are named.
    """
    calls, place = list(workflow.calls()), state_key("phrase", text)
    if not calls or any(call.backend or call.instruction for call in calls):
        return ""
    match state_key("habit", text) % HABITS:
        case 0 | 1:
            return f"prompt {calls[-1].id} {_PHRASES[place % len(_PHRASES)]}"
        case 2 if others:
            return f"modify {calls[-1].id} @{others[place % len(others)]}"
        case 3 if calls[0].operator != "Plan":
            return "add Plan at 0"
    return ""


def random_edit(view: CanvasView, others: Sequence[str], rng: np.random.Generator) -> str:
    """A compact action of any kind, with operators, phrases, other executors and nodes drawn at random."""
    if rng.random() < FINISHING:
        return "finish"
    nodes = {kind.__name__.lower(): [] for kind in (Call, Conditional)}
    for id, kind in view.nodes:
        nodes.setdefault(kind, []).append(id)
    calls = nodes["call"]
    kind = int(rng.integers(8)) if calls else 7
    match kind:
        case 0:
            return f"delete {_one(calls, rng)}"
        case 1:
            return f"prompt {_one(calls, rng)} {_one(_PHRASES, rng)}"
        case 2 if others:
            return f"modify {_one(calls, rng)} @{_one(others, rng)}"
        case 2 | 3:
            return f"modify {_one(calls, rng)} {_one(NAMES, rng)}"
    into = ""
    if nodes["conditional"] and rng.random() < _PLACED:
        into = f" into {_one(nodes['conditional'], rng)}.{_one(('true', 'false'), rng)}"
    elif rng.random() < _PLACED:
        into = " at 0"
    return f"add {_random_piece(others, rng)}{into}"


def _random_piece(others: Sequence[str], rng: np.random.Generator) -> str:
    a, b = _random_call(others, rng), _random_call(others, rng)
    match int(rng.integers(8)):
        case 0:
            return f"[{a}, {b}]"
        case 1:
            return f"[{', '.join(_one(NAMES, rng) for _ in range(3))}]"
        case 2:
            return f"{a} ? done : {b}"
        case 3:
            return f"({a} -> {b}) * {LOOP_COUNTS[int(rng.integers(len(LOOP_COUNTS)))]}"
        case _:
            return a


def _random_call(others: Sequence[str], rng: np.random.Generator) -> str:
    text = _one(NAMES, rng)
    if rng.random() < _INSTRUCTED:
        text += f'{{"{_one(_PHRASES, rng)}"}}'
    if others and rng.random() < _SENT:
        text += f"@{_one(others, rng)}"
    return text


def _one(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]
