"""Environments in worker processes: equal to local ones, and what dies costs only its own episode."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from waiting_world import TOGETHER

import flowjax.envs.pool as pool_module
from flowjax.envs import EnvDied
from flowjax.envs.pool import EnvPool
from flowjax.envs.sokoban import Sokoban
from flowjax.records import Task

UNRULY = "unruly_world:Unruly"


def counter(start: int) -> Task:
    return Task(f"count-{start}", "unruly", start)


def run(episode: Callable[[EnvPool], Awaitable[None]], *, workers: int = 1, step_timeout_s: float = 5.0) -> EnvPool:
    async def main() -> EnvPool:
        async with EnvPool(workers=workers, step_timeout_s=step_timeout_s) as pool:
            await asyncio.wait_for(episode(pool), 240)
            return pool

    return asyncio.run(main())


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_episodes_in_the_pool_equal_local_ones():
    source = Sokoban().tasks("train", 0)

    async def one(pool: EnvPool, index: int) -> None:
        task = source[index]
        assert task is not None
        local = Sokoban().env()
        async with pool.session("flowjax.envs.sokoban:Sokoban", {"rows": 6}) as env:
            assert await env.reset(task, 0) == local.reset(task, 0)
            for action in ("up", "right", "fly", "down", "left", "down", "right"):
                assert await env.step(action) == local.step(action)

    async def episode(pool: EnvPool) -> None:
        await asyncio.gather(*(one(pool, index) for index in range(40)))

    assert run(episode, workers=2).counts.crashes == 0


def test_workers_import_no_jax_and_are_gone_afterwards():
    processes = set()

    async def one(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            step = await env.step("1")
            processes.add(int(step.outcome["process"]))
            assert not step.outcome["jax"]
            await asyncio.sleep(0.05)  # so that the sessions overlap

    async def episode(pool: EnvPool) -> None:
        await asyncio.gather(*(one(pool) for _ in range(4)))

    run(episode, workers=2)
    assert len(processes) == 2
    assert not any(map(alive, processes))


@pytest.mark.parametrize(("last_action", "status"), [("hang", "timeout"), ("crash", "env_error")])
def test_what_hangs_or_crashes_costs_its_own_episode(last_action: str, status: str):
    async def sibling(pool: EnvPool, start: int, going: asyncio.Event) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(start), 0)
            for _ in range(5):
                await env.step("1")
            going.set()
            steps = [await env.step("2") for _ in range(300)]
            await asyncio.sleep(3.0)  # idle while its worker dies
            steps.append(await env.step("2"))
            assert [step.reward for step in steps] == [start + 5 + 2 * n for n in range(1, 302)]

    async def episode(pool: EnvPool) -> None:
        going = [asyncio.Event() for _ in range(6)]
        siblings = [asyncio.create_task(sibling(pool, 100 * i, event)) for i, event in enumerate(going)]
        await asyncio.gather(*(event.wait() for event in going))
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            with pytest.raises(EnvDied) as died:
                await env.step(last_action)
            assert died.value.status == status
            with pytest.raises(EnvDied):
                await env.step("1")
        await asyncio.gather(*siblings)

    counts = run(episode, step_timeout_s=5.0).counts
    assert (counts.timeouts, counts.crashes) == ((1, 0) if status == "timeout" else (0, 1))
    assert counts.replays == 6


def test_a_machine_that_cannot_start_a_worker_fails_episodes_until_it_can(monkeypatch):
    """Else the one that replaces workers would be gone, and episodes would wait or fail for ever."""
    real, refusing = subprocess.Popen, True

    def refused(*args, **kwargs):
        if refusing:
            raise BlockingIOError("Resource temporarily unavailable")
        return real(*args, **kwargs)

    monkeypatch.setattr(pool_module, "START_AGAIN_S", 0.01)

    async def episode(pool: EnvPool) -> None:
        nonlocal refusing
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            monkeypatch.setattr(subprocess, "Popen", refused)
            with pytest.raises(EnvDied):
                await env.step("crash")
        async with pool.session(UNRULY, {}) as env:
            with pytest.raises(EnvDied, match="no environment worker could be started, 3 times in a row") as died:
                await env.reset(counter(7), 0)
            assert died.value.status == "env_error"
        refusing = False
        while not pool._workers[0].alive:
            await asyncio.sleep(0.01)
        async with pool.session(UNRULY, {}) as env:
            assert (await env.reset(counter(7), 0)).text == "7"

    run(episode)


def test_one_refusal_of_each_slot_ends_none(monkeypatch):
    """A moment without memory meets all of them at once."""
    real, refusals = subprocess.Popen, 0

    def refused(*args, **kwargs):
        nonlocal refusals
        refusals += 1
        if refusals <= pool_module.MAX_LOSSES:
            raise BlockingIOError("Resource temporarily unavailable")
        return real(*args, **kwargs)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool_module, "START_AGAIN_S", 0.01)

    async def episode(pool: EnvPool) -> None:
        before = list(pool._workers)
        while not all(worker.started for worker in before):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(subprocess, "Popen", refused)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        for worker in before:
            worker.kill()
        while not all(worker not in before and worker.started for worker in pool._workers):
            await asyncio.sleep(0.01)

    assert run(episode, workers=pool_module.MAX_LOSSES).counts.crashes == pool_module.MAX_LOSSES


def test_workers_killed_before_their_first_request_have_started():
    """However often: nothing speaks against another one."""

    async def episode(pool: EnvPool) -> None:
        for _ in range(pool_module.MAX_LOSSES + 1):
            worker = pool._workers[0]
            while not worker.started:
                await asyncio.sleep(0.01)
            worker.kill()
            while pool._workers[0] is worker:
                await asyncio.sleep(0.01)

    assert run(episode).counts.crashes == pool_module.MAX_LOSSES + 1


def test_two_hanging_episodes_on_one_worker_cost_one_worker_each():
    async def hang(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            with pytest.raises(EnvDied, match="too long"):
                await env.step("hang")

    async def episode(pool: EnvPool) -> None:
        await asyncio.gather(hang(pool), hang(pool))

    assert run(episode, step_timeout_s=5.0).counts.timeouts == 2


@pytest.mark.parametrize("world", [UNRULY, "waiting_world:Waiting"])
def test_an_exit_in_a_world_costs_its_own_episode(world: str):
    """And is answered, in the thread of a world that waits, too: nobody else hears of it there."""

    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as sibling, pool.session(world, {}) as env:
            await asyncio.gather(sibling.reset(counter(0), 0), env.reset(counter(0), 0))
            with pytest.raises(EnvDied, match="SystemExit: as if it were a program") as died:
                await env.step("exit")
            assert died.value.status == "env_error"
            assert (await sibling.step("1")).reward == 1.0

    counts = run(episode).counts
    assert (counts.crashes, counts.timeouts, counts.replays) == (0, 0, 0)


def test_an_exception_in_a_world_costs_no_worker():
    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            with pytest.raises(EnvDied, match="ArithmeticError: two and two") as died:
                await env.step("raise")
            assert died.value.status == "env_error"
        async with pool.session("no_such_world", {}) as env:
            with pytest.raises(EnvDied, match="no_such_world"):
                await env.reset(counter(0), 0)
        async with pool.session(UNRULY, {}) as env:
            assert (await env.reset(counter(7), 0)).text == "7"

    counts = run(episode).counts
    assert (counts.crashes, counts.timeouts, counts.replays) == (0, 0, 0)


def test_numbers_of_numpy_are_numbers():
    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            step = await env.step("numpy")
            found = (step.reward, step.terminal, *step.outcome.values())
            assert found == (0.5, True, 1.0, 1, False)
            assert [type(value) for value in found] == [float, bool, float, int, bool]

    run(episode)


@pytest.mark.parametrize("world", [UNRULY, "waiting_world:Waiting"])
def test_what_cannot_be_sent_costs_its_own_episode(world: str):
    """Either way between the processes; the others would else wait for an answer for ever, or lose their worker."""

    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as sibling:
            await sibling.reset(counter(0), 0)
            async with pool.session(world, {}) as env:
                unsendable = Task("count-0", "unruly", 0, {"level": object()})
                refused = asyncio.ensure_future(env.reset(unsendable, 0))
                assert (await sibling.step("1")).reward == 1.0
                with pytest.raises(EnvDied, match=r"reset cannot be sent .* object .* make payloads of tasks of texts"):
                    await refused
            async with pool.session(world, {}) as env:
                await env.reset(counter(0), 0)
                with pytest.raises(EnvDied, match=r"answer cannot be sent .* set .* make views, outcomes and traces"):
                    await env.step("odd")
            async with pool.session(world, {}) as env:
                for_pairs = Task("count-0", "unruly", 0, {"level": {(1, 2): 3}})
                with pytest.raises(EnvDied, match=r"reset cannot be sent .* a map whose key is a tuple or a list"):
                    await env.reset(for_pairs, 0)
            async with pool.session(world, {}) as env:
                await env.reset(counter(0), 0)
                with pytest.raises(EnvDied, match=r"answer cannot be sent .* a map whose key is a tuple or a list"):
                    await env.step("keys")
            assert (await sibling.step("1")).reward == 2.0

    counts = run(episode).counts
    assert (counts.crashes, counts.timeouts, counts.replays) == (0, 0, 0)


def test_a_worker_killed_from_outside_is_replaced():
    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            process = int((await env.step("1")).outcome["process"])
            os.kill(process, signal.SIGKILL)
            step = await env.step("1")
            assert step.reward == 2.0
            assert step.outcome["process"] != process

    assert run(episode).counts.crashes == 1


def test_a_world_that_dies_in_make_fails_its_episodes_and_nothing_else():
    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {"fail_in_env": True}) as env:
            with pytest.raises(EnvDied):
                await env.reset(counter(0), 0)
        async with pool.session(UNRULY, {}) as env:
            assert (await env.reset(counter(7), 0)).text == "7"

    assert run(episode).counts.crashes == 1


def test_workers_that_cannot_start_are_not_started_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            with pytest.raises(EnvDied):
                await env.reset(counter(0), 0)

    assert run(episode).counts.crashes == 3


def test_a_cancelled_step_leaves_the_pool_in_order():
    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:
            await env.reset(counter(0), 0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.step("hang"), 0.1)
        async with pool.session(UNRULY, {}) as env:
            assert (await env.reset(counter(7), 0)).text == "7"

    assert run(episode, step_timeout_s=5.0).counts.timeouts == 1


def test_workers_go_when_their_parent_is_killed():
    """Also one that hangs and so would never see its connection close."""
    program = (
        "import asyncio\n"
        "from flowjax.envs.pool import EnvPool\n"
        "from flowjax.records import Task\n"
        "async def main():\n"
        "    async with EnvPool() as pool, pool.session('unruly_world:Unruly', {}) as env:\n"
        "        await env.reset(Task('t', 'w', 0), 0)\n"
        "        print(int((await env.step('1')).outcome['process']), flush=True)\n"
        "        await env.step('hang')\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(worker)
        parent.kill()
    deadline_s = time.monotonic() + 120
    while alive(worker) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(worker)


def test_steps_of_a_world_that_waits_wait_side_by_side():
    """Each step waits for those of all episodes, and takes longer than a step may elsewhere."""

    async def one(pool: EnvPool, start: int) -> None:
        async with pool.session("waiting_world:Waiting", {}) as env:
            await env.reset(counter(start), 0)
            for taken in (1, 2):
                step = await env.step("5")
                assert step.reward == start + 5 * taken
            if start == 0:
                with pytest.raises(EnvDied, match="ArithmeticError: two and two"):
                    await env.step("raise")

    async def episode(pool: EnvPool) -> None:
        async with pool.session(UNRULY, {}) as env:  # so that the worker has started
            await env.reset(counter(0), 0)
        await asyncio.gather(*(one(pool, start) for start in range(TOGETHER)))

    counts = run(episode, step_timeout_s=0.8).counts
    assert (counts.timeouts, counts.crashes) == (0, 0)
