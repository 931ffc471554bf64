"""The rollout service on a real vLLM: new versions are served while it plays, and its death costs no episode."""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rollout_run import RolloutRun, until

from flowjax.envs.sokoban import Sokoban
from flowjax.models.config import read_config
from flowjax.models.lora import Lora, adapter_specs
from flowjax.models.nano import create_nano
from flowjax.rollout.client import EngineClient
from flowjax.rollout.sidecar import engine_command
from flowjax.run import resolve

START_S = 300.0


class VllmRun(RolloutRun):
    """A run with a nano model of random weights, so that episodes wander until they are truncated."""

    def __init__(self, folder: Path, **overrides: Any):
        settings = {
            "trainer__groups_per_step": 8,
            "rollout__max_concurrent_episodes": 32,
            "rollout__max_new_tokens": 2,
            "rollout__temperature": 1.0,
            "engine__dtype": "float32",
            "engine__max_model_tokens": 64,
            "engine__kv_cache_bytes": 64 * 1024**2,
            "engine__request_timeout_s": START_S,
            "engine__start_timeout_s": START_S,
        }
        super().__init__(folder, **(settings | overrides))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def prepare_model(self) -> None:
        create_nano(Sokoban().vocabulary(), self.model, key=jax.random.key(0), hidden_size=32, layers=1)

    def publish(self, step: int, level: float | None = None) -> None:
        if step == 0:
            self.prepare_model()
        specs = adapter_specs(read_config(self.model), Lora(**self.config.policy.lora.to_dict()))
        adapter = jax.tree.map(
            lambda spec: jnp.full(spec.shape, 0.01 * (step if level is None else level)),
            specs,
            is_leaf=lambda x: hasattr(x, "shape"),
        )
        self.checkpoints.save(step, adapter, {}, {})
        self.checkpoints.wait()

    def launch(self) -> None:
        run = resolve(self.config)
        argv, env = engine_command(run, run.engines[0], self.port)
        (self.folder / "logs").mkdir(exist_ok=True)
        with (self.folder / "logs" / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                argv, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def run(tmp_path) -> Iterator[VllmRun]:
    run = VllmRun(tmp_path)
    run.launch()
    yield run
    run.kill()


@pytest.mark.integration
def test_versions_change_and_the_engine_dies_while_episodes_are_played(run):
    async def scenario():
        async with run.servers(f"http://127.0.0.1:{run.port}") as servers, run.serving(servers):
            await until(lambda: servers.counted, START_S)
            for step in (1, 2, 3):
                run.publish(step)
                await until(lambda: run.status()["serving_version"] == step, 30)  # noqa: B023
            async with EngineClient(servers.engine_urls[0]) as engine:
                await until(lambda: not run.status()["in_flight"], 30)
                await asyncio.sleep(0.5)
                assert await engine.models() == {"base", "agent@2", "agent@3"}
            before = len(servers.counted)
            run.publish(4)
            await until(lambda: len(servers.counted) > before)
            run.kill()
            run.launch()
            run.publish(5)
            await until(lambda: run.status()["serving_version"] == 5, START_S)
            await until(lambda: len(servers.counted) == (5 + 2) * 8 * 4, 60)
        assert not servers.refused
        assert len({episode.episode_id for episode in servers.counted}) == len(servers.counted)
        assert {episode.status for episode in servers.counted} == {"ok"}
        assert run.status()["given_back"] == 0
        versions = {turn.version for episode in servers.counted for turn in episode.turns}
        assert {0, 5} <= versions <= set(range(6))
        assert sorted(path.name for path in (run.folder / "adapters").iterdir()) == ["agent@4", "agent@5"]
        assert all(len(t.logprobs) == len(t.sampled_ids) > 0 for episode in servers.counted for t in episode.turns)
        assert json.loads((run.folder / "endpoints.json").read_text())["engine"] == servers.engine_urls[0]

    asyncio.run(scenario())
