"""Runs a workflow on a problem: an interpreter of its graph.

    result = await run(workflow, problem, operators=operators, backends={"small": backend}, default_backend="small")
    result.answer, result.status, result.usage

State rules. `problem` is there from the start. A call reads its inputs from the state (or from its bindings) and writes
its outputs. A branch of a parallel works on a copy; afterwards the state is as before, plus `candidates`: for each
branch that did not fail, in order, the newest answer (program, for a code problem) that it wrote. The newest answer in
the state at the end is the run's.

A call that fails ends the nodes that it is in, up to the nearest parallel, whose other branches go on. A backend that
is away ends the run: that is no failure of a call. The trace has the calls that were reached, in reading order,
whatever the concurrency.
"""

import asyncio
import dataclasses
import functools
import hashlib
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowjax.canvas.backends import Backend, BackendError, BackendUnavailable
from flowjax.canvas.cache import Cache, Outcome, key_of, problem_digest
from flowjax.canvas.context import UNLIMITED, Budget, BudgetSpent, CallContext, Meter, Sampling, Sandbox
from flowjax.canvas.graph import (
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    Sequence,
    Workflow,
    children,
    with_children,
    without_ids,
)
from flowjax.canvas.operators import Operator, OperatorError
from flowjax.canvas.values import (
    Field,
    Kind,
    NodeEvent,
    NodeRun,
    NodeStatus,
    Problem,
    RunStatus,
    State,
    Usage,
    Value,
    WorkflowRun,
    sendable,
)
from flowjax.grading.sandbox import IsolationError

Outputs = Mapping[str, State]  # node id -> outputs of its newest run
Operators = Mapping[str, type[Operator]]
OnEvent = Callable[[NodeEvent], None]
_log = logging.getLogger(__name__)
_SANDBOX = Sandbox()


async def run(
    workflow: Workflow,
    problem: Problem,
    *,
    operators: Operators,
    backends: Mapping[str, Backend],
    default_backend: str,
    cache: Cache | None = None,
    budget: Budget = UNLIMITED,
    max_concurrent: int = 8,
    seed: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int = 1024,
    retry_new_tokens: int = 4096,
    sandbox: Sandbox = _SANDBOX,
    on_event: OnEvent | None = None,
    stream: bool = False,
) -> WorkflowRun:
    """Run the workflow. Failures inside it are in the result and not raised.

    Calls without an id are numbered as `Workflow.numbered` does. The same workflow on the same problem sends the same
    requests, seeds included, whatever `max_concurrent` is. Where it runs programs and this machine cannot isolate them,
    nothing is asked: the status is "executor_error".

    Args:
        cache: results of earlier runs; without one none are kept.
        max_concurrent: most operators at work at the same time; also most requests and programs.
        retry_new_tokens: token limit of a request that is sent again because its reply was cut at `max_new_tokens`.
        sandbox: where operators' programs run.
        on_event: called in the event loop when a call starts and when it ends.
        stream: call `on_event` with each reply so far, too, while it is sampled, where the backend can.

    Raises:
        ValueError: `default_backend` or `max_concurrent` makes no sense.
    """
    if default_backend not in backends:
        raise ValueError(f"default_backend is {default_backend!r}, but the backends are {sorted(backends)}: name one")
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent is {max_concurrent}: give 1 or more")
    calls = list(workflow.calls())
    if not all(call.id for call in calls):
        workflow = workflow.numbered()
    meter = Meter(budget)
    sampling = Sampling(temperature, top_p, max_new_tokens, retry_new_tokens)
    interpreter = _Interpreter(
        problem, operators, backends, default_backend, cache, sampling, sandbox, meter, max_concurrent, on_event, stream
    )
    scope = _Scope({"problem": problem.text}, ChainMap(), seed)
    status: RunStatus = "ok" if calls else "empty"
    error = ""
    try:
        if any(call.operator in operators and operators[call.operator].runs_programs for call in calls):
            await asyncio.to_thread(sandbox.require)  # it blocks for a trial start
        await interpreter.run(workflow.root, scope)
    except IsolationError as none:
        status, error = "executor_error", str(none)
    except _Failed as failure:
        status, error = "error", str(failure)
    except BudgetSpent as spent:
        status, error = "budget", str(spent)
    except BackendUnavailable as away:
        status, error = "executor_error", str(away)
    answer = scope.state.get(answer_field(problem), "")
    return WorkflowRun(
        answer if isinstance(answer, str) else "",
        status,
        scope.state,
        tuple(scope.trace),
        meter.usage,
        meter.seconds,
        error,
        meter.unanswered_s,
    )


