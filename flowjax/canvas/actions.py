"""Actions of a policy on the canvas: their types, the two ways to write them, and what each does to a workflow.

A response may start with thinking (`<think>...</think>`) and plain text; then comes exactly one action, and nothing
after it. Any other response gives an `Unreadable`, with a reason that the policy reads; `flowjax.published.canvas`
accepts more.
Actions are written with tags. The table `FORMS` defines them, and the reader, the writer and the grammar for sampling
are derived from it:

<action>add</action><operator>Custom</operator><prompt>Solve it by hand.</prompt>
<action>add</action><structure>parallel</structure><operators>Custom, Programmer</operators>
<action>add</action><structure>conditional</structure><condition>Test</condition><true>done</true><false>Revise</false>
<action>add</action><structure>loop</structure><operators>Review, Revise</operators><count>2</count>
<action>add</action><workflow>[Custom, Custom] -> ScEnsemble</workflow><into>n4.false</into><position>0</position>
<action>delete</action><target>n3</target>
<action>modify</action><target>n2</target><operator>Programmer</operator>
<action>set_prompt</action><target>n2</target><prompt>Name the units.</prompt>
<action>finish</action>

or on one line, for models that know few words; spaces are free in what `add` takes:

    add Custom        add [ Custom , Custom ]        add Verify ? done : Revise        add ( Review -> Revise ) * 2
    add Custom at 0   add Custom into n4.true        add Custom into n4.true at 0
    delete n3         modify n2 Programmer           modify n2 @small                  modify n5 * 3
    prompt n2 Name the units.                        finish                            finish 42
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from flowjax.canvas.checks import nearest, problems, unknown_name
from flowjax.canvas.edits import PARTS, EditError, add, delete, modify, set_instruction
from flowjax.canvas.graph import (
    MAX_LOOP_COUNT,
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    Sequence,
    Workflow,
    WorkflowError,
    children,
    in_sequence,
    walk,
    with_children,
)
from flowjax.canvas.operators import Operator
from flowjax.canvas.text import BACKEND_NAME, NAME, parse_piece, tokens
from flowjax.canvas.text import show as text_of
from flowjax.canvas.values import in_thinking

DEFAULT_LOOP_COUNT = 3  # of an added loop that names none
MAX_POSITION = 999
_MOST_FAULTS = 3
_EXAMPLE = "`<action>add</action><operator>Custom</operator>`"

# ---------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Add:
    """Put a piece into the workflow (`flowjax.canvas.edits.add`).

    `into` is a node's id or a conditional's part (`n4.true`), "" the top; `position` counts from 0, None is the end.
    """

    piece: Node
    into: str = ""
    position: int | None = None
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a node, at any depth."""

    target: str
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Modify:
    """Change a call's operator and backend, or a loop's count; "" and None keep it. `prompt` is the new operator's."""

    target: str
    operator: str = ""
    backend: str = ""
    count: int | None = None
    prompt: str = ""
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class SetPrompt:
    """Set a call's instruction."""

    target: str
    prompt: str
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """End the episode. `answer` is the policy's own belief; the answer of the workflow's run is what counts."""

    answer: str = ""
    repairs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A response that is no action. `reason` says what is wrong and what would be right."""

    reason: str


Action = Add | Delete | Modify | SetPrompt | Finish


# ------------------------------------------------------------------------------------------------- the table of forms

Often = Literal["one", "optional", "many"]
Elements = Listed[tuple[str, str]]  # tags and values, in the order of the text
PLACE_NAME = re.compile(rf"{NAME.pattern}(?:\.(?:{'|'.join(PARTS)}))?")
_NUMBER = re.compile(r"[0-9]{1,3}")
_SEPARATED = re.compile(r"\s*,\s*")


class GrammarError(ValueError):
    """Tags or values that are no action; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Content of a tag: its rule in the sampling grammar, a check of it, and the words of a message about it."""

    rule: str
    fits: Callable[[str], object] = bool
    wanted: str = ""


@dataclass(frozen=True, slots=True)
class FormPart:
    """A tag of a form, and how often it may occur there."""

    tag: str
    often: Often = "one"


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write an action. It is meant where `key` is among the tags, and has `value` if the form has one."""

    action: str
    key: str
    value: str
    parts: tuple[FormPart, ...]


