"""Two real vLLM servers behind one rollout service: the same answers whole and streamed, and the death of one."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from rollout_run import until
from test_rollout_real_engine import START_S, VllmRun

from flowjax.launch.devices import Devices
from flowjax.launch.roles import choose_ports, engine_roles
from flowjax.launch.supervisor import Supervisor
from flowjax.rollout.client import EngineClient, EngineReply, SamplingOptions
from flowjax.rollout.engines import EnginePool
from flowjax.run import resolve

GREEDY = SamplingOptions(0.0, 400)
CALLS = 24


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 20, 6).tolist() for _ in range(CALLS)]


async def _ask(client: EngineClient | EnginePool, model: str) -> list[EngineReply]:
    return await asyncio.gather(
        *(client.generate(model, prompt, GREEDY, group=str(index)) for index, prompt in enumerate(_prompts()))
    )


def _check_equal(ours: list[EngineReply], expected: list[EngineReply]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.sampled_ids == other.sampled_ids and one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def _child_of(guard: int | None) -> int:
    """The server itself, below the guard that supervises it."""
    (child,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return int(child)


@pytest.mark.slow
@pytest.mark.integration
def test_one_of_two_engines_is_killed_in_the_middle_of_everything(tmp_path):
    run = VllmRun(tmp_path, engine__replicas=2, engine__stream_partial=True, engine__max_model_tokens=512)
    ports = choose_ports(resolve(run.config))
    urls = [f"http://127.0.0.1:{ports[name]}" for name in ("engine-0", "engine-1")]

    async def scenario():
        supervisor = Supervisor(run.folder / "logs", backoff_s=0.1)
        for role in engine_roles(resolve(run.config, run.folder), ports, Devices()):
            supervisor.start(role)
        try:
            async with run.servers(*urls) as servers, run.serving(servers) as serving:
                pool = serving.service._bases[0].engine
                assert isinstance(pool, EnginePool)
                await until(lambda: all("agent@0" in member.names for member in pool.members), START_S)
                await until(lambda: servers.counted, 60)
                run.publish(1)
                await until(lambda: all("agent@1" in member.names for member in pool.members), 60)
                async with EngineClient(urls[1]) as whole, EngineClient(urls[1], stream=True) as streamed:
                    expected = await _ask(whole, "agent@1")
                    _check_equal(await _ask(streamed, "agent@1"), expected)
                assert sum(len(answer.sampled_ids) == GREEDY.max_new_tokens for answer in expected) > CALLS // 2

                calls = asyncio.create_task(_ask(pool, "agent@1"))
                await until(lambda: pool.members[0].in_flight >= 4, 10)
                await asyncio.sleep(0.2)
                os.kill(_child_of(supervisor.states["engine-0"].pid), signal.SIGKILL)
                _check_equal(await calls, expected)
                assert pool.continued_calls > 0

                run.publish(2)
                await until(lambda: run.status()["serving_version"] == 2, 60)
                await until(lambda: supervisor.states["engine-0"].restarts == 1, 30)
                await until(lambda: "agent@2" in pool.members[0].names and pool.members[0].up, START_S)
                _check_equal(await _ask(pool, "agent@2"), await _ask(pool, "agent@2"))
                await until(lambda: len(servers.counted) == (2 + 2) * 8 * 4, 60)
        finally:
            await supervisor.stop()
        assert not servers.refused and run.status()["given_back"] == 0
        assert {episode.status for episode in servers.counted} == {"ok"}
        assert len({episode.episode_id for episode in servers.counted}) == len(servers.counted)
        assert {turn.version for episode in servers.counted for turn in episode.turns} <= {0, 1, 2}
        assert supervisor.states["engine-1"].restarts == 0

    asyncio.run(scenario())