class _Failed(Exception):
    """A call has failed, and is in the trace."""


@dataclass(slots=True)
class _Scope:
    """State that the calls of one branch see and leave behind."""

    state: dict[str, Value]
    outputs: ChainMap[str, State]  # node id -> outputs of its newest run; the first map has this scope's calls
    seed: int
    level: int = 0  # how many parallels are around it
    written: set[str] = dataclasses.field(default_factory=set)
    checks: list[bool] = dataclasses.field(default_factory=list)  # every `passed` written here, in order
    trace: list[NodeRun] = dataclasses.field(default_factory=list)

    def branch(self, seed: int) -> "_Scope":
        """A scope for one branch of a parallel, with a copy of the state and no checks yet.

        The branch's outputs go into the new first map of the `ChainMap`; those from before are still found behind it.
        """
        return _Scope(dict(self.state), self.outputs.new_child(), seed, self.level + 1)

    def write(self, node_id: str, outputs: State) -> None:
        """Store a call's outputs."""
        self.outputs[node_id] = outputs
        self.state.update(outputs)
        self.written.update(outputs)
        if "passed" in outputs:
            self.checks.append(outputs["passed"] is True)


class _Interpreter:
    """One run."""

    def __init__(
        self,
        problem: Problem,
        operators: Operators,
        backends: Mapping[str, Backend],
        default_backend: str,
        cache: Cache | None,
        sampling: Sampling,
        sandbox: Sandbox,
        meter: Meter,
        max_concurrent: int,
        on_event: OnEvent | None,
        stream: bool,
    ):
        self._problem, self._operators = problem, operators
        self._backends, self._default_backend = backends, default_backend
        self._cache, self._sampling, self._sandbox, self._meter = cache, sampling, sandbox, meter
        # Two semaphores, since a call that holds a slot waits for its requests; and parallels and loops hold none while
        # they wait for what is inside them. Otherwise all slots could be held by those that wait: a deadlock.
        self._call_slots = asyncio.Semaphore(max_concurrent)
        self._request_slots = asyncio.Semaphore(max_concurrent)
        self._on_event, self._stream = on_event, stream and on_event is not None
        self._turns: dict[str, int] = {}
        self._problem_key = problem_digest(problem) if cache is not None else ""
        self._sampling_key = repr((sampling, sandbox))

    async def run(self, node: Node, scope: _Scope) -> None:
        """Run the node in the scope.

        Raises:
            _Failed: a call outside a parallel has failed.
            BudgetSpent, BackendUnavailable: the run is over.
        """
        match node:
            case Call():
                await self._call(node, scope)
            case Sequence(steps):
                for step in steps:
                    await self.run(step, scope)
            case Parallel():
                await self._parallel(node, scope)
            case Conditional():
                await self._conditional(node, scope)
            case Loop():
                await self._loop(node, scope)

    async def _parallel(self, parallel: Parallel, scope: _Scope) -> None:
        branches = [as_asked(branch, self._operators, self._default_backend) for branch in parallel.branches]
        scopes = [scope.branch(seed) for seed in branch_seeds(Parallel(tuple(branches)), scope.seed, scope.level)]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._branch(branch, inner))
                for branch, inner in zip(parallel.branches, scopes, strict=True)
            ]
        ends = [task.result() for task in tasks]
        answer = answer_field(self._problem)
        candidates = []
        for inner, end in zip(scopes, ends, strict=True):
            scope.trace += inner.trace
            scope.outputs.update(inner.outputs.maps[0])
            value = inner.state.get(answer)
            if end is None and answer in inner.written and isinstance(value, str):
                candidates.append(value)
        scope.state.pop("candidates", None)
        if candidates:
            scope.state["candidates"] = tuple(candidates)
        # Raised only here, after all branches have ended, so that the trace has them all. An outage comes before a
        # spent budget: after one the run says nothing about the workflow.
        for ending in (BackendUnavailable, BudgetSpent):
            for end in ends:
                if isinstance(end, ending):
                    raise end

    async def _branch(self, branch: Node, scope: _Scope) -> Exception | None:
        """Run a branch; returns its error, since a raised one would make the task group cancel the other branches."""
        try:
            await self.run(branch, scope)
        except (_Failed, BudgetSpent, BackendUnavailable) as end:
            return end
        return None

    async def _conditional(self, conditional: Conditional, scope: _Scope) -> None:
        checks_before = len(scope.checks)
        await self.run(conditional.condition, scope)
        checks = scope.checks[checks_before:]  # of the condition alone; those inside a parallel stay in its branches
        branch = conditional.then if checks and checks[-1] else conditional.otherwise
        if branch is not None:
            await self.run(branch, scope)

    async def _loop(self, loop: Loop, scope: _Scope) -> None:
        steps = loop.body.steps if isinstance(loop.body, Sequence) else (loop.body,)
        for _ in range(loop.count):
            for step in steps:
                await self.run(step, scope)
                if isinstance(step, Call) and self._has_passed(step, scope):
                    return

    def _has_passed(self, call: Call, scope: _Scope) -> bool:
        return self._operators[call.operator].role == "checker" and scope.outputs[call.id].get("passed") is True

    async def _call(self, call: Call, scope: _Scope) -> None:
        self._turns[call.id] = turn = self._turns.get(call.id, 0) + 1
        started_s = time.perf_counter()
        self._tell(call, turn)
        inputs: State = {}
        context: CallContext | None = None
        cached = False
        ending: BudgetSpent | BackendUnavailable | None = None
        try:
            self._meter.start_step()
            operator, backend = self._operator(call), self._backend(call)
            inputs = read_inputs(call, self._operators, scope.state, scope.outputs)
            context = self._context(call, turn, operator, backend, inputs, scope.seed)
            self._meter.check_time()
            async with asyncio.timeout_at(self._meter.deadline_s):
                outcome, cached = await self._outcome(operator, backend, inputs, context, scope.seed)
        except OperatorError as error:
            outcome = Outcome(error=str(error))
        except (BudgetSpent, BackendUnavailable) as error:
            ending, outcome = error, Outcome(error=str(error))
        except TimeoutError:  # always the deadline: an operator's own TimeoutError is in its outcome
            ending = self._meter.time_over()
            outcome = Outcome(error=str(ending))
        status: NodeStatus = _status(ending, outcome)
        usage = Usage() if context is None else context.usage
        seconds = time.perf_counter() - started_s
        node_run = NodeRun(
            call.id, call.operator, status, turn, cached, inputs, outcome.outputs, usage, seconds, outcome.error
        )
        scope.trace.append(node_run)  # before anything is raised: failed calls are in the trace, too
        self._tell(call, turn, node_run)
        if ending is not None:
            raise ending
        if outcome.error:
            raise _Failed(f"{call.id} {call.operator}: {outcome.error}")
        scope.write(call.id, outcome.outputs)

    def _tell(self, call: Call, turn: int, node_run: NodeRun | None = None, text: str | None = None) -> None:
        if self._on_event is not None:
            self._on_event(NodeEvent(call.id, call.operator, turn, self._meter.seconds, node_run, text))

    def _operator(self, call: Call) -> type[Operator]:
        if (operator := self._operators.get(call.operator)) is None:
            raise OperatorError(f"there is no operator {call.operator}; there are {', '.join(sorted(self._operators))}")
        return operator

    def _backend(self, call: Call) -> Backend:
        if (backend := self._backends.get(call.backend or self._default_backend)) is None:
            raise OperatorError(f"there is no backend {call.backend}; there are {', '.join(sorted(self._backends))}")
        return backend

    def _context(
        self, call: Call, turn: int, operator: type[Operator], backend: Backend, inputs: State, seed: int
    ) -> CallContext:
        return CallContext(
            self._problem,
            call.instruction or operator.instruction,
            backend,
            operator=operator.name,
            inputs=inputs,
            seed=seed,
            sampling=self._sampling,
            sandbox=self._sandbox,
            meter=self._meter,
            slots=self._request_slots,
            on_text=(lambda text: self._tell(call, turn, text=text)) if self._stream else None,
        )

    async def _outcome(
        self, operator: type[Operator], backend: Backend, inputs: State, context: CallContext, seed: int
    ) -> tuple[Outcome, bool]:
        """The call's outcome, and whether it was in the cache."""
        if self._cache is None or not operator.cacheable:
            return await self._work(operator, inputs, context), False
        key = key_of(
            operator,
            context.instruction,
            inputs,
            problem=self._problem_key,
            backend=backend.identity,
            sampling=self._sampling_key,
            seed=seed,
        )
        return await self._cache.through(key, lambda: self._work(operator, inputs, context))

    async def _work(self, operator: type[Operator], inputs: State, context: CallContext) -> Outcome:
        """Run the operator. Any exception but an outage or a spent budget fails the call alone, a plug-in's too."""
        async with self._call_slots:
            try:
                outputs = await operator().run(dict(inputs), context)
            except BackendUnavailable:  # before BackendError, of which it is one
                raise
            except (OperatorError, BackendError) as error:
                return Outcome(error=str(error) or type(error).__name__)
            except BudgetSpent:
                raise
            except asyncio.CancelledError:
                # Cancelled from outside, as by the deadline: passed on. Raised by the operator itself: its failure.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                return Outcome(error="CancelledError: the operator was cancelled from inside")
            except (Exception, SystemExit) as error:  # which would end the event loop, and all other workflows in it
                if context.away is not None:
                    raise context.away from error
                _log.warning("Operator %s failed", operator.name, exc_info=True)
                return Outcome(error=f"{type(error).__name__}: {error}")
        # The operator may have caught these errors and gone on: the run ends all the same.
        if context.away is not None:
            raise context.away
        if context.spent is not None:
            raise context.spent
        if fault := fault_of(operator, outputs):
            return Outcome(error=fault)
        # JSON can spell a lone surrogate in escapes, and a plug-in can make one: `ask` saw the raw text only.
        return Outcome({name: sendable(value) for name, value in outputs.items()}, keep=context.complete)


