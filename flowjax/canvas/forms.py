"""Other forms of workflows than text: JSON, which is read back exactly, and a Python file.

The JSON form is stored and sent, ids and the next number included.

    {"next_number": 5, "steps": [
        {"kind": "call", "id": "n1", "operator": "Custom", "instruction": "Be brief.", "backend": "small",
         "inputs": {"answer": "n0.answer"}},
        {"kind": "conditional", "id": "n2", "condition": {...}, "then": null, "otherwise": {...}},
        {"kind": "parallel", "id": "n3", "branches": [...]},
        {"kind": "sequence", "id": "n4", "steps": [...]},
        {"kind": "loop", "id": "n5", "body": {...}, "count": 2}]}

A field that is bound several times needs pairs: "inputs": [["candidates", "n1.answer"], ["candidates", "n2.answer"]].
What is empty may be left out; `next_number` too, and is then the first that no node has.

The Python form is a file of plain statements that makes the same requests as `flowjax.canvas.run`.

    Path("workflow.py").write_text(python_form(workflow, problem, backends={"small": {...}}, default_backend="small"))

A parallel is a function for each branch, a conditional an `if`, a loop a `for`. The file needs the operators of
flowjax.canvas, and neither the interpreter's graph nor a world. It has no cache and no budget.
"""

import json
import textwrap
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

from flowjax.canvas.context import Sampling
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
    steps_of,
)
from flowjax.canvas.operators import Operator
from flowjax.canvas.run import as_asked, branch_seeds
from flowjax.canvas.text import NAME, parse, show
from flowjax.canvas.values import Problem

_FIELDS = {
    "call": {"operator", "instruction", "backend", "inputs"},
    "sequence": {"steps"},
    "parallel": {"branches"},
    "conditional": {"condition", "then", "otherwise"},
    "loop": {"body", "count"},
}


def to_json(workflow: Workflow) -> dict[str, Any]:
    """The workflow as plain data for `json.dumps`."""
    return {"next_number": workflow.next_number, "steps": [_node_to_json(step) for step in workflow.root.steps]}


def from_json(value: Any) -> Workflow:
    """The workflow of `to_json`'s form; nodes without an id get one.

    Raises:
        WorkflowError: the value is no workflow; the message starts with the JSON path of the fault.
    """
    given = _object(value, "$", {"next_number", "steps"})
    steps = tuple(_node(step, f"$.steps[{i}]", 1) for i, step in enumerate(_list(given, "steps", "$")))
    next_number = _whole(given.get("next_number", 1), "$.next_number")
    return Workflow(Sequence(steps), max(1, next_number)).numbered()


