"""What Sokoban's agent is asked, and how its replies are read."""

from collections.abc import Sequence
from typing import Any

from flowjax.envs.base import Message, Observation, Past, Style, tagged_action
from flowjax.envs.sokoban.rooms import DIRECTIONS, SYMBOLS, View

RULES = """You are playing Sokoban. Push every box onto a target.

Symbols: # wall, _ empty floor, O target, X box, √ box on a target, P you, S you on a target.
Moving towards a box pushes it one cell, if the cell behind it is free. Boxes can only be pushed, never pulled, and only
one at a time; walls stop you and the boxes. A box in a corner is stuck for good unless the corner is a target."""
INSTRUCTION = """Your actions are: up, down, left, right.
First reason step by step about the next move inside <think> </think>, then give one action inside
<action> </action>."""


def vocabulary(**options: Any) -> tuple[str, ...]:
    del options  # the same for every size
    return (*SYMBOLS, *DIRECTIONS, "none")


def prompt(observation: Observation, history: Sequence[Past], style: Style) -> list[Message]:
    """One user message. Compact: earlier turns, each closed by its action ("none" for an unreadable reply), and the
    grid without its outer wall, which is the same in every level; every symbol a word."""
    if style == "compact":
        words = [f"{_compact(past.observation)} {past.action or 'none'}" for past in history]
        return [{"role": "user", "content": " ".join([*words, _compact(observation.view)])}]
    past = [
        f"[Observation {p.turn}: '\n{_instruct(p.observation)}\n', Action {p.turn}: '{p.action or 'none'}']"
        for p in history
    ]
    parts = [RULES]
    if history:
        parts.append(f"You have taken {history[-1].turn} actions so far. The latest:\n" + "\n".join(past))
    parts.append(f"The grid now:\n{_instruct(observation.view)}")
    parts.append(INSTRUCTION)
    return [{"role": "user", "content": "\n\n".join(parts)}]


def follow_up(observation: Observation, style: Style) -> list[Message]:
    if style == "compact":
        return [{"role": "user", "content": _compact(observation.view)}]
    return [{"role": "user", "content": f"The grid now:\n{_instruct(observation.view)}\n\n{INSTRUCTION}"}]


def reply(action: str, style: Style) -> str:
    return action if style == "compact" else f"<action>{action}</action>"


def _instruct(view: View) -> str:
    return "\n".join(" " + " \t ".join(row) + " " for row in view.rows)


def _compact(view: View) -> str:
    return " ".join(cell for row in view.rows[1:-1] for cell in row[1:-1])


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The action that a reply names.

    With `reference`, as RewardFlow executes replies: the first of up, down, left, right, still that occurs anywhere
    between the first `<action>` and the first `</action>`, be it inside another word. `published_format` says which of
    those replies it then counts as valid.
    """
    if not reference:
        return tagged_action(reply, legal)
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if min(start, end) < 0:
        return None
    inside = text[start + len("<action>") : end]
    found = next((name for name in (*DIRECTIONS, "still") if name in inside), None)
    return found if found in legal else None


def published_format(reply: str) -> bool:
    """Whether RewardFlow may count the reply as valid: only beside a `<think>` pair, which it looks for as written."""
    return "<think>" in reply and "</think>" in reply
