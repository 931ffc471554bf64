"""What the code world's agent is asked, and how its answers are worded."""

from collections.abc import Sequence
from typing import Any

from flowjax.envs.base import Message, Observation, Past, Style, WorldError
from flowjax.envs.code.generated import words
from flowjax.envs.code.options import read_options
from flowjax.envs.code.statements import read, read_short

INSTRUCTION = """Solve it in Python 3. Reason first if you like, then give one complete program in one ```python block;
only the last such block counts."""
_WRONG, _FAILED = "wrong", "failed"  # what a compact prompt says of the last program: it answered, or it did not


def vocabulary(**options: Any) -> tuple[str, ...]:
    chosen = read_options(options)
    if chosen.path:
        raise WorldError(
            f"env.options path={chosen.path!r}: the problems of a file have no compact wording; set env.prompt=instruct"
        )
    return (*words(chosen.kinds), _WRONG, _FAILED)


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message. Compact: the problem in a few words, and a word for the last program's verdict."""
    statement, feedback = read(observation.text)
    if style == "compact":
        told = [read_short(observation.text), *([_verdict(feedback)] if feedback else [])]
        return [{"role": "user", "content": " ".join(told)}]
    parts = [statement]
    if history and history[-1].action:
        parts.append(f"The program that you handed in last:\n```python\n{history[-1].action}\n```")
    if feedback:
        parts.append(f"It {feedback}")
    return [{"role": "user", "content": "\n\n".join([*parts, INSTRUCTION])}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    """How the last program did, or that there was none."""
    _, feedback = read(observation.text)
    if style == "compact":
        return [{"role": "user", "content": _verdict(feedback)}]
    said = f"It {feedback}" if feedback else "There was no program in that."
    return [{"role": "user", "content": f"{said}\n\n{INSTRUCTION}"}]


def _verdict(feedback: str) -> str:
    return _WRONG if " returned " in feedback else _FAILED


def reply(action: str, style: Style) -> str:
    return action if style == "compact" else f"```python\n{action}\n```"
