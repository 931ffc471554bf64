"""The text of an observation of the canvas, taken apart for assertions."""

from collections.abc import Mapping
from dataclasses import dataclass

from flowjax.envs import Observation
from flowjax.envs.canvas.env import CanvasEnv
from flowjax.envs.canvas.texts import _OPERATORS, _PROBLEM, EMPTY, RESULT, WORKFLOW
from flowjax.envs.canvas.world import Canvas
from flowjax.published.canvas import HintedView, PublishedCanvas


@dataclass(frozen=True, slots=True)
class Shown:
    """An observation's text taken apart. `facts` are the lines `name: value` of the result."""

    operators: str
    kind: str
    problem: str
    workflow: str
    facts: Mapping[str, str]
    result: str


def text_of(env: CanvasEnv, observation: Observation) -> str:
    """An observation in the words of its environment's world."""
    world = PublishedCanvas if isinstance(observation.view, HintedView) else Canvas
    options = {name: getattr(env.options, name) for name in world.Options.__dataclass_fields__}
    return world(**options).worded(observation.view).whole


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
