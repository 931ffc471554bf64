"""A policy over a folder of problems: the rows and tables that a fixed workflow has. Its replies are scripted."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from flowjax.canvas.backends import Completion, Request
from flowjax.canvas.evaluate import _built, main
from flowjax.canvas.text import parse
from flowjax.canvas.values import NodeRun, Usage, WorkflowRun
from flowjax.config import default_config, save_run
from flowjax.envs.canvas.texts import trace_of
from flowjax.envs.pool import EnvPool
from flowjax.evaluate import Evaluation, leases_of
from flowjax.rollout.episode import EpisodeFile, EpisodePlayer, play_missing
from flowjax.weights.publish import Checkpoints

FILES = {
    "gsm8k.jsonl": [
        {"question": "What is 6 times 7?", "answer": "#### 42"},
        {"question": "What is 1 and 1?", "answer": "#### 2"},
        {"question": "No answer here."},  # is left out
        {"question": "What is 2 and 2?", "answer": "#### 4"},
    ],
    "nq.jsonl": [{"question": "Capital of France?", "answer": ["Paris"]}],
}
RULES: list[dict[str, Any]] = [
    {"operator": "Plan", "answer": "Think of it."},
    {"text": "6 times 7", "answer": "Answer: 42"},
    {"text": "1 and 1", "answer": "Answer: 3"},
    {"text": "2 and 2", "answer": "Answer: 4"},
    {"text": "France", "answer": "Answer: Paris"},
]


class Builder:
    """A policy that begins with Custom, plans where a capital is asked for, and finishes."""

    identity = "builder"

    async def complete(self, request: Request) -> Completion:
        asked = str(request.messages[-1]["content"])
        if "n1" not in asked:
            text = "<action>add</action><operator>Custom</operator>"
        elif "France" in asked and "Plan" not in asked.partition("Latest")[0].partition("## Workflow")[2]:
            text = "<action>add</action><operator>Plan</operator><position>0</position>"
        else:
            text = "<action>finish</action>"
        return Completion(text, Usage(1, 100, 10, 0.0), "stop")


def scripted(evaluations: Sequence[Evaluation], *_: Any) -> int:
    """Stands in for engines: the episodes of each evaluation, with the builder's replies."""

    async def play() -> None:
        for evaluation in evaluations:
            async with EnvPool(workers=1, step_timeout_s=60.0) as pool:
                player = EpisodePlayer.of_run(evaluation.run, pool=pool, backend=Builder())
                leases = [replace(lease, versions={}) for lease in leases_of(evaluation)]
                file = EpisodeFile(evaluation.run.folder / "episodes.msgpack")
                await play_missing(
                    leases, file, player.play, slots=4, attempts=1, patience_s=5.0, report=lambda done, of: None
                )

    asyncio.run(play())
    return 0


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    config = default_config()
    config.model.path = "base"
    config.env.name = "flowjax.envs.canvas:Canvas"
    config.env.max_turns = 6
    offline = {"kind": "offline", "rules": RULES, "prices": {"prompt": 1.0, "sampled": 2.0}}
    config.env.options = ConfigDict({"turns": 6, "backends": {"main": offline}})
    config.reward.components = ConfigDict({"success": 1.0})
    save_run(config, tmp_path / "run")
    with Checkpoints(tmp_path / "run/checkpoints" / config.policy.name, keep=5) as checkpoints:
        for step in (0, 3):
            checkpoints.save(step, {"q_proj": {"a": jnp.ones((1, 8, 2)), "b": jnp.zeros((1, 2, 8))}}, {}, {})
        checkpoints.wait()
    (tmp_path / "sets").mkdir()
    for name, rows in FILES.items():
        (tmp_path / "sets" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "backends.json").write_text(json.dumps({"main": offline}))
    monkeypatch.setattr("flowjax.evaluate._play", scripted)
    monkeypatch.setattr("flowjax.evaluate._problems", lambda request: [])  # there is no such base model
    return [f"--data={tmp_path / 'sets'}", f"--out={tmp_path / 'out'}"]


