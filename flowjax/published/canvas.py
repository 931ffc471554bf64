"""Canvas after FlowSteer: nearly right actions mended, the next operator hinted at, and the structure score with the
reward made of it, faults included (`published_canvas` in config.reward.components).

`config.env.name`: "flowjax.published.canvas:PublishedCanvas". All else is as in the world itself. More is mended than
in FlowSteer, which can do nothing with an action in a code fence, the structure `sequence`, `parallel` for an action,
`done` for `<true>`, or an operator's name in lower case.

The score is computed from the workflow's text: operators that are mentioned count, whether they ran or not, and the
pattern for loops (`x3`) never matches the text, which says `* 3`.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowjax.canvas import actions
from flowjax.canvas.actions import (
    ACTIONS,
    MAX_POSITION,
    STRUCTURES,
    TAGS,
    Action,
    Add,
    Finish,
    Form,
    FormPart,
    GrammarError,
    Modify,
    Unreadable,
    action_of,
    check_order,
    form_of,
    unescaped,
    with_instructions,
)
from flowjax.canvas.checks import nearest
from flowjax.canvas.graph import (
    MAX_LOOP_COUNT,
    Call,
    Loop,
    Node,
    Parallel,
    Workflow,
    WorkflowError,
    children,
    walk,
    with_children,
)
from flowjax.canvas.text import parse_piece, show
from flowjax.canvas.values import Problem, WorkflowRun
from flowjax.envs import Observation
from flowjax.envs.canvas.env import CanvasEnv
from flowjax.envs.canvas.texts import CanvasView, ObservationText, worded
from flowjax.envs.canvas.world import Canvas, CanvasOptions
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
    """Options of the canvas, and two more."""

    lenient: bool = True  # mend actions that are nearly right, and count them
    hints: bool = True  # name the next operator to add after each run


@dataclass(frozen=True, slots=True)
class HintedView(CanvasView):
    """An observation of the canvas, with a hint on what to do next; "" if there is none."""

    hint: str = ""


class PublishedCanvasEnv(CanvasEnv):
    """The environment of the canvas, with mended actions and hints. State: as in the canvas."""

    _options: PublishedCanvasOptions

    def reset(self, task: Task, seed: int) -> Observation:
        self._repaired, self._hint = 0, ""
        return super().reset(task, seed)

    def _read(self, text: str) -> Action | Unreadable:
        read = super()._read(text)
        if not self._options.lenient:
            return read
        mended = _read_again(read, text, self._operators)
        if isinstance(mended, Unreadable) or mended == read:
            return read
        self._repaired += 1
        return mended

    def _take(self, action: Action, problem: Problem) -> str:
        before = self._run
        refused = super()._take(action, problem)
        if self._options.hints and self._run is not None and self._run is not before:
            self._hint = hint(self._workflow, self._run, problem, action)
        return refused

    def _observe(self) -> Observation:
        found = super()._observe()
        view = {part.name: getattr(found.view, part.name) for part in dataclasses.fields(CanvasView)}
        return dataclasses.replace(found, view=HintedView(**view, hint=self._hint))

    def _outcome(self) -> dict[str, float]:
        parts = structure_parts(operators_shown(self._workflow))
        return {**super()._outcome(), "repaired_actions": float(self._repaired), **parts}


class PublishedCanvas(Canvas):
    """The canvas in FlowSteer: mends actions, hints at the next one, and scores the workflow's text."""

    OUTCOMES = (
        *Canvas.OUTCOMES,
        *("repaired_actions", "canvas_checker", "canvas_format", "canvas_operator", "canvas_control"),
    )
    COUNTS = (*Canvas.COUNTS, "repaired_actions")
    Options = PublishedCanvasOptions
    View = HintedView
    Environment = PublishedCanvasEnv

    def worded(self, view: CanvasView) -> ObservationText:
        hints = [f"Hint: {view.hint}"] if isinstance(view, HintedView) and view.hint else []
        return worded(view, self._offer, *hints)


