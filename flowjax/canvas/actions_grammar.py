"""The actions' grammar: tags in a fixed order, each with its own kind of value. Parser and schema are made from it.

<action>add</action><operator>Custom</operator><prompt>Solve it by hand.</prompt>
<action>add</action><structure>parallel</structure><operators>Custom, Programmer</operators>
<action>add</action><structure>conditional</structure><condition>Test</condition><true>done</true><false>Revise</false>
<action>add</action><structure>loop</structure><operators>Review, Revise</operators><count>2</count>
<action>add</action><workflow>[Custom, Custom] -> ScEnsemble</workflow><into>n4.false</into><position>0</position>
<action>delete</action><target>n3</target>
<action>modify</action><target>n2</target><operator>Programmer</operator>
<action>set_prompt</action><target>n2</target><prompt>Name the units.</prompt>
<action>finish</action>
"""

import re
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Literal

from flowjax.canvas.actions_kinds import (
    DEFAULT_LOOP_COUNT,
    Action,
    Add,
    Delete,
    Finish,
    Modify,
    SetPrompt,
)
from flowjax.canvas.edits import PARTS
from flowjax.canvas.graph import (
    MAX_LOOP_COUNT,
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    WorkflowError,
    children,
    in_sequence,
    walk,
    with_children,
)
from flowjax.canvas.text import parse_piece
from flowjax.canvas.text_tokens import BACKEND_NAME, NAME

Often = Literal["one", "optional", "many"]


