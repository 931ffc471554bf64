import io
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from flowjax.config import ConfigError, default_config, save_run
from flowjax.launch.machine import hold
from flowjax.launch.screen import Screen, figures, plain_line, render_status, summary
from flowjax.monitor import metrics
from flowjax.monitor.diagnosis import diagnose
from flowjax.monitor.metrics import (
    RECENT_STEPS,
    MetricsWriter,
    Progress,
    RoleState,
    clock,
    read_status,
    sparkline,
    write_status,
)


def step_line(step, **more):
    return {
        "policy": "agent",
        "step": step,
        "loss": 0.1,
        "reward_mean": 0.5,
        "success_rate": 0.25 if step % 2 else 0.75,
        "no_signal_share": 0.4,
        "episodes": 10,
        "turns": 60,
        "trained_tokens": 120,
        "row_tokens": 3000,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "mismatch_kl": 2e-8,
        "mismatch_max": 3e-4,
        "wait_s": 2.0,
        "step_s": 1.5,
        "save_s": 0.5,
        "total_s": 4.0,
        "tokens_per_s": 2000.0,
        **more,
    }


def write_run(folder, steps=4):
    writer = MetricsWriter(folder)
    writer.write("eval", step=0, version=0, episodes=200, success_rate=0.4, low=0.334, high=0.469, seconds=9.0)
    for step in range(1, steps + 1):
        writer.write("train", **step_line(step, episodes=30 if step == 2 else 10))
    (folder / "status-rollout.json").write_text(
        json.dumps({"episodes_per_s": 31.2, "sampled_tokens_per_s": 1403.0, "in_flight": 97, "serving_version": 3})
    )
    return writer


def text_of(renderable, width=140):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def plain_console():
    return Console(record=True, width=160, file=io.StringIO(), force_terminal=False)


@pytest.mark.parametrize("width", [80, 120, 150])
def test_screen_shows_what_is_known_and_a_dash_for_what_is_not(tmp_path, width):
    write_run(tmp_path)
    states = {
        "engine": RoleState("engine", "up", restarts=1, started_s=time.time() - 61, detail="killed by SIGKILL"),
        "rollout": RoleState("rollout", "waiting", restarts=2),
    }
    console = Console(record=True, width=width, file=io.StringIO())
    screen = Screen(Progress(tmp_path), steps={"agent": 10}, states=states, console=console)
    console.print(screen.render())
    shown = console.export_text()
    assert "step 4/10" in shown
    assert "0:24 left" in shown  # six steps of 4 s
    assert "58.3 %" in shown  # 60 episodes: 10 and 10 at 0.25, 30 and 10 at 0.75
    assert "40.0 % [33.4, 46.9] of 200" in shown
    assert "31.2, 97 in flight" in shown
    assert "1,403 sampled, 2,000 read by" in shown
    assert "0.50, at most 1" in shown
    assert "2.0e-08" in shown
    assert "no signal in 40.0 % of groups" in shown
    assert "4.0 = wait 2.0 + step 1.5 + save 0.5" in shown
    assert "- groups, engine at version 3" in shown  # the dataflow has written nothing yet
    assert "● up" in shown
    assert "1:01" in shown
    assert "1 restart " in shown
    assert "2 restarts" in shown


@pytest.mark.parametrize("width", [80, 120, 150])
def test_trouble_hides_no_role_and_cuts_no_value(tmp_path, width):
    """On a terminal of 24 lines, where what is last is cut off."""
    writer = write_run(tmp_path, steps=12)
    lost = {"tasks": 206, "episodes": 256, "unfinished": 12}
    writer.write("eval", step=12, success_rate=0.5, low=0.432, high=0.568, **lost)
    for step in range(13, 23):
        writer.write("train", **step_line(step, cut_share=0.5, mismatch_kl=0.3, no_signal_share=1.0, invalid_share=0.9))
    states = {name: RoleState(name, "up") for name in ("engine", "dataflow", "trainer", "rollout")}
    console = Console(record=True, width=width, height=24, file=io.StringIO())
    screen = Screen(Progress(tmp_path), steps={"agent": 40}, states=states, console=console)
    console.print(screen.render())
    shown = console.export_text()
    assert all(any(line.startswith(f"│ {role} ") for line in shown.splitlines()[:22]) for role in states)
    assert "…" not in shown and "nothing" in shown, "the end of the longest value"


