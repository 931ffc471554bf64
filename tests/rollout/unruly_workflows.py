"""Episode functions that go wrong, for tests to name in a config."""

import asyncio

from flowjax.workflows import single


async def every_fourth_raises(task, *, seed, env, agents, options):
    if seed % 4 == 0:
        raise RuntimeError("this episode is broken")
    return await single.play(task, seed=seed, env=env, agents=agents, options=options)


async def raises(task, *, seed, env, agents, options):
    raise RuntimeError("this workflow is broken")


async def hangs(task, *, seed, env, agents, options):
    await asyncio.sleep(3600)
