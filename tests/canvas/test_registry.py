"""The registry: what is found, what is refused, and that adding an operator is one class in one file."""

import asyncio
import importlib
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_context import use

from flowjax.canvas.backends import Completion, Request
from flowjax.canvas.graph import Call, Parallel, Sequence, Workflow
from flowjax.canvas.operators.registry import (
    ADVERTISED,
    HIDDEN,
    OperatorRegistryError,
    describe,
    load_descriptions,
    load_operators,
    prompted,
)
from flowjax.canvas.run import run
from flowjax.canvas.values import Field, Problem, Usage

OWN = """
from flowjax.canvas.operators import Operator
from flowjax.canvas.values import Field


class Shout(Operator):
    name = "Shout"
    description = "says the answer louder"
    role = "formatter"
    inputs = (Field("answer"),)
    outputs = (Field("answer"),)
    instruction = "Shout."

    async def run(self, inputs, context):
        return {"answer": inputs["answer"].upper()}
"""


class Echo:
    """Answers every request with the same words."""

    identity = "echo"

    async def complete(self, request: Request) -> Completion:
        return Completion("Answer: five", Usage(1, 1, 1))


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a module `own_operators`."""
    (tmp_path / "own_operators.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("own_operators", None)


def test_fourteen_are_there_and_twelve_are_told_of():
    found = load_operators(entry_points=False)
    assert len(found) == 14
    lines = describe(found).splitlines()
    assert [line.split(" ")[0] for line in lines] == [operator.name for operator in ADVERTISED]
    assert len(describe(found, hidden=True).splitlines()) == 14
    assert {operator.name for operator in HIDDEN} == {"CustomCodeGenerate", "MdEnsemble"}
    assert "ScEnsemble (combiner): " in describe(found) and "needs candidates" in describe(found)


def runs_in_a_workflow(found: dict[str, Any]) -> None:
    assert "Shout (formatter): says the answer louder; needs answer; writes answer" in describe(found)
    workflow = Workflow(Sequence((Call("Custom"), Call("Shout")))).numbered()
    result = asyncio.run(
        run(workflow, Problem("2+3?", "math"), operators=found, backends={"echo": Echo()}, default_backend="echo")
    )
    assert result.answer == "FIVE" and result.status == "ok"


def test_an_operator_is_one_class_in_one_file(own_module: Path):
    """Published: a new one is an edit of over ten files, name lists of the reward among them."""
    runs_in_a_workflow(load_operators(["own_operators:Shout"], entry_points=False))


def test_an_installed_package_offers_operators(own_module: Path):
    folder = own_module / "own_operators-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-operators\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[flowjax.operators]\nShout = own_operators:Shout\n")
    runs_in_a_workflow(load_operators())
    assert "Shout" not in load_operators(entry_points=False)
    assert load_operators(["own_operators:Shout"])["Shout"] is load_operators()["Shout"]  # named twice is no clash


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "Shout"', 'name = "Custom"', "the name 'Custom' is taken by flowjax.canvas.operators.built_in:Custom"),
        ('name = "Shout"', 'name = "Shout it"', "Shout.name is 'Shout it': give one word"),
        ('name = "Shout"', 'name = "Prüfe"', "Shout.name is 'Prüfe': give one word of the letters A to Z"),
        ('name = "Shout"', 'name = "done"', "Shout.name is 'done', which stands for a branch without a step"),
        ('    name = "Shout"\n', "", "Shout.name is missing"),
        ('    role = "formatter"\n', "", "Shout.role is missing: one of planner, solver"),
        ('role = "formatter"', 'role = "singer"', "role is 'singer': give one of planner"),
        (
            'role = "formatter"',
            'role = "checker"',
            'outputs lacks the flag that a checker writes: add Field\\("passed"',
        ),
        ('"says the answer louder"', '"two\\nlines"', "give one line of text"),
        ('outputs = (Field("answer"),)', "outputs = ()", "outputs is empty"),
        ('outputs = (Field("answer"),)', 'outputs = ("answer",)', "give a tuple of Field"),
        ('outputs = (Field("answer"),)', 'outputs = (Field("answer", "number"),)', "kind 'number': give one of text"),
        ('outputs = (Field("answer"),)', 'outputs = (Field("answer", "flag"),)', "is 'text' everywhere"),
        ('inputs = (Field("answer"),)', 'inputs = (Field("answer"), Field("answer"))', "'answer' twice"),
        ('outputs = (Field("answer"),)', "outputs = (Field(None),)", "outputs has a field named None: give one word"),
        ('outputs = (Field("answer"),)', 'outputs = (Field("the end"),)', "has a field named 'the end': give one word"),
        (
            "    async def run",
            "    def __init__(self, loud): ...\n    async def run",
            "__init__ cannot be called without",
        ),
        ("async def run", "async def work", "run is missing: implement async def run"),
        ("async def run", "def run", "run cannot be awaited: write it as async def run"),
        ("inputs, context)", "inputs)", r"run cannot be called so \(too many positional arguments\): write it as"),
        ("inputs, context)", "inputs, context, more)", r"run cannot be called so \(missing a required argument"),
        ("(Operator)", "", "derive a class from flowjax.canvas.operators.Operator"),
    ],
)
def test_what_is_no_operator_is_refused_in_words(own_module: Path, old: str, new: str, said: str):
    assert old in OWN
    (own_module / "own_operators.py").write_text(OWN.replace(old, new))
    with pytest.raises(OperatorRegistryError, match=said) as refusal:
        load_operators(["own_operators:Shout"], entry_points=False)
    assert "own_operators:Shout" in str(refusal.value)


@pytest.mark.parametrize("path", ["own_operators", "own_operators:Whisper", "no_such_module:Shout"])
def test_paths_that_lead_nowhere(own_module: Path, path: str):
    with pytest.raises(OperatorRegistryError, match=path):
        load_operators([path], entry_points=False)


def written(tmp_path: Path, entries: Any) -> Path:
    path = tmp_path / "operator.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


def test_published_descriptions_are_read(tmp_path: Path):
    """Published: nothing that runs reads this file."""
    path = written(
        tmp_path,
        {
            "Custom": {"description": "Anything\nyou like.", "interface": "custom(input: str, instruction: str)"},
            "Judge": {
                "description": "Says whether it is true.",
                "interface": "judge(problem: str, solution: str, mode: str = None) -> dict with keys 'review_result' "
                "of type bool and 'feedback' of type str",
            },
            "Merge": {
                "description": "Merges.",
                "interface": "merge(solutions: List[str], problem: str) -> dict with key 'response' of type str",
            },
        },
    )
    known = load_operators(entry_points=False)
    found = load_descriptions(path, known)
    assert len(found) == 16
    assert found["Custom"].description == "Anything you like." and issubclass(found["Custom"], known["Custom"])
    assert known["Custom"].description != "Anything you like."
    judge, merge = found["Judge"], found["Merge"]
    assert judge.role == "checker" and merge.role == "combiner"
    assert [field.name for field in judge.inputs] == ["problem", "answer"]
    assert [(field.name, field.kind) for field in merge.inputs] == [("problem", "text"), ("candidates", "texts")]
    assert "Judge (checker): Says whether it is true.; needs answer" in describe(found)
    assert use(judge, "2+3?", {"answer": "5"}, '{"passed": true, "feedback": "yes"}')[0]["passed"] is True
    outputs, context = use(merge, "2+3?", {"candidates": ("5", "6")}, "Answer: 5")
    assert outputs == {"answer": "5"}
    assert "Merges." in context.asked[0] and "2. 6" in context.asked[0]
    code = Problem("Double.", "code", entry_point="double")
    assert use(merge, code, {"candidates": ("a", "b")}, "```python\nx = 1\n```")[0] == {"code": "x = 1"}


def test_an_operator_of_words_runs_in_a_workflow():
    found = {
        **load_operators(entry_points=False),
        "Merge": prompted("Merge", "Merges.", "merge(solutions: list) -> 'answer'"),
    }
    branches = Parallel((Call("Custom"), Call("Custom")))
    result = asyncio.run(
        run(
            Workflow(Sequence((branches, Call("Merge")))),
            Problem("2+3?", "math"),
            operators=found,
            backends={"echo": Echo()},
            default_backend="echo",
        )
    )
    assert result.answer == "five"


def test_operators_of_words_give_what_their_interface_says():
    own = prompted("Rank", "Ranks.", "rank(problem: str, names: List[str], hint: str = '') -> 'order', 'best'")
    assert [(field.name, field.kind, field.required) for field in own.inputs] == [
        ("problem", "text", True),
        ("names", "texts", True),
        ("hint", "text", False),
    ]
    outputs, _ = use(own, "Who?", {"names": ("a", "b")}, '{"order": "b, a", "best": "b"}')
    assert outputs == {"order": "b, a", "best": "b"}
    for argument, field in {
        "plan: Optional[List[str]] = None": ("plan", "text", False),  # that field is text everywhere
        "hints: Optional[List[str]]": ("hints", "texts", True),
        "rules: Dict[str, List[int]] = {}": ("rules", "text", False),
        "names: str = 'a, b'": ("names", "text", False),
    }.items():
        (_, read) = prompted("Own", "Own.", f"f(problem: str, {argument}) -> 'answer'").inputs
        assert (read.name, read.kind, read.required) == field
    checker = prompted("Look", "Looks.", "f(problem: str, x: tuple = ()) -> dict with key 'passed' (bool)")
    assert checker.role == "checker" and [field.name for field in checker.outputs] == ["passed"]
    translate = prompted("Translate", "In English.", "translate(problem: str) -> dict with key 'translation'")
    assert use(translate, "Wer?", None, "Who?")[0] == {"translation": "Who?"}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("not JSON", "cannot be read"),
        ([], "holds a list"),
        ({"Own": "words"}, "operator Own is 'words'"),
        ({"Own": {"description": "Words.", "interface": "words"}}, "give name\\(field: str"),
        ({"Two words": {"description": "Words.", "interface": "f(problem: str)"}}, "give one word"),
    ],
)
def test_files_that_make_no_operators(tmp_path: Path, entries: Any, said: str):
    with pytest.raises(OperatorRegistryError, match=said):
        load_descriptions(written(tmp_path, entries), load_operators(entry_points=False))


DOCS = Path(__file__).parents[2] / "docs" / "canvas" / "operators.md"


def test_the_documented_table_is_that_of_the_operators():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCS.read_text().splitlines()
        if line[:1] == "|"
    ]
    documented = {row[0]: row[1:4] for row in rows[2:]}

    def names(fields: tuple[Field, ...]) -> str:
        return ", ".join(field.name + "?" * (not field.required) for field in fields)

    assert documented == {
        name: [operator.role, names(operator.inputs), names(operator.outputs)]
        for name, operator in load_operators(entry_points=False).items()
    }


def test_the_documented_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    section = DOCS.read_text().partition("## Adding one\n")[2].lstrip("\n").splitlines()
    example = itertools.takewhile(lambda line: not line or line.startswith("    "), section)
    (tmp_path / "shorten.py").write_text(textwrap.dedent("\n".join(example)))
    monkeypatch.syspath_prepend(tmp_path)
    own = load_operators(["shorten:Shorten"], entry_points=False)["Shorten"]
    assert use(own, "2+3?", {"answer": "it is five"}, "five")[0] == {"answer": "five"}