def operator_names(value: str) -> list[str]:
    """The names in a list of operators."""
    return _SEPARATED.split(value)


def _is_count(value: str) -> bool:
    return bool(_NUMBER.fullmatch(value)) and 1 <= int(value) <= MAX_LOOP_COUNT


_ONE_OPERATOR = "one operator's name"
_BRANCH = Tag("operator", NAME.fullmatch, f"{_ONE_OPERATOR}; more than that is written as `<workflow>`")
TAGS: Mapping[str, Tag] = {
    "action": Tag(""),
    "structure": Tag(""),
    "operators": Tag(
        "operator",
        lambda value: all(NAME.fullmatch(name) for name in operator_names(value)),
        "operators' names with commas between them, such as Custom, Programmer",
    ),
    "into": Tag("place", PLACE_NAME.fullmatch, "a node's id, such as n3, or n3.true of a conditional"),
    "position": Tag("number", _NUMBER.fullmatch, f"a number from 0 to {MAX_POSITION}"),
    "prompt": Tag("text", bool, "an instruction in words"),
    "condition": _BRANCH,
    "true": _BRANCH,
    "false": _BRANCH,
    "count": Tag("count", _is_count, f"a number from 1 to {MAX_LOOP_COUNT}"),
    "workflow": Tag("sequence"),
    "operator": Tag("operator", NAME.fullmatch, _ONE_OPERATOR),
    "backend": Tag("backend", BACKEND_NAME.fullmatch, "a backend's name"),
    "target": Tag("id", NAME.fullmatch, "a node's id, such as n3"),
    "answer": Tag("text?"),
}
_PLACE = (FormPart("into", "optional"), FormPart("position", "optional"))
_STRUCTURED = (*_PLACE, FormPart("prompt", "many"))  # one prompt for each operator, or none
_BACKEND, _PROMPT = FormPart("backend", "optional"), FormPart("prompt", "optional")
_BRANCHES = (FormPart("condition"), FormPart("true"), FormPart("false", "optional"))
FORMS = (
    Form("add", "structure", "parallel", (FormPart("structure"), FormPart("operators"), *_STRUCTURED)),
    Form("add", "structure", "conditional", (FormPart("structure"), *_BRANCHES, *_STRUCTURED)),
    Form(
        "add",
        "structure",
        "loop",
        (FormPart("structure"), FormPart("operators"), FormPart("count", "optional"), *_STRUCTURED),
    ),
    Form("add", "workflow", "", (FormPart("workflow"), *_PLACE)),
    Form("add", "operator", "", (FormPart("operator"), _BACKEND, *_PLACE, _PROMPT)),
    Form("delete", "target", "", (FormPart("target"),)),
    Form("modify", "operator", "", (FormPart("target"), FormPart("operator"), _BACKEND, _PROMPT)),
    Form("modify", "backend", "", (FormPart("target"), FormPart("backend"))),
    Form("modify", "count", "", (FormPart("target"), FormPart("count"))),
    Form("set_prompt", "prompt", "", (FormPart("target"), FormPart("prompt"))),
    Form("finish", "action", "", (FormPart("answer", "optional"),)),
)
ACTIONS = tuple(dict.fromkeys(form.action for form in FORMS))
STRUCTURES = tuple(form.value for form in FORMS if form.key == "structure")

# ---------------------------------------------------------------------------------------------------------- reading

_OPENING = re.compile(r"<([A-Za-z_]{1,30})>")
_ANY_TAG = re.compile(rf"</?(?:{'|'.join(TAGS)})>")
_SPACE = re.compile(r"\s*")