def test_a_policy_has_the_rows_and_tables_of_a_fixed_workflow(tmp_path, command, capsys):
    fixed = ["--workflow=Custom", f"--backends={tmp_path / 'backends.json'}"]
    assert main([f"--checkpoint={tmp_path / 'run'}", *command, *fixed]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    policy, workflow = results["policy"], results["workflow"]
    assert list(results) == ["policy", "workflow"] and policy["left_out"] == {"gsm8k: no answer": 1}
    assert {name: (of["accuracy"], of["problems"]) for name, of in policy["sources"].items()} == {
        "gsm8k": (pytest.approx(2 / 3), 3),
        "nq": (1.0, 1),
    }
    assert (policy["accuracy"], policy["workflow"], workflow["workflow"]) == (0.75, "2 different", "Custom")
    # One call for each of three; for the fourth Custom, then Plan and Custom again, which has a plan now.
    assert (policy["calls"], workflow["calls"]) == (6 / 4, 1.0)
    assert policy["policy_tokens"] == pytest.approx((3 * 2 + 3) * 110 / 4)
    assert workflow["against_first"]["first_is_better_by"] == 0.0
    rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    built = {row["question"]: row for row in rows if row["name"] == "policy"}
    same = {row["question"]: row for row in rows if row["name"] == "workflow"}
    assert built.keys() == same.keys() and len(built) == 4
    for question, row in built.items():
        assert set(same[question]) <= set(row)
        names = ("source", "file", "row", "gold", "answer", "correct", "score", "status")
        assert [row[name] for name in names] == [same[question][name] for name in names]
    paris = built["Capital of France?"]
    assert paris["workflow"] == "Plan -> Custom"
    assert [(node["operator"], node["gave"]) for node in paris["trace"]] == [
        ("Plan", "Think of it."),
        ("Custom", "Paris"),
    ]
    simple, alone = built["What is 6 times 7?"], same["What is 6 times 7?"]
    assert [simple[name] for name in ("calls", "tokens", "cost")] == [
        alone[name] for name in ("calls", "tokens", "cost")
    ]
    page = capsys.readouterr().out
    assert "| policy | 2 different | 75.0 % [" in page.replace("`", "") and "read and wrote 248 tokens itself" in page
    assert "policy against workflow: +0.0 points" in page


def row_of(*runs: WorkflowRun) -> dict[str, Any]:
    """The row of an episode whose turns ran one workflow so."""
    turns = [{"shown": {"trace": trace_of(parse("(Custom#a) * 2"), run)}, "generate_s": 0, "env_s": 0} for run in runs]
    outcome = dict.fromkeys(
        ("success", "correctness", *(f"executor_{name}" for name in ("calls", "tokens", "cost"))), 0
    )
    return _built({"turns": turns, "outcome": outcome})


def test_a_row_has_the_whole_answer_and_errors_of_a_long_run():
    trace = tuple(NodeRun(f"n{i}", "Custom", "error", 1, False, error="e" * 900) for i in range(40))
    row = row_of(WorkflowRun("x" * 3000, "error", {}, trace, Usage(), 0.0))
    assert row["answer"] == "x" * 3000 and row["errors"] == ["e" * 900] * 40
    cut = row_of(WorkflowRun("x" * 9000, "ok", {}, (), Usage(), 0.0))["answer"]
    assert cut == "x" * 8000 + " …"


def test_each_turn_of_a_loop_has_its_own_inputs_and_outputs():
    def played(cached: bool) -> WorkflowRun:
        trace = tuple(NodeRun("a", "Custom", "ok", turn, cached, {}, {"answer": f"the {turn}."}) for turn in (1, 2))
        return WorkflowRun("2", "ok", {}, trace, Usage(), 0.0)

    trace = row_of(played(cached=False), played(cached=True))["trace"]
    assert [node["outputs"] for node in trace] == ["answer: the 1.", "answer: the 2."]


def test_a_second_start_plays_nothing_and_other_problems_are_played(tmp_path, command, monkeypatch):
    step = f"--checkpoint={tmp_path / 'run/checkpoints/policy/0'}"
    step = step.replace("policy/0", f"{next((tmp_path / 'run/checkpoints').iterdir()).name}/0")
    assert main([step, *command]) == 0
    before = (tmp_path / "out/rows.jsonl").read_text()
    folder = tmp_path / "run/evaluations/0"
    assert len(before.splitlines()) == 4 and (folder / "results.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr("flowjax.evaluate._play", lambda *_: pytest.fail("nobody may play"))
        assert main([step, *command]) == 0 and (tmp_path / "out/rows.jsonl").read_text() == before
    with (tmp_path / "sets/nq.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Capital of Spain? What is 2 and 2?", "answer": ["4"]}) + "\n")
    assert main([step, *command]) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["policy"]["problems"] == 5
    assert (tmp_path / "run/evaluations/0-2/results.json").exists()


@pytest.mark.parametrize(
    ("checkpoint", "more", "message"),
    [
        ("nowhere", [], "is no run folder, nor runs/<run>/checkpoints/<policy>/<step>"),
        ("run/checkpoints/agent/7", [], "step 7 is not in"),
        ("run", ["--data=nowhere"], "--data=nowhere holds no problems"),
        ("run", ["--backends=nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_one_line(tmp_path, command, capsys, checkpoint, more, message):
    assert main([f"--checkpoint={tmp_path / checkpoint}", *command, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_run_of_another_world_is_refused(tmp_path, command, capsys):
    config = default_config()
    config.env.name, config.model.path = "flowjax.envs.math:Math", "base"
    save_run(config, tmp_path / "sums")
    assert main([f"--checkpoint={tmp_path / 'sums'}", *command]) == 2
    assert "was trained in the world Math: give a run of Canvas" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command)
    assert "give --workflow or --checkpoint" in capsys.readouterr().err
