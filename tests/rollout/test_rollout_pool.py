"""The rollout service over several engines, with frozen agents, and with slots that follow the engines' load."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from rollout_run import RolloutRun, until

from flowjax.config import ConfigError, default_config
from flowjax.envs.sokoban.rooms import DIRECTIONS
from flowjax.run import check_agents, resolve


def engine_of(run: RolloutRun) -> FakeEngine:
    vocabulary = json.loads((run.model / "tokenizer.json").read_text())["model"]["vocab"]
    return FakeEngine([vocabulary[name] for name in DIRECTIONS])


@contextlib.asynccontextmanager
async def two_engines(folder: Path, **overrides) -> AsyncIterator[tuple[RolloutRun, list[FakeEngine]]]:
    run = RolloutRun(folder, engine__replicas=2, **overrides)
    engines = [engine_of(run), engine_of(run)]
    for engine in engines:
        await engine.server.start_server()
    try:
        yield run, engines
    finally:
        for engine in engines:
            await engine.server.close()


def test_episodes_are_spread_and_each_engine_gets_every_version(tmp_path):
    async def scenario():
        async with two_engines(tmp_path) as (run, engines):
            async with run.servers(*(engine.url for engine in engines)) as servers, run.serving(servers):
                for step in range(4):
                    run.publish(step)
                    await until(lambda: all(f"agent@{step}" in engine.adapters for engine in engines))  # noqa: B023
                await until(lambda: len(servers.counted) == 40)
                await until(lambda: all(set(engine.adapters) == {"agent@2", "agent@3"} for engine in engines))
            assert all(sum(engine.prompts.values()) > 0 for engine in engines)
            assert {path.name for path in (run.folder / "adapters").iterdir()} == {"agent@2", "agent@3"}
            assert [engine["up"] for engine in run.status()["bases"]["base"]["engines"]] == [True, True]

    asyncio.run(scenario())


@pytest.mark.parametrize("dead", [0, 1])
def test_an_engine_dies_and_comes_back_and_no_episode_is_lost(tmp_path, dead):
    async def scenario():
        async with two_engines(tmp_path) as (run, engines):
            async with run.servers(*(engine.url for engine in engines)) as servers, run.serving(servers):
                await until(lambda: len(servers.counted) >= 2)
                engines[dead].away = True
                for step in (1, 2):
                    run.publish(step)
                    await until(lambda: run.status()["serving_version"] == step)  # noqa: B023
                await until(lambda: len(servers.counted) == 32)
                assert run.status()["engine_up"]
                engines[dead].restart()
                await until(lambda: "agent@2" in engines[dead].adapters)
                assert set(engines[dead].adapters) == {"agent@2"}, "what nobody asks for is not loaded again"
                await until(lambda: all(engine["up"] for engine in run.status()["bases"]["base"]["engines"]))
                step, asked = 2, sum(engines[dead].prompts.values())
                while sum(engines[dead].prompts.values()) == asked:  # where the next groups belong is a matter of ports
                    run.publish(step := step + 1)
                    await until(lambda: len(servers.counted) == (step + 2) * 8)
            assert not servers.refused
            assert {episode.status for episode in servers.counted} == {"ok"}
            assert len({episode.episode_id for episode in servers.counted}) == len(servers.counted)
            assert run.status()["given_back"] == 0

    asyncio.run(scenario())


def test_an_engine_that_takes_no_adapter_does_not_hold_the_others_up(tmp_path):
    async def scenario():
        async with two_engines(tmp_path) as (run, engines):
            engines[0].adapters = _Full()
            async with run.servers(*(engine.url for engine in engines)) as servers, run.serving(servers):
                await until(lambda: len(servers.counted) == 16)
            assert not engines[0].prompts and engines[1].prompts

    asyncio.run(scenario())


class _Full(dict):
    """No room for another adapter."""

    def __setitem__(self, name: str, path: str) -> None:
        raise OverflowError("no free slot")


def test_a_frozen_agent_plays_and_is_not_trained(tmp_path):
    """Two agents on the same base: only the turns of one belong to a policy."""

    async def scenario():
        agents = {"agents": {"first": "agent", "second": "base"}, "workflow": "two_agents:play"}
        run = RolloutRun(tmp_path, **agents)
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: len(servers.counted) == 16)
            await until(lambda: servers.flow.status()["ready_groups"] == 4)
            group = servers.flow.ledger.group(servers.counted[0].group_id, "agent")
        assert {part.policy for part in group.trajectories} == {"agent"}
        for episode in servers.counted:
            first, second = episode.trajectories
            assert (first.policy, second.policy) == ("agent", "base")
            assert {(turn.policy, turn.version) for turn in first.turns} == {("agent", 0)}
            assert {(turn.policy, turn.version) for turn in second.turns} == {("base", -1)}
        assert servers.engine.prompts["base"] == servers.engine.prompts["agent@0"] == 16

    asyncio.run(scenario())


def speakers(config) -> dict[str, str]:
    run = resolve(config)
    check_agents(run)
    return dict(run.agents)


def test_who_speaks_for_an_agent_is_checked():
    config: Any = default_config()
    assert speakers(config) == {"agent": "agent"}
    config.agents = {"solver": "agent", "verifier": "base"}
    assert speakers(config) == {"solver": "agent", "verifier": "base"}
    config.policy.train = "full"
    with pytest.raises(ConfigError, match=r"config\.agents\.verifier is 'base', but .* replaces the base model"):
        speakers(config)
    config.policy.train = "lora"
    config.agents = {"solver": "base", "verifier": "base"}
    with pytest.raises(ConfigError, match="nothing is trained"):
        speakers(config)
    config.agents = {"solver": "nobody", "verifier": "base"}
    with pytest.raises(ConfigError, match=r"config\.agents\.solver is 'nobody': use one of .*agent, or 'base'"):
        speakers(config)


def test_slots_follow_the_load(tmp_path):
    async def scenario():
        run = RolloutRun(
            tmp_path,
            workflow="unruly_workflows:hangs",
            rollout__min_concurrent_episodes=2,
            rollout__max_concurrent_episodes=32,
            trainer__groups_per_step=8,
        )
        async with run.servers() as servers, run.serving(servers):
            await until(lambda: servers.leased >= 4 and run.status()["slots"] >= 4)
            servers.engine.waiting = 9
            await until(lambda: run.status()["bases"]["base"].get("load", {}).get("waiting") == 9)
            status = run.status()
            assert status["slots"] <= servers.leased and status["bases"]["base"]["load"]["preemptions"] == 0

    asyncio.run(scenario())


def test_what_can_be_played_is_said_with_every_lease(tmp_path):
    async def scenario():
        run = RolloutRun(tmp_path)
        async with run.servers() as servers, run.serving(servers) as serving:
            ask, said = serving.service._dataflow._call, []

            async def call(name, **message):
                if name == "lease":
                    said.append(message["can"])
                return await ask(name, **message)

            serving.service._dataflow._call = call
            await until(lambda: len(servers.counted) == 16)
            run.publish(1)
            await until(lambda: said)
        assert said[0] == {"worlds": ["sokoban"], "policies": ["agent"], "kinds": ["train", "eval"]}

    asyncio.run(scenario())