def parse(text: str) -> Action | Unreadable:
    """The action of a response, read strictly by `FORMS`, in time linear in the response's length.

    `apply` checks that names and ids exist.
    """
    try:
        elements = _elements(after_thinking(text))
        form = form_of(elements)
        check_order(form, [tag for tag, _ in elements[1:]])
        return action_of(form, elements)
    except GrammarError as error:
        return Unreadable(str(error))


def after_thinking(text: str) -> str:
    """Text after the last thinking, if there is any.

    Raises:
        GrammarError: the thinking has no end, or nothing comes after it.
    """
    if in_thinking(text):
        raise GrammarError("The thinking has no end: close it with `</think>`, and then write one action.")
    _, closing, after = text.rpartition("</think>")
    if closing and not after.strip():
        raise GrammarError("Nothing comes after the thinking: write one action after `</think>`.")
    return after


def unescaped(value: str) -> str:
    """Value between tags with its entities resolved, without the space around it."""
    value = value.strip()
    # `&amp;` last: `&amp;lt;` is the text `&lt;`, and not `<`.
    for name, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        value = value.replace(name, character)
    return value


def _elements(text: str) -> Elements:
    start = text.find("<action>")
    if start < 0:
        raise GrammarError(_no_action(text))
    if stray := _ANY_TAG.search(text, 0, start):
        raise GrammarError(f"`{stray[0]}` stands before `<action>`: start with `<action>`, as in {_EXAMPLE}.")
    elements: list[tuple[str, str]] = []
    at = start
    while (at := _after_space(text, at)) < len(text):
        opening = _OPENING.match(text, at)
        if opening is None:
            last = f"</{elements[-1][0]}>"
            raise GrammarError(f"Nothing may come after the action: end with `{last}`, without `{text[at : at + 30]}`.")
        tag = opening[1]
        if tag not in TAGS:
            near = nearest(tag, TAGS)
            raise GrammarError(f"There is no tag `<{tag}>`{f': did you mean `<{near}>`?' if near else '.'}")
        if tag == "action" and elements:
            raise GrammarError("There are several actions: write exactly one per turn, and wait for what it brings.")
        end, closing = text.find("</", opening.end()), f"</{tag}>"
        if end < 0 or not text.startswith(closing, end):
            found = f" before `{text[end : end + 30]}`" if end >= 0 else ""
            raise GrammarError(f"`<{tag}>` is not closed: write `{closing}`{found}.")
        value = text[opening.end() : end]
        if value.endswith("<"):
            raise GrammarError(f"`<{tag}>` ends with `<`: write it as `&lt;`.")
        elements.append((tag, unescaped(value)))
        at = end + len(closing)
    return elements


def _no_action(text: str) -> str:
    if not text.strip():
        return f"The response is empty: write one action, such as {_EXAMPLE}."
    if "[action]" in text.lower():
        return f"Tags have angle brackets, not square ones: write {_EXAMPLE}."
    if "<action" in text.lower():
        return f"The tag is `<action>`, in lower case and with nothing else inside it: write {_EXAMPLE}."
    return f"There is no action: write exactly one, such as {_EXAMPLE}, or `<action>finish</action>`."


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def form_of(elements: Elements) -> Form:
    """The form that the tags are written in.

    Raises:
        GrammarError: there is no such form.
    """
    values = dict(reversed(elements))  # keeps the first value of a repeated tag; `check_order` refuses the second
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
    """The action that is written in a form.

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


def with_instructions(piece: Node, prompts: Listed[str]) -> Node:
    """The piece with `prompts` as its calls' instructions, in reading order; further calls keep theirs."""
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
    wanted = TAGS[tag].wanted
    if wanted and not TAGS[tag].fits(value):
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


# ---------------------------------------------------------------------------------------------------------- writing


