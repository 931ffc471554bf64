"""The world of mathematics: a problem, one answer and, as an option, a calculator before it.

Without the calculator an episode is a single turn, whose whole reply is the action. With it a turn is `calculate[...]`
or `answer[...]`. State: the problem and the calculations.
"""

import ast
import functools
import importlib.util
import operator
import re
import string
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from flowjax.envs import (
    EnvDied,
    History,
    Message,
    NotReady,
    Observation,
    Split,
    Step,
    Style,
    World,
    WorldError,
    check_split,
    user_says,
)
from flowjax.envs.math.problems import Arithmetic, MathProblem, copied, generate, load, worked_out
from flowjax.fields import Interval
from flowjax.grading import math as grading
from flowjax.grading.answers import between_tags, last_boxed, without_thoughts
from flowjax.grading.processes import GraderError, GraderProcesses
from flowjax.grading.sandbox import NoProcessorError
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

TASKS = 1 << 31  # length of a source of generated problems; slice it
GRADING_CPU_S = 5.0  # of processor time; below config.env.step_timeout_s, which is clock time

CALCULATE, ANSWER = "calculate[<expression>]", "answer[<text>]"
BOXED, WHOLE = r"\boxed{<text>}", "<text>"  # the only legal action of a single turn: any reply that holds it
_ACTION = re.compile(r"\s*(calculate|answer)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)

CALCULATED = "Calculated so far:"
INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
CALCULATOR_INSTRUCTION = """Reason step by step inside <think> </think>, then give one action inside <action> </action>:
calculate[<expression>] for numbers joined by + - * / ^ and parentheses, or answer[<text>] for your final answer."""
SPACE = "_"  # of spelled texts

Rule = Literal["boxed", "last_number", "whole", "anywhere"]


@dataclass(frozen=True)
class MathOptions(Arithmetic):
    """Options of generated problems, and further ones.

    `path` names a file or folder with problems ("": arithmetic is generated). `calculator` is the number of
    calculations that an episode may have; 0 makes it a single turn. `answer` is the place of a single turn's answer in
    the reply: boxed, last_number, whole, or anywhere, which gives the whole reply to math-verify as the published
    recipe does. `worked_share` is the share of problems for which the expert writes down its steps before the answer.
    """

    path: str = ""
    calculator: Annotated[int, Interval(at_least=0)] = 0
    answer: Rule = "boxed"
    worked_share: Annotated[float, Interval(at_least=0, at_most=1)] = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.worked_share and (self.answer != "last_number" or self.path or self.calculator):
            raise WorldError(
                f"env.options.worked_share is {self.worked_share}: what is worked out are generated problems "
                '(path="", calculator=0) with answer="last_number"'
            )
        if (self.path or self.answer == "anywhere") and importlib.util.find_spec("math_verify") is None:
            raise NotReady('answers that are formulas need math-verify: pip install -e ".[math]"')


@dataclass(frozen=True, slots=True)
class MathView:
    """The question, and the results so far as `expression=value`, the latest last."""

    question: str
    results: tuple[str, ...] = ()


class Math(World):
    """Problems of mathematics. State: the problem and the calculations."""

    OUTCOMES = ("success", "answered", "calculations")
    COUNTS = ("calculations",)
    OPENS_FAST = True
    Options = MathOptions
    View = MathView

    def env(self) -> "MathEnv":
        return MathEnv(self.options)

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """Generated problems without end, or those of a file. Train and held-out problems differ by content."""
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        if not self.options.path:
            generated = functools.partial(_generated_task, self.options, split, data_seed)
            return grain.MapDataset.range(TASKS).map(generated)
        problems = load(self.options.path, split)
        order = np.random.default_rng(data_seed).permutation(len(problems))
        return grain.MapDataset.range(len(problems)).map(functools.partial(_row_task, problems, split, order))

    def instruct(self, observation: Observation, history: History) -> str:
        view: MathView = observation.view
        parts = [view.question]
        if view.results:
            parts.append("\n".join([CALCULATED, *view.results]))
        if history and ANSWER not in observation.legal_actions:
            parts.append(f"Your last reply held no answer: {history[-1].action or 'none'}")
        return "\n\n".join([*parts, _instruction(observation)])

    def compact(self, observation: Observation, history: History) -> str:
        """The problem and the results so far, spelled; turns without a result are not shown."""
        return _spelled("\n".join([observation.view.question, *observation.view.results]))

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        """The latest result; after an invalid action the one before, or the problem where there is none."""
        view: MathView = observation.view
        latest = view.results[-1] if view.results else view.question
        return user_says(_spelled(latest) if style == "compact" else f"{latest}\n\n{_instruction(observation)}")

    def vocabulary(self) -> tuple[str, ...]:
        """Characters, in which compact texts are spelled, and the beginnings of actions."""
        spelled = string.digits + "-=?" + self.options.operators
        if self.options.calculator:
            spelled += SPACE + "+*/.()]"
        elif self.options.answer == "boxed":
            spelled += r"\boxed{}"
        if self.options.path:
            spelled += string.printable.strip()
        return (*dict.fromkeys(spelled), *(("calculate[", "answer[") if self.options.calculator else ()))

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        """Compact: spelled, for models whose words are characters. Else in tags, or bare for a single turn."""
        name, content = read_action(action)
        if style == "compact":
            return f"{name}[ {_spelled(content)} ]" if name else _spelled(action)
        return f"<action>{action}</action>" if name else action

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        """Without the calculator the whole reply, if it is not empty and has the box where one is asked for. With it,
        the action inside the last `<action>` tags, or the whole of a reply without tags."""
        reply = without_thoughts(reply)
        if ANSWER not in legal:
            text = _unspelled(reply)
            return text if text and (BOXED not in legal or last_boxed(text)) else None
        name, content = read_action(between_tags(reply, "action") or "")
        content = _unspelled(content)
        if not content or not any(template.startswith(f"{name}[") for template in legal):
            return None
        return f"{name}[{content}]"

    def answer(self, action: str, after: Observation) -> str:
        """The episode's answer in a normal form, so that different spellings of a number are equal."""
        if self.options.calculator:
            name, said = read_action(action)
            said = said if name == "answer" else ""
        else:
            said = answer_in(action, self.options.answer)
        return grading.plain_form(said) if said else ""

    def expert(self, env: "MathEnv") -> str:
        """The calculation of a generated expression where one is left, then the right answer."""
        return env.best_action()

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """A random number as the answer, or calculated."""
        template = observation.legal_actions[rng.integers(len(observation.legal_actions))]
        a, b = (int(10 ** rng.uniform(0, 3)) for _ in range(2))
        return template.replace("<text>", str(a)).replace("<expression>", f"{a}{'+-*'[rng.integers(3)]}{b}")


def _generated_task(options: Arithmetic, split: Split, data_seed: int, index: int) -> Task:
    """The index-th problem of a split, generated when asked for."""
    problem = generate(np.random.default_rng([data_seed, index]), options, split)
    return _task(problem, f"math-{split}-{data_seed}-{index}", index)


def _row_task(problems: Sequence[MathProblem], split: Split, order: np.ndarray, index: int) -> Task:
    row = int(order[index])
    return _task(problems[row], f"math-{split}-row-{row}", row)


def _task(problem: MathProblem, task_id: str, seed: int) -> Task:
    payload = {"question": problem.question, "answer": problem.answer, "expression": problem.expression}
    return Task(task_id, "math", seed, payload)


def _instruction(observation: Observation) -> str:
    return CALCULATOR_INSTRUCTION if ANSWER in observation.legal_actions else INSTRUCTION


def _spelled(text: str) -> str:
    return " ".join(SPACE if character.isspace() else character for character in text)


def _unspelled(text: str) -> str:
    words = text.split()
    if any(len(word) > 1 for word in words):
        return text.strip()
    return "".join(words).replace(SPACE, " ")


def read_action(action: str) -> tuple[str, str]:
    """Name and content of an action with the calculator, ("", "") where it is none."""
    found = _ACTION.fullmatch(action)
    return (found.group(1).lower(), found.group(2).strip()) if found else ("", "")


def answer_in(reply: str, rule: Rule) -> str:
    """The answer in the reply of a single turn, "" where there is none."""
    if rule == "boxed":
        return last_boxed(reply) or ""
    return (grading.last_number(reply) or "") if rule == "last_number" else reply.strip()


class MathEnv:
    """One problem at a time. A task carries its question and answer in `payload`."""

    def __init__(self, options: MathOptions):
        self._options = options
        self._problem: MathProblem | None = None
        self._results: dict[str, str] = {}  # expression -> value, the latest last
        self._calculations = 0
        self._over = self._right = False

    @property
    def problem(self) -> MathProblem:
        if self._problem is None:
            raise RuntimeError("the environment has not been reset")
        return self._problem

    def reset(self, task: Task, seed: int) -> Observation:
        payload = task.payload
        self._problem = MathProblem(payload["question"], payload["answer"], payload.get("expression", ""))
        self._results = {}
        self._calculations = 0
        self._over = self._right = False
        return self._observe()

    def step(self, action: str) -> Step:
        if self._over:
            return Step(self._observe(), 0.0, True, False, self._outcome())
        calculator = self._options.calculator
        valid = (
            self._calculate_or_answer(action) if calculator else self._judge(answer_in(action, self._options.answer))
        )
        return Step(self._observe(), float(self._right), self._over, valid, self._outcome())

    def best_action(self) -> str:
        """See `Math.expert`."""
        problem = self.problem
        if CALCULATE in self.legal and problem.expression and problem.expression not in self._results:
            return f"calculate[{problem.expression}]"
        if self._options.calculator:
            return f"answer[{problem.answer}]"
        if state_key("worked", problem.question) % 1000 < 1000 * self._options.worked_share:
            return worked_out(problem.expression)
        return BOXED.replace("<text>", problem.answer) if self._options.answer == "boxed" else problem.answer

    @property
    def legal(self) -> tuple[str, ...]:
        """Templates of the legal actions."""
        if self._options.calculator:
            return (CALCULATE, ANSWER) if self._calculations < self._options.calculator else (ANSWER,)
        return (BOXED if self._options.answer == "boxed" else WHOLE,)

    def _calculate_or_answer(self, action: str) -> bool:
        name, content = read_action(action)
        if name == "answer":
            return self._judge(content)
        if name != "calculate" or CALCULATE not in self.legal:
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

    def _judge(self, answer: str) -> bool:
        if not answer:
            return False
        compare = "anywhere" if self._options.answer == "anywhere" and not self._options.calculator else "equal"
        problem = self.problem
        self._right = not copied(answer, problem.answer, problem.question) and _verdict(compare, answer, problem.answer)
        self._over = True
        return True

    def _observe(self) -> Observation:
        problem = self.problem
        results = tuple(f"{expression}={value}" for expression, value in self._results.items())
        end = [self._over, self._right]
        # Sorted, since the order of the calculations does not matter for the future: one state, not several.
        key = state_key("math", problem.question, problem.answer, self._calculations, *sorted(results), *map(int, end))
        return Observation(MathView(problem.question, results), self.legal, key)

    def _outcome(self) -> dict[str, float]:
        return {
            "success": float(self._right),
            "answered": float(self._over),
            "calculations": float(self._calculations),
        }


@functools.cache
def _processes(function: str) -> GraderProcesses:
    return GraderProcesses(f"flowjax.grading.math:{function}", cpu_s=2.0 * GRADING_CPU_S)


def _verdict(function: str, answer: str, gold: str) -> bool:
    """True if the answer is right; False also where the grader reaches no verdict.

    Raises:
        EnvDied: the machine was too busy to grade.
    """
    try:
        # The time limit is a signal, which Python delivers to the main thread only: other threads use a process.
        if threading.current_thread() is threading.main_thread():
            return getattr(grading, function)(answer, gold, GRADING_CPU_S)
        return _processes(function).call(answer, gold, GRADING_CPU_S)
    except NoProcessorError as busy:  # not the answer's fault: the task is played again
        raise EnvDied(f"grading: {busy}", "executor_error") from busy
    except (GraderError, ImportError):  # without math-verify only numbers, which do not need it, are right answers
        return False


# ----------------------------------------------------------------------------------------------------------- calculator

# For whole numbers, fractions and decimals: exact, and bounded in size and time, since a policy chooses its input.
MAX_CHARACTERS = 200
MAX_DEPTH = 40
MAX_BITS = 2000  # of a numerator or denominator
MAX_DECIMALS = 10  # of a result that is no whole number

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """An expression that the calculator refuses."""


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ^ ** and parentheses.

    Computed exactly, as fractions; a value that is no whole number is shown with at most ten decimals.

    Raises:
        CalculatorError: the expression is something else, divides by zero, or is too large.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression)  # only commas of thousands: `3,5` is ambiguous
    text = text.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    if not text or len(text) > MAX_CHARACTERS or "_" in text:
        raise CalculatorError(f"an expression has 1 to {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculatorError("not an expression") from error
    return _shown(_value(tree.body, text, 0))


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise CalculatorError("nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _literal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text, depth + 1)
        case ast.BinOp(left=left, op=op, right=right):
            sides = _value(left, text, depth + 1), _value(right, text, depth + 1)
            return _bounded(_power(*sides) if isinstance(op, ast.Pow) else _combined(op, *sides))
    raise CalculatorError("only numbers, + - * / // % ^ and parentheses")


def _literal(digits: str) -> Fraction:
    if not digits.replace(".", "", 1).isdecimal():  # hexadecimal, exponents, complex numbers
        raise CalculatorError(f"{digits!r} is not a plain number")
    return _bounded(Fraction(digits))


def _combined(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if type(op) not in _BINARY:
        raise CalculatorError("only + - * / // % ^")
    try:
        return Fraction(_BINARY[type(op)](left, right))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("exponents are whole numbers")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and size * abs(exponent) > MAX_BITS:
        raise CalculatorError("the power is too large")
    if size <= 1:  # a base of -1, 0 or 1: the exponent may be huge, and is reduced first
        exponent = Fraction(abs(exponent) % 2) if base == -1 else min(abs(exponent), Fraction(1))
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("the number is too large")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**MAX_DECIMALS)
    whole, decimals = divmod(scaled, 10**MAX_DECIMALS)
    sign = "-" if value < 0 and scaled else ""
    return f"{sign}{whole}.{decimals:0{MAX_DECIMALS}d}".rstrip("0").rstrip(".")
