"""Scripted experts: workflows for each kind of problem, added step by step."""

from collections.abc import Mapping

import numpy as np

from flowjax.canvas.graph import Call, Node, Workflow, walk
from flowjax.canvas.operators.registry import ADVERTISED
from flowjax.canvas.text import parse, show
from flowjax.canvas.values import Run
from flowjax.envs.canvas.exercises import read
from flowjax.records import state_key

NAMES = tuple(operator.name for operator in ADVERTISED)
LOOP_COUNTS = (2, 3)
FINISHING = 0.15  # share of random actions that finish
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


def wanted(text: str, kind: str, *, plain: bool) -> tuple[Node, ...]:
    """The steps that the expert wants for a problem."""
    if plain:
        return parse(PLAIN[state_key("plain", text) % len(PLAIN)]).root.steps
    reading = read(text)
    return parse(ABLE.get(reading.source if reading else kind, ABLE[""])).root.steps


def next_action(steps: tuple[Node, ...], workflow: Workflow, run: Run | None, failed_step: str) -> str:
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


def failed_step(workflow: Workflow, run: Run | None) -> str:
    """Id of the step at the top in which a run has failed, "" if none has."""
    if run is None or run.status != "error" or not run.trace:
        return ""
    failed = run.trace[-1].node_id
    for step in workflow.root.steps:
        if any(isinstance(call, Call) and call.id == failed for call in walk(step)):
            return step.id
    return ""


def random_edit(rng: np.random.Generator) -> str:
    """A compact action: an operator, or a structure of operators, drawn from all that are advertised; or `finish`."""
    if rng.random() < FINISHING:
        return "finish"
    a, b, c = (NAMES[int(place)] for place in rng.integers(len(NAMES), size=3))
    match int(rng.integers(8)):
        case 0:
            return f"add [{a}, {b}]"
        case 1:
            return f"add [{a}, {b}, {c}]"
        case 2:
            return f"add {a} ? done : {b}"
        case 3:
            return f"add ({a} -> {b}) * {LOOP_COUNTS[int(rng.integers(len(LOOP_COUNTS)))]}"
        case _:
            return f"add {a}"