def _status(ending: BudgetSpent | BackendUnavailable | None, outcome: Outcome) -> NodeStatus:
    if isinstance(ending, BackendUnavailable):
        return "executor_error"
    return "budget" if ending else "error" if outcome.error else "ok"


def answer_field(problem: Problem) -> str:
    """The field of the state in which an answer to the problem stands."""
    return "code" if problem.kind == "code" else "answer"


# -------------------------------------------------------------------------------- what a call reads and writes


def read_inputs(call: Call, operators: Operators, state: State, outputs: Outputs) -> dict[str, Value]:
    """The call's inputs by name. Optional ones that no call has written yet are left out.

    An input of kind texts can be bound several times: the values are joined into one tuple.

    Raises:
        OperatorError: a required input is missing, of another kind, or a binding makes no sense.
    """
    declared = operators[call.operator].inputs
    bound: dict[str, list[str]] = {}
    for name, reference in call.inputs:
        bound.setdefault(name, []).append(reference)
    if unknown := bound.keys() - {field.name for field in declared}:
        raise OperatorError(
            f"{call.operator} has no input {', '.join(sorted(unknown))} to bind; it reads {_names(declared)}"
        )
    inputs: dict[str, Value] = {}
    for field in declared:
        references = bound.get(field.name, [])
        value = _bound(call, field, references, outputs) if references else state.get(field.name)
        if value is None:
            if field.required:
                raise OperatorError(_missing(call, field, references, operators))
        elif not is_of(field.kind, value):
            raise OperatorError(f"{call.operator} reads {field.name} as {field.kind}, but it is {_kind(value)}")
        else:
            inputs[field.name] = value
    return inputs


