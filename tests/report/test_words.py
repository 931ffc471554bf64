"""Words and figures of the report, beside the run that they are about."""

import base64
import gzip
import json
import math
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config, save_run
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.transcripts import batch_path, read_lines, trained_path, write_lines
from flowjax.report import page
from flowjax.report.__main__ import PageHandler, main
from flowjax.report.credit import explain_credit, value_options
from flowjax.report.episodes import EpisodePages, RecordedGroup, read_batch
from flowjax.report.overview import ends_of, methods, overview, pauses, phase_seconds, timeline
from flowjax.report.page import make_page
from flowjax.run import read_run
from tests.report.recorded import CANVAS, TRAINED_LESS, record_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return record_run(tmp_path_factory.mktemp("runs") / "run", steps=6)


def explained(run: Path, step: int) -> tuple[list[RecordedGroup], dict[str, Any]]:
    groups, known = read_batch(run, "agent", step), read_run(run)
    piece = EpisodePages(known).piece(groups)
    explain_credit(groups, piece, known.policies["agent"].credit)
    return groups, piece


def test_log_probs_at_training_find_their_tokens_again(run: Path):
    for group in read_batch(run, "agent", 2):
        for turn in (turn for line in group.lines for turn in line["turns"]):
            np.testing.assert_allclose(turn["trained_logprobs"], np.array(turn["logprobs"]) - TRAINED_LESS, atol=2e-5)


def test_parts_of_credit_add_up_and_the_sentence_names_them(run: Path):
    _, piece = explained(run, 1)
    turns = [turn for group in piece["groups"] for episode in group["episodes"] for turn in episode["turns"]]
    for turn in turns:
        parts = turn["advantage_parts"]
        assert parts["episode"] + parts["step"] == pytest.approx(turn["advantage"], abs=3e-5)
        said = f"Advantage {turn['advantage']:+.2f} = {parts['episode']:+.2f} for the episode"
        said = re.sub(r"[+-]0\.00", "0.00", said)
        assert turn["why"].startswith(said)


def test_a_sentence_on_credit_has_no_zero_with_a_sign_and_begins_with_a_capital(tmp_path: Path):
    run = record_run(tmp_path / "run", steps=1, groups=1)
    groups, known = read_batch(run, "agent", 0), read_run(run)
    for turn in (turn for line in groups[0].lines for turn in line["turns"]):
        turn["advantage"] = -0.001
        del turn["advantage_parts"]
    piece = EpisodePages(known).piece(groups)
    explain_credit(groups, piece, known.policies["agent"].credit)
    for turn in (turn for episode in piece["groups"][0]["episodes"] for turn in episode["turns"]):
        assert re.match(
            r"Advantage 0\.00, the same for every move of the episode \(rewardflow\)\. (It|All) ", turn["why"]
        )


def test_episodes_that_earned_the_same_are_said_to_be_alike(run: Path):
    for step in range(6):
        groups, piece = explained(run, step)
        for group, shown in zip(groups, piece["groups"], strict=True):
            said = [turn["why"] for episode in shown["episodes"] for turn in episode["turns"]]
            assert all(("none is better" in why) == (group.evenness == 0) for why in said)


def reexplained(run: Path, groups: list[RecordedGroup], name: str = "gae", **options: Any) -> dict[str, Any]:
    """The first group as the page would show it, had another estimator given its moves their credit."""
    for number, turn in enumerate(turn for line in groups[0].lines for turn in line["turns"]):
        turn.pop("advantage_parts", None)
        turn["advantage"] = 0.01 * number
    piece = EpisodePages(read_run(run)).piece(groups)
    explain_credit(groups, piece, ConfigDict({"name": name, "options": options}))
    return piece["groups"][0]


@pytest.mark.parametrize("lowest", [-1.0, 0.0])
def test_what_a_move_earned_is_its_reward_even_if_values_are_counted_from_the_lowest(run: Path, lowest: float):
    groups = read_batch(run, "agent", 1)
    for place, line in enumerate(groups[0].lines):
        line["reward"] = lowest + 0.25 * place
    shown = reexplained(run, groups)
    for place, episode in enumerate(shown["episodes"]):
        above = f", {0.25 * place:.2f} above the group's lowest, where" if lowest else ", where"
        said = episode["turns"][-1]["why"]
        assert f" and earned {lowest + 0.25 * place:.2f}{above}" in said
        assert (" above it was to be expected" in said) == bool(lowest)
    assert shown["graph"]["note"] == ("V is counted from -1, the group's lowest reward." if lowest else "")