def test_an_empty_run_folder_can_be_shown(tmp_path):
    screen = Screen(Progress(tmp_path), steps={"agent": 10}, states={}, console=plain_console())
    assert "step 0/10" in text_of(screen.render())


def test_warm_start_has_the_bar_until_it_is_done(tmp_path):
    (tmp_path / "warm_start").mkdir()
    writer = MetricsWriter(tmp_path / "warm_start")
    states = {"warm_start": RoleState("warm_start", "up")}
    console = plain_console()
    screen = Screen(
        Progress(tmp_path), steps={"agent": 10}, warm_steps={"base": 60, "judge": 40}, states=states, console=console
    )
    for step in range(1, 26):
        writer.write("train", policy="base", step=step, loss=1.5, total_s=0.1)
    screen.refresh()
    screen.refresh()
    assert "warm start 25/100" in text_of(screen.render())
    assert console.export_text().splitlines() == ["warm start 25/100  loss 1.500  0:07 left"]
    later = plain_console()
    Screen(
        Progress(tmp_path), steps={"agent": 10}, warm_steps={"base": 60, "judge": 40}, states=states, console=later
    ).refresh()
    assert later.export_text() == ""  # a resumed run does not tell it again
    states["warm_start"].phase = "done"
    assert "step 0/10" in text_of(screen.render())


def test_without_a_terminal_each_step_is_one_line_told_once(tmp_path):
    write_run(tmp_path, steps=1)  # what a resumed run did before is not told again
    console = plain_console()
    screen = Screen(Progress(tmp_path), steps={"agent": 10}, states={}, console=console)
    writer = MetricsWriter(tmp_path)
    writer.write("train", **step_line(2))
    writer.write("run", role="engine", event="down", text="killed by SIGKILL [out of memory?]")
    screen.refresh()
    writer.write("eval", step=10, version=10, episodes=200, success_rate=0.65, low=0.581, high=0.713)
    drawn = {"asked": 512, "tasks": 42, "episodes": 44, "unfinished": 0}
    writer.write("eval", step=20, success_rate=0.5, low=0.4, high=0.6, **drawn)
    often = drawn | {"episodes": 16 * 44, "samples": 16}  # more episodes than tasks were asked for
    writer.write("eval", step=30, success_rate=0.5, low=0.4, high=0.6, **often)
    lost = {"asked": 64, "tasks": 60, "episodes": 60, "unfinished": 4}
    writer.write("eval", step=40, success_rate=0.5, low=0.4, high=0.6, **lost)
    why = "no reward can be given: KeyError: '[/bold] no\x07 such name'"
    writer.write("eval", step=50, success_rate=0.5, low=0.4, high=0.6, episodes=60, unrewarded=why)
    screen.refresh()
    screen.close()
    lines = console.export_text().splitlines()
    shown = "of 60; no reward can be given: KeyError: '[/bold] no\N{REPLACEMENT CHARACTER} such name'"
    assert lines.pop(6) == f"held out, version 50: success 50.0 % [40.0, 60.0] {shown}"
    assert "without" in text_of(summary(Progress(tmp_path), wall_s=1.0))
    assert len(lines) == 6 and lines[4].endswith("of 42 tasks in 704 episodes, all there are")
    assert lines[5] == "held out, version 40: success 50.0 % [40.0, 60.0] of 60, 4 came to nothing"
    assert lines[3] == "held out, version 20: success 50.0 % [40.0, 60.0] of 42 tasks in 44 episodes, all there are"
    assert lines[0].startswith(
        "step 2/10  success 75.0 %  reward 0.500  invalid -  no signal 40.0 %  staleness 0.50  k3 2.0e-08  4.0 s"
    )
    assert lines[1] == "engine: down killed by SIGKILL [out of memory?]"
    assert lines[2] == "held out, version 10: success 65.0 % [58.1, 71.3] of 200"


def test_a_dumb_terminal_has_the_steps_as_lines(tmp_path):
    out = io.StringIO()
    console = Console(width=100, file=out, force_terminal=True, _environ={"TERM": "dumb"})
    screen = Screen(Progress(tmp_path), steps={"agent": 10}, states={}, console=console)
    MetricsWriter(tmp_path).write("train", **step_line(1))
    screen.refresh()
    screen.close()
    assert out.getvalue().startswith("step 1/10  success 25.0 %")


