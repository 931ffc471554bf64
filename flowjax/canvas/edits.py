"""Edits of a workflow: each makes a new one, or refuses with a reason in words.

Nodes keep their ids for ever; added nodes get new ids, and ids of deleted nodes are never used again. Nodes that an
edit leaves too small are reduced at once, so that a workflow has no needless nodes:

    a parallel with one branch left         becomes that branch
    a conditional with both branches `done` becomes its condition
    a sequence with one step left           becomes that step
    a loop, a branch or a sequence with nothing left is deleted too
    a conditional's condition               cannot be deleted: delete the conditional, or modify the condition
"""

from collections.abc import Callable
from dataclasses import replace

from flowjax.canvas.checks import named
from flowjax.canvas.graph import (
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    Sequence,
    Workflow,
    children,
    in_sequence,
    steps_of,
    walk,
    with_children,
)

PARTS = ("condition", "true", "false")  # of a conditional, as `into` names them: `n4.true`


class EditError(ValueError):
    """An edit that cannot be done; the message says why, and what can be done."""


def add(workflow: Workflow, piece: Node, *, into: str = "", position: int | None = None) -> Workflow:
    """The workflow with a piece in it, whose nodes get new ids.

    `into` says where, and `position` counts from 0 there (the end if None):

        ""                    among the steps at the top
        a sequence's id       among its steps
        a loop's id           among the steps of its body
        a parallel's id       among its branches
        n4.true (false,       among the steps of that part of the conditional n4
          condition)
        an operator's id      0 is before it, 1 is after it

    Raises:
        EditError: there is no such place.
    """
    piece = _without_ids(piece, workflow.next_number)  # its own ids could be those of nodes on the canvas
    if not into:
        root = replace(workflow.root, steps=_inserted(workflow.root.steps, piece, position, "the canvas"))
    else:
        id, _, part = into.partition(".")
        root = _changed(workflow, id, lambda node: _with_piece(node, part, piece, position))
    return Workflow(root, workflow.next_number).numbered()


def delete(workflow: Workflow, target: str) -> Workflow:
    """The workflow without a node, at any depth, and without bindings to nodes that were in it.

    Raises:
        EditError: there is no such node, or a conditional would lose its condition.
    """
    root = _changed(workflow, target, lambda _: None)
    gone = {node.id for node in workflow.nodes()} - {node.id for node in walk(root)}
    return Workflow(_root(_each_call(root, lambda call: _unbound(call, gone))), workflow.next_number)


def modify(
    workflow: Workflow, target: str, *, operator: str = "", backend: str | None = None, count: int | None = None
) -> Workflow:
    """The workflow with a call's operator or backend, or a loop's count, replaced.

    A new operator starts with its own instruction and no bindings. Backend "" is the default one.

    Raises:
        EditError: there is no such node, or it has no such property.
    """

    def change(node: Node) -> Node:
        match node:
            case Call():
                if count is not None:
                    raise EditError(f"{named(node)} is an operator and has no count; only a loop has.")
                changed = Call(operator, backend=node.backend, id=node.id) if operator else node
                return changed if backend is None else replace(changed, backend=backend)
            case Loop():
                if operator or backend is not None or count is None:
                    raise _no_operator(node, "modify its count, or modify")
                return replace(node, count=count)
            case _:
                raise _no_operator(node, "modify")

    if not operator and backend is None and count is None:
        raise EditError("Nothing to modify: give an operator, a backend or (for a loop) a count.")
    return Workflow(_changed(workflow, target, change), workflow.next_number)


def set_instruction(workflow: Workflow, target: str, instruction: str) -> Workflow:
    """The workflow with another instruction for a call; "" is its operator's own instruction.

    Raises:
        EditError: there is no such node, or it is no operator.
    """

    def change(node: Node) -> Node:
        if not isinstance(node, Call):
            raise _no_operator(node, "instruct")
        return replace(node, instruction=instruction)

    return Workflow(_changed(workflow, target, change), workflow.next_number)


def find(workflow: Workflow, id: str) -> Node:
    """The node with an id.

    Raises:
        EditError: there is none.
    """
    for node in workflow.nodes():
        if node.id == id:
            return node
    ids = [node.id for node in workflow.nodes()]
    there_are = f"there are {', '.join(ids)}" if ids else "the canvas is empty"
    raise EditError(f"There is no node `{id[:60]}`: {there_are}.")


def _changed(workflow: Workflow, id: str, change: Callable[[Node], Node | None]) -> Sequence:
    """The root with one node changed (deleted where `change` gives None), and nodes left too small reduced."""
    find(workflow, id)

    def through(node: Node) -> Node | None:
        if node.id == id:
            return change(node)
        new = tuple(through(child) for child in children(node))
        # Parts without the change stay the same objects; only the nodes around it are built anew, and reduced.
        if all(after is before for after, before in zip(new, children(node), strict=True)):
            return node
        return _rebuilt(node, new)

    return _root(through(workflow.root))


