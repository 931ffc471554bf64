"""Problems of mathematics: one answer, and if asked for a calculator before it. State: the problem and what was
calculated.

In a single turn the whole reply is the answer. With the calculator a turn is `calculate[...]` or `answer[...]`.
"""

import dataclasses
import functools
import importlib.util
import re
import string
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import Message, Observation, Past, Split, Step, Style, WorldError
from flowjax.envs.math.calculator import CalculatorError, calculate
from flowjax.envs.math.problems import Arithmetic, Problem, generate, load
from flowjax.grading import math as grading
from flowjax.grading.processes import GraderError, GraderProcesses
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

OUTCOMES = ("success", "answered", "calculations")
TASKS = 1 << 31  # length of a source of generated problems; slice it
ANSWERS = ("boxed", "last_number", "whole", "anywhere")
CALCULATE, ANSWER = "calculate[<expression>]", "answer[<text>]"
BOXED, WHOLE = r"\boxed{<text>}", "<text>"  # the one legal action of a single turn: any reply in which it stands
CALCULATED = "Calculated so far:"  # the line between a question and the results
SPACE = "_"  # of spelled texts
GRADING_TIMEOUT_S = 3  # three such waits, two readings and a comparison, are below config.env.step_timeout_s

_ACTION = re.compile(r"\s*(calculate|answer)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
CALCULATOR_INSTRUCTION = """Reason step by step inside <think> </think>, then give one action inside <action> </action>:
calculate[<expression>] for numbers joined by + - * / ^ and parentheses, or answer[<text>] for your final answer."""


class Math:
    """One problem at a time. A task carries its question and answer in `payload`.

    `calculator` is the number of calculations that an episode may hold; 0 makes it a single turn. `answer` says where
    the answer of a single turn stands in the reply: boxed, last_number, whole, or anywhere, which hands the whole reply
    to math-verify as the published recipe does.
    """

    def __init__(self, calculator: int, answer: str):
        self._calculator, self._rule = calculator, answer
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
    def rule(self) -> str:
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
        name, content = _split(action)
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
        text = "\n".join([problem.question, CALCULATED, *results]) if results else problem.question
        return Observation(text, self.legal, key)

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


def _options(
    path: str = "", calculator: int = 0, answer: str = "boxed", **options: Any
) -> tuple[str, int, str, Arithmetic]:
    try:
        arithmetic = Arithmetic(**options)
    except TypeError as error:
        known = ", ".join(["path", "calculator", "answer", *(f.name for f in dataclasses.fields(Arithmetic))])
        raise WorldError(f"env.options {sorted(options)}: those of math are {known} ({error})") from error
    if answer not in ANSWERS:
        raise WorldError(f"env.options answer={answer!r}: give one of {', '.join(ANSWERS)}")
    if calculator < 0:
        raise WorldError(f"env.options calculator={calculator}: give the most calculations of an episode, 0 for none")
    if (path or answer == "anywhere") and importlib.util.find_spec("math_verify") is None:
        raise WorldError("answers that are formulas need math-verify: pip install 'flowjax[math]'")
    return path, calculator, answer, arithmetic


def make(**options: Any) -> Math:
    """Options: path, of a file or folder with problems ("": arithmetic is generated); calculator, answer, see `Math`;
    digits, terms, operators, see `Arithmetic`."""
    _, calculator, answer, _ = _options(**options)
    return Math(calculator, answer)


class _GeneratedSource:
    """The index-th problem of a split, generated when asked for."""

    def __init__(self, split: Split, data_seed: int, arithmetic: Arithmetic):
        self._split: Split = split
        self._data_seed, self._arithmetic = data_seed, arithmetic

    def __call__(self, index: int) -> Task:
        problem = generate(np.random.default_rng([self._data_seed, index]), self._arithmetic, self._split)
        return _task(problem, f"math-{self._split}-{self._data_seed}-{index}", index)


class _FileSource:
    """The index-th problem of a file's split, which is shuffled by the data seed."""

    def __init__(self, split: Split, data_seed: int, problems: Sequence[Problem]):
        self._split, self._problems = split, problems
        self._order = np.random.default_rng(data_seed).permutation(len(problems))

    def __call__(self, index: int) -> Task:
        row = int(self._order[index])
        return _task(self._problems[row], f"math-{self._split}-row-{row}", row)


def _task(problem: Problem, task_id: str, seed: int) -> Task:
    payload = {"question": problem.question, "answer": problem.answer, "expression": problem.expression}
    return Task(task_id, "math", seed, payload)


def tasks(split: Split, data_seed: int, **options: Any) -> "grain.MapDataset[Task]":
    """Generated problems without end, or those of a file. Train and held-out problems differ by content."""
    import grain  # imports jax, which processes that only hold environments do without

    if split not in ("train", "held_out"):
        raise WorldError(f"split is {split!r}: give train or held_out")
    path, _, _, arithmetic = _options(**options)
    if not path:
        return grain.MapDataset.range(TASKS).map(_GeneratedSource(split, data_seed, arithmetic))
    problems = load(path, split)
    return grain.MapDataset.range(len(problems)).map(_FileSource(split, data_seed, problems))


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


def vocabulary(**options: Any) -> tuple[str, ...]:
    """Characters, in which compact texts are spelled, and the beginnings of actions."""
    path, calculator, answer, arithmetic = _options(**options)
    spelled = string.digits + "-=?" + arithmetic.operators
    if calculator:
        spelled += SPACE + "+*/.()]"
    elif answer == "boxed":
        spelled += r"\boxed{}"
    if path:
        spelled += string.printable.strip()
    return (*dict.fromkeys(spelled), *(("calculate[", "answer[") if calculator else ()))


def _spelled(text: str) -> str:
    return " ".join(SPACE if character.isspace() else character for character in text)


def _unspelled(text: str) -> str:
    words = text.split()
    if any(len(word) > 1 for word in words):
        return text.strip()
    return "".join(words).replace(SPACE, " ")


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message. Compact: the problem and the results so far, spelled; earlier turns show in these alone."""
    if style == "compact":
        return [{"role": "user", "content": _spelled("\n".join(_shown(observation)))}]
    question, *results = _shown(observation)
    parts = [question]
    if results:
        parts.append("\n".join([CALCULATED, *results]))
    if history and not _has_calculator(observation):
        parts.append(f"Your last reply held no answer: {history[-1].action or 'none'}")
    parts.append(CALCULATOR_INSTRUCTION if _has_calculator(observation) else INSTRUCTION)
    return [{"role": "user", "content": "\n\n".join(parts)}]


def _shown(observation: Observation) -> list[str]:
    """The question and the results."""
    question, found, results = observation.text.rpartition(f"\n{CALCULATED}\n")
    return [question, *results.split("\n")] if found else [observation.text]


def _has_calculator(observation: Observation) -> bool:
    return ANSWER in observation.legal_actions


def follow_up(observation: Observation, style: Style) -> list[Message]:
    """The latest result. After an action that was none, the problem or the result before."""
    latest = _shown(observation)[-1]
    if style == "compact":
        return [{"role": "user", "content": _spelled(latest)}]
    instruction = CALCULATOR_INSTRUCTION if _has_calculator(observation) else INSTRUCTION
    return [{"role": "user", "content": f"{latest}\n\n{instruction}"}]


def reply(action: str, style: Style) -> str:
    name, content = _split(action)
    if style == "compact":
        return f"{name}[ {_spelled(content)} ]" if name else _spelled(action)
    return f"<action>{action}</action>" if name else action


def _split(action: str) -> tuple[str, str]:
    """Name and content of an action, ("", "") where it is none."""
    found = _ACTION.fullmatch(action)
    return (found.group(1).lower(), found.group(2).strip()) if found else ("", "")


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """A single turn's whole reply if anything is in it that could be the answer; with the calculator, the action in the
    last `<action>` pair, or the whole of a reply without tags."""
    del reference  # the published recipe differs in the verdict: option answer="anywhere"
    if ANSWER not in legal:
        text = _unspelled(reply)
        return text if text and (BOXED not in legal or grading.last_boxed(text)) else None
    end = reply.rfind("</action>")
    start = reply.rfind("<action>", 0, end if end >= 0 else len(reply))
    if (end >= 0) != (start >= 0):
        return None
    text = reply[start + len("<action>") : end] if start >= 0 and end >= 0 else reply
    name, content = _split(text)
    content = _unspelled(content)
    if not content or not any(template.startswith(f"{name}[") for template in legal):
        return None
    return f"{name}[{content}]"
