"""The text form of workflows: what a policy reads and writes, parsed and printed.

    Plan -> [Programmer, Custom{"Solve it by hand."}] -> ScEnsemble -> (Verify ? done : Revise) -> (Test -> Revise) * 2

    A -> B            one after the other              [A, B -> C]     side by side
    (C ? T : E)       T if C's check passes, else E    (A -> B) * 2    at most twice; ends early where a check passes
    done              in place of T or E: no step      (A -> B)        parentheses group, anywhere
    A{"text"}         an instruction                   A@small         the backend that answers
    A{answer=n2.answer}   where an input comes from    A#n3            an id

`?` binds tighter than `->`: `A -> B ? C : D` is `A -> (B ? C : D)`. Grammar: docs/canvas/text.md.

The published form of workflows runs the first branch where the check *fails*; `reference=True` reads and writes that.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from flowjax.canvas.graph import (
    MAX_DEPTH,
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    Sequence,
    Workflow,
    WorkflowError,
    depth,
    in_sequence,
    steps_of,
    walk,
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of operators, fields and ids
BACKEND_NAME = re.compile(r"[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*")  # any other backend's name is written as a string

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<arrow>->)
      | (?P<mark>[\[\](){},?:*=])
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<backend>@(?:[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*)?)
      | (?P<id>\#[A-Za-z_][A-Za-z0-9_]*)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)?)
      | (?P<number>[0-9]+)
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_SPACE = re.compile(r"\s*", re.ASCII)
_EXCERPT_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the text. `kind` is a group's name in `_TOKEN`, or the mark itself."""

    kind: str
    text: str
    start: int


def tokens(source: str) -> list[Token]:
    """The tokens of a text; the last one is of kind `end`.

    Raises:
        WorkflowError: a part of the text is no token.
    """
    found, position = [], 0
    while True:
        match = _TOKEN.match(source, position)
        if match is None:
            space = _SPACE.match(source, position)
            position = space.end() if space else position
            raise error(source, position, _remedy(source[position]))
        kind, text = str(match.lastgroup), match[str(match.lastgroup)]
        found.append(Token(text if kind == "mark" else kind, text, match.start(kind)))
        if kind == "end":
            return found
        position = match.end()


def unquoted(source: str, token: Token) -> str:
    """Content of a quoted string; line breaks may stand in it as they are.

    Raises:
        WorkflowError: an unknown escape, or a lone surrogate.
    """
    try:
        text = json.loads(token.text, strict=False)  # not strict: line breaks are allowed
        text.encode()  # fails for a lone surrogate
    except json.JSONDecodeError as bad:
        remedy = f'{bad.msg}: write strings as in JSON, \\" for a quote and \\\\ for a backslash'
        raise error(source, token.start + bad.pos, remedy) from bad
    except UnicodeEncodeError as bad:
        raise error(source, token.start, "the string has half of a surrogate pair: write the character itself") from bad
    return text


def error(source: str, position: int, what: str) -> WorkflowError:
    """An error whose message begins with its place in the text."""
    rest = source[position : position + _EXCERPT_CHARACTERS]
    where = f"before `{rest}`" if rest else "at the end"
    return WorkflowError(f"Character {position + 1}, {where}: {what}.")


def _remedy(character: str) -> str:
    if character == '"':
        return 'the string has no end: close it with `"`'
    if character in "→⇒>-":
        return "steps are joined with `->`"
    if character == "#":
        return "after `#` comes an id, such as `#n3`"
    return (
        f"`{character}` has no meaning here: write operators joined with `->`, `[A, B]`, `C ? T : E` and `(A -> B) * 2`"
    )


_MAX_COUNT_DIGITS = 9  # `flowjax.canvas.checks` has the real limit


def parse(source: str, *, reference: bool = False) -> Workflow:
    """The workflow that a text describes, numbered. Ids in the text are kept; an empty text is an empty workflow.

    Only the syntax is checked here: `flowjax.canvas.checks` checks operators' names, loop counts and the rest.

    Raises:
        WorkflowError: the text is no workflow; the message says where, and what would be right.
    """
    return Workflow(Sequence(steps_of(_Parser(source, reference).whole()))).numbered()