def test_on_a_terminal_the_screen_redraws_itself(tmp_path):
    write_run(tmp_path)
    out = io.StringIO()
    console = Console(width=100, file=out, force_terminal=True, color_system=None)
    screen = Screen(
        Progress(tmp_path), steps={"agent": 10}, states={"engine": RoleState("engine", "up")}, console=console
    )
    MetricsWriter(tmp_path).write("train", **step_line(5))
    screen.refresh()
    screen.say("engine: restart")
    screen.close()
    drawn = out.getvalue()
    assert "step 4/10" in drawn
    assert "step 5/10" in drawn
    assert "engine: restart" in drawn


def test_refresh_costs_little(tmp_path):
    writer = write_run(tmp_path, steps=300)
    console = Console(width=140, file=io.StringIO(), force_terminal=True)
    states = {name: RoleState(name, "up") for name in ("engine", "dataflow", "trainer", "rollout")}
    screen = Screen(Progress(tmp_path), steps={"agent": 1000}, states=states, console=console)
    started = time.process_time()
    for step in range(301, 321):
        writer.write("train", **step_line(step))
        screen.refresh()
    spent_s = (time.process_time() - started) / 20
    screen.close()
    assert spent_s < 0.03  # at 2.5 a second: 7 % of a core; about 1 % on a quiet machine


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_is_diagnosed_when_it_has_made_a_step_and_not_whenever_it_is_shown(tmp_path, monkeypatch, terminal):
    """A quarter of a second of the supervisor's at each refresh, after 5,000 steps of four policies."""
    seen = []
    monkeypatch.setattr(metrics, "diagnose", lambda lines, batches: seen.append(len(lines)) or diagnose(lines, batches))
    writer = write_run(tmp_path, steps=8)
    console = Console(width=140, file=io.StringIO(), force_terminal=terminal)
    screen = Screen(Progress(tmp_path), steps={"agent": 10}, states={}, console=console)
    for _ in range(5):
        screen.refresh()
    writer.write("train", **step_line(9))
    for _ in range(5):
        screen.refresh()
    MetricsWriter(tmp_path, resume_step=7)  # drops two lines, by another file
    screen.refresh()
    screen.close()
    assert seen == [8, 9, 7]


def test_time_left_is_at_the_pace_of_the_last_steps(tmp_path):
    writer, progress = MetricsWriter(tmp_path), Progress(tmp_path)
    assert progress.remaining_s({"agent": 60}) is None
    writer.write("train", **step_line(1, total_s=500.0))  # compiles
    progress.update()
    assert progress.remaining_s({"agent": 60}) is None
    writer.write("train", **step_line(2, total_s=None))
    for step, total_s in ((3, 4.0), (4, 90.0), (5, 5.0)):  # one was saved to a slow disk
        writer.write("train", **step_line(step, total_s=total_s))
    progress.update()
    assert progress.remaining_s({"agent": 60}) == 55 * 5.0
    for step in range(6, 6 + 3 * RECENT_STEPS):
        writer.write("train", **step_line(step, total_s=9.0))
    for step in range(progress.step + 3 * RECENT_STEPS + 1, progress.step + 5 * RECENT_STEPS + 1):
        writer.write("train", **step_line(step, total_s=2.0))
    progress.update()
    assert progress.remaining_s({"agent": 60}) == 2.0 * (60 - progress.step) > 0, "at that of the last twenty"
    assert progress.remaining_s({"agent": progress.step}) == 0


def test_trainers_that_work_side_by_side(tmp_path):
    """Each takes 4 s for 3,000 tokens: both have the time of one, and together twice its tokens."""
    for name in ("solver", "verifier"):
        for step in range(1, 31 if name == "solver" else 21):
            MetricsWriter(tmp_path).write("train", **step_line(step, policy=name))
    steps, shown = {"solver": 40, "verifier": 60}, {}
    for apart in (False, True):
        progress = Progress(tmp_path, apart=apart)
        progress.update()
        assert progress.remaining_s(steps) == (4.0 * 40 if apart else 4.0 * (10 + 40))
        assert progress.remaining_s({"solver": 30, "judge": 1}) == 4.0 and progress.remaining_s({}) is None
        assert progress.remaining_s({"solver": 30, "verifier": 20, "frozen": 0}) == 0
        rates = dict(figures(progress, {}, {}))["tokens/s"]
        assert rates == f"- sampled, {'4,000' if apart else '2,000'} read by the trainer"
        shown[apart] = text_of(summary(progress, wall_s=120.0))
        assert "4.00 (wait for episodes 2.00, compute 1.50, save 0.50)" in shown[apart]
    assert "750 read by the trainer, 30 of them sampled" in shown[False], "150,000 tokens in 200 s"
    assert "1,250 read by the trainer, 50 of them sampled" in shown[True], "in 120 s"


