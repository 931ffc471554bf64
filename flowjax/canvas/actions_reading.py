"""A response read strictly, by the actions' grammar."""

import re

from flowjax.canvas.actions_grammar import (
    TAGS,
    Elements,
    GrammarError,
    action_of,
    check_order,
    form_of,
)
from flowjax.canvas.actions_kinds import Action
from flowjax.canvas.checks import nearest

_OPENING = re.compile(r"<([A-Za-z_]{1,30})>")
_ANY_TAG = re.compile(rf"</?(?:{'|'.join(TAGS)})>")
_SPACE = re.compile(r"\s*")
_EXAMPLE = "`<action>add</action><operator>Custom</operator>`"


def read(text: str) -> Action:
    """The action of a response.

    Raises:
        GrammarError: the response is not thinking or plain text, then one action, and nothing else.
    """
    elements = _elements(after_thinking(text))
    form = form_of(elements)
    check_order(form, [tag for tag, _ in elements[1:]])
    return action_of(form, elements)


def after_thinking(text: str) -> str:
    """What comes after the thinking, if there is any.

    Raises:
        GrammarError: the thinking has no end.
    """
    before, closing, after = text.partition("</think>")
    if not closing and "<think>" in before:
        raise GrammarError("The thinking has no end: close it with `</think>`, and then write one action.")
    return after if closing else before


def unescaped(value: str) -> str:
    """What a value between tags says, without the space around it."""
    value = value.strip()
    for name, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        value = value.replace(name, character)
    return value


def _elements(text: str) -> Elements:
    start = text.find("<action>")
    if start < 0:
        raise GrammarError(_no_action(text))
    if stray := _ANY_TAG.search(text, 0, start):
        raise GrammarError(f"`{stray[0]}` stands before `<action>`: start with `<action>`, as in {_EXAMPLE}.")
    elements: list[tuple[str, str]] = []
    at = start
    while (at := _after_space(text, at)) < len(text):
        opening = _OPENING.match(text, at)
        if opening is None:
            last = f"</{elements[-1][0]}>"
            raise GrammarError(f"Nothing may come after the action: end with `{last}`, without `{text[at : at + 30]}`.")
        tag = opening[1]
        if tag not in TAGS:
            near = nearest(tag, TAGS)
            raise GrammarError(f"There is no tag `<{tag}>`{f': did you mean `<{near}>`?' if near else '.'}")
        if tag == "action" and elements:
            raise GrammarError("There are several actions: write exactly one per turn, and wait for what it brings.")
        end, closing = text.find("</", opening.end()), f"</{tag}>"
        if end < 0 or not text.startswith(closing, end):
            found = f" before `{text[end : end + 30]}`" if end >= 0 else ""
            raise GrammarError(f"`<{tag}>` is not closed: write `{closing}`{found}.")
        value = text[opening.end() : end]
        if value.endswith("<"):
            raise GrammarError(f"`<{tag}>` ends with `<`: write it as `&lt;`.")
        elements.append((tag, unescaped(value)))
        at = end + len(closing)
    return elements


def _no_action(text: str) -> str:
    if not text.strip():
        return f"The response is empty: write one action, such as {_EXAMPLE}."
    if "[action]" in text.lower():
        return f"Tags have angle brackets, not square ones: write {_EXAMPLE}."
    if "<action" in text.lower():
        return f"The tag is `<action>`, in lower case and with nothing else inside it: write {_EXAMPLE}."
    return f"There is no action: write exactly one, such as {_EXAMPLE}, or `<action>finish</action>`."


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at