def parse_piece(source: str) -> Node:
    """One piece of a workflow, to be added to another: a single step, or a sequence of several. Not numbered.

    Raises:
        WorkflowError: the text is no workflow, or empty.
    """
    piece = _Parser(source, reference=False).whole()
    if piece is None:
        raise WorkflowError("There is nothing to add: write an operator's name, or a text such as `[A, B] -> C`.")
    return piece


class _Parser:
    """Recursive descent, one method per rule of the grammar. Brackets are at most `MAX_DEPTH` deep, so that no text can
    overflow Python's stack."""

    def __init__(self, source: str, reference: bool):
        self.source, self.reference = source, reference
        self.tokens, self.at, self.open = tokens(source), 0, 0

    def whole(self) -> Node | None:
        if self.here.kind == "end":
            return None
        node = self.sequence("end")
        if depth(node) > MAX_DEPTH:
            raise WorkflowError(
                f"The workflow has nodes inside one another {depth(node)} deep; {MAX_DEPTH} is the most."
            )
        return node

    def sequence(self, *closing: str) -> Node:
        steps = [self.step()]
        while self.skip("arrow"):
            steps.append(self.step())
        if self.here.kind not in closing:
            wanted = " or ".join(f"`{mark}`" for mark in closing if mark != "end") or "the end"
            raise self.error(f"expected `->` or {wanted}")
        node = in_sequence(steps)
        assert node is not None
        return node

    def step(self) -> Node:
        condition = self.unit()
        if not self.skip("?"):
            return condition
        first = self.branch()
        if not self.skip(":"):
            raise self.error("expected `:` and the branch for when the check fails (`: done` for none)")
        second = self.branch()
        then, otherwise = (second, first) if self.reference else (first, second)
        return Conditional(condition, then, otherwise)

    def branch(self) -> Node | None:
        if self.here.text == "done":
            self.take()
            return None
        return self.unit()

    def unit(self) -> Node:
        node = self.primary()
        if not self.skip("*"):
            return node
        count = self.take()
        if count.kind != "number" or len(count.text) > _MAX_COUNT_DIGITS:
            raise self.error("after `*` comes how often, such as `(A -> B) * 2`", count)
        if self.here.kind == "*":
            raise self.error("put a loop inside a loop in parentheses: `((A -> B) * 2) * 3`")
        return Loop(node, int(count.text), self.id())

    def primary(self) -> Node:
        token = self.take()
        match token.kind:
            case "(":
                node = self.inside(lambda: self.sequence(")"), token)
                self.take()
                return self.with_id(node)
            case "[":
                node = self.inside(self.branches, token)
                return self.with_id(node)
            case "name":
                return self.call(token)
        raise self.error("expected an operator's name, `(` or `[`", token)

    def inside(self, parse_inner: Callable[[], Node], token: Token) -> Node:
        self.open += 1
        if self.open > MAX_DEPTH:
            raise self.error(f"brackets inside one another more than {MAX_DEPTH} deep: use fewer", token)
        node = parse_inner()
        self.open -= 1
        return node

    def branches(self) -> Node:
        branches = [self.sequence(",", "]")]
        while self.take().kind == ",":
            branches.append(self.sequence(",", "]"))
        return Parallel(tuple(branches))

    def call(self, name: Token) -> Call:
        if name.text == "done":
            raise self.error("`done` stands only for a branch of a conditional, as in `Verify ? done : Revise`", name)
        if "." in name.text:
            raise self.error("an operator's name has no dot", name)
        backend = self.backend()  # before the details or after them
        instruction, inputs = self.details() if self.skip("{") else ("", ())
        return Call(name.text, instruction, backend or self.backend(), inputs, self.id())

    def details(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        instruction, inputs = "", []
        while True:
            token = self.take()
            if token.kind == "string" and not instruction and not inputs:
                instruction = unquoted(self.source, token)
            elif token.kind == "name" and self.skip("=") and self.here.kind == "name" and "." in self.here.text:
                inputs.append((token.text, self.take().text))
            else:
                wanted = 'an instruction, as in `{"Check the units."}`, then inputs, as in `{answer=n2.answer}`'
                raise self.error(f"inside `{{}}` comes {wanted}", token)
            closing = self.take()
            if closing.kind == "}":
                return instruction, tuple(inputs)
            if closing.kind != ",":
                raise self.error("expected `,` or `}`", closing)

    def backend(self) -> str:
        if self.here.kind != "backend":
            return ""
        token = self.take()
        if len(token.text) > 1:
            return token.text[1:]
        if self.here.kind != "string":
            raise self.error("after `@` comes a backend's name")
        return unquoted(self.source, self.take())

    def id(self) -> str:
        return self.take().text[1:] if self.here.kind == "id" else ""

    def with_id(self, node: Node) -> Node:
        token = self.here
        id = self.id()
        if id and node.id:
            raise self.error(f"the node has two ids, `{node.id}` and `{id}`: keep one", token)
        return replace(node, id=id) if id else node

    @property
    def here(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.here
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def skip(self, kind: str) -> bool:
        if self.here.kind != kind:
            return False
        self.take()
        return True

    def error(self, what: str, token: Token | None = None) -> WorkflowError:
        return error(self.source, (token or self.here).start, what)


def show(piece: Node | Workflow, *, ids: bool = False, instructions: bool = True, reference: bool = False) -> str:
    """The text of a workflow or of a part of it. `parse(show(workflow))` is the workflow again.

    `ids` writes all ids; without it only those that bindings of other nodes name. `instructions=False` leaves
    instructions and bindings out, for a short outline.
    """
    node = piece.root if isinstance(piece, Workflow) else piece
    named = {source.partition(".")[0] for call in walk(node) if isinstance(call, Call) for _, source in call.inputs}
    printer = _Printer({step.id for step in walk(node)} if ids else named, instructions, reference)
    return printer.steps(node)


class _Printer:
    def __init__(self, shown_ids: set[str], instructions: bool, reference: bool):
        self.shown_ids, self.instructions, self.reference = shown_ids - {""}, instructions, reference

    def steps(self, node: Node) -> str:
        """Text of a node where any node may stand: at the top, inside parentheses, as a branch of a parallel."""
        if isinstance(node, Sequence) and node.id not in self.shown_ids:
            one, *more = node.steps or (None,)
            return self.steps(one) if one and not more else " -> ".join(map(self.unit, node.steps))
        if isinstance(node, Conditional) and node.id not in self.shown_ids:
            return self.conditional(node)
        return self.unit(node)

    def unit(self, node: Node) -> str:
        """Text of a node where only a single step may stand: sequences and conditionals get parentheses."""
        match node:
            case Call():
                return self.call(node)
            case Parallel(branches):
                text = f"[{', '.join(map(self.steps, branches))}]"
            case Loop(body, count):
                text = f"({self.steps(body)}) * {count}"
            case Sequence(steps):
                text = f"({' -> '.join(map(self.unit, steps))})"
            case Conditional():
                text = f"({self.conditional(node)})"
        return text + self.id(node)

    def conditional(self, node: Conditional) -> str:
        branches = (node.otherwise, node.then) if self.reference else (node.then, node.otherwise)
        first, second = ("done" if branch is None else self.unit(branch) for branch in branches)
        return f"{self.unit(node.condition)} ? {first} : {second}"

    def call(self, node: Call) -> str:
        details = [json.dumps(node.instruction, ensure_ascii=False)] if node.instruction else []
        details += [f"{field}={source}" for field, source in node.inputs]
        inside = f"{{{', '.join(details)}}}" if details and self.instructions else ""
        plain = BACKEND_NAME.fullmatch(node.backend)
        backend = f"@{node.backend if plain else json.dumps(node.backend)}" if node.backend else ""
        return node.operator + inside + backend + self.id(node)

    def id(self, node: Node) -> str:
        return f"#{node.id}" if node.id in self.shown_ids else ""
