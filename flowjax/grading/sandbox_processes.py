"""The processes of a box: the command line that starts them, and the time and memory that they use.

What a program does with its time must not depend on what else runs here. So its time is taken apart: on a processor,
waiting for one (the machine's doing), and asleep (its own doing). Linux counts the first two for every thread
(`schedstat`); where the kernel lacks it, waiting counts as sleep unless a process is seen to be runnable.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WATCH_S = 0.05  # longest time between two looks at what a program has used
SHORTEST_WATCH_S = 0.002
GROWTH_BYTES_PER_S = 8 << 30  # of the memory of a box, at most: touching a page takes a processor 0.5 us or more
PROGRAM = "/box/program.py"  # where bubblewrap shows the program
_SHARED_MEMORY_BYTES = 16 << 20
BOX_UIDS = 1 << 30  # uids from here on are one per box, so that no box counts another's processes
_counter = itertools.count()

# Sets the limits of a program that runs without bubblewrap, then becomes it. Linux ends it with its parent.
_LIMIT_AND_RUN = """
import json, resource, sys
settings = json.loads(sys.argv[1])
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except Exception:
    pass
for name, value in settings["limits"].items():
    try:
        resource.setrlimit(getattr(resource, name), (value, value))
    except (AttributeError, ValueError, OSError):
        pass
sys.path[:0] = settings["packages"]
sys.argv = [settings["program"]]
with open(settings["program"], encoding="utf-8") as file:
    source = file.read()
code = compile(source, settings["program"], "exec")
exec(code, {"__name__": "__main__", "__file__": settings["program"], "__builtins__": __builtins__})
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program, all its processes together. Bytes and seconds.

    `cpu_s` is time on processors and `idle_s` time asleep: a program that uses them up was too slow, however busy the
    machine. `wall_guard_s` only bounds what neither counts, a program that waits for a processor. `memory_bytes` bounds
    each process at once (address space), and all of them (resident) by looks that follow each other the faster, the
    less is left.
    """

    cpu_s: float = 10.0
    idle_s: float = 5.0
    wall_guard_s: float = 60.0
    memory_bytes: int = 512 << 20
    processes: int = 8  # threads count
    file_bytes: int = 16 << 20  # one file
    disk_bytes: int = 64 << 20  # /tmp as a whole; bubblewrap only
    output_bytes: int = 1 << 20  # of stdout and of stderr
    open_files: int = 64

    def resources(self) -> dict[str, int]:
        """The limits that the kernel enforces, by their names in `resource`."""
        return {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": max(1, round(self.cpu_s + 0.499)) + 1,  # whole seconds: where nobody watches
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that the sandbox can show: its executable and the folder that holds its library."""

    executable: str
    prefix: str


def interpreters() -> tuple[Interpreter, ...]:
    """Candidates, best first: the one that runs this process (its base, if that is a virtual environment), then the
    system's."""
    current = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    found = [Interpreter(current, os.path.realpath(sys.base_prefix))]
    if system := shutil.which("python3", path="/usr/bin:/usr/local/bin"):
        found.append(Interpreter(os.path.realpath(system), "/usr"))
    return tuple(dict.fromkeys(found))


def box_uid() -> int:
    return BOX_UIDS + (os.getpid() % (1 << 22)) * 128 + next(_counter) % 128