def operators_shown(workflow: Workflow) -> str:
    """Text of a workflow's operators and structures alone, for the published score: it would take the name of a backend
    or an id for one of these."""
    return show(_operators_alone(workflow.root))


def structure_parts(shown: str) -> Mapping[str, float]:
    """The four parts of the published score of a workflow's text (`operators_shown`), each 0 or 1."""
    mentioned = _MENTION.findall(shown)
    branching = ("[" in shown and "]" in shown) or ("?" in shown and ":" in shown)
    return {
        "canvas_checker": float(any(name in mentioned for name in ("Verify", "Test", "Review"))),
        "canvas_format": float("Format" in shown),
        "canvas_operator": float(len(mentioned) >= MENTIONS),
        "canvas_control": float(branching or re.search(r"x\s*\d+", shown) is not None),
    }


def _operators_alone(node: Node) -> Node:
    if isinstance(node, Call):
        return Call(node.operator)
    return replace(with_children(node, tuple(map(_operators_alone, children(node)))), id="")


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


_ERRORS = (
    "ERROR", "EXCEPTION", "FAILED", "TIMEOUT", "NO CODE GENERATED", "FUNCTION 'SOLVE' NOT FOUND", "PROHIBITED IMPORT",
)  # fmt: skip
_PROSE = ("Step ", "To solve", "Because", "First,", "The solution")


def hint(workflow: Workflow, run: WorkflowRun, problem: Problem, action: Action) -> str:
    """Hint of the published system on what the policy is to do next: a hand-written controller.

    A run whose answer mentions an error counts as failed. Left out are its rules for multiple choice, which is a kind
    of its own here, and for confidences, which checks do not state. An edit other than `add` and `modify` counts as one
    with an operator that does not plan, solve, check or format.
    """
    present = {call.operator for call in workflow.calls()}
    pieces = walk(action.piece) if isinstance(action, Add) else ()
    said = [node.operator for node in pieces if isinstance(node, Call)]
    last = action.operator if isinstance(action, Modify) else said[-1] if said else ""
    if run.status != "ok" or any(word in run.answer.upper() for word in _ERRORS):
        return f"add {_after_error(last, present, problem.kind in ('math', 'code'))}"
    combined = present & {"ScEnsemble", "Aggregate", "MdEnsemble"}
    following = _following(last, present, problem, run)
    if following != "finish" and not combined and any(isinstance(node, Parallel) for node in workflow.nodes()):
        following = "ScEnsemble" if problem.kind == "math" else "Aggregate"
    return following if following == "finish" else f"add {following}"


def _after_error(last: str, present: set[str], computed: bool) -> str:
    """The operators to add after a run that failed."""
    if "Programmer" in present or computed:
        both = {"Test", "Programmer"} <= present
        return "Test ? done : Programmer" if last in ("Test", "Programmer") and both else "Programmer"
    return "Revise" if present & {"AnswerGenerate", "Custom"} else "Custom"


def _following(last: str, present: set[str], problem: Problem, run: WorkflowRun) -> str:
    """The operator to add after a run without errors: a solver, a check, then the answer's form; or "finish"."""
    kind = problem.kind
    if last in ("Plan", "Decompose"):
        return "Programmer" if kind in ("math", "code") else "Custom"
    if not present & {"Programmer", "AnswerGenerate", "Custom"}:
        return "Programmer" if kind == "math" else "Custom"
    concise = len(run.answer) <= 50 and "\n" not in run.answer and not any(cue in run.answer for cue in _PROSE)
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
            if kind == "code" and problem.public_tests and "Test" not in present:
                return "Test"
            if not present & {"Verify", "Test"}:
                return {"math": "Verify", "code": "Test"}.get(kind, "Review")
    return "finish" if concise else "Format"


# ------------------------------------------------------------------------------------------------------ lenient reading

