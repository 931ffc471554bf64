"""A node that joins a run: it has nothing of the run's folder, plays, dies, and another one goes on."""

import asyncio
import contextlib
import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from light_node import Node, started, wait_for
from light_run import LightRun
from ml_collections import ConfigDict
from rich.console import Console

from flowjax.config import ConfigError
from flowjax.launch import join
from flowjax.launch.__main__ import LaunchRequest, _run, main, read_request
from flowjax.launch.devices import share_out
from flowjax.launch.session import RunConsole
from flowjax.launch.supervisor import RoleFailed
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.token import VARIABLE, bearer, keep_run_id, known_run_id, known_token
from flowjax.records import pack
from flowjax.run import read_endpoints, resolve, write_endpoints
from tests.nats_server import nats_server


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_nodes_play_a_run_whose_own_machine_plays_nothing(tmp_path):
    options: dict[str, Any] = {"trainer__steps": 24, "dataflow__lease_s": 12.0, "elsewhere": ("rollout",)}
    options["dataflow__host"] = "0.0.0.0"  # so that keys are asked for
    with LightRun(tmp_path, **options) as light, started() as all_of:
        run = light.launch()
        all_of.append(run)
        wait_for(lambda: (light.run_dir / "endpoints.json").exists() or run.poll() is not None, light.logs)
        assert run.poll() is None, light.logs()
        url = read_endpoints(light.run_dir)["dataflow"]

        def answers() -> bool:
            try:
                return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
            except OSError:
                assert run.poll() is None, light.logs()
                return False

        wait_for(answers, light.logs)
        first = Node(light, url, "first")
        all_of.append(first.process)
        wait_for(lambda: first.episodes > 8 or first.process.poll() is not None, first.logs)
        assert (first.folder / "model" / "config.json").exists(), "the base model came over the network"
        asking = urllib.request.Request(f"{url}/status", headers=bearer(known_token(light.run_dir)))
        with urllib.request.urlopen(asking, timeout=5) as answer:
            ((name, worker),) = json.load(answer)["workers"].items()
        assert name.startswith("first:")
        assert worker["serving"].keys() == {"agent"} and worker["episodes"] > 0
        first.process.send_signal(signal.SIGKILL)  # its guards end the roles
        unwanted = Node(light, url, "unwanted")
        all_of.append(unwanted.process)
        wait_for(lambda: unwanted.worker or unwanted.process.poll() is not None, unwanted.logs)
        # Before it has played the run to its end.
        assert main([f"--status={light.run_dir}", "--evict=unwanted"]) == 0
        assert unwanted.process.wait(timeout=120) == 1, unwanted.logs()
        assert unwanted.output.read_text().splitlines()[-1].startswith("the run has sent this node away (--evict)")
        second = Node(light, url, "second")
        all_of.append(second.process)
        wait_for(lambda: run.poll() is not None, lambda: light.logs() + second.logs(), 600.0)
        assert run.returncode == 0, light.logs() + second.logs()
        assert second.process.wait(timeout=120) == 0, second.logs()
        assert "the run has ended" in second.output.read_text()
        train = [line["step"] for line in read_metrics(light.run_dir) if line["kind"] == "train"]
        assert train == list(range(1, 25)), "every version once"


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_node_plays_a_run_that_neither_side_can_reach_by_a_nats_server(tmp_path, capsys):
    """The dataflow listens on loopback and asks for keys all the same. The server is killed on the way, and a node."""
    options: dict[str, Any] = {"trainer__steps": 24, "dataflow__lease_s": 12.0, "elsewhere": ("rollout",)}
    with nats_server() as nats, LightRun(tmp_path, dataflow__relay=nats.url, **options) as light, started() as all_of:
        run = light.launch()
        all_of.append(run)
        wait_for(lambda: "nodes join by --join=" in light.logs() or run.poll() is not None, light.logs)
        assert run.poll() is None, light.logs()
        assert main([f"--status={light.run_dir}", "--invite=berlin"]) == 0
        key, *command = capsys.readouterr().out.split()
        url = command[-1].removeprefix("--join=")
        assert key.startswith("FLOWJAX_TOKEN=berlin:") and command[:-1] == ["python", "-m", "flowjax.launch"]
        assert url == f"{nats.url}/{known_run_id(light.run_dir)}"
        first = Node(light, url, "first")
        all_of.append(first.process)
        wait_for(lambda: first.episodes > 8 or first.process.poll() is not None, first.logs)
        assert (first.folder / "model" / "config.json").exists(), "the base model came that way, too"
        endpoints = read_endpoints(first.folder / "runs" / "node")
        assert endpoints["dataflow"] != read_endpoints(light.run_dir)["dataflow"]
        nats.kill()
        nats.start()
        before = first.episodes
        wait_for(lambda: first.episodes > before + 8 or run.poll() is not None, first.logs)
        first.process.send_signal(signal.SIGKILL)  # its guards end the roles
        second = Node(light, url, "second")
        all_of.append(second.process)
        wait_for(lambda: run.poll() is not None, lambda: light.logs() + second.logs(), 500.0)
        assert run.returncode == 0, light.logs() + second.logs()
        assert second.process.wait(timeout=120) == 0, second.logs()
        assert "the run has ended" in second.output.read_text()
        train = [line["step"] for line in read_metrics(light.run_dir) if line["kind"] == "train"]
        assert train == list(range(1, 25)), "every version once"