def show(action: Action) -> str:
    """The action's text with tags; `parse` reads it back, save for white space around prompts and answers."""
    form, values = _form_and_values(action)
    written = [("action", form.action)]
    for part in form.parts:
        written += [(part.tag, value) for value in values.get(part.tag, ())]
    return "".join(f"<{tag}>{_escaped(value)}</{tag}>" for tag, value in written)


def _form_and_values(action: Action) -> tuple[Form, Mapping[str, Listed[str]]]:
    """A form in which the action can be written, and the values of its tags."""
    match action:
        case Add(piece, into, position):
            form, values = _piece_form(piece)
            place = {"into": into, "position": "" if position is None else str(position)}
            return form, {**values, **_given(place)}
        case Delete(target):
            return _form("delete", "target"), {"target": [target]}
        case Modify(target, operator, backend, count, prompt):
            key = "operator" if operator else "backend" if backend else "count"
            number = "" if count is None else str(count)
            said = {"target": target, "operator": operator, "backend": backend, "count": number, "prompt": prompt}
            return _form("modify", key), _given(said)
        case SetPrompt(target, prompt):
            return _form("set_prompt", "prompt"), {"target": [target], "prompt": [prompt]}
        case Finish(answer):
            return _form("finish", "action"), _given({"answer": answer})


def _piece_form(piece: Node) -> tuple[Form, dict[str, list[str]]]:
    """The form with `<operator>` or `<structure>` where that holds all of the piece, else the one with `<workflow>`."""
    inner = children(piece.body) or (piece.body,) if isinstance(piece, Loop) else children(piece)
    calls = [node for node in inner if isinstance(node, Call)]
    instructions = [call.instruction.strip() for call in calls]
    plain = len(calls) == len(inner) and not any(call.inputs or call.backend for call in calls)
    # Prompts are for all of a structure's operators or for none.
    plain = plain and (all(instructions) or not any(instructions))
    prompts = instructions if any(instructions) else []
    names = ", ".join(call.operator for call in calls)
    match piece:
        case Call(operator, instruction, backend, ()) if not backend or BACKEND_NAME.fullmatch(backend):
            prompt = instruction if instruction.strip() else ""
            return _form("add", "operator"), _given({"operator": operator, "backend": backend, "prompt": prompt})
        case Parallel() if plain and len(calls) > 1:
            return _form("add", "structure", "parallel"), {
                "structure": ["parallel"],
                "operators": [names],
                "prompt": prompts,
            }
        case Conditional() if plain:
            parts = (("condition", piece.condition), ("true", piece.then), ("false", piece.otherwise))
            named = {tag: [part.operator if isinstance(part, Call) else "done"] for tag, part in parts}
            return _form("add", "structure", "conditional"), {"structure": ["conditional"], **named, "prompt": prompts}
        case Loop(Call() | Sequence(), count) if plain:
            how_often = {"operators": [names], "count": [str(count)]}
            return _form("add", "structure", "loop"), {"structure": ["loop"], **how_often, "prompt": prompts}
    return _form("add", "workflow"), {"workflow": [text_of(piece)]}


def _form(action: str, key: str, value: str = "") -> Form:
    return next(form for form in FORMS if (form.action, form.key, form.value) == (action, key, value))


def _given(values: Mapping[str, str]) -> dict[str, list[str]]:
    return {tag: [value] for tag, value in values.items() if value}


def _escaped(value: str) -> str:
    """A value that may stand between tags."""
    return value.replace("&", "&amp;").replace("<", "&lt;")


# -------------------------------------------------------------------------------------------- the grammar for sampling

