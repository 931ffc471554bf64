"""Lenient reading. Several cases are those that a published parser met (square brackets, fences, bare names)."""

import pytest

from flowjax.canvas.actions import Action, Add, Delete, Finish, Modify, SetPrompt, Unreadable
from flowjax.canvas.graph import Call, Conditional, Loop, Parallel, Sequence
from flowjax.published.canvas import parse_leniently
from tests.canvas.graphs import LIBRARY

CUSTOM, REVISE = Call("Custom"), Call("Revise")
ADD = "<action>add</action><operator>Custom</operator>"


@pytest.mark.parametrize(
    ("text", "action", "repairs"),
    [
        (ADD, Add(CUSTOM), ()),
        ("<think>so" + ADD, Add(CUSTOM), ("unclosed_thinking",)),
        (f"```xml\n{ADD}\n```", Add(CUSTOM), ("code_fence",)),
        ("[action]ADD[/action][operator]Custom[/operator]", Add(CUSTOM), ("tag_form", "names")),
        ("<ACTION>add</ACTION><Operator>custom</Operator>", Add(CUSTOM), ("tag_form", "names")),
        (f"{ADD}<action>finish</action>", Add(CUSTOM), ("several_actions",)),
        (f"{ADD} Now I wait.", Add(CUSTOM), ("extra_text",)),
        ("<action>add</action><operator>Custom", Add(CUSTOM), ("unclosed_tag",)),
        ("<action>add<operator>Custom</operator>", Add(CUSTOM), ("unclosed_tag",)),
        (f"{ADD}<operator>Plan</operator>", Add(CUSTOM), ("repeated_tag",)),
        (f"{ADD}<target>n3</target>", Add(CUSTOM), ("needless_tag",)),
        ("<action>modify</action><operator>Custom</operator><target>n1</target>", Modify("n1", "Custom"), ("order",)),
        ("<action>add</action><operator>`programer`</operator>", Add(Call("Programmer")), ("names",)),
        (
            "<action>add</action><structure>parallel</structure><operators>custom; Revise</operators>",
            Add(Parallel((CUSTOM, REVISE))),
            ("separators", "names"),
        ),
        (
            "<action>parallel</action><operators>Custom, Revise</operators>",
            Add(Parallel((CUSTOM, REVISE))),
            ("structure",),
        ),
        (
            "<action>add</action><structure>loop</structure><operators>Revise</operators><count>99</count>",
            Add(Loop(REVISE, 10)),
            ("count",),
        ),
        (
            "<action>add</action><structure>sequence</structure><operators>Custom, Revise</operators>",
            Add(Sequence((CUSTOM, REVISE))),
            ("structure",),
        ),
        (
            "<action>add</action><structure>conditional</structure>"
            "<condition>verify</condition><true>Done</true><false>Revise</false>",
            Add(Conditional(Call("Verify"), None, REVISE)),
            ("names",),
        ),
        (
            "<action>add</action><workflow>custom → (Revise) * 50</workflow>",
            Add(Sequence((CUSTOM, Loop(REVISE, 10)))),
            ("separators", "names", "count"),
        ),
        (f"{ADD}<position>at 0</position>", Add(CUSTOM, "", 0), ("position",)),
        (f"{ADD}<position>-3</position>", Add(CUSTOM, "", 0), ("position",)),
        (
            "<action>add</action><structure>loop</structure><operators>Revise</operators><count>0</count>",
            Add(Loop(REVISE, 1)),
            ("count",),
        ),
        (f"{ADD}<position>first</position>", Add(CUSTOM), ("position",)),
        ("<action>delete</action><target>node n3</target>", Delete("n3"), ("target",)),
        (
            "<action>add</action><structure>parallel</structure>"
            "<operators>Custom, Custom</operators><prompt>x</prompt>",
            Add(Parallel((Call("Custom", "x"), CUSTOM))),
            ("prompts",),
        ),
        (f"{ADD}<prompt> </prompt>", Add(CUSTOM), ("prompts",)),
        (
            "<action>set_prompt</action><target>n1</target><prompt>if a < b</then go</prompt>",
            SetPrompt("n1", "if a < b</then go"),
            ("stray_sign",),
        ),
        ("I will add a Custom step.", Add(CUSTOM), ("bare_operator",)),
        ("custom", Add(CUSTOM), ("bare_operator", "names")),
        ("Custom -> (Revise) * 2", Add(Sequence((CUSTOM, Loop(REVISE, 2)))), ("bare_workflow",)),
        ("I think we are ready to finish.", Finish(), ("finish_phrase",)),
        ("finish", Finish(), ("finish_phrase",)),
    ],
)
def test_repairs(text: str, action: Action, repairs: tuple[str, ...]):
    result = parse_leniently(text, LIBRARY)
    assert not isinstance(result, Unreadable), result.reason
    assert result == action
    assert result.repairs == repairs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no operator is named"),
        ("Custom or Revise?", "several operators are named (Custom, Revise)"),
        ("<action>add</action>", "`add` needs"),
        ("<action>delete</action>", "`<target>` is missing"),
        ("<action>add</action><workflow>Custom -></workflow>", "In `<workflow>`: Character"),
        ("<action>zzzzzz</action>", "no action `zzzzzz`"),
        ("<action></action>", "no action ``"),
    ],
)
def test_what_nobody_can_repair(text: str, says: str):
    result = parse_leniently(text, LIBRARY)
    assert isinstance(result, Unreadable)
    assert says in result.reason
