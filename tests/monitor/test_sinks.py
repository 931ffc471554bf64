"""Sinks get the lines of a run: TensorBoard for real, the services by stand-ins that have their calls."""

import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from flowjax.config import default_config
from flowjax.launch.checks import check_config
from flowjax.launch.devices import Devices
from flowjax.launch.preflight import examine
from flowjax.monitor.metrics import MetricsWriter, Progress
from flowjax.monitor.sinks import check_sinks, forwarding
from flowjax.monitor.token import keep_run_id
from flowjax.run import resolve


def config_of(*sinks: str, policies: tuple[str, ...] = ()):
    config = default_config()
    config.monitor.sinks = sinks
    config.policies = {name: {} for name in policies}
    return config


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Series in TensorBoard's files."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (generated)

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((folder / "tensorboard").glob("events.*")):
        data, place = path.read_bytes(), 0
        while place < len(data):
            length = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += 12 + length + 4
            if event.HasField("session_log"):  # TensorBoard hides what came before from this step on
                found = {tag: [point for point in points if point[0] < event.step] for tag, points in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, round(value.simple_value, 6)))
    return found


def test_tensorboard_gets_every_line_and_a_resumed_run_sends_what_was_missed(tmp_path):
    writer, config, said = MetricsWriter(tmp_path), config_of("tensorboard"), []
    with forwarding(tmp_path, config, said.append):
        writer.write("train", step=1, loss=0.5, policy="agent", note="text")
        time.sleep(0.1)
        writer.write("eval", step=1, success_rate=0.25)
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5)], "eval/success_rate": [(1, 0.25)]}
    writer.write("train", step=2, loss=0.25, policy="agent")  # while nobody looked
    time.sleep(1.1)
    with forwarding(tmp_path, config, said.append):
        writer.write("train", step=3, loss=0.125, policy="agent")
    assert scalars(tmp_path)["train/loss"] == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert not said


def test_what_comes_late_of_an_early_step_hides_no_later_points(tmp_path):
    def send() -> None:
        with forwarding(tmp_path, config_of("tensorboard", policies=("solver", "verifier")), print):
            pass

    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write("train", step=step, loss=float(step), policy="solver")
    send()
    writer.write("eval", step=2, success_rate=0.25)  # beside training
    writer.write("train", step=1, loss=1.0, policy="verifier")
    send()
    shown = {"train/solver/loss": [(step, float(step)) for step in range(1, 6)], "eval/success_rate": [(2, 0.25)]}
    assert scalars(tmp_path) == {**shown, "train/verifier/loss": [(1, 1.0)]}
    writer = MetricsWriter(tmp_path, resume_step={"solver": 3})  # its trainer goes back
    writer.write("train", step=4, loss=0.5, policy="solver")
    send()
    assert scalars(tmp_path)["train/solver/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]
    assert scalars(tmp_path)["train/verifier/loss"] == [(1, 1.0)]


def test_steps_that_are_taken_again_within_one_launch_take_the_place_of_what_was_shown(tmp_path, monkeypatch):
    """A trainer that is restarted goes back to its newest checkpoint. Another policy's points stay, and evaluations."""
    looks, update = threading.Event(), Progress.update

    def looked(progress: Progress) -> list[dict[str, Any]]:
        looks.set()
        return update(progress)

    def wait() -> None:
        for _ in range(3):  # the first look finds what is written, perhaps reads all anew, and sends it before the last
            looks.clear()
            assert looks.wait(60)

    monkeypatch.setattr("flowjax.monitor.sinks._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(Progress, "update", looked)
    with forwarding(tmp_path, config_of("tensorboard", policies=("solver", "verifier")), print):
        for policy in ("solver", "verifier"):
            for step in range(1, 7):
                MetricsWriter(tmp_path).write("train", step=step, loss=float(step), policy=policy)
        wait()
        writer = MetricsWriter(tmp_path, resume_step={"solver": 3})
        writer.write("train", step=4, loss=104.0, policy="solver")
        wait()
        writer.write("eval", step=2, success_rate=0.25)  # beside training, and late
        writer.write("train", step=5, loss=105.0, policy="solver")
    shown = scalars(tmp_path)
    assert shown["train/solver/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0)]
    assert shown["train/verifier/loss"] == [(step, float(step)) for step in range(1, 7)]
    assert shown["eval/success_rate"] == [(2, 0.25)]
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 2


def test_a_line_that_was_stamped_before_one_that_is_sent_already_is_sent_too(tmp_path, monkeypatch):
    """Several processes write: one may wait for the lock, or the machine's date may be set back."""
    writer = MetricsWriter(tmp_path)
    with forwarding(tmp_path, config_of("tensorboard"), print):
        writer.write("train", step=1, loss=0.5)
        time.sleep(1.5)  # it is sent
        earlier_s = time.time() - 60
        monkeypatch.setattr("flowjax.monitor.metrics.time.time", lambda: earlier_s)
        writer.write("eval", step=1, success_rate=0.25)
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5)], "eval/success_rate": [(1, 0.25)]}