def bubblewrap_command(
    limits: Limits,
    interpreter: Interpreter,
    *,
    program_fd: int,
    filter_fd: int | None,
    drop_root: bool,
    packages: Sequence[str] = (),
) -> list[str]:
    """bwrap, sh, setpriv, prlimit, python. With `drop_root` (we are root) mounts are made as root and the program gets
    a uid of its own; without, bubblewrap makes a user namespace.

    A shell is the first process of the namespace: the kernel kills it with bwrap (a program could undo that for itself,
    and a change of uid does), and everything inside with it. It waits, so that bwrap knows the time that was used.
    """
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += [] if drop_root else ["--unshare-user"]
    command += ["--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("bin", "sbin", "lib", "lib64", "lib32"):
        if Path("/", folder).is_symlink():
            command += ["--symlink", f"usr/{folder}", f"/{folder}"]
        elif Path("/", folder).is_dir():
            command += ["--ro-bind", f"/{folder}", f"/{folder}"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    command += ["--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    command += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
    if not _in_usr(interpreter.prefix):
        command += [*_visible_parents(interpreter.prefix), "--ro-bind", interpreter.prefix, interpreter.prefix]
    for path in _installed_packages(interpreter.prefix):
        command += ["--perms", "0555", "--size", "4096", "--tmpfs", path]
    for path in packages:
        command += [*([] if _in_usr(path) else _visible_parents(path)), "--ro-bind", path, path]
    command += ["--perms", "0755", "--dir", "/box", "--perms", "0444", "--ro-bind-data", str(program_fd), PROGRAM]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"]
    command += ["--setenv", "PYTHONHASHSEED", "0"]  # sets in the same order every time
    command += ["--seccomp", str(filter_fd)] if filter_fd is not None else []
    command += ["sh", "-c", '"$@"; exit $?', "sh"]
    if drop_root:
        uid = box_uid()
        command += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        command += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    command += ["prlimit", *(f"--{name[7:].lower()}={value}" for name, value in limits.resources().items()), "--"]
    return [*command, interpreter.executable, *_python_options(packages), PROGRAM]


def _in_usr(path: str) -> bool:
    return path == "/usr" or path.startswith("/usr/")


@functools.cache
def _installed_packages(prefix: str) -> tuple[str, ...]:
    """Folders of installed packages, which a program has no need to see: a benchmark's answers may be among them."""
    roots = [Path(prefix, "lib"), Path("/usr/lib"), Path("/usr/local/lib")]
    found = [path for root in roots for name in ("site", "dist") for path in root.glob(f"python3*/{name}-packages")]
    return tuple(dict.fromkeys(str(path) for path in found if path.is_dir() and not path.is_symlink()))


def _visible_parents(path: str) -> list[str]:
    """bubblewrap makes the parents of what it shows readable by root alone; these are for everyone."""
    arguments: list[str] = []
    for parent in reversed(Path(path).parents[:-1]):
        if str(parent) != "/tmp":
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return arguments


def _python_options(packages: Sequence[str]) -> list[str]:
    if not packages:
        return ["-s", "-S", "-B"]
    start = f"import runpy, sys; sys.path[:0] = {list(packages)!r}; sys.argv = ['{PROGRAM}']; "
    return ["-s", "-S", "-B", "-c", f"{start}runpy.run_path('{PROGRAM}', run_name='__main__')"]


def _threads_of_user() -> int:
    """Threads that the kernel counts against a process limit of ours."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid():
                count += sum(1 for _ in (process / "task").iterdir())
    return count


def limited_command(
    limits: Limits,
    interpreter: Interpreter,
    *,
    program: str,
    uid: int | None,
    reads_all: bool,
    packages: Sequence[str] = (),
) -> list[str]:
    """The interpreter with resource limits and nothing else.

    With `uid` (we are root) the program runs under that uid, which is its alone: the kernel counts processes by user,
    so its limit counts no other's. With `reads_all` it is started as root and takes on that uid here, keeping the
    capability to read whatever root may: an interpreter in root's home is closed to others. Without `uid` its processes
    count among those of our user, and are limited beside these (root's not at all: whoever waits for the box counts).
    """
    resources = limits.resources()
    command = []
    if uid is None:
        resources["RLIMIT_NPROC"] += _threads_of_user()
    elif reads_all:
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
        command += [f"--{kind}=-all,+dac_read_search" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
    settings = {"limits": resources, "program": program, "packages": list(packages)}
    return [*command, interpreter.executable, "-s", "-S", "-B", "-c", _LIMIT_AND_RUN, json.dumps(settings)]


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
