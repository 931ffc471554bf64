"""Executors that are engines of the run: found at whatever ports they have, all replicas, and waited for."""

import runpy
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from test_outage import endpoint, task

from flowjax.canvas.backends import Completion, Request
from flowjax.canvas.values import Usage
from flowjax.envs import ENGINES_VARIABLE, RUN_VARIABLE, EnvDied, WorldError
from flowjax.envs.canvas import Canvas
from flowjax.envs.canvas.env import CanvasEnv
from flowjax.launch.checks import check_config
from flowjax.launch.probe import inspect_run
from flowjax.launch.roles import choose_ports, publish_endpoints
from flowjax.rollout.__main__ import _engine_urls, tell_environments
from flowjax.run import resolve
from tests.canvas.chat_server import chat, refusal

RECIPES = Path(__file__).parents[2] / "configs" / "canvas.py"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ConfigDict:
    monkeypatch.setenv(RUN_VARIABLE, "")
    monkeypatch.setenv(ENGINES_VARIABLE, "")
    config = runpy.run_path(str(RECIPES))["get_config"]("qwen3_8b")
    config.env.options.path = ""  # exercises, which are always there
    return config


class Closing:
    """A backend that knows whether it was closed."""

    identity = "closing"
    closed = 0

    async def complete(self, request: Request) -> Completion:
        return Completion("Answer: 5", Usage())

    async def close(self) -> None:
        Closing.closed += 1


def test_a_backend_of_ones_own_is_closed_as_its_process_ends(monkeypatch: pytest.MonkeyPatch):
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    Canvas(backends={"mine": {"kind": f"{__name__}:Closing"}}, default_backend="mine").env()
    for leave in at_exit:
        leave()
    assert Closing.closed == 1


