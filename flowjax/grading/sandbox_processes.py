"""The processes of a box: the command line that starts them, the time and memory that they use, and the system calls
that they may make.

A verdict must not depend on what else runs on this machine. So a program's time is split into time on a processor, time
waiting for one (the machine's doing), and time asleep (its own doing). Linux counts the first two for every thread
(`schedstat`); where the kernel lacks it, waiting counts as sleep unless a process is seen to be runnable. Processes of
a box can make each other wait, too: such waiting is told apart, and does not excuse them.
"""

import contextlib
import functools
import itertools
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

WATCH_S = 0.05  # longest time between two looks at what a program has used
SHORTEST_WATCH_S = 0.002
GROWTH_BYTES_PER_S = 8 << 30  # of the memory of a box, at most: touching a page takes a processor 0.5 us or more
PROGRAM = "/box/program.py"  # where bubblewrap shows the program
# By default libraries for arrays start a thread for each processor of the machine: more than the limit of processes.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SHARED_MEMORY_BYTES = 16 << 20
BOX_UIDS = 1 << 30  # uids from here on are one per box, so that no box counts another's processes
COUNTS_WAITING = Path("/proc/self/schedstat").exists()
_counter = itertools.count()

# Sets the limits of a program that runs without bubblewrap, then runs it. `prctl(1, 9)` is PR_SET_PDEATHSIG, SIGKILL:
# the kernel ends it with its parent.
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
sys.path[:1] = settings["packages"]
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
    machine. `wall_guard_s` bounds only what neither counts: waiting for a processor. `memory_bytes` bounds the address
    space of each process, enforced by the kernel, and the resident memory of all of them together, by measurements that
    come the faster, the less is left.
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
            "RLIMIT_CPU": max(1, round(self.cpu_s + 0.499)) + 1,  # rounded up, and one more: if the watch fails
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
    """A uid for one box: the process and a counter make it differ from those of other boxes that run now."""
    return BOX_UIDS + (os.getpid() % (1 << 22)) * 128 + next(_counter) % 128


def bubblewrap_command(
    limits: Limits,
    interpreter: Interpreter,
    *,
    program_fd: int,
    filter_fd: int | None,
    report_fd: int,
    drop_root: bool,
    packages: Sequence[str] = (),
) -> list[str]:
    """The command that starts a box: bwrap runs sh, that setpriv (with `drop_root`), that prlimit, that python.

    With `drop_root` (we are root) mounts are made as root and the program gets a uid of its own; without, bubblewrap
    makes a user namespace. It writes to `report_fd` that the program has ended, if it ever was there.

    A shell is the first process (pid 1) of the pid namespace. The kernel kills it with bwrap (PR_SET_PDEATHSIG, which a
    program could undo for itself, and a change of uid clears), and with pid 1 everything inside. It waits for the
    program, so that bwrap knows the processor time that was used.
    """
    # `--as-pid-1`: bubblewrap adds no init of its own, so that the shell is pid 1. `--new-session`: the program cannot
    # type into our terminal (TIOCSTI).
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += [] if drop_root else ["--unshare-user"]
    command += ["--json-status-fd", str(report_fd)]  # closed in the box
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
    command += [word for name, value in ONE_THREAD.items() for word in ("--setenv", name, value)]
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
    """Folders of installed packages, which are hidden from programs: a benchmark's answers may be among them."""
    roots = [Path(prefix, "lib"), Path("/usr/lib"), Path("/usr/local/lib")]
    found = [path for root in roots for name in ("site", "dist") for path in root.glob(f"python3*/{name}-packages")]
    return tuple(dict.fromkeys(str(path) for path in found if path.is_dir() and not path.is_symlink()))


def _visible_parents(path: str) -> list[str]:
    """Options that make the parent folders of `path` readable: bubblewrap's own would be readable by root only."""
    arguments: list[str] = []
    for parent in reversed(Path(path).parents[:-1]):
        if str(parent) != "/tmp":
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return arguments


