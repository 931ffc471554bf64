"""The grammar for constrained sampling against strict reading, as xgrammar, vLLM's default, matches it."""

import json

import pytest

from flowjax.canvas.actions import Unreadable, apply, parse, parse_compact, schema
from flowjax.canvas.edits import EditError
from flowjax.canvas.text import parse as workflow
from tests.canvas.graphs import LIBRARY
from tests.canvas.test_actions import COMPACT, tagged

xgrammar = pytest.importorskip("xgrammar", reason="comes with vLLM")

BACKENDS = ("small", "gpt-4.1")
START = workflow("Plan -> [Custom, Programmer] -> ScEnsemble -> (Verify ? done : Revise)#check -> (Revise)#x * 2#again")


def matches(grammar: str, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    return _is_grammar_accept_string(xgrammar.Grammar.from_ebnf(grammar), text)


def is_done(action, backends=BACKENDS) -> bool:
    try:
        return not isinstance(action, Unreadable) and bool(apply(action, START, LIBRARY, backends))
    except EditError:
        return False


GOOD = [
    tagged(action="add", operator="Custom"),
    tagged(action="add", operator="Custom", backend="gpt-4.1", into="check.false", position="0", prompt="a < b &amp;"),
    tagged(action="add", structure="parallel", operators="Custom, Programmer, Plan"),
    tagged(action="add", structure="parallel", operators="Custom, Plan", into="n2", prompt="one", prompt_="two"),
    tagged(action="add", structure="conditional", condition="Verify", true="done", false="Revise"),
    tagged(action="add", structure="conditional", condition="Verify", true="Format"),
    tagged(action="add", structure="conditional", condition="Verify", true="Plan", prompt="x", prompt_="y"),
    tagged(action="add", structure="loop", operators="Revise"),
    tagged(action="add", structure="loop", operators="Review, Revise", count="10", prompt="x", prompt_="y"),
    tagged(action="add", workflow="[Custom, (Plan -> Custom) * 2] -> ScEnsemble -> (Verify ? Plan : [Plan, Plan])"),
    tagged(action="add", workflow='Verify ? done : Revise{"say \\"x &lt; y\\""}@small', into="again"),
    tagged(action="delete", target="n3"),
    tagged(action="modify", target="n3", operator="Plan", prompt="go"),
    tagged(action="modify", target="n3", backend="small"),
    tagged(action="modify", target="again", count="7"),
    tagged(action="set_prompt", target="n3", prompt="two\nlines, 漢字"),
    tagged(action="finish"),
    tagged(action="finish", answer="x = 3"),
]  # fmt: skip
BAD = [
    "",
    "Custom",
    tagged(action="add"),
    tagged(action="add", operator="custom"),
    tagged(action="add", operator="Custom", backend="large"),
    tagged(action="add", operator="Custom") + " ",
    tagged(action="add", operator="Custom") + tagged(action="finish"),
    tagged(action="add", operator="Custom", position="0", into="n3"),
    tagged(action="add", operator="Custom", prompt=""),
    tagged(action="add", operator="Custom", prompt="a</b"),
    tagged(action="add", structure="sequence", operators="Custom, Plan"),
    tagged(action="add", structure="parallel", operators="Custom"),
    tagged(action="add", structure="parallel", operators="Custom, ScEnsemble"),
    tagged(action="add", structure="parallel", operators="Custom, Plan", prompt="one"),
    tagged(action="add", structure="conditional", condition="Verify", true="done", false="done"),
    tagged(action="add", structure="conditional", condition="Verify", true="done"),
    tagged(action="add", structure="loop", operators="Revise", count="99"),
    tagged(action="add", structure="loop", operators="Revise", count="0"),
    tagged(action="add", workflow="Custom ->"),
    tagged(action="add", workflow="[Custom, ScEnsemble]"),
    tagged(action="add", workflow="Verify ? done : done"),
    tagged(action="add", workflow="(Custom) * 11"),
    tagged(action="delete"),
    tagged(action="delete", target="the last"),
    tagged(action="modify", target="n3"),
    tagged(action="set_prompt", target="n3"),
    tagged(action="finish", target="n3"),
]


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_the_grammar_lets_through_what_can_be_done(text: str):
    possible = is_done(parse(text)) and text == text.strip()
    assert possible == (text in GOOD)
    assert matches(schema(LIBRARY, BACKENDS)["grammar"], text) == possible


@pytest.mark.parametrize("line", [line for line, _ in COMPACT])
def test_compact_lines(line: str):
    assert matches(schema(LIBRARY, BACKENDS, compact=True)["grammar"], line)
    assert not isinstance(parse_compact(line), Unreadable)


@pytest.mark.parametrize(
    "line", ["", "add", "add custom", "add [ Custom ]", "delete", "modify n2", "add Custom\nfinish"]
)
def test_no_other_lines(line: str):
    assert not matches(schema(LIBRARY, BACKENDS, compact=True)["grammar"], line)


# No white space in front, nor what begins or ends a thinking: the readers refuse these, or read another action.
@pytest.mark.parametrize(
    "text", ["\u00a0", "\u3000x", "\u2028", "\x1f", "x <think>", "x</think>y", "<think>", "<<think>"]
)
def test_texts_that_are_not_read_are_not_offered(text: str):
    assert not matches(
        schema(LIBRARY)["grammar"], f"<action>set_prompt</action><target>n1</target><prompt>{text}</prompt>"
    )
    assert not matches(schema(LIBRARY, compact=True)["grammar"], f"prompt n1 {text}")
    if "think" in text:
        assert not matches(schema(LIBRARY, compact=True)["grammar"], f'add Custom{{"{text}"}}')


@pytest.mark.parametrize("text", ["a\u00a0b", "a < b", "x << 2", "<b>", "a &lt;think>", "at/to", "é\u3000"])
def test_texts_that_are_read_are_offered(text: str):
    tags = f"<action>set_prompt</action><target>n1</target><prompt>{text}</prompt>"
    assert matches(schema(LIBRARY)["grammar"], tags) and not isinstance(parse(tags), Unreadable)
    for line in (f"prompt n1 {text}", f'add Custom{{"{text}"}}', f'add Custom{{"{text} \\" <"}} at 1'):
        assert matches(schema(LIBRARY, compact=True)["grammar"], line) and not isinstance(
            parse_compact(line), Unreadable
        )


@pytest.mark.parametrize("backends", [("my model",), ("my model", "a<b&c", "small", "Größe")])
def test_backends_are_offered_as_they_are_read(backends: tuple[str, ...]):
    for name in backends:
        said = json.dumps(name)
        tags = tagged(action="add", workflow=f"Custom@{said}".replace("&", "&amp;").replace("<", "&lt;"))
        if name == "small":
            tags = tagged(action="modify", target="n1", backend=name)
        assert matches(schema(LIBRARY, backends)["grammar"], tags) and is_done(parse(tags), backends)
        lines = ["modify n1 @small"] if name == "small" else [f"add Custom@{said}", f"modify n1 Custom @{said}"]
        for line in lines:
            assert matches(schema(LIBRARY, backends, compact=True)["grammar"], line)
            assert is_done(parse_compact(line), backends)
        if name != "small":
            assert not matches(schema(LIBRARY, backends)["grammar"], tagged(action="modify", target="n1", backend=name))
            assert not matches(schema(LIBRARY, backends, compact=True)["grammar"], f"modify n1 @{name}")


def test_without_backends_none_can_be_named():
    for compact in (False, True):
        grammar = schema(LIBRARY, compact=compact)["grammar"]
        assert "@" not in grammar and "backend" not in grammar
        assert matches(grammar, "add Custom" if compact else tagged(action="add", operator="Custom"))
