"""What docs/canvas/text.md shows is read, can be done, and says what it says."""

import re
from pathlib import Path

import pytest

from flowjax.canvas.actions import Unreadable, apply, parse, parse_compact, show
from flowjax.canvas.checks import problems
from flowjax.canvas.graph import MAX_DEPTH, MAX_LOOP_COUNT
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.text import parse as workflow
from flowjax.canvas.text import show as text_of

PAGE = (Path(__file__).parents[2] / "docs/canvas/text.md").read_text()
LIBRARY = load_operators(entry_points=False)
START = workflow("Custom#n1 -> Plan -> (Verify ? done : (Review -> Revise)#x * 2#n4)#n3")
CELLS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
FORMS = [cell for cell in CELLS if not cell.startswith("<")]
ACTIONS = [cell for cell in CELLS if cell.startswith("<")]
LINES = re.findall(r"^    ((?:add|delete|modify|prompt|finish) ?.*)$", PAGE, re.M)


def test_the_page_shows_every_form():
    assert (len(FORMS), len(ACTIONS), len(LINES)) == (8, 11, 8)
    assert f"up to {MAX_DEPTH} deep" in PAGE and f"1 to {MAX_LOOP_COUNT} rounds" in PAGE


@pytest.mark.parametrize("text", FORMS)
def test_workflows(text: str):
    assert text_of(workflow(text)) == text
    assert problems(workflow(text), LIBRARY, ("small",)) == []


@pytest.mark.parametrize("text", ACTIONS)
def test_actions(text: str):
    action = parse(text)
    assert not isinstance(action, Unreadable), action.reason
    assert show(action) == text
    apply(action, START, LIBRARY, ("small",))


@pytest.mark.parametrize("line", LINES)
def test_lines(line: str):
    action = parse_compact(line)
    assert not isinstance(action, Unreadable), action.reason
    apply(action, START, LIBRARY, ("small",))


def test_every_difference_has_its_test():
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)` \|$", PAGE, re.M)
    assert len(named) == 7
    for name in named:
        assert re.search(rf'def {name}\([^"]*"""Defect: ', tests), name
