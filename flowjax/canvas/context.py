"""Context that the interpreter lends an operator for one run: a metered backend and the sandbox."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from flowjax.canvas.backends.base import Backend, BackendError, BackendUnavailable, Completion, Request, in_thinking
from flowjax.canvas.budget import BudgetSpent, Meter
from flowjax.canvas.operators.base import OperatorError
from flowjax.canvas.values import Message, Problem, State, Usage, Value
from flowjax.grading import code, sandbox
from flowjax.grading.code import JUDGE_LIMITS, Suite, Verdict
from flowjax.grading.sandbox import Isolation, Limits, NoProcessorError, ProgramResult

_LIMITS = Limits()
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Limits and isolation of operators' programs; see `flowjax.grading.sandbox.run` and `flowjax.grading.code.judge`.

    `allow_none` accepts a machine that cannot isolate them.
    """

    limits: Limits = _LIMITS
    judge_limits: Limits = JUDGE_LIMITS  # for all tests of a program together
    isolation: Isolation | None = None
    allow_none: bool = False
    packages: tuple[str, ...] = ()

    def run(self, program: str, stdin: bytes) -> ProgramResult:
        """Blocks until the program ends.

        Raises:
            IsolationError: this machine cannot isolate it.
            NoProcessorError: this machine had no processor for it.
        """
        return sandbox.run(
            program, stdin, self.limits, isolation=self.isolation, allow_none=self.allow_none, packages=self.packages
        )

    def judge(self, program: str, suite: Suite) -> Verdict:
        """Blocks until all tests have run.

        Raises:
            IsolationError: this machine cannot isolate the program.
            NoProcessorError: this machine had no processor for it.
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
    """Sampling of operators' requests, unless they say otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    retry_new_tokens: int = 4096  # of a second try where the first reply was cut; not above the first is none


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
        self.away: BackendUnavailable | None = None  # a request or a program met an outage
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
        completion = await self._completed(request)
        longer = self._sampling.retry_new_tokens
        if _is_cut(completion) and longer > request.max_new_tokens:
            request = dataclasses.replace(request, max_new_tokens=longer)
            completion = await self._completed(request)
        if _is_cut(completion):
            raise OperatorError(
                f"the reply was cut at {request.max_new_tokens} tokens, so it is no answer: ask for a shorter one"
            )
        if completion.finish_reason == "content_filter":
            raise OperatorError("the backend withheld its reply (content_filter)")
        return completion.text

    async def _completed(self, request: Request) -> Completion:
        async with self._slots:
            try:
                self._meter.start_call()
            except BudgetSpent as spent:
                self.spent = spent
                raise
            usage, asked_s = Usage(calls=1), time.monotonic()
            try:
                completion = await self._backend.complete(request)
                used = completion.usage
                usage = Usage(1, used.prompt_tokens, used.sampled_tokens, used.cost)
                return completion
            except BaseException as error:
                self.complete = False
                if isinstance(error, asyncio.CancelledError):
                    self._meter.unanswered_s = max(self._meter.unanswered_s, time.monotonic() - asked_s)
                elif isinstance(error, BackendUnavailable):
                    self.away = error
                elif isinstance(error, Exception) and not isinstance(error, BackendError):
                    self.away = BackendUnavailable(f"{type(error).__name__}: {error}")
                    raise self.away from error
                raise
            finally:
                self.usage += usage
                self._meter.add(usage)

    async def execute(self, program: str, stdin: bytes = b"") -> ProgramResult:
        """See `flowjax.canvas.operators.base.Context`. Cancelled, it leaves the program to its own time limit."""
        return await self._sandboxed(_own_s(self._sandbox.limits), self._sandbox.run, program, stdin)

    async def judge(self, program: str, suite: Suite) -> Verdict:
        """See `flowjax.canvas.operators.base.Context`. Cancelled, it leaves the program to its own time limit."""
        kinds = len({type(case) for case in suite.cases})
        own_s = kinds * _own_s(self._sandbox.judge_limits)
        return await self._sandboxed(own_s, self._sandbox.judge, program, suite)

    async def _sandboxed(
        self, own_s: float, run: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """What became of a program. A machine that cannot start it, or has no processor for it, is away as a backend
        may be. `own_s` is the longest that the program takes by itself: what exceeds it was waiting."""
        async with self._slots:
            started_s = time.monotonic()
            try:
                return await asyncio.to_thread(run, *args, **kwargs)
            except asyncio.CancelledError:
                waited_s = time.monotonic() - started_s - own_s
                self._meter.unanswered_s = max(self._meter.unanswered_s, waited_s)
                raise
            except (NoProcessorError, OSError) as error:
                self.away = BackendUnavailable(f"sandbox: {error}")
                raise self.away from error


def _own_s(limits: Limits) -> float:
    return limits.cpu_s + limits.idle_s


def _is_cut(completion: Completion) -> bool:
    """Whether the reply ends at the request's bound, or inside its thinking."""
    return completion.finish_reason == "length" or in_thinking(completion.text)


def _as_text(value: Value) -> str:
    """Texts as they are; flags and lists of texts as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
