"""The cost of the way over a NATS server: python -m tests.benchmarks.relay [--seconds=10] [--senders=16] [--turns=8]

Episodes of one conversation of 8,192 tokens, half of them sampled, of random ids and log-probabilities, go to a server
that answers each with a word: over HTTP on loopback, and over both ends of a relay with a real nats-server between
them, all on this machine; by turns, three times. Prints a table in Markdown: messages a second, the time that one takes
(median and 99 %), for each message the processor's time of the ends, and its kilobytes on the way: at the NATS server,
with what answers it.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
from absl import app, flags
from aiohttp import web

from flowjax.config import default_config, save_run
from flowjax.launch.machine import free_port
from flowjax.monitor.token import bearer, invite, keep_run_id, make_token
from flowjax.records import Lease, Task, pack
from flowjax.run import write_endpoints
from tests.benchmarks.dataflow_soak import processor_s
from tests.benchmarks.dataflow_workers import played
from tests.nats_server import nats_server

_SECONDS = flags.DEFINE_float("seconds", 10.0, "Of each measurement.", lower_bound=0.1)
_SENDERS = flags.DEFINE_integer("senders", 16, "That wait for an answer before they send again.", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 8, "Of an episode, each with the whole prompt before it.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Of an episode.", lower_bound=2)
_SERVE = flags.DEFINE_integer("serve", 0, "Port at which to answer, for the benchmark's own use.")
RUN_ID = "0f"


async def answer(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(text="ok")


@contextlib.contextmanager
def started(*command: str) -> Iterator[int]:
    """The process id of a Python module that runs while entered."""
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def relayed(folder: Path, port: int, monitor: int) -> Iterator[tuple[str, list[int], str]]:
    """The address of a node's end, the processes of both ends, and a key: what comes goes to `port`."""
    here = free_port()
    with nats_server(f"--http_port={monitor}") as server:
        for name, at in (("run", port), ("node", here)):
            config = default_config()
            if name == "run":
                config.dataflow.relay = server.url
            else:
                config.update({"elsewhere": ("dataflow", "trainer")})
                config.dataflow.url = f"{server.url}/{RUN_ID}"
            save_run(config, folder / name)
            keep_run_id(folder / name, RUN_ID)
            write_endpoints(folder / name, {"dataflow": f"http://127.0.0.1:{at}"})
        make_token(folder / "run")
        with (
            started("flowjax.relay", f"--run={folder / 'run'}") as run_end,
            started("flowjax.relay", f"--run={folder / 'node'}") as node_end,
        ):
            yield f"http://127.0.0.1:{here}", [run_end, node_end], invite(folder / "run", "node")


def message() -> bytes:
    """An episode as a worker sends it."""
    lease = Lease("lease", Task("task", "world", 0), "group", "episode", 0, "train", 1.0)
    episode = played(lease, {"agent": 0}, turns=_TURNS.value, turn_tokens=_TOKENS.value // _TURNS.value)
    return pack({"worker": "worker", "items": [{"lease_id": "lease", "episode": episode}]})


def received_bytes(monitor: int) -> int:
    """What has come to the NATS server, from both ends."""
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/varz") as answer:
        return json.load(answer)["in_bytes"]


async def send(url: str, key: str, body: bytes) -> tuple[float, np.ndarray]:
    """Messages a second, and how long each took."""
    took_s: list[float] = []
    async with aiohttp.ClientSession(headers=bearer(key), connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:  # until it is up
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url, data=body, raise_for_status=True):
                    break
            await asyncio.sleep(0.1)
        began_s = time.monotonic()

        async def sender() -> None:
            while (asked_s := time.monotonic()) < began_s + _SECONDS.value:
                async with session.post(url, data=body, raise_for_status=True) as response:
                    await response.read()
                took_s.append(time.monotonic() - asked_s)

        await asyncio.gather(*(sender() for _ in range(_SENDERS.value)))
    return len(took_s) / (time.monotonic() - began_s), np.array(took_s)


def main(argv: list[str]) -> None:
    del argv
    if _SERVE.value:
        served = web.Application(client_max_size=2**30)
        served.router.add_post("/{path:.*}", answer)
        web.run_app(served, host="127.0.0.1", port=_SERVE.value, print=None)
        return
    port, monitor, body = free_port(), free_port(), message()
    print("| way | messages/s | median, ms | 99 %, ms | ends' CPU ms a message | kB a message |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    rates: dict[str, list[float]] = {"HTTP": [], "over NATS": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tests.benchmarks.relay", f"--serve={port}"),
        relayed(Path(folder), port, monitor) as (url, ends, key),
    ):
        asyncio.run(send(url, key, body))  # all of it is up
        for _ in range(3):
            for way, where in (("HTTP", f"http://127.0.0.1:{port}"), ("over NATS", url)):
                before_s, before_bytes = sum(map(processor_s, ends)), received_bytes(monitor)
                rate, took_s = asyncio.run(send(f"{where}/episodes", key, body))
                ends_ms = 1000 * (sum(map(processor_s, ends)) - before_s) / len(took_s)
                carried = (received_bytes(monitor) - before_bytes) / len(took_s) if way == "over NATS" else len(body)
                middle, late = 1000 * np.percentile(took_s, [50, 99])
                cells = f"{rate:.0f}", f"{middle:.1f}", f"{late:.1f}", f"{ends_ms:.2f}", f"{carried / 1000:.1f}"
                print(f"| {way} | {' | '.join(cells)} |", flush=True)
                rates[way].append(rate)
    direct, over = (np.median(rates[way]) for way in ("HTTP", "over NATS"))
    print(f"\nover NATS {over:.0f} messages/s, {over / direct:.2f} x of those over HTTP")


if __name__ == "__main__":
    app.run(main)
