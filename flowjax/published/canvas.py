"""Canvas as FlowSteer publishes it, faults included: nearly right actions mended, the next operator hinted at, and the
structure score with the reward made of it (`published_canvas` in config.reward.components).

`config.env.name`: "flowjax.published.canvas:PublishedCanvas". All else is as in the world itself.

The score is read off the workflow's text: operators that are mentioned count, whether they ran or not, and the pattern
for loops (`x3`) never meets the text, which says `* 3`.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowjax.canvas.actions import Action, Add, Unreadable
from flowjax.canvas.graph import Call, Parallel, Workflow, walk
from flowjax.canvas.text import show
from flowjax.canvas.values import Problem, ProblemKind, WorkflowRun
from flowjax.envs import Observation
from flowjax.envs.canvas.env import CanvasEnv
from flowjax.envs.canvas.texts import CanvasView, ObservationText, worded
from flowjax.envs.canvas.world import Canvas, CanvasOptions
from flowjax.published import canvas_repair
from flowjax.records import Task

# JAX is imported for type checkers alone: workers of environments read the score, and have no use for it.
if TYPE_CHECKING:
    from flowjax.rewards import Outcome

OPERATORS = (
    "Custom", "Plan", "Programmer", "Review", "Revise", "Verify", "Decompose", "Aggregate", "AnswerGenerate", "Format",
    "ScEnsemble", "Test",
)  # fmt: skip
MENTIONS = 6
_MENTION = re.compile(r"\b(" + "|".join(OPERATORS) + r")\b")


@dataclass(frozen=True, slots=True)
class PublishedCanvasOptions(CanvasOptions):
    """Those of the canvas, and two of its own."""

    lenient: bool = True  # mend actions that are nearly right, and count them
    hints: bool = True  # tell the next operator after each run


@dataclass(frozen=True, slots=True)
class HintedView(CanvasView):
    """An observation of the canvas, and what to do next; "" where nothing is said."""

    hint: str = ""


class PublishedCanvasEnv(CanvasEnv):
    """The environment of the canvas, with mended actions and hints. State: as in the canvas."""

    _options: PublishedCanvasOptions

    def reset(self, task: Task, seed: int) -> Observation:
        self._repaired, self._hint = 0, ""
        return super().reset(task, seed)

    def _read(self, text: str) -> Action | Unreadable:
        read = super()._read(text)
        if isinstance(read, Unreadable) and self._options.lenient:
            mended = canvas_repair.parse(text, self._operators)
            if not isinstance(mended, Unreadable):
                self._repaired += 1
                return mended
        return read

    def _take(self, action: Action, problem: Problem) -> str:
        before = self._run
        refused = super()._take(action, problem)
        if self._options.hints and self._run is not None and self._run is not before:
            self._hint = hint(self._workflow, self._run, problem.kind, action)
        return refused

    def _observe(self) -> Observation:
        found = super()._observe()
        view = {part.name: getattr(found.view, part.name) for part in dataclasses.fields(CanvasView)}
        return dataclasses.replace(found, view=HintedView(**view, hint=self._hint))

    def _outcome(self) -> dict[str, float]:
        parts = structure_parts(show(self._workflow, instructions=False))
        return {**super()._outcome(), "repaired_actions": float(self._repaired), **parts}


class PublishedCanvas(Canvas):
    """The canvas in FlowSteer: mends actions, says what to do next, and scores what stands in the workflow's text."""

    OUTCOMES = (
        *Canvas.OUTCOMES,
        *("repaired_actions", "canvas_checker", "canvas_format", "canvas_operator", "canvas_control"),
    )
    Options = PublishedCanvasOptions
    View = HintedView
    Environment = PublishedCanvasEnv

    def worded(self, view: CanvasView) -> ObservationText:
        hints = [f"Hint: {view.hint}"] if isinstance(view, HintedView) and view.hint else []
        return worded(view, self._offer, *hints)


def structure_parts(shown: str) -> Mapping[str, float]:
    """The four parts of the published score of a workflow's text form, each 0 or 1."""
    mentioned = _MENTION.findall(shown)
    branching = ("[" in shown and "]" in shown) or ("?" in shown and ":" in shown)
    return {
        "canvas_checker": float(any(name in mentioned for name in ("Verify", "Test", "Review"))),
        "canvas_format": float("Format" in shown),
        "canvas_operator": float(len(mentioned) >= MENTIONS),
        "canvas_control": float(branching or re.search(r"x\s*\d+", shown) is not None),
    }


def canvas(
    correctness: "Outcome",
    canvas_checker: "Outcome",
    canvas_format: "Outcome",
    canvas_operator: "Outcome",
    canvas_control: "Outcome",
) -> "Outcome":
    """R = -1 + S + [S >= 1] C, S = 0.2 checker + 0.2 format + 0.2 operator + 0.4 control.

    The parts are those of `structure_parts`: six mentions of one kind are enough, and a loop is never seen.
    """
    structure = 0.2 * canvas_checker + 0.2 * canvas_format + 0.2 * canvas_operator + 0.4 * canvas_control
    released = structure >= 1.0 - 1e-6  # 0.2 + 0.2 + 0.2 + 0.4 may round to just below 1
    return structure.clip(max=1.0) - 1.0 + released * correctness


def hint(workflow: Workflow, run: WorkflowRun, kind: ProblemKind, action: Action) -> str:
    """Hint of the published system on what the policy is to do next: a hand-written controller.

    Rules for multiple choice with three revisions, and for confidences, are left out: choices are a kind of their own
    here, and checks state no confidence.
    """
    present = {call.operator for call in workflow.calls()}
    added = [node.operator for node in walk(action.piece) if isinstance(node, Call)] if isinstance(action, Add) else []
    last = added[-1] if added else ""
    computed = kind in ("math", "code")
    solver = "Programmer" if computed else "Custom"
    if run.status != "ok":
        return f"add {_after_error(last, present, computed)}"
    combined = present & {"ScEnsemble", "Aggregate", "MdEnsemble"}
    following = _following(last, present, kind, run, solver)
    if following != "finish" and not combined and any(isinstance(node, Parallel) for node in workflow.nodes()):
        following = "ScEnsemble" if kind == "math" else "Aggregate"
    return following if following == "finish" else f"add {following}"


def _after_error(last: str, present: set[str], computed: bool) -> str:
    if "Programmer" in present or computed:
        both = {"Test", "Programmer"} <= present
        return "Test ? done : Programmer" if last in ("Test", "Programmer") and both else "Programmer"
    return "Revise" if present & {"AnswerGenerate", "Custom"} else "Custom"


def _following(last: str, present: set[str], kind: ProblemKind, run: WorkflowRun, solver: str) -> str:
    if last in ("Plan", "Decompose") or not present & {"Programmer", "AnswerGenerate", "Custom"}:
        return solver
    concise = len(run.answer) <= 50 and "\n" not in run.answer
    done = "finish" if "Format" in present else "Format"
    match last:
        case "Format":
            return "finish" if concise else "Revise"
        case "Verify":
            return done if run.state.get("passed") is True else "Revise"
        case "Review" | "Test":
            return done
        case "Programmer" | "AnswerGenerate" | "Custom":
            if kind == "math" and "Verify" not in present:
                return "Verify"
            if kind == "code" and "Test" not in present:
                return "Test"
            if present & {"Verify", "Test"}:
                return "finish" if concise else "Format"
            return "Verify"
    return "finish" if concise else "Format"