def test_a_run_that_goes_on_where_the_clock_is_behind_sends_every_line(tmp_path, monkeypatch):
    """Its lines were stamped before the newest that was sent, until the clock had caught up."""
    writer, update, looked = MetricsWriter(tmp_path), Progress.update, threading.Event()

    def looks(progress: Progress) -> list[dict[str, Any]]:
        lines = update(progress)
        looked.set()
        return lines

    with forwarding(tmp_path, config_of("tensorboard"), print):
        writer.write("train", step=1, loss=0.5)
    earlier_s = time.time() - 3600
    monkeypatch.setattr("flowjax.monitor.metrics.time.time", lambda: earlier_s)
    monkeypatch.setattr(Progress, "update", looks)
    with forwarding(tmp_path, config_of("tensorboard"), print):
        assert looked.wait(60)
        writer.write("train", step=2, loss=0.25)
    assert sorted(scalars(tmp_path)["train/loss"]) == [(1, 0.5), (2, 0.25)]


def test_series_of_several_policies_are_told_apart(tmp_path):
    writer = MetricsWriter(tmp_path)
    with forwarding(tmp_path, config_of("tensorboard", policies=("solver", "verifier")), print):
        writer.write("train", step=1, loss=0.5, policy="solver")
    assert set(scalars(tmp_path)) == {"train/solver/loss"}


def test_results_by_policy_and_source_are_sent_as_well(tmp_path):
    results = {"success_rate": 0.5, "outcomes": {"turns": 2.5}}
    with forwarding(tmp_path, config_of("tensorboard"), print):
        writer = MetricsWriter(tmp_path)
        writer.write(
            "eval",
            step=4,
            tasks=8,
            versions={"agent": 4},
            policies={"agent": {**results, "reward_mean": 0.75}},
            sources={"gsm8k": 0.25},
            unrewarded="no reward",
        )
        writer.write("train", step=4, policy="agent", parts={"success": 1.0})
    assert scalars(tmp_path) == {
        "eval/tasks": [(4, 8.0)],
        "eval/agent/success_rate": [(4, 0.5)],
        "eval/agent/reward_mean": [(4, 0.75)],
        "eval/agent/outcomes/turns": [(4, 2.5)],
        "eval/sources/gsm8k": [(4, 0.25)],
        "train/parts/success": [(4, 1.0)],
    }


def test_a_curve_that_diverges_goes_on_as_not_finite(tmp_path):
    with forwarding(tmp_path, config_of("tensorboard"), print):
        MetricsWriter(tmp_path).write("train", step=1, loss=math.nan, gradient_norm=math.inf, low=-math.inf, note="")
    shown = scalars(tmp_path)
    assert set(shown) == {"train/loss", "train/gradient_norm", "train/low"}
    assert math.isnan(shown["train/loss"][0][1])
    assert (shown["train/gradient_norm"], shown["train/low"]) == ([(1, math.inf)], [(1, -math.inf)])


