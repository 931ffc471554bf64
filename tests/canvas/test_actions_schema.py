"""The grammar for constrained sampling against strict reading, as xgrammar, vLLM's default, matches it."""

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


def is_done(action) -> bool:
    try:
        return not isinstance(action, Unreadable) and bool(apply(action, START, LIBRARY, BACKENDS))
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


def test_without_backends_none_can_be_named():
    for compact in (False, True):
        grammar = schema(LIBRARY, compact=compact)["grammar"]
        assert "@" not in grammar and "backend" not in grammar
        assert matches(grammar, "add Custom" if compact else tagged(action="add", operator="Custom"))