def fault_of(operator: type[Operator], outputs: object) -> str:
    """Fault of an operator's outputs, "" if they are as declared."""
    if not isinstance(outputs, Mapping):
        return f"{operator.name} gave {_kind(outputs)} instead of a mapping of {_names(operator.outputs)}"
    declared = {field.name: field for field in operator.outputs}
    for name, value in outputs.items():
        if name not in declared:
            return f"{operator.name} gave {name!r}, but declares {_names(operator.outputs)}"
        if not is_of(declared[name].kind, value):
            return f"{operator.name} declares {name} as {declared[name].kind}, but gave {_kind(value)}"
    for field in operator.outputs:
        if field.required and field.name not in outputs:
            return f"{operator.name} did not give {field.name}, which it declares"
    return ""


def is_of(kind: Kind, value: object) -> bool:
    """True for a value of the kind; programs are texts and texts may be programs."""
    match kind:
        case "text" | "code":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "texts":
            return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _bound(call: Call, field: Field, references: list[str], outputs: Outputs) -> Value | None:
    """The value of an input's bindings, None where none of the bound nodes has written it yet."""
    values: list[Value] = []
    for reference in references:
        node_id, _, name = reference.rpartition(".")
        if (value := outputs.get(node_id, {}).get(name)) is not None:
            values.append(value)
    if field.kind != "texts":
        if len(references) > 1:
            raise OperatorError(
                f"{call.operator}'s input {field.name} is bound {len(references)} times; only one of kind texts can be"
            )
        return values[0] if values else None
    texts: list[str] = []
    for value in values:
        if isinstance(value, bool):
            raise OperatorError(f"{call.operator}'s input {field.name} takes texts, but is bound to a flag")
        texts += [value] if isinstance(value, str) else value
    return tuple(texts) if values else None


