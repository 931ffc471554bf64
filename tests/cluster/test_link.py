"""The bad link itself: what it says of delay, loss and rate is so."""

import contextlib
import errno
import os
import socket
import threading
import time

import pytest
from link import Link, obstacle

from flowjax.monitor import trouble

pytestmark = pytest.mark.skipif(bool(reason := obstacle()), reason=reason)
PORT = 9000


def listening(link: Link) -> socket.socket:
    return link.call(link.hub, lambda: socket.create_server(("0.0.0.0", PORT)))


def dialled(link: Link, leaf: str, timeout_s: float = 60.0) -> socket.socket:
    address = (link.address(link.hub, seen_by=leaf), PORT)
    return link.call(leaf, lambda: socket.create_connection(address, timeout=timeout_s))


def test_a_packet_takes_its_time_and_no_more_pass_than_the_line_carries():
    with Link(["hub", "leaf"], delay_s=0.1, rate_bits_per_s=8e6) as link, listening(link) as server:
        began_s = time.monotonic()
        with dialled(link, "leaf") as there, server.accept()[0] as here:
            assert time.monotonic() - began_s >= 0.2, "there and back"
            threading.Thread(target=lambda: here.sendall(bytes(500_000))).start()
            began_s, left = time.monotonic(), 500_000
            while left:
                left -= len(there.recv(65536))
            assert time.monotonic() - began_s >= 0.45, "half a second's bytes, but for the first of them"


def test_a_share_of_packets_is_lost():
    with Link(["hub", "leaf"], loss=0.2) as link:
        here = link.call("hub", lambda: socket.socket(type=socket.SOCK_DGRAM))
        here.bind(("0.0.0.0", PORT))
        here.settimeout(2.0)
        there = link.call("leaf", lambda: socket.socket(type=socket.SOCK_DGRAM))
        came = 0
        for _ in range(1000):
            there.sendto(b"x", (link.address("hub"), PORT))
            time.sleep(0.0005)  # so that no queue is full
        with contextlib.suppress(TimeoutError):
            while here.recv(10):
                came += 1
        assert 0 < came <= 900


def test_a_cut_line_passes_nothing_until_it_is_mended_and_the_others_go_on():
    with Link(["hub", "one", "two"]) as link, listening(link) as server:
        link.cut("one")
        with pytest.raises(TimeoutError):
            dialled(link, "one", timeout_s=1.5)
        with dialled(link, "two") as there, server.accept()[0] as here:
            here.sendall(b"x")
            assert there.recv(1) == b"x"
        link.mend("one")
        with dialled(link, "one"), server.accept()[0]:
            pass
        link.cut("two")
        link.cut("one")
        with pytest.raises(TimeoutError):
            dialled(link, "one", timeout_s=1.5)


def test_a_connection_whose_line_is_cut_says_so(monkeypatch):
    """Without this TCP tries on for a quarter of an hour, ever more rarely, also when the line is there again."""
    monkeypatch.setattr(trouble, "_UNHEARD_S", 1.0)
    with Link(["hub", "leaf"]) as link, listening(link) as server:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "", (link.address("hub"), PORT))
        with link.call("leaf", lambda: trouble.telling_socket(kind)) as there:
            there.settimeout(120.0)
            there.connect((link.address("hub"), PORT))
            with server.accept()[0]:
                link.cut("leaf")
                there.sendall(b"x")
                with pytest.raises(TimeoutError, match=os.strerror(errno.ETIMEDOUT)):
                    there.recv(1)


def test_leaves_reach_the_hub_alone():
    with Link(["hub", "one", "two"]) as link:
        with pytest.raises(OSError):
            link.call("one", lambda: socket.create_connection((link.address("two"), PORT), timeout=2.0))
        with pytest.raises(OSError):
            link.call("one", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2.0))
