"""Benchmarks that compare what runs learn: curves, what was spent until a target is met, and the tables."""

import contextlib
import itertools
import json
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from configs.sokoban import get_config
from flowjax.config import default_config, load_run, save_run
from flowjax.credit.estimators import check_options
from flowjax.dataflow.tasks import task_at, train_tasks
from flowjax.envs import find_world
from flowjax.launch import command_line
from flowjax.launch.checks import check_config
from flowjax.monitor.held_out import HeldOutEpisode, write_held_out
from flowjax.monitor.transcripts import batch_path, write_lines
from flowjax.run import resolve
from tests.benchmarks import algorithms, canvas_rewards, far_run, kept, learning, loop, staleness
from tests.benchmarks.data_algorithms import row
from tests.benchmarks.runs import Curve, curve, evaluated, launches, serving, trained

RISING = Curve(np.array([0.2, 0.4, 0.8, 0.6]), {"rollouts": np.array([0.0, 100.0, 300.0, 500.0])})


@pytest.mark.parametrize(("target", "rollouts"), [(0.1, 0.0), (0.3, 50.0), (0.4, 100.0), (0.7, 250.0), (0.81, None)])
def test_what_was_spent_is_read_off_the_first_crossing(target: float, rollouts: float | None):
    spent = RISING.until(target)
    assert spent is None if rollouts is None else spent == pytest.approx({"rollouts": rollouts})


def finished(tmp_path: Path) -> Path:
    """A run folder as a finished run leaves it, as far as the tables read it."""
    ends = {"entropy": 0.2, "invalid_share": 0.1}
    config = default_config()
    config.rollout.group_size = 8
    save_run(config, tmp_path)
    lines = [
        {"kind": "eval", "step": 0, "success_rate": 0.2, "time_s": 10.0},
        {"kind": "batch", "step": 5, "tasks": 90, "time_s": 14.0},
        {"kind": "train", "step": 4, "trained_tokens": 300.0, "time_s": 14.5, **ends},
        {"kind": "train", "step": 5, "trained_tokens": 500.0, "time_s": 15.0, **ends},
        {"kind": "eval", "step": 5, "success_rate": 0.6, "time_s": 19.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checkpoints" / "agent" / "5").mkdir(parents=True)
    start = {"started_s": 4.0, "code": {"commit": "0123456789ab"}, "machine": {"cpus_allowed": 2, "cpu": "Some CPU"}}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [start]}))
    return tmp_path


def as_evaluated(folder: Path, *, tasks: int) -> None:
    """What the tables look for in the folder of an evaluation, beside its episodes."""
    config = default_config()
    config.eval.tasks = tasks
    config.rollout.group_size = 8
    folder.mkdir(parents=True, exist_ok=True)
    save_run(config, folder)
    (folder / "results.json").write_text(json.dumps({"metrics": {}}))


@pytest.mark.parametrize(("tasks", "plays"), [(100, False), (200, False), (201, True)])
def test_what_an_evaluation_lacks_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, plays: bool):
    finished(tmp_path)
    as_evaluated(tmp_path / "skills" / "base-greedy", tasks=200)
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr("tests.benchmarks.runs.call", lambda *arguments: called.append(arguments))
    evaluated(tmp_path, how="greedy", base=True, tasks=tasks)
    assert len(called) == plays
    assert not plays or "--config.eval.tasks=201" in called[0]


def test_a_newer_checkpoint_is_evaluated_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    as_evaluated(finished(tmp_path) / "skills" / "5-greedy", tasks=200)
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr("tests.benchmarks.runs.call", lambda *arguments: called.append(arguments))
    assert evaluated(tmp_path, how="greedy", base=False, tasks=200) == tmp_path / "skills" / "5-greedy"
    assert not called
    (tmp_path / "checkpoints" / "agent" / "12").mkdir()
    assert evaluated(tmp_path, how="greedy", base=False, tasks=200) == tmp_path / "skills" / "12-greedy"
    assert len(called) == 1


