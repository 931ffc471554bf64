"""A search over workflows: what it draws, what it counts, and that it finds what is better."""

import argparse
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowjax.canvas import search
from flowjax.canvas.backends import BackendError, BackendUnavailable, Completion, Request, Usage
from flowjax.canvas.checks import problems
from flowjax.canvas.forms import read_workflow
from flowjax.canvas.operators.registry import load_operators
from flowjax.canvas.search import MAX_NODES, Round, Space, chances, main, optimizer_prompt, random_edit, read_proposal
from flowjax.canvas.text import parse, show

OPERATORS = load_operators(entry_points=False)
SPACE = Space(OPERATORS, ("small", "large"), ("", "large"), ("Be brief.",))
# Custom is wrong in everything, Programmer in nothing: the one change that helps.
RULES: list[dict[str, Any]] = [
    {"operator": "Programmer", "answer": "```python\nprint(4)\n```"},
    {"operator": "Custom", "answer": "Answer: 5"},
    {"operator": "AnswerGenerate", "answer": '{"thought": "", "answer": "5"}'},
    {"operator": "Optimizer", "answer": "No workflow."},
]


def rounds(*found: tuple[str, int | None, list[bool]]) -> list[Round]:
    return [
        Round(
            parse(text).numbered(),
            parent,
            [
                {"correct": right, "calls": 2, "question": f"Q{number}", "answer": "5", "gold": ["4"]}
                for number, right in enumerate(rows)
            ],
        )
        for text, parent, rows in found
    ]


class Known:
    """A backend that answers as told by `RULES`; `asked` has all requests."""

    def __init__(self):
        self.identity = "known"
        self.asked: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.asked.append(request)
        name = request.tags.get("operator", "Optimizer")
        answers = [rule["answer"] for rule in RULES if rule["operator"] == name]
        return Completion(answers[0] if answers else "Answer: 5", Usage(1, 1, 1, 0.0))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    backend = Known()

    @contextlib.asynccontextmanager
    async def opened(config: Mapping[str, Any]) -> AsyncIterator[dict[str, Known]]:
        yield dict.fromkeys(config, backend)

    monkeypatch.setattr(search, "open_backends", opened)
    return backend


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    asked = "Problem {}: what is 2 and 2?"
    for name, first, count in (("train", 0, 12), ("test", 10, 6)):
        numbers = range(first, first + count)
        rows = [{"problem": asked.format(number), "ground_truth": "4", "source": "s"} for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row | {"problem_type": "math"}) + "\n" for row in rows)
        )
    (tmp_path / "backends.json").write_text(json.dumps({name: {} for name in ("main", "optimizer")}))
    where = [f"--data={tmp_path / 'train.jsonl'}", f"--held_out={tmp_path / 'test.jsonl'}", f"--out={tmp_path / 'out'}"]
    return [*where, f"--backends={tmp_path / 'backends.json'}", "--problems=5"]


def test_chances_are_the_published_mixture():
    """0.3 spread evenly, 0.7 by the softmax of a fifth of the percentage."""
    weights = np.exp(0.2 * np.array([50.0, 40.0]))
    np.testing.assert_allclose(chances([0.5, 0.4]), 0.15 + 0.7 * weights / weights.sum())
    np.testing.assert_allclose(chances([0.0, 1.0, 0.0]), [0.1, 0.8, 0.1], atol=1e-8)


def test_random_edits_are_other_workflows_that_can_run():
    rng = np.random.default_rng(0)
    workflow, shown = parse("Custom").numbered(), set()
    for _ in range(2000):
        edited = random_edit(workflow, SPACE, rng)
        if edited is None or SPACE.fault(edited):
            continue
        assert not problems(edited, OPERATORS, ("large",)) and sum(1 for _ in edited.nodes()) <= MAX_NODES
        workflow = edited
        shown.add(show(workflow))
    everything = " ".join(shown)
    assert len(shown) > 1000
    assert all(mark in everything for mark in ("[", "? done :", ") * 2", "@large", "Be brief.", "ScEnsemble", "Plan"))