@pytest.mark.parametrize(
    ("changes", "terminal", "said"),
    [
        ({}, True, "it ended the episode and"),
        ({}, False, "it was the last before the limit of turns and"),
        ({"status": "truncated"}, False, "it was its last turn of the episode and"),
        ({"trajectory_id": "train-1-0/0/agent-1"}, False, "it was its last turn of the episode and"),
        ({"trajectory_id": "train-1-0/0/agent-1"}, True, "it ended the episode and"),
    ],
)
def test_how_an_episode_ended_is_not_guessed(run: Path, changes: Mapping[str, str], terminal: bool, said: str):
    groups = read_batch(run, "agent", 1)
    line = groups[0].lines[0]
    line |= changes
    line["turns"][-1]["terminal"] = terminal
    assert line["group_id"] == "train-1-0"
    assert said in reexplained(run, groups)["episodes"][0]["turns"][-1]["why"]


def test_an_ending_has_the_mean_of_what_counted_episodes_earned_there(run: Path):
    (first, *_) = read_batch(run, "agent", 1)[0].lines
    rewards = {"0": 0.0, "1": 0.25, "2": 1.0}
    lines = [{**first, "trajectory_id": f"train-1-0/{name}", "reward": reward} for name, reward in rewards.items()]
    lines.append({**first, "trajectory_id": "train-1-0/3", "reward": 5.0, "status": "env_error"})
    (end,) = [node for node in reexplained(run, [RecordedGroup("train-1-0", lines)])["graph"]["nodes"] if node["end"]]
    assert end["value"] == pytest.approx(1.25 / 3, abs=1e-4) and end["visits"] == 4


@pytest.mark.parametrize(
    ("name", "none_better", "scale", "compared", "note"),
    [
        ("rewardflow", True, "", "V ", ""),
        ("gae", False, "of the whole batch", "V ", ""),
        ("gigpo", True, "", "moves from the same state", "Credit by gigpo is not made of this V."),
        ("published.rewardflow", False, "", "moves from the same state", "is not made of this V."),
        ("discounted_return", False, "", "all moves of the group", "is not made of this V."),
        ("reinforce_plus_plus", False, "of the whole batch", "all moves of the batch", "is not made of this V."),
        (f"{__name__}:odd_options", False, "compares it is not known here", "", "V has "),
    ],
)
def test_credit_is_explained_by_what_its_estimator_compares(
    run: Path, name: str, none_better: bool, scale: str, compared: str, note: str
):
    groups = read_batch(run, "agent", 1)
    for line in groups[0].lines:
        line["reward"] = 0.5
    shown = reexplained(run, groups, name)
    assert note in shown["graph"]["note"] and bool(note) == bool(shown["graph"]["note"])
    for why in (turn["why"] for episode in shown["episodes"] for turn in episode["turns"]):
        assert ("none is better" in why) == none_better
        assert scale in why and ("scale of" in why or "not known" in why) == bool(scale)
        _, _, step = why.partition("This move: ")
        assert not step or compared in step or "and earned" in step
        assert name in ("gae", "rewardflow") or not re.search(r"\bV \d|expected", step)


def test_gae_that_is_not_whitened_has_the_scale_of_its_values(run: Path):
    shown = reexplained(run, read_batch(run, "agent", 1), "gae", whitened=False)
    assert "scale" not in " ".join(turn["why"] for episode in shown["episodes"] for turn in episode["turns"])


def test_a_move_leads_to_the_state_in_which_its_agent_acts_next(run: Path):
    groups = read_batch(run, "agent", 3)
    for number, turn in enumerate(turn for line in groups[0].lines for turn in line["turns"]):
        turn["next_state_key"] = f"{number:016x}"  # in which another agent acts
    graph = reexplained(run, groups)["graph"]
    assert all(node["visits"] for node in graph["nodes"])
    for edge in graph["edges"]:
        for e, t in edge["moves"]:
            turns = groups[0].lines[e]["turns"]
            assert t + 1 == len(turns) or edge["target"] == turns[t + 1]["state_key"]


def test_every_move_of_a_graph_is_a_turn_and_every_turn_is_in_one_move(run: Path):
    _, piece = explained(run, 3)
    for group in piece["groups"]:
        moves = [tuple(move) for edge in group["graph"]["edges"] for move in edge["moves"]]
        assert sorted(moves) == [(e, t) for e, one in enumerate(group["episodes"]) for t in range(len(one["turns"]))]
        places = [(node["column"], node["row"]) for node in group["graph"]["nodes"]]
        assert len(set(places)) == len(places), "no state lies on another"
        assert sum(node["visits"] for node in group["graph"]["nodes"]) == len(moves) + len(group["episodes"])
        names = {node["id"] for node in group["graph"]["nodes"]}
        assert all({edge["source"], edge["target"]} <= names for edge in group["graph"]["edges"])


