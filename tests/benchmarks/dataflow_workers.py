"""A real dataflow process, and workers and trainers that speak its interface without playing or training anything."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from ml_collections import ConfigDict

from flowjax.config import save_run
from flowjax.launch.machine import free_port
from flowjax.records import Episode, Lease, Trajectory, Turn, pack, unpack

_UP_WITHIN_S = 60.0
_PRESENCE_S = 10.0  # `Run.presence_s`: between reports of versions that are the same, and while a lease is held
_LOOK_EVERY_S = 0.2  # at the versions that are served


@contextmanager
def dataflow_process(config: ConfigDict, run_dir: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a dataflow that serves the run `config` in `run_dir`."""
    save_run(config, run_dir)
    url = f"http://127.0.0.1:{free_port()}"
    (run_dir / "endpoints.json").write_text(json.dumps({"dataflow": url}))
    command = [sys.executable, "-m", "flowjax.dataflow", f"--run={run_dir}"]
    with (run_dir / "dataflow.log").open("ab") as log:
        process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=log, stdout=log)
    try:
        until = time.monotonic() + _UP_WITHIN_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the dataflow does not start: see {run_dir / 'dataflow.log'}")
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/status", timeout=2).close()
    except OSError:
        return False
    return True


class Client:
    """Posts messages and notes how long each answer took. Use as an async context manager."""

    def __init__(self, url: str):
        self._url = url
        self.latencies_s: dict[str, list[float]] = {}
        self.sent_bytes = self.accepted = 0

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def post(self, name: str, *, read: Callable[[bytes], bool] = lambda answer: True, **body: Any) -> Any:
        """The answer's body, or None where `read` says that it is not to be read."""
        data, started_s = pack(body), time.perf_counter()
        async with self._session.post(f"{self._url}/{name}", data=data) as response:
            answer = await response.read()
        self.latencies_s.setdefault(name, []).append(time.perf_counter() - started_s)
        self.sent_bytes += len(data)
        if response.status != 200:
            raise RuntimeError(f"/{name}: {unpack(answer)['error']}")
        return unpack(answer) if read(answer) else None


def played(lease: Lease, versions: Mapping[str, int], *, turns: int = 1, turn_tokens: int = 8) -> Episode:
    """An episode as one growing conversation: each turn adds `turn_tokens`, half of them sampled, for each policy."""
    half = turn_tokens // 2
    random = np.random.default_rng(lease.seed)
    ids = random.integers(0, 30_000, turns * turn_tokens, np.int32)
    logprobs = -random.random(half, np.float32)
    outcome = {"success": float(random.random() < 0.5)}
    names = lease.group_id, lease.task.task_id, lease.seed
    parts = []
    for policy, version in versions.items():
        made = []
        for turn in range(turns):
            prompt, end = ids[: turn * turn_tokens + half], (turn + 1) * turn_tokens
            sampled, last = ids[end - half : end], turn == turns - 1
            made.append(
                Turn(policy, version, prompt, sampled, logprobs, "stop", turn, turn + 1, 0.0, True, last, 0.1, 0.1)
            )
        parts.append(Trajectory(f"{lease.episode_id}/{policy}", *names, made, outcome, policy=policy))
    return Episode(lease.episode_id, *names, parts, outcome)


async def work(
    client: Client,
    worker: str,
    serving: Mapping[str, int],
    *,
    slots: int,
    episode_s: float,
    turns: int = 1,
    turn_tokens: int = 8,
) -> None:
    """A worker: leases `slots` episodes, takes about `episode_s` over them, and hands them over; says what it serves.

    How long it takes is uniform between 0.5 and 1.5 of `episode_s`, so that not all workers hand over at once.
    """
    random = np.random.default_rng(list(worker.encode()))
    reports = asyncio.create_task(_report(client, worker, serving))
    try:
        while True:
            answer = await client.post("lease", worker=worker, slots=slots, hold_s=_PRESENCE_S)
            if not answer["leases"]:
                continue
            versions = dict(serving)
            await asyncio.sleep(episode_s * random.uniform(0.5, 1.5))
            items = [
                {"lease_id": lease.lease_id, "episode": played(lease, versions, turns=turns, turn_tokens=turn_tokens)}
                for lease in answer["leases"]
            ]
            taken = await client.post("episodes", worker=worker, items=items)
            client.accepted += taken["accepted"]
    finally:
        reports.cancel()


async def _report(client: Client, worker: str, serving: Mapping[str, int]) -> None:
    """As often as the rollout service does (`flowjax.rollout.service.VersionReports`)."""
    said: dict[str, tuple[int, float]] = {}
    while True:
        for policy, version in dict(serving).items():
            before, said_s = said.get(policy, (None, 0.0))
            if version != before or time.monotonic() - said_s > _PRESENCE_S:
                said[policy] = version, time.monotonic()
                await client.post("versions", worker=worker, policy=policy, serving=version)
        await asyncio.sleep(_LOOK_EVERY_S)


async def train(client: Client, policy: str, serving: dict[str, int], *, step_s: float, steps: int = 10**9) -> None:
    """A trainer: takes batch after batch, `step_s` over each, and publishes a version for it at once."""
    epoch, claimed, who = 0, False, {"trainer": f"trainer of {policy}", "policies": {policy: serving[policy]}}
    while not claimed:
        answer = await client.post("claim", after=epoch, **who)
        claimed, epoch = answer["claimed"], answer["epoch"]
    for _ in range(steps):
        asked = {"policy": policy, "step": serving[policy], "epoch": epoch}
        while (await client.post("batch", read=_is_short, **asked)) == {"state": "wait"}:
            pass
        await asyncio.sleep(step_s)
        serving[policy] += 1
        await client.post("committed", policy=policy, version=serving[policy], epoch=epoch)


def _is_short(answer: bytes) -> bool:
    """Whether an answer to /batch holds no batch: those are long, and what is in them is not looked at."""
    return len(answer) < 100


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End tasks; what went wrong in one of them is raised here."""
    failed = [task for task in tasks if task.done() and not task.cancelled()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()
