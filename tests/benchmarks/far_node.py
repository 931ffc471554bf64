"""Versions on their way to a far node: python -m tests.benchmarks.far_node [--megabytes=100] [--versions=20]

The run and a node are network namespaces of this machine, on a line of 300 ms there and back and 50 Mbit/s that loses
one packet in a hundred (tests/cluster/link.py; as root). Prints a table in Markdown. For each congestion control that
the kernel has: the rate of one connection over 20 s; that of a file of so many bytes as nodes fetch it, and its share
of the line's; the same over a NATS server in the middle, half as far from either. Then how long after its commit an
adapter of 288,000 numbers, all of which have moved, is on the node.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import asyncio
import contextlib
import hashlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from absl import app, flags, logging
from aiohttp import web

sys.path += [str(Path(__file__).parents[1] / part) for part in ("cluster", "rollout")]

from link import Link
from rollout_run import RolloutRun

from flowjax.config import default_config
from flowjax.dataflow.server import Server
from flowjax.monitor.token import keep_run_id
from flowjax.relay import dialled, node_end, run_end
from flowjax.run import Run, write_endpoints
from flowjax.weights.mirror import WeightsMirror
from flowjax.weights.publish import committed_steps
from flowjax.weights.source import source
from tests.nats_server import nats_server

_MEGABYTES = flags.DEFINE_integer("megabytes", 100, "Size of the file.")
_VERSIONS = flags.DEFINE_integer("versions", 20, "Number of adapters.")
LINE: dict[str, Any] = {"delay_s": 0.15, "loss": 0.01, "rate_bits_per_s": 50e6}
PORT, RANK = 9000, 18_000


def serve(link: Link, application: web.Application, control: str = "", *, host: str = "") -> None:
    """Answer on `host`, by default the hub, until this process ends, with that congestion control or the system's."""
    up = threading.Event()

    async def main() -> None:
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        listening = socket.create_server(("0.0.0.0", PORT))
        if control:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        await web.SockSite(runner, listening).start()
        up.set()
        await asyncio.Event().wait()

    in_background(link, host or link.hub, main)
    up.wait()


def in_background(link: Link, host: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do it on a host until this process ends."""
    link.call(host, lambda: threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start())


def of_files(folder: Path) -> web.Application:
    async def send(request: web.Request) -> web.FileResponse:
        return web.FileResponse(folder / request.match_info["name"])

    application = web.Application()
    application.router.add_get("/{name}", send)
    return application


async def one_connection(url: str, seconds: float) -> float:
    """Bits a second."""
    got_bytes, began_s = 0, time.monotonic()
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        async for chunk in response.content.iter_any():
            got_bytes += len(chunk)
            if time.monotonic() - began_s > seconds:
                break
    return 8 * got_bytes / (time.monotonic() - began_s)


async def fetched(url: str, content: bytes, target: Path) -> float:
    """Bits a second."""
    began_s = time.monotonic()
    async with source(url, "") as origin:
        await origin.fetch("/content", target, len(content), hashlib.sha256(content).hexdigest())
    return 8 * len(content) / (time.monotonic() - began_s)


def rates(control: str, folder: Path) -> str:
    """A line of the table."""
    content = np.random.default_rng(0).bytes(1_000_000 * _MEGABYTES.value)
    (folder / "content").write_bytes(content)
    with Link(["run", "node"], **LINE) as link:
        serve(link, of_files(folder), control)
        url = f"http://{link.address('run')}:{PORT}"
        one = link.call("node", lambda: asyncio.run(one_connection(f"{url}/content", 20.0)))
        ours = link.call("node", lambda: asyncio.run(fetched(url, content, folder / control)))
    relayed = over_nats(control, folder, content)
    share, line = ours / LINE["rate_bits_per_s"], 1e-6 * ours
    figures = f"{1e-6 * one:.1f} | {line:.1f} | {ours / one:.1f} x | {share:.2f}"
    return f"| {control} | {figures} | {1e-6 * relayed:.1f} | {relayed / ours:.2f} x |"


def over_nats(control: str, folder: Path, content: bytes) -> float:
    """Bits a second of a file that is fetched over a NATS server, to which run and node have a line each."""
    half = {**LINE, "delay_s": LINE["delay_s"] / 2}
    keep_run_id(folder, "0f")
    write_endpoints(folder, {"dataflow": f"http://127.0.0.1:{PORT}"})
    with Link(["nats", "run", "node"], **half) as link:
        for host in ("nats", "run", "node"):
            words = ["sysctl", "-qw", f"net.ipv4.tcp_congestion_control={control}"]
            subprocess.run([*link.on(host), *words], check=True)
        with nats_server(host="0.0.0.0", on=link.on("nats")) as server:
            serve(link, of_files(folder), host="run")

            async def run_side() -> None:
                run = Run(config=default_config(), folder=folder, policies={}, bases={}, agents={})
                url = f"nats://{link.address('nats', seen_by='run')}:{server.port}"
                async with dialled(url, patient=True) as line, run_end(line, run):
                    await asyncio.Event().wait()

            async def node_side() -> float:
                url = f"nats://{link.address('nats', seen_by='node')}:{server.port}"
                async with dialled(url, patient=True) as line, node_end(line, "0f") as here:
                    async with aiohttp.ClientSession() as session:
                        await answered(f"{here}/content", session)
                    return await fetched(here, content, folder / f"{control}-nats")

            in_background(link, "run", run_side)
            return link.call("node", lambda: asyncio.run(node_side()))


async def answered(url: str, session: aiohttp.ClientSession) -> None:
    """Return once the run's side has come up."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url, headers={"Range": "bytes=0-0"}, raise_for_status=True):
                return
        await asyncio.sleep(0.1)


def delays_s(folder: Path) -> list[float]:
    """For each version the time from its commit until it is on the node, its commit found like any other."""
    run, node = RolloutRun(folder, policy__lora__rank=RANK, dataflow__max_staleness=2), folder / "node"
    rng, waited_s = np.random.default_rng(0), []
    with Link(["run", "node"], **LINE) as link:
        flow = run.flow()
        serve(link, Server(flow).application())

        async def follow() -> None:
            async with source(f"http://{link.address('run')}:{PORT}", "") as origin:
                await WeightsMirror(node, origin).follow()

        in_background(link, "node", follow)
        for step in range(1, _VERSIONS.value + 1):
            sides = {
                "a": rng.standard_normal((1, 8, RANK), np.float32),
                "b": rng.standard_normal((1, RANK, 8), np.float32),
            }
            run.checkpoints.save(step, {"q_proj": sides}, {}, {})
            run.checkpoints.wait()
            began_s = time.monotonic()
            while step not in committed_steps(node / "checkpoints" / "agent"):
                time.sleep(0.01)
            waited_s.append(time.monotonic() - began_s)
            flow.report_serving("agent", step)
            time.sleep(rng.uniform(0.0, 1.0))  # at no fixed moment of the node's own rounds
    return waited_s


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    print(
        "| congestion control | one connection, Mbit/s | a node, Mbit/s | over one | over the line | over NATS, Mbit/s "
        "| over the direct way |"
    )
    print("|---|---|---|---|---|---|---|")
    for control in [name for name in ("cubic", "bbr") if name in known]:
        with tempfile.TemporaryDirectory() as folder:
            print(rates(control, Path(folder)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        waited_s = delays_s(Path(folder))
    median, high = np.percentile(waited_s, [50, 95])
    print(f"an adapter of {16 * RANK:,} numbers is on the node after {median:.2f} s (median), {high:.2f} s (95 %)")
    os._exit(0)  # the servers' threads have no end


if __name__ == "__main__":
    app.run(main)
