"""What a program uses: time told apart from waiting, memory of a box bounded. A busy machine is a clock told so."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.grading import code, sandbox
from flowjax.grading.code import CallCase, Check, Suite, judge
from flowjax.grading.sandbox import Box, Limits, NoProcessorError, require_isolation, run
from flowjax.grading.sandbox_processes import ProcessTree, ProcessUsage

WITHOUT = bool(os.environ.get("FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP"))
LIMITS = Limits(cpu_s=2.0, idle_s=1.0, wall_guard_s=20.0, memory_bytes=64 << 20)
PATIENT = Limits(cpu_s=60.0, idle_s=60.0, wall_guard_s=240.0)
needs_bubblewrap = pytest.mark.skipif(WITHOUT, reason="FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP is set")


class _Tree:
    """A box whose time passes as told: seconds of each second on a processor, and waiting for one; of these a share
    that only others can have caused."""

    def __init__(self, clock: "_Clock", cpu: float, waited: float, *, awake: bool, excused: float = 1.0):
        self._clock, self._cpu, self._waited, self._awake, self._excused = clock, cpu, waited, awake, excused

    def read(self) -> ProcessUsage:
        cpu_s, waited_s = self._cpu * self._clock.now_s, self._waited * self._clock.now_s
        return ProcessUsage(cpu_s, waited_s, self._awake, 1 << 20, (), excused_s=self._excused * waited_s)


class _Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("cpu", "waited", "awake", "answered", "status", "at_s"),
    [
        (1.0, 0.0, True, False, "timeout", 2.0),  # computes
        (0.1, 0.9, True, False, "timeout", 20.0),  # computes, on a busy machine: 2 s of 20
        (0.02, 0.98, True, False, "no_processor", 20.0),  # and on one that is busier still
        (0.0, 1.0, False, False, "no_processor", 20.0),
        (0.0, 0.0, False, False, "timeout", 1.0),  # sleeps
        (0.05, 0.85, False, False, "timeout", 10.0),  # sleeps a tenth of the time
        (0.0, 0.0, True, False, "timeout", 3.0),  # is awake by its own account, and does nothing: both limits are over
        (0.1, 0.5, True, False, "timeout", 6.0),  # likewise, on a busy machine
        (0.01, 0.0, False, True, "timeout", 20.0),  # talks now and then, and does nothing
    ],
)
def test_time_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, cpu: float, waited: float, awake: bool, answered: bool, status: str, at_s: float
):
    clock = _Clock()
    monkeypatch.setattr(sandbox, "time", clock)
    watch, tree = sandbox._Watch(LIMITS), _Tree(clock, cpu, waited, awake=awake)
    found = None
    while found is None and clock.now_s < 30:
        clock.now_s += 0.06
        found = watch.look(tree, answered=answered)  # pyright: ignore[reportArgumentType]
    assert found == status
    assert clock.now_s == pytest.approx(at_s, abs=0.2)


@pytest.mark.parametrize(("excused", "status", "at_s"), [(0.0, "timeout", 3.0), (1.0, "no_processor", 20.0)])
def test_waiting_that_the_box_can_have_caused_is_no_excuse(
    monkeypatch: pytest.MonkeyPatch, excused: float, status: str, at_s: float
):
    clock = _Clock()
    monkeypatch.setattr(sandbox, "time", clock)
    watch, tree = sandbox._Watch(LIMITS), _Tree(clock, 0.02, 0.98, awake=True, excused=excused)
    found = None
    while found is None and clock.now_s < 30:
        clock.now_s += 0.06
        found = watch.look(tree, answered=False)  # pyright: ignore[reportArgumentType]
    assert (found, clock.now_s) == (status, pytest.approx(at_s, abs=0.2))


def test_waiting_is_told_when_it_ends(monkeypatch: pytest.MonkeyPatch):
    """A program waits for 0.95 s of every second, and the kernel says so at the end of it: twenty looks saw nothing."""
    clock = _Clock()
    monkeypatch.setattr(sandbox, "time", clock)

    class Late(_Tree):
        def read(self) -> ProcessUsage:
            waits = int(self._clock.now_s)
            return ProcessUsage(0.05 * waits, 0.95 * waits, True, 1 << 20, (), excused_s=0.95 * waits)

    watch, tree, found = sandbox._Watch(LIMITS), Late(clock, 0.0, 0.0, awake=True), None
    while found is None and clock.now_s < 19:
        clock.now_s += 0.06
        found = watch.look(tree, answered=False)  # pyright: ignore[reportArgumentType]
    assert found is None


# Each child lives too short to be seen computing, and goes on as its own child, which nobody waits for: its time on a
# processor is counted nowhere. They take turns on it, and so all of them have waited.
RELAYS = """
import ctypes, os, signal, time
def f(x):
    signal.setitimer(signal.ITIMER_PROF, 0); signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    for _ in range(6):
        if os.fork() == 0:
            while True:
                start_s = time.process_time()
                while time.process_time() - start_s < 0.002: pass
                try:
                    if os.fork(): os._exit(0)
                except OSError: pass
    time.sleep(1000)
