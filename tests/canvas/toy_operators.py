"""Small operators and a backend for the tests of running workflows: what they do is plain, and every run is counted."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowjax.canvas import text
from flowjax.canvas.backends import BackendError, Completion, Request
from flowjax.canvas.operators import Context, Operator, OperatorError, Role
from flowjax.canvas.run import run
from flowjax.canvas.values import Field, NodeRun, Problem, State, Usage, Value, WorkflowRun

PROBLEM = Problem("What is 6 times 7?", "math")
Work = Callable[[State, Context], Mapping[str, Value]]


def operator(
    name: str,
    inputs: tuple[Field, ...],
    outputs: tuple[Field, ...],
    work: Work,
    *,
    role: Role = "solver",
    instruction: str = "",
    cacheable: bool = True,
) -> type[Operator]:
    """An operator whose work needs no backend. `runs` of the class counts how often it was at work."""

    async def at_work(self: Operator, inputs: State, context: Context) -> Mapping[str, Value]:
        type(self).runs += 1  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.sleep(0)
        return work(inputs, context)

    attributes = {"name": name, "description": name, "role": role, "inputs": inputs, "outputs": outputs}
    attributes |= {"instruction": instruction, "cacheable": cacheable, "run": at_work, "runs": 0}
    return type(name, (Operator,), attributes)


def text_in(*names: str, required: bool = True) -> tuple[Field, ...]:
    return tuple(Field(name, required=required) for name in names)


class Ask(Operator):
    """Asks the backend once: instruction and inputs go in, its text is the answer."""

    name, description, role, instruction = "Ask", "asks", "solver", "Answer."
    inputs = (*text_in("problem"), *text_in("answer", "feedback", "plan", required=False))
    outputs = text_in("answer")

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        content = "|".join([context.instruction, *(f"{name}={value}" for name, value in inputs.items())])
        return {"answer": await context.ask([{"role": "user", "content": content}])}


class Plan(Ask):
    name, instruction, inputs, outputs = "Plan", "Plan.", text_in("problem"), text_in("plan")

    async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
        return {"plan": (await super().run(inputs, context))["answer"]}


def appending(name: str, suffix: str) -> type[Operator]:
    """Writes the answer there is, with a suffix."""
    inputs = text_in("answer", required=False)
    return operator(name, inputs, text_in("answer"), lambda given, _: {"answer": f"{given.get('answer', '')}{suffix}"})


def checking(name: str, passes: Callable[[str], bool], reads: str = "answer") -> type[Operator]:
    """Passes answers that the function accepts."""

    def work(given: State, context: Context) -> Mapping[str, Value]:
        value = str(given[reads])
        return {"passed": passes(value), "feedback": f"looked at {value}"}

    outputs = (Field("passed", "flag"), Field("feedback"))
    return operator(name, text_in(reads), outputs, work, role="checker")


def failing(name: str, error: Exception | None = None) -> type[Operator]:
    """Reads nothing and always fails."""

    def work(given: State, context: Context) -> Mapping[str, Value]:
        raise error or OperatorError("it cannot be done")

    return operator(name, (), text_in("answer"), work)


def merging(name: str = "Merge") -> type[Operator]:
    """Joins the candidates with +."""

    def work(given: State, context: Context) -> Mapping[str, Value]:
        return {"answer": "+".join(given["candidates"])}  # pyright: ignore[reportCallIssue,reportArgumentType]

    return operator(name, (Field("candidates", "texts"),), text_in("answer"), work, role="combiner")


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks go on until it holds."""
    while not condition():
        await asyncio.sleep(0.001)


@dataclass
class Echo:
    """Answers with its name, the seed and what it was asked; counts, and keeps, every request."""

    name: str = "echo"
    tokens: int = 10
    cost: float = 0.0
    delay_s: float = 0.0
    fails: int = 0  # so many requests, before it answers
    asked: list[Request] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def identity(self) -> str:
        return self.name

    async def complete(self, request: Request) -> Completion:
        self.asked.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight -= 1
        if self.fails > 0:
            self.fails -= 1
            raise BackendError("the backend is away")
        content = f"{self.name}/{request.seed}({request.messages[-1]['content']})"
        return Completion(content, Usage(1, self.tokens - 1, 1, self.cost))


def go(workflow: str, *kinds: type[Operator], problem: Problem = PROBLEM, **options: Any) -> WorkflowRun:
    """Run the workflow that the text describes, with these operators."""
    return asyncio.run(going(workflow, *kinds, problem=problem, **options))


async def going(workflow: str, *kinds: type[Operator], problem: Problem = PROBLEM, **options: Any) -> WorkflowRun:
    options = {"backends": {"small": Echo()}, "default_backend": "small"} | options
    return await run(text.parse(workflow), problem, operators={kind.name: kind for kind in kinds}, **options)


def runs(result: WorkflowRun) -> Counter[str]:
    """How often every operator was reached."""
    return Counter(step.operator for step in result.trace)


def order(result: WorkflowRun) -> str:
    """The operators in the order of the trace."""
    return " ".join(step.operator for step in result.trace)


def step(result: WorkflowRun, operator: str) -> NodeRun:
    """The only run of the operator."""
    (found,) = [step for step in result.trace if step.operator == operator]
    return found
