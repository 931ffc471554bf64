"""A run around a rollout service: real dataflow, checkpoints, world and tokenizer; the engine is told when to fail."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from aiohttp.test_utils import TestServer
from fake_engine import FakeEngine

from flowjax.broker import Connect, DataflowClient, connect
from flowjax.config import default_config, save_run
from flowjax.dataflow.flow import Flow
from flowjax.dataflow.server import Server
from flowjax.envs.pool import EnvPool
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.rooms import DIRECTIONS
from flowjax.models.nano import build_tokenizer
from flowjax.records import Episode
from flowjax.rollout.engines import bases_of_run
from flowjax.rollout.episode import EpisodePlayer
from flowjax.rollout.service import RolloutService
from flowjax.run import resolve
from flowjax.weights.publish import Checkpoints

WORLD = {"rows": 5, "columns": 5, "boxes": 1}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class RolloutRun:
    """A run folder with its parts; `serving()` plays in it.

    `overrides` are config fields with two underscores for a dot: `eval__tasks=3`.
    """

    def __init__(self, folder: Path, **overrides: Any):
        self.folder, self.model = folder / "run", folder / "model"
        build_tokenizer(Sokoban().vocabulary(), self.model)
        (self.model / "config.json").write_text(json.dumps(MODEL))
        config: Any = default_config()
        config.model.path = str(self.model)
        config.policy.lora.rank, config.policy.lora.targets = 2, ("q_proj",)
        config.env.name, config.env.options, config.env.prompt = "flowjax.envs.sokoban:Sokoban", WORLD, "compact"
        config.reward.components.success = 1.0
        config.env.max_turns, config.eval.tasks = 3, 0
        config.rollout.group_size, config.rollout.max_concurrent_episodes = 4, 8
        config.trainer.groups_per_step, config.trainer.steps = 2, 1000
        defaults = {"engine__request_timeout_s": 5.0, "engine__start_timeout_s": 10.0}
        defaults["dataflow__max_ready_groups"] = 1000  # as no trainer takes any
        for name, value in {**defaults, **overrides}.items():
            config.update_from_flattened_dict({name.replace("__", "."): value})
        save_run(config, self.folder)
        self.config = config
        self.checkpoints = Checkpoints(self.folder / "checkpoints" / "agent", keep=3)
        self.publish(0)

    def publish(self, step: int, level: float | None = None) -> None:
        number = float(step) if level is None else level
        adapter = {"q_proj": {"a": jnp.ones((1, 8, 2)), "b": jnp.full((1, 2, 8), number)}}
        self.checkpoints.save(step, adapter, {}, {})
        self.checkpoints.wait()

    def flow(self) -> Flow:
        return Flow(
            resolve(self.config, self.folder),
            train_tasks=Sokoban(**WORLD).tasks("train", 0)[:4].repeat(),
            held_out_tasks=Sokoban(**WORLD).tasks("held_out", 0)[:4].repeat(),
        )

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status-rollout.json").read_text())

    @contextlib.asynccontextmanager
    async def servers(self, *engine_urls: str) -> AsyncIterator["Servers"]:
        """Dataflow and engine (others than the fake one by their addresses), known in endpoints.json."""
        vocabulary = json.loads((self.model / "tokenizer.json").read_text())["model"]["vocab"]
        engine = FakeEngine([vocabulary[name] for name in DIRECTIONS])
        flow = self.flow()
        dataflow = TestServer(Server(flow).application())
        await asyncio.gather(engine.server.start_server(), dataflow.start_server())
        servers = Servers(engine, flow, dataflow, engine_urls or (engine.url,))
        names = resolve(self.config).bases["base"].engine_names(len(servers.engine_urls))
        endpoints = {**dict(zip(names, servers.engine_urls, strict=True)), "dataflow": servers.dataflow_url}
        (self.folder / "endpoints.json").write_text(json.dumps(endpoints))
        try:
            yield servers
        finally:
            await asyncio.gather(engine.server.close(), dataflow.close())
            flow.close()

    @contextlib.asynccontextmanager
    async def serving(self, servers: "Servers", to_dataflow: Connect | None = None) -> AsyncIterator["Serving"]:
        """A rollout service playing in this process; stopped in an orderly way at the end.

        It reaches the dataflow by `to_dataflow`, or over HTTP.
        """
        run, config = resolve(self.config, self.folder), self.config
        to_dataflow = to_dataflow or partial(connect, servers.dataflow_url)
        async with (
            bases_of_run(run, {"base": servers.engine_urls, **servers.further_urls}) as bases,
            to_dataflow() as broker,
            EnvPool(workers=1, step_timeout_s=config.env.step_timeout_s) as pool,
        ):
            dataflow = DataflowClient(broker, worker="test", away_s=config.dataflow.lease_s)
            player = EpisodePlayer.of_run(run, bases=bases, pool=pool)
            parts = {"bases": bases, "dataflow": dataflow, "player": player}
            serving = Serving(RolloutService(run, **parts))
            try:
                yield serving
            finally:
                await serving.stop()


class Servers:
    """`counted` are the episodes that the dataflow has taken, `refused` those that it has not."""

    def __init__(self, engine: FakeEngine, flow: Flow, dataflow: TestServer, engine_urls: tuple[str, ...]):
        self.engine, self.dataflow, self.engine_urls = engine, dataflow, engine_urls
        self.further_urls: dict[str, list[str]] = {}  # of the engines of further base models
        self.counted: list[Episode] = []
        self.refused: list[Episode] = []
        self.flow = self.watch(flow)

    def watch(self, flow: Flow) -> Flow:
        """Note what `flow` takes."""
        take = flow.groups.accept_all

        def accept_all(played: Sequence[tuple[str, Episode]], *, worker: str = "") -> list[bool]:
            counted = take(played, worker=worker)
            for (_, episode), counts in zip(played, counted, strict=True):
                (self.counted if counts else self.refused).append(episode)
            return counted

        setattr(flow.groups, "accept_all", accept_all)  # noqa: B010 - a method, which pyright lets nobody assign
        self.flow = flow
        return flow

    @property
    def dataflow_url(self) -> str:
        return str(self.dataflow.make_url("")).rstrip("/")

    @property
    def leased(self) -> int:
        return self.flow.status().get("leased", 0)


class Serving:
    def __init__(self, service: RolloutService):
        self.service = service
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(service.run(self._stop))

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.wait_for(self.task, 60)


async def until(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