def test_actions_that_lead_to_the_same_state_keep_their_own_credit(run: Path):
    several = 0
    for group in (group for step in range(6) for group in explained(run, step)[1]["groups"]):
        for edge in group["graph"]["edges"]:
            turns = [group["episodes"][e]["turns"][t] for e, t in edge["moves"]]
            assert len(turns) == sum(each["count"] for each in edge["actions"])
            for each in edge["actions"]:
                given = [t["advantage"] for t in turns if (t["action"] or "no legal action") == each["action"]]
                assert (each["count"], each["advantage"]) == (len(given), pytest.approx(np.mean(given), abs=1e-4))
            several += len(edge["actions"]) > 1
    assert several, "steps against two walls, for one"


def test_where_the_time_went_adds_up(run: Path):
    data = overview(run)
    phases = data["spent"]["phases"]
    assert phases["waiting for episodes"] == pytest.approx(6.0)
    assert phases["forward and backward passes"] == pytest.approx(6 * (2.0 - 0.1))
    assert sum(phase_seconds({"wait_s": 1.0, "step_s": 2.0, "pack_s": 0.5, "save_s": 0.25}).values()) == 3.25
    (steps,) = [row for row in data["timeline"] if row["name"] == "steps of agent"]
    lengths = {phase: end - start for start, end, phase in steps["spans"]}
    assert lengths["saving checkpoints"] == pytest.approx(0.2, abs=2e-3)


def test_the_night_between_a_crash_and_its_resume_is_no_time_of_the_run():
    started = [{"started_s": 100.0}, {"started_s": 5000.0, "ended_s": 5030.0}, {"started_s": 9000.0}]
    events = [
        {"time_s": time_s, "role": "engine", "event": event}
        for time_s, event in [(101.0, "start"), (110.0, "up"), (5001.0, "start"), (5010.0, "up"), (9001.0, "start")]
    ]
    steps = [{"time_s": 160.0, "wait_s": 4.0, "step_s": 6.0}, {"time_s": 5020.0, "wait_s": 5.0, "step_s": 2.0}]
    ends = ends_of(started, [*events, *steps])
    assert ends == [160.0, 5030.0, 9001.0]
    paused = pauses(started, ends)
    assert paused == [(160.0, 5000.0), (5030.0, 9000.0)]
    engine, trainer = timeline(steps, [], events, None, paused)
    # 4,840 s earlier from the second launch on: what was up at the crash ends with it.
    assert engine["spans"] == [
        [101.0, 110.0, "starting"], [110.0, 161.0, "up"], [161.0, 170.0, "starting"], [170.0, 191.0, "up"]
    ]  # fmt: skip
    assert [span[:2] for span in trainer["spans"]] == [[150.0, 154.0], [154.0, 160.0], [173.0, 178.0], [178.0, 180.0]]


def test_what_is_up_when_a_run_goes_on_is_drawn_to_its_last_line():
    started, up = ({"time_s": at, "role": "engine", "event": event} for at, event in ((100.0, "start"), (130.0, "up")))
    (row, _) = timeline([{"time_s": 160.0, "wait_s": 4.0}], [], [started, up], None)
    assert row["spans"] == [[100.0, 130.0, "starting"], [130.0, 160.0, "up"]]
    (row, _) = timeline([{"time_s": 160.0, "wait_s": 4.0}], [], [started], None)
    assert row["spans"] == [[100.0, 160.0, "up"]]


def test_numbers_of_a_diverged_policy_are_json_that_browsers_read(tmp_path: Path):
    run = record_run(tmp_path / "run", steps=2)
    path = trained_path(run, "agent", 1)
    write_lines(path, [{**line, "logprobs": [math.nan for _ in line["logprobs"]]} for line in read_lines(path)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 3, "policy": "agent", "entropy": math.inf}) + "\n")
    text = make_page([run])
    packed = re.findall(r'<script type="text/plain" id="piece-[^>]*>([^<]*)<', text)
    data = text.partition('id="data"')[2].partition(">")[2].partition("</script>")[0]

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for part in (data, *(gzip.decompress(base64.b64decode(piece)).decode() for piece in packed)):
        json.loads(part, parse_constant=refuse)
    assert packed