def test_progress_starts_over_when_the_file_is_replaced(tmp_path):
    write_run(tmp_path, steps=4)
    progress = Progress(tmp_path)
    progress.update()
    assert progress.totals["episodes"] == 60
    time.sleep(0.002)  # a line's time has milliseconds
    MetricsWriter(tmp_path, resume_step=2).write("train", **step_line(3, episodes=20))
    assert [entry["step"] for entry in progress.update()] == [3]  # the others are known already
    assert [entry["step"] for entry in progress.train] == [1, 2, 3]
    assert progress.totals["episodes"] == 60
    assert progress.evals[0]["success_rate"] == 0.4


def test_progress_starts_over_when_the_file_is_replaced_twice(tmp_path):
    """As two trainers do that resume together: a file system may then give the second file the number of the first."""
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write("train", step=step, policy="solver")
        writer.write("train", step=step, policy="verifier")
    progress = Progress(tmp_path)
    progress.update()
    MetricsWriter(tmp_path, resume_step={"solver": 3})
    MetricsWriter(tmp_path, resume_step={"verifier": 4})
    progress.update()
    assert progress.step == 7
    writer.write("train", step=4, policy="solver")
    assert [(entry["policy"], entry["step"]) for entry in progress.update()] == [("solver", 4)]


def test_progress_waits_for_the_rest_of_a_line(tmp_path):
    progress = Progress(tmp_path)
    assert progress.update() == []
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write('{"kind": "train", "st')
        file.flush()
        assert progress.update() == []
        file.write('ep": 1}\n')
        file.flush()
        assert [entry["step"] for entry in progress.update()] == [1]


def test_summary_compares_before_and_after(tmp_path):
    writer = write_run(tmp_path)
    progress = Progress(tmp_path)
    progress.update()
    assert "held-out success after │ - " in " ".join(text_of(summary(progress, wall_s=100)).split()) + " "
    writer.write("eval", step=4, version=4, episodes=200, success_rate=0.65, low=0.581, high=0.713, seconds=8.0)
    progress.update()
    states = {"engine": RoleState("engine", "stopped", restarts=1), "trainer": RoleState("trainer", "done")}
    table = " ".join(text_of(summary(progress, wall_s=3725, states=states)).split())
    for part in (
        str(tmp_path),
        "before │ 40.0 % [33.4, 46.9] of 200",
        "after │ 65.0 % [58.1, 71.3] of 200",
        "+25.0 points",
        "4, 60 trajectories, 240 turns",
        "trajectories/s │ 3.8",  # 60 in four steps of 4 s
        "4.00 (wait for episodes 2.00, compute 1.50, save 0.50)",
        "2.0e-08 mean, 2.0e-08 worst",
        "restarts │ engine 1 │",
        "groups without signal │ 40.0 %",
        "1:02:05",
    ):
        assert part in table, part


def test_values_that_are_not_finite_are_shown_and_counted(tmp_path):
    writer = write_run(tmp_path, steps=2)
    for step in (3, 4):
        writer.write("train", **step_line(step, mismatch_kl=float("nan"), reward_mean=float("inf")))
    progress = Progress(tmp_path)
    progress.update()
    shown = dict(figures(progress, {}, {}))
    assert shown["mismatch k3"].startswith("nan, ") and shown["reward"].startswith("inf, ")
    assert "reward inf " in (line := plain_line(progress.train[-1], progress, {"agent": 4})) and "k3 nan " in line
    table = " ".join(text_of(summary(progress, wall_s=1)).split())
    assert "2.0e-08 worst step, not finite in 2 steps" in table
    writer.write("train", **step_line(5, reward_mean=float("-inf")))
    progress.update()
    assert dict(figures(progress, {}, {}))["reward"].startswith("nan, ")