_TEXT_FORM = """
sequence ::= step (space "->" space step)*
step ::= unit | conditional
conditional ::= unit space "?" space (unit space ":" space branch | "done" space ":" space unit)
branch ::= "done" | unit
unit ::= single | repeated
single ::= call | "(" space sequence space ")" | parallel
repeated ::= single space "*" space count
parallel ::= "[" space member (space "," space member)+ space "]"
member ::= member_call | parallel | repeated | conditional | step (space "->" space step)+
call ::= operator details
member_call ::= member_operator details
space ::= " "?
count ::= [1-9] | "10"
id ::= [A-Za-z_] [A-Za-z0-9_]*
place ::= id | id ".condition" | id ".true" | id ".false"
number ::= [0-9] | [1-9] [0-9] | [1-9] [0-9] [0-9]
"""
# Texts begin with no white space of any script, and hold neither `</` nor `<t`, the beginnings of `</think>` and
# `<think>`.
_BLANK = "".join(f"\\u{code:04x}" for code in range(0x3001) if chr(code).isspace())
_TAGGED_TEXT = f"""
prompt ::= "<prompt>" text "</prompt>"
text ::= ([^{_BLANK}<] | less) ([^<] | less)*
less ::= "<"+ [^<\\/t]
quoted ::= "\\"" ([^"\\\\<&\\r\\n\\t] | "&amp;" | "&lt;" | "&gt;" | "\\\\" ["\\\\nrt])* "\\""
"""
_COMPACT = """
root ::= add | delete | modify | prompt | finish
add ::= "add " sequence (" into " place)? (" at " number)?
delete ::= "delete " id
modify ::= "modify " id " " (call | "* " count{or_backend})
prompt ::= "prompt " id " " text
finish ::= "finish" (" " text)?
text ::= ([^{blank}<] | less) ([^\\r\\n<] | less)* "<"*
less ::= "<"+ [^<\\/t\\r\\n]
quoted ::= "\\"" ([^"\\\\<\\r\\n\\t] | "<"+ [^"\\\\<\\/t\\r\\n] | "<"* "\\\\" ["\\\\nrt])* "<"* "\\""
"""
# A conditional's branches: the rules in `<true>` and in `<false>`, whether the second may be left out, and the number
# of prompts (one for each operator, the condition's included).
_WAYS = (("operator", "operator", False, 3), ("operator", '"done"', True, 2), ('"done"', "operator", False, 2))


def schema(
    operators: Mapping[str, type[Operator]], backends: Collection[str] = (), *, compact: bool = False
) -> dict[str, str]:
    """A grammar that lets a model sample valid actions only, for vLLM (xgrammar's EBNF).

    It is the value of a request's `structured_outputs`: `extra_body={"structured_outputs": schema(operators)}`.

    The grammar has the action alone, without thinking or text before it (with a reasoning parser, vLLM applies it after
    the thinking), and no needless white space. Strict parsing reads all that it allows, save for brackets nested too
    deeply; operators exist, no combiner is a branch, and no loop is out of bounds. Ids may not exist, since they depend
    on the canvas. `compact` is the one-line form.
    """
    others = [name for name, operator in operators.items() if operator.role != "combiner"]
    plain = [name for name in backends if BACKEND_NAME.fullmatch(name)]
    quoted = [json.dumps(name) for name in backends if name not in plain]  # only a workflow's text can name these
    named = f'(space "@" ({_choice(plain + (quoted if compact else list(map(_escaped, quoted))))}))?'
    if compact:
        form = _COMPACT.format(blank=_BLANK, or_backend=f' | "@" ({_choice(plain)})' if plain else "")
    else:
        form = "\n".join([*_tagged_rules(bool(plain)), _TAGGED_TEXT.strip()])
    rules = [
        form,
        _TEXT_FORM,
        f"operator ::= {_choice(operators)}",
        f"member_operator ::= {_choice(others or operators)}",
        f'details ::= (space "{{" space quoted space "}}")? {named if backends else ""}',
    ]
    if plain and not compact:
        rules.append(f"backend ::= {_choice(plain)}")
    return {"grammar": "\n".join(rule.strip() for rule in rules) + "\n"}


