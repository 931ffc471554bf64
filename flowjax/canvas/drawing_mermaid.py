"""Workflows as Mermaid flowcharts."""

from collections.abc import Mapping

from flowjax.canvas.drawing_notes import note, shortened
from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow
from flowjax.canvas.operators.base import Operator
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.trace import Run

_CLASSES = {
    "ok": "stroke:#2e8b57,stroke-width:3px",
    "error": "stroke:#c0392b,stroke-width:3px",
    "budget": "stroke:#d68910,stroke-width:3px",
    "not_run": "stroke:#9e9e9e,stroke-dasharray:4 3",
}
_LINE_CHARACTERS = 40

_Exit = tuple[str, str]  # a box, and the label of the line that leaves it


def mermaid(workflow: Workflow, run: Run | None = None, operators: Mapping[str, type[Operator]] | None = None) -> str:
    """The text of a flowchart, with how it went after a run. `operators` give the roles; the registry's if None."""
    chart = _Chart(load_operators(entry_points=False) if operators is None else operators, run)
    exits = chart.through(workflow.root, [(chart.box("([problem])"), "")])
    answer = f"answer: {shortened(run.answer, _LINE_CHARACTERS)}" if run and run.answer else "answer"
    chart.join(exits, chart.box(f'(["{_escaped(answer)}"])'))
    used = {line.rpartition(":::")[2] for line in chart.lines if ":::" in line}
    styles = [f"    classDef {name} {style}" for name, style in _CLASSES.items() if name in used]
    return "\n".join(["flowchart TD", *chart.lines, *styles]) + "\n"


class _Chart:
    def __init__(self, operators: Mapping[str, type[Operator]], run: Run | None):
        self.operators, self.run = operators, run
        self.lines: list[str] = []
        self.boxes = 0

    def box(self, shape: str) -> str:
        """A new box; its name in the chart."""
        self.boxes += 1
        self.lines.append(f"    b{self.boxes}{shape}")
        return f"b{self.boxes}"

    def join(self, exits: list[_Exit], box: str) -> None:
        self.lines += [f"    {source} -->{f'|{label}|' if label else ''} {box}" for source, label in exits]

    def through(self, node: Node, entries: list[_Exit]) -> list[_Exit]:
        """Draws a node that is reached from `entries`; where it is left."""
        match node:
            case Call():
                box = self.call(node)
                self.join(entries, box)
                return [(box, "")]
            case Sequence(steps):
                for step in steps:
                    entries = self.through(step, entries)
                return entries
            case Parallel(branches):
                fork = self.box(f'{{{{"{len(branches)} branches"}}}}')
                self.join(entries, fork)
                return [exit for branch in branches for exit in self.through(branch, [(fork, "")])]
            case Conditional(condition, then, otherwise):
                passed = self.box('{"passed?"}')
                self.join(self.through(condition, entries), passed)
                ways = [((passed, "pass"), then), ((passed, "fail"), otherwise)]
                return [exit for way, branch in ways for exit in (self.through(branch, [way]) if branch else [way])]
            case Loop(body, count):
                start = self.box('(("loop"))')
                self.join(entries, start)
                exits = self.through(body, [(start, "")])
                self.lines += [f'    {box} -.->|"again, at most {count} times"| {start}' for box, _ in exits]
                return exits

    def call(self, call: Call) -> str:
        said = note(call, self.operators, self.run)
        role = f"<i>{said.role}</i>" if said.role else ""
        texts = [said.title, said.told, said.how, said.gave]
        title, *rest = (_escaped(shortened(text, _LINE_CHARACTERS)) for text in texts)
        label = "<br/>".join(part for part in (f"<b>{title}</b> {call.id}".strip(), role, *rest) if part)
        status = f":::{said.status.replace(' ', '_')}" if said.status else ""
        return self.box(f'["{label}"]{status}')


def _escaped(text: str) -> str:
    """The text inside a quoted label: what Mermaid or HTML would read otherwise, as entities."""
    return "".join(c if c.isalnum() or c in " ,()='·…" else f"#{ord(c)};" for c in text)
