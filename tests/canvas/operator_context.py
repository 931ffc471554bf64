"""A context for operators in tests: scripted replies, real or scripted runs in the sandbox, and what was asked."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowjax.canvas.operators import Operator
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.values import Message, Problem, State, Value
from flowjax.grading.code import Suite, Verdict, judge
from flowjax.grading.sandbox import Limits, ProgramResult, run

OPERATORS = load_operators(entry_points=False)


@dataclass
class ScriptedContext:
    """Gives the replies in their order; `asked` keeps the messages, schemas and seeds."""

    problem: Problem
    replies: Sequence[str] = ()
    instruction: str = ""
    asked: list[str] = field(default_factory=list)
    schemas: list[Mapping[str, Any] | None] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        seed: int = 0,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        assert len(self.asked) < len(self.replies), "the operator asked more often than the test has replies"
        self.asked.append("\n".join(message["content"] for message in messages))
        self.schemas.append(schema)
        self.seeds.append(seed)
        return self.replies[len(self.asked) - 1]

    async def execute(self, program: str, stdin: bytes = b"") -> ProgramResult:
        return run(program, stdin, Limits(idle_s=20.0))

    async def judge(self, program: str, suite: Suite) -> Verdict:
        return judge(program, suite, Limits(idle_s=20.0), case_cpu_s=10.0)


def use(
    operator: str | type[Operator],
    problem: Problem | str,
    inputs: State | None = None,
    *replies: str,
    instruction: str = "",
) -> tuple[Mapping[str, Value], ScriptedContext]:
    """One run of an operator: its outputs, and the context with what was asked."""
    kind = OPERATORS[operator] if isinstance(operator, str) else operator
    problem = Problem(problem, "math") if isinstance(problem, str) else problem
    context = ScriptedContext(problem, replies, instruction or kind.instruction)
    outputs = asyncio.run(kind().run({"problem": problem.text, **(inputs or {})}, context))
    declared = {field.name: field for field in kind.outputs}
    assert set(outputs) <= set(declared)
    assert {name for name, field in declared.items() if field.required} <= set(outputs)
    return outputs, context