def read_workflow(source: str) -> Workflow:
    """The workflow of a text, or of a file that ends in `.json`.

    Raises:
        WorkflowError: it is none, or the file cannot be read.
    """
    if not source.endswith(".json"):
        return parse(source)
    try:
        return from_json(json.loads(Path(source).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkflowError(f"{source} cannot be read ({error}): give a file of a workflow's JSON form") from error


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


# -------------------------------------------------------------------------------------- as Python

_INDENT = "    "
_DEEPEST = 8  # level of a statement; deeper ones get their own function, since Python limits nested blocks
_FILE = '''"""{title}

Written by flowjax.canvas, whose operators it needs. `python FILE [problem]` prints the answer.
"""

import asyncio
import sys
from collections import ChainMap

from flowjax.canvas.backends import BackendError, BackendUnavailable
from flowjax.canvas.backends.config import open_backends
from flowjax.canvas.context import Budget, CallContext, Meter, Sampling, Sandbox
from flowjax.canvas.graph import Call
from flowjax.canvas.operators import OperatorError
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.run import fault_of, read_inputs
from flowjax.canvas.values import Problem, sendable
from flowjax.grading.answers import options_of

OPERATORS = load_operators({extra!r})
BACKENDS = {backends}
DEFAULT_BACKEND = {default!r}
SAMPLING = {sampling!r}
SEED, MAX_CONCURRENT = {seed}, {concurrent}
PROBLEM = {problem}


class Steps:
    """The state of a workflow, or of one branch of it, and what changes it."""

    def __init__(self, run, state, outputs, seed):
        self.run, self.state, self.outputs, self.seed = run, state, outputs, seed
        self.checks, self.written = [], set()

    async def call(self, id, operator, instruction="", backend=DEFAULT_BACKEND, inputs=()):
        """Have an operator work on the state; true if it is a check that passes."""
        kind, run = OPERATORS[operator], self.run
        given = read_inputs(Call(operator, instruction, backend, inputs, id), OPERATORS, self.state, self.outputs)
        context = CallContext(
            run["problem"], instruction or kind.instruction, run["backends"][backend], operator=kind.name, inputs=given,
            seed=self.seed, sampling=SAMPLING, sandbox=Sandbox(), meter=run["meter"], slots=run["requests"],
        )
        try:
            async with run["calls"]:
                outputs = dict(await kind().run(dict(given), context))
        except (OperatorError, BackendError):
            raise
        except Exception as error:
            raise context.away or OperatorError(f"{{type(error).__name__}}: {{error}}") from error
        if context.away is not None:
            raise context.away
        if fault := fault_of(kind, outputs):
            raise OperatorError(fault)
        outputs = {{name: sendable(value) for name, value in outputs.items()}}
        self.outputs[id] = outputs
        self.state.update(outputs)
        self.written |= set(outputs)
        if "passed" in outputs:
            self.checks.append(outputs["passed"] is True)
        return outputs.get("passed") is True

    async def side_by_side(self, *branches):
        """Run branches (a function and its seed each) on copies of the state; their answers become the candidates."""
        steps = [Steps(self.run, dict(self.state), self.outputs.new_child(), seed) for _, seed in branches]
        work = [branch(inner) for (branch, _), inner in zip(branches, steps)]
        ends = await asyncio.gather(*work, return_exceptions=True)
        candidates = []
        for inner, end in zip(steps, ends):
            if isinstance(end, BackendUnavailable) or not isinstance(end, (OperatorError, BackendError, type(None))):
                raise end
            self.outputs.update(inner.outputs.maps[0])
            name = answer_field(self.run["problem"])
            if end is None and name in inner.written:
                candidates.append(inner.state[name])
        self.state.pop("candidates", None)
        if candidates:
            self.state["candidates"] = tuple(candidates)


def answer_field(problem):
    return "code" if problem.kind == "code" else "answer"


{body}


async def main(problem):
    async with open_backends(BACKENDS) as backends:
        run = {{
            "problem": problem, "backends": backends, "meter": Meter(Budget()),
            "calls": asyncio.Semaphore(MAX_CONCURRENT), "requests": asyncio.Semaphore(MAX_CONCURRENT),
        }}
        steps = Steps(run, {{"problem": problem.text}}, ChainMap(), SEED)
        try:
            await workflow(steps)
        except (OperatorError, BackendError) as error:
            print(error, file=sys.stderr)
        return steps.state.get(answer_field(problem), "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        options = options_of(sys.argv[1]) if PROBLEM.kind == "choice" else {{}}
        if PROBLEM.kind == "choice" and not options:
            sys.exit("the problem lists no options: put each on a line, such as `A. red`")
        PROBLEM = Problem(sys.argv[1], PROBLEM.kind, options=options)
    print(asyncio.run(main(PROBLEM)))
'''


def python_form(
    workflow: Workflow,
    problem: Problem,
    operators: Mapping[str, type[Operator]],
    *,
    backends: Mapping[str, Mapping[str, Any]],
    default_backend: str,
    extra_operators: Listed[str] = (),
    seed: int = 0,
    max_concurrent: int = 8,
) -> str:
    """A program that runs the workflow on the problem as `flowjax.canvas.run.run` does with the same arguments.

    Args:
        operators: those of the workflow, by name: a passing check ends a loop.
        backends: their config, which names keys by their variables.
        extra_operators: dotted paths of those that are not built in.
    """
    numbered = workflow.numbered()
    title = show(numbered, ids=True).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    writer = _Writer(operators, default_backend)
    writer.add("workflow", numbered.root, seed, 0)
    return _FILE.format(
        title=textwrap.fill(title, 116, break_long_words=False, break_on_hyphens=False) or "(an empty workflow)",
        extra=list(extra_operators),
        backends=_literal(backends),
        default=default_backend,
        sampling=Sampling(),
        seed=seed,
        concurrent=max_concurrent,
        problem=repr(problem),
        body="\n\n\n".join(writer.functions),
    )


def _literal(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The config as Python source: through JSON, so that it holds plain values only."""
    return repr(json.loads(json.dumps({name: dict(given) for name, given in config.items()})))


class _Writer:
    """Writes the functions of a workflow: those of branches and deep nodes before those that call them."""

    def __init__(self, operators: Mapping[str, type[Operator]], default_backend: str):
        self._operators, self._default_backend = operators, default_backend
        self.functions: list[str] = []

    def add(self, name: str, node: Node, seed: int, level: int) -> None:
        """Write the function of a node. `level` is how many parallels are around it."""
        lines = self._node(node, seed, level, 1) or ["pass"]
        self.functions.append("\n".join([f"async def {name}(steps):", *_indented(lines)]))

    def _node(self, node: Node, seed: int, level: int, depth: int) -> list[str]:
        """The statements of a node, not indented; `depth` is the level at which they will stand."""
        if depth > _DEEPEST and isinstance(node, Conditional | Loop):
            self.add(f"node_{node.id}", node, seed, level)
            return [f"await node_{node.id}(steps)"]
        match node:
            case Call():
                return [f"await {_call(node)}"]
            case Sequence(inner):
                return [line for step in inner for line in self._node(step, seed, level, depth)]
            case Parallel():
                return [self._parallel(node, seed, level)]
            case Conditional(condition, then, otherwise):
                branches = [
                    _indented(["pass  # done"] if branch is None else self._node(branch, seed, level, depth + 1))
                    for branch in (then, otherwise)
                ]
                checks = f"checks_{node.id}"
                # The last check that the condition itself made decides; without any it is false.
                started = [f"{checks} = len(steps.checks)", *self._node(condition, seed, level, depth)]
                return [*started, f"if any(steps.checks[{checks}:][-1:]):", *branches[0], "else:", *branches[1]]
            case Loop(body, count):
                lines = [line for step in steps_of(body) for line in self._repeated(step, seed, level, depth + 1)]
                return [f"for _ in range({count}):", *_indented(lines)]

    def _repeated(self, step: Node, seed: int, level: int, depth: int) -> list[str]:
        """A direct step of a loop, which ends where it is a check that passes."""
        if isinstance(step, Call) and self._operators[step.operator].role == "checker":
            return [f"if await {_call(step)}:", f"{_INDENT}break"]
        return self._node(step, seed, level, depth)

    def _parallel(self, node: Parallel, seed: int, level: int) -> str:
        named = []
        asked = tuple(as_asked(branch, self._operators, self._default_backend) for branch in node.branches)
        for branch, branch_seed in zip(node.branches, branch_seeds(Parallel(asked), seed, level), strict=True):
            name = f"branch_{node.id}_{len(named) + 1}"
            self.add(name, branch, branch_seed, level + 1)
            named.append(f"({name}, {branch_seed})")
        return f"await steps.side_by_side({', '.join(named)})"


def _call(call: Call) -> str:
    details = [repr(call.id), repr(call.operator)]
    details += [
        f"{name}={value!r}"
        for name, value in (("instruction", call.instruction), ("backend", call.backend), ("inputs", call.inputs))
        if value
    ]
    return f"steps.call({', '.join(details)})"


def _indented(lines: Listed[str]) -> list[str]:
    return [f"{_INDENT}{line}" for line in lines]