def test_a_run_took_as_long_as_its_launches_whatever_its_trainers_did_side_by_side(tmp_path: Path):
    save_run(default_config(), tmp_path)
    starts = [{"started_s": 100.0}, {"started_s": 5000.0, "ended_s": 5100.0}]
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    (tmp_path / "warm_start").mkdir()
    for name, lines in (
        ("warm_start", [{"kind": "warm_start", "time_s": time_s} for time_s in (110.0, 150.0, 5010.0, 5020.0)]),
        (".", [{"kind": "train", "time_s": 5090.0, "policy": of, "step": 1, "wait_s": 60.0} for of in ("a", "b")]),
    ):
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spent = overview(tmp_path)["spent"]
    assert spent["wall_s"] == 50.0 + 100.0, "the launch that was killed went on to its last line"
    assert spent["phases"] == {"warm start": 40.0 + 20.0, "waiting for episodes": 120.0}


def test_evaluations_are_in_the_order_of_their_steps_whichever_ended_first(tmp_path: Path):
    save_run(default_config(), tmp_path)
    for step in (0, 20, 10):  # a straggler held that of step 10 up
        MetricsWriter(tmp_path).write("eval", step=step, version=step, success_rate=step / 20)
    assert [line["step"] for line in overview(tmp_path)["evaluations"]] == [0, 10, 20]


def test_a_world_that_has_gone_costs_the_drawings_and_nothing_else(run: Path):
    text = (run / "config.json").read_text()
    changed = json.loads(text)
    changed["env"]["name"] = "no.such.module:World"
    try:
        (run / "config.json").write_text(json.dumps(changed))
        without = make_page([run])
    finally:
        (run / "config.json").write_text(text)
    assert "states are not drawn" in without and "states are not drawn" not in make_page([run])


def odd_options(table, *, gamma: float | None = None, rewards: tuple[str, ...] = ("a", "b")):
    """An estimator of one's own, with options that mean something else."""
    del gamma, rewards
    return table.score


@pytest.mark.parametrize(
    ("name", "options", "gamma", "noted"),
    [
        (f"{__name__}:odd_options", {"gamma": 0.5, "rewards": "reward"}, 0.5, ""),
        (f"{__name__}:odd_options", {"gamma": 1, "rewards": "reward"}, 1, ""),
        (f"{__name__}:odd_options", {"rewards": "reward"}, 0.9, "V has gamma 0.9, for that of {name} is None."),
        (f"{__name__}:odd_options", {"gamma": 2.0, "rewards": "reward"}, 0.9, "for that of {name} is 2.0."),
        (f"{__name__}:odd_options", {"gamma": True, "rewards": "reward"}, 0.9, "for that of {name} is True."),
        (
            f"{__name__}:odd_options",
            {"gamma": (0.9, 0.5)},
            0.9,
            "V has rewards score, for that of {name} is ('a', 'b')",
        ),
        ("no.such.module:credit", {"gamma": 0.5}, 0.9, "V has gamma 0.9, for its estimator cannot be read ("),
    ],
)
def test_an_estimator_that_is_not_here_or_has_options_of_its_own_costs_their_values_and_nothing_else(
    tmp_path: Path, name: str, options: Mapping[str, Any], gamma: float, noted: str
):
    changes = {"credit.name": name, "credit.options": dict(options)}
    run = record_run(tmp_path / "run", steps=1, groups=1, size=2, changes=changes)
    assert make_page([run])
    assert value_options(read_run(run).policies["agent"].credit)["gamma"] == gamma
    note = explained(run, 0)[1]["groups"][0]["graph"]["note"]
    assert noted.format(name=name) in note and bool(note) == bool(noted)


def test_what_executors_cost_is_said_of_a_whole_run_or_not_at_all(tmp_path: Path, monkeypatch):
    run = record_run(tmp_path / "run", steps=4, groups=2, size=2)
    for step in range(4):
        lines = list(read_lines(batch_path(run, "agent", step)))
        for line in lines:
            line["outcome"]["executor_cost"] = 0.5
        write_lines(batch_path(run, "agent", step), lines)

    def cost() -> float | None:
        data = make_page([run]).partition('id="data"')[2].partition(">")[2].partition("</script>")[0]
        return json.loads(data)["runs"][0]["spent"]["cost"]

    assert cost() == 4 * 2 * 2 * 0.5
    monkeypatch.setattr(page, "_MOST_GROUPS", 4)
    assert cost() is None


def answers_alone(correctness, *, bonus: float = 0.1):
    """A reward of one's own."""
    return correctness + bonus