def test_a_run_is_not_taken_for_one_of_another_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    called: list[tuple[str, ...]] = []

    def launch(*arguments: str) -> None:
        called.append(arguments)
        config, values = command_line.parse(
            arguments[1:], lambda flags_of: flags.DEFINE_string("name", "", "Name.", flag_values=flags_of)
        )
        config.name = str(values["name"].value)
        folder = tmp_path / config.name
        folder.mkdir()
        save_run(config, finished(folder))

    monkeypatch.setattr("tests.benchmarks.runs.call", launch)
    fewer = ["--config.trainer.steps=9"]
    run, _ = trained("sokoban", "7", tmp_path, fewer)
    assert (run, len(called)) == (tmp_path / "sokoban-nano-7", 1)
    assert trained("sokoban", "7", tmp_path, fewer)[0] == run and len(called) == 1
    with pytest.raises(SystemExit, match=r"trainer\.steps is 9 there, 60 here.*another --out"):
        trained("sokoban", "7", tmp_path)


ENGINE = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_engines_without_a_run_are_waited_for_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = default_config()
    config.engine.replicas = 2
    run = resolve(config, tmp_path)
    monkeypatch.setattr(
        "tests.benchmarks.runs.engine_command", lambda *given: ([sys.executable, "-c", ENGINE, str(given[2])], {})
    )
    with serving(run, run.engines) as served:
        assert [each.engine for each in served] == list(run.engines)
        for each in served:
            with urllib.request.urlopen(f"{each.url}/health") as answer:
                assert answer.status == 200
    assert all(each.process.poll() is not None for each in served)
    monkeypatch.setattr("tests.benchmarks.runs.engine_command", lambda *given: ([sys.executable, "-c", "1 / 0"], {}))
    with pytest.raises(SystemExit, match=r"(?s)ZeroDivisionError.*has ended"), serving(run, run.engines):
        pass


def test_the_time_between_two_launches_is_not_counted(tmp_path: Path):
    run = finished(tmp_path)
    starts = json.loads((run / "run.json").read_text())["starts"]
    # Killed after the line of 14.5 s, gone on with a day later.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = [{**line, "time_s": line["time_s"] + 86_400 * (line["time_s"] > 14.5)} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in later))
    starts += [{**starts[0], "started_s": 86_414.0, "ended_s": 86_420.0}]
    (run / "run.json").write_text(json.dumps({"starts": starts}))
    assert launches(run) == [(4.0, 14.5), (86_414.0, 86_420.0)]
    assert curve(run).spent["seconds"].tolist() == [0.0, 5.5]  # 4.5 s until it was killed, 1 s after it began again


def test_a_run_is_read_from_its_own_lines(tmp_path: Path):
    found = curve(finished(tmp_path))
    assert found.until(0.4) == pytest.approx({"rollouts": 360.0, "steps": 2.5, "tokens": 400.0, "seconds": 2.5})
    assert row("nano_greso", [found, found], 0.4).startswith(
        "| greso | 20 20 % | 60 60 % | 2 of 2 | 360 ± 0 (360, 360) |"
    )


