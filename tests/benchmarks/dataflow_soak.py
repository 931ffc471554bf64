"""Many workers at one dataflow process, for minutes:

    python -m tests.benchmarks.dataflow_soak [--workers=1000] [--minutes=5] [--groups=128] [--tokens=8192]

Simulated workers, in one process, lease episodes and hand over trajectories of `--tokens` tokens (4 turns of one
conversation); a simulated trainer, in another, takes the batches. All that the dataflow does is real: ledger, credit,
batches. The first two sixths of the time there are a hundredth and a tenth of the workers; a cost per trajectory that
does not depend on their number, and memory that does not grow, is what is looked for. Memory is read every two seconds;
its slope is the least-squares line through the second half of the last phase, with its standard error. /lease and
/batch are held back while there is nothing to give. Then the trainer stops, the workers play what there is, and for
`--idle_s` all of them wait: what they send, and what it costs the dataflow, is the last line.
"""

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from flowjax.config import default_config
from tests.benchmarks.dataflow_workers import Client, cancel, dataflow_process, train, work

TURNS = 4
_SLOTS, _MEMBERS = 2, 8  # of a worker, of a group
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class Phase:
    """What some number of workers did in `seconds`."""

    workers: int
    seconds: float
    trajectories: int
    cpu_s: float
    mib_per_s: float
    memory: np.ndarray  # of the dataflow process: seconds and MiB, every `_LOOK_EVERY_S`
    file_mib: float  # of its SQLite file at the end
    latencies_s: Mapping[str, Sequence[float]]  # of each request, by endpoint

    def per_worker_s(self, endpoint: str) -> float:
        """Requests of a worker in a second."""
        return len(self.latencies_s.get(endpoint, ())) / self.workers / self.seconds


def configuration(keep_trajectories: bool, tokens: int, groups: int, workers: int) -> ConfigDict:
    config = default_config()
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({"rows": 5, "columns": 5, "boxes": 1})
    config.rollout.group_size, config.trainer.groups_per_step, config.trainer.steps = _MEMBERS, groups, 1_000_000
    config.rollout.max_prompt_tokens, config.rollout.max_new_tokens = tokens, tokens // TURNS
    config.reward.components = ConfigDict({"success": 1.0})
    # So that every worker has something to play.
    config.eval.tasks, config.dataflow.max_staleness = 0, math.ceil(1.5 * workers * _SLOTS / (groups * _MEMBERS))
    config.dataflow.keep_trajectories = keep_trajectories
    return config