def _python_options(packages: Sequence[str]) -> list[str]:
    if not packages:
        return ["-s", "-S", "-B"]
    # `packages` replace the working folder in `sys.path`: it has copies of the program's files, which tests must not
    # import.
    start = f"import runpy, sys; sys.path[:1] = {list(packages)!r}; sys.argv = ['{PROGRAM}']; "
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

    With `uid` (we are root) the program runs under that uid, which no other box has: the kernel counts processes by
    user, so its limit counts only the program's. With `reads_all` it starts as root and changes to that uid here,
    keeping the capability to read all files: an interpreter in root's home can be read by root only. Without `uid` its
    processes count together with those of our user, which are added to the limit (root has no such limit: the caller
    counts threads then).
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

    `excused_s` is waiting while only one thread of the box was active, which only other programs can have caused.
    `threads` is the number of living threads, without the processes that start the program. `memory_bytes` is resident
    memory without mapped files; a page that processes share counts once for each of them.
    """

    cpu_s: float
    waited_s: float
    awake: bool
    memory_bytes: int
    processes: tuple[int, ...]
    threads: int = 0
    excused_s: float = 0.0

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
    """Times and memory of a process and all its descendants, ended ones included, read from /proc.

    The program is the one at depth `complete`, below those that only start it. While fewer live, it is still being
    started, which counts as awake.
    """

    def __init__(self, pid: int, *, complete: int = 1):
        self._root, self._complete = pid, complete
        self._seen: dict[int, tuple[float, float]] = {}  # pid -> seconds on processors and waiting, when last seen
        self._threads: dict[int, _Times] = {}  # likewise by thread, of those that lived at the last look
        self._runner = 0  # pid of the program itself: the first process below those that start it
        self._excused_s = 0.0

    def read(self) -> ProcessUsage:
        """Resources used until now."""
        awake, memory, reaped_s, living, alive = False, 0, 0.0, [], 1 - self._complete
        threads: dict[int, _Times] = {}
        stack = [(self._root, 1)]
        while stack:
            pid, depth = stack.pop()
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                times, children = _threads(pid)
                kept_bytes = _resident_bytes(pid)
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
            living.append(pid)
            alive += len(times)
            stack += [(child, depth + 1) for child in children]
            awake |= fields[0] in b"RD"  # running or runnable, or in an uninterruptible wait (disk)
            memory += kept_bytes
            process_s, reaped = (_TICK_S * (int(fields[i]) + int(fields[i + 1])) for i in (11, 13))
            reaped_s += reaped
            cpu_s, waited_s = (sum(each[kind] for each in times.values()) for kind in (0, 1))
            self._seen[pid] = (max(process_s, cpu_s), waited_s)
            if depth >= self._complete:
                self._runner = self._runner or pid
                threads |= times
        cpu_s = sum(cpu for cpu, _ in self._seen.values())
        cpu_s = max(cpu_s, reaped_s + sum(self._seen[pid][0] for pid in living))
        waited_s = sum(waited for _, waited in self._seen.values())
        awake |= len(living) < self._complete
        if self._runner:
            self._excuse(threads)
        else:  # the program has not started: nothing of it can have made the starters wait
            self._excused_s = waited_s
        return ProcessUsage(cpu_s, waited_s, awake, memory, tuple(living), alive, self._excused_s)

    def _excuse(self, threads: dict[int, "_Times"]) -> None:
        """Add the waiting since the last look if only one thread was active then. The runner counts only if no other
        thread was: where it runs the program in a process of its own, it wakes just to look at the time."""
        active = [thread for thread, times in threads.items() if times != self._threads.get(thread)]
        active = [thread for thread in active if thread != self._runner] or active
        if len(active) == 1:
            _, before_s = self._threads.get(active[0], (0.0, 0.0))
            self._excused_s += threads[active[0]][1] - before_s
        self._threads = threads


_Times = tuple[float, float]  # seconds on a processor and waiting for one


def _threads(pid: int) -> tuple[dict[int, _Times], list[int]]:
    """Times of a process's living threads, and the child processes that these have started."""
    times, children = {}, []
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (twice as fast)
        times[int(thread)] = (0.0, 0.0)
        with contextlib.suppress(OSError):
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
            cpu, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes().split()
            times[int(thread)] = (int(cpu) / 1e9, int(waited) / 1e9)
    return times, children


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()  # its name, which it chooses, may be no text
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))


# ------------------------------------------------------------------------------------------------------- control groups

_CONTROLLERS = {"memory", "pids"}
_KERNEL_BYTES = 64 << 20  # of a box: page tables, pipes and sockets, and the programs that start its own
_STARTERS = 3  # bubblewrap outside, the shell inside, and what becomes the program


