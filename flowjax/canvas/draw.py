"""Workflows as pictures: SVG, which needs nothing but a browser, and Mermaid, which Markdown pages draw.

Time runs downwards. Branches of a parallel stand side by side, those of a conditional too, under `pass` and `fail`; an
arrow back at the side of a loop says how often. Calls have the colour of their operator's role and, after a run, a
stripe for how it went.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow, steps_of
from flowjax.canvas.operators import Operator, Role
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.values import NodeRun, State, Usage, WorkflowRun

ROLE_COLOURS = {
    "planner": "#e6e0f8",
    "solver": "#d9e8fb",
    "checker": "#fdeecb",
    "reviser": "#fbdfd3",
    "combiner": "#d5f0e3",
    "formatter": "#e8e8e8",
    None: "#ffffff",
}
STATUS_COLOURS = {
    "ok": "#2e8b57",
    "error": "#c0392b",
    "budget": "#d68910",
    "executor_error": "#7d3c98",
    "not run": "#cfcfcf",
}
_STATUS_TEXT = STATUS_COLOURS | {"not run": "#444444"}
_LINE, _BORDER, _MUTED = "#555555", "#8a8a8a", "#666666"
_BOX_WIDTH, _LINE_HEIGHT, _BOX_PADDING = 236, 17, 9
_GAP_DOWN, _GAP_ACROSS, _FRAME, _BACK = 26, 22, 12, 84
_LINE_CHARACTERS = 34  # at 11 px


@dataclass(frozen=True, slots=True)
class _Block:
    """A piece of the picture, in pixels. Lines enter and leave it at `axis`, a distance from its left edge."""

    width: float
    height: float
    axis: float
    draw: Callable[[float, float], list[str]]  # (left, top) -> SVG elements
    has_box: bool = True  # at its top, so that an arrow can end there


def svg(
    workflow: Workflow, run: WorkflowRun | None = None, operators: Mapping[str, type[Operator]] | None = None
) -> str:
    """The workflow as an SVG document; with `run`, also the status, usage and output of each call.

    `operators` give the roles and colours; None takes the registry's.
    """
    picture = _Picture(load_operators(entry_points=False) if operators is None else operators, run)
    ends = [_terminal("problem"), *map(picture.block, workflow.root.steps), _terminal(_answer(run))]
    whole = _stack(ends)
    width, height = whole.width + 2 * _FRAME, whole.height + 2 * _FRAME
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif" font-size="11">',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{_LINE}"/></marker></defs>',
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *whole.draw(_FRAME, _FRAME),
            "</svg>\n",
        ]
    )


class _Picture:
    def __init__(self, operators: Mapping[str, type[Operator]], run: WorkflowRun | None):
        self.operators, self.run = operators, run

    def block(self, node: Node) -> _Block:
        match node:
            case Call():
                return self.call(node)
            case Sequence():
                return _stack([self.block(step) for step in steps_of(node)])
            case Parallel(branches):
                return _side_by_side([self.block(branch) for branch in branches], node.id, "side by side")
            case Conditional(condition, then, otherwise):
                ways = [("pass", then), ("fail", otherwise)]
                blocks = [_labelled(label, _bypass() if way is None else self.block(way)) for label, way in ways]
                return _stack([self.block(condition), _side_by_side(blocks, node.id, "")])
            case Loop(body, count):
                return _looped(self.block(body), count, node.id)

    def call(self, call: Call) -> _Block:
        said = note(call, self.operators, self.run)
        instruction = f"“{shortened(said.instruction, _LINE_CHARACTERS)}”" if said.instruction else ""
        lines = [(instruction, 'font-style="italic"', _MUTED), (said.how, "", _STATUS_TEXT.get(said.status, _LINE))]
        lines += [(shortened(said.gave, _LINE_CHARACTERS), "", "#222222")]
        lines = [line for line in lines if line[0]]
        height = (1 + len(lines)) * _LINE_HEIGHT + 2 * _BOX_PADDING - 4

        def draw(x: float, y: float) -> list[str]:
            faded = ' opacity="0.7"' if said.status == "not run" else ""
            dashed = ' stroke-dasharray="4 3"' if said.status == "not run" else ""
            baseline = y + _BOX_PADDING + 11
            parts = [
                f"<g{faded}>",
                f'<rect x="{x:g}" y="{y:g}" width="{_BOX_WIDTH}" height="{height:g}" rx="6" '
                f'fill="{ROLE_COLOURS[said.role]}" stroke="{_BORDER}"{dashed}/>',
                _text(x + 14, baseline, shortened(said.title, 26), 'font-weight="600" font-size="13"'),
                _text(x + _BOX_WIDTH - 10, baseline, call.id, f'text-anchor="end" fill="{_MUTED}"'),
            ]
            if said.status:
                colour = STATUS_COLOURS[said.status]
                parts.append(f'<rect x="{x:g}" y="{y + 5:g}" width="5" height="{height - 10:g}" fill="{colour}"/>')
            for row, (text, style, colour) in enumerate(lines, start=1):
                parts.append(_text(x + 14, baseline + row * _LINE_HEIGHT, text, f'{style} fill="{colour}"'))
            return [*parts, "</g>"]

        return _Block(_BOX_WIDTH, height, _BOX_WIDTH / 2, draw)


def _stack(blocks: list[_Block]) -> _Block:
    """Blocks under one another on one axis, with arrows between them."""
    axis = max((block.axis for block in blocks), default=0)
    width = axis + max((block.width - block.axis for block in blocks), default=0)
    height = sum(block.height for block in blocks) + _GAP_DOWN * max(0, len(blocks) - 1)

    def draw(x: float, y: float) -> list[str]:
        parts: list[str] = []
        for i, block in enumerate(blocks):
            parts += block.draw(x + axis - block.axis, y)
            y += block.height
            if i < len(blocks) - 1:
                parts.append(_line((x + axis, y), (x + axis, y + _GAP_DOWN), arrow=blocks[i + 1].has_box))
                y += _GAP_DOWN
        return parts

    return _Block(width, height, axis, draw, has_box=not blocks or blocks[0].has_box)


def _side_by_side(blocks: list[_Block], id: str, label: str) -> _Block:
    """Blocks beside one another: the line splits above them and joins again below."""
    inner = sum(block.width for block in blocks) + _GAP_ACROSS * max(0, len(blocks) - 1)
    tallest = max((block.height for block in blocks), default=0)
    width, height = inner + 2 * _FRAME, tallest + 2 * _GAP_DOWN
    axis = width / 2

    def draw(x: float, y: float) -> list[str]:
        top, bottom = y + _GAP_DOWN / 3, y + height - _GAP_DOWN / 3
        parts = [_line((x + axis, y), (x + axis, top)), _line((x + axis, bottom), (x + axis, y + height))]
        left, axes = x + _FRAME, []
        for block in blocks:
            column = left + block.axis
            axes.append(column)
            parts.append(_line((column, top), (column, y + _GAP_DOWN), arrow=block.has_box))
            parts += block.draw(left, y + _GAP_DOWN)
            parts.append(_line((column, y + _GAP_DOWN + block.height), (column, bottom)))
            left += block.width + _GAP_ACROSS
        for level in (top, bottom):
            parts.append(_line((min(axes, default=x + axis), level), (max(axes, default=x + axis), level)))
        said = " ".join(part for part in (id, label) if part)
        return [*parts, _text(x + axis + 6, y + 4, said, f'fill="{_MUTED}" font-size="10"')]

    return _Block(width, height, axis, draw, has_box=False)


def _looped(body: _Block, count: int, id: str) -> _Block:
    """The body in a frame, with an arrow from its end back to its start."""
    width, height = body.width + 2 * _FRAME + _BACK, body.height + 2 * _GAP_DOWN
    axis = _FRAME + body.axis

    def draw(x: float, y: float) -> list[str]:
        top, bottom, side = y + _GAP_DOWN / 2, y + height - _GAP_DOWN / 2, x + 2 * _FRAME + body.width
        back = f"M{x + axis:g},{bottom:g} H{side:g} V{top:g} H{x + axis + 4:g}"
        return [
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none" '
            f'stroke="{_BORDER}" stroke-dasharray="3 3"/>',
            _line((x + axis, y), (x + axis, y + _GAP_DOWN), arrow=body.has_box),
            *body.draw(x + _FRAME, y + _GAP_DOWN),
            _line((x + axis, y + _GAP_DOWN + body.height), (x + axis, y + height)),
            f'<path d="{back}" fill="none" stroke="{_LINE}" marker-end="url(#arrow)"/>',
            _text(side + 6, y + height / 2, f"at most {count}×", f'fill="{_LINE}"'),
            _text(side + 6, y + height / 2 + _LINE_HEIGHT, id, f'fill="{_MUTED}"'),
        ]

    return _Block(width, height, axis, draw)


def _labelled(label: str, block: _Block) -> _Block:
    """A branch with its label beside the line above it."""

    def draw(x: float, y: float) -> list[str]:
        line = _line((x + block.axis, y), (x + block.axis, y + _LINE_HEIGHT), arrow=block.has_box)
        text = _text(x + block.axis + 6, y + 10, label, f'fill="{_LINE}" font-weight="600"')
        return [line, text, *block.draw(x, y + _LINE_HEIGHT)]

    return _Block(block.width, block.height + _LINE_HEIGHT, block.axis, draw, has_box=False)


def _bypass() -> _Block:
    """A branch without steps."""
    return _Block(60, 0, 30, lambda x, y: [], has_box=False)


def _terminal(label: str) -> _Block:
    """A round end of the picture, at which the work starts or ends."""
    width = max(80.0, 6.4 * len(label) + 24)

    def draw(x: float, y: float) -> list[str]:
        return [
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="24" rx="12" fill="#f4f4f4" stroke="{_BORDER}"/>',
            _text(x + width / 2, y + 16, label, 'text-anchor="middle"'),
        ]

    return _Block(width, 24, width / 2, draw)


def _answer(run: WorkflowRun | None) -> str:
    if run is None:
        return "answer"
    return f"answer: {shortened(run.answer, _LINE_CHARACTERS)}" if run.answer else f"no answer ({run.status})"


def _line(start: tuple[float, float], end: tuple[float, float], arrow: bool = False) -> str:
    marker = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{_LINE}"{marker}/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>' if text else ""


# ------------------------------------------------------------------------------------------------------------- Mermaid

_CLASSES = {
    "ok": "stroke:#2e8b57,stroke-width:3px",
    "error": "stroke:#c0392b,stroke-width:3px",
    "budget": "stroke:#d68910,stroke-width:3px",
    "executor_error": "stroke:#7d3c98,stroke-width:3px",
    "not_run": "stroke:#9e9e9e,stroke-dasharray:4 3",
}
_CHART_CHARACTERS = 40

_Exit = tuple[str, str]  # a box, and the label of the line that leaves it


def mermaid(
    workflow: Workflow, run: WorkflowRun | None = None, operators: Mapping[str, type[Operator]] | None = None
) -> str:
    """The text of a flowchart; with `run`, also its results. `operators` give the roles; None takes the registry's."""
    chart = _Chart(load_operators(entry_points=False) if operators is None else operators, run)
    exits = chart.through(workflow.root, [(chart.box("([problem])"), "")])
    answer = f"answer: {shortened(run.answer, _CHART_CHARACTERS)}" if run and run.answer else "answer"
    chart.join(exits, chart.box(f'(["{_escaped(answer)}"])'))
    used = {line.rpartition(":::")[2] for line in chart.lines if ":::" in line}
    styles = [f"    classDef {name} {style}" for name, style in _CLASSES.items() if name in used]
    return "\n".join(["flowchart TD", *chart.lines, *styles]) + "\n"


