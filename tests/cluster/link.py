"""A bad link between hosts on one machine: network namespaces joined by a process that delays, drops and limits.

    with Link(["run", "berlin"], delay_s=0.15, loss=0.01, rate_bits_per_s=50e6) as link:
        subprocess.Popen([*link.on("berlin"), "python", ...])    # dials link.address("run")
        link.cut("berlin")                                       # and nothing passes, until link.mend("berlin")

The first host is the hub: every other one has a line of its own to it, and none to the others, nor to anything outside.
Each line is a TUN device at either end. A packet that is sent waits until those before it have gone at the line's rate,
is dropped where more than `queue_s` wait, and arrives `delay_s` later, or never with the chance `loss`. Nothing of this
needs the kernel's netem, which many kernels are built without. Linux, as root.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_PACKET_BYTES = 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
Result = TypeVar("Result")


def obstacle() -> str:
    """Why no link can be made here; "" where one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces want root on Linux"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        with Link(["hub", "leaf"]):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces can be made here: {error}"


class Link:
    """Hosts by name, the first of them in the middle. Use as a context manager.

    Args:
        delay_s: of a packet on its way, in each direction: half of what a round trip takes.
        loss: share of packets that are lost, in each direction.
        rate_bits_per_s: of each line, in each direction; 0 for no limit.
        queue_s: so long packets may wait for their turn.
        seed: of which packets are lost.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        delay_s: float = 0.0,
        loss: float = 0.0,
        rate_bits_per_s: float = 0.0,
        queue_s: float = 0.2,
        seed: int = 0,
    ):
        self.hub, *self.leaves = hosts
        self._line = {"delay_s": delay_s, "loss": loss, "rate": rate_bits_per_s, "queue_s": queue_s, "seed": seed}
        self._name = f"fj{os.getpid()}-{threading.get_native_id()}"
        self._undo = contextlib.ExitStack()
        self._commands: Any = None

    def __enter__(self) -> "Link":
        try:
            for host in (self.hub, *self.leaves):
                _ip("netns", "add", self.namespace(host))
                self._undo.callback(_ip, "netns", "del", self.namespace(host))
                _ip("-n", self.namespace(host), "link", "set", "lo", "up")
            ends = [self._open_line(number, leaf) for number, leaf in enumerate(self.leaves)]
            files = [end for pair in ends for end in pair]
            carrier = subprocess.Popen(
                [sys.executable, __file__, json.dumps({**self._line, "lines": ends, "names": self.leaves})],
                pass_fds=files,
                stdin=subprocess.PIPE,
                text=True,
            )
            for file in files:
                os.close(file)
            self._commands = carrier.stdin
            self._undo.callback(carrier.wait)
            self._undo.callback(carrier.kill)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def on(self, host: str) -> list[str]:
        """Words before a command that runs it on that host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def address(self, host: str, *, seen_by: str = "") -> str:
        """IPv4 address of a host; the hub has one on each line: that of the leaf `seen_by`, by default the first."""
        if host == self.hub:
            return f"10.0.{self.leaves.index(seen_by) if seen_by else 0}.1"
        return f"10.0.{self.leaves.index(host)}.2"

    def cut(self, leaf: str) -> None:
        """Let nothing pass on the line of a leaf, in either direction."""
        self._say(cut=leaf)

    def mend(self, leaf: str) -> None:
        self._say(mend=leaf)

    def call(self, host: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, called in a thread whose sockets are that host's."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with Path(f"/run/netns/{self.namespace(host)}").open() as namespace:
                    _enter(namespace.fileno())
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def _say(self, **command: str) -> None:
        print(json.dumps(command), file=self._commands, flush=True)

    def _open_line(self, number: int, leaf: str) -> tuple[int, int]:
        """Descriptors of the hub's and the leaf's end."""
        ends = []
        for host, last in ((self.hub, 1), (leaf, 2)):
            ends.append(self.call(host, lambda: _open_tun(f"line{number}")))
            device = ("dev", f"line{number}")
            _ip("-n", self.namespace(host), "addr", "add", f"10.0.{number}.{last}/24", *device)
            _ip("-n", self.namespace(host), "link", "set", *device, "mtu", str(_PACKET_BYTES), "up")
        return ends[0], ends[1]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _enter(namespace: int) -> None:
    """Move the calling thread, and it alone, into a network namespace."""
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _open_tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


class _Way:
    """Packets in one direction of a line."""

    def __init__(self, target: int, line: dict[str, Any], rng: random.Random):
        self._target, self._rng = target, rng
        self._delay_s, self._loss, self._queue_s = line["delay_s"], line["loss"], line["queue_s"]
        self._s_per_byte = 8 / line["rate"] if line["rate"] else 0.0
        self._free_at_s = 0.0  # the last packet that waits has left by then
        self.is_cut = False

    def arrival_s(self, size_bytes: int, now_s: float) -> float | None:
        """When a packet that is sent now arrives; None if never."""
        starts_s = max(now_s, self._free_at_s)
        if self.is_cut or starts_s - now_s > self._queue_s:
            return None
        self._free_at_s = starts_s + size_bytes * self._s_per_byte
        return None if self._rng.random() < self._loss else self._free_at_s + self._delay_s

    def deliver(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # the device's own queue is full, or down: one more packet is lost
            os.write(self._target, packet)


def carry(line: dict[str, Any]) -> None:
    """Carry packets until standard input is closed; a line of it is `{"cut": name}` or `{"mend": name}`."""
    rng = random.Random(line["seed"])
    selector = selectors.DefaultSelector()
    ways: dict[str, list[_Way]] = {}
    for name, (hub, leaf) in zip(line["names"], line["lines"], strict=True):
        ways[name] = [_Way(leaf, line, rng), _Way(hub, line, rng)]
        selector.register(hub, selectors.EVENT_READ, ways[name][0])
        selector.register(leaf, selectors.EVENT_READ, ways[name][1])
    selector.register(sys.stdin, selectors.EVENT_READ)
    under_way: list[tuple[float, int, _Way, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait_s):
            if key.data is None:
                if not (said := os.read(key.fd, 65536)):
                    return
                for what, name in (item for command in said.splitlines() for item in json.loads(command).items()):
                    for way in ways[name]:
                        way.is_cut = what == "cut"
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):  # then the others have their turn
                    packet = os.read(key.fd, 2 * _PACKET_BYTES)
                    now_s = time.monotonic()
                    if (at_s := key.data.arrival_s(len(packet), now_s)) is not None:
                        heapq.heappush(under_way, (at_s, count := count + 1, key.data, packet))
        now_s = time.monotonic()
        while under_way and under_way[0][0] <= now_s:
            _, _, way, packet = heapq.heappop(under_way)
            way.deliver(packet)


if __name__ == "__main__":
    carry(json.loads(sys.argv[1]))