def test_joining_nothing_says_so():
    with pytest.raises(ConfigError, match=r"--join=http://127\.0\.0\.1:9: no dataflow answers there"):
        join.config_of_run("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"--join=nats://127\.0\.0\.1:9/0f: no NATS server lets this machine in"):
        join.config_of_run("nats://127.0.0.1:9/0f")
    with pytest.raises(ConfigError, match=r"--join is 'nats://127\.0\.0\.1:9': give an address such as"):
        join.config_of_run("nats://127.0.0.1:9")
    with (
        nats_server() as nats,
        pytest.raises(ConfigError, match=r"/0f: no dataflow answers.*give what --invite printed"),
    ):
        join.config_of_run(f"{nats.url}/0f")


def described(monkeypatch: pytest.MonkeyPatch, config: ConfigDict) -> list[str]:
    """Have a run of that config answer `/run`. Returns the keys that it is shown."""
    shown = []

    class Origin:
        async def ask(self, path):
            return {"name": "run", "config": json.dumps(config.to_dict())}

    @contextlib.asynccontextmanager
    async def answers(url, token):
        shown.append(token)
        yield Origin()

    monkeypatch.setattr(join, "source", answers)
    return shown


def test_an_address_may_end_with_a_slash(config, monkeypatch):
    """The node asked for //finished, which is not there, and ended after two leases."""
    described(monkeypatch, config)
    assert join.config_of_run("http://far:8400/").dataflow.url == "http://far:8400"


def test_a_key_may_have_come_with_the_newline_of_a_file(config, monkeypatch):
    """It was said that the run's config is not understood."""
    monkeypatch.setenv(VARIABLE, "berlin:key\n")
    shown = described(monkeypatch, config)
    join.config_of_run("http://far:8000")
    assert shown == ["berlin:key"]


def test_a_node_needs_no_sink_of_its_run(config, tmp_path, monkeypatch):
    """Where their packages were missing, the node was refused."""
    config.monitor.sinks = ("tensorboard", "wandb", "trackio")
    described(monkeypatch, config)
    monkeypatch.chdir(tmp_path)
    assert read_request(["--join=http://far:8000", "--name=node"]).run.config.monitor.sinks == ()


def test_a_node_differs_in_its_hardware_alone(config, tmp_path, monkeypatch):
    monkeypatch.setattr(join, "config_of_run", lambda url: config.copy_and_resolve_references())
    monkeypatch.chdir(tmp_path)
    config.elsewhere, config.dataflow.url = ("dataflow", "trainer"), "http://far:8000"
    argv = ["--join=http://far:8000", "--name=node", "--config.engine.max_concurrent_sequences=7"]
    request = read_request(argv)
    assert request.run.is_node and request.run.config.engine.max_concurrent_sequences == 7
    assert request.run.folder == Path(config.runs) / "node"
    with pytest.raises(ConfigError, match=r"config\.rollout\.temperature is 0\.5, but the run has 1\.0: a node may"):
        read_request([*argv, "--config.rollout.temperature=0.5"])
    with pytest.raises(ConfigError, match=r"config\.env\.options\.path is .*name and runs only; have the world's data"):
        read_request([*argv, "--config.env.options.path=here"])


def test_the_plan_of_a_node_has_its_models_fetched_from_the_run(config, tmp_path, monkeypatch, capsys):
    """It said that config.model.path does not exist, though a join would have fetched it."""
    shape = config.model.nano
    for nano, path in ((None, "a/model"), (None, str(tmp_path / "far")), (shape, str(tmp_path / "nano"))):
        with config.ignore_type():
            config.model.path, config.model.nano = path, nano
        described(monkeypatch, config)
        monkeypatch.chdir(tmp_path)
        assert main(["--join=http://far:8000", "--name=node", "--dry_run"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"first: {path} is fetched from the run" in shown
        assert "Hugging Face" not in shown and "warm start" not in shown


def test_a_node_may_place_the_models_of_its_bases_and_nothing_else_of_them(config):
    config.bases = {"judge": {"model": {"path": "a"}}}
    for change in ({"model": {"path": "b"}}, {"model": {"path": "a"}, "engine": {"replicas": 2}}):
        changed = config.copy_and_resolve_references()
        changed.bases = {"judge": change}
        join.check_difference(config, changed)
    changed = config.copy_and_resolve_references()
    changed.bases = {"judge": {"model": {"path": "a", "dtype": "float32"}}}
    with pytest.raises(ConfigError, match=r"config\.bases\.judge\.model\.dtype is 'float32', but the run has None"):
        join.check_difference(config, changed)


def test_a_node_ends_when_its_run_has_been_away_for_two_leases(config, tmp_path):
    config.dataflow.update({"url": "http://127.0.0.1:9", "lease_s": 1.0})
    run = resolve(config, tmp_path)
    write_endpoints(tmp_path, {"dataflow": "http://127.0.0.1:9"})
    with pytest.raises(RoleFailed, match=r"the run at http://127\.0\.0\.1:9 has not answered for 2 s"):
        asyncio.run(join.until_done(run, Console()))


def test_a_node_that_was_stopped_for_two_leases_is_still_of_its_run(config, tmp_path, monkeypatch):
    """It took its own sleep, as with Ctrl-Z or a machine that is paused, for silence of the run."""
    clock_s = 0.0
    monkeypatch.setattr(join, "time", Mock(monotonic=lambda: clock_s))
    monkeypatch.setattr(join, "_LOOK_EVERY_S", 0.01)

    async def finished(request):
        nonlocal clock_s
        if clock_s:
            return web.json_response({"finished": True})
        clock_s += 3600.0
        return web.json_response({}, status=500)

    async def scenario():
        app = web.Application()
        app.router.add_get("/finished", finished)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            config.dataflow.update({"url": url, "lease_s": 1.0})
            write_endpoints(tmp_path, {"dataflow": url})
            await join.until_done(resolve(config, tmp_path), Console())

    asyncio.run(scenario())


def test_a_folder_of_another_run_is_not_used_for_this_one(config, tmp_path, monkeypatch):
    class Origin:
        async def ask(self, path):
            return {"id": "this run"}

    @contextlib.asynccontextmanager
    async def answers(url, token):
        yield Origin()

    monkeypatch.setattr(join, "source", answers)
    monkeypatch.setattr(join, "fetch_bases", AsyncMock())
    config.dataflow.url = "http://far:8000"
    run = resolve(config, tmp_path / "node")
    join.fetch(run)
    join.fetch(run)
    keep_run_id(run.folder, "another run")
    with pytest.raises(ConfigError, match=r"node is a node's of another run than http://far:8000: give another --name"):
        join.fetch(run)


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (401, "show the run's token", r"http://.* refuses this node: it wants another key: set FLOWJAX_TOKEN"),
        (
            403,
            "node berlin was sent away from the run (--evict)",
            r"the run has sent this node away \(--evict\): others",
        ),
        (403, None, r"http://.* refuses this node: it has sent this node away"),
        (410, "another run plays here now", r"http://.* refuses this node: another run plays there now"),
    ],
)
def test_a_node_that_is_refused_ends_at_once_and_says_why(config, tmp_path, status, said, reason):
    """It waited for two leases, and then said that the run had not answered."""
    body = b"of a proxy" if said is None else pack({"error": f"/finished: {said}"})
    refuses = AsyncMock(side_effect=lambda request: web.Response(status=status, body=body))

    async def scenario():
        app = web.Application()
        app.router.add_get("/finished", refuses)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            config.dataflow.update({"url": url, "lease_s": 300.0})
            write_endpoints(tmp_path, {"dataflow": url})
            with pytest.raises(join.NodeRefused) as refused:
                await join.until_done(resolve(config, tmp_path), Console())
            assert re.match(reason, refused.value.report())

    asyncio.run(scenario())
    assert refuses.await_count == 1


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (
            "rollout: this worker was sent away from the run (--evict)\n",
            "the run has sent this node away (--evict): others",
        ),
        (
            "rollout: /lease: another run plays here now: join it anew\n",
            "http://far:8000 refuses this node: another run",
        ),
        (
            "rollout: engines have moved\n",
            "stopped after 0:07; go on with: python -m flowjax.launch --join=http://far:8000",
        ),
        (None, "stopped after 0:07; go on with: python -m flowjax.launch --join=http://far:8000"),
    ],
)
def test_a_node_goes_on_only_with_a_run_that_lets_it(config, tmp_path, log, last):
    config.dataflow.url = "http://far:8000"
    if log is not None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rollout.log").write_text(f"playing\n{log}")
    assert join.last_line(resolve(config, tmp_path), "stopped after 0:07").startswith(last)


