"""A real NATS server for tests: the one that the extra `test` installs."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nats.aio.client import Client

from flowjax.launch.machine import free_port

BINARY = Path(sys.executable).with_name("nats-server")


class NatsServer:
    """On loopback, or at `host`; `on` are words before its command, for another host."""

    def __init__(self, *arguments: str, host: str = "127.0.0.1", on: Sequence[str] = ()):
        self.port = free_port()
        self.url = f"nats://{host}:{self.port}"
        self._command = [*on, str(BINARY), f"--addr={host}", f"--port={self.port}", *arguments]
        self._wait = not on

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        until_s = time.monotonic() + 60
        while self._wait and not self._listens():
            assert self._process.poll() is None and time.monotonic() < until_s, "nats-server does not come up"
            time.sleep(0.02)

    def reload(self) -> None:
        """Read the config file again."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextlib.contextmanager
def nats_server(*arguments: str, host: str = "127.0.0.1", on: Sequence[str] = ()) -> Iterator[NatsServer]:
    server = NatsServer(*arguments, host=host, on=on)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def nats_cluster(count: int) -> Iterator[list[NatsServer]]:
    """Servers that pass on to each other what they are given."""
    routes = [f"nats://127.0.0.1:{free_port()}" for _ in range(count)]
    with contextlib.ExitStack() as servers:
        yield [
            servers.enter_context(
                nats_server(f"--cluster={route}", f"--routes={','.join(routes)}", "--cluster_name=tests")
            )
            for route in routes
        ]


async def settle(client: Client) -> None:
    """Return when the server has seen all that the client has said so far."""
    for _ in range(2):  # nats-py writes the first one's PING past what it still holds back
        await client.flush()