def test_status_that_is_being_written_is_no_status(tmp_path):
    assert read_status(tmp_path, "rollout") == {}
    (tmp_path / "status-rollout.json").write_text('{"in_fl')
    assert read_status(tmp_path, "rollout") == {}


def test_small_helpers():
    assert clock(None) == "-"
    assert clock(59.9) == "0:59"
    assert clock(-5) == "0:00"
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▄█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([0.0, 1.0, 0.0], 2) == "█▁"
    assert sparkline([], 5) == ""


def test_several_policies_have_a_line_each_and_one_bar(tmp_path):
    writer = MetricsWriter(tmp_path)
    for policy, steps in (("solver", 3), ("verifier", 1)):
        for step in range(1, steps + 1):
            writer.write("train", **step_line(step, policy=policy))
    status = {"policies": {"solver": {"version": 2, "lag": 1, "ready_groups": 5}, "verifier": {"version": 1}}}
    (tmp_path / "status-dataflow.json").write_text(json.dumps(status))
    screen = Screen(Progress(tmp_path), steps={"agent": 8}, states={}, console=Console(file=io.StringIO(), width=160))
    shown = text_of(screen.render())
    assert "step 4/8" in shown
    assert "step 3, 25.0 %, serves 2, lag 1, 5 ready  ▁█▁" in shown
    assert "step 1, 25.0 %, serves 1, lag -, - ready  ▁" in shown
    assert dict(figures(screen.progress, {}, {}))["success"] == "37.5 %", "no curve in which policies take turns"
    assert plain_line({"kind": "train", **step_line(2, policy="solver")}, screen.progress, {"solver": 8}).startswith(
        "solver: step 2 "
    )


def write_invalid(folder, policy, shares, **more):
    writer = MetricsWriter(folder)
    for step, share in enumerate(shares, 1):
        writer.write("train", **step_line(step, policy=policy, invalid_share=share, **more))


@pytest.mark.parametrize(
    ("shares", "warned"),
    [
        ([0.13] * 10 + [0.84] * 10, "invalid replies have risen from 13.0 % (first 10 steps) to 84.0 % (last 10)"),
        ([0.0] * 5 + [0.06] * 5, "from 0.0 % (first 5 steps) to 6.0 % (last 5)"),
        ([0.3] * 10 + [0.44] * 10, ""),  # more than half as many again, it would have to be
        ([0.5] * 10 + [0.7] * 10, "70 % of the replies of the last steps name no legal action"),
        ([0.02, 0.04] * 10, ""),
        ([0.84] * 10 + [0.13] * 10, ""),
        ([0.0] * 4 + [1.0] * 4, ""),  # too few to tell
    ],
)
def test_a_rise_of_invalid_replies_is_said_in_words(tmp_path, shares, warned):
    console = plain_console()
    screen = Screen(Progress(tmp_path), steps={"agent": 40}, states={}, console=console)
    write_invalid(tmp_path, "agent", shares)
    screen.refresh()
    screen.refresh()
    told = [line for line in console.export_text().splitlines() if "warning" in line]
    assert len(told) == bool(warned) and warned in "".join(told)
    assert (warned in text_of(screen.render(), 240)) and (warned in text_of(summary(screen.progress, wall_s=1.0), 240))
    assert bool(diagnose(screen.progress.train)) == bool(warned)


def test_each_policy_is_warned_of_by_its_own_steps_and_turns(tmp_path):
    write_invalid(tmp_path, "solver", [0.1] * 20)
    write_invalid(tmp_path, "verifier", [0.0] * 10 + [0.5] * 10)
    progress = Progress(tmp_path)
    progress.update()
    (warning,) = diagnose(progress.train)
    assert str(warning).startswith("verifier: ")
    MetricsWriter(tmp_path).write("train", **step_line(21, policy="solver", invalid_share=0.7, turns=60 * 9))
    progress.update()
    assert progress.share("invalid_share") == pytest.approx((9 * 0.5 * 60 + 0.7 * 540) / (9 * 60 + 540))
    assert len(diagnose(progress.train)) == 2, "the step with most of the turns counts most"


def text(run: Path, now_s: float) -> str:
    console = Console(width=160, record=True, file=(run / "screen").open("w"))
    console.print(render_status(run, now_s))
    return console.export_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = default_config()
    config.policies = {"solver": {}, "verifier": {"trainer": {"steps": 40}}}
    save_run(config, tmp_path)
    return tmp_path


