"""A process that had a burst of large messages is small again afterwards."""

import platform
import subprocess
import sys

import pytest

BURST = """
import ctypes, os
from flowjax.monitor.trouble import return_freed_memory

if {returning}:
    return_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def block(size):
    address = c.malloc(size)
    ctypes.memset(address, 1, size)
    return address

def memory_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

c.free(block(1_000_000))  # the first large block that is freed raises glibc's threshold
before, kept = memory_mib(), []
burst = [(block(200_000), kept.append(block(1_000))) for _ in range(500)]
for address, _ in burst:
    c.free(address)
print(memory_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that would keep it")
def test_a_burst_leaves_no_memory_behind():
    grown = {}
    for returning in (False, True):
        command = [sys.executable, "-c", BURST.format(returning=returning)]
        grown[returning] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown[True] < 10 < 80 < grown[False], grown
