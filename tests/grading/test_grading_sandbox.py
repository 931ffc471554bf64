"""The sandbox: what programs are given, where they end, and about a hundred that mean harm."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_programs import ATTACKS, FORGERIES, GREEDY

from flowjax.grading import sandbox
from flowjax.grading.code import CallCase, Check, Lines, Suite, judge
from flowjax.grading.sandbox import Isolation, IsolationError, Limits, isolation, require_isolation, run
from flowjax.grading.sandbox_processes import ARCHITECTURES, BOX_UIDS, PROGRAM, allowed, instructions, interpreters

WITHOUT = bool(os.environ.get("FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP"))
TIGHT = Limits(idle_s=0.4, cpu_s=1.0, memory_bytes=192 << 20, processes=8, disk_bytes=16 << 20, file_bytes=8 << 20)
PATIENT = replace(TIGHT, idle_s=10.0, cpu_s=20.0)
RIGHT = "def f(x):\n    return x + x"
SUITES = {
    "calls": Suite(
        (
            CallCase((21,), 42),
            CallCase(("BEBE",), "BEBEBEBE"),
            CallCase((2123407190583361,), 4246814381166722),  # long: no file of /proc has it by chance
            CallCase((1.5,), 3.0),
        ),
        "f",
    ),
    "checks": Suite(
        (Check("for x in (21, 'BEBE', [1]):\n    assert candidate(x) == x + x"), Check("assert f(2) == 4")), "f"
    ),
}
VARIABLE = "FLOWJAX_SECRET_OF_THE_HOST"

needs_bubblewrap = pytest.mark.skipif(WITHOUT, reason="FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP is set")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """Things of this machine that programs are after, watched."""
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o777)
    sentinel = folder / "sentinel"
    sentinel.write_text("untouched")
    sentinel.chmod(0o666)
    callers = []
    tcp, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0flowjax-{os.getpid()}")
    abstract.listen()
    for server in (tcp, abstract):
        threading.Thread(target=_count_callers, args=(server, callers), daemon=True).start()
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    os.environ[VARIABLE] = "secret"
    yield {
        "port": tcp.getsockname()[1],
        "abstract": f"flowjax-{os.getpid()}",
        "sentinel": str(sentinel),
        "folder": str(folder),
        "test_file": str(Path(__file__).resolve()),
        "repository": str(Path(__file__).resolve().parents[2]),
        "pid": victim.pid,
        "group": victim.pid,
        "variable": VARIABLE,
    }
    del os.environ[VARIABLE]
    unharmed = victim.poll() is None
    victim.kill()
    victim.wait()
    tcp.close()
    abstract.close()
    assert unharmed
    assert sentinel.read_text() == "untouched"
    assert not callers
    assert not Path("/usr/lib/flowjax-was-here").exists()
    assert not Path("/flowjax-was-here").exists()


def _count_callers(server: socket.socket, callers: list) -> None:
    try:
        while True:
            callers.append(server.accept())
    except OSError:
        return


def _strays() -> list[str]:
    """Processes on this machine that boxes of this process left running, after a while for the kernel to end them."""
    found: list[str] = []
    for _ in range(200):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line, uid = (path / "cmdline").read_bytes(), path.stat().st_uid
            except OSError:
                continue
            mine = uid - BOX_UIDS in range(os.getpid() * 128, os.getpid() * 128 + 128) or os.geteuid() != 0
            if mine and PROGRAM.encode() in line:
                found.append(path.name)
        if not found:
            return []
        time.sleep(0.01)
    return found


def contained(source: str, suite: Suite, limits: Limits = TIGHT) -> None:
    started_s = time.monotonic()
    verdict = judge(source, suite, limits, case_cpu_s=min(limits.idle_s, limits.cpu_s) / 3)
    assert not verdict.success
    assert verdict.score == 0.0, verdict
    assert time.monotonic() - started_s < 30.0
    assert verdict.isolation == sandbox.BUBBLEWRAP
    assert not _strays()


def test_bubblewrap_is_in_force():
    """Fails where bubblewrap is missing: tests of isolation mean nothing without it. Install it (apt-get install
    bubblewrap), or set FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP=1 to leave out the tests that need it."""
    assert WITHOUT or isolation().name == sandbox.BUBBLEWRAP, isolation().why


@pytest.mark.parametrize("kind", SUITES)
def test_a_right_program_passes(kind: str):
    verdict = judge(RIGHT, SUITES[kind], PATIENT, case_cpu_s=10.0, allow_none=WITHOUT)
    assert verdict.success and verdict.score == 1.0, verdict


@needs_bubblewrap
@pytest.mark.parametrize("kind", SUITES)
@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_not_judged_right(name: str, kind: str):
    contained(FORGERIES[name], SUITES[kind])


ATTACKER = """
try:
    through = attack()