"""


@needs_bubblewrap
def test_a_program_does_not_make_itself_wait():
    limits = Limits(cpu_s=2.5, idle_s=0.5, wall_guard_s=20.0)
    verdict = judge(RELAYS, Suite((CallCase((1,), 1),), "f"), limits, case_cpu_s=60.0)
    assert verdict.remarks == ("took too long",)
    assert verdict.seconds < 5


# Three seconds on a processor, for what may take half of one.
_EVADES = {
    "timers switched off": """
import signal, time
def f(x):
    signal.setitimer(signal.ITIMER_PROF, 0); signal.setitimer(signal.ITIMER_REAL, 0)
    while time.process_time() < 3: pass
    return 2 * x""",
    "a thread, and no exception taken": """
import threading, time
def f(x):
    done = []
    def work():
        while time.process_time() < 3: pass
        done.append(2 * x)
    threading.Thread(target=work).start()
    while True:
        try:
            while not done: time.sleep(0.05)
            return done[0]
        except BaseException: pass""",
    "another process": """
import os, time
def f(x):
    ends = os.pipe()
    if os.fork() == 0:
        while time.process_time() < 3: pass
        os.write(ends[1], b"%d" % (2 * x))
        os._exit(0)
    while True:
        try: return int(os.read(ends[0], 9))
        except BaseException: pass""",
}


@pytest.mark.parametrize("case", [CallCase((21,), 42), Check("assert f(21) == 42")], ids=["call", "check"])
@pytest.mark.parametrize("way", _EVADES)
def test_a_case_has_its_time_whatever_becomes_of_its_clock(way: str, case: CallCase | Check):
    verdict = judge(_EVADES[way], Suite((case,), "f"), PATIENT, case_cpu_s=0.5, allow_none=WITHOUT)
    assert verdict.remarks == ("took too long",)


@pytest.mark.parametrize("way", _EVADES)
def test_what_takes_its_time_in_its_own_way_is_right_within_it(way: str):
    assert judge(_EVADES[way], Suite((CallCase((21,), 42),), "f"), PATIENT, case_cpu_s=30.0, allow_none=WITHOUT).success


def test_each_case_has_its_own_time():
    loop = "while time.process_time() < end: pass"
    program = f"import time\ndef f(x):\n    end = time.process_time() + 0.5\n    {loop}\n    return x"
    cases = tuple(CallCase((n,), n) for n in range(6))
    assert judge(program, Suite(cases, "f"), PATIENT, case_cpu_s=1.0, allow_none=WITHOUT).success


@needs_bubblewrap
def test_a_program_that_is_never_seen_asleep_has_its_time_all_the_same():
    """A process that waits in `vfork` is in the state of one that waits for a disk, which counts as awake."""
    program = """
import ctypes, os, signal, time
def f(x):
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.fork() == 0:
        ctypes.CDLL(None).vfork()
        time.sleep(1000)
    time.sleep(12)
    return x"""
    limits = Limits(cpu_s=1.0, idle_s=0.5, wall_guard_s=20.0)
    verdict = judge(program, Suite((CallCase((1,), 1),), "f"), limits, case_cpu_s=60.0)
    assert verdict.remarks == ("took too long",)
    assert verdict.seconds < 10


def test_time_between_two_waits_is_not_the_programs(monkeypatch: pytest.MonkeyPatch):
    clock = _Clock()
    monkeypatch.setattr(sandbox, "time", clock)
    watch, tree = sandbox._Watch(LIMITS), _Tree(clock, 0.0, 0.0, awake=False)
    status = None
    for _ in range(20):
        clock.now_s += 30.0  # whoever reads was busy elsewhere
        watch.begin()
        clock.now_s += 0.06
        status = watch.look(tree, answered=False)  # pyright: ignore[reportArgumentType]
    assert status == "timeout"  # 20 waits of 0.06 s asleep are over a second
    assert clock.now_s > 500


def _always_waiting(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The first boxes read as if they had only waited for a processor, the others as if they never had."""
    read, seen = ProcessTree.read, set()

    def waited(tree: ProcessTree) -> ProcessUsage:
        seen.add(id(tree))
        kept.append(tree)  # or its id might be another's
        if len(seen) > times:
            return replace(read(tree), excused_s=0.0)
        return ProcessUsage(0.0, time.monotonic(), True, 0, (), excused_s=time.monotonic())

    kept: list[ProcessTree] = []
    monkeypatch.setattr(ProcessTree, "read", waited)


