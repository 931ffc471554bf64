"""Workflows printed in their text form (`flowjax.canvas.text`)."""

import json

from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow, walk
from flowjax.canvas.text_tokens import BACKEND_NAME


def show(piece: Node | Workflow, *, ids: bool = False, instructions: bool = True, reference: bool = False) -> str:
    """The text of a workflow or of a part of it. `parse(show(workflow))` is the workflow again.

    `ids` writes every node's; without it only those are written that other nodes' inputs name. `instructions=False`
    leaves instructions and bindings out, for a short outline.
    """
    node = piece.root if isinstance(piece, Workflow) else piece
    named = {source.partition(".")[0] for call in walk(node) if isinstance(call, Call) for _, source in call.inputs}
    printer = _Printer({step.id for step in walk(node)} if ids else named, instructions, reference)
    return printer.steps(node)


class _Printer:
    def __init__(self, shown_ids: set[str], instructions: bool, reference: bool):
        self.shown_ids, self.instructions, self.reference = shown_ids - {""}, instructions, reference

    def steps(self, node: Node) -> str:
        """Where anything may stand: at the top, inside parentheses, as a branch of a parallel."""
        if isinstance(node, Sequence) and node.id not in self.shown_ids:
            one, *more = node.steps or (None,)
            return self.steps(one) if one and not more else " -> ".join(map(self.unit, node.steps))
        if isinstance(node, Conditional) and node.id not in self.shown_ids:
            return self.conditional(node)
        return self.unit(node)

    def unit(self, node: Node) -> str:
        """Where a single step stands, so that sequences and conditionals need parentheses."""
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
