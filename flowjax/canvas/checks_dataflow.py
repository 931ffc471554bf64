"""What a run of a workflow will probably trip over: inputs that nothing has written, work that nothing reads."""

from collections.abc import Iterator, Mapping

from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow, walk
from flowjax.canvas.operators.base import Operator
from flowjax.canvas.text import show

_Writers = Mapping[str, frozenset[str]]  # field -> ids of the nodes that may have written its newest value
_SOLUTIONS = ("answer", "code", "candidates")


def warnings(workflow: Workflow, operators: Mapping[str, type[Operator]]) -> list[str]:
    """What looks wrong, from what operators declare that they read and write: first what is missing, then what is lost.

    Unknown operators are passed over: `flowjax.canvas.checks.problems` names them.
    """
    flow = _Flow(operators)
    flow.through(workflow.numbered().root, {"problem": frozenset()})
    return [*flow.found, *(warning for id, warning in flow.unread.items() if id not in flow.read)]


class _Flow:
    """Follows the state through a workflow. A field counts as there when some way through could have written it."""

    def __init__(self, operators: Mapping[str, type[Operator]]):
        self.operators = operators
        self.found: list[str] = []
        self.unread: dict[str, str] = {}  # id of a node whose output is for others -> what to say if none reads it
        self.read: set[str] = set()

    def through(self, node: Node, state: _Writers) -> _Writers:
        match node:
            case Call():
                return self.call(node, state)
            case Sequence(steps):
                for step in steps:
                    state = self.through(step, state)
                return state
            case Parallel(branches):
                return self.parallel(node, branches, state)
            case Conditional(condition, then, otherwise):
                if not any(self.writes(call, "passed") for call in _calls(condition)):
                    self.found.append(
                        f"{_named(node)}: nothing in its condition checks anything, so the second branch always runs; "
                        f"use a checker as condition{self.examples('checker')}."
                    )
                state = self.through(condition, state)
                ways = [state if branch is None else self.through(branch, state) for branch in (then, otherwise)]
                first, second = ways
                return {
                    field: first.get(field, frozenset()) | second.get(field, frozenset())
                    for field in {**first, **second}
                }
            case Loop(body):
                after = self.through(body, state)
                for call in _calls(body):  # a later round reads what this one has written
                    self.note_reads(call, after)
                return after

    def call(self, call: Call, state: _Writers) -> _Writers:
        operator = self.operators.get(call.operator)
        if operator is None:
            return state
        bound = {field for field, _ in call.inputs}
        for field in operator.inputs:
            if field.required and field.name not in state and field.name not in bound:
                self.found.append(self.missing(call, field.name))
        work = {field.name for field in operator.inputs if field.name in _SOLUTIONS and not field.required}
        if operator.role not in ("planner", "solver") and work and not work & (state.keys() | bound):
            self.found.append(f"{_named(call)}: there is nothing before it to work on; put a solver before it.")
        self.note_reads(call, state)
        if operator.role == "planner":
            self.unread[call.id] = f"{_named(call)}: nothing after it reads what it writes; add a step that solves."
        return {**state, **{field.name: frozenset((call.id,)) for field in operator.outputs}}

    def parallel(self, node: Node, branches: tuple[Node, ...], state: _Writers) -> _Writers:
        for branch in branches:
            after = self.through(branch, state)
            if self.known(branch) and all(after.get(field) == state.get(field) for field in ("answer", "code")):
                self.found.append(f"{_named(branch)}: this branch gives no candidate, as nothing in it answers.")
        self.unread[node.id] = (
            f"{_named(node)}: nothing after it reads its candidates, so what its branches find is lost; put a combiner "
            f"after it{self.examples('combiner')}."
        )
        return {**state, "candidates": frozenset((node.id,))}

    def note_reads(self, call: Call, state: _Writers) -> None:
        operator = self.operators.get(call.operator)
        bound = {field: source.partition(".")[0] for field, source in call.inputs}
        self.read.update(bound.values())
        for field in operator.inputs if operator else ():
            if field.name not in bound:
                self.read |= state.get(field.name, frozenset())

    def missing(self, call: Call, field: str) -> str:
        if field == "candidates":
            return f"{_named(call)}: no candidates; put a parallel before it, as in `[A, B] -> {call.operator}`."
        givers = sorted(
            name
            for name, operator in self.operators.items()
            if any(output.name == field for output in operator.outputs)
        )
        by = f"; {', '.join(givers)} write it" if givers else ""
        return f"{_named(call)}: it reads `{field}`, which nothing before it writes{by}."

    def examples(self, role: str) -> str:
        names = sorted(name for name, operator in self.operators.items() if operator.role == role)
        return f" ({', '.join(names)})" if names else ""

    def known(self, node: Node) -> bool:
        return all(call.operator in self.operators for call in _calls(node))

    def writes(self, call: Call, field: str) -> bool:
        operator = self.operators.get(call.operator)
        return operator is None or any(output.name == field for output in operator.outputs)


def _calls(node: Node) -> Iterator[Call]:
    return (inner for inner in walk(node) if isinstance(inner, Call))


def _named(node: Node) -> str:
    text = f"`{show(node, instructions=False)}`"
    return f"{node.id} {text}" if node.id else text