def _missing(call: Call, field: Field, references: list[str], operators: Operators) -> str:
    if references:
        return f"{call.operator} needs {field.name}, but {' and '.join(references)} was not written before it"
    writers = sorted(name for name, other in operators.items() if field.name in {out.name for out in other.outputs})
    if field.name == "candidates":
        writers.append("a parallel, one for each branch that gives an answer")
    written_by = f"it is written by {', '.join(writers)}" if writers else "no operator writes it"
    return f"{call.operator} needs {field.name}, which no step before it has written: {written_by}"


def _names(declared: tuple[Field, ...]) -> str:
    return ", ".join(field.name for field in declared) or "nothing"


def _kind(value: object) -> str:
    names = {str: "text", bool: "flag"}
    if is_of("texts", value):
        return "texts"
    return names.get(type(value), f"a Python {type(value).__name__}")


# ------------------------------------------------------------------------------------------ seeds of branches


def as_asked(node: Node, operators: Operators, default_backend: str) -> Node:
    """The node with the instruction and the backend that its calls leave out, so that those which ask the same are
    equal."""
    if isinstance(node, Call):
        usual = operators[node.operator].instruction if node.operator in operators else ""
        instruction, backend = node.instruction or usual, node.backend or default_backend
        return dataclasses.replace(node, instruction=instruction, backend=backend)
    return with_children(node, tuple(as_asked(child, operators, default_backend) for child in children(node)))


def branch_seeds(parallel: Parallel, seed: int, level: int) -> tuple[int, ...]:
    """One seed per branch: `seed` itself, but another one for each further branch that equals an earlier one.

    So three equal branches give three samples, and adding a branch changes none of the others. `level` is the number of
    parallels around this one: it keeps the seeds of nested parallels' branches apart.
    """
    return tuple(seed if index == 0 else _derived(seed, level, index) for index in _equals_before(parallel))


@functools.lru_cache(maxsize=4096)
def _equals_before(parallel: Parallel) -> tuple[int, ...]:
    """For each branch, the number of equal branches before it."""
    shapes = [without_ids(branch) for branch in parallel.branches]
    return tuple(shapes[:index].count(shape) for index, shape in enumerate(shapes))


def _derived(seed: int, level: int, index: int) -> int:
    """A seed of 31 bits, so that endpoints with signed 32-bit seeds accept it. Hashed, so equal in every process."""
    digest = hashlib.blake2b(f"{seed}/{level}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
