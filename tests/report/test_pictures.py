"""The report of runs, from the files that their own writers leave."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flowjax.config import default_config, load_run, save_run
from flowjax.dataflow.batches import credit_batch
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.transcripts import batch_path, read_lines, transcript, write_lines
from flowjax.records import Group, Task, Trajectory, Turn
from flowjax.report import pictures
from flowjax.report.__main__ import main
from flowjax.report.episodes import most_divided, read_batch
from flowjax.report.pictures import curves, draw_state_graph, learning_curves, moving_average


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    config = default_config()
    config.reward.components = {"success": 1.0}
    save_run(config, folder)
    metrics = MetricsWriter(folder)
    metrics.write("eval", step=0, success_rate=0.2, low=0.1, high=0.3)
    for step in range(1, 5):
        metrics.write("train", step=step, success_rate=step / 5)
    record_batch(folder, "grpo")
    return folder


def record_batch(folder: Path, estimator: str) -> None:
    groups = [group("even", [1, 0, 1, 0]), group("lost", [0, 0, 0, 0])]
    batch = credit_batch(groups, components={"success": 1.0}, estimator=estimator, options={}, with_parts=True)
    played = [(each.task, trajectory) for each in groups for trajectory in each.trajectories]
    lines = [transcript(*each, credit) for each, credit in zip(played, batch.credits, strict=True)]
    write_lines(batch_path(folder, "agent", 3), lines)


def group(name: str, successes: Sequence[int]) -> Group:
    def turn(state: int, following: int, terminal: bool) -> Turn:
        arrays = (np.array([1], np.int32), np.array([2], np.int32), np.array([-0.1], np.float32))
        return Turn("agent", 0, *arrays, "stop", state, following, 0.0, True, terminal)

    trajectories = [
        Trajectory(
            f"{name}/{index:03d}",
            name,
            name,
            0,
            [turn(10, 11 + success, False), turn(11 + success, 20 + success, bool(success))],
            {"success": float(success)},
        )
        for index, success in enumerate(successes)
    ]
    return Group(name, Task(name, "world", 0), trajectories)


def test_moving_average_by_hand():
    assert moving_average([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_the_curve_has_a_line_and_its_evaluations(run: Path):
    picture = learning_curves([run])
    assert picture.count("<polyline") == 1
    assert picture.count("<circle") == 1
    assert ">run</text>" in picture


def test_every_policy_has_a_curve_of_its_own(tmp_path: Path):
    metrics = MetricsWriter(tmp_path)
    share = {"trajectories": 9, "success_rate": 0.5, "low": 0.4, "high": 0.6}
    policies = {"solver": share, "verifier": {"trajectories": 0}}
    metrics.write("eval", step=0, versions={"solver": 3, "verifier": 0}, policies=policies)
    for step in range(1, 4):
        metrics.write("train", step=step, policy="solver", success_rate=step / 5)
    metrics.write("train", step=1, policy="verifier", success_rate=0.9)
    solver, verifier = curves(tmp_path, "pair")
    assert [entry["success_rate"] for entry in solver.train] == [0.2, 0.4, 0.6]
    assert [entry["step"] for entry in solver.evaluations] == [3]
    assert [len(verifier.train), len(verifier.evaluations)] == [1, 0]
    assert learning_curves([tmp_path]).count("<polyline") == 2


def test_the_group_drawn_is_the_divided_one(run: Path):
    divided = most_divided(read_batch(run, "agent", 3))
    assert (divided.group_id, len(divided.lines)) == ("even", 4)
    picture = draw_state_graph(run)
    assert picture is not None
    assert picture.startswith("<svg")


def drawn_graph(run: Path, monkeypatch) -> pictures.StateGraph:
    """What `draw_state_graph` draws."""
    drawn = []
    monkeypatch.setattr(pictures, "to_svg", lambda graph: drawn.append(graph) or "")
    draw_state_graph(run)
    return drawn[0]


def credited_by(run: Path, estimator: str) -> Path:
    config = load_run(run)
    config.credit.name = estimator
    config.credit.options = {}
    record_batch(run, estimator)
    (run / "config.json").write_text(config.to_json())
    return run


def test_moves_have_the_credit_that_was_trained_on(run: Path, monkeypatch):
    """This one compares over the whole batch: of the group alone it would give another credit."""
    graph = drawn_graph(credited_by(run, "reinforce_plus_plus"), monkeypatch)
    lines = most_divided(read_batch(run, "agent", 3)).lines
    won, lost = (
        next(line for line in lines if line["outcome"]["success"] == success)["turns"][1]["advantage"]
        for success in (1.0, 0.0)
    )
    ends = sorted(edge.advantage for edge in graph.edges if edge.source != "s0")
    assert ends == pytest.approx([lost, won]) and won == pytest.approx(1.677, abs=0.01)


def test_states_have_the_values_that_the_estimator_sees(run: Path, monkeypatch):
    graph = drawn_graph(credited_by(run, "discounted_return"), monkeypatch)
    values = [node.value for node in graph.nodes if node.kind in ("start", "state")]
    assert max(values) == pytest.approx(1.0) and values[0] == pytest.approx(0.95 / 2), "its discount, 0.95"


def test_an_ending_that_is_paid_for_is_not_won_unless_the_episode_succeeded(run: Path, monkeypatch):
    assert any(node.name.startswith("won ") for node in drawn_graph(run, monkeypatch).nodes)
    lines = list(read_lines(batch_path(run, "agent", 3)))
    paid = [{**line, "outcome": {"success": 0.5 * line["outcome"]["success"]}} for line in lines]
    write_lines(batch_path(run, "agent", 3), paid)
    ends = {node.name.split()[0]: node for node in drawn_graph(run, monkeypatch).nodes if " " in node.name}
    assert list(ends) == ["end"] and (ends["end"].kind, ends["end"].value) == ("end", pytest.approx(1.0))


def test_the_command_writes_both_pictures(run: Path, capsys):
    assert main([str(run), "--svg"]) == 0
    assert capsys.readouterr().out.split() == [str(run / "learning_curve.svg"), str(run / "state_graph.svg")]


def test_a_run_is_named_once_and_by_a_name_that_tells_it_from_the_others(
    run: Path, tmp_path: Path, capsys, monkeypatch
):
    again = tmp_path / "moved" / run.name
    again.mkdir(parents=True)
    for file in ("metrics.jsonl", "config.json"):
        (again / file).write_bytes((run / file).read_bytes())
    picture = learning_curves([run, again])
    assert f">{run}</text>" in picture and f">{again}</text>" in picture
    assert main([str(again), str(again / ".." / again.name), "--svg"]) == 2
    assert "is named twice, which would pass for two seeds: name each run once" in capsys.readouterr().err
    for folder in (run, again):
        (folder / "run_id").write_text("of-both\n")
    assert main([str(run), str(again), "--svg"]) == 2
    assert f"{again} is a copy of {run}, which would pass for a second seed" in capsys.readouterr().err
    monkeypatch.chdir(again)
    assert main([".", "--svg"]) == 0
    assert f">{again.name}</text>" in (again / "learning_curve.svg").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys):
    assert main([str(tmp_path), "--svg"]) == 2
    assert "no training steps" in capsys.readouterr().err


def test_a_line_that_is_no_episode_is_left_out(tmp_path: Path):
    path = batch_path(tmp_path, "agent", 1)
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        file.write('{"group_id": "g"}\n[]\n{"trajectory_id": "t", "group_id": "g", "turns": []}\n')
    (group,) = read_batch(tmp_path, "agent", 1)
    assert len(group.lines) == 1


def test_a_batch_without_turns_is_not_drawn(run: Path):
    last = batch_path(run, "agent", 3)
    last.write_bytes(last.read_bytes()[:20])  # as a power cut leaves it
    assert draw_state_graph(run) is None
    with gzip.open(last, "wt") as file:
        file.write('{"trajectory_id": "t", "group_id": "g", "turns": [], "outcome": {}}\n')
    assert draw_state_graph(run) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--serve=80000"], "--serve is 80000: give a port of at most 65535"),
        (["--groups=²"], "--groups is '²': give a whole number"),
        (["--svg", "--out=a.svg"], "--out is of the page, which --svg takes the place of: give one of them"),
        (["--svg=a.svg", "--groups=3"], "--groups is of the page"),
        (["--serve=0", "--host=192.0.2.1"], "nobody can listen at --host=192.0.2.1 and --serve=0"),
        (["--serve", "22222"], "22222 has no config.json: give the folder of a run, and values of flags after '='"),
    ],
)
def test_a_command_that_cannot_be_meant_takes_one_message(tmp_path: Path, capsys, argv: list[str], message: str):
    save_run(default_config(), tmp_path)
    assert main([str(tmp_path), *argv]) == 2
    assert message in capsys.readouterr().err
