"""Faults of the machine, one after the other: the run goes on, or ends with a line that names the cause.

    python -m tests.launch.faults --count=500 [--seed=0] [--patience=60]

A run is the real launcher, dataflow and rollout service, an engine without a model and a trainer that does no sums. In
one of its processes one call (open, write, fork, connect, or a statement of SQLite) fails with ENOSPC, EROFS, EIO,
EMFILE or EAGAIN, once, or from then on until the run has told of it or goes on all the same: `inject/sitecustomize.py`
is put before everything else of each process by PYTHONPATH. It goes on when two more versions have been published. When
a run has ended, or has met many faults, another is started. Prints a line for each fault, and the totals.
"""

import argparse
import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from light_run import PARTS, ROOT, LightRun, environment  # noqa: E402

from flowjax.monitor.metrics import read_metrics, read_status  # noqa: E402
from flowjax.weights.publish import committed_steps  # noqa: E402

ERRORS = {
    "open": ("ENOSPC", "EROFS", "EIO", "EMFILE"),
    "write": ("ENOSPC", "EIO"),
    "fork": ("EAGAIN", "EMFILE"),
    "connect": ("EMFILE", "EAGAIN"),
    "sqlite": ("ENOSPC", "EROFS", "EIO"),
}
ROLES = {
    "launch": ("open", "write", "fork", "connect"),
    "dataflow": ("open", "write", "sqlite"),
    "rollout": ("open", "write", "fork", "connect"),
    "trainer": ("open", "write", "connect"),
}
MOST = {"open": 12, "write": 8, "fork": 1, "connect": 6, "sqlite": 60}  # calls that pass before one fails
STEPS, FAULTS_PER_RUN = 100_000, 40
COMES_S = 15.0  # a call that has not been made for so long is not waited for


@dataclass(frozen=True)
class Fault:
    """The `nth` call of a kind in a role fails, and with `lasting` those after it until it is over."""

    number: int
    role: str
    call: str
    error: str
    nth: int
    lasting: bool

    def named_in(self, line: str) -> bool:
        words = [os.strerror(getattr(errno, self.error)), "database or disk is full", "readonly database", "disk I/O"]
        return any(word.lower() in line.lower() for word in words)


@dataclass(frozen=True)
class Verdict:
    """`outcome`: untouched (the call never came), went_on, ended, silent (ended without a line) or stuck."""

    fault: Fault
    outcome: str
    after_s: float
    line: str


def draw(seed: int) -> Iterator[Fault]:
    """Faults without end, each kind of each role in turn, so that even a few cover all."""
    dice = random.Random(seed)
    kinds = [(role, call, error) for role, calls in ROLES.items() for call in calls for error in ERRORS[call]]
    for number in itertools.count():
        if number % len(kinds) == 0:
            dice.shuffle(kinds)
        role, call, error = kinds[number % len(kinds)]
        yield Fault(number, role, call, error, dice.randint(1, MOST[call]), dice.random() < 0.5)


