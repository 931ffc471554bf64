"""A real NATS server for tests: the one that the extra `test` installs."""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import nkeys
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


def write_credentials(folder: Path, users: Mapping[str, Mapping[str, Any]]) -> Path:
    """The config of a server that believes what an operator has signed, and `<user>.creds` of users with these rights
    beside it: what `nsc` makes."""

    def new(prefix: int) -> nkeys.KeyPair:
        return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))

    def name(key: nkeys.KeyPair) -> str:
        return cast(bytes, key.public_key).decode()

    def signed(by: nkeys.KeyPair, key: nkeys.KeyPair, kind: str, **said: object) -> str:
        claims = {"jti": "x", "iat": 1, "iss": name(by), "sub": name(key), "nats": {"type": kind, "version": 2, **said}}
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, claims]
        text = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
        return b".".join([text, base64.urlsafe_b64encode(by.sign(text)).rstrip(b"=")]).decode()

    operator, account = new(nkeys.PREFIX_BYTE_OPERATOR), new(nkeys.PREFIX_BYTE_ACCOUNT)
    limits = {"subs": -1, "data": -1, "payload": -1}
    of_account = {**limits, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    for user, rights in users.items():
        key = new(nkeys.PREFIX_BYTE_USER)
        token = signed(account, key, "user", **limits, **rights)
        seed = cast(bytes, key.seed).decode()
        (folder / f"{user}.creds").write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
    config = folder / "operator.conf"
    config.write_text(
        f"operator: {signed(operator, operator, 'operator')}\nresolver: MEMORY\n"
        f"resolver_preload: {{{name(account)}: {signed(operator, account, 'account', limits=of_account)}}}\n"
    )
    return config


async def settle(client: Client) -> None:
    """Return when the server has seen all that the client has said so far."""
    for _ in range(2):  # nats-py writes the first one's PING past what it still holds back
        await client.flush()