def test_a_far_run_with_steps_that_are_not_finite_has_a_row(tmp_path: Path):
    interval = {"success_rate": 0.5, "low": 0.4, "high": 0.6}
    lines = [{"kind": "eval", "step": step, "policies": {"agent": interval}} for step in (0, 2)]
    lines += [{"kind": "batch", "policy": "agent", "ages": {"1": 8}, "dropped": {}, "groups": 8}]
    lines += [
        {"kind": "train", "step": step, "time_s": 30.0 * step, "episodes": 60, "mismatch_kl": found}
        for step, found in ((1, 0.01), (2, "nan"))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = "agent 50.0 % [40.0, 60.0]"
    assert far_run.row("far", "0", tmp_path) == f"| far | 0 | 0.5 | 2.0 | {before} | {before} | 1 | 0.0 % | nan |"


def test_loops_of_both_sides_are_read_and_set_beside_each_other(tmp_path: Path):
    run, peer = finished(tmp_path), tmp_path / "trl-0"
    (run / "launch.json").write_text(json.dumps({"launch_s": 30.0, "load": 1.5}))
    for step, share in ((0, 0.9), (5, 0.7)):  # step 0 was played in the run itself, before training
        folder = run / "evaluations" / str(step)
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"metrics": {"success": {"mean": share}}}))
    peer.mkdir()
    rows = [
        {"step": 0, "success": 0.2, "rollouts": 0, "tokens": 0, "seconds": 0.0},
        {"step": 5, "success": 0.6, "rollouts": 640, "tokens": 9000, "seconds": 20.0},
    ]
    result = {"evaluations": rows, "first_rollout_s": 107.0, "load": 2.5, "versions": {"trl": "1.16.0"}}
    (peer / "result.json").write_text(json.dumps(result))
    (peer / "begun.json").write_text(json.dumps({"time_s": 100.0}))

    sides = {"flowjax": {"7": loop.ours(run)}, "TRL": {"7": loop.theirs(peer)}}
    lines = loop.table(sides, [0.4, 0.65]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5] if "---" not in line]
    head, ours, theirs, ratio = (dict(zip(cells[0], row, strict=True)) for row in cells)
    assert head.keys() == ours.keys()
    # From 0.2 to 0.7 over five seconds and 640 trained episodes on this side, to 0.6 over twenty on the other.
    assert (ours["episodes to 40%"], ours["seconds to 40%"]) == ("256", "2.0")
    assert (theirs["episodes to 40%"], theirs["seconds to 40%"]) == ("320", "10.0")
    assert (ratio["episodes to 40%"], ratio["seconds to 40%"]) == ("1.25", "5.00")
    assert (ours["episodes to 65%"], theirs["episodes to 65%"], ratio["episodes to 65%"]) == ("576", "never", "")
    assert (ours["tokens/s"], theirs["tokens/s"], theirs["episodes/s"]) == ("160", "450", "32.0")
    assert (ours["start-up, s"], theirs["start-up, s"], theirs["load"]) == ("6.0", "7.0", "2.5")
    three = loop.table({**sides, "another": {"7": loop.ours(run)}}, [0.4]).splitlines()
    assert [line.split(" | ")[0] for line in three[5:7]] == ["| TRL / flowjax", "| another / flowjax"]
    assert "flowjax, seed 7: 20 70" in lines and "trl 1.16.0" in loop.versions_of(peer)


def test_the_peer_is_given_what_the_recipe_says(tmp_path: Path):
    config = get_config("nano")
    config.trainer.update({"steps": 3, "keep_every_steps": 1})
    config.eval.tasks, config.seed = 4, 7
    save_run(config, tmp_path)
    case = loop.case_of(tmp_path)
    json.dumps(case)  # it goes over as a file
    assert (case["rank"], case["warmup"], case["entropy"]) == (32, 5, 0.02)
    assert len(case["train"]) == 3 * case["groups"] and len(case["held_out"]) == 4
    held_out, train = ([task["payload"]["level"] for task in case[name]] for name in ("held_out", "train"))
    assert not set(held_out) & set(train)
    assert train[0] == task_at(train_tasks(config), 0).payload["level"]
    assert find_world(case["world"])(**case["options"]).options.max_moves == case["max_turns"]


def test_area_is_the_mean_over_tokens_not_over_evaluations():
    uneven = Curve(np.array([0.0, 1.0, 1.0]), {"tokens": np.array([0.0, 100.0, 400.0])})
    assert learning.area(uneven) == pytest.approx((0.5 * 100 + 300) / 400)