def _tagged_rules(backends: bool) -> Iterator[str]:
    """A rule for each form, and the root that chooses one."""
    forms = [form for form in FORMS if backends or form.key != "backend"]
    names = [f"{form.action}_{form.value or form.key}" for form in forms]
    yield f"root ::= {' | '.join(names)}"
    for name, form in zip(names, forms, strict=True):
        parts = [part for part in form.parts if backends or part.tag != "backend"]
        opening = f'"<action>{form.action}</action>"'
        if parts[-1].often != "many":
            yield " ".join([f"{name} ::= {opening}", *(_rule_of(part) for part in parts)])
            continue
        opening += f' "<structure>{form.value}</structure>"'
        rest = [part for part in parts[1:-1] if part.tag not in ("operators", "condition", "true", "false")]
        after = " ".join(_rule_of(part) for part in rest)
        if form.value == "conditional":
            yield _conditional(name, opening, after)
        else:
            yield from _listing(name, opening, after, side_by_side=form.value == "parallel")


def _listing(name: str, opening: str, after: str, *, side_by_side: bool) -> Iterator[str]:
    """Rules of a list of operators with one prompt for each or none; at least two where they stand side by side."""
    operator, first, its_prompt = (
        ("member_operator", 'member_operator ", " ', " prompt") if side_by_side else ("operator", "", "")
    )
    bare, prompted = f"{name}_bare", f"{name}_prompted"
    yield f'{name} ::= {opening} "<operators>" {first}({bare} | {prompted}{its_prompt})'
    yield f'{bare} ::= ({operator} ", ")* {operator} "</operators>" {after}'
    # A grammar cannot count, but it nests: each further operator is wrapped in a rule that ends with one more prompt.
    yield f'{prompted} ::= {operator} "</operators>" {after} prompt | {operator} ", " {prompted} prompt'


def _conditional(name: str, opening: str, after: str) -> str:
    ways = []
    for then, otherwise, may_lack, prompts in _WAYS:
        second = f'"<false>" {otherwise} "</false>"'
        second = f"({second})?" if may_lack else second
        ways.append(f'"<true>" {then} "</true>" {second} {after} ({" ".join(["prompt"] * prompts)})?')
    return f'{name} ::= {opening} "<condition>" operator "</condition>" ({" | ".join(ways)})'


def _rule_of(part: FormPart) -> str:
    rule = f'"<{part.tag}>" {TAGS[part.tag].rule} "</{part.tag}>"'
    return f"({rule})?" if part.often == "optional" else rule


def _choice(names: Collection[str]) -> str:
    return " | ".join(json.dumps(name) for name in sorted(names))


# --------------------------------------------------------------------------------------------------------- on one line

WORDS = ("add", "delete", "modify", "prompt", "finish")


def parse_compact(text: str) -> Action | Unreadable:
    """The action of a response that is one line, after thinking if there is any."""
    try:
        return _read_line(after_thinking(text).strip())
    except (GrammarError, WorkflowError) as error:
        return Unreadable(str(error))


def show_compact(action: Action, *, spaced: bool = False) -> str:
    """The action on one line. `spaced` puts white space around every sign, so that each is a word of its own."""
    match action:
        case Add(piece, into, position):
            place = (f" into {into}" if into else "") + (f" at {position}" if position is not None else "")
            text = text_of(piece)
            return f"add {' '.join(_words(text)) if spaced else text}{place}"
        case Delete(target):
            return f"delete {target}"
        case Modify(target, operator, backend, count, prompt):
            what = text_of(Call(operator, prompt, backend)) if operator else f"@{backend}" if backend else f"* {count}"
            return f"modify {target} {what}"
        case SetPrompt(target, prompt):
            return f"prompt {target} {' '.join(prompt.split())}"
        case Finish(answer):
            return f"finish {' '.join(answer.split())}".strip()


def _words(text: str) -> Listed[str]:
    found = tokens(text)
    return [text[token.start : after.start].strip() for token, after in pairwise(found)]


