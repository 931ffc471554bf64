"""Episode functions that go wrong, for tests to name in a config."""

import asyncio
import dataclasses
import math

from flowjax.workflows import Played, single


async def every_fourth_raises(task, *, seed, env, agents, options):
    if seed % 4 == 0:
        raise RuntimeError("this episode is broken")
    return await single.play(task, seed=seed, env=env, agents=agents, options=options)


async def every_fourth_hangs(task, *, seed, env, agents, options):
    if seed % 4 == 0:
        await asyncio.sleep(3600)
    return await single.play(task, seed=seed, env=env, agents=agents, options=options)


async def every_fourth_rewards_nothing_that_is_a_number(task, *, seed, env, agents, options):
    played = await single.play(task, seed=seed, env=env, agents=agents, options=options)
    return dataclasses.replace(played, outcome={"success": math.nan}) if seed % 4 == 0 else played


async def every_fourth_is_graded(task, *, seed, env, agents, options):
    played = await single.play(task, seed=seed, env=env, agents=agents, options=options)
    parts = [dataclasses.replace(part, outcome={**part.outcome, "success": 0.75}) for part in played.parts]
    return dataclasses.replace(played, parts=parts) if seed % 4 == 0 else played


async def every_fourth_answers_half_a_character(task, *, seed, env, agents, options):
    played = await single.play(task, seed=seed, env=env, agents=agents, options=options)
    return dataclasses.replace(played, answer="\ud83d") if seed % 4 == 0 else played


async def every_fourth_raises_half_a_character(task, *, seed, env, agents, options):
    if seed % 4 == 0:
        raise RuntimeError("\ud83d is broken")
    return await single.play(task, seed=seed, env=env, agents=agents, options=options)


async def every_fourth_lacks_its_outcome(task, *, seed, env, agents, options):
    played = await single.play(task, seed=seed, env=env, agents=agents, options=options)
    bare = [dataclasses.replace(part, outcome={}) for part in played.parts]
    return dataclasses.replace(played, parts=bare) if seed % 4 == 0 else played


async def returns_nothing(task, *, seed, env, agents, options):
    await single.play(task, seed=seed, env=env, agents=agents, options=options)


async def names_another_agent(task, *, seed, env, agents, options):
    played = await single.play(task, seed=seed, env=env, agents=agents, options=options)
    return dataclasses.replace(played, parts=[dataclasses.replace(part, agent="critic") for part in played.parts])


async def tool_takes_too_long(task, *, seed, env, agents, options):
    raise TimeoutError("the tool does not answer")


async def raises(task, *, seed, env, agents, options):
    raise RuntimeError("this workflow is broken")


async def meets_an_outage(task, *, seed, env, agents, options):
    await asyncio.sleep(0.001)
    return Played([], {}, "executor_error", "the executor sleeps")


async def hangs(task, *, seed, env, agents, options):
    await asyncio.sleep(3600)
