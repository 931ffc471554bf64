"""The rollout role tells Prometheus what it does."""

import asyncio
import os
import signal
import urllib.request

from rollout_run import RolloutRun, until

from flowjax.rollout import __main__ as rollout_main
from flowjax.run import resolve


def test_the_role_answers_with_its_counts(tmp_path):
    async def scenario() -> str:
        run = RolloutRun(tmp_path)
        async with run.servers() as servers:
            role = asyncio.create_task(rollout_main._serve(resolve(run.config, run.folder)))
            await until(lambda: len(servers.counted) == 16)
            text = ""
            while "flowjax_rollout_episodes 16\n" not in text:
                await asyncio.sleep(0.1)
                text = await asyncio.to_thread(fetch, run.status()["metrics_url"])
            os.kill(os.getpid(), signal.SIGTERM)
            await role
            return text

    text = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "flowjax_rollout_engine_up 1\n" in text
    assert 'flowjax_rollout_serving_versions{policy="agent"} 0\n' in text


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()