def consecutive_ports(count: int) -> int:
    """The first of so many free ports."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for number in range(port + 1, port + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except (OSError, OverflowError):
                continue
            return port


def start(config: ConfigDict, folder: Path) -> CanvasEnv:
    """An environment of the run, as the rollout service has it."""
    assert check_config(config) == []
    run = resolve(config, folder)
    publish_endpoints(run, choose_ports(run))
    tell_environments(folder, _engine_urls(run))
    env = Canvas(**config.env.options.to_dict()).env()
    env.reset(task(), 0)
    return env


def test_all_replicas_are_asked_at_the_port_that_the_command_line_gives(config: ConfigDict, tmp_path: Path):
    config.engine.port, config.engine.replicas = consecutive_ports(4), 4
    with ExitStack() as open_servers:
        ports = range(config.engine.port, config.engine.port + 4)
        servers = [open_servers.enter_context(endpoint(port=port)) for port in ports]
        env = start(config, tmp_path)
        step = env.step("add [" + ", ".join(f'Custom{{"{number}"}}' for number in range(8)) + "]")
        assert step.valid and step.outcome["executor_calls"] == 8
        assert [len(server.bodies) for server in servers] == [2, 2, 2, 2]
        assert {body["model"] for server in servers for body in server.bodies} == {"base"}


def test_a_backend_may_name_a_base_that_speaks_for_nobody(config: ConfigDict, tmp_path: Path):
    config.bases = ConfigDict(
        {"executor": {"model": {"path": "models/other"}, "engine": {"port": consecutive_ports(1)}}}
    )
    config.env.options.backends.executor.base = "executor"
    with endpoint(port=config.bases.executor.engine.port) as server:
        assert start(config, tmp_path).step("add Custom").outcome["executor_calls"] == 1
        assert server.bodies[0]["model"] == "executor"


def test_a_request_waits_for_an_engine_that_restarts(config: ConfigDict, tmp_path: Path):
    config.engine.port, config.env.options.step_s = consecutive_ports(1), 60.0
    env = start(config, tmp_path)
    outcomes = []
    episode = threading.Thread(target=lambda: outcomes.append(env.step("add Custom").outcome))
    episode.start()
    time.sleep(1.0)  # nobody listens yet
    assert episode.is_alive() and not outcomes
    with endpoint(lambda body: chat("Answer: 5"), port=config.engine.port):
        episode.join(120)
    assert outcomes and outcomes[0]["success"] == 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chance_differs_between_requests_and_not_between_runs(config: ConfigDict, tmp_path: Path, temperature: float):
    config.engine.port, config.env.options.temperature = consecutive_ports(1), temperature
    seeds = []
    for folder in ("one", "other"):
        with endpoint(lambda body: chat("Answer: 5"), port=config.engine.port) as server:
            (tmp_path / folder).mkdir()
            assert start(config, tmp_path / folder).step("add Custom -> AnswerGenerate").valid
            seeds.append([body["seed"] for body in server.bodies])
    assert seeds[0] == seeds[1] and len(seeds[0]) == 2
    assert len(set(seeds[0])) == (2 if temperature else 1), "without chance there is nothing to tell apart"


def test_outside_a_run_there_is_no_engine_to_ask(config: ConfigDict):
    config.env.options.step_s = 1.0
    env = Canvas(**config.env.options.to_dict()).env()
    env.reset(task(), 0)
    with pytest.raises(EnvDied) as died:
        env.step("add Custom")
    assert died.value.status == "executor_error"


@pytest.mark.parametrize("option", ["base_url", "model"])
def test_address_and_model_are_the_runs(config: ConfigDict, option: str):
    config.env.options.backends.executor[option] = "http://127.0.0.1:1/v1"
    with pytest.raises(WorldError, match=rf"backends\.executor\.{option}: a backend of kind run has address and model"):
        Canvas(**config.env.options.to_dict()).env()


def checked(config: ConfigDict) -> tuple[list[str], list[str]]:
    """Problems, and what is not ready on this machine, as launch and `--dry_run` say them."""
    found = inspect_run(resolve(config), 4, None)
    return found["problems"], found["here"]


def test_an_engine_too_short_for_what_it_is_asked_is_refused(config: ConfigDict):
    assert checked(config)[0] == []
    config.bases = ConfigDict({"small": {"model": {"path": "models/other"}, "engine": {"max_model_tokens": 4096}}})
    config.env.options.backends.executor.base = "small"
    problems, _ = checked(config)
    assert len(problems) == 1 and "config.bases.small.engine.max_model_tokens is 4096" in problems[0]
    assert "lower max_new_tokens and retry_new_tokens" in problems[0]


def test_a_base_without_a_chat_template_is_named(config: ConfigDict, tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config.bases = ConfigDict({"small": {"model": {"path": str(tmp_path)}, "engine": {"max_model_tokens": 16384}}})
    config.env.options.backends.executor.base = "small"
    problems, here = checked(config)
    assert problems == [] and "config.bases.small.model.path" in here[0] and "no chat template" in here[0]


def test_a_nano_base_that_is_taught_to_be_a_policy_is_no_executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    config = runpy.run_path(str(RECIPES))["get_config"]("nano_llm")
    assert checked(config)[0] == []
    config.env.options.backends.executor.base = "base"
    config.bases, config.env.options.max_new_tokens = ConfigDict(), 64
    (problem,) = checked(config)[0]
    assert "the base model 'base' asked by operators" in problem and "name one of config.bases" in problem


def test_a_nano_executor_is_made_for_generated_exercises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    row = '{"problem": "What is it?", "answer": "1", "problem_type": "math"}\n'
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(row.replace("it", name))
    config = runpy.run_path(str(RECIPES))["get_config"]("nano_llm")
    config.env.options.path = str(tmp_path)
    problems, _ = checked(config)
    assert [problem for problem in problems if "taught on generated exercises" in problem], problems


def verdict(body: dict[str, Any]) -> Any:
    return chat('{"feedback": "right", "passed": true}' if "response_format" in body else "ready")


def test_endpoints_are_asked_before_anything_starts(config: ConfigDict, monkeypatch: pytest.MonkeyPatch):
    def refuses_schemas(body: dict[str, Any]) -> Any:
        return refusal(400, "response_format is unknown") if "response_format" in body else chat("ready")

    def backend(url: str, **options: Any) -> dict[str, Any]:
        return {"kind": "openai", "base_url": url, "model": "m", "retries": 0, **options}

    with endpoint(verdict) as good, endpoint(refuses_schemas) as plain, endpoint(lambda body: refusal(401)) as locked:
        config.env.options.backends = ConfigDict({"good": backend(good.url)})
        assert checked(config) == ([], [])
        assert len(good.bodies) == 2, "one short question, one by a schema"
        config.env.options.backends = ConfigDict(
            {"good": backend(good.url), "plain": backend(plain.url), "locked": backend(locked.url)}
        )
        problems, (here,) = checked(config)
        assert problems == [] and "backend good" not in here
        assert "backend plain no reply by a JSON schema" in here and "structured=False" in here
        assert "backend locked no answer" in here and "HTTP 401" in here
        config.env.options.backends = ConfigDict({"plain": backend(plain.url, structured=False)})
        assert checked(config) == ([], [])
        config.env.options.backends = ConfigDict({"paid": backend(good.url, api_key_env="CANVAS_TEST_KEY")})
        monkeypatch.delenv("CANVAS_TEST_KEY", raising=False)
        assert "CANVAS_TEST_KEY, which is not set" in checked(config)[0][0]


def test_backends_of_ones_own_are_asked_before_anything_starts(config: ConfigDict):
    simulated, own = {"kind": "flowjax.envs.canvas.offline:SimulatedSolver"}, "tests.canvas.test_doctor"
    config.env.options.backends = ConfigDict({"simulated": simulated, "own": {"kind": f"{own}:Ready"}})
    config.env.options.default_backend = "own"
    assert checked(config) == ([], [])
    config.env.options.backends.own = ConfigDict({"kind": f"{own}:Away"})
    problems, (here,) = checked(config)
    assert problems == [] and "simulated" not in here
    assert "config.env.options backends: backend own no answer: BackendUnavailable: connection refused" in here


def test_five_deaths_of_the_engine_are_seen_by_no_episode(config: ConfigDict, tmp_path: Path):
    """Every outcome is what it is on an engine that never dies, and no episode is lost."""
    config.engine.port, config.env.options.step_s = consecutive_ports(1), 60.0
    config.env.options.backends.executor.last_retry_s = 0.2
    edits = ("add [Custom, AnswerGenerate, Custom] -> ScEnsemble", "add Verify ? done : Revise", "finish")
    outcomes: dict[int, dict[str, float]] = {}
    done = threading.Event()

    def play() -> None:
        for number in range(12):
            config.env.options.executor_seed = number  # no reply is kept from another episode
            env = start(config, tmp_path)
            steps = [env.step(edit) for edit in edits]
            outcome = steps[-1].outcome
            outcomes[number] = {name: value for name, value in outcome.items() if name != "executor_seconds"}
        done.set()

    def answer(body: dict[str, Any]) -> Any:
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {}).get("properties", {})
        return chat('{"feedback": "right", "passed": true}' if "passed" in schema else "Answer: 5")

    episodes, deaths = threading.Thread(target=play), 0
    episodes.start()
    while not done.is_set() and episodes.is_alive():
        with endpoint(answer, port=config.engine.port) as server:
            while deaths < 5 and len(server.bodies) < 4 and not done.is_set():
                time.sleep(0.01)
            if deaths >= 5:
                done.wait(60)
        deaths += 1
    episodes.join(60)
    assert deaths >= 6 and len(outcomes) == 12
    assert all(outcome == outcomes[0] for outcome in outcomes.values()), "whatever died in between"
    assert outcomes[0]["success"] == 1.0 and outcomes[0]["finished"] == 1.0
