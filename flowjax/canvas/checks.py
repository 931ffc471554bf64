"""Checks of a workflow before it runs: every fault, and how to correct it. An edit that adds a fault is refused."""

from collections import Counter
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
)
from flowjax.canvas.operators import Operator
from flowjax.canvas.text import show
from flowjax.canvas.values import Kind

_MAX_NAME_CHARACTERS = 60  # of a name that is compared or quoted
_MAX_QUOTED_CHARACTERS = 60


def problems(workflow: Workflow, operators: Mapping[str, type[Operator]], backends: Collection[str] = ()) -> list[str]:
    """Every fault of a workflow, in reading order; none if it can run, and none if it is empty.

    `backends` are those that calls may name; the default backend needs no name.
    """
    if (deep := depth(workflow.root)) > MAX_DEPTH + 1:  # the root is one level more, which texts do not show
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
    """Faults of the node itself, without the nodes inside it."""
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

    def after(node: Node, before: frozenset[str]) -> frozenset[str]:
        """Ids of the calls that may have run when the node ends; `before`: those that may have when it starts."""
        if isinstance(node, Call):
            found.extend(_repeated_bindings(node, operators))
            for field, source in node.inputs:
                if fault := _binding_fault(node, field, source, before, by_id, operators):
                    found.append(f"{named(node)}: the input `{field}` is bound to `{source}`, {fault}")
            return before | {node.id}
        seen = done = before
        for child in children(node):
            done |= after(child, seen)
            # Branches do not see one another, but a later call may bind to any of them.
            if isinstance(node, Sequence | Loop) or (isinstance(node, Conditional) and child is node.condition):
                seen = done
        return done

    if any(call.inputs for call in workflow.calls()):
        after(workflow.root, frozenset())
    return found


def _repeated_bindings(call: Call, operators: Mapping[str, type[Operator]]) -> Iterator[str]:
    reads = _kinds_read(call, operators)
    for field, times in Counter(field for field, _ in call.inputs).items():
        if times > 1 and reads.get(field, "texts") != "texts":
            yield f"{named(call)}: the input `{field}` is bound {times} times: bind it once; only texts can be several."


def _binding_fault(
    call: Call,
    field: str,
    source: str,
    done: Collection[str],
    by_id: Mapping[str, Node],
    operators: Mapping[str, type[Operator]],
) -> str | None:
    id, _, output = source.partition(".")
    reads = _kinds_read(call, operators)
    if call.operator in operators and field not in reads:
        return f"but {call.operator} has no such input; it reads {', '.join(sorted(reads))}."
    giver = by_id.get(id)
    if giver is None:
        return f"but there is no node `{id}`."
    if not isinstance(giver, Call):
        return f"but {named(giver)} is no operator: name an operator's id."
    if id not in done:
        return f"but {named(giver)} does not run before it: bind inputs to earlier steps."
    if giver.operator in operators:
        writes: dict[str, Kind] = {each.name: each.kind for each in operators[giver.operator].outputs}
        if output not in writes:
            return f"but {named(giver)} writes {', '.join(sorted(writes)) or 'nothing'}."
        if field in reads and not _takes(reads[field], writes[output]):
            return f"of kind {writes[output]}, but {call.operator} reads `{field}` as {reads[field]}."
    return None


def _kinds_read(call: Call, operators: Mapping[str, type[Operator]]) -> dict[str, Kind]:
    return {each.name: each.kind for each in operators[call.operator].inputs} if call.operator in operators else {}


def _takes(reads: Kind, writes: Kind) -> bool:
    """True for an input that values of that kind can be bound to: programs are texts, and texts may be one text."""
    if reads == "texts":
        return writes != "flag"
    return reads == writes or {reads, writes} == {"text", "code"}