class _Chart:
    def __init__(self, operators: Mapping[str, type[Operator]], run: WorkflowRun | None):
        self.operators, self.run = operators, run
        self.lines: list[str] = []
        self.boxes = 0

    def box(self, shape: str) -> str:
        """Add a box; returns its name in the chart."""
        self.boxes += 1
        self.lines.append(f"    b{self.boxes}{shape}")
        return f"b{self.boxes}"

    def join(self, exits: list[_Exit], box: str) -> None:
        self.lines += [f"    {source} -->{f'|{label}|' if label else ''} {box}" for source, label in exits]

    def through(self, node: Node, entries: list[_Exit]) -> list[_Exit]:
        """Draw a node that is reached from `entries`; returns its exits."""
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
        texts = [said.title, said.instruction, said.how, said.gave]
        title, *rest = (_escaped(shortened(text, _CHART_CHARACTERS)) for text in texts)
        label = "<br/>".join(part for part in (f"<b>{title}</b> {call.id}".strip(), role, *rest) if part)
        status = f":::{said.status.replace(' ', '_')}" if said.status else ""
        return self.box(f'["{label}"]{status}')


def _escaped(text: str) -> str:
    """The text for a quoted label: characters that Mermaid or HTML would interpret become entities."""
    return "".join(c if c.isalnum() or c in " ,()='·…" else f"#{ord(c)};" for c in text)


