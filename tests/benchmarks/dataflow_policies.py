"""Two policies of unequal speed in one real dataflow, with simulated workers and trainers."""

import asyncio
import tempfile
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.config import default_config
from tests.benchmarks.dataflow_workers import Client, cancel, dataflow_process, train, work

SPEEDS = {"fast": 0.1, "slow": 0.6}  # seconds that a step of each policy's trainer takes
_WORKERS, _SLOTS, _EPISODE_S = 8, 8, 0.2


async def steps_made(*, together: bool, seconds: float) -> tuple[int, int]:
    """Versions that the fast and the slow policy have made after `seconds`; `together`, neither goes on without the
    other."""
    config = default_config()
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({"rows": 5, "columns": 5, "boxes": 1})
    config.policies, config.separate_trainers = ConfigDict({"fast": {}, "slow": {}}), True
    config.agents = ConfigDict({"fast": "fast", "slow": "slow"})
    config.rollout.group_size, config.trainer.groups_per_step, config.trainer.steps = 4, 4, 100_000
    config.reward.components = ConfigDict({"success": 1.0})
    config.eval.tasks, config.dataflow.max_staleness, config.dataflow.keep_trajectories = 0, 2, False
    serving = {"fast": 0, "slow": 0}
    with tempfile.TemporaryDirectory() as folder, dataflow_process(config, Path(folder)) as (url, _):
        async with Client(url) as client:
            tasks = [
                asyncio.create_task(work(client, f"worker-{n}", serving, slots=_SLOTS, episode_s=_EPISODE_S))
                for n in range(_WORKERS)
            ]
            if together:
                tasks.append(asyncio.create_task(_train_together(client, serving)))
            else:
                for policy, step_s in SPEEDS.items():
                    tasks.append(asyncio.create_task(train(client, policy, serving, step_s=step_s)))
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            await cancel(tasks)
    return serving["fast"], serving["slow"]


async def _train_together(client: Client, serving: dict[str, int]) -> None:
    """Both trainers behind a barrier: what one has made is published when the other has made its own."""
    while True:
        made = dict(serving)
        steps = (train(client, policy, made, step_s=step_s, steps=1) for policy, step_s in SPEEDS.items())
        await asyncio.gather(*steps)
        serving.update(made)