_FENCE = re.compile(r"```[A-Za-z]{0,20}")
_TAG = re.compile(rf"<\s{{0,3}}(/?)\s{{0,3}}({'|'.join(TAGS)})\s{{0,3}}/?>", re.IGNORECASE)
_SQUARE_TAG = re.compile(rf"\[\s{{0,3}}(/?)\s{{0,3}}({'|'.join(TAGS)})\s{{0,3}}\]", re.IGNORECASE)
_FINISHING = re.compile(
    r"\b(?:let's finish|let us finish|i will finish|i'll finish|finish the workflow|finish workflow|now finish"
    r"|workflow is complete|workflow complete|time to finish|ready to finish)\b"
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_ID = re.compile(r"\b(n[0-9]{1,9})(\.(?:condition|true|false))?\b")
_NUMBER = re.compile(r"(?:(?<!\w)-)?[0-9]{1,9}")
_QUOTES = "`'\"*. \t\r\n"
_MAX_CORRECTED_NAMES = 200  # in one reply: comparing names is slow, and no sensible reply has as many


def parse_leniently(text: str, operators: Collection[str]) -> Action | Unreadable:
    """The action of a response as `flowjax.canvas.actions.parse` reads it, or else the action that is probably meant.

    Names are corrected to the nearest of `operators`; the action's `repairs` list what had to be mended.
    """
    action = actions.parse(text)
    if not (isinstance(action, Unreadable) or _needs_repair(action, operators)):
        return action
    try:
        return _Repair(text, operators).action()
    except GrammarError as error:
        return Unreadable(str(error))


def _read_again(read: Action | Unreadable, text: str, operators: Collection[str]) -> Action | Unreadable:
    """The action of a text that was read as `read`: its likeliest meaning, with names and counts corrected.

    What could be read is corrected itself, since `text` may be its form on one line, which only `read` knows.
    """
    if isinstance(read, Unreadable):
        return parse_leniently(text, operators)
    if not _needs_repair(read, operators):
        return read
    repair = _Repair(text, operators)
    try:
        if isinstance(read, Add):
            return replace(read, piece=repair.corrected_piece(read.piece))
        return replace(read, operator=repair.name(read.operator)) if isinstance(read, Modify) else read
    except GrammarError as error:
        return Unreadable(str(error))


def _needs_repair(action: Action, operators: Collection[str]) -> bool:
    """True if an action that keeps to the grammar names operators that do not exist, or a count out of bounds."""
    pieces = walk(action.piece) if isinstance(action, Add) else ()
    if isinstance(action, Modify) and action.operator:
        pieces = (Call(action.operator),)
    return any(
        (isinstance(node, Call) and node.operator not in operators)
        or (isinstance(node, Loop) and not 1 <= node.count <= MAX_LOOP_COUNT)
        for node in pieces
    )


class _Repair:
    """The likeliest meaning of a response that breaks the grammar, and the repairs that it took.

    unclosed_thinking  `<think>` without an end           several_actions  only the first was taken
    code_fence         ``` around the action              extra_text       text between or after the tags
    tag_form           [action], <ACTION>, < action >     repeated_tag     only the first of a tag was taken
    unclosed_tag       a closing tag is missing           needless_tag     a tag that does not belong to the action
    order              tags in another order              names            Custom for custom, add for ADD
    separators         other separators than commas       count            put between 1 and 10
    position           0 at least, without other text     target           another text around the id
    prompts            too many, too few or empty         structure        `sequence`, which is a workflow
    bare_operator      only an operator's name            bare_workflow    only a text form
    finish_phrase      "ready to finish" and the like     stray_sign         < or </ inside a value
    """

    def __init__(self, text: str, operators: Collection[str]):
        self.text, self.operators = text, operators
        self.repairs: dict[str, None] = {}  # an ordered set
        self.corrected = 0

    def action(self) -> Action:
        text = self.plain_text()
        tags = list(_TAG.finditer(text))
        first = next((i for i, tag in enumerate(tags) if tag[2] == "action" and not tag[1]), None)
        if first:
            self.note("extra_text")
        action = self.bare(text) if first is None else self.from_elements(self.elements(text, tags[first:]))
        return replace(action, repairs=tuple(self.repairs))

    def note(self, repair: str) -> None:
        self.repairs[repair] = None

    def plain_text(self) -> str:
        """The response without thinking and fences, with tags as they should look."""
        before, closing, text = self.text.partition("</think>")
        if not closing:
            text = before.replace("<think>", " ", 1)
            if "<think>" in before:
                self.note("unclosed_thinking")
        without_fences = _FENCE.sub(" ", text)
        if without_fences != text:
            self.note("code_fence")
        tidy = _TAG.sub(_tidy_tag, without_fences)
        if "<action>" not in tidy:
            tidy = _SQUARE_TAG.sub(_tidy_tag, tidy)
        if tidy != without_fences:
            self.note("tag_form")
        return tidy

    def elements(self, text: str, tags: list[re.Match[str]]) -> list[tuple[str, str]]:
        """Tags and values of the first action."""
        elements: list[tuple[str, str]] = []
        at = 0
        while at < len(tags):
            opening, closing = tags[at], tags[at + 1] if at + 1 < len(tags) else None
            if opening[1]:
                self.note("extra_text")  # a closing tag that nothing opened
                at += 1
                continue
            tag = opening[2]
            if tag == "action" and elements:
                self.note("several_actions")
                break
            closed = closing is not None and closing[1] == "/" and closing[2] == tag
            if not closed:
                self.note("unclosed_tag")
            value = text[opening.end() : closing.start() if closing else len(text)]
            if "</" in value or value.endswith("<"):
                self.note("stray_sign")
            elements.append((tag, unescaped(value)))
            at += 2 if closed else 1
            after = tags[at].start() if at < len(tags) else len(text)
            if closed and closing and text[closing.end() : after].strip():
                self.note("extra_text")
        return elements

    def from_elements(self, elements: list[tuple[str, str]]) -> Action:
        values = dict(reversed(elements))  # reversed, so that the first of a repeated tag stays
        said = [value for tag, value in elements if tag == "prompt"]  # one for each operator
        if len(elements) - len(said) > len(values) - ("prompt" in values):
            self.note("repeated_tag")
        self.correct_action(values)
        form = form_of(list(values.items()))
        wanted = [part.tag for part in form.parts]
        given = [tag for tag, _ in elements if tag in wanted and tag in values]
        if len(values) > len([tag for tag in values if tag in wanted]) + 1:
            self.note("needless_tag")
        if sorted(given, key=wanted.index) != given or elements[0][0] != "action":
            self.note("order")
        values = {tag: value for tag, value in values.items() if tag == "action" or tag in wanted}
        prompts = [value for value in said if value] if "prompt" in wanted else []
        if prompts != said:
            self.note("prompts")
        check_order(form, [tag for tag in wanted if tag in values and (tag != "prompt" or prompts)])
        values.pop("prompt", None)
        for tag in tuple(values):
            self.correct_value(tag, values, required=FormPart(tag) in form.parts)
        return self.with_prompts(form, values, prompts)

    def with_prompts(self, form: Form, values: dict[str, str], prompts: list[str]) -> Action:
        if form.action == "set_prompt":
            return action_of(form, [*values.items(), ("prompt", prompts[0] if prompts else "")])
        action = action_of(form, list(values.items()))
        if isinstance(action, Modify) and prompts:
            return replace(action, prompt=prompts[0])
        if not isinstance(action, Add):
            return action
        piece = self.corrected_piece(action.piece)
        calls = sum(isinstance(node, Call) for node in walk(piece))
        if prompts and len(prompts) != calls:
            self.note("prompts")
        return replace(action, piece=with_instructions(piece, prompts))

    def correct_action(self, values: dict[str, str]) -> None:
        said = values["action"].strip(_QUOTES)
        action = self.nearest(said.replace(" ", "_").replace("-", "_"), (*ACTIONS, *STRUCTURES))
        if action in STRUCTURES:
            self.note("structure")
            values["action"] = "add"
            values.setdefault("structure", action)
        elif action:
            values["action"] = action
        if values["action"] != "add" or "structure" not in values:
            return
        structure = values["structure"].strip(_QUOTES)
        if structure.casefold() == "sequence" and "operators" in values:
            self.note("structure")
            del values["structure"]
            values["workflow"] = " -> ".join(_WORD.findall(values.pop("operators")))
        else:
            values["structure"] = self.nearest(structure, STRUCTURES) or structure

    def correct_value(self, tag: str, values: dict[str, str], required: bool) -> None:
        value = values[tag]
        match tag:
            case "operator" | "condition" | "true" | "false":
                folded = value.strip(_QUOTES).casefold()
                values[tag] = (
                    "done" if tag in ("true", "false") and folded in ("done", "none", "") else self.name(value)
                )
                if values[tag] != value:
                    self.note("names")
            case "operators":
                names = _WORD.findall(value)
                if [name.strip() for name in value.split(",")] != names:
                    self.note("separators")
                values[tag] = ", ".join(map(self.name, names))
            case "count" | "position":
                most = MAX_LOOP_COUNT if tag == "count" else MAX_POSITION
                least = 1 if tag == "count" else 0
                found = _NUMBER.search(value)
                number = str(min(max(int(found[0]), least), most)) if found else ""
                if number != value:
                    self.note(tag)
                if number:
                    values[tag] = number
                elif not required:
                    del values[tag]
            case "target" | "into":
                found = _PLAIN_ID.search(value)
                if found and (id := found[0] if tag == "into" else found[1]) != value:
                    self.note("target")
                    values[tag] = id
            case "workflow":
                values[tag] = value.replace("→", "->")
                if values[tag] != value:
                    self.note("separators")

    def corrected_piece(self, node: Node) -> Node:
        if isinstance(node, Call):
            return replace(node, operator=self.name(node.operator))
        if isinstance(node, Loop) and not 1 <= node.count <= MAX_LOOP_COUNT:
            self.note("count")
            node = replace(node, count=min(max(node.count, 1), MAX_LOOP_COUNT))
        return with_children(node, tuple(map(self.corrected_piece, children(node))))

    def bare(self, text: str) -> Action:
        """The action of a reply without an action tag: one operator's name, a workflow's text, or a wish to finish."""
        folded = text.casefold()
        if folded.strip(_QUOTES) == "finish" or _FINISHING.search(folded.replace("’", "'")):
            self.note("finish_phrase")
            return Finish()
        known = {name.casefold(): name for name in self.operators}
        if piece := self.bare_workflow(text, known):
            return Add(piece)
        mentioned = {known[word] for word in map(str.casefold, _WORD.findall(text)) if word in known}
        if len(mentioned) == 1:
            self.note("bare_operator")
            return Add(Call(mentioned.pop()))
        what = f"several operators are named ({', '.join(sorted(mentioned))})" if mentioned else "no operator is named"
        raise GrammarError(f"There is no action, and {what}: write `<action>add</action><operator>Custom</operator>`.")

    def bare_workflow(self, text: str, known: dict[str, str]) -> Node | None:
        try:
            piece = parse_piece(text)
        except WorkflowError:
            return None
        if not all(call.operator.casefold() in known for call in walk(piece) if isinstance(call, Call)):
            return None
        self.note("bare_operator" if isinstance(piece, Call) else "bare_workflow")
        return self.corrected_piece(piece)

    def name(self, said: str) -> str:
        name = said.strip(_QUOTES)
        if name not in self.operators:
            name = self.nearest(name, self.operators) or name
        if name != said:
            self.note("names")
        return name

    def nearest(self, said: str, valid: Collection[str]) -> str | None:
        if said in valid:
            return said
        self.corrected += 1
        near = nearest(said, valid) if self.corrected <= _MAX_CORRECTED_NAMES else None
        if near:
            self.note("names")
        return near


def _tidy_tag(match: re.Match[str]) -> str:
    return f"<{match[1]}{match[2].lower()}>"
