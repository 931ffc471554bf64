"""A whole launched run whose processes are killed: `python -m flowjax.launch`, with everything real."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowjax.monitor.metrics import read_status
from flowjax.weights.publish import committed_steps

ROOT = Path(__file__).parents[2]
POLICIES = ("solver", "verifier")
STEPS, EVAL_TASKS = 24, 64
KILLS = 20
INNER = b"EngineCore"  # in the name of the process that vLLM computes in
RECIPE = (
    f"--config={ROOT / 'configs' / 'math_pair.py'}:nano",
    f"--config.trainer.steps={STEPS}",
    f"--config.eval.tasks={EVAL_TASKS}",
    "--config.eval.every_steps=8",
    "--config.warm_start.states=20000",
    "--config.warm_start.steps=300",
    "--config.dataflow.lease_s=45.0",
    f"--config.max_restarts={KILLS}",
    f"--config.engine.max_restarts={KILLS}",
)


@dataclass(frozen=True)
class Kill:
    """What is hit, how, and when: so long after the policies together have come to so many versions."""

    after_versions: int
    wait_s: float
    role: str  # of the run, or "launcher" for the whole of it
    how: signal.Signals = signal.SIGKILL
    inner: bool = False  # the process that the engine computes in, instead of the one that it answers with


def plan(seed: int, roles: Sequence[str]) -> list[Kill]:
    """Each role once in turn, then any of them, spread over the run; besides one orderly end of the dataflow and one
    kill of the whole run in the middle of it."""
    dice = random.Random(seed)
    last = len(POLICIES) * STEPS - 4
    turns = [*dice.sample(roles, len(roles)), *(dice.choice(roles) for _ in range(KILLS - len(roles)))]
    at = sorted(dice.randint(1, last) for _ in range(KILLS))
    kills = [
        Kill(versions, dice.uniform(0.0, 3.0), role, inner=number >= len(roles) and role == "engine")
        for number, (versions, role) in enumerate(zip(at, turns, strict=True))
    ]
    kills.insert(dice.randint(5, 9), Kill(0, dice.uniform(0.0, 3.0), "dataflow", signal.SIGTERM))
    kills.insert(dice.randint(10, 16), Kill(0, dice.uniform(0.0, 3.0), "launcher"))
    return kills


class WholeRun:
    """One run folder, launched and gone on with. Use as a context manager.

    While it lasts, the versions that are committed and served are noted in `seen`, by observer and policy.
    """

    def __init__(self, folder: Path, base: Path, seed: int, *settings: str):
        self.run_dir = folder / "chaos"
        self._output = folder / "output.txt"
        self._settings = (*RECIPE, f"--config.model.path={base}", f"--config.seed={seed}", *settings)
        self._launcher: subprocess.Popen[str] | None = None
        self.killed: Counter[str] = Counter()  # by role
        self.told: list[str] = []  # what was done to the run, with the seconds since its start
        self.seen: dict[tuple[str, str], list[int]] = {}
        self._started_s = time.monotonic()
        self._over = threading.Event()
        self._observer = threading.Thread(target=self._observe)

    def __enter__(self) -> "WholeRun":
        self._launch(*self._settings, f"--config.runs={self.run_dir.parent}", f"--name={self.run_dir.name}")
        self._observer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._observer.join()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def versions(self) -> int:
        """Versions that are committed, of all policies together; each begins with version 0."""
        newest = [max(committed_steps(self.run_dir / "checkpoints" / policy), default=0) for policy in POLICIES]
        return sum(newest)

    def roles(self) -> Mapping[str, Mapping[str, Any]]:
        """What the launcher says of each role, those that are over left out."""
        states = read_status(self.run_dir, "launch").get("roles", {})
        return {name: state for name, state in states.items() if state["phase"] != "done"}

    def wait_until_up(self, timeout_s: float = 900.0) -> None:
        """Return when no role is on its way any more."""
        self._wait(lambda: len(up := self.roles()) >= 4 and all(r["phase"] == "up" for r in up.values()), timeout_s)

    def strike(self, kill: Kill) -> None:
        """Wait for the moment, then kill."""
        self._wait(lambda: self.versions >= kill.after_versions, 600.0)
        time.sleep(kill.wait_s)
        if kill.role == "launcher":
            self._kill_everything()
            return
        state = read_status(self.run_dir, "launch")["roles"][kill.role]
        if state["phase"] == "done":  # of two trainers one may be first
            kill = replace(kill, role="dataflow")
        pid = self._wait(lambda: self._process(kill), 120.0)
        assert self.versions < len(POLICIES) * STEPS, "the run was over before the last kill"
        os.kill(pid, kill.how)
        self._wait(lambda: not alive(pid), 60.0)
        self.killed[kill.role] += 1
        self._tell(f"{kill.how.name} {'inner process of ' * kill.inner}{kill.role}, {self.versions} versions")

    def finish(self, timeout_s: float) -> None:
        """Wait for the end.

        Raises:
            AssertionError: the launcher has not come to it, or not well.
        """
        assert self._launcher is not None
        try:
            status = self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"stuck at {self.versions} versions: {self._why()}") from None
        self._tell(f"end, status {status}")
        assert status == 0, self._why()

    def status(self, role: str) -> str:
        """What `--status` says of a role."""
        command = [sys.executable, "-m", "flowjax.launch", f"--status={self.run_dir}"]
        shown = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=True).stdout
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {role} ")]
        return line

    def wait_until_told(self, role: str) -> None:
        """Return when `--status` tells of the role's death, or of the restart after it."""
        self._wait(lambda: any(word in self.status(role) for word in ("killed by SIGKILL", "1 restart")), 30.0)

    def _launch(self, *arguments: str) -> None:
        with self._output.open("a") as out:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "flowjax.launch", *arguments],
                cwd=self.run_dir.parent,
                env=_environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def _kill_everything(self) -> None:
        assert self._launcher is not None
        below = descendants(self._launcher.pid)
        self._launcher.kill()
        self._launcher.wait()
        self._wait(lambda: not any(alive(pid) for pid in below), 30.0, launched=False)
        self._tell(f"SIGKILL launcher, {self.versions} versions")
        assert "gone" in self.status("dataflow")
        (self.run_dir / "status-launch.json").unlink()  # the next launcher's is to be waited for
        self._launch(f"--resume={self.run_dir}")
        self.wait_until_up()
        self._tell("up again")

    def _process(self, kill: Kill) -> int | None:
        """The process to hit, while there is one."""
        state = self.roles().get(kill.role, {})
        if state.get("phase") not in ("starting", "up") or not alive(state["pid"]):
            return None
        if not kill.inner:
            return next(iter(children(state["pid"])), None)  # the guard's only child is the role
        return next((pid for pid in descendants(state["pid"]) if INNER in _command(pid)), None)

    def _wait(self, condition: Callable[[], Any], timeout_s: float, *, launched: bool = True) -> Any:
        """What `condition` gives as soon as that is something."""
        until = time.monotonic() + timeout_s
        while not (found := condition()):
            assert not launched or (self._launcher is not None and self._launcher.poll() is None), self._why()
            assert time.monotonic() < until, f"stuck at {self.versions} versions: {self._why()}"
            time.sleep(0.05)
        return found

    def _observe(self) -> None:
        """Note the versions that everyone tells of, as time goes by."""
        while not self._over.wait(0.1):
            served = read_status(self.run_dir, "rollout").get("serving_versions", {})
            kept = read_status(self.run_dir, "dataflow").get("policies", {})
            for policy in POLICIES:
                found = {
                    "checkpoints": max(committed_steps(self.run_dir / "checkpoints" / policy), default=None),
                    "rollout": served.get(policy),
                    "dataflow, served": kept.get(policy, {}).get("version"),
                    "dataflow, committed": kept.get(policy, {}).get("committed"),
                }
                for observer, version in found.items():
                    if version is not None and version >= 0:  # who has just started does not know yet
                        self.seen.setdefault((observer, policy), []).append(version)

    def _tell(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self._started_s:6.1f} s  {text}")

    def _why(self) -> str:
        return "\n".join([*self.told, self.output[-4000:]])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def children(pid: int) -> list[int]:
    """Processes that this one has started and that are alive, the oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.append((int(fields[19]), int(entry.parent.name)))
    return [child for _, child in sorted(found)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return [*below, *(deeper for child in below for deeper in descendants(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