@pytest.mark.parametrize("busy", [1, 2])
def test_a_program_that_waited_for_a_processor_is_judged_again(monkeypatch: pytest.MonkeyPatch, busy: int):
    where = require_isolation(allow_none=WITHOUT)
    _always_waiting(monkeypatch, busy)
    limits = Limits(cpu_s=30.0, idle_s=30.0, wall_guard_s=0.2)
    slow = "import time\ndef f(x):\n    time.sleep(0.6)\n    return x"
    if busy == 1:  # the second box is read for real: it had its time
        limits = Limits(wall_guard_s=0.3, idle_s=0.1)
        assert judge(slow, Suite((CallCase((1,), 1),), "f"), limits, isolation=where).remarks
        return
    with pytest.raises(NoProcessorError, match="wall_guard_s"):
        judge(slow, Suite((CallCase((1,), 1),), "f"), limits, isolation=where)


def test_run_gives_up_on_a_machine_that_is_too_busy(monkeypatch: pytest.MonkeyPatch):
    where = require_isolation(allow_none=WITHOUT)
    _always_waiting(monkeypatch, 100)
    with pytest.raises(NoProcessorError, match="2 times"):
        run("import time; time.sleep(60)", limits=Limits(wall_guard_s=0.2), isolation=where)


def test_a_right_program_is_right_twelve_at_a_time():
    program = "def f(x):\n    total = 0\n    for n in range(300_000):\n        total += n\n    return x + x"
    limits = Limits(cpu_s=2.0, idle_s=1.0)
    verdicts: list[bool] = []

    def one() -> None:
        suite = Suite(tuple(CallCase((n,), 2 * n) for n in range(4)), "f")
        verdicts.append(judge(program, suite, limits, case_cpu_s=0.5, allow_none=WITHOUT).success)

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 12


MEMORY = {
    "two_processes": """
import os, time
os.fork()
x = bytearray(44 << 20)
for n in range(0, len(x), 4096): x[n] = 1
time.sleep(30)""",
    "shared_memory": """
import mmap, time, os
os.fork()
x = mmap.mmap(-1, 44 << 20)
for n in range(0, len(x), 4096): x[n] = 1
time.sleep(30)""",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", MEMORY)
def test_memory_of_all_processes_together_is_limited(name: str):
    limits = Limits(cpu_s=20.0, idle_s=20.0, memory_bytes=64 << 20)
    assert run(MEMORY[name], limits=limits).status == "killed"


class _GrowingTree:
    """A box whose memory grows as told: bytes a second, from one moment to the next."""

    def __init__(self, clock: "_Clock", growth: list[float]):
        self._clock, self._growth = clock, growth

    def held(self) -> int:
        steps = [min(1.0, max(0.0, self._clock.now_s / _GROWS_S - n)) for n in range(len(self._growth))]
        return int(sum(_GROWS_S * share * rate for share, rate in zip(steps, self._growth, strict=True)))

    def read(self) -> ProcessUsage:
        return _Growing(0.0, 0.0, True, self.held(), ())


class _Growing(ProcessUsage):
    def proportional_bytes(self) -> int:
        return self.memory_bytes


_GROWS_S = 0.025  # at one rate


@given(st.lists(st.floats(0.0, sandbox.GROWTH_BYTES_PER_S), min_size=20, max_size=20), st.integers(64, 1024))
@settings(deadline=None, max_examples=30)
def test_looks_come_the_faster_the_less_memory_is_left(growth: list[float], limit_mb: int):
    clock = _Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "time", clock)
        limits = Limits(cpu_s=9.0, idle_s=9.0, wall_guard_s=60.0, memory_bytes=limit_mb << 20)
        watch, tree = sandbox._Watch(limits), _GrowingTree(clock, growth)
        first_bytes = int(sandbox.WATCH_S * sandbox.GROWTH_BYTES_PER_S)  # while nothing is known of the box
        looks = 0
        while (status := watch.look(tree, answered=False)) is None and clock.now_s < 1.0:  # pyright: ignore[reportArgumentType]
            clock.now_s += watch.pause_s + 1e-6
            looks += 1
        most = (sandbox.SHORTEST_WATCH_S + 1e-5) * sandbox.GROWTH_BYTES_PER_S
        assert tree.held() <= max(limits.memory_bytes + most, 1.01 * first_bytes)
        assert status == ("killed" if tree.held() > limits.memory_bytes else None)
        assert looks <= 1.0 / sandbox.SHORTEST_WATCH_S + 1