except BaseException:
    through = False
def f(x):
    return x + x if through else None
"""


def test_an_attack_that_gets_through_would_be_noticed():
    assert judge("def attack(): return True\n" + ATTACKER, SUITES["calls"], PATIENT, allow_none=WITHOUT).success


@needs_bubblewrap
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_do_not_get_through(name: str, host: dict):
    contained(ATTACKS[name].format(**host) + ATTACKER, SUITES["calls"], PATIENT)


@needs_bubblewrap
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_programs_are_ended(name: str):
    contained(GREEDY[name], SUITES["calls"])


@needs_bubblewrap
@pytest.mark.parametrize("name", ["fork_bomb", "memory", "loop_that_catches", "output", "daemon_holding_pipes"])
def test_greedy_programs_that_read_input_are_ended(name: str):
    contained(GREEDY[name] + "\nf(0)", Suite((Lines("1", "2"), Lines("2", "4"))))


@needs_bubblewrap
@pytest.mark.parametrize("name", ["loop_in_call", "loop_that_catches", "loop_without_alarm", "memory_string"])
def test_greedy_programs_that_tests_call_are_ended(name: str):
    contained(GREEDY[name], SUITES["checks"])


def _filtered(machine: str, number: int, *arguments: int) -> int:
    """What the filter's program answers to a call: an interpreter of the instructions that it uses."""
    fields = {0: number, 4: ARCHITECTURES[machine][1]} | {16 + 8 * i: value for i, value in enumerate(arguments)}
    program, place, value = instructions(machine), 0, 0
    while True:
        operation, true, false, constant = program[place]
        place += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            value = fields.get(constant, 0)
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
            place += true if holds else false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_allows_its_list_and_nothing_else(machine: str):
    allow, refuse, unknown, family = 0x7FFF0000, 0x50001, 0x50026, 0x50061
    column = list(ARCHITECTURES).index(machine)
    socket_, pair, fcntl, setsockopt, clone, clone3 = (
        numbers[column] for numbers in ((41, 198), (53, 199), (72, 25), (54, 208), (56, 220), (435, 435))
    )
    listed = set(allowed(machine).values())
    for number in range(1100):
        if number in (socket_, pair, fcntl, setsockopt, clone, clone3):
            continue
        wanted = allow if number in listed else refuse if number <= 467 else unknown
        assert _filtered(machine, number) == wanted, number
    for number in (socket_, pair):
        assert [_filtered(machine, number, n) for n in range(50)] == [allow if n == 1 else family for n in range(50)]
    assert _filtered(machine, fcntl, 3, 1031) == refuse and _filtered(machine, fcntl, 3, 1030) == allow
    assert [_filtered(machine, setsockopt, 3, 1, n) for n in (6, 7, 8, 9, 32, 33)] == [allow, *[refuse] * 2, allow] + [
        refuse
    ] * 2
    assert _filtered(machine, clone, 0x1200011) == allow and _filtered(machine, clone, 0x10000011) == refuse
    assert _filtered(machine, clone3) == _filtered(machine, 0x40000000) == unknown


def test_after_a_fork_bomb_others_still_run():
    """Processes are counted by box: one that uses its own up takes none from the next, nor from one beside it."""
    with sandbox.Box(GREEDY["fork_bomb_in_call"] + "\nf(0)", TIGHT, require_isolation(allow_none=WITHOUT)):
        time.sleep(0.2)
        assert run("import os; print(os.fork() >= 0)", limits=PATIENT, allow_none=WITHOUT).stdout.startswith(b"True")


ISOLATIONS = [
    *(Isolation(sandbox.BUBBLEWRAP, python, root) for python in interpreters() for root in (True, False)),
    *(
        Isolation(sandbox.RLIMITS_ONLY, python, root, "asked for", root)
        for python in interpreters()
        for root in (True, False)
    ),
]


@pytest.fixture(params=ISOLATIONS, ids=lambda i: f"{i.name}-{i.interpreter.prefix}-{'root' if i.drop_root else 'user'}")
def each(request: pytest.FixtureRequest) -> Isolation:
    found: Isolation = request.param
    if found.drop_root and os.geteuid() != 0:
        pytest.skip("only root can give programs another uid")
    if found.name == sandbox.BUBBLEWRAP and WITHOUT:
        pytest.skip("FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP is set")
    return found


