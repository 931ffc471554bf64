"""Budget of a workflow's run, and what the run has spent so far."""

import asyncio
import math
from dataclasses import dataclass, fields

from flowjax.canvas.values import Usage


class BudgetSpent(Exception):
    """A limit is reached and more is wanted: the run ends here. The message says which limit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a run; None is no limit, 0 allows nothing.

    A run ends when it wants more than is left, not when it has used up exactly what it had. `calls` (requests to
    backends, failed ones too) is never exceeded, and at `seconds` whatever is in flight is cancelled. What a request
    takes of `tokens` and `cost` is known only when it is answered: they are exceeded by at most the requests that were
    in flight. Cached results cost nothing. A backend without prices costs nothing either, so that `cost` does not
    bound it. `steps` bounds the entries of one run's trace: operators that were reached, cached ones too.
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
        """Rest after a run that took so much, at least 0: the budget of the next run of an episode."""
        return Budget(
            None if self.calls is None else max(0, self.calls - usage.calls),
            None if self.tokens is None else max(0, self.tokens - _tokens(usage)),
            None if self.seconds is None else max(0.0, self.seconds - seconds),
            None if self.cost is None else max(0.0, self.cost - usage.cost),
            self.steps,
        )


UNLIMITED = Budget()


class Meter:
    """Counts what one run spends. Its clock starts when it is made, inside the event loop."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self._calls = self._steps = 0
        self.usage = Usage()
        self.unanswered_s = 0.0  # how long the oldest request had waited that was taken back

    @property
    def seconds(self) -> float:
        """Since the run's start."""
        return self._clock() - self._started_s

    @property
    def deadline_s(self) -> float | None:
        """Time at which the budget's seconds end, by the event loop's clock."""
        return None if self._budget.seconds is None else self._started_s + self._budget.seconds

    def start_step(self) -> None:
        """Count an operator that is reached.

        Raises:
            BudgetSpent: it must not be run.
        """
        if self._steps >= _limit(self._budget.steps):
            raise BudgetSpent(f"the limit of {self._budget.steps} steps in a run is reached")
        self._steps += 1

    def start_call(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            BudgetSpent: it must not be sent.
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
        """Error to raise when the deadline has passed."""
        return BudgetSpent(f"the budget of {self._budget.seconds:g} seconds is spent")

    def add(self, usage: Usage) -> None:
        """Count what a request has cost."""
        self.usage += usage


def _limit(value: float | None) -> float:
    return math.inf if value is None else value


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.sampled_tokens
