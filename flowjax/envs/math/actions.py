"""Actions of the math world, as templates and taken apart."""

import re

CALCULATE, ANSWER = "calculate[<expression>]", "answer[<text>]"
BOXED, WHOLE = r"\boxed{<text>}", "<text>"  # the one legal action of a single turn: any reply in which it stands

_ACTION = re.compile(r"\s*(calculate|answer)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)


def read(action: str) -> tuple[str, str]:
    """Name and content of an action, ("", "") where it is none."""
    found = _ACTION.fullmatch(action)
    return (found.group(1).lower(), found.group(2).strip()) if found else ("", "")
