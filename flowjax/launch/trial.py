"""A launch's trial of a user's own world and workflow: their tasks are read, an episode is played, actions repeated.

`flowjax.launch.probe` calls it in its process, before anything starts. It is quick, and bounded for slow worlds.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from flowjax.config import task_options
from flowjax.envs import EnvDied, NotReady, World, find_world, is_refusal
from flowjax.records import Lease, Task, pack, unpack
from flowjax.run import Run


def fails(what: str, error: Exception) -> str:
    """Message on an error of a user's own world, which may fail in any way.

    Raises:
        NotReady: a file or another machine is not there.
        ValueError: `error` itself, where its message was made for users.
    """
    if is_refusal(error):
        raise error
    text = f"{what} ({type(error).__name__}: {error}): mend it"
    if isinstance(error, OSError):
        raise NotReady(text) from error
    return text


def check_tasks(config: ConfigDict) -> Iterator[str]:
    """Problems with the tasks of each split: they have to open, and the first has to be a `Task` that can be sent."""
    from flowjax.dataflow.tasks import held_out_tasks, task_at, train_tasks

    wanted = {"train": train_tasks} if not config.eval.versions else {}
    wanted |= {"held_out": held_out_tasks} if config.eval.tasks else {}
    for split, tasks in wanted.items():
        named = f"config.env.name is {config.env.name!r}, whose tasks({split!r}, ...)"
        try:
            source = tasks(config)
            first = task_at(source, 0) if len(source) else None
            pack(first)  # as a lease will be
        except Exception as error:
            yield fails(f"{named} fails", error)
            continue
        if not isinstance(first, Task):
            yield f"{named} has {'a ' + type(first).__name__ if first else 'no task'}: make it of flowjax.records.Task"


def check_episode(run: Run, limit_s: float = 20.0) -> Iterator[str]:
    """Play one episode without engines, every reply empty: a fault of a user's world or workflow that ends it would end
    all. Then play the world alone twice, with the same random actions: it has to do the same."""
    from flowjax.canvas.backends import OfflineBackend, Rule
    from flowjax.dataflow.tasks import held_out_tasks, task_at, train_tasks
    from flowjax.envs.pool import EnvPool, irregularity
    from flowjax.rollout.episode import EpisodePlayer

    kind, config = find_world(run.config.env.name), run.config
    shipped = all(path.startswith("flowjax.") for path in (config.env.name, config.workflow))
    if shipped or "rollout" in config.elsewhere or kind.asked_bases is not World.asked_bases:
        return  # shipped code has tests; this machine does not play; or the bases that the world asks do not run yet
    task = task_at((held_out_tasks if config.eval.versions else train_tasks)(config), 0)
    if kind(**task_options(config, task.source)).STEPS_WAIT:
        return

    async def play() -> str:
        async with asyncio.timeout(limit_s), EnvPool(step_timeout_s=config.env.step_timeout_s) as pool:
            player = EpisodePlayer.of_run(run, pool=pool, backend=OfflineBackend([Rule()]))
            episode = await player.play(unpack(pack(Lease("first", task, "first", "first", 0, "train", 1.0))))
            if episode.status == "env_error":
                return f"of which an episode where every reply is empty fails ({episode.error}): mend it"
            async with pool.session(config.env.name, task_options(config, task.source)) as env:
                try:
                    found = await irregularity(kind, env, task, config.env.max_turns)
                except EnvDied as died:
                    found = f"{died}: mend it"
            return found and f"where legal actions are taken at random: {found}"

    with contextlib.suppress(TimeoutError):  # a world that is slow to open may be sound
        if found := asyncio.run(play()):
            yield f"config.env.name is {config.env.name!r} and config.workflow {config.workflow!r}, {found}"