async def soak(
    url: str, pid: int, run_dir: Path, *, workers: int, minutes: float, idle_s: float, episode_s: float, tokens: int
) -> tuple[list[Phase], Phase]:
    """What each number of workers did, and all of them while there was nothing to play."""
    phases, serving = [], {"agent": 0}
    tasks: list[asyncio.Task[None]] = []
    async with Client(url) as client:

        def employ(count: int) -> None:
            for number in range(len(tasks), count):
                worker = work(
                    client,
                    f"worker-{number}",
                    serving,
                    slots=_SLOTS,
                    episode_s=episode_s,
                    turns=TURNS,
                    turn_tokens=tokens // TURNS,
                )
                tasks.append(asyncio.create_task(worker))

        async with _trainer(client, url, serving) as trainer:
            employ(max(workers // 10, 1))
            while serving["agent"] < 2:  # the first batches compile what gives credit
                await asyncio.sleep(0.1)
                _raise_of([trainer, *tasks])
            await cancel(tasks)
            tasks.clear()
            for share, count in ((1 / 6, max(workers // 100, 1)), (1 / 6, max(workers // 10, 1)), (4 / 6, workers)):
                employ(count)
                await asyncio.sleep(episode_s)  # until the first have played
                phases.append(await _phase(client, pid, run_dir, count, 60 * minutes * share, [trainer, *tasks]))
        accepted = -1
        while accepted < client.accepted:
            accepted = client.accepted
            await asyncio.sleep(2 * episode_s)
            _raise_of(tasks)
        idle = await _phase(client, pid, run_dir, workers, idle_s, tasks)
        await cancel(tasks)
    return phases, idle


def _raise_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise what one of them has ended of."""
    for task in tasks:
        if task.done():
            task.result()


@contextlib.asynccontextmanager
async def _trainer(client: Client, url: str, serving: dict[str, int]) -> AsyncIterator[asyncio.Task[None]]:
    """A trainer in a process of its own; the task takes over its newest version, and how long its requests took."""
    context = multiprocessing.get_context("spawn")
    version, took_s = context.Value("q", 0), context.SimpleQueue()
    process = context.Process(target=_train, args=(url, version, took_s), daemon=True)
    process.start()

    async def follow() -> None:
        while process.is_alive():
            serving["agent"] = version.value
            while not took_s.empty():
                name, latency_s = took_s.get()
                client.latencies_s.setdefault(name, []).append(latency_s)
            await asyncio.sleep(0.05)
        raise RuntimeError("the trainer has died")

    task = asyncio.create_task(follow())
    try:
        yield task
    finally:
        await cancel([task])
        process.terminate()


def _train(url: str, version: Any, took_s: "multiprocessing.SimpleQueue[tuple[str, float]]") -> None:
    async def main() -> None:
        made = {"agent": 0}
        async with Client(url) as client:
            while True:
                await train(client, "agent", made, step_s=0.0, steps=1)
                version.value = made["agent"]
                for name, values in client.latencies_s.items():
                    for latency_s in values:
                        took_s.put((name, latency_s))
                client.latencies_s = {}

    asyncio.run(main())


async def _phase(
    client: Client, pid: int, run_dir: Path, workers: int, seconds: float, tasks: list[asyncio.Task[None]]
) -> Phase:
    client.latencies_s = {}
    started_s, cpu_s, sent, accepted = time.monotonic(), processor_s(pid), client.sent_bytes, client.accepted
    memory, failed = [(0.0, _memory_mib(pid))], False
    while not failed and memory[-1][0] < seconds:
        failed, _ = await asyncio.wait(tasks, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        memory.append((time.monotonic() - started_s, _memory_mib(pid)))
    took_s = memory[-1][0]
    return Phase(
        workers,
        took_s,
        client.accepted - accepted,
        processor_s(pid) - cpu_s,
        (client.sent_bytes - sent) / 2**20 / took_s,
        np.array(memory),
        (run_dir / "dataflow.sqlite").stat().st_size / 2**20,
        client.latencies_s,
    )


def slope(seconds: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Change a minute of the least-squares line, and its standard error (neighbouring values taken as independent)."""
    minutes = (seconds - seconds.mean()) / 60
    change = float(minutes @ values / (minutes @ minutes))
    rest = values - values.mean() - change * minutes
    return change, float(np.sqrt(rest @ rest / max(len(values) - 2, 1) / (minutes @ minutes)))


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=5.0, help="in all, but for what follows")
    parser.add_argument("--idle_s", type=float, default=30.0, help="with nothing to play")
    parser.add_argument("--episode_s", type=float, default=8.0, help="that an episode takes")
    parser.add_argument("--tokens", type=int, default=8192, help="of a trajectory")
    parser.add_argument("--groups", type=int, default=128, help="of a batch: a version follows each")
    parser.add_argument("--keep_trajectories", action="store_true", help="also write them down as text")
    arguments = parser.parse_args()
    console = Console(width=130)
    config = configuration(arguments.keep_trajectories, arguments.tokens, arguments.groups, arguments.workers)
    with tempfile.TemporaryDirectory() as folder, dataflow_process(config, Path(folder)) as (url, pid):
        numbers = {name: getattr(arguments, name) for name in ("workers", "minutes", "idle_s", "episode_s", "tokens")}
        phases, idle = asyncio.run(soak(url, pid, Path(folder), **numbers))
    memory = "memory MiB: first, median, highest, last"
    table = Table("workers", "trajectories/s", "MiB/s", "CPU ms per trajectory", "CPU", memory, "file MiB")
    for phase in phases:
        mib = phase.memory[:, 1]
        table.add_row(
            str(phase.workers),
            f"{phase.trajectories / phase.seconds:.1f}",
            f"{phase.mib_per_s:.1f}",
            f"{1000 * phase.cpu_s / max(phase.trajectories, 1):.2f}",
            f"{phase.cpu_s / phase.seconds:.0%}",
            " ".join(f"{mib:.0f}" for mib in (mib[0], np.median(mib), mib.max(), mib[-1])),
            f"{phase.file_mib:.0f}",
        )
    console.print(table)
    second_half = phases[-1].memory[len(phases[-1].memory) // 2 :]
    change, error = slope(second_half[:, 0], second_half[:, 1])
    minutes = (second_half[-1, 0] - second_half[0, 0]) / 60
    console.print(f"memory, last {minutes:.1f} min: {change:+.1f} MiB/min, standard error {error:.1f}")
    console.print(f"load average of the machine: {os.getloadavg()[1]:.1f}")
    table = Table("endpoint", f"requests with {phases[-1].workers} workers", "p50 ms", "p99 ms")
    for name, values in sorted(phases[-1].latencies_s.items()):
        p50, p99 = 1000 * np.percentile(values, [50, 99])
        table.add_row(f"/{name}", str(len(values)), f"{p50:.1f}", f"{p99:.1f}")
    console.print(table)
    sent = ", ".join(f"/{name} {idle.per_worker_s(name):.3f}" for name in sorted(idle.latencies_s))
    console.print(
        f"{idle.workers} idle workers: requests of each a second: {sent}; the dataflow's CPU "
        f"{idle.cpu_s / idle.seconds:.1%}, {idle.trajectories} trajectories"
    )


if __name__ == "__main__":
    main()