# ------------------------------------------------------------------------------------------------- words beside a call

_SHOWN_FIELDS = ("answer", "code", "feedback", "plan", "subproblems")  # the first of them that a call wrote is shown


@dataclass(frozen=True, slots=True)
class Note:
    """Lines of text beside a call. `status` is the worst of its runs, "not run", or "" where nothing was run."""

    title: str
    role: Role | None
    instruction: str
    status: str
    how: str
    gave: str


def note(call: Call, operators: Mapping[str, type[Operator]], run: WorkflowRun | None) -> Note:
    """Texts in a call's box, with those of its runs where there are any."""
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
    """The most informative of a call's outputs: its verdict, and the first of `_SHOWN_FIELDS`, else any other field."""
    verdict = {True: "passed", False: "failed"}.get(outputs["passed"] is True) if "passed" in outputs else None
    field = next((name for name in (*_SHOWN_FIELDS, *outputs) if name in outputs and name != "passed"), None)
    value = outputs[field] if field else ""
    text = "; ".join(value) if isinstance(value, tuple) else str(value)
    return ": ".join(part for part in (verdict, text) if part)


def shortened(text: str, most: int) -> str:
    """The text as one line of at most `most` characters, without unprintable ones, which XML does not allow."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text[: 10 * most]).split())
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _worst(runs: Iterable[NodeRun]) -> str:
    return min((run.status for run in runs), key=("executor_error", "error", "budget", "ok").index)


def _how(runs: list[NodeRun]) -> str:
    usage = sum((run.usage for run in runs), Usage())
    tokens = usage.prompt_tokens + usage.sampled_tokens
    cached = sum(run.cached for run in runs)
    parts = [
        {"budget": "over budget", "executor_error": "executor away"}.get(_worst(runs), _worst(runs)),
        f"{len(runs)} runs" if len(runs) > 1 else "",
        "cached" if cached == len(runs) else f"{cached} cached" if cached else "",
        f"{tokens} tokens" if tokens else "",
        f"cost {usage.cost:.2g}" if usage.cost else "",
    ]
    return " · ".join(part for part in parts if part)