class Calls(types.ModuleType):
    """A stand-in for a package: it notes what is called, and may fail or hang."""

    def __init__(self, name: str, fails: bool = False, hangs: bool = False):
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict[str, Any]]] = []
        self.fails, self.hangs = fails, hangs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> "Calls":
            self.calls.append((name, args, kwargs))
            if self.fails and name == "log":
                raise ConnectionError("the service is away")
            if self.hangs:
                threading.Event().wait(20)
            return self

        return call


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_calls_that_it_knows(tmp_path, monkeypatch, name):
    monkeypatch.setenv("WANDB_API_KEY", "c0ffee")
    package = Calls(name)
    monkeypatch.setitem(sys.modules, name, package)
    run = tmp_path / "sokoban-nano"
    keep_run_id(run, "c0ffee")
    with forwarding(run, config_of(name), print):
        MetricsWriter(run).write("train", step=7, loss=0.5)
    begun, *rest, ended = package.calls
    assert begun[0] == "init" and ended[0] == "finish"
    assert (begun[2]["project"], begun[2]["resume"]) == ("flowjax", "allow")
    # Another run of that name, on another machine or after this one was deleted, is not gone on with.
    assert begun[2]["id" if name == "wandb" else "name"] == "sokoban-nano-c0ffee"
    assert begun[2]["config"]["monitor"]["sinks"] == (name,)
    (logged,) = [call for call in rest if call[0] == "log"]
    expected = ({"train/loss": 0.5, "step": 7}, {}) if name == "wandb" else ({"train/loss": 0.5}, {"step": 7})
    assert (logged[1][0], logged[2]) == expected


def test_a_line_of_a_slow_clock_that_nobody_sent_is_sent_when_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", package := Calls("trackio"))
    writer, earlier_s = MetricsWriter(tmp_path), time.time() - 60
    with forwarding(tmp_path, config_of("trackio"), print):
        writer.write("train", step=1, loss=0.5)
    with monkeypatch.context() as slow:
        slow.setattr("flowjax.monitor.metrics.time.time", lambda: earlier_s)
        writer.write("eval", step=1, success_rate=0.25)  # while nobody looks
    for step in (2, 3):
        with forwarding(tmp_path, config_of("trackio"), print):
            writer.write("train", step=step, loss=0.25)
    logged = [(*call[1][0], call[2]["step"]) for call in package.calls if call[0] == "log"]
    assert logged == [("train/loss", 1), ("eval/success_rate", 1), ("train/loss", 2), ("train/loss", 3)]


def test_a_service_that_fails_is_told_of_once_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "c0ffee")
    monkeypatch.setitem(sys.modules, "wandb", Calls("wandb", fails=True))
    writer, said = MetricsWriter(tmp_path), []
    with forwarding(tmp_path, config_of("wandb", "tensorboard"), said.append):
        writer.write("train", step=1, loss=0.5)
        time.sleep(1.5)
        writer.write("train", step=2, loss=0.5)
    assert said == ["wandb gets no more metrics: ConnectionError: the service is away"]
    assert len(scalars(tmp_path)["train/loss"]) == 2


def test_a_service_that_hangs_holds_the_end_up_for_a_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", Calls("trackio", hangs=True))
    monkeypatch.setattr("flowjax.monitor.sinks._LAST_S", 0.5)
    started_s = time.monotonic()
    with forwarding(tmp_path, config_of("trackio"), print):
        MetricsWriter(tmp_path).write("train", step=1, loss=0.5)
    assert time.monotonic() - started_s < 5