def test_what_helps_is_found_on_problems_that_are_not_held_out(tmp_path, command, known, capsys):
    assert main([*command, "--calls=800"]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (results["start"]["accuracy"], results["found"]["accuracy"]) == (0.0, 1.0)
    assert "Programmer" in show(read_workflow(str(tmp_path / "out/workflow.json")))
    story = json.loads((tmp_path / "out/search.json").read_text())
    assert story["rounds"][0] == {"workflow": "Custom", "parent": None, "problems": 5, "accuracy": 0.0, "calls": 5}
    assert [each["problems"] for each in story["finalists"]] == [10, 10, 10]
    assert sum(each["calls"] for each in story["rounds"][:-1]) < 800 <= sum(each["calls"] for each in story["rounds"])
    said = capsys.readouterr()
    assert "2 problems of --data are left out: they are in --held_out, or there twice" in said.err
    assert "found against start: +100.0 points" in said.out
    # Problems 10 and 11 are held out: what decides saw neither them nor the rest of the test file.
    kept = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert {row["row"] for row in kept if row["file"] == "train.jsonl"} <= set(range(1, 11))


def test_a_problem_in_other_letters_or_blanks_is_held_out(tmp_path, command, capsys):
    test = tmp_path / "test.jsonl"
    test.write_text(test.read_text().replace("Problem", "PROBLEM ").replace("and 2", "AND 2"))
    named = argparse.Namespace(data=str(tmp_path / "train.jsonl"), held_out=str(test), problems=5, packages=(), seed=0)
    data = search.read_data(named)
    assert {record.row for _, record in (*data.wanted, *data.further)} == set(range(1, 11))
    assert "2 problems of --data are left out" in capsys.readouterr().err


def test_the_same_command_again_asks_nothing_and_finds_the_same(tmp_path, command, known):
    assert main([*command, "--calls=100"]) == 0
    found, asked = (tmp_path / "out/search.json").read_text(), len(known.asked)
    assert asked > 0 and main([*command, "--calls=100"]) == 0
    assert len(known.asked) == asked and (tmp_path / "out/search.json").read_text() == found


def test_an_optimizer_is_shown_what_was_tried_and_what_failed():
    made = rounds(
        ("Custom", None, [True, False]), ("Custom -> Format", 0, [False, False]), ("Plan -> Custom", 1, [True, True])
    )
    text = optimizer_prompt(made, 0, SPACE)
    assert "This workflow solves 50 % of the problems with 2.0 calls each:\n<workflow>Custom</workflow>" in text
    assert "0 %: Custom -> Format\n" in text and "Plan -> Custom" not in text
    assert "Problem: Q1\nAnswer: 5\nRight: 4\n" in text and "Q0" not in text
    assert "Verify (checker): " in text and "MdEnsemble" not in text
    assert "A@name is carried out by another model: large." in text
    assert "another model" not in optimizer_prompt(made, 0, Space(OPERATORS, ("small",)))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("I would check.", "There is no <workflow> in your reply."),
        ("<workflow>Custom -> </workflow>", "expected an operator's name"),
        ("<workflow>Costum</workflow>", "Did you mean `Custom`?"),
        ("<workflow></workflow>", "It has no operator."),
        (f"<workflow>{' -> '.join(['Custom'] * 17)}</workflow>", "It has more than 16 nodes."),
    ],
)
def test_what_an_optimizer_proposes_is_checked(reply: str, said: str):
    workflow, fault = read_proposal(reply, SPACE)
    assert workflow is None and said in fault


def test_the_last_workflow_of_a_reply_is_meant():
    workflow, fault = read_proposal(
        "Not <workflow>Custom</workflow> but\n<workflow>\nPlan -> Custom\n</workflow>", SPACE
    )
    assert workflow is not None and (show(workflow), fault) == ("Plan -> Custom", "")


