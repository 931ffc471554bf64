"""Workflow graphs: immutable values of five kinds of node, nested to any depth.

Editing makes a new value (`flowjax.canvas.edits`). Ids are given by `Workflow.numbered`, each only once: the id of a
deleted node is never used again, so an id in a policy's earlier turns cannot mean another node later.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Union

MAX_DEPTH = 50  # of nodes inside nodes; readers of workflows refuse deeper ones
MAX_LOOP_COUNT = 10

_NUMBERED_ID = re.compile(r"n([1-9][0-9]{0,8})", re.ASCII)


class WorkflowError(ValueError):
    """A workflow that cannot be read; the message says where, what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator at work.

    `instruction` is for the backend ("" is the operator's own), and `backend` is the name of the backend that answers
    ("" is the default). `inputs` binds input fields to outputs of other nodes, as `(field, "node_id.field")`; unbound
    fields get the state's newest value.
    """

    operator: str
    instruction: str = ""
    backend: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Steps one after the other, each on the state that the step before it left."""

    steps: tuple["Node", ...]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Branches side by side, each on a copy of the state; afterwards the state has `candidates`, one per branch."""

    branches: tuple["Node", ...]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Conditional:
    """`condition ? then : otherwise`: `then` if the condition's last check passed, else `otherwise`.

    None is `done`: the state stays as it is.
    """

    condition: "Node"
    then: Union["Node", None] = None
    otherwise: Union["Node", None] = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """The body up to `count` times. A check that is a direct step of the body ends the loop at once when it passes."""

    body: "Node"
    count: int
    id: str = ""


Node = Call | Sequence | Parallel | Conditional | Loop


@dataclass(frozen=True, slots=True)
class Workflow:
    """A sequence at the top, and the number of the next new node's id."""

    root: Sequence = field(default_factory=lambda: Sequence(()))
    next_number: int = 1

    def numbered(self) -> "Workflow":
        """The workflow with an id (`n1`, `n2`, ...) for every node without one, in reading order. The root keeps "".

        New numbers are above all numbers in use.
        """
        numbers = [int(match[1]) for node in self.nodes() if (match := _NUMBERED_ID.fullmatch(node.id))]
        number = max([self.next_number, *(used + 1 for used in numbers)])

        def give(node: Node) -> Node:
            nonlocal number
            if not node.id and node is not self.root:
                node, number = replace(node, id=f"n{number}"), number + 1
            return with_children(node, tuple(give(child) for child in children(node)))

        root = give(self.root)
        assert isinstance(root, Sequence)
        return Workflow(root, number)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, in reading order."""
        nodes = walk(self.root)
        next(nodes)
        return nodes

    def calls(self) -> Iterator[Call]:
        """The operators at work, in reading order."""
        return (node for node in walk(self.root) if isinstance(node, Call))


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly inside, in reading order."""
    match node:
        case Call():
            return ()
        case Sequence(steps):
            return steps
        case Parallel(branches):
            return branches
        case Conditional(condition, then, otherwise):
            return (condition, *(branch for branch in (then, otherwise) if branch is not None))
        case Loop(body):
            return (body,)


def with_children(node: Node, new: tuple[Node, ...]) -> Node:
    """The node with other children, as many as `children` gives."""
    match node:
        case Call():
            return node
        case Sequence():
            return replace(node, steps=new)
        case Parallel():
            return replace(node, branches=new)
        case Conditional():
            rest = iter(new[1:])
            then = next(rest) if node.then is not None else None
            otherwise = next(rest) if node.otherwise is not None else None
            return replace(node, condition=new[0], then=then, otherwise=otherwise)
        case Loop():
            return replace(node, body=new[0])


def walk(node: Node) -> Iterator[Node]:
    """The node and everything inside it, in reading order."""
    yield node
    for child in children(node):
        yield from walk(child)


def without_ids(node: Node) -> Node:
    """The node without ids, equal for nodes that do the same; bindings to nodes inside name their index in `walk`."""
    places = {inner.id: f"#{place}" for place, inner in enumerate(walk(node)) if inner.id}

    def renamed(reference: str) -> str:
        id, _, field = reference.rpartition(".")
        return f"{places.get(id, id)}.{field}"

    def rename(inner: Node) -> Node:
        if isinstance(inner, Call):
            return replace(inner, id="", inputs=tuple((field, renamed(source)) for field, source in inner.inputs))
        return replace(with_children(inner, tuple(rename(child) for child in children(inner))), id="")

    return rename(node)


def depth(node: Node) -> int:
    """Depth of nodes inside one another: 1 for a call or an empty sequence."""
    # Level by level and not recursive: a node that is too deep must be refused, not overflow Python's stack.
    deepest, level = 0, [node]
    while level:
        deepest += 1
        level = [child for parent in level for child in children(parent)]
    return deepest


def in_sequence(steps: Iterable[Node], id: str = "") -> Node | None:
    """The steps one after the other, in as few nodes as possible.

    Sequences among several steps are dissolved; a single step is returned itself, and no steps give None.
    """
    given = tuple(steps)
    if len(given) < 2:
        return given[0] if given else None
    return Sequence(tuple(inner for step in given for inner in steps_of(step)), id)


def steps_of(node: Node | None) -> tuple[Node, ...]:
    """The steps of a sequence; any other node is a single step, None is no step."""
    match node:
        case None:
            return ()
        case Sequence(steps):
            return steps
        case _:
            return (node,)