@pytest.mark.parametrize("name", algorithms.ESTIMATORS)
def test_compared_estimators_exist_with_their_options(name: str):
    check_options(name, algorithms.OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", staleness.OBJECTIVES)
def test_compared_objectives_are_runs_that_the_launcher_takes(name: str):
    fields = [f"--config.{field}={value}" for field, value in staleness.OBJECTIVES[name].items()]
    config, _ = command_line.parse(["--config=configs/sokoban.py:nano", *fields])
    assert check_config(config) == []


def kept_elsewhere(folder: Path, runs: Mapping[str, Sequence[Path]]) -> dict[str, list[Path]]:
    """Runs in `folder`, kept in a file and unpacked from it in another place."""
    for run in itertools.chain(*runs.values()):
        config = load_run(run)
        with config.unlocked():
            config.runs = str(folder)
        save_run(config, run)
        (run / "launch.json").write_text(json.dumps({"load": 1.0}))
    names = kept.keep(folder, folder / "kept.tar.xz")
    assert sorted(names) == sorted(run.name for run in itertools.chain(*runs.values()))
    kept.unpack(folder / "kept.tar.xz", folder / "there")
    return {name: [folder / "there" / run.name for run in found] for name, found in runs.items()}


def test_the_table_says_what_the_evaluations_hold(tmp_path: Path):
    rng = np.random.default_rng(0)
    runs: dict[str, list[Path]] = {"rewardflow": [], "grpo": []}
    for name, chance in (("rewardflow", 0.8), ("grpo", 0.3)):
        for seed in range(3):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            runs[name].append(finished(folder))
            for side in ("base", "trained"):
                for how in ("greedy", "sampled"):
                    beside = how == "sampled"  # beside training, the first and the last one
                    evaluation = folder if beside else folder / "skills" / f"{'base' if side == 'base' else 5}-greedy"
                    if not beside:
                        as_evaluated(evaluation, tasks=200)
                    wins = rng.random(200) < (chance if side == "trained" else 0.1)
                    episodes = [
                        HeldOutEpisode(str(task), "", "", 0, "ok", float(won), 3, 6, {}, {})
                        for task, won in enumerate(wins)
                    ]
                    write_held_out(evaluation, f"agent@{0 if side == 'base' else 5}", episodes)
    text = learning.table("estimator", runs, tasks=200)
    there = kept_elsewhere(tmp_path, runs)
    assert learning.table("estimator", there, tasks=200) == text
    assert str(tmp_path) in (runs["grpo"][0] / "config.json").read_text()
    files = [file for file in (tmp_path / "there").rglob("*") if file.is_file()]
    assert len(files) > 30 and not any(str(tmp_path) in file.read_text() for file in files)
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines] == ["estimator", "(base)", "rewardflow", "grpo"]
    assert {len(line) for line in lines} == {len(learning.COLUMNS) + 3}
    shares = [float(line[2].split("%")[0]) for line in lines[1:]]
    assert shares == pytest.approx([10, 80, 30], abs=6)
    assert "grpo (A) and rewardflow (B), greedy: -" in text and "is lower than B's" in text
    assert (
        learning.picture({name: [curve(run) for run in found] for name, found in runs.items()}).count("<polyline") == 2
    )
    assert "| 3 never | 3 never |" in learning.row("grpo", runs["grpo"], 2.0, 200)
    assert "never" not in learning.row("grpo", runs["grpo"], 0.5, 200)
    assert lines[1][3].split() == lines[1][2].split()[:1]  # a base for all of them
    for seed, run in enumerate(runs["rewardflow"]):
        config = load_run(run)
        config.model.path = f"models/{seed}"
        save_run(config, run)
    base, first = learning.table("estimator", runs, tasks=200).splitlines()[2:4]
    own = [learning.cells([learning.base_evaluation(run, "greedy", 200)]) for run in runs["rewardflow"]]
    assert base.split("|")[3].split() == [each.split()[0] for each in own]  # each seed's own, in order
    assert first == text.splitlines()[3]


def test_tokens_to_the_target_are_paired_by_seed():
    first, twice = [100.0, 800.0, 50.0], [200.0, 1600.0, 100.0]
    said = learning.times_the_tokens([220.0, 1600.0, 100 / 1.1], first)
    assert said == "2.00 x [1.58, 2.53], fewer in 0 of 3 seeds, p = 0.0062."
    assert learning.times_the_tokens(first, first).endswith("p = 1.")
    assert learning.times_the_tokens(first[:1], twice[:1]) == "0.50 x in one seed."
    assert (
        learning.times_the_tokens([None, 1.0, 2.0], twice)
        == "in 1 of 3 seeds one of them never meets it, or begins there."
    )


