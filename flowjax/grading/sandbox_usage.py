"""Processor time, sleep and memory of the processes of a box, read from /proc while they run.

What a program does with its time must not depend on what else runs here. So its time is taken apart: on a processor,
waiting for one (the machine's doing), and asleep (its own doing). Linux counts the first two for every thread
(`schedstat`); where the kernel lacks it, waiting counts as sleep unless a process is seen to be runnable.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Seconds on a processor and waiting for one, of all processes so far; whether one of them is awake now; memory.

    `threads` are those that live, of all processes but the ones that start the program. `memory_bytes` is resident
    memory without files; pages that processes share count for each of them.
    """

    cpu_s: float
    waited_s: float
    awake: bool
    memory_bytes: int
    processes: tuple[int, ...]
    threads: int = 0

    def proportional_bytes(self) -> int:
        """Resident memory, a page that n processes share counted as 1/n for each. Slow: the kernel walks all pages."""
        total = 0
        for pid in self.processes:
            with contextlib.suppress(OSError, ValueError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                        total += int(line.split()[1]) << 10
        return total


class ProcessTree:
    """A process and all its descendants, those that have ended included.

    With fewer than `complete` of them, what they are to run is still being started: that counts as awake.
    """

    def __init__(self, pid: int, *, complete: int = 1):
        self._root, self._complete = pid, complete
        self._seen: dict[int, tuple[float, float]] = {}  # pid -> processor time and waiting, when last seen

    def read(self) -> ProcessUsage:
        """Resources used until now."""
        awake, memory, reaped_s, living, alive = False, 0, 0.0, [], 1 - self._complete
        stack = [self._root]
        while stack:
            pid = stack.pop()
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                count, threads, children = _threads(pid)
                kept_bytes = _resident_bytes(pid)
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
            living.append(pid)
            alive += count
            stack += children
            awake |= fields[0] in b"RD"
            memory += kept_bytes
            process_s, reaped = (_TICK_S * (int(fields[i]) + int(fields[i + 1])) for i in (11, 13))
            reaped_s += reaped
            self._seen[pid] = (max(process_s, threads[0]), threads[1])
        cpu_s = sum(cpu for cpu, _ in self._seen.values())
        cpu_s = max(cpu_s, reaped_s + sum(self._seen[pid][0] for pid in living))
        waited_s = sum(waited for _, waited in self._seen.values())
        awake |= len(living) < self._complete
        return ProcessUsage(cpu_s, waited_s, awake, memory, tuple(living), alive)


def _threads(pid: int) -> tuple[int, tuple[float, float], list[int]]:
    """The number of threads that live; their seconds on a processor and waiting for one; the children they made."""
    cpu_ns, waited_ns, children = 0, 0, []
    threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (twice as fast)
    for thread in threads:
        with contextlib.suppress(OSError):
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
            cpu, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes().split()
            cpu_ns, waited_ns = cpu_ns + int(cpu), waited_ns + int(waited)
    return len(threads), (cpu_ns / 1e9, waited_ns / 1e9), children


def _resident_bytes(pid: int) -> int:
    """Memory of a process that is no file's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