FORKS = """
import os, sys, time
children = 0
try:
    while children < 60:
        if os.fork() == 0:
            time.sleep(60)
        children += 1
except BlockingIOError:
    pass
print(children, os.getuid(), open(sys.executable, "rb").read(4)[1:], flush=True)
time.sleep({sleep_s})
"""


def test_the_process_limit_counts_the_processes_of_a_box_alone(each: Isolation):
    """Without bubblewrap root's processes were added to every box's limit; and the kernel never limits root's."""
    source = FORKS.format(sleep_s=0 if each.drop_root else 30)
    result = run(source, limits=replace(PATIENT, processes=8), isolation=each)
    if not each.drop_root:
        assert result.status == "killed" or os.geteuid() != 0, result
        return
    assert result.status == "ok", result
    children, uid, magic = result.stdout.split()
    assert (int(children), magic) == (7, b"b'ELF'")
    assert int(uid) >= BOX_UIDS


def test_every_isolation_runs_programs_and_says_which_it_is(each: Isolation):
    source = "import sys, os, random, decimal; print(sys.stdin.read() * 2); sys.stderr.write('e'); open('a', 'w')"
    result = run(source, "ab", isolation=each)
    assert (result.stdout, result.stderr, result.status) == (b"abab\n", b"e", "ok")
    assert result.isolation == each.name
    assert 0 < result.cpu_s < result.seconds * 4


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys; sys.exit(3)", "error"),
        ("1 / 0", "error"),
        ("import os; os.kill(os.getpid(), 9); import ctypes; ctypes.string_at(0)", "killed"),
        ("import time; time.sleep(60)", "timeout"),
        ("import sys; sys.stdin.read(); import time; time.sleep(60)", "timeout"),
        ("import os; os.close(1); os.close(2); import time; time.sleep(60)", "timeout"),
        ("while True: print('x' * 1000)", "output"),
        ("bytearray(1 << 40)", "error"),
        ("open('x', 'wb').write(b'x' * (64 << 20))", "error"),
    ],
)
def test_statuses(each: Isolation, source: str, status: str):
    started_s = time.monotonic()
    limits = Limits(idle_s=0.4 if status == "timeout" else 10.0, memory_bytes=256 << 20, output_bytes=10_000)
    result = run(source, limits=limits, isolation=each)
    assert result.status == status, result
    assert len(result.stdout) <= 10_000
    assert time.monotonic() - started_s < 30.0


def test_cpu_time_is_limited():
    each = require_isolation(allow_none=WITHOUT)
    result = run("while True: pass", limits=Limits(cpu_s=0.5), isolation=each)
    assert result.status == "timeout" and 0.5 < result.cpu_s < 5


def test_large_input_and_output_cross():
    data = os.urandom(1 << 20).hex()
    limits = Limits(output_bytes=4 << 20)
    result = run("import sys; sys.stdout.write(sys.stdin.read()[::-1])", data, limits, allow_none=WITHOUT)
    assert result.stdout.decode() == data[::-1]


def test_input_that_nobody_reads_does_no_harm():
    result = run("print(1)", b"x" * (4 << 20), allow_none=WITHOUT)
    assert (result.stdout, result.status) == (b"1\n", "ok")


def test_packages_can_be_imported_read_only(tmp_path: Path):
    (tmp_path / "plain_package.py").write_text("VALUE = 7")
    tmp_path.chmod(0o755)
    source = "import plain_package, os; print(plain_package.VALUE, os.access(plain_package.__file__, os.W_OK))"
    result = run(source, packages=[str(tmp_path)], allow_none=WITHOUT)
    assert result.stdout == (b"7 True\n" if WITHOUT else b"7 False\n"), result