def test_ratios_of_one_way_with_itself_are_found_to_differ_one_time_in_twenty():
    rng = np.random.default_rng(0)
    said = [learning.times_the_tokens(*np.exp(rng.normal(0, 0.3, (2, 5)))) for _ in range(1000)]
    assert 30 <= sum(float(text.split("p = ")[1].rstrip(".")) < 0.05 for text in said) <= 70
    halves = [learning.times_the_tokens(*(np.exp(rng.normal(0, 0.1, (2, 5))) * [[0.5], [1]])) for _ in range(200)]
    assert sum(float(text.split("p = ")[1].rstrip(".")) < 0.05 for text in halves) >= 190


def test_seeds_that_were_evaluated_at_different_steps_are_drawn():
    three, two = (
        Curve(np.linspace(0, 1, count), {"tokens": np.linspace(0, tokens, count)})
        for count, tokens in ((3, 800.0), (2, 400.0))
    )
    drawn = learning.picture({"one": [three, two]})
    # Over all 800 tokens one of them is half-way where the other has ended.
    assert drawn.count("<polyline") == 1 and f'points="{learning.LEFT}.0,' in drawn


def test_seeds_that_never_succeed_leave_room_for_success(tmp_path: Path):
    for seed in range(3):
        episodes = [HeldOutEpisode(str(task), "", "", 0, "ok", 0.0, 3, 6, {}, {}) for task in range(100)]
        (tmp_path / str(seed)).mkdir()
        write_held_out(tmp_path / str(seed), "agent@1", episodes)
    assert learning.cells([tmp_path / str(seed) for seed in range(3)]) == "0.0 % [0.0, 3.7] | 0.0 0.0 0.0"


def test_rewards_of_a_canvas_are_compared_with_fixed_workflows(tmp_path: Path):
    """Of four exercises the policy gets three right with all that the structure asks for, the workflow one."""
    whole = {"checks": 1, "formats": 1, "distinct_operators": 4, "branching": 1, "operator_entropy": 1}
    bare = dict.fromkeys(whole, 0) | {"distinct_operators": 1}
    runs = []
    for seed in range(2):
        run = tmp_path / str(seed)
        run.mkdir()
        runs.append(finished(run))
        for folder, calls in ((run, 9), (run / "skills" / "5-greedy", 3)):
            as_evaluated(folder, tasks=4)
            episodes = [
                HeldOutEpisode(
                    str(task), "", "", 0, "ok", float(task > 0), 3, 6,
                    {**(whole if task else bare), "distinct_siblings": 0, "executor_calls": calls}, {},
                )
                for task in range(4)
            ]  # fmt: skip
            write_held_out(folder, "agent@1", episodes)
        write_batches(run, whole | {"distinct_siblings": 0})
    found = canvas_rewards.built(learning.evaluation(runs[0], "greedy", 4))
    assert found == {"requests": 3.0, "check": 0.75, "branch": 0.75, "released": 0.75, "kinds": 3.25}
    cells = [cell.strip() for cell in canvas_rewards.row("cwrpo", runs, 4).strip("|").split("|")]
    assert len(cells) == len(canvas_rewards.COLUMNS)
    assert (cells[0], cells[2], cells[5:]) == ("cwrpo", "75.0 75.0", ["3.0", "0.75", "0.75", "0.75", "3.2", "0.50"])
    scores = {str(task): [float(task == 3), 1.0] for task in range(4)}
    fixed = canvas_rewards.fixed_row("Custom", scores)
    assert fixed.startswith("| `Custom` | 25.0 % [") and fixed.count("|") == len(canvas_rewards.COLUMNS) + 1
    assert "+50.0 points" in canvas_rewards.beside("cwrpo", runs, "Custom", scores, 4)
    drawn = canvas_rewards.picture({"cwrpo": [(3.0, 0.75)], "Custom": [(1.0, 0.25)]})
    assert drawn.count("<circle") == 2 and "Custom</text>" in drawn

    # Of 4 x (1 + 2 + ... + 8) requests a run, 144, a half has been made in the sixth batch, a quarter in the fourth.
    lines = canvas_rewards.training_rows({"cwrpo": runs, "grpo": runs})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(line[0], line[1]) for line in lines[::2]] == [(n, "cwrpo") for n in ("36", "72", "144", "all, 144")]
    assert [line[2:5] for line in lines[::2]] == [
        ["4", "37.5 %", "38 38"],  # the batches get 0, 1, 2, 3, 0, 1, 2, 3 of 4 right; of the last five or fewer
        ["6", "35.0 %", "35 35"],
        ["8", "45.0 %", "45 45"],
        ["8", "45.0 %", "45 45"],
    ]
    assert lines[0][5:] == ["1.00", "4.00", "0.50", "Custom 0.50, Programmer 0.50"]