def test_a_refused_node_is_not_told_to_go_on(config, tmp_path, monkeypatch, capsys):
    config.update({"elsewhere": ("dataflow", "trainer")})
    config.dataflow.url = "http://far:8000"

    async def refused(self, *_, **__):
        self.failure = join.NodeRefused("mirror", 1, tmp_path / "mirror.log", "http://far:8000 refuses this node: why")
        return 1

    monkeypatch.setattr("flowjax.launch.__main__.RunSession.run", refused)
    request = LaunchRequest(resolve(config, tmp_path), False, False, share_out((), 0))
    assert _run(request, RunConsole()) == 1
    assert "go on with" not in capsys.readouterr().out


def test_a_node_whose_output_fails_still_ends_with_its_run(config, tmp_path):
    async def scenario():
        app = web.Application()
        app.router.add_get("/finished", AsyncMock(side_effect=lambda request: web.json_response({"finished": True})))
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            config.dataflow.update({"url": url, "lease_s": 1.0})
            write_endpoints(tmp_path, {"dataflow": url})
            await join.until_done(resolve(config, tmp_path), Mock(print=Mock(side_effect=OSError("a full disk"))))

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [{}, {"id": 7}, [], "text"])
def test_an_answer_that_lacks_what_is_needed_is_said_in_a_line(config, tmp_path, monkeypatch, answer):
    """It was a stack trace."""

    class Origin:
        async def ask(self, path):
            return answer

    @contextlib.asynccontextmanager
    async def answers(url, token):
        yield Origin()

    monkeypatch.setattr(join, "source", answers)
    with pytest.raises(ConfigError, match=r"--join=http://far:8000: its answer to /run has no name, config"):
        join.config_of_run("http://far:8000")
    config.dataflow.url = "http://far:8000"
    with pytest.raises(ConfigError, match=r"http://far:8000 cannot be fetched \(its answer to /run has no id"):
        join.fetch(resolve(config, tmp_path / "node"))
