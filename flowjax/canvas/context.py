"""An operator's access to the outside during one run of it: a metered backend within a budget, and the sandbox."""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ParamSpec, TypeVar

from flowjax.canvas.backends import Backend, BackendError, BackendUnavailable, Completion, OnText, Request, reply_of
from flowjax.canvas.operators import OperatorError
from flowjax.canvas.values import Message, Problem, State, Usage, Value, in_thinking
from flowjax.grading import code, sandbox
from flowjax.grading.code import JUDGE_LIMITS, Suite, Verdict
from flowjax.grading.sandbox import Isolation, IsolationError, Limits, NoProcessorError, ProgramResult


class BudgetSpent(Exception):
    """More is asked for than a limit allows, and the run ends. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a run; None is no limit, 0 allows nothing.

    A run ends when it asks for more than is left, not when it has used up exactly what it had. `calls` (requests to
    backends, failed ones too) is never exceeded, and at `seconds` all that is in flight is cancelled. The `tokens` and
    `cost` of a request are known only when it is answered: these limits are exceeded by at most the requests that were
    in flight. Cached results cost nothing. A backend without prices costs nothing either, so `cost` does not bound it.
    `steps` bounds the entries of one run's trace: operators that were reached, cached ones too.
    """

    calls: int | None = None
    tokens: int | None = None  # of prompts and answers together
    seconds: float | None = None
    cost: float | None = None  # in the currency of the backends' price lists
    steps: int | None = None  # of one run; the next run has as many again

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value >= 0:
                raise ValueError(f"budget.{limit.name} is {value}: give a number from 0 on, or None for no limit")

    def left(self, usage: Usage, seconds: float) -> "Budget":
        """The rest after a run with this usage, at least 0: the budget of an episode's next run."""
        return Budget(
            None if self.calls is None else max(0, self.calls - usage.calls),
            None if self.tokens is None else max(0, self.tokens - _tokens(usage)),
            None if self.seconds is None else max(0.0, self.seconds - seconds),
            None if self.cost is None else max(0.0, self.cost - usage.cost),
            self.steps,
        )


UNLIMITED = Budget()


class Meter:
    """Counts what one run spends. Make it inside the event loop: its clock starts then."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self._calls = self._steps = 0
        self.usage = Usage()
        self.unanswered_s = 0.0  # as in `WorkflowRun`

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return self._clock() - self._started_s

    @property
    def deadline_s(self) -> float | None:
        """Time at which the budget's seconds end, by the event loop's clock."""
        return None if self._budget.seconds is None else self._started_s + self._budget.seconds

    def start_step(self) -> None:
        """Count an operator that is reached, whether it then runs or has a cached result.

        Raises:
            BudgetSpent: the limit is reached; it must not run.
        """
        if self._steps >= _limit(self._budget.steps):
            raise BudgetSpent(f"the limit of {self._budget.steps} steps in a run is reached")
        self._steps += 1

    def start_call(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            BudgetSpent: a limit is reached; it must not be sent.
        """
        budget = self._budget
        self.check_time()
        if self._calls >= _limit(budget.calls):
            raise BudgetSpent(f"the budget of {budget.calls} calls is spent")
        if (tokens := _tokens(self.usage)) >= _limit(budget.tokens):
            raise BudgetSpent(f"the budget of {budget.tokens} tokens is spent: {tokens} were used")
        if self.usage.cost >= _limit(budget.cost):
            raise BudgetSpent(f"the budget of {budget.cost:g} in cost is spent: {self.usage.cost:g} were used")
        self._calls += 1

    def check_time(self) -> None:
        """Raises:
        BudgetSpent: the time is over.
        """
        if self.seconds >= _limit(self._budget.seconds):
            raise self.time_over()

    def time_over(self) -> BudgetSpent:
        """The error for a deadline that has passed."""
        return BudgetSpent(f"the budget of {self._budget.seconds:g} seconds is spent")

    def add(self, usage: Usage) -> None:
        """Count what a request has cost."""
        self.usage += usage


