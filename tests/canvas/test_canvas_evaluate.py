"""Workflows over files of problems: hand counts, what is kept, and what is asked again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowjax.canvas.evaluate import main
from flowjax.grading.sandbox import IsolationError

ROWS = [
    {"problem": "What is 6 times 7?", "ground_truth": "42", "source": "gsm8k", "problem_type": "math"},
    {"problem": "What is 1 and 1?", "ground_truth": "2", "source": "gsm8k", "problem_type": "math"},
    {"problem": "What is 2 and 2?", "ground_truth": "4", "source": "gsm8k", "problem_type": "math"},
    {"problem": "Capital of France?", "ground_truth": "Paris", "source": "nq", "problem_type": "qa"},
]
RULES: list[dict[str, Any]] = [
    {"operator": "Plan", "answer": "Think of it."},
    {"text": "6 times 7", "answer": "Answer: 42.0"},
    {"text": "1 and 1", "answer": "Answer: 3"},
    {"text": "2 and 2", "answer": ["Answer: 4"]},
    {"text": "France", "answer": "Answer: the Paris"},
]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "problems/train.jsonl").write_text("{}\n")  # is not read beside a test.jsonl
    backends(tmp_path, RULES)
    where = [f"--data={tmp_path / 'problems'}", f"--backends={tmp_path / 'backends.json'}", f"--out={tmp_path / 'out'}"]
    return ["--workflow=Plan -> Custom", *where]


def backends(folder: Path, rules: list[dict[str, Any]], **more: Any) -> None:
    told = {"main": {"kind": "offline", "rules": rules, "prices": {"prompt": 1.0, "sampled": 2.0}, **more}}
    (folder / "backends.json").write_text(json.dumps(told))


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/rows.jsonl").read_text().splitlines()]


def test_accuracy_is_that_of_a_hand_count_and_every_row_says_why(tmp_path, command, capsys):
    assert main(command) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())["workflow"]
    assert (results["accuracy"], results["problems"], results["calls"]) == (0.75, 4, 2.0)
    assert results["low"] < 0.75 < results["high"] and results["cost"] > 0 < results["tokens"]
    found = {source: (of["accuracy"], of["problems"]) for source, of in results["sources"].items()}
    assert found == {"gsm8k": (pytest.approx(2 / 3), 3), "nq": (1.0, 1)}
    rows = sorted(kept(tmp_path), key=lambda row: row["row"])
    assert [row["correct"] for row in rows] == [True, False, True, True]
    assert (rows[1]["question"], rows[1]["answer"], rows[1]["gold"]) == ("What is 1 and 1?", "3", ["2"])
    assert [node["operator"] for node in rows[0]["trace"]] == ["Plan", "Custom"]
    page = (tmp_path / "out/results.md").read_text()
    assert "| workflow | `Plan -> Custom` | 75.0 % [" in page and page in capsys.readouterr().out


def test_a_second_run_asks_nothing_and_one_that_was_cut_asks_for_the_rest(tmp_path, command, capsys):
    assert main(command) == 0
    before = (tmp_path / "out/rows.jsonl").read_text()
    backends(tmp_path, [{"answer": "x", "error": "nobody may ask"}], identity=identity_of(RULES))
    assert main(command) == 0 and (tmp_path / "out/rows.jsonl").read_text() == before
    (tmp_path / "out/rows.jsonl").write_text(before[:-20])
    backends(tmp_path, RULES)
    assert main(command) == 0 and len(kept(tmp_path)) == 4
    lines = (tmp_path / "out/rows.jsonl").read_text().splitlines()
    (tmp_path / "out/rows.jsonl").write_text("\n".join([lines[0][:30], "[1]", *lines[1:], lines[1], ""]))
    assert main(command) == 0 and len(kept(tmp_path)) == 4
    assert "left out: 3" in capsys.readouterr().err
    backends(tmp_path, RULES, seed=1)  # another model: nothing of the first holds for it
    assert main(command) == 0 and len(kept(tmp_path)) == 8


def test_a_row_holds_for_the_code_of_an_operator_of_ones_own_and_for_all_of_a_problem(tmp_path, command):
    own = tmp_path / "own_operator.py"
    source = (
        "from flowjax.canvas.operators import PROBLEM, Operator\n"
        "from flowjax.canvas.values import Field\n"
        "class Own(Operator):\n"
        "    name, description, role, instruction = 'Own', 'answers', 'solver', ''\n"
        "    inputs, outputs = (PROBLEM,), (Field('answer'),)\n"
        "    async def run(self, inputs, context): return {'answer': '41'}\n"
    )

    def accuracy() -> float:  # in a process of its own, as an edit of the file is read
        argv = [*command[1:], "--workflow=Own", "--operators", "own_operator:Own"]
        subprocess.run([sys.executable, "-m", "flowjax.canvas.evaluate", *argv], check=True, cwd=tmp_path, env=paths)
        return json.loads((tmp_path / "out/results.json").read_text())["workflow"]["accuracy"]

    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(tmp_path)])}
    own.write_text(source)
    assert accuracy() == 0.0
    own.write_text(source.replace("41", "42"))
    assert accuracy() == 0.25 and len(kept(tmp_path)) == 8
    assert accuracy() == 0.25 and len(kept(tmp_path)) == 8
    rows = [{**row, "context": "France is a country."} if row["source"] == "nq" else row for row in ROWS]
    (tmp_path / "problems/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert accuracy() == 0.25 and len(kept(tmp_path)) == 9


def test_runs_that_failed_are_said_and_those_that_were_refused_are_played_again(tmp_path, command, capsys):
    """An endpoint that answered every request with 400 had an accuracy of 0 %, and nothing else was said."""
    backends(tmp_path, [{"text": "1 and 1", "error": "it takes no temperature"}, *RULES])
    assert main([*command[1:], "--workflow=Custom"]) == 0
    assert "1 of 4 runs of workflow failed, most often with: " in capsys.readouterr().out
    assert "it takes no temperature" in (tmp_path / "out/results.md").read_text()
    assert len(kept(tmp_path)) == 3
    backends(tmp_path, RULES, identity=identity_of([{"text": "1 and 1", "error": "it takes no temperature"}, *RULES]))
    assert main([*command[1:], "--workflow=Custom"]) == 0 and len(kept(tmp_path)) == 4
    assert "failed" not in capsys.readouterr().out


def test_data_sets_whose_files_have_one_name_have_folders_of_their_own(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([f"--data={tmp_path / 'problems/test.jsonl'}", *command[:1], command[2]]) == 0
    assert (tmp_path / "evaluations/problems/results.json").exists()


def identity_of(rules: list[dict[str, Any]]) -> str:
    from flowjax.canvas.backends import OfflineBackend, Rule

    return OfflineBackend([Rule(**rule) for rule in rules]).identity


def test_baselines_have_the_calls_of_the_workflow_and_are_compared_with_it(tmp_path, command):
    backends(tmp_path, [*RULES, {"answer": "Answer: 5"}])
    assert main([*command, "--baselines"]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert list(results) == ["workflow", "io", "cot", "sc"]
    assert results["sc"]["workflow"] == "[Custom, Custom] -> ScEnsemble" and results["io"]["calls"] == 1
    assert results["io"]["accuracy"] == 0.75 and results["io"]["against_first"]["first_is_better_by"] == 0.0
    assert len(kept(tmp_path)) == 16
    assert "workflow against io: +0.0 points" in (tmp_path / "out/results.md").read_text()


def test_rows_that_programs_could_have_made_with_other_packages_are_played_again(tmp_path, command):
    assert main(command) == 0 and main([*command, "--packages", str(tmp_path)]) == 0
    assert len(kept(tmp_path)) == 8


def test_a_machine_without_isolation_is_no_backend_that_is_away(tmp_path, command, capsys, monkeypatch):
    def none(**_: object) -> None:
        raise IsolationError("programs cannot be isolated here")

    monkeypatch.setattr("flowjax.grading.sandbox.require_isolation", none)
    monkeypatch.setattr("flowjax.canvas.problem_rows._PAUSE_S", 0.0)
    assert main([*command, "--workflow=Programmer"]) == 2
    assert capsys.readouterr().err == "programs cannot be isolated here\n"
    assert len(kept(tmp_path)) == 4  # of the workflow that runs none


def test_a_backend_that_goes_away_keeps_what_was_played(tmp_path, command, capsys, monkeypatch):
    monkeypatch.setattr("flowjax.canvas.problem_rows._PAUSE_S", 0.01)
    package = tmp_path / "away_backend.py"
    package.write_text(
        "from flowjax.canvas.backends import BackendUnavailable, Completion\n"
        "from flowjax.canvas.values import Usage\n"
        "class Away:\n"
        "    identity = 'away'\n"
        "    def __init__(self, limit): self.left = limit\n"
        "    async def complete(self, request):\n"
        "        self.left -= 1\n"
        "        if self.left < 0: raise BackendUnavailable('gone for lunch')\n"
        "        return Completion('Answer: 42', Usage(1, 5, 2, 0.0))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    told = {"main": {"kind": "away_backend:Away", "limit": 5}}
    (tmp_path / "backends.json").write_text(json.dumps(told))
    assert main([*command, "--at_once=1"]) == 1
    error = capsys.readouterr().err
    assert "row 3: " in error and "gone for lunch" in error and "the same command goes on from here" in error
    assert len(kept(tmp_path)) == 2 and not (tmp_path / "out/results.json").exists()
    (tmp_path / "backends.json").write_text(json.dumps({"main": {**told["main"], "limit": 4}}))
    assert main([*command, "--at_once=1"]) == 0 and len(kept(tmp_path)) == 4  # two calls for each of the other two


def test_problems_under_way_where_a_backend_goes_away_come_to_their_ends(tmp_path, command, capsys, monkeypatch):
    monkeypatch.setattr("flowjax.canvas.problem_rows._PAUSE_S", 0.0)
    (tmp_path / "half_backend.py").write_text(
        "import asyncio\n"
        "from flowjax.canvas.backends import BackendUnavailable, Completion\n"
        "from flowjax.canvas.values import Usage\n"
        "class Half:\n"
        "    identity = 'half'\n"
        "    def __init__(self): self.failed = 0\n"
        "    async def complete(self, request):\n"
        "        if '6 times 7' in request.messages[0]['content']:\n"
        "            self.failed += 1\n"
        "            raise BackendUnavailable('gone for lunch')\n"
        "        while self.failed < 3: await asyncio.sleep(0)\n"
        "        for _ in range(100): await asyncio.sleep(0)\n"
        "        return Completion('Answer: 42', Usage(1, 5, 2, 0.0))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "backends.json").write_text(json.dumps({"main": {"kind": "half_backend:Half"}}))
    assert main([*command, "--at_once=2"]) == 1
    assert "row 1: gone for lunch" in capsys.readouterr().err
    assert [row["row"] for row in kept(tmp_path)] == [2]  # which was paid for; the others were not begun


@pytest.mark.parametrize("flag", ["--temperature=-1", "--temperature=nan", "--sc_temperature=-1", "--at_once=0"])
def test_an_impossible_number_is_refused(command, capsys, flag):
    with pytest.raises(SystemExit, match="2"):
        main([*command, flag])
    assert f"{flag.partition('=')[0]}=" in capsys.readouterr().err.splitlines()[-1]


def test_a_workflow_without_text_is_refused(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--workflow= "])
    assert "--workflow is empty: give a workflow's text" in capsys.readouterr().err


def test_an_interrupt_is_one_line(command, capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flowjax.canvas.evaluate.read_problems", interrupted)
    assert main(command) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on from here\n"


def test_a_row_that_is_nested_without_end_is_refused(tmp_path, command, capsys):
    deep = f'{{"problem": "?", "answer": {"[" * 100_000}1{"]" * 100_000}}}\n'
    (tmp_path / "problems/test.jsonl").write_text(deep)
    assert main(command) == 2
    assert "cannot be read as JSON lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--workflow=Nobody", "Nobody"),
        ("--workflow=nowhere.json", "nowhere.json cannot be read"),
        ("--data=nowhere", "--data=nowhere holds no problems: give a JSONL file, or a folder of some"),
        ("--backends=nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes_are_one_line(command, capsys, change, message):
    given = [each for each in command if not each.startswith(change.partition("=")[0])]
    assert main([*given, change]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
