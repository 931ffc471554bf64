"""What the math world's agent is asked, how actions are worded, and how replies are read."""

import string
from collections.abc import Sequence
from typing import Any

from flowjax.envs.base import Message, Observation, Past, Style
from flowjax.envs.math import actions
from flowjax.envs.math.actions import ANSWER, BOXED
from flowjax.envs.math.options import read_options
from flowjax.grading.math import last_boxed

CALCULATED = "Calculated so far:"  # the line between a question and the results
SPACE = "_"  # of spelled texts
INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
CALCULATOR_INSTRUCTION = """Reason step by step inside <think> </think>, then give one action inside <action> </action>:
calculate[<expression>] for numbers joined by + - * / ^ and parentheses, or answer[<text>] for your final answer."""


def vocabulary(**options: Any) -> tuple[str, ...]:
    """Characters, in which compact texts are spelled, and the beginnings of actions."""
    chosen = read_options(options)
    spelled = string.digits + "-=?" + chosen.operators
    if chosen.calculator:
        spelled += SPACE + "+*/.()]"
    elif chosen.answer == "boxed":
        spelled += r"\boxed{}"
    if chosen.path:
        spelled += string.printable.strip()
    return (*dict.fromkeys(spelled), *(("calculate[", "answer[") if chosen.calculator else ()))


def show(question: str, results: Sequence[str]) -> str:
    """The text of an observation."""
    return "\n".join([question, CALCULATED, *results]) if results else question


def _shown(observation: Observation) -> list[str]:
    """The question and the results."""
    question, found, results = observation.text.rpartition(f"\n{CALCULATED}\n")
    return [question, *results.split("\n")] if found else [observation.text]


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
    """How the expert words an action: spelled for models whose words are characters, or in tags."""
    name, content = actions.read(action)
    if style == "compact":
        return f"{name}[ {_spelled(content)} ]" if name else _spelled(action)
    return f"<action>{action}</action>" if name else action


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """A single turn's whole reply if anything is in it that could be the answer; with the calculator, the action in the
    last `<action>` pair, or the whole of a reply without tags."""
    del reference  # the published recipe differs in the verdict: option answer="anywhere"
    if ANSWER not in legal:
        text = _unspelled(reply)
        return text if text and (BOXED not in legal or last_boxed(text)) else None
    end = reply.rfind("</action>")
    start = reply.rfind("<action>", 0, end if end >= 0 else len(reply))
    if (end >= 0) != (start >= 0):
        return None
    text = reply[start + len("<action>") : end] if start >= 0 and end >= 0 else reply
    name, content = actions.read(text)
    content = _unspelled(content)
    if not content or not any(template.startswith(f"{name}[") for template in legal):
        return None
    return f"{name}[{content}]"
