"""Responses of every kind, most of them nonsense: nothing crashes, and time grows no faster than length."""

import random
from collections.abc import Callable
from time import process_time

import pytest

from flowjax.canvas.actions import ACTIONS, STRUCTURES, TAGS, Unreadable, apply, parse, parse_compact, show
from flowjax.canvas.edits import EditError
from flowjax.canvas.text import parse as workflow
from flowjax.published.canvas import parse_leniently
from tests.canvas.graphs import LIBRARY

RESPONSES = 100_000
START = workflow("Plan -> [Custom, Programmer] -> ScEnsemble -> (Verify ? done : Revise)")
VALUES = (
    *LIBRARY, *ACTIONS, *STRUCTURES, "custom", "n1", "n4", "n5.true", "n99", "done", "0", "3", "99",
    "-1", "Custom, Revise",
    "[Custom, Plan] -> ScEnsemble", "(Review -> Revise) * 2", "Verify ? done : Revise", 'Custom{"go"}@small#n3',
    "add ", "delete ", "modify ", "finish", "into", "at", "->", "* 3", "@small",
)  # fmt: skip
GARBAGE = (
    "<", ">", "</", "&lt;", "&amp;", "<think>", "</think>", "```", "[action]", "[/action]", "<ACTION>", "{", '"', "\\",
    "((((", "]]]]", "\x00", "\ud800", "é→漢字🙂", "\u202e", "\r\n", "\t", "ready to finish", "x" * 50,
    "((" * 40, "[" * 60,
)  # fmt: skip


def response(rng: random.Random) -> str:
    """A few fragments, or an action with one of them changed."""
    parts: list[str] = []
    if rng.random() < 0.5:
        parts.append(f"<action>{rng.choice(ACTIONS)}</action>")
    for _ in range(rng.randrange(1, 7)):
        kind = rng.random()
        tag = rng.choice(tuple(TAGS))
        if kind < 0.5:
            parts.append(f"<{tag}>{rng.choice(VALUES)}</{tag}>")
        elif kind < 0.6:
            parts.append(rng.choice((f"<{tag}>", f"</{tag}>", f"[{tag}]", tag)))
        else:
            parts.append(rng.choice(VALUES if kind < 0.75 else GARBAGE))
    if rng.random() < 0.2:
        rng.shuffle(parts)
    return rng.choice(("", "", " ", "\n")).join(parts)


def test_no_response_crashes():
    rng = random.Random(0)
    read = refused = 0
    for _ in range(RESPONSES):
        text = response(rng)
        lenient = rng.random() < 0.4
        actions = (parse_leniently(text, LIBRARY) if lenient else parse(text), parse_compact(text))
        for action in actions:
            if isinstance(action, Unreadable):
                assert action.reason and len(action.reason) < 1_000
                continue
            read += 1
            if lenient and action is actions[0]:
                strict = parse(text)
                assert bool(action.repairs) == (isinstance(strict, Unreadable) or strict != action)
            if rng.random() < 0.2:
                try:
                    apply(action, START, LIBRARY, ("small",))
                except EditError as error:
                    refused += 1
                    assert str(error)
                again = parse(show(action))  # ids of what is added are not written, nor are counts checked before
                assert show(action) == show(again) if not isinstance(again, Unreadable) else "count" in again.reason
    assert read > RESPONSES / 20  # the generator makes actions, not only nonsense
    assert refused


ADD = "<action>add</action><operator>Custom</operator>"
HOSTILE: dict[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "spaces": lambda n: " " * n,
    "spaces inside an action": lambda n: "<action>add</action>" + " " * n + "x",
    "opening tags": lambda n: "<action>" * n,
    "pairs of tags": lambda n: "<action>add</action>" + "<prompt>x</prompt>" * n,
    "closing tags": lambda n: "</prompt>" * n,
    "half tags": lambda n: ADD + "<" * n,
    "spaced half tags": lambda n: "< " * n,
    "square brackets": lambda n: "[" * n,
    "many thoughts": lambda n: "<think>" * n,
    "many ends of thoughts": lambda n: "</think>" * n,
    "fences": lambda n: "```" * n,
    "ampersands": lambda n: "<action>finish</action><answer>" + "&lt" * n + "</answer>",
    "long prompt": lambda n: ADD[:-1] + "><prompt>" + "word < " * n + "x</prompt>",
    "workflow deep": lambda n: "<action>add</action><workflow>" + "(" * n + "</workflow>",
    "workflow long": lambda n: "<action>add</action><workflow>" + "Custom -> " * n + "Custom</workflow>",
    "workflow of misspelt names": lambda n: "<action>add</action><workflow>" + "custon -> " * n + "custon</workflow>",
    "workflow string without end": lambda n: '<action>add</action><workflow>A{"' + "\\\\" * n + "</workflow>",
    "many operators": lambda n: (
        "<action>add</action><structure>parallel</structure><operators>" + "Custom, " * n + "Custom</operators>"
    ),
    "digits": lambda n: f"<action>modify</action><target>n1</target><count>{'9' * n}</count>",
    "compact": lambda n: "add " + "[ Custom , " * n,
    "compact places": lambda n: "add Custom" + " into n1 at 1" * n,
    "finishing": lambda n: "let's " * n,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_time_is_linear(name: str):
    """Eight times the length takes about eight times as long: quadratic time would take 64 times."""

    def seconds(text: str) -> float:
        best = float("inf")
        for _ in range(3):
            started = process_time()
            parse(text)
            parse_leniently(text, LIBRARY)
            parse_compact(text)
            best = min(best, process_time() - started)
        return best

    short, long = HOSTILE[name](1_000), HOSTILE[name](8_000)
    floor = 2e-4  # of what a clock and fixed costs can tell
    assert seconds(long) < 30 * max(seconds(short), floor)
