import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from flowjax.canvas.draw import ROLE_COLOURS, STATUS_COLOURS, mermaid, note, output_text, shortened, svg
from flowjax.canvas.graph import Call, Sequence, Workflow
from flowjax.canvas.text import parse
from flowjax.canvas.values import NodeRun, Usage, WorkflowRun
from tests.canvas.graphs import LIBRARY, WORKFLOWS

WHOLE = parse('Plan{"a < b & c"}@small -> [Custom, Programmer] -> ScEnsemble -> (Verify ? done : (Revise) * 4)')
RUN = WorkflowRun(
    answer="6 < 7",
    status="ok",
    state={},
    trace=(
        NodeRun("n1", "Plan", "ok", cached=True, outputs={"plan": "first <b>this</b>"}),
        NodeRun("n3", "Custom", "error", error="no answer"),
        NodeRun("n4", "Programmer", "ok", usage=Usage(1, 300, 40, 0.0025), outputs={"code": "print(6)"}),
        NodeRun("n9", "Revise", "ok", turn=1, usage=Usage(1, 10, 5)),
        NodeRun("n9", "Revise", "ok", turn=2, cached=True, outputs={"answer": "6 < 7"}),
    ),
    usage=Usage(),
    seconds=1.0,
)


def texts(document: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(document).iter("{http://www.w3.org/2000/svg}text")]


def test_every_part_is_drawn():
    said = texts(svg(WHOLE, operators=LIBRARY))
    for part in ("problem", "Plan @small", "“a < b & c”", "n2 side by side", "pass", "fail", "at most 4×", "answer"):
        assert part in said
    colours = set(re.findall(r"#[0-9a-f]{6}", svg(WHOLE, operators=LIBRARY)))
    assert {ROLE_COLOURS[role] for role in ("planner", "solver", "combiner", "checker", "reviser")} <= colours


def test_after_a_run_it_says_how_it_went():
    document = svg(WHOLE, RUN, LIBRARY)
    said = texts(document)
    for part in (
        "ok · cached",
        "first <b>this</b>",
        "error",
        "no answer",
        "ok · 340 tokens · cost 0.0025",
        "print(6)",
        "ok · 2 runs · 1 cached · 15 tokens",
        "not run",
        "answer: 6 < 7",
    ):
        assert part in said
    assert STATUS_COLOURS["ok"] in document and STATUS_COLOURS["error"] in document


@given(WORKFLOWS)
@settings(max_examples=100)
def test_any_workflow_is_drawn_inside_its_frame(workflow: Workflow):
    document = svg(workflow, operators=LIBRARY)
    root = ElementTree.fromstring(document)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert x >= 0 and x + float(box.get("width", 0)) <= width + 0.1
        assert y >= 0 and y + float(box.get("height", 0)) <= height + 0.1
    assert document.count("<rect") >= len(list(workflow.calls()))
    mermaid(workflow, operators=LIBRARY)


def test_boxes_do_not_overlap():
    root = ElementTree.fromstring(svg(parse("[A, B -> (C ? D : [E, F])] -> (G) * 2"), operators=LIBRARY))
    boxes = [
        tuple(float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        for group in root.iter("{http://www.w3.org/2000/svg}g")
        for box in list(group)[:1]
    ]
    assert len(boxes) == 7
    for i, (x, y, width, height) in enumerate(boxes):
        for left, top, other_width, other_height in boxes[i + 1 :]:
            assert x + width <= left or left + other_width <= x or y + height <= top or top + other_height <= y


def test_mermaid():
    chart = mermaid(WHOLE, RUN, LIBRARY)
    assert chart.startswith("flowchart TD\n    b1([problem])\n")
    assert "<b>Plan #64;small</b> n1<br/><i>planner</i><br/>a #60; b #38; c<br/>ok · cached" in chart
    assert "2 branches" in chart and "|pass|" in chart and "|fail|" in chart and "at most 4 times" in chart
    assert "classDef error" in chart and ":::not_run" in chart
    boxes = set(re.findall(r"^    (b\d+)[\[({]", chart, re.M))
    assert set(re.findall(r"\bb\d+\b", chart)) == boxes  # every arrow has two ends


@pytest.mark.parametrize("text", ["\x00\x1f\ud800", "]]>", "<script>", '"`#;', "x" * 10_000])
def test_hostile_text_stays_text(text: str):
    workflow = Workflow(Sequence((Call("A", text, id="n1"),)))
    ElementTree.fromstring(svg(workflow, operators=LIBRARY).encode())
    chart = mermaid(workflow, operators=LIBRARY)
    assert "<script>" not in chart and chart.count('"') % 2 == 0


def test_notes():
    assert note(Call("Custom", id="n1"), LIBRARY, None).status == ""
    assert note(Call("gone", id="n8"), LIBRARY, RUN).role is None
    assert output_text({"passed": False, "feedback": "units"}) == "failed: units"
    assert output_text({"passed": True}) == "passed"
    assert output_text({"subproblems": ("a", "b")}) == "a; b"
    assert output_text({}) == ""
    assert shortened("a\n\tb" + "c" * 20, 6) == "a bcc…"