def test_roles_queues_versions_and_ages_are_shown(run: Path):
    rollout = {
        "time_s": 995.0,
        "in_flight": 12,
        "serving_versions": {"solver": 6, "verifier": 3},
        "bases": {"base": {"up": True}},
    }
    dataflow: dict = {"time_s": 900.0, "leased": 12, "failed": {"env_error": 3}}
    dataflow["workers"] = {
        "node-7": {
            "heard_s_ago": 2.0,
            "serving": {"solver": 6, "verifier": 3},
            "episodes": 41,
            "playing": 3,
            "free_slots": 1,
        }
    }
    dataflow["policies"] = {
        "solver": {
            "committed": 7,
            "ready_groups": 4,
            "dropped_groups": 1,
            "dropped": {"too_old": 1},
            "trained_ages": {"0": 30, "1": 10},
        }
    }
    for role, status in (("rollout", rollout), ("dataflow", dataflow)):
        (run / f"status-{role}.json").write_text(json.dumps(status))
    metrics = MetricsWriter(run)
    metrics.write("train", step=3, policy="verifier", success_rate=0.75, staleness_mean=0.5, staleness_max=1)
    metrics.write(
        "train", step=7, policy="solver", success_rate=0.25, staleness_mean=1.25, staleness_max=2, invalid_share=0.125
    )
    for step in (3, 0):  # the later one ended first
        versions = {"solver": step, "verifier": step}
        metrics.write("eval", step=step, versions=versions, success_rate=0.5 + step / 10, low=0.4, high=0.9)
    lines = text(run, 1000.0).splitlines()
    (solver,) = [line for line in lines if line.startswith("│ solver")]
    assert [cell.strip() for cell in solver.strip("│").split("│")] == [
        "solver", "7/100", "7", "6", "1", "4", "", "1 (1 too old)", "0: 75 %, 1: 25 %", "2", "25.0 %",
        "12.5 %",
    ]  # fmt: skip
    (worker,) = [line for line in lines if "node-7" in line]
    assert "solver@6, verifier@3" in worker and "41" in worker
    assert "1:42 ago" in worker, "2 s before the dataflow was last heard, which was 100 s ago"
    (verifier,) = [line for line in lines if line.startswith("│ verifier")]
    assert "3/40" in verifier and "75.0 %" in verifier
    assert any("rollout" in line and "12 episodes in flight" in line and "engine up" in line for line in lines)
    assert any("dataflow" in line and "(away)" in line and "3 failed (env error)" in line for line in lines)
    before, after = [line for line in lines if "evaluation" in line]
    assert "solver@0, verifier@0" in before and "50.0 %" in before and "solver@3, verifier@3" in after


def test_what_rollouts_elsewhere_serve_is_known_from_the_dataflow(run: Path):
    """The columns "served" and "lag" were empty."""
    policies = {"solver": {"committed": 7, "lag": 2}, "verifier": {"committed": 3, "lag": 4}}
    (run / "status-dataflow.json").write_text(json.dumps({"policies": policies}))
    lines = text(run, 1000.0).splitlines()
    (solver,) = [line for line in lines if line.startswith("│ solver")]
    (verifier,) = [line for line in lines if line.startswith("│ verifier")]
    assert [cell.strip() for cell in solver.split("│")[2:6]] == ["0/100", "7", "5", "2"]
    assert [cell.strip() for cell in verifier.split("│")[2:6]] == ["0/40", "3", "", ""], "none serves it yet"


