"""The math world's environment and expert.

In a single turn the whole reply is the answer. With the calculator a turn is `calculate[...]` or `answer[...]`.
"""

import functools
import threading
from typing import Any

import numpy as np

from flowjax.envs.base import Observation, Step
from flowjax.envs.math.actions import ANSWER, BOXED, CALCULATE, WHOLE, read
from flowjax.envs.math.calculator import CalculatorError, calculate
from flowjax.envs.math.options import Options, Rule, read_options
from flowjax.envs.math.problems import Problem
from flowjax.envs.math.prompts import show
from flowjax.grading import math as grading
from flowjax.grading.processes import GraderError, GraderProcesses
from flowjax.records import Task, state_key

OUTCOMES = ("success", "answered", "calculations")
GRADING_TIMEOUT_S = 3  # three such waits, two readings and a comparison, are below config.env.step_timeout_s


class Math:
    """One problem at a time. A task carries its question and answer in `payload`."""

    def __init__(self, options: Options):
        self._calculator = options.calculator
        self._rule: Rule = options.answer
        self._problem: Problem | None = None
        self._results: dict[str, str] = {}  # expression -> value, the latest last
        self._calculations = 0
        self._over = self._right = False

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("the environment has not been reset")
        return self._problem

    @property
    def rule(self) -> Rule:
        return self._rule

    @property
    def calculations_left(self) -> int:
        return self._calculator - self._calculations

    def calculated(self, expression: str) -> bool:
        return expression in self._results

    def reset(self, task: Task, seed: int) -> Observation:
        payload = task.payload
        self._problem = Problem(payload["question"], payload["answer"], payload.get("expression", ""))
        self._results = {}
        self._calculations = 0
        self._over = self._right = False
        return self._observe()

    def step(self, action: str) -> Step:
        if self._over:
            return Step(self._observe(), 0.0, True, False, self._outcome())
        valid = self._calculate_or_answer(action) if self._calculator else self._judge(self._answer_in(action))
        return Step(self._observe(), float(self._right), self._over, valid, self._outcome())

    def _calculate_or_answer(self, action: str) -> bool:
        name, content = read(action)
        if name == "answer":
            return self._judge(content)
        if name != "calculate" or self.calculations_left <= 0:
            return False
        expression = "".join(content.split())
        try:
            value = calculate(expression)
        except CalculatorError:
            return False
        self._calculations += 1
        self._results.pop(expression, None)
        self._results[expression] = value
        return True

    def _answer_in(self, reply: str) -> str:
        if self._rule == "boxed":
            return grading.last_boxed(reply) or ""
        return (grading.last_number(reply) or "") if self._rule == "last_number" else reply.strip()

    def _judge(self, answer: str) -> bool:
        if not answer:
            return False
        compare = "anywhere" if self._rule == "anywhere" and not self._calculator else "equal"
        self._right = _verdict(compare, answer, self.problem.answer)
        self._over = True
        return True

    def _observe(self) -> Observation:
        problem = self.problem
        results = [f"{expression}={value}" for expression, value in self._results.items()]
        end = [self._over, self._right]
        key = state_key("math", problem.question, problem.answer, self._calculations, *sorted(results), *map(int, end))
        return Observation(show(problem.question, results), self.legal, key)

    @property
    def legal(self) -> tuple[str, ...]:
        """Templates of the actions that fit now."""
        if self._calculator:
            return (CALCULATE, ANSWER) if self.calculations_left > 0 else (ANSWER,)
        return (BOXED if self._rule == "boxed" else WHOLE,)

    def _outcome(self) -> dict[str, float]:
        return {
            "success": float(self._right),
            "answered": float(self._over),
            "calculations": float(self._calculations),
        }


@functools.cache
def _processes(function: str) -> GraderProcesses:
    return GraderProcesses(f"flowjax.grading.math:{function}", timeout_s=3.0 * GRADING_TIMEOUT_S)


def _verdict(function: str, answer: str, gold: str) -> bool:
    """Whether the answer is right: judged here in a main thread, elsewhere in another process. No verdict is wrong."""
    try:
        if threading.current_thread() is threading.main_thread():
            return getattr(grading, function)(answer, gold, GRADING_TIMEOUT_S)
        return _processes(function).call(answer, gold, GRADING_TIMEOUT_S)
    except (GraderError, ImportError):  # without math-verify only numbers are right answers, and they need none
        return False


def make(**options: Any) -> Math:
    """An environment; see `Options`."""
    return Math(read_options(options))


def expert(env: Math) -> str:
    """Calculates a generated expression where it may, then gives the right answer."""
    problem = env.problem
    if env.calculations_left > 0 and problem.expression and not env.calculated(problem.expression):
        return f"calculate[{problem.expression}]"
    if ANSWER in env.legal:
        return f"answer[{problem.answer}]"
    return BOXED.replace("<text>", problem.answer) if env.rule == "boxed" else problem.answer


def random_action(observation: Observation, rng: np.random.Generator) -> str:
    """A random number as the answer, or calculated."""
    template = observation.legal_actions[rng.integers(len(observation.legal_actions))]
    a, b = (int(10 ** rng.uniform(0, 3)) for _ in range(2))
    return template.replace("<text>", str(a)).replace("<expression>", f"{a}{'+-*'[rng.integers(3)]}{b}")
