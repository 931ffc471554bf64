"""The rollout service over several base models, each with engines, adapters and a tokenizer of its own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from fake_engine import FakeEngine
from rollout_run import MODEL, RolloutRun, Servers, until

from flowjax.config import ConfigDict, ConfigError, default_config, save_run
from flowjax.envs.sokoban import Sokoban
from flowjax.envs.sokoban.rooms import DIRECTIONS
from flowjax.launch.checks import check_config
from flowjax.models.nano import build_tokenizer
from flowjax.rollout.__main__ import _engine_urls
from flowjax.rollout.client import Load
from flowjax.rollout.engines import SlotControl
from flowjax.run import check_agents, resolve
from flowjax.weights.publish import Checkpoints

AGENTS = {"first": "agent", "second": "judge"}
POLICIES = {"agent": {}, "critic": {"policy": {"base": "judge", "lora": {"rank": 1}}}}


class TwoBases(RolloutRun):
    """A run with a further base model `judge`, which is larger and has other ids for the same words."""

    def __init__(self, folder: Path, **overrides: Any):
        self.judge = folder / "judge"
        build_tokenizer(Sokoban().vocabulary()[::-1], self.judge)
        (self.judge / "config.json").write_text(json.dumps({**MODEL, "hidden_size": 16}))
        bases = ConfigDict({"judge": {"model": {"path": str(self.judge)}}})
        super().__init__(folder, bases=bases, workflow="two_agents:play", **overrides)
        if "critic" in self.config.policies:
            self.critics = Checkpoints(self.folder / "checkpoints" / "critic", keep=3)
            self.publish_critic(0)

    def publish_critic(self, step: int) -> None:
        adapter = {"q_proj": {"a": jnp.ones((1, 16, 1)), "b": jnp.full((1, 1, 8), float(step))}}
        self.critics.save(step, adapter, {}, {})
        self.critics.wait()

    def ids(self, model: Path) -> list[int]:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        return [vocabulary[name] for name in DIRECTIONS]

    @contextlib.asynccontextmanager
    async def both(self) -> AsyncIterator[tuple[Servers, FakeEngine]]:
        """Dataflow and both engines; the second is that of the further base."""
        engine = FakeEngine(self.ids(self.judge), base="judge")
        await engine.server.start_server()
        try:
            async with self.servers() as servers:
                servers.further_urls = {"judge": [engine.url]}
                yield servers, engine
        finally:
            await engine.server.close()


def test_each_agent_speaks_on_its_policys_base(tmp_path):
    async def scenario():
        run = TwoBases(tmp_path, policies=ConfigDict(POLICIES), agents={"first": "agent", "second": "critic"})
        async with run.both() as (servers, judge), run.serving(servers):
            run.publish(1)
            run.publish_critic(1)
            run.publish_critic(2)
            await until(lambda: "agent@1" in servers.engine.adapters and "critic@2" in judge.adapters)
            await until(lambda: len(servers.counted) >= 16)
            await until(lambda: run.status()["serving_versions"] == {"agent": 1, "critic": 2})
            assert all(name.startswith("agent@") for name in servers.engine.lora_loads)
            assert all(name.startswith("critic@") for name in judge.lora_loads)
            assert {name: base["up"] for name, base in run.status()["bases"].items()} == {"base": True, "judge": True}
        assert set(servers.engine.prompts) <= {"agent@0", "agent@1"}
        assert set(judge.prompts) <= {"critic@0", "critic@1", "critic@2"}
        for episode in servers.counted:
            (first,), (second,) = (part.turns for part in episode.trajectories)
            assert (first.policy, second.policy) == ("agent", "critic")
            assert first.sampled_ids[0] in run.ids(run.model) and second.sampled_ids[0] in run.ids(run.judge)
            assert first.prompt_ids.tolist() != second.prompt_ids.tolist(), "the same words in another tokenizer"
        described = [json.loads((run.folder / "adapters" / name / "adapter_config.json").read_text())
                     for name in ("agent@1", "critic@2")]  # fmt: skip
        assert [(each["r"], each["base_model_name_or_path"]) for each in described] == [
            (2, str(run.model)), (1, str(run.judge)),
        ]  # fmt: skip

    asyncio.run(scenario())


def test_a_frozen_judge_on_another_base_plays_and_is_not_trained(tmp_path):
    async def scenario():
        run = TwoBases(tmp_path, agents=AGENTS)
        async with run.both() as (servers, judge), run.serving(servers):
            await until(lambda: len(servers.counted) == 16)
            await until(lambda: servers.flow.status()["ready_groups"] == 4)
            group = servers.flow.ledger.group(servers.counted[0].group_id, "agent")
        assert {part.policy for part in group.trajectories} == {"agent"}
        for episode in servers.counted:
            first, second = episode.trajectories
            assert {(turn.policy, turn.version) for turn in first.turns} == {("agent", 0)}
            assert {(turn.policy, turn.version) for turn in second.turns} == {("judge", -1)}
        assert (servers.engine.prompts, judge.prompts) == ({"agent@0": 16}, {"judge": 16})
        assert not judge.lora_loads

    asyncio.run(scenario())


def test_nothing_is_leased_while_one_base_is_away(tmp_path):
    async def scenario():
        run = TwoBases(tmp_path, agents=AGENTS)
        async with run.both() as (servers, judge):
            judge.away = True
            async with run.serving(servers) as serving:
                await until(lambda: servers.engine.adapters)
                await until(lambda: run.status()["bases"]["base"]["up"])
                await asyncio.sleep(0.2)
                status = run.status()
                assert not status["engine_up"] and not status["bases"]["judge"]["up"]
                assert not serving.service._playing and servers.leased == 0
                judge.away = False
                await until(lambda: len(servers.counted) == 16)

    asyncio.run(scenario())


def test_an_engine_that_stays_away_is_named_by_its_log(tmp_path):
    async def scenario():
        run = TwoBases(tmp_path, agents=AGENTS, engine__start_timeout_s=0.5)
        async with run.both() as (servers, judge):
            judge.away = True
            async with run.serving(servers) as serving:
                await asyncio.wait([serving.task], timeout=120)
                with pytest.raises(Exception, match=r"has been away .* see logs/engine-judge\.log"):
                    serving.task.result()
                serving.task = asyncio.create_task(asyncio.sleep(0))

    asyncio.run(scenario())


def test_the_fullest_base_decides_how_many_episodes_are_played():
    control = SlotControl(floor=2, ceiling=32)
    for _ in range(40):
        control.update({"base": Load(running=1), "judge": Load(running=1)}, control.slots)
    assert control.slots == 32
    control.update({"base": Load(running=100), "judge": Load(running=4, waiting=9)}, 32)
    assert control.slots == 24
    control.update({"base": Load(running=100), "judge": Load(running=4, preemptions=3)}, 24)
    assert control.slots == 18, "requests preempted on one of them"
    control.update({"base": Load(running=100), "judge": Load(running=4, preemptions=3)}, 18)
    assert control.slots == 19
    control.update({}, 19)
    assert control.slots == 19, "no engine has answered"


def _config(**bases: dict) -> Any:
    config: Any = default_config()
    config.bases = bases or {"judge": {}, "large-8b": {"engine": {"replicas": 2}}}
    return config


def test_names_of_the_engines_of_each_base():
    config = _config()
    run = resolve(config)
    assert [engine.name for engine in run.engines] == [
        "engine", "engine-judge", "engine-large-8b-0", "engine-large-8b-1",
    ]  # fmt: skip
    assert [engine.base for engine in run.engines] == ["base", "judge", "large-8b", "large-8b"]
    logs = [base.logs for base in run.bases.values()]
    assert logs == ["logs/engine.log", "logs/engine-judge.log", "logs/engine-large-8b-*.log"]
    config.bases.judge.engine = {"urls": ("http://a:1", "http://b:1")}
    judge = resolve(config).bases["judge"]
    assert [(engine.name, engine.url) for engine in judge.engines] == [
        ("engine-judge-0", "http://a:1"), ("engine-judge-1", "http://b:1"),
    ]  # fmt: skip
    assert judge.logs == "the engines' own logs"


def speakers(config) -> dict[str, str]:
    run = resolve(config)
    check_agents(run)
    return dict(run.agents)


def test_who_may_speak_for_an_agent():
    config = _config(judge={}, spare={})
    config.agents = {"solver": "agent", "verifier": "judge"}
    assert speakers(config) == {"solver": "agent", "verifier": "judge"}
    assert any("config.bases.spare speaks for no agent" in problem for problem in check_config(config))
    config.agents = {"solver": "agent", "verifier": "nobody"}
    with pytest.raises(ConfigError, match=r"verifier is 'nobody': use one of .*agent, or 'base', 'judge', 'spare'"):
        speakers(config)
    config.agents = {"solver": "base", "verifier": "judge"}
    with pytest.raises(ConfigError, match="'base', 'judge' speak for every agent, so nothing is trained"):
        speakers(config)
    config.policies = {"small": {}, "large": {"policy": {"base": "judge", "train": "full"}}}
    config.agents = {"solver": "small", "verifier": "judge"}
    with pytest.raises(ConfigError, match=r"config\.agents\.verifier is 'judge', but .* replaces the base model"):
        speakers(config)
    config.agents = {"solver": "small", "verifier": "base"}
    assert speakers(config)["verifier"] == "base"


def test_endpoints_are_found_by_base(tmp_path):
    config = _config()
    save_run(config, tmp_path)
    urls = {engine.name: f"http://{engine.name}" for engine in resolve(config).engines}
    (tmp_path / "endpoints.json").write_text(json.dumps({**urls, "dataflow": "http://d"}))
    engines = _engine_urls(resolve(config, tmp_path))
    assert engines["large-8b"] == ["http://engine-large-8b-0", "http://engine-large-8b-1"]
    assert (engines["base"], engines["judge"]) == (["http://engine"], ["http://engine-judge"])
    del urls["engine-judge"]
    (tmp_path / "endpoints.json").write_text(json.dumps({**urls, "dataflow": "http://d"}))
    with pytest.raises(ConfigError, match=r"does not name engine and dataflow \('engine-judge'\)"):
        _engine_urls(resolve(config, tmp_path))