@dataclass(frozen=True, slots=True)
class Part:
    """A tag of a form, and how often it stands there."""

    tag: str
    often: Often = "one"


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write an action. The form is meant where its `key` is among the tags, with the value if it has one."""

    action: str
    key: str
    value: str
    parts: tuple[Part, ...]


_PLACE = (Part("into", "optional"), Part("position", "optional"))
_STRUCTURED = (*_PLACE, Part("prompt", "many"))
FORMS = (
    Form("add", "structure", "parallel", (Part("structure"), Part("operators"), *_STRUCTURED)),
    Form(
        "add",
        "structure",
        "conditional",
        (Part("structure"), Part("condition"), Part("true"), Part("false", "optional"), *_STRUCTURED),
    ),
    Form("add", "structure", "loop", (Part("structure"), Part("operators"), Part("count", "optional"), *_STRUCTURED)),
    Form("add", "workflow", "", (Part("workflow"), *_PLACE)),
    Form("add", "operator", "", (Part("operator"), Part("backend", "optional"), *_PLACE, Part("prompt", "optional"))),
    Form("delete", "target", "", (Part("target"),)),
    Form(
        "modify",
        "operator",
        "",
        (Part("target"), Part("operator"), Part("backend", "optional"), Part("prompt", "optional")),
    ),
    Form("modify", "backend", "", (Part("target"), Part("backend"))),
    Form("modify", "count", "", (Part("target"), Part("count"))),
    Form("set_prompt", "prompt", "", (Part("target"), Part("prompt"))),
    Form("finish", "action", "", (Part("answer", "optional"),)),
)
ACTIONS = tuple(dict.fromkeys(form.action for form in FORMS))
STRUCTURES = tuple(form.value for form in FORMS if form.key == "structure")
TAGS = ("action", *dict.fromkeys(part.tag for form in FORMS for part in form.parts))
MAX_POSITION = 999

_SEPARATED = re.compile(r"\s*,\s*")
PLACE_NAME = re.compile(rf"{NAME.pattern}(?:\.(?:{'|'.join(PARTS)}))?")
_NUMBER = re.compile(r"[0-9]{1,3}")

Elements = Listed[tuple[str, str]]  # tag and value, as they stand


class GrammarError(ValueError):
    """Tags or values that are no action; the message says what would be right."""


def form_of(elements: Elements) -> Form:
    """Which way of writing an action the tags mean.

    Raises:
        GrammarError: none.
    """
    values = dict(reversed(elements))
    action = values["action"]
    if action not in ACTIONS:
        raise GrammarError(f"There is no action `{action[:60]}`: use {_listed(ACTIONS)}.")
    forms = [form for form in FORMS if form.action == action]
    for form in forms:
        if form.key in values and form.value in ("", values[form.key]):
            return form
    if "structure" in values and action == "add":
        raise GrammarError(
            f"There is no structure `{values['structure'][:60]}`: use {_listed(STRUCTURES)}; steps one after the other "
            "are `<workflow>A -> B</workflow>`."
        )
    if len(forms) == 1:
        return forms[0]
    keys = tuple(dict.fromkeys(f"`<{form.key}>`" for form in forms))
    raise GrammarError(f"`{action}` needs {_listed(keys)}.")


def check_order(form: Form, tags: Listed[str]) -> None:
    """That the tags after `<action>` are the form's, in order.

    Raises:
        GrammarError: they are not.
    """
    at = 0
    for part in form.parts:
        if at < len(tags) and tags[at] == part.tag:
            at += 1
            while part.often == "many" and at < len(tags) and tags[at] == part.tag:
                at += 1
        elif part.often == "one":
            raise GrammarError(f"`<{part.tag}>` is missing{_instead(tags, at)}: write {_written(form)}.")
    if at < len(tags):
        raise GrammarError(f"`<{tags[at]}>` is one too many or in the wrong place: write {_written(form)}.")


def action_of(form: Form, elements: Elements) -> Action:
    """The action that the values of a form make.

    Raises:
        GrammarError: a value is not of its tag's kind.
    """
    values = dict(reversed(elements))
    prompts = [value for tag, value in elements if tag == "prompt"]
    for tag, value in elements:
        _check_value(tag, value)
    match form.action:
        case "add":
            position = int(values["position"]) if "position" in values else None
            return Add(_piece(form, values, prompts), values.get("into", ""), position)
        case "delete":
            return Delete(values["target"])
        case "modify":
            count = int(values["count"]) if "count" in values else None
            prompt = values.get("prompt", "")
            return Modify(values["target"], values.get("operator", ""), values.get("backend", ""), count, prompt)
        case "set_prompt":
            return SetPrompt(values["target"], values["prompt"])
    return Finish(values.get("answer", ""))


def operator_names(value: str) -> list[str]:
    """The names in a list of operators."""
    return _SEPARATED.split(value)


def with_instructions(piece: Node, prompts: Listed[str]) -> Node:
    """The piece with instructions for its calls, in reading order; those beyond the last prompt keep their own."""
    rest = iter(prompts)

    def through(node: Node) -> Node:
        if isinstance(node, Call):
            return Call(node.operator, next(rest, node.instruction), node.backend, node.inputs, node.id)
        return with_children(node, tuple(map(through, children(node))))

    return through(piece)


def _piece(form: Form, values: dict[str, str], prompts: Listed[str]) -> Node:
    if form.key == "workflow":
        try:
            return parse_piece(values["workflow"])
        except WorkflowError as error:
            raise GrammarError(f"In `<workflow>`: {error}") from error
    if form.key == "operator":
        piece: Node = Call(values["operator"], backend=values.get("backend", ""))
    elif form.value == "conditional":
        then, otherwise = (values.get(tag, "done") for tag in ("true", "false"))
        piece = Conditional(Call(values["condition"]), _branch(then), _branch(otherwise))
    else:
        calls = [Call(name) for name in operator_names(values["operators"])]
        if form.value == "parallel":
            piece = Parallel(tuple(calls))
        else:
            body = in_sequence(calls)
            assert body is not None
            piece = Loop(body, int(values.get("count", DEFAULT_LOOP_COUNT)))
    calls = [node for node in walk(piece) if isinstance(node, Call)]
    if prompts and len(prompts) != len(calls):
        names = ", ".join(call.operator for call in calls)
        raise GrammarError(
            f"{len(prompts)} `<prompt>` for {len(calls)} operators ({names}): write one for each, or none."
        )
    return with_instructions(piece, prompts)


def _branch(name: str) -> Call | None:
    return None if name == "done" else Call(name)


def _check_value(tag: str, value: str) -> None:
    wanted = ""
    match tag:
        case "operator" | "target" | "condition" | "true" | "false":
            if not NAME.fullmatch(value):
                wanted = "a node's id, such as n3" if tag == "target" else "one operator's name"
                wanted += "; more than that is written as `<workflow>`" if tag in ("condition", "true", "false") else ""
        case "operators":
            if not all(NAME.fullmatch(name) for name in operator_names(value)):
                wanted = "operators' names with commas between them, such as Custom, Programmer"
        case "backend":
            wanted = "" if BACKEND_NAME.fullmatch(value) else "a backend's name"
        case "into":
            wanted = "" if PLACE_NAME.fullmatch(value) else "a node's id, such as n3, or n3.true of a conditional"
        case "count":
            if not (_NUMBER.fullmatch(value) and 1 <= int(value) <= MAX_LOOP_COUNT):
                wanted = f"a number from 1 to {MAX_LOOP_COUNT}"
        case "position":
            wanted = "" if _NUMBER.fullmatch(value) else f"a number from 0 to {MAX_POSITION}"
        case "prompt":
            wanted = "" if value else "an instruction in words"
    if wanted:
        raise GrammarError(f"`<{tag}>` takes {wanted}, not `{value[:60]}`.")


def _written(form: Form) -> str:
    """The form with its tags, for a message."""
    required, optional = ([part.tag for part in form.parts if (part.often == "one") == one] for one in (True, False))
    values = {form.key: form.value} if form.value else {}
    tags = "".join(f"<{tag}>{values.get(tag, '...')}</{tag}>" for tag in required)
    then = f", then if wanted {', '.join(f'`<{tag}>`' for tag in optional)}" if optional else ""
    return f"`<action>{form.action}</action>{tags}`{then}"


def _instead(tags: Listed[str], at: int) -> str:
    return f" where `<{tags[at]}>` stands" if at < len(tags) else ""


def _listed(names: Listed[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