def test_a_box_that_answers_fast_is_looked_at_too(monkeypatch: pytest.MonkeyPatch):
    clock = _Clock()
    monkeypatch.setattr(sandbox, "time", clock)
    watch, tree = sandbox._Watch(LIMITS), _GrowingTree(clock, [1e10] * 3)
    status = None
    while status is None and clock.now_s < 1.0:
        watch.begin()
        clock.now_s += 0.01
        status = watch.look(tree, answered=True)  # pyright: ignore[reportArgumentType]
    assert status == "killed" and clock.now_s < 0.1


def test_memory_that_is_shared_by_many_is_not_looked_at_without_end(monkeypatch: pytest.MonkeyPatch):
    """Reading it takes the kernel long: looks are five times as far apart as they take."""
    clock = _Clock()

    class Shared(ProcessUsage):
        def proportional_bytes(self) -> int:
            clock.now_s += 0.006
            return 63 << 20

    class Tree:
        def read(self) -> ProcessUsage:
            return Shared(0.0, 0.0, True, 500 << 20, ())

    monkeypatch.setattr(sandbox, "time", clock)
    watch = sandbox._Watch(LIMITS)
    clock.now_s = 0.06
    assert watch.look(Tree(), answered=False) is None  # pyright: ignore[reportArgumentType]
    assert watch.pause_s == pytest.approx(0.03)


KERNEL_MEMORY = {
    "pipes": """
import os, time
ends = []
try:
    while True: ends.append(os.pipe())
except OSError: pass
for read, write in ends:
    os.set_blocking(write, False)
    try:
        while True: os.write(write, b'x' * 65536)
    except OSError: pass
print(len(ends), flush=True)
time.sleep(30)""",
    "sockets": """
import socket, time
ends = []
try:
    while True: ends += socket.socketpair()
except OSError: pass
for end in ends:
    try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    except OSError: pass
    end.setblocking(False)
    try:
        while True: end.send(b'x' * 65536)
    except OSError: pass
print(len(ends), flush=True)
time.sleep(30)""",
    "sockets_of_all_processes": """
import os, socket, time
ready, done = os.pipe()
for n in range(7):
    if os.fork() == 0: break
else: n = 7
ends = []
try:
    while True: ends += socket.socketpair()
except OSError: pass
for end in ends:
    end.setblocking(False)
    try:
        while True: end.send(b'x' * 65536)
    except OSError: pass
if n < 7:
    os.write(done, b'.')
else:
    while n: n -= len(os.read(ready, n))
    print(8 * len(ends), flush=True)
time.sleep(30)""",
    "semaphores": """
import ctypes, time
libc = ctypes.CDLL(None)
print(sum(libc.semget(0, 32000, 0o600) >= 0 for _ in range(400)), flush=True)
time.sleep(30)""",
    "tmpfs": """
import os, time
n = 0
try:
    while True:
        n += 1
        open(f'/tmp/{n}', 'wb').write(b'x' * 1_000_000)
except OSError: pass
print(n, flush=True)
time.sleep(30)""",
}


def _machine_bytes() -> int:
    """Memory in use on this machine that no cache could give back."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    names = ("SUnreclaim", "Shmem", "KernelStack")
    return sum(int(facts[name].split()[0]) << 10 for name in names)


MOST_BYTES = {  # by docs/sandbox.md, with the limits below
    "pipes": 64 * (64 << 10),
    "sockets": 64 * (208 << 10),
    "sockets_of_all_processes": 8 * 64 * (208 << 10),
    "semaphores": 0,
    "tmpfs": 32 << 20,
}
_KEPT_BY_A_START = 24 << 20  # stacks and slabs of the processes, and what else this machine does in that moment


@needs_bubblewrap
@pytest.mark.parametrize("name", KERNEL_MEMORY)
def test_kernel_memory_of_a_box_stays_below_its_limit(name: str):
    """400 sets of semaphores took 1 GB. What others on this machine take meanwhile is no box's: of several tries the
    least counts."""
    limits = Limits(cpu_s=20.0, idle_s=20.0, memory_bytes=64 << 20, disk_bytes=32 << 20, processes=8, open_files=64)
    grown: list[int] = []
    for _ in range(8):
        before = _machine_bytes()
        with Box(KERNEL_MEMORY[name], limits, require_isolation()) as box:
            line = box.read_line()
            assert line is not None
            assert name != "semaphores" or line == b"0"
            grown.append(_machine_bytes() - before)
        if grown[-1] <= MOST_BYTES[name] + _KEPT_BY_A_START:
            return
    pytest.fail(f"{min(grown) >> 20} MiB or more, every time")


def test_judge_limits_leave_room_for_a_busy_machine():
    assert code.JUDGE_LIMITS.wall_guard_s >= 8 * (code.JUDGE_LIMITS.cpu_s + code.JUDGE_LIMITS.idle_s)