@pytest.mark.parametrize(
    ("components", "explained"),
    [
        ({"canvas": 1.0}, True),
        ({"canvas": {"path": "flowjax.rewards:canvas", "base": -0.5}}, True),
        ({"canvas": {"path": f"{__name__}:answers_alone", "bonus": 0.2}}, False),
        ({"success": 1.0}, False),
    ],
)
def test_a_canvas_reward_is_explained_if_it_is_the_built_in_one(
    tmp_path: Path, components: Mapping[str, Any], explained: bool
):
    run = record_run(tmp_path / "run", steps=1, groups=1, size=2, played=replace(CANVAS, components=components))
    groups = read_batch(run, "agent", 0)
    groups[0].lines[0]["outcome"] = {}  # as of an episode that failed
    (shown,) = EpisodePages(read_run(run)).piece(groups)["groups"]
    failed, played = (episode.get("structure") for episode in shown["episodes"])
    assert failed is None and (played is not None) == explained
    if played is not None:
        reward = groups[0].lines[1]["reward"]
        assert played["base"] + played["S"] + played["paid"] == pytest.approx(reward, abs=1e-3)


def test_a_run_of_long_episodes_is_shown_in_part(run: Path, monkeypatch):
    assert "batches of agent are in this page" not in make_page([run])
    monkeypatch.setattr(page, "_MOST_GROUPS", 6)
    text = make_page([run])
    assert "Episodes of 3 of the 6 batches of agent are in this page." in text
    for step in (1, 6):  # the first and the last are among them
        assert f'"label":"step {step}"' in text
    assert "batches of agent are in this page" not in make_page([run], groups_per_step=1)


@pytest.fixture
def served(run: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PageHandler, [run], 1, {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_served_page_follows_the_run_and_no_other_file_is_served(run: Path, served: str):
    with urllib.request.urlopen(f"{served}/") as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "piece-0-0" in answer.read().decode()
    for path in ("/config.json", "/../config.json", "/report.html"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{served}{path}")
        assert refused.value.code == 404
    lines = (run / "metrics.jsonl").read_text()
    try:
        (run / "metrics.jsonl").write_text("")
        with pytest.raises(urllib.error.HTTPError) as early:
            urllib.request.urlopen(f"{served}/")
        said = early.value.read().decode()
        assert early.value.code == 503 and "has no step and no evaluation yet: look again when it has one" in said
        starts = (run / "run.json").read_text()
        ended = [{**start, "exit_status": 143} for start in json.loads(starts)["starts"]]
        (run / "run.json").write_text(json.dumps({"starts": ended}))
        with pytest.raises(ConfigError, match="its launch ended with status 143: go on with --resume"):
            overview(run)
        (run / "run.json").write_text(starts)
        assert 'http-equiv="refresh"' in said and early.value.headers["Content-Type"].startswith("text/html")
        MetricsWriter(run / "warm_start").write("train", step=1, policy="base", loss=1.0)
        with pytest.raises(ValueError, match="no evaluation yet, it is in its warm start: look again"):
            overview(run)
    finally:
        (run / "metrics.jsonl").write_text(lines)
        shutil.rmtree(run / "warm_start", ignore_errors=True)


def test_seeds_of_a_method_may_each_have_a_base_of_their_own():
    def found(*runs: tuple[int, str]) -> list[list[int]]:
        return methods([{"name": f"run-{seed}", "config": {"seed": seed, "model.path": base}} for seed, base in runs])

    assert found((0, "models/sokoban-0"), (1, "models/sokoban-1"), (0, "models/other-0")) == [[0, 1], [2]]
    assert found((0, "models/a-0"), (1, "models/b-1"), (1, "models/a-0")) == [[0, 2], [1]]
    assert found((3, "models/llama-3"), (0, "models/llama-3")) == [[0, 1]], "a name that ends in a seed by chance"
    for first, second in ((0, 3), (3, 0)):  # whichever run is named first
        by_chance = ((first, "models/llama-3"), (second, "models/llama-3"), (0, "models/llama-0"))
        assert found(*by_chance) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nothing"], "--nothing is not known"),
        ([], "no run is named"),
        (["RUN", "--groups=many"], "--groups is 'many'"),
        (["RUN", "--host=0.0.0.0"], "--host says where --serve listens"),
        (["missing"], "cannot be read"),
        (["RUN", "--out=missing/x.html"], "--out is missing/x.html, and there is no folder missing: make it"),
    ],
)
def test_a_mistake_is_one_line(run: Path, capsys, arguments: list[str], said: str):
    assert main([str(run) if each == "RUN" else each for each in arguments]) == 2
    assert said in capsys.readouterr().err


def test_help_is_printed(capsys):
    assert main(["--help"]) == 0
    assert "--serve" in capsys.readouterr().out
