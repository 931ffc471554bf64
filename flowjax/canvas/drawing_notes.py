"""What drawings say about a call: who it is, what it is told, and how its runs went."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowjax.canvas.graph import Call
from flowjax.canvas.operators.base import Operator, Role
from flowjax.canvas.trace import NodeRun, Run, Usage
from flowjax.canvas.values import State

_SHOWN_FIELDS = ("answer", "code", "feedback", "plan", "subproblems")  # of what a call wrote, the first there is


@dataclass(frozen=True, slots=True)
class Note:
    """Lines of text beside a call. `status` is the worst of its runs, "not run", or "" where nothing was run."""

    title: str
    role: Role | None
    told: str
    status: str
    how: str
    gave: str


def note(call: Call, operators: Mapping[str, type[Operator]], run: Run | None) -> Note:
    """What to say about a call, after a run if there was one."""
    role = operators[call.operator].role if call.operator in operators else None
    title = call.operator + (f" @{call.backend}" if call.backend else "")
    if run is None:
        return Note(title, role, call.instruction, "", "", "")
    runs = [each for each in run.trace if each.node_id == call.id]
    if not runs:
        return Note(title, role, call.instruction, "not run", "not run", "")
    gave = runs[-1].error or output_text(runs[-1].outputs)
    return Note(title, role, call.instruction, _worst(runs), _how(runs), gave)


def output_text(outputs: State) -> str:
    """The most telling of what a call wrote."""
    verdict = {True: "passed", False: "failed"}.get(outputs["passed"] is True) if "passed" in outputs else None
    field = next((name for name in (*_SHOWN_FIELDS, *outputs) if name in outputs and name != "passed"), None)
    value = outputs[field] if field else ""
    text = "; ".join(value) if isinstance(value, tuple) else str(value)
    return ": ".join(part for part in (verdict, text) if part)


def shortened(text: str, most: int) -> str:
    """One line of at most so many characters, with none that XML does not allow."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text[: 10 * most]).split())
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _worst(runs: Iterable[NodeRun]) -> str:
    return min((run.status for run in runs), key=("error", "budget", "ok").index)


def _how(runs: list[NodeRun]) -> str:
    usage = sum((run.usage for run in runs), Usage())
    tokens = usage.prompt_tokens + usage.sampled_tokens
    cached = sum(run.cached for run in runs)
    parts = [
        {"budget": "over budget"}.get(_worst(runs), _worst(runs)),
        f"{len(runs)} runs" if len(runs) > 1 else "",
        "cached" if cached == len(runs) else f"{cached} cached" if cached else "",
        f"{tokens} tokens" if tokens else "",
        f"cost {usage.cost:.2g}" if usage.cost else "",
    ]
    return " · ".join(part for part in parts if part)