class Arena:
    """A run that is started again when it has ended; `judge` has it meet one fault."""

    def __init__(self, folder: Path, patience_s: float):
        self.folder, self.patience_s = folder, patience_s
        self.marks = folder / "marks"
        self.marks.mkdir()
        self._light = LightRun(folder, weights=False, trainer__steps=STEPS, max_restarts=1000)
        self._runs = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._met = 0

    def __enter__(self) -> "Arena":
        self._light.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        self._light.__exit__()

    def _start(self) -> None:
        self._end()
        self.run_dir, self._met = self.folder / "runs" / f"run-{next(self._runs)}", 0
        self._output = self.folder / f"{self.run_dir.name}.txt"
        path = os.pathsep.join([str(HERE / "inject"), str(ROOT), *PARTS])
        env = environment() | {"FLOWJAX_FAULTS": str(self.marks), "PYTHONPATH": path}
        command = [sys.executable, str(HERE / "light_launch.py"), str(self.folder), self.run_dir.name]
        with self._output.open("w") as out:
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
        self._wait(lambda: self._version() >= 2, 300.0)
        assert self._version() >= 2, self._output.read_text()

    def _end(self) -> None:
        (self.marks / "current").unlink(missing_ok=True)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            time.sleep(0.5)  # its guards take the roles along
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def judge(self, fault: Fault) -> Verdict:
        """Have the run meet the fault."""
        if self._process is None or self._process.poll() is not None or self._met >= FAULTS_PER_RUN:
            self._start()
        self._met += 1
        self._wait(self._well, self.patience_s)  # a restart that the fault before has led to is not this one's
        self._from_bytes, from_s = self._output.stat().st_size, time.time()
        wanted = self.marks / "wanted"
        wanted.write_text(json.dumps({**asdict(fault), "runs": str(self.run_dir)}))
        wanted.replace(self.marks / "current")
        struck, over = self.marks / f"struck-{fault.number}", self.marks / f"over-{fault.number}"
        if fault.call == "fork" or (fault.role, fault.call) == ("rollout", "connect"):
            self._kill("rollout")  # else nobody forks or connects once a run is up
        self._wait(struck.exists, COMES_S)
        if not struck.exists():
            return Verdict(fault, "untouched", 0.0, "")
        began, version = time.monotonic(), self._version()

        def told_or_on() -> bool:
            return self._version() >= version + 2 or bool(self._line(fault, from_s))

        self._wait(told_or_on, self.patience_s)
        over.touch()  # somebody has made room
        self._wait(lambda: self._version() >= version + 2, max(self.patience_s - (time.monotonic() - began), 1.0))
        after_s, line = time.monotonic() - began, self._line(fault, from_s)
        if self._version() >= version + 2:
            return Verdict(fault, "went_on", after_s, line)
        assert self._process is not None
        if self._process.poll() is None:
            self._stuck(fault)
            return Verdict(fault, "stuck", after_s, line)
        return Verdict(fault, "ended" if line else "silent", after_s, line or self._output.read_text()[-300:])

    def _kill(self, role: str) -> None:
        with contextlib.suppress(OSError, KeyError):
            os.kill(read_status(self.run_dir, "launch")["roles"][role]["pid"], signal.SIGKILL)  # its guard

    def _stuck(self, fault: Fault) -> None:
        """Keep what there is to see, and begin anew with the next fault."""
        kept = Path(tempfile.mkdtemp(prefix=f"stuck-{fault.number}-"))
        shutil.copytree(self.run_dir / "logs", kept / "logs")
        shutil.copy(self._output, kept)
        print(f"    see {kept}", flush=True)
        self._met = FAULTS_PER_RUN

    def _wait(self, condition: Callable[[], bool], most_s: float) -> None:
        until = time.monotonic() + most_s
        while time.monotonic() < until and not condition():
            if self._process is None or self._process.poll() is not None:
                return
            time.sleep(0.1)

    def _well(self) -> bool:
        """True while every role lives, and what is newest is served."""
        phases = [role["phase"] for role in read_status(self.run_dir, "launch")["roles"].values()]
        served = read_status(self.run_dir, "rollout").get("serving_version", -1)
        return set(phases) <= {"up", "starting"} and served >= self._version() - 2

    def _version(self) -> int:
        return max(committed_steps(self.run_dir / "checkpoints" / "agent"), default=-1)

    def _line(self, fault: Fault, from_s: float) -> str:
        """The line of the launcher, or of its metrics, that names the cause."""
        lines = self._output.read_bytes()[self._from_bytes :].decode(errors="replace").splitlines()
        entries = [e for e in read_metrics(self.run_dir) if e.get("kind") == "run" and e["time_s"] >= from_s]
        lines += [f"{entry['role']}: {entry['event']} {entry['text']}" for entry in entries]
        return next((line for line in lines if fault.named_in(line)), "")


def meet(count: int, *, seed: int, patience_s: float, most_s: float = float("inf")) -> list[Verdict]:
    """The verdicts over `count` faults that struck, or over as many as `most_s` seconds allow."""
    verdicts: list[Verdict] = []
    until = time.monotonic() + most_s
    with tempfile.TemporaryDirectory() as folder, Arena(Path(folder), patience_s) as arena:
        for fault in draw(seed):
            verdict = arena.judge(fault)
            told = f" told: {verdict.line[:160]}" if verdict.line else ""
            print(f"{fault.number} {verdict.outcome} after {verdict.after_s:.1f} s: {fault}{told}", flush=True)
            verdicts += [verdict] if verdict.outcome != "untouched" else []
            if len(verdicts) >= count or time.monotonic() > until:
                return verdicts
    raise AssertionError("there is no end of faults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a run has to end or go on")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run that is under way is ended, too
    verdicts = meet(options.count, seed=options.seed, patience_s=options.patience)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    slowest = max(verdict.after_s for verdict in verdicts)
    told = sum(bool(verdict.line) for verdict in verdicts)
    print(f"{len(verdicts)} faults: {dict(outcomes)}, told of {told}, slowest {slowest:.1f} s")
    sys.exit(bool(outcomes["stuck"] + outcomes["silent"]))


if __name__ == "__main__":
    main()