def _read_line(line: str) -> Action:
    word, *rest = line.split(maxsplit=1) or [""]
    argument = rest[0] if rest else ""
    if "\n" in line:
        raise GrammarError("There are several lines: write one action on one line.")
    match word:
        case "add":
            return _add_line(argument)
        case "delete":
            return Delete(_id("delete", argument))
        case "modify":
            return _modify_line(argument)
        case "prompt":
            target, _, prompt = argument.partition(" ")
            if not prompt.strip():
                raise GrammarError("`prompt` takes a node's id and an instruction: `prompt n2 Name the units.`")
            return SetPrompt(_id("prompt", target), prompt.strip())
        case "finish":
            return Finish(argument)
    near = nearest(word, WORDS)
    guess = f"did you mean `{near}`?" if near else f"start with {', '.join(WORDS[:-1])} or {WORDS[-1]}."
    raise GrammarError(f"There is no action `{word[:60]}`: {guess}" if word else f"The response is empty: {guess}")


def _add_line(argument: str) -> Add:
    into, position = "", None
    words = argument.rsplit(maxsplit=2)
    if len(words) == 3 and words[1] == "at" and '"' not in words[2]:
        if not _NUMBER.fullmatch(words[2]):
            raise GrammarError(f"`at` takes a number from 0 to {MAX_POSITION}, not `{words[2][:60]}`.")
        argument, position = words[0], int(words[2])
        words = argument.rsplit(maxsplit=2)
    if len(words) == 3 and words[1] == "into" and '"' not in words[2]:
        if not PLACE_NAME.fullmatch(words[2]):
            raise GrammarError(f"`into` takes a node's id, such as n3, or n3.true, not `{words[2][:60]}`.")
        argument, into = words[0], words[2]
    return Add(parse_piece(argument), into, position)


def _modify_line(argument: str) -> Modify:
    target, _, what = argument.partition(" ")
    target, what = _id("modify", target), what.strip()
    if what.startswith("@") and BACKEND_NAME.fullmatch(what[1:]):
        return Modify(target, backend=what[1:])
    if what.startswith("*") and _NUMBER.fullmatch(what[1:].strip()):
        return Modify(target, count=int(what[1:]))
    piece = parse_piece(what) if what and what[0] not in "@*" else None
    if not isinstance(piece, Call) or piece.inputs or piece.id:
        raise GrammarError(
            "`modify` takes a node's id and an operator, a backend or a count: `modify n2 Programmer`, "
            "`modify n2 @small`, `modify n5 * 3`."
        )
    return Modify(target, piece.operator, piece.backend, prompt=piece.instruction)


def _id(word: str, argument: str) -> str:
    if not NAME.fullmatch(argument):
        raise GrammarError(f"`{word}` takes a node's id, such as n3, not `{argument[:60]}`.")
    return argument


# ---------------------------------------------------------------------------------------------------------- carried out


def apply(
    action: Action, workflow: Workflow, operators: Mapping[str, type[Operator]], backends: Collection[str] = ()
) -> Workflow:
    """The workflow after the action; `finish` leaves it as it is.

    Raises:
        EditError: it cannot be done, or would leave the workflow with a fault that it has not now.
    """
    match action:
        case Add(piece, into, position):
            for call in walk(piece):
                if isinstance(call, Call) and call.operator not in operators:
                    raise EditError(unknown_name("operator", call.operator, operators))
            edited = add(workflow, piece, into=into, position=position)
        case Delete(target):
            edited = delete(workflow, target)
        case Modify(target, operator, backend, count, prompt):
            if operator and operator not in operators:
                raise EditError(unknown_name("operator", operator, operators))
            edited = modify(workflow, target, operator=operator, backend=backend or None, count=count)
            edited = set_instruction(edited, target, prompt) if prompt else edited
        case SetPrompt(target, prompt):
            edited = set_instruction(workflow, target, prompt)
        case Finish():
            return workflow
    # Faults that were there before are no reason to refuse: an edit may mend one of several.
    before = set(problems(workflow, operators, backends))
    faults = [fault for fault in problems(edited, operators, backends) if fault not in before]
    if faults:
        raise EditError(" ".join(faults[:_MOST_FAULTS]))
    return edited
