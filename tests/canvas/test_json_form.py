import json
import re
from typing import Any

import pytest
from hypothesis import given, settings

from flowjax.canvas.forms import from_json, to_json
from flowjax.canvas.graph import Call, Sequence, Workflow, WorkflowError
from flowjax.canvas.text import parse, show
from tests.canvas.graphs import WORKFLOWS

CALL = {"kind": "call", "operator": "A"}


@given(WORKFLOWS)
@settings(max_examples=200)
def test_round_trip(workflow: Workflow):
    after_deletes = Workflow(workflow.root, workflow.next_number + 7)
    assert from_json(json.loads(json.dumps(to_json(after_deletes)))) == after_deletes


def test_what_may_be_left_out():
    assert from_json({"steps": [CALL]}) == Workflow(Sequence((Call("A", id="n1"),)), 2)
    assert from_json({"steps": []}) == Workflow()
    conditional = {"kind": "conditional", "condition": CALL, "otherwise": CALL}
    assert show(from_json({"steps": [conditional]})) == "A ? done : A"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "$: expected an object, got a list of 0"),
        ({}, "$.steps: expected a list, got nothing"),
        ({"steps": [], "stepz": 1}, "$: no field 'stepz' here; there are next_number, steps"),
        ({"steps": [], "next_number": "7"}, "$.next_number: expected a whole number, got '7'"),
        ({"steps": [CALL, "A"]}, "$.steps[1]: expected an object with a \"kind\" of call, sequence"),
        ({"steps": [{"kind": ["call"]}]}, "$.steps[0]: expected an object with a \"kind\""),
        ({"steps": [{"kind": "call"}]}, "$.steps[0].operator: expected letters"),
        ({"steps": [{**CALL, "operator": "A -> B"}]}, "$.steps[0].operator: expected letters, digits and `_`"),
        ({"steps": [{**CALL, "count": 2}]}, "$.steps[0]: no field 'count' here"),
        ({"steps": [{**CALL, "id": "1"}]}, "$.steps[0].id: expected letters"),
        ({"steps": [{**CALL, "instruction": 3}]}, "$.steps[0].instruction: expected a string, got 3"),
        ({"steps": [{**CALL, "inputs": {"answer": "n1"}}]}, "$.steps[0].inputs.answer: expected \"node.field\""),
        ({"steps": [{**CALL, "inputs": []}]}, "$.steps[0].inputs: expected an object"),
        ({"steps": [{"kind": "loop", "body": CALL, "count": True}]}, "$.steps[0].count: expected a whole number"),
        ({"steps": [{"kind": "loop", "body": {"kind": "parallel", "branches": [1]}, "count": 1}]},
         "$.steps[0].body.branches[0]: expected an object"),
        ({"steps": [{"kind": "conditional", "then": CALL}]}, "$.steps[0].condition: expected an object"),
    ],
)  # fmt: skip
def test_errors_name_the_path(value: Any, message: str):
    with pytest.raises(WorkflowError, match=re.escape(message)):
        from_json(value)


def test_hostile_depth_is_an_error():
    value: dict[str, Any] = CALL
    for _ in range(5_000):
        value = {"kind": "loop", "body": value, "count": 2}
    with pytest.raises(WorkflowError, match="more than 50 deep"):
        from_json({"steps": [value]})


def test_what_the_text_form_reads_the_json_form_reads():
    deepest = "(" * 49 + "A" + ") * 2" * 49
    workflow = parse(deepest)
    assert from_json(to_json(workflow)) == workflow