class ControlGroup:
    """A control group (cgroup v2) of one box: the kernel itself holds all its processes together to their limits.

    It covers what measuring processes from outside misses: the first moments of a box, a machine too busy to measure,
    and kernel memory. Files in the box's /tmp and /dev/shm count, too. A box that exceeds the memory is killed whole.

    Args:
        parent: folder of a group whose children have the controllers of memory and processes.

    Raises:
        OSError: there can be no such group.
    """

    def __init__(self, parent: Path, limits: Limits):
        self.folder = parent / f"flowjax-box-{os.getpid()}-{next(_counter)}"
        memory_bytes = limits.memory_bytes + limits.disk_bytes + _SHARED_MEMORY_BYTES + _KERNEL_BYTES
        settings = {"memory.max": memory_bytes, "memory.oom.group": 1, "pids.max": limits.processes + _STARTERS}
        self.folder.mkdir()
        try:
            for name, value in settings.items():
                (self.folder / name).write_text(str(value))
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count what is swapped out
                (self.folder / "memory.swap.max").write_text("0")
        except OSError:
            self.close()
            raise

    def holding(self, command: Sequence[str]) -> list[str]:
        """The command, wrapped so that it enters the group before it does anything: no child of it can be outside."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def close(self) -> None:
        """Kill whatever is left in the group, and remove it."""
        with contextlib.suppress(OSError):  # before Linux 5.14 there is no such file: bubblewrap ends its namespace
            (self.folder / "cgroup.kill").write_text("1")
        for pause_s in (0.0, 0.001, 0.01, 0.1, 1.0):  # a group is empty some time after its processes were killed
            time.sleep(pause_s)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return


@functools.cache
def groups_parent() -> Path | None:
    """The folder in which boxes have their control groups; None where this process may not make any.

    It is the group of this process, if the kernel lets that have children with controllers (beside processes of its own
    only the root group may), or the group above, if its children have these controllers already and we may write it.
    """
    try:
        mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
        mounted = next(Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2")
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        ours = mounted / next(line[4:] for line in groups if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    for parent in (ours, ours.parent):
        if parent.is_relative_to(mounted) and ".." not in parent.parts and _may_have_boxes(parent, parent == ours):
            return parent
    return None


def _may_have_boxes(parent: Path, give: bool) -> bool:
    """True where a trial group can be made and entered. With `give`, controllers that `parent`'s children lack are
    enabled first: never in the group above, whose other children are not ours."""
    given = parent / "cgroup.subtree_control"
    try:
        if not set(given.read_text().split()) >= _CONTROLLERS:
            if not give:
                return False
            given.write_text(" ".join(f"+{name}" for name in sorted(_CONTROLLERS)))
        group = ControlGroup(parent, Limits())
    except OSError:
        return False
    try:
        return subprocess.run(group.holding(["true"]), capture_output=True, timeout=10.0).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # no shell, or a machine that is too busy
        return False
    finally:
        group.close()


# --------------------------------------------------------------------------------------------------- system-call filter

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)
_NEW_NAMESPACE = 0x7E020080  # CLONE_NEW{USER,PID,NET,UTS,IPC,NS,CGROUP,TIME}
_AF_UNIX, _SOL_SOCKET, _SIZES_OF_BUFFERS, _F_SETPIPE_SZ = 1, 1, (7, 8, 32, 33), 1031
_NEWEST = 467  # the highest call number that was considered for this list

# name:x86-64:arm64 of calls that are allowed whatever the arguments. None is among them by which a program could make
# itself wait for a processor (priority, scheduling class, affinity): that would be taken for the machine's doing.
_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291
lseek:8:62 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286
pwritev2:328:287 access:21:- faccessat:269:48 faccessat2:439:439 pipe:22:- pipe2:293:59 dup:32:23 dup2:33:-
dup3:292:24 flock:73:32 fsync:74:82 fdatasync:75:83 sync_file_range:277:84 syncfs:306:267 sync:162:81
truncate:76:45 ftruncate:77:46 fallocate:285:47 fadvise64:221:223 readahead:187:213 getdents:78:-
getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:-
mkdirat:258:34 rmdir:84:- creat:85:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:-
symlinkat:266:36 readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452
chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 umask:95:166 utime:132:- utimes:235:- utimensat:280:88
futimesat:261:- mknod:133:- mknodat:259:33 openat:257:56 openat2:437:437 close_range:436:436
copy_file_range:326:285 sendfile:40:71 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 statfs:137:43 fstatfs:138:44 ioctl:16:29

mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233

poll:7:- ppoll:271:73 select:23:- pselect6:270:72 eventfd:284:- eventfd2:290:19 signalfd:282:- signalfd4:289:74
epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441
futex:202:98 futex_waitv:449:449 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456

rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
time:201:- times:100:153 getitimer:36:102 setitimer:38:103 alarm:37:- pause:34:- timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 timerfd_create:283:85
timerfd_settime:286:86 timerfd_gettime:287:87

fork:57:- vfork:58:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
kill:62:129 tkill:200:130 tgkill:234:131 pidfd_open:434:434 pidfd_send_signal:424:424 set_tid_address:218:96
set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 membarrier:324:283 arch_prctl:158:- prctl:157:167
set_thread_area:205:- get_thread_area:211:- sched_yield:24:124 sched_getaffinity:204:123
sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127 sched_getattr:315:275
getcpu:309:168 getpriority:140:141 ioprio_get:252:31 getpid:39:172 getppid:110:173
gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
getgroups:115:158 setresuid:117:147 setresgid:119:149 setgroups:116:159 getpgid:121:155 setpgid:109:154
getpgrp:111:- getsid:124:156 setsid:112:157 capget:125:90 capset:126:91 getrlimit:97:163 setrlimit:160:164
prlimit64:302:261 getrusage:98:165 sysinfo:99:179 uname:63:160 getrandom:318:278

connect:42:203 accept:43:202 accept4:288:242 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
sendmmsg:307:269 recvmmsg:299:243 shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204
getpeername:52:205 getsockopt:55:209
"""
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_FCNTL, _SETSOCKOPT = (72, 25), (54, 208)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Instruction = tuple[int, int, int, int]  # operation, jump where true, jump where false, constant


