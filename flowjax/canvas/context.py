"""What the interpreter lends an operator for one run: a metered backend and the sandbox."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.canvas.backends.base import Backend, Request
from flowjax.canvas.budget import BudgetSpent, Meter
from flowjax.canvas.values import Message, Problem, State, Usage, Value
from flowjax.grading import code, sandbox
from flowjax.grading.code import JUDGE_LIMITS, Suite, Verdict
from flowjax.grading.sandbox import Isolation, Limits, Result

_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How operators' programs run; see `flowjax.grading.sandbox.run` and `flowjax.grading.code.judge`.

    `allow_none` accepts a machine that cannot isolate them.
    """

    limits: Limits = _LIMITS
    judge_limits: Limits = JUDGE_LIMITS  # for all tests of a program together
    isolation: Isolation | None = None
    allow_none: bool = False
    packages: tuple[str, ...] = ()

    def run(self, program: str, stdin: bytes) -> Result:
        """Blocks until the program ends.

        Raises:
            IsolationError: this machine cannot isolate it.
        """
        return sandbox.run(
            program, stdin, self.limits, isolation=self.isolation, allow_none=self.allow_none, packages=self.packages
        )

    def judge(self, program: str, suite: Suite) -> Verdict:
        """Blocks until all tests have run.

        Raises:
            IsolationError: this machine cannot isolate the program.
        """
        return code.judge(
            program,
            suite,
            self.judge_limits,
            isolation=self.isolation,
            allow_none=self.allow_none,
            packages=self.packages,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How operators' requests are sampled, unless they say otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024


class CallContext:
    """The `Context` of one run of one call.

    `slots` bound how many requests and programs of a workflow's run are under way at one time.
    """

    def __init__(
        self,
        problem: Problem,
        instruction: str,
        backend: Backend,
        *,
        operator: str,
        inputs: State,
        seed: int,
        sampling: Sampling,
        sandbox: Sandbox,
        meter: Meter,
        slots: asyncio.Semaphore,
    ):
        self.problem = problem
        self.instruction = instruction
        self.usage = Usage()
        self.spent: BudgetSpent | None = None  # a request was refused by the budget
        self.complete = True  # every request was answered
        self._backend, self._operator, self._inputs = backend, operator, inputs
        self._seed, self._sampling, self._sandbox = seed, sampling, sandbox
        self._meter, self._slots = meter, slots

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        seed: int = 0,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        """See `flowjax.canvas.operators.base.Context`."""
        request = Request(
            tuple(messages),
            self._sampling.temperature if temperature is None else temperature,
            self._sampling.top_p,
            self._sampling.max_new_tokens,
            self._seed + seed,
            schema,
            {
                "operator": self._operator,
                "instruction": self.instruction,
                **{f"input.{name}": _as_text(value) for name, value in self._inputs.items()},
            },
        )
        async with self._slots:
            try:
                self._meter.start_call()
            except BudgetSpent as spent:
                self.spent = spent
                raise
            usage = Usage(calls=1)
            try:
                completion = await self._backend.complete(request)
                used = completion.usage
                usage = Usage(1, used.prompt_tokens, used.sampled_tokens, used.cost)
            except BaseException:
                self.complete = False
                raise
            finally:
                self.usage += usage
                self._meter.add(usage)
        return completion.text

    async def execute(self, program: str, stdin: bytes = b"") -> Result:
        """See `flowjax.canvas.operators.base.Context`. Cancelled, it leaves the program to its own time limit."""
        async with self._slots:
            return await asyncio.to_thread(self._sandbox.run, program, stdin)

    async def judge(self, program: str, suite: Suite) -> Verdict:
        """See `flowjax.canvas.operators.base.Context`. Cancelled, it leaves the program to its own time limit."""
        async with self._slots:
            return await asyncio.to_thread(self._sandbox.judge, program, suite)


def _as_text(value: Value) -> str:
    """Texts as they are; flags and lists of texts as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
