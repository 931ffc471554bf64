"""Programs: how one is found in a reply, and when two are the same."""

import ast
import re

from flowjax.envs.code.generated import HEAD
from flowjax.grading.code_asserts import parse_quietly

MAX_PROGRAM_CHARACTERS = 1 << 16
_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_REFERENCE_LEAST_CHARACTERS = 20


def parse_action(reply: str, legal: tuple[str, ...], *, reference: bool = False) -> str | None:
    """The program in a reply: its last fenced block, or else what stands in its last `<answer>`, or else the whole
    reply where that is Python that does something.

    `reference`: the published rule, by which a block of under 20 characters is none and any reply that has the look of
    Python is a program.
    """
    del legal  # every program is
    blocks = [block.strip("\r\n") for block in _FENCED.findall(reply)]
    if reference:
        blocks = [block for block in blocks if len(block) >= _REFERENCE_LEAST_CHARACTERS]
    found = blocks[-1] if blocks else None
    if found is None and not reference:
        found = _answer(reply)
    if found is None:
        text = reply.strip()
        looks = re.search(r"\b(def|import|print|return)\b", text) is not None if reference else _does_something(text)
        found = text if looks else None
    if found is None or not found.strip() or "\0" in found or len(found) > MAX_PROGRAM_CHARACTERS:
        return None
    return found


def _answer(reply: str) -> str | None:
    """What stands in the last `<answer>` pair."""
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(end, 0))
    return reply[start + len("<answer>") : end].strip("\r\n") if start >= 0 else None


def _does_something(text: str) -> bool:
    """Whether a text is Python with a statement in it, not a word or a sum that happens to parse."""
    module = parse_quietly(text) if len(text) <= MAX_PROGRAM_CHARACTERS else None
    if module is None:
        return text.startswith(HEAD)  # a compact reply that went wrong is still a program that was handed in
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in module.body)


def normalised(program: str) -> bytes:
    """A program without its layout and comments; as it stands where it does not parse."""
    module = parse_quietly(program)
    try:
        text = program.strip() if module is None else ast.dump(module)
    except RecursionError:
        text = program.strip()
    return text.encode("utf-8", "surrogatepass")