def test_an_optimizer_is_told_what_is_wrong_and_its_requests_count(tmp_path, command, known, monkeypatch):
    """One that proposes nothing three times does not end the search."""
    assert main([*command, "--calls=30", "--optimizer=optimizer"]) == 0
    asked = [request for request in known.asked if not request.tags]
    story = json.loads((tmp_path / "out/search.json").read_text())
    assert story["optimizer_requests"] == len(asked) == 3 * (len(story["rounds"]) - 1)
    assert [len(request.messages) for request in asked[:3]] == [1, 3, 5]
    assert asked[1].messages[-1]["content"] == "There is no <workflow> in your reply. Try again."
    spent = sum(each["calls"] for each in story["rounds"])
    assert spent + len(asked) >= 30 > spent - story["rounds"][-1]["calls"] + len(asked) - 3
    monkeypatch.setitem(RULES[-1], "answer", "<workflow>Programmer</workflow>")
    known.asked.clear()
    assert main([*command, "--calls=15", "--optimizer=optimizer"]) == 0
    assert json.loads((tmp_path / "out/search.json").read_text())["rounds"][1]["workflow"] == "Programmer"


def test_no_workflow_asks_more_for_a_problem_than_it_may(tmp_path, command, known, monkeypatch):
    monkeypatch.setitem(RULES[-1], "answer", "<workflow>((Custom) * 10) * 10</workflow>")
    assert main([*command, "--calls=6", "--calls_each=7", "--optimizer=optimizer"]) == 0
    first, second = json.loads((tmp_path / "out/search.json").read_text())["rounds"]
    assert (first["calls"], second["workflow"], second["calls"]) == (5, "((Custom) * 10) * 10", 5 * 7)


def test_a_workflow_that_asks_nothing_uses_up_the_calls_all_the_same():
    free = {"correct": False, "calls": 0}
    assert Round(parse("Test"), None, [free, free, {"correct": True, "calls": 3}]).calls == 5


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BackendUnavailable("no answer"), 1, "--optimizer: BackendUnavailable: no answer; the same command goes on"),
        (ConnectionResetError("peer"), 1, "--optimizer: ConnectionResetError: peer; the same command goes on"),
        (BackendError("a context of 8192 tokens is exceeded"), 0, ""),
    ],
)
def test_an_optimizer_that_fails_is_named(tmp_path, command, known, monkeypatch, capsys, error, status, said):
    """One that is away ends the search; what it refuses is done by a random edit."""
    complete = known.complete

    async def failing(request: Request) -> Completion:
        if not request.tags:
            raise error
        return await complete(request)

    monkeypatch.setattr(known, "complete", failing)
    assert main([*command, "--calls=12", "--optimizer=optimizer"]) == status
    assert said in capsys.readouterr().err
    if not status:
        story = json.loads((tmp_path / "out/search.json").read_text())
        assert story["optimizer_requests"] == len(story["rounds"]) - 1 > 0


def test_a_backend_that_refuses_everything_has_nothing_found(tmp_path, command, known, monkeypatch, capsys):
    """It was searched on until the calls were used up, and `Custom` was said to be the best."""
    asked = []

    async def refusing(request: Request) -> Completion:
        asked.append(request)
        raise BackendError("HTTP 400: there is no model of that name")

    monkeypatch.setattr(known, "complete", refusing)
    assert main([*command, "--calls=100"]) == 1
    said = capsys.readouterr().err
    assert "every request of --workflow is refused: " in said and "no model of that name; the same command" in said
    assert len(asked) == 5 and not (tmp_path / "out/workflow.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--problems=11"], "--problems=11, and --data="),
        (["--workflow=Custom -> Nobody"], "--workflow: "),
        (["--optimizer=nobody"], "There is no backend `nobody`."),
        (["--phrases=nowhere.txt"], "nowhere.txt"),
        (["--held_out=nowhere"], "--held_out=nowhere holds no problems"),
        (["--backends=nowhere.json"], "--backends=nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_asked(command, known, capsys, more, said):
    assert main([*command, *more]) == 2
    assert said in capsys.readouterr().err and not known.asked


def test_an_impossible_number_is_refused(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--calls=0"])
    assert "--calls=0: give at least 1" in capsys.readouterr().err