def test_a_package_that_is_missing_is_refused_with_the_command_and_an_unknown_name_by_its_field(monkeypatch):
    found = check_sinks(config_of("wandb", "tensorboard"))
    assert found == [
        "config.monitor.sinks has 'wandb', but wandb is not installed here: pip install wandb, or leave it out"
    ]
    problems = check_config(config_of("mlflow"))
    assert any("config.monitor.sinks" in problem and "'mlflow'" in problem for problem in problems)


@pytest.fixture
def logged_out(tmp_path, monkeypatch) -> Path:
    """A home without wandb's files, in which the package is found."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    return tmp_path


def test_wandb_without_a_login_is_refused_and_never_asks(logged_out, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", package := Calls("wandb"))
    problem = "nobody is logged in to api.wandb.ai here: run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
    assert check_sinks(config_of("wandb")) == [f"config.monitor.sinks has 'wandb', but {problem}"]
    assert check_sinks(config_of("trackio")) == []
    said = []
    with forwarding(logged_out, config_of("wandb"), said.append):
        MetricsWriter(logged_out).write("train", step=1, loss=0.5)
    assert said == [f"wandb gets no more metrics: PermissionError: {problem}"] and not package.calls


@pytest.mark.parametrize(
    ("variables", "files"),
    [
        ({"WANDB_API_KEY": "c0ffee"}, {}),
        ({"WANDB_MODE": "offline"}, {}),
        ({"WANDB_MODE": "disabled"}, {}),
        ({"WANDB_IDENTITY_TOKEN_FILE": "token"}, {}),
        ({}, {".netrc": "machine api.wandb.ai login user password c0ffee"}),
        ({"NETRC": "mine"}, {"mine": "machine api.wandb.ai login user password c0ffee"}),
        ({"WANDB_BASE_URL": "http://own:8080"}, {".netrc": "machine own:8080 login user password c0ffee"}),
        (
            {},
            {
                ".config/wandb/settings": "[default]\nbase_url = http://own:8080",
                ".netrc": "machine own:8080 login user password c0ffee",
            },
        ),
        ({}, {"wandb/settings": "[default]\nmode = offline"}),
    ],
)
def test_wandb_is_taken_where_it_needs_not_ask(logged_out, monkeypatch, variables, files):
    for name, text in files.items():
        (logged_out / name).parent.mkdir(parents=True, exist_ok=True)
        (logged_out / name).write_text(text)
        (logged_out / name).chmod(0o600)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert check_sinks(config_of("wandb")) == []


def test_a_user_without_a_home_is_not_logged_in(logged_out, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a container's user, who has no entry
    assert "nobody is logged in to api.wandb.ai" in check_sinks(config_of("wandb"))[0]
    (logged_out / "wandb").mkdir()
    (logged_out / "wandb" / "settings").write_text("[default]\nmode = offline")
    assert check_sinks(config_of("wandb")) == []


@pytest.mark.parametrize("text", ["machine other login user password c0ffee", "no netrc"])
def test_a_login_elsewhere_is_none(logged_out, text):
    (logged_out / ".netrc").write_text(text)
    (logged_out / ".netrc").chmod(0o600)
    assert "nobody is logged in to api.wandb.ai" in check_sinks(config_of("wandb"))[0]


def test_an_evaluation_sends_nothing_and_asks_for_no_sink(logged_out, monkeypatch):
    monkeypatch.setattr("flowjax.launch.preflight._start_probe", lambda *_: None)
    monkeypatch.setattr("flowjax.launch.preflight._finish_probe", lambda _: ([], [], {}))
    config = config_of("wandb")

    def said() -> bool:
        return any("nobody is logged in" in text for text in examine(resolve(config, logged_out), Devices()).here)

    assert said()
    config.eval.versions = (1,)
    assert not said()


def test_nothing_is_imported_that_is_not_named():
    code = "import sys, flowjax.launch.__main__; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, timeout=120)
    assert not {"tensorboardX", "wandb", "trackio"} & set(json.loads(done.stdout)), done.stderr
