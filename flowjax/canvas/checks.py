"""Is a workflow one that can run? What is wrong with it and what would be right, before anything runs.

`problems` are faults: an edit that leads to one is refused. `warnings` are what a run will probably trip over, though
nobody can be sure beforehand.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches

from flowjax.canvas.graph import (
    MAX_DEPTH,
    MAX_LOOP_COUNT,
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    Sequence,
    Workflow,
    children,
    depth,
    walk,
)
from flowjax.canvas.operators import Operator
from flowjax.canvas.text import show

_MAX_NAME_CHARACTERS = 60  # of a name that is compared or quoted
_MAX_QUOTED_CHARACTERS = 60


def problems(workflow: Workflow, operators: Mapping[str, type[Operator]], backends: Collection[str] = ()) -> list[str]:
    """Every fault, in reading order; none for a workflow that can run, and none for an empty one.

    `backends` are those that calls may name; the default backend needs no name.
    """
    if (deep := depth(workflow.root)) > MAX_DEPTH + 1:
        return [f"The nodes are inside one another {deep - 1} deep: use at most {MAX_DEPTH}."]
    found = [fault for node in workflow.nodes() for fault in _faults(node, operators, backends)]
    return [*found, *_repeated_ids(workflow.nodes()), *_wrong_bindings(workflow, operators)]


def unknown_name(kind: str, name: str, valid: Collection[str]) -> str:
    """Message about a name that does not exist: the nearest that does, and all of them."""
    near = nearest(name, valid)
    guess = f" Did you mean `{near}`?" if near else ""
    listed = f" There are: {', '.join(sorted(valid))}." if valid else " There are none."
    return f"There is no {kind} `{name[:_MAX_NAME_CHARACTERS]}`.{guess}{listed}"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that is the same in other case, or else looks most like it; None if nothing is near."""
    by_folded = {each.casefold(): each for each in valid}
    close = get_close_matches(name[:_MAX_NAME_CHARACTERS].casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def named(node: Node) -> str:
    """A node for a message: its id and its text, cut where it is long."""
    text = show(node, instructions=False)
    if len(text) > _MAX_QUOTED_CHARACTERS:
        text = text[: _MAX_QUOTED_CHARACTERS - 3] + "..."
    return f"{node.id} `{text}`" if node.id else f"`{text}`"


def _faults(node: Node, operators: Mapping[str, type[Operator]], backends: Collection[str]) -> Iterator[str]:
    """Those of the node alone."""
    match node:
        case Call(name, backend=backend):
            if name not in operators:
                yield f"{named(node)}: {unknown_name('operator', name, operators)}"
            if backend and backend not in backends:
                yield f"{named(node)}: {unknown_name('backend', backend, backends)}"
        case Sequence(steps):
            if not steps:
                yield f"{node.id or 'A sequence'} has no steps: put an operator in, or delete it."
        case Parallel(branches):
            if len(branches) < 2:
                yield f"{named(node)}: a parallel needs two branches or more; add one, or use the step by itself."
            for branch in branches:
                if isinstance(branch, Call) and _is_combiner(branch, operators):
                    yield (
                        f"{named(branch)} is a branch, and has no candidates to combine: put it after the parallel, as "
                        f"in `[A, B] -> {branch.operator}`."
                    )
        case Conditional(then=None, otherwise=None):
            yield f"{named(node)}: one branch at least must do something; the other may be `done`."
        case Conditional():
            pass
        case Loop(count=count):
            if not 1 <= count <= MAX_LOOP_COUNT:
                yield f"{named(node)}: a loop repeats 1 to {MAX_LOOP_COUNT} times, not {count}."


def _is_combiner(call: Call, operators: Mapping[str, type[Operator]]) -> bool:
    return call.operator in operators and operators[call.operator].role == "combiner"


def _repeated_ids(nodes: Iterable[Node]) -> Iterator[str]:
    seen: set[str] = set()
    for node in nodes:
        if node.id and node.id in seen:
            yield f"The id `{node.id}` is given twice: every node needs its own."
        seen.add(node.id)


def _wrong_bindings(workflow: Workflow, operators: Mapping[str, type[Operator]]) -> list[str]:
    by_id = {node.id: node for node in workflow.nodes() if node.id}
    found: list[str] = []
    done: set[str] = set()  # ids of the calls that may have run when the node at hand starts

    def through(node: Node) -> set[str]:
        """Ids of the calls inside, which are in `done` afterwards."""
        inside: set[str] = set()
        if isinstance(node, Call):
            for field, source in node.inputs:
                if fault := _binding_fault(node, field, source, done, by_id, operators):
                    found.append(f"{named(node)}: the input `{field}` is bound to `{source}`, {fault}")
            inside.add(node.id)
        conditional = isinstance(node, Conditional)
        for child in children(node):
            inner = through(child)
            inside |= inner
            if isinstance(node, Parallel) or (conditional and child is not node.condition):
                done.difference_update(inner)  # branches do not see one another
        done.update(inside)
        return inside

    if any(call.inputs for call in workflow.calls()):
        through(workflow.root)
    return found


def _binding_fault(
    call: Call,
    field: str,
    source: str,
    done: Collection[str],
    by_id: Mapping[str, Node],
    operators: Mapping[str, type[Operator]],
) -> str | None:
    id, _, output = source.partition(".")
    reads = {each.name for each in operators[call.operator].inputs} if call.operator in operators else {field}
    if field not in reads:
        return f"but {call.operator} has no such input; it reads {', '.join(sorted(reads))}."
    giver = by_id.get(id)
    if giver is None:
        return f"but there is no node `{id}`."
    if not isinstance(giver, Call):
        return f"but {named(giver)} is no operator: name an operator's id."
    if id not in done:
        return f"but {named(giver)} does not run before it: bind inputs to earlier steps."
    if giver.operator in operators:
        writes = {each.name for each in operators[giver.operator].outputs}
        if output not in writes:
            return f"but {named(giver)} writes {', '.join(sorted(writes)) or 'nothing'}."
    return None


# ---------------------------------------------------------------------------------------------------- what may go wrong

_Writers = Mapping[str, frozenset[str]]  # field -> ids of the nodes that may have written its newest value
_SOLUTIONS = ("answer", "code", "candidates")


def warnings(workflow: Workflow, operators: Mapping[str, type[Operator]]) -> list[str]:
    """Warnings from what operators declare that they read and write: first what is missing, then what is lost.

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
