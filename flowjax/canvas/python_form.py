"""The Python form of workflows: a file of plain statements that makes the same requests as `flowjax.canvas.run`.

    Path("workflow.py").write_text(python_form(workflow, problem, backends={"small": {...}}, default_backend="small"))

A parallel is a function for each branch, a conditional an `if`, a loop a `for`. The file needs the operators of
flowjax.canvas, and neither the interpreter's graph nor a world. It has no cache and no budget.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flowjax.canvas.context import Sampling
from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Workflow, steps_of
from flowjax.canvas.graph import Sequence as Steps
from flowjax.canvas.operators.base import Operator
from flowjax.canvas.run import branch_seeds
from flowjax.canvas.text import show
from flowjax.canvas.values import Problem

_SAMPLING = Sampling()
_INDENT = "    "
_DEEPEST = 8  # level of a statement; what is deeper is a function of its own, since Python bounds nested blocks
_FILE = '''"""{title}

Written by flowjax.canvas, whose operators it needs. `python FILE [problem]` prints the answer.
"""

import asyncio
import sys

from flowjax.canvas.backends.base import BackendError, BackendUnavailable
from flowjax.canvas.backends.config import open_backends
from flowjax.canvas.context import Budget, CallContext, Meter, Sampling, Sandbox
from flowjax.canvas.graph import Call
from flowjax.canvas.operators.base import OperatorError
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.run import fault_of, read_inputs
from flowjax.canvas.values import Problem

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
        self.outputs[id] = outputs
        self.state.update(outputs)
        self.written |= set(outputs)
        if "passed" in outputs:
            self.checks.append(outputs["passed"] is True)
        return outputs.get("passed") is True

    async def side_by_side(self, *branches):
        """Run branches (a function and its seed each) on copies of the state; their answers become the candidates."""
        steps = [Steps(self.run, dict(self.state), dict(self.outputs), seed) for _, seed in branches]
        work = [branch(inner) for (branch, _), inner in zip(branches, steps)]
        ends = await asyncio.gather(*work, return_exceptions=True)
        candidates = []
        for inner, end in zip(steps, ends):
            if isinstance(end, BackendUnavailable) or not isinstance(end, (OperatorError, BackendError, type(None))):
                raise end
            self.outputs |= inner.outputs
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
        steps = Steps(run, {{"problem": problem.text}}, {{}}, SEED)
        try:
            await workflow(steps)
        except (OperatorError, BackendError) as error:
            print(error, file=sys.stderr)
        return steps.state.get(answer_field(problem), "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        PROBLEM = Problem(sys.argv[1], PROBLEM.kind)
    print(asyncio.run(main(PROBLEM)))
'''


def python_form(
    workflow: Workflow,
    problem: Problem,
    operators: Mapping[str, type[Operator]],
    *,
    backends: Mapping[str, Mapping[str, Any]],
    default_backend: str,
    extra_operators: Sequence[str] = (),
    seed: int = 0,
    sampling: Sampling = _SAMPLING,
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
    writer = _Writer(operators)
    writer.add("workflow", numbered.root, seed, 0)
    return _FILE.format(
        title=textwrap.fill(title, 116, break_long_words=False, break_on_hyphens=False) or "(an empty workflow)",
        extra=list(extra_operators),
        backends=_literal(backends),
        default=default_backend,
        sampling=sampling,
        seed=seed,
        concurrent=max_concurrent,
        problem=repr(problem),
        body="\n\n\n".join(writer.functions),
    )


def _literal(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The config as Python: what JSON has, with Python's names of constants."""
    return repr(json.loads(json.dumps({name: dict(given) for name, given in config.items()})))


class _Writer:
    """Functions of a workflow, those of branches and of what is deep inside before those that use them."""

    def __init__(self, operators: Mapping[str, type[Operator]]):
        self._operators = operators
        self.functions: list[str] = []

    def add(self, name: str, node: Node, seed: int, level: int) -> None:
        """Write the function of a node. `level` is how many parallels are around it."""
        lines = self._node(node, seed, level, 1) or ["pass"]
        self.functions.append("\n".join([f"async def {name}(steps):", *_indented(lines)]))

    def _node(self, node: Node, seed: int, level: int, depth: int) -> list[str]:
        """The statements of a node, from no indentation on; `depth` is how deep they will stand."""
        if depth > _DEEPEST and isinstance(node, Conditional | Loop):
            self.add(f"node_{node.id}", node, seed, level)
            return [f"await node_{node.id}(steps)"]
        match node:
            case Call():
                return [f"await {_call(node)}"]
            case Steps(inner):
                return [line for step in inner for line in self._node(step, seed, level, depth)]
            case Parallel():
                return [self._parallel(node, seed, level)]
            case Conditional(condition, then, otherwise):
                branches = [
                    _indented(["pass  # done"] if branch is None else self._node(branch, seed, level, depth + 1))
                    for branch in (then, otherwise)
                ]
                checks = f"checks_{node.id}"
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
        for branch, branch_seed in zip(node.branches, branch_seeds(node, seed, level), strict=True):
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


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"{_INDENT}{line}" for line in lines]