def test_of_a_run_that_has_ended_nothing_is_away_and_no_speed_is_shown(run: Path):
    rollout = {"time_s": 900.0, "in_flight": 3, "episodes_per_s": 11.9, "failed_episodes": 2}
    rollout |= {"bases": {"base": {"up": True}}}
    dataflow: dict = {"time_s": 901.0, "leased": 5, "waiting": 7}
    worker = {"heard_s_ago": 1.0, "serving": {"solver": 3}, "playing": 4, "free_slots": 4, "episodes": 9}
    dataflow["workers"] = {"node-7": worker}
    pool = {"nodes": 1, "wanted_nodes": 3, "waiting_share": 0.5, "busy_share": 0.9}
    roles = {
        name: {"phase": phase, "restarts": 0, "detail": ""}
        for name, phase in {"dataflow": "stopped", "rollout": "stopped", "trainer": "done"}.items()
    }
    statuses = {"rollout": rollout, "dataflow": dataflow, "pool": pool, "launch": {"roles": roles}}
    for role, status in statuses.items():
        (run / f"status-{role}.json").write_text(json.dumps(status))
    MetricsWriter(run).write("train", step=40, policy="verifier", tokens_per_s=5000.0, wait_s=0.5)
    over = text(run, 8000.0)
    roles |= {name: {"phase": "up", "restarts": 0, "detail": ""} for name in roles}
    write_status(run, "launch", {"roles": roles})
    for shown in (over, text(run, 8000.0)):  # and of one whose launcher was killed
        old = ("away", "engine up", "in flight", "tokens/s", "wait 0.5", "pool", "leased", "4 of 8")
        assert not any(word in shown for word in old)
        assert "│ 2 failed" in shown and "│ step 40" in shown and "│ 1:58:20 ago" in shown and "7 waiting" in shown
    with hold(run):
        shown = text(run, 8000.0)
    assert "5 leased" in shown and "4 of 8" in shown and "(away)" in shown


def test_a_narrow_terminal_has_the_policies_side_by_side(run: Path):
    assert "│ solver   │ 0/100 │" in text_of(render_status(run))
    lines = [" ".join(line.split()) for line in text_of(render_status(run), width=80).splitlines()]
    assert {"┃ policy ┃ solver ┃ verifier ┃", "│ step │ 0/100 │ 0/40 │", "│ ready groups │ │ │"} <= set(lines)


def test_a_run_in_its_warm_start_shows_how_far_it_is(run: Path):
    warm = RoleState("warm_start", "up")
    write_status(run, "launch", {"roles": {"warm_start": asdict(warm)}})
    for step in range(1, 4):
        MetricsWriter(run / "warm_start").write("train", step=step, policy="base", total_s=2.0)
    steps = default_config().warm_start.steps
    with hold(run):
        line = next(line for line in text(run, time.time()).splitlines() if line.startswith("│ warm_start"))
    assert f"step 3/{steps}, {clock(2.0 * (steps - 3))} left" in line


def test_a_role_that_is_down_is_told_with_the_cause_and_its_restarts(run: Path):
    roles = {
        "engine": {"phase": "waiting", "restarts": 1, "detail": "killed by SIGKILL"},
        "dataflow": {"phase": "up", "restarts": 2, "detail": "exit status 1"},
        "trainer-solver": {"phase": "done", "restarts": 0, "detail": ""},
    }
    write_status(run, "launch", {"roles": roles})
    MetricsWriter(run).write("train", step=3, policy="solver", tokens_per_s=7.0)
    with hold(run):
        engine, dataflow, trainer = _states(text(run, 1000.0))
    assert engine == ["engine", "waiting, 1 restart (killed by SIGKILL)", "", ""]
    assert dataflow[:2] == ["dataflow", "up, 2 restarts"]
    assert trainer[:2] == ["trainer-solver", "done"] and "step 3" in trainer[3]
    engine, dataflow, trainer = _states(text(run, 1000.0))  # the launcher has been killed
    assert engine[1] == "gone, 1 restart (nothing supervises this run: go on with --resume)"
    assert dataflow[1].startswith("gone, 2 restarts")
    assert trainer[1] == "done"


def _states(shown: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    return [row for row in rows if row[0].startswith(("engine", "dataflow", "trainer"))]


def test_brackets_in_names_are_no_markup(tmp_path: Path):
    folder = tmp_path / "exp[lr=2]-a"
    save_run(default_config(), folder)
    write_run(folder)
    roles = {"trainer": {"phase": "failed", "restarts": 0, "detail": "no space left on [/data/runs]"}}
    write_status(folder, "launch", {"roles": roles})
    shown = text(folder, 1000.0)
    assert "exp[lr=2]-a" in shown and "failed (no space left on [/data/runs])" in shown
    progress = Progress(folder)
    progress.update()
    assert "exp[lr=2]-a" in text_of(summary(progress, wall_s=1))
    assert "exp[lr=2]-a" in text_of(Screen(progress, steps={"agent": 4}, states={}, console=plain_console()).render())


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config.json cannot be read .* give the folder of a run"):
        render_status(tmp_path)