def _rebuilt(node: Node, new: tuple[Node | None, ...]) -> Node | None:
    """The node with new children, None for deleted ones; reduced as the module's table says."""
    kept = [child for child in new if child is not None]
    match node:
        case Sequence(id=id):
            inside = in_sequence(kept, id)
            return inside if id else Sequence(steps_of(inside))  # the root, which stays one
        case Parallel():
            return replace(node, branches=tuple(kept)) if len(kept) > 1 else kept[0] if kept else None
        case Conditional():
            condition, *rest = new
            if condition is None:
                raise EditError(
                    f"{named(node)} cannot be without its condition: delete {node.id or 'it'}, or modify the condition."
                )
            branches = iter(rest)
            then = next(branches) if node.then is not None else None
            otherwise = next(branches) if node.otherwise is not None else None
            if then is None and otherwise is None:
                return condition
            return replace(node, condition=condition, then=then, otherwise=otherwise)
        case Loop():
            return replace(node, body=kept[0]) if kept else None
        case Call():
            return node


def _with_piece(node: Node, part: str, piece: Node, position: int | None) -> Node | None:
    match node:
        case Conditional() if part in PARTS:
            field = {"condition": "condition", "true": "then", "false": "otherwise"}[part]
            return replace(node, **{field: _longer(getattr(node, field), piece, position, f"{node.id}.{part}")})
        case Conditional():
            places = ", ".join(f"`{node.id}.{name}`" for name in PARTS)
            raise EditError(f"{named(node)} is a conditional: say which part of it, {places}.")
        case _ if part:
            raise EditError(f"{named(node)} has no part `{part[:60]}`: write `{node.id}` alone.")
        case Parallel(branches):
            return replace(node, branches=_inserted(branches, piece, position, node.id, dissolve=False))
        case Loop(body):
            return replace(node, body=_longer(body, piece, position, node.id))
        case Sequence() | Call():
            return _longer(node, piece, position, node.id)


def _longer(steps: Node | None, piece: Node, position: int | None, where: str) -> Node | None:
    """The steps (a sequence, a single node or none) with the piece's inserted. A sequence keeps its id."""
    id = steps.id if isinstance(steps, Sequence) else ""
    return in_sequence(_inserted(steps_of(steps), piece, position, where), id)


def _inserted(
    steps: tuple[Node, ...], piece: Node, position: int | None, where: str, dissolve: bool = True
) -> tuple[Node, ...]:
    """The steps with the piece's inserted; `dissolve=False` keeps a sequence whole, as one branch of a parallel."""
    if position is None:
        position = len(steps)
    if not 0 <= position <= len(steps):
        raise EditError(f"There is no position {position} in {where}: use 0 to {len(steps)}, or none for the end.")
    return (*steps[:position], *(steps_of(piece) if dissolve else (piece,)), *steps[position:])


def _without_ids(piece: Node, next_number: int) -> Node:
    """The piece without ids, to be numbered later. Only nodes that bindings in the piece name get their new id here, so
    that those bindings can name it."""
    bound = {source.partition(".")[0] for call in walk(piece) if isinstance(call, Call) for _, source in call.inputs}
    named_here = [node.id for node in walk(piece) if node.id in bound]
    new = {old: f"n{next_number + i}" for i, old in enumerate(dict.fromkeys(named_here))}

    def renamed(node: Node) -> Node:
        if isinstance(node, Call):
            parts = [(field, *source.partition(".")) for field, source in node.inputs]
            inputs = tuple((field, f"{new.get(id, id)}.{output}") for field, id, _, output in parts)
            return replace(node, id=new.get(node.id, ""), inputs=inputs)
        return replace(with_children(node, tuple(map(renamed, children(node)))), id=new.get(node.id, ""))

    return renamed(piece)


def _each_call(node: Node, change: Callable[[Call], Call]) -> Node:
    if isinstance(node, Call):
        return change(node)
    return with_children(node, tuple(_each_call(child, change) for child in children(node)))


def _unbound(call: Call, gone: set[str]) -> Call:
    kept = tuple((field, source) for field, source in call.inputs if source.partition(".")[0] not in gone)
    return call if kept == call.inputs else replace(call, inputs=kept)


def _root(node: Node | None) -> Sequence:
    assert isinstance(node, Sequence)
    return node


def _no_operator(node: Node, instead: str) -> EditError:
    calls = ", ".join(inner.id for inner in walk(node) if isinstance(inner, Call))
    kind = type(node).__name__.lower()
    return EditError(f"{named(node)} is a {kind}, no operator: {instead} one of the operators in it ({calls}).")