def write_batches(run: Path, structure: Mapping[str, float]) -> None:
    """Eight training batches of four episodes; each asks one request more an episode than the one before."""
    batch_path(run, "agent", 0).parent.mkdir(parents=True)
    for step in range(8):
        outcomes = [{**structure, "success": float(n < step % 4), "executor_calls": 1 + step} for n in range(4)]
        lines = [
            {"group_id": "g", "outcome": outcome, "trajectory_id": str(n), "turns": [turn_with(n % 2)]}
            for n, outcome in enumerate(outcomes)
        ]
        write_lines(batch_path(run, "agent", step), lines)


def turn_with(operator: int) -> dict[str, object]:
    steps = [{"operator": ("Custom", "Programmer")[operator], "id": f"n{operator}"}]
    shown = {"trace": {"workflow": {"steps": steps}}}
    return {"prompt_ids": [1], "prompt_shared": 0, "sampled_ids": [2], "shown": shown}


def test_scores_of_fixed_workflows_are_those_of_their_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They were kept by workflow and exercise alone: another executor's were taken for this one's."""
    played: list[int] = []

    def play(world: object, workflow: str, tasks: Sequence[object]) -> list[dict[str, float]]:
        played.append(len(tasks))
        return [{"success": 1.0, "executor_calls": 2.0}] * len(tasks)

    monkeypatch.setattr(canvas_rewards, "served", lambda run: contextlib.nullcontext({}))
    monkeypatch.setattr(canvas_rewards, "played", play)
    monkeypatch.setattr("os.environ", dict(os.environ))

    def scores(name: str, tasks: int, *fields: str) -> Mapping[str, Mapping[str, Sequence[float]]]:
        config, _ = command_line.parse(["--config=configs/canvas.py:nano_llm", *fields])
        (tmp_path / name).mkdir(exist_ok=True)
        save_run(config, tmp_path / name)
        return canvas_rewards.fixed_scores(tmp_path / name, ["Custom"], tasks, tmp_path / "fixed.json")

    for name, tasks, fields, missing in (
        ("first", 2, (), [2]),
        ("longer", 3, ("--config.trainer.steps=9",), [1]),
        ("executor", 3, ("--config.bases.executor.model.path=other",), [3]),
        ("seed", 3, ("--config.seed=7",), [3]),
        ("options", 3, ("--config.env.options.max_calls=3",), [3]),
        ("first", 3, (), []),
    ):
        played.clear()
        assert len(scores(name, tasks, *fields)["Custom"]) == tasks
        assert played == missing, name


@pytest.mark.parametrize("name", canvas_rewards.REWARDS)
def test_compared_rewards_are_runs_that_the_launcher_takes(name: str):
    config, _ = command_line.parse(["--config=configs/canvas.py:nano_llm", *canvas_rewards.fields(name)])
    assert set(config.reward.components) == {*canvas_rewards.REWARDS[name], *canvas_rewards.ALWAYS}
    assert check_config(config) == []