def seccomp_filter() -> bytes | None:
    """The filter for this machine as `bwrap --seccomp` reads it; None on an architecture it is not written for."""
    if platform.machine() not in ARCHITECTURES:
        return None
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions(platform.machine()))


def allowed(machine: str) -> dict[str, int]:
    """Calls that are allowed whatever their arguments: their numbers by name."""
    column = ARCHITECTURES[machine][0]
    entries = [entry.split(":") for entry in _ALLOWED.split()]
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}


def instructions(machine: str) -> list[Instruction]:
    """The filter for a machine, as instructions of classic BPF that return a verdict on a system call.

    `clone3` is answered with ENOSYS: its flags are behind a pointer, which a filter cannot read, and C libraries then
    fall back to `clone`, whose flags are checked. Sockets may be of AF_UNIX only, and pipes and sockets may not be
    enlarged.
    """
    column, architecture = ARCHITECTURES[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | _EPERM)
    program: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture)]
    program += [(_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for low, high in _runs(allowed(machine).values()):
        program += [(_JUMP_AT_LEAST, 0, 2, low), (_JUMP_AT_LEAST, 1, 0, high + 1), (_RETURN, 0, 0, _ALLOW)]
    program += _where(_CLONE3[column], [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    program += _where(
        _CLONE[column],
        [(_LOAD, 0, 0, _ARGUMENTS[0]), (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACE), refuse, (_RETURN, 0, 0, _ALLOW)],
    )
    family = [(_LOAD, 0, 0, _ARGUMENTS[0]), (_JUMP_EQUAL, 0, 1, _AF_UNIX), (_RETURN, 0, 0, _ALLOW)]
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        program += _where(number, [*family, (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT)])
    program += _where(
        _FCNTL[column],
        [(_LOAD, 0, 0, _ARGUMENTS[1]), (_JUMP_EQUAL, 0, 1, _F_SETPIPE_SZ), refuse, (_RETURN, 0, 0, _ALLOW)],
    )
    sizes = [instruction for size in _SIZES_OF_BUFFERS for instruction in ((_JUMP_EQUAL, 0, 1, size), refuse)]
    of_socket = [(_LOAD, 0, 0, _ARGUMENTS[1]), (_JUMP_EQUAL, 1, 0, _SOL_SOCKET), (_RETURN, 0, 0, _ALLOW)]
    program += _where(_SETSOCKOPT[column], [*of_socket, (_LOAD, 0, 0, _ARGUMENTS[2]), *sizes, (_RETURN, 0, 0, _ALLOW)])
    # Calls newer than the list, and those of the x32 ABI (whose numbers are higher), do not exist (ENOSYS); all others
    # are forbidden (EPERM).
    return [*program, (_JUMP_AT_LEAST, 0, 1, _NEWEST + 1), (_RETURN, 0, 0, _ERRNO | _ENOSYS), refuse]


def _where(number: int, then: list[Instruction]) -> list[Instruction]:
    """Instructions for one system call, skipped for others. `then` has to end with a verdict."""
    return [(_JUMP_EQUAL, 0, len(then), number), *then]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges, both ends included."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