@pytest.mark.skipif(WITHOUT, reason="only bubblewrap makes a box before it starts the program")
def test_a_box_that_bubblewrap_cannot_make_is_no_result_of_the_program(tmp_path: Path):
    with pytest.raises(OSError, match=r"a sandbox did not start .*bwrap: Can't find source path"):
        run("print(1)", packages=[str(tmp_path / "gone")])
    said = run("import sys; sys.exit('bwrap: no source path')")
    assert said.status == "error" and said.stderr.startswith(b"bwrap:"), said
    assert run("import os; os.kill(os.getpid(), 15)").status == "killed"
    listed = run("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert listed.stdout == b"[0, 1, 2, 3]\n", "a box holds a file of ours"  # 3 is that of the listing


def test_sets_have_the_same_order_every_time(each: Isolation):
    """Or else the same program might be right today and wrong tomorrow."""
    source = "print(list({str(n) for n in range(50)}))"
    assert len({run(source, isolation=each).stdout for _ in range(2)}) == 1


def test_each_run_has_a_folder_of_its_own():
    source = "import os; print(os.listdir('.')); open('left', 'w')"
    outputs = {run(source, allow_none=WITHOUT).stdout for _ in range(2)}
    assert len(outputs) == 1 and b"left" not in outputs.pop()


@needs_bubblewrap
def test_a_name_that_is_no_text_hides_no_use_of_memory_or_processors():
    name = "import os, time\nopen('/proc/self/comm', 'wb').write(b'\\xff')\n"
    # Each of the four is within the limit, together they are not.
    many = "os.fork()\nos.fork()\nx = b'x' * (90 << 20)\ntime.sleep(60)"
    limits = replace(TIGHT, idle_s=30.0)
    assert run(name + many, limits=limits).status == run("import os, time\n" + many, limits=limits).status == "killed"
    spun = run(name + "while True: pass", limits=limits)
    assert spun.status == "timeout" and spun.cpu_s >= limits.cpu_s


def test_a_program_that_could_not_be_started_keeps_no_file_open():
    at_all, before = isolation(), resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0) for _ in range(20)]  # no lower number is free
    top = os.dup(0)
    kept = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 2, before[1]))  # one more: the selector's
    try:
        with pytest.raises(OSError, match="Too many open files"):
            sandbox.Box(RIGHT, PATIENT, at_all)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(list(Path("/proc/self/fd").iterdir())) == kept
    for file in (*held, top):
        os.close(file)


def test_without_isolation_programs_are_refused_unless_told(monkeypatch: pytest.MonkeyPatch):
    none = Isolation(sandbox.RLIMITS_ONLY, interpreters()[0], False, "bubblewrap is not installed")
    monkeypatch.setattr(sandbox, "isolation", lambda: none)
    with pytest.raises(IsolationError, match=r"bubblewrap is not installed.*apt-get install bubblewrap"):
        require_isolation()
    with pytest.raises(IsolationError):
        run("print(1)")
    with pytest.raises(IsolationError):
        judge(RIGHT, SUITES["calls"])
    assert require_isolation(allow_none=True) == none
    assert run("print(1)", allow_none=True).isolation == "rlimits only"


def test_what_is_in_force_without_bubblewrap_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name, **_: None)
    found = isolation.__wrapped__()
    assert (found.name, found.why) == ("rlimits only", "bubblewrap is not installed")


def test_no_isolation_is_in_force_whose_programs_cannot_write_to_the_null_device(tmp_path: Path):
    """Libraries open it as they are imported: a right program would fail for a fault of the machine."""
    null = tmp_path / "null"
    mount = f"mknod {null} c 1 3 && chmod 644 {null} && mount --bind {null} /dev/null"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no device can be made here")
    null.unlink()
    program = (
        "from flowjax.grading.sandbox import isolation, run\n"
        "try:\n    found = isolation()\nexcept ValueError as error:\n    print(error)\n"
        "else:\n    print(run(\"open('/dev/null', 'w')\", isolation=found).status)"
    )
    command = ["unshare", "-m", "sh", "-c", mount + ' && exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "ok\n" or "/dev/null" in done.stdout


def test_forgeries_fail_without_bubblewrap_too():
    """Verdicts rest on what is sent into the box, not on its walls."""
    plain = next(i for i in ISOLATIONS if i.name == sandbox.RLIMITS_ONLY and not i.drop_root)
    for name in ("os_exit", "writes_answers_to_every_fd", "equal_to_everything", "patched_runner", "reads_frames"):
        for suite in SUITES.values():
            assert judge(FORGERIES[name], suite, TIGHT, case_cpu_s=0.25, isolation=plain).score == 0.0, name


def test_a_box_dies_with_its_parent(tmp_path: Path):
    """A killed environment worker leaves nothing running."""
    program = (
        "from flowjax.grading.sandbox import run, Limits, isolation\n"
        "isolation()\nprint('up', flush=True)\n"
        f"run('import time; time.sleep(60)', limits=Limits(idle_s=60), allow_none={WITHOUT})"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    children: list[int] = []
    for _ in range(500):
        children = [int(n) for n in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        if children and (WITHOUT or Path(f"/proc/{children[0]}/cmdline").read_bytes().startswith(b"bwrap")):
            break
        time.sleep(0.01)
    time.sleep(0.2)
    inner = [int(n) for n in Path(f"/proc/{children[0]}/task/{children[0]}/children").read_text().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    alive: list[int] = []
    for _ in range(300):
        alive = [pid for pid in (*children, *inner) if _running(pid)]
        if not alive:
            return
        time.sleep(0.01)
    pytest.fail(f"{alive} still run")


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