def _limit(value: float | None) -> float:
    return math.inf if value is None else value


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.sampled_tokens


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

    def require(self) -> None:
        """Blocks for a trial start, the first time in a process.

        Raises:
            IsolationError: this machine cannot isolate programs.
        """
        if self.isolation is None:
            sandbox.require_isolation(allow_none=self.allow_none)

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
    """Sampling settings of operators' requests, where an operator sets none itself."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    retry_new_tokens: int = 4096  # of a second try after a cut reply; no such try if not above the first


class CallContext:
    """The `Context` of one run of one call.

    `slots` bounds the requests and programs that a workflow's run has under way at the same time.
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
        on_text: OnText | None = None,
    ):
        self.problem = problem
        self.instruction = instruction
        self.usage = Usage()
        self.spent: BudgetSpent | None = None  # a request was refused by the budget
        self.away: BackendUnavailable | None = None  # a request or a program met an outage
        self.complete = True  # every request was answered
        self._backend, self._operator, self._inputs = backend, operator, inputs
        self._seed, self._sampling, self._sandbox = seed, sampling, sandbox
        self._meter, self._slots, self._on_text = meter, slots, on_text

    # The signatures of `Context` in operators/__init__.py, which this implements.
    async def ask(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        seed: int = 0,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        """See `flowjax.canvas.operators.Context`.

        Raises:
            TypeError: `messages` is no list of messages, or JSON cannot hold these or the schema. Sent on, it would
                raise in the backend, and count as an outage of that.
        """
        messages = tuple(messages)
        for each in messages:
            said = [each.get(name) for name in ("role", "content")] if isinstance(each, Mapping) else [None]
            if not all(isinstance(text, str) for text in said):
                raise TypeError(f'ask takes a list of messages such as {{"role": "user", "content": text}}: {each!r}')
        try:
            json.dumps([[dict(each) for each in messages], schema])
        except (TypeError, ValueError) as error:
            raise TypeError(f"ask takes messages and a schema that JSON can hold ({error})") from error
        request = Request(
            messages,
            self._sampling.temperature if temperature is None else float(temperature),  # numpy's is none for JSON
            self._sampling.top_p,
            self._sampling.max_new_tokens,
            self._seed + int(seed),
            schema,
            {
                "operator": self._operator,
                "instruction": self.instruction,
                **{f"input.{name}": _as_text(value) for name, value in self._inputs.items()},
            },
            self._on_text,
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
        return completion.text.encode(errors="replace").decode()  # replaces lone surrogates, which UTF-8 lacks

    async def _completed(self, request: Request) -> Completion:
        async with self._slots:
            try:
                self._meter.start_call()
            except BudgetSpent as spent:
                self.spent = spent
                raise
            usage, asked_s = Usage(calls=1), time.monotonic()  # a request that fails is a call, too
            try:
                completion = await reply_of(self._backend, request)
                used = completion.usage
                usage = Usage(1, used.prompt_tokens, used.sampled_tokens, used.cost)
                return completion
            except BaseException as error:  # cancelled ones, too: all end without an answer
                self.complete = False
                # Cancelled from outside, as by the deadline; or else by the backend itself, which is an outage.
                cancelled = isinstance(error, asyncio.CancelledError)
                if cancelled and (task := asyncio.current_task()) is not None and task.cancelling():
                    self._meter.unanswered_s = max(self._meter.unanswered_s, time.monotonic() - asked_s)
                elif isinstance(error, BackendUnavailable):
                    self.away = error
                elif cancelled or (isinstance(error, Exception | SystemExit) and not isinstance(error, BackendError)):
                    self.away = BackendUnavailable(f"{type(error).__name__}: {error}")
                    raise self.away from error
                raise
            finally:
                self.usage += usage
                self._meter.add(usage)

    async def execute(self, program: str, stdin: bytes = b"") -> ProgramResult:
        """See `flowjax.canvas.operators.Context`. If cancelled, the program runs on, at most to its own time limit."""
        return await self._sandboxed(_longest_s(self._sandbox.limits), self._sandbox.run, program, stdin)

    async def judge(self, program: str, suite: Suite) -> Verdict:
        """See `flowjax.canvas.operators.Context`. If cancelled, the program runs on, at most to its own time limit."""
        kinds = len({type(case) for case in suite.cases})
        longest_s = kinds * _longest_s(self._sandbox.judge_limits)
        return await self._sandboxed(longest_s, self._sandbox.judge, program, suite)

    async def _sandboxed(
        self, longest_s: float, run: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Result of a program, run in a thread. A machine that cannot start it, or has no processor for it, counts as
        an outage. `longest_s` is the program's own time limit: a longer time was spent waiting."""
        async with self._slots:
            started_s = time.monotonic()
            try:
                return await asyncio.to_thread(run, *args, **kwargs)
            except asyncio.CancelledError:
                waited_s = time.monotonic() - started_s - longest_s
                self._meter.unanswered_s = max(self._meter.unanswered_s, waited_s)
                raise
            except (IsolationError, NoProcessorError, OSError) as error:
                self.away = BackendUnavailable(f"sandbox: {error}")
                raise self.away from error


def _longest_s(limits: Limits) -> float:
    return limits.cpu_s + limits.idle_s


def _is_cut(completion: Completion) -> bool:
    """True if the reply ends at the request's token limit, or inside its thinking."""
    return completion.finish_reason == "length" or in_thinking(completion.text)


def _as_text(value: Value) -> str:
    """Texts as they are; flags and lists of texts as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
