"""The interpreter against a slow evaluator that is plainly right: one step after the other, no cache, no tasks.

Both run random workflows of random operators, whose results are a hash of all that they read.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowjax.canvas.cache import Cache
from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow
from flowjax.canvas.operators import Context, Operator, OperatorError
from flowjax.canvas.run import run
from flowjax.canvas.values import Field, Kind, Problem, State, Value, WorkflowRun
from tests.canvas.toy_operators import Echo

PROBLEMS = {"math": Problem("What is 6 times 7?", "math"), "code": Problem("Write a program.", "code")}
OPTIONAL = {"plan", "feedback"}  # of the inputs
READS = {  # operator -> inputs; those of Solve and Code are all optional
    "Solve": ("problem", "answer", "plan"),
    "Code": ("problem", "code", "feedback"),
    "Plan": ("problem",),
    "Review": ("answer",),
    "Test": ("code",),
    "Merge": ("candidates",),
    "MergeCode": ("candidates",),
    "Perhaps": ("answer", "plan"),
    "Fragile": ("answer", "feedback"),
    "Broken": ("code",),
}
WRITES = {
    "Solve": ("answer",),
    "Code": ("code",),
    "Plan": ("plan",),
    "Review": ("passed", "feedback"),
    "Test": ("passed",),
    "Merge": ("answer",),
    "MergeCode": ("code",),
    "Perhaps": ("answer", "feedback"),
    "Fragile": ("answer",),
    "Broken": ("code",),
}
CHECKERS = {"Review", "Test"}
KINDS: dict[str, Kind] = {"passed": "flag", "candidates": "texts", "code": "code"}


def work(name: str, instruction: str, inputs: State) -> dict[str, Value] | None:
    """What an operator makes of its inputs, None where it fails. Few different values, so that many coincide."""
    digest = hashlib.sha256(repr((name, instruction, sorted(inputs.items()))).encode()).digest()[0]
    if (name == "Fragile" and digest % 3 == 0) or (name == "Broken" and digest % 2 == 0):
        return None
    values: dict[str, Value] = {}
    for output in WRITES[name]:
        if name == "Perhaps" and digest % 2 == 0 and output == "answer":
            continue
        values[output] = digest % 3 == 0 if output == "passed" else f"{output}{digest % 4}"
    return values


def required(name: str, input_name: str) -> bool:
    return (name not in ("Solve", "Code") and input_name not in OPTIONAL) or input_name == "problem"


# The slow evaluator.


@dataclass
class Failed(Exception):
    pass


@dataclass
class World:
    """The state and what else steps may see, copied for every branch."""

    state: dict[str, Value]
    outputs: dict[str, dict[str, Value]]  # node -> its newest
    seed: tuple = ()
    log: list[tuple] = field(default_factory=list)  # (node, inputs, outputs or None, seed) of every call, in order


def evaluate(node: Node, world: World, problem: Problem) -> list[tuple[str, Value]]:
    """Everything that the node has written, in order. Raises Failed."""
    match node:
        case Call():
            return evaluate_call(node, world)
        case Sequence(steps):
            return [item for step in steps for item in evaluate(step, world, problem)]
        case Conditional(condition, then, otherwise):
            written = evaluate(condition, world, problem)
            passed = [value for name, value in written if name == "passed"]
            branch = then if passed and passed[-1] else otherwise
            return written + (evaluate(branch, world, problem) if branch else [])
        case Loop(body, count):
            written = []
            for _ in range(count):
                for step in body.steps if isinstance(body, Sequence) else [body]:
                    new = evaluate(step, world, problem)
                    written += new
                    if isinstance(step, Call) and step.operator in CHECKERS and ("passed", True) in new:
                        return written
            return written
        case Parallel(branches):
            return evaluate_parallel(branches, world, problem)


def evaluate_parallel(branches: tuple[Node, ...], world: World, problem: Problem) -> list[tuple[str, Value]]:
    wanted = "code" if problem.kind == "code" else "answer"
    candidates, outputs = [], {}
    for index, branch in enumerate(branches):
        equals = sum(outline(other) == outline(branch) for other in branches[:index])
        own = World(dict(world.state), dict(world.outputs), (*world.seed, equals))
        try:
            answers = [value for name, value in evaluate(branch, own, problem) if name == wanted]
            candidates += answers[-1:]
        except Failed:
            pass
        world.log += own.log
        outputs |= own.outputs
    world.outputs |= outputs
    world.state.pop("candidates", None)
    if candidates:
        world.state["candidates"] = tuple(candidates)
    return []


def evaluate_call(call: Call, world: World) -> list[tuple[str, Value]]:
    bound = dict(call.inputs)
    inputs: dict[str, Value] = {}
    for name in READS[call.operator]:
        if name in bound:
            node_id, _, output = bound[name].partition(".")
            value = world.outputs.get(node_id, {}).get(output)
        else:
            value = world.state.get(name)
        if value is not None:
            inputs[name] = value
    missing = any(required(call.operator, name) and name not in inputs for name in READS[call.operator])
    outputs = None if missing else work(call.operator, call.instruction, inputs)
    world.log.append((call, {} if missing else inputs, outputs, world.seed))
    if outputs is None:
        raise Failed
    world.outputs[call.id] = outputs
    world.state.update(outputs)
    return list(outputs.items())


def outline(node: Node) -> str:
    """The node as text without ids; ids of nodes inside it count from its start."""
    inside = [found.id for found in every(node)]

    def told(node: Node) -> str:
        match node:
            case Call():
                inputs = [(name, at(source)) for name, source in node.inputs]
                return f"{node.operator}/{node.instruction}/{node.backend}/{inputs}"
            case Sequence(steps):
                return f"({'>'.join(map(told, steps))})"
            case Parallel(branches):
                return f"[{','.join(map(told, branches))}]"
            case Loop(body, count):
                return f"{count}*{told(body)}"
            case Conditional(condition, then, otherwise):
                return f"{told(condition)}?{then and told(then)}:{otherwise and told(otherwise)}"

    def at(source: str) -> str:
        node_id, _, name = source.partition(".")
        return f"{inside.index(node_id) if node_id in inside else node_id}.{name}"

    return told(node)


def every(node: Node) -> list[Node]:
    match node:
        case Call():
            below: list[Node | None] = []
        case Sequence(steps):
            below = [*steps]
        case Parallel(branches):
            below = [*branches]
        case Loop(body):
            below = [body]
        case Conditional(condition, then, otherwise):
            below = [condition, then, otherwise]
    return [node, *(found for child in below if child is not None for found in every(child))]


# The same operators for the interpreter.


def operators(worked: Counter, delays: random.Random | None) -> dict[str, type[Operator]]:
    """They count how often they work on what, and give way to others at random."""

    def make(name: str) -> type[Operator]:
        async def at_work(self: Operator, inputs: State, context: Context) -> Mapping[str, Value]:
            worked[name, context.instruction, tuple(sorted(inputs.items()))] += 1
            for _ in range(delays.randrange(5) if delays else 0):
                await asyncio.sleep(0)
            outputs = work(name, context.instruction, inputs)
            if outputs is None:
                raise OperatorError("fragile") if name == "Fragile" else ZeroDivisionError("broken")
            return outputs

        reads = tuple(Field(read, KINDS.get(read, "text"), required=required(name, read)) for read in READS[name])
        writes = tuple(Field(out, KINDS.get(out, "text"), required=name != "Perhaps") for out in WRITES[name])
        role = "checker" if name in CHECKERS else "solver"
        attributes = {"name": name, "description": "", "role": role, "inputs": reads, "outputs": writes}
        return type(name, (Operator,), attributes | {"instruction": "", "run": at_work})

    return {name: make(name) for name in READS}


def random_node(choose: random.Random, depth: int) -> Node:
    """A call, or a structure around up to three nodes."""

    def inside(least: int = 0) -> tuple[Node, ...]:
        return tuple(random_node(choose, depth - 1) for _ in range(choose.randint(least, 3)))

    def inner() -> Node:
        return random_node(choose, depth - 1)

    match choose.choice(STRUCTURES) if depth else "call":
        case "sequence":
            return Sequence(inside())
        case "parallel":
            return Parallel(inside())
        case "twins":
            return Parallel((inner(),) * 2)
        case "conditional":
            checks = Sequence(tuple(Call(choose.choice(("Review", "Test"))) for _ in range(choose.randint(1, 2))))
            condition = choose.choice((inner(), checks))
            return Conditional(condition, choose.choice((None, inner())), choose.choice((None, inner())))
        case "loop":
            body = Sequence(inside(1)) if choose.random() < 0.7 else inner()
            return Loop(body, choose.randint(0, 3))
        case _:
            return random_call(choose)


STRUCTURES = ("call", "call", "sequence", "parallel", "twins", "twins", "conditional", "conditional", "loop")


def random_call(choose: random.Random) -> Call:
    name = choose.choice((*sorted(READS), *("Solve", "Code") * 3, "Review", "Test"))
    bindable = [read for read in READS[name] if read != "candidates"]
    inputs = ()
    if bindable and choose.random() < 0.35:
        source = f"n{choose.randint(1, 12)}.{choose.choice(('answer', 'code', 'plan', 'feedback'))}"
        inputs = ((choose.choice(bindable), source),)
    return Call(name, choose.choice(("", "again")), inputs=inputs)


@st.composite
def workflows(draw: st.DrawFn) -> Workflow:
    """Mostly with an answer and a program to begin with, since most operators need one."""
    choose = random.Random(draw(st.integers(0, 2**32)))
    start = (Call("Solve"), Call("Code")) if choose.random() < 0.7 else ()
    steps = tuple(random_node(choose, 3) for _ in range(draw(st.integers(0, 6))))
    return Workflow(Sequence((*start, *steps))).numbered()


WORKFLOWS = workflows()


def expected(workflow: Workflow, problem: Problem) -> tuple[str, World]:
    world = World({"problem": problem.text}, {})
    try:
        evaluate(workflow.root, world, problem)
        status = "ok" if any(True for _ in workflow.calls()) else "empty"
    except Failed:
        status = "error"
    return status, world


def interpreted(workflow: Workflow, problem: Problem, worked: Counter, seed: int | None, **options) -> WorkflowRun:
    library = operators(worked, None if seed is None else random.Random(seed))
    backends = {"b": Echo()}
    return asyncio.run(run(workflow, problem, operators=library, backends=backends, default_backend="b", **options))


def visits(result: WorkflowRun) -> list[tuple]:
    return [(node.node_id, dict(node.inputs), node.outputs if node.status == "ok" else None) for node in result.trace]


@settings(max_examples=120, deadline=None)
@given(WORKFLOWS, st.sampled_from(sorted(PROBLEMS)), st.integers(0, 99))
def test_the_interpreter_does_what_the_slow_evaluator_does(workflow, kind, seed):
    problem = PROBLEMS[kind]
    status, world = expected(workflow, problem)
    wanted = [(call.id, inputs, outputs) for call, inputs, outputs, _ in world.log]
    for max_concurrent, delays in ((1, None), (2, seed), (8, seed)):
        worked: Counter = Counter()
        result = interpreted(workflow, problem, worked, delays, max_concurrent=max_concurrent)
        assert visits(result) == wanted
        assert (result.status, result.state) == (status, world.state)
        assert result.answer == world.state.get("code" if kind == "code" else "answer", "")
        ran = Counter(key(call, inputs) for call, inputs, _, _ in world.log if has_all(call, inputs))
        assert worked == ran


@settings(max_examples=80, deadline=None)
@given(WORKFLOWS, st.sampled_from(sorted(PROBLEMS)), st.integers(0, 99))
def test_a_cache_changes_nothing_but_how_often_operators_work(workflow, kind, seed):
    """Once for every different call that succeeds. Failures are not kept, but calls at one time share them."""
    problem = PROBLEMS[kind]
    status, world = expected(workflow, problem)
    cache, worked = Cache(), Counter()
    for turn in range(2):
        result = interpreted(workflow, problem, worked, seed + turn, cache=cache)
        assert visits(result) == [(call.id, inputs, outputs) for call, inputs, outputs, _ in world.log]
        assert (result.status, result.state) == (status, world.state)
    seeds: dict[tuple, set] = {}
    failures: Counter = Counter()
    for call, inputs, outputs, path in world.log:
        if outputs is not None:
            seeds.setdefault(key(call, inputs), set()).add(seed_of(path))
        elif has_all(call, inputs):
            failures[key(call, inputs)] += 2
    assert {what: times for what, times in worked.items() if what not in failures} == {
        what: len(different) for what, different in seeds.items()
    }
    assert all(2 <= worked[what] <= times for what, times in failures.items())


def seed_of(path: tuple) -> tuple:
    """Paths with equal seeds are equal: the first of equal branches keeps the seed around it."""
    return tuple((level, index) for level, index in enumerate(path) if index)


def key(call: Call, inputs: State) -> tuple:
    return call.operator, call.instruction, tuple(sorted(inputs.items()))


def has_all(call: Call, inputs: State) -> bool:
    return all(name in inputs or not required(call.operator, name) for name in READS[call.operator])


@pytest.mark.parametrize("kind", sorted(PROBLEMS))
def test_random_workflows_reach_every_construct_and_ending(kind):
    """Guards the two tests above against comparing nothing."""
    seen: Counter = Counter()

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(WORKFLOWS)
    def look(workflow):
        status, world = expected(workflow, PROBLEMS[kind])
        seen[status] += 1
        seen.update(outputs is not None for *_, outputs, _ in world.log)
        seen["candidates"] += "candidates" in world.state
        seen["several seeds"] += len({seed_of(path) for *_, path in world.log}) > 1
        seen["bound"] += any(call.inputs for call, inputs, _, _ in world.log if inputs)

    look()
    assert all(seen[what] >= 5 for what in ("ok", "error", True, False, "candidates", "several seeds", "bound")), seen
