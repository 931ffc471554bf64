"""The JSON form of workflows: what is stored and sent, read back exactly, ids and the next number included.

    {"next_number": 5, "steps": [
        {"kind": "call", "id": "n1", "operator": "Custom", "instruction": "Be brief.", "backend": "small",
         "inputs": {"answer": "n0.answer"}},
        {"kind": "conditional", "id": "n2", "condition": {...}, "then": null, "otherwise": {...}},
        {"kind": "parallel", "id": "n3", "branches": [...]},
        {"kind": "sequence", "id": "n4", "steps": [...]},
        {"kind": "loop", "id": "n5", "body": {...}, "count": 2}]}

A field that is bound several times needs pairs: "inputs": [["candidates", "n1.answer"], ["candidates", "n2.answer"]].
What is empty may be left out; `next_number` too, and is then the first that no node has.
"""

from collections.abc import Mapping
from typing import Any

from flowjax.canvas.graph import MAX_DEPTH, Call, Conditional, Loop, Node, Parallel, Sequence, Workflow, WorkflowError
from flowjax.canvas.text import NAME

_FIELDS = {
    "call": {"operator", "instruction", "backend", "inputs"},
    "sequence": {"steps"},
    "parallel": {"branches"},
    "conditional": {"condition", "then", "otherwise"},
    "loop": {"body", "count"},
}


def to_json(workflow: Workflow) -> dict[str, Any]:
    """Form of a workflow that `json.dumps` takes."""
    return {"next_number": workflow.next_number, "steps": [_node_to_json(step) for step in workflow.root.steps]}


def from_json(value: Any) -> Workflow:
    """The workflow; nodes without an id get one.

    Raises:
        WorkflowError: it is none; the message starts with the JSON path of what is wrong.
    """
    given = _object(value, "$", {"next_number", "steps"})
    steps = tuple(_node(step, f"$.steps[{i}]", 1) for i, step in enumerate(_list(given, "steps", "$")))
    next_number = _whole(given.get("next_number", 1), "$.next_number")
    return Workflow(Sequence(steps), max(1, next_number)).numbered()


def _node_to_json(node: Node) -> dict[str, Any]:
    match node:
        case Call(operator, instruction, backend, inputs):
            repeated = len(dict(inputs)) < len(inputs)
            bound = [list(pair) for pair in inputs] if repeated else dict(inputs)
            given = {"instruction": instruction, "backend": backend, "inputs": bound}
            fields = {"operator": operator, **{name: value for name, value in given.items() if value}}
        case Sequence(steps):
            fields = {"steps": [_node_to_json(step) for step in steps]}
        case Parallel(branches):
            fields = {"branches": [_node_to_json(branch) for branch in branches]}
        case Conditional(condition, then, otherwise):
            fields = {
                "condition": _node_to_json(condition),
                "then": then and _node_to_json(then),
                "otherwise": otherwise and _node_to_json(otherwise),
            }
        case Loop(body, count):
            fields = {"body": _node_to_json(body), "count": count}
    return {"kind": type(node).__name__.lower(), **({"id": node.id} if node.id else {}), **fields}


def _node(value: Any, path: str, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise WorkflowError(f"{path}: nodes are inside one another more than {MAX_DEPTH} deep.")
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise WorkflowError(f'{path}: expected an object with a "kind" of {", ".join(_FIELDS)}, got {_excerpt(value)}.')
    given = _object(value, path, {"kind", "id", *_FIELDS[kind]})
    id = _name(given, "id", path) if given.get("id") else ""

    def inside(name: str) -> Node:
        return _node(given.get(name), f"{path}.{name}", depth + 1)

    def all_inside(name: str) -> tuple[Node, ...]:
        nodes = _list(given, name, path)
        return tuple(_node(node, f"{path}.{name}[{i}]", depth + 1) for i, node in enumerate(nodes))

    match kind:
        case "call":
            instruction, backend = _text(given, "instruction", path), _text(given, "backend", path)
            return Call(_name(given, "operator", path), instruction, backend, _bindings(given, path), id)
        case "sequence":
            return Sequence(all_inside("steps"), id)
        case "parallel":
            return Parallel(all_inside("branches"), id)
        case "conditional":
            then, otherwise = (None if given.get(name) is None else inside(name) for name in ("then", "otherwise"))
            return Conditional(inside("condition"), then, otherwise, id)
    return Loop(inside("body"), _whole(given.get("count"), f"{path}.count"), id)


def _bindings(given: Mapping[str, Any], path: str) -> tuple[tuple[str, str], ...]:
    inputs = given.get("inputs", {})
    pairs = list(inputs.items()) if isinstance(inputs, Mapping) else inputs
    if (
        not isinstance(pairs, list)
        or inputs == []
        or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    ):
        raise WorkflowError(f"{path}.inputs: expected an object of field -> node.field, got {_excerpt(inputs)}.")
    for field, source in pairs:
        parts = source.split(".") if isinstance(source, str) else ()
        if len(parts) != 2 or not all(isinstance(part, str) and NAME.fullmatch(part) for part in (field, *parts)):
            raise WorkflowError(f'{path}.inputs.{field}: expected "node.field", got {_excerpt(source)}.')
    return tuple((field, source) for field, source in pairs)


def _object(value: Any, path: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise WorkflowError(f"{path}: expected an object, got {_excerpt(value)}.")
    for name in value:
        if name not in known:
            raise WorkflowError(f"{path}: no field {_excerpt(name)} here; there are {', '.join(sorted(known))}.")
    return value


def _list(given: Mapping[str, Any], name: str, path: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list):
        raise WorkflowError(f"{path}.{name}: expected a list, got {_excerpt(value)}.")
    return value


def _text(given: Mapping[str, Any], name: str, path: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise WorkflowError(f"{path}.{name}: expected a string, got {_excerpt(value)}.")
    return value


def _name(given: Mapping[str, Any], name: str, path: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise WorkflowError(f"{path}.{name}: expected letters, digits and `_`, got {_excerpt(value)}.")
    return value


def _whole(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WorkflowError(f"{path}: expected a whole number, got {_excerpt(value)}.")
    return value


def _excerpt(value: Any) -> str:
    match value:
        case Mapping():
            return f"an object with {', '.join(map(str, list(value)[:5])) or 'nothing'}"
        case list():
            return f"a list of {len(value)}"
        case None:
            return "nothing"
    return repr(value)[:60]
