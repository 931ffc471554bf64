"""The published structure score and operator hints, faults included: options for comparison, never the default.

FlowSteer reads both off the text form of the workflow: operators that are mentioned count, whether they ran or not, and
its pattern for loops (`x3`) never meets the text, which says `* 3`.
"""

import re
from collections.abc import Mapping

from flowjax.canvas.actions import Action, Add
from flowjax.canvas.graph import Call, Parallel, Workflow, walk
from flowjax.canvas.values import ProblemKind, Run

OPERATORS = (
    "Custom", "Plan", "Programmer", "Review", "Revise", "Verify", "Decompose", "Aggregate", "AnswerGenerate", "Format",
    "ScEnsemble", "Test",
)  # fmt: skip
MENTIONS = 6
_MENTION = re.compile(r"\b(" + "|".join(OPERATORS) + r")\b")


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


def hint(workflow: Workflow, run: Run, kind: ProblemKind, action: Action) -> str:
    """What the published system would tell the policy to do next: a hand-written controller.

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


def _following(last: str, present: set[str], kind: ProblemKind, run: Run, solver: str) -> str:
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
