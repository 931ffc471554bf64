"""A run of real processes that are killed and started again, and what must be true of it in the end."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from rollout_run import RolloutRun

from flowjax.envs.sokoban.rooms import DIRECTIONS
from flowjax.launch.machine import free_port
from flowjax.monitor.transcripts import batch_path, read_lines
from flowjax.report.episodes import batches_of
from flowjax.weights.publish import committed_steps

HERE = Path(__file__).parent
ROLES = ("engine", "dataflow", "trainer", "rollout")
GROUPS, MEMBERS, STALENESS = 3, 4, 2
LATE_S = 5.0  # that a busy machine may take to see a lease as over


class ChaosRun:
    """Dataflow and rollout service as they are; engine and trainer that do no sums, but load and write real adapters.

    A role that has ended is started again, as the launcher does it. Use as a context manager.
    """

    def __init__(self, folder: Path, *, steps: int, step_s: float):
        run = RolloutRun(
            folder,
            trainer__steps=steps,
            trainer__groups_per_step=GROUPS,
            trainer__keep_checkpoints=steps + 1,
            rollout__group_size=MEMBERS,
            dataflow__max_staleness=STALENESS,
            dataflow__max_attempts=8,
            dataflow__lease_s=20.0,
            engine__start_timeout_s=60.0,
        )
        run.checkpoints.close()
        self.folder, self.steps = run.folder, steps
        vocabulary = json.loads((run.model / "tokenizer.json").read_text())["model"]["vocab"]
        actions = [str(vocabulary[name]) for name in DIRECTIONS]
        ports = {name: free_port() for name in ("engine", "dataflow")}
        self._url = f"http://127.0.0.1:{ports['dataflow']}"
        endpoints = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        (self.folder / "endpoints.json").write_text(json.dumps(endpoints))
        self._commands = {
            "engine": [str(HERE / "chaos_engine.py"), str(ports["engine"]), *actions],
            "dataflow": ["-m", "flowjax.dataflow", f"--run={self.folder}"],
            "trainer": [str(HERE / "chaos_trainer.py"), str(self.folder), str(step_s)],
            "rollout": ["-m", "flowjax.rollout", f"--run={self.folder}"],
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts: Counter[str] = Counter()
        self.seen: dict[str, list[int]] = {"checkpoints": [], "committed": [], "serving": [], "rollout": []}
        self._over = threading.Event()
        self._observer = threading.Thread(target=self._observe)

    def __enter__(self) -> "ChaosRun":
        for role in ROLES:
            self._start(role)
        self._observer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._observer.join()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, role: str) -> None:
        self.starts[role] += 1
        with (self.folder / f"{role}.log").open("ab") as log:
            command = [sys.executable, *self._commands[role]]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
            self._processes[role] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self, role: str) -> None:
        """End a role at once, and start it again."""
        self._processes[role].send_signal(signal.SIGKILL)
        self._processes[role].wait()
        self._start(role)

    @property
    def version(self) -> int:
        return max(committed_steps(self.folder / "checkpoints" / "agent"))

    def revive(self) -> bool:
        """Start again what has ended by itself. Returns whether the trainer has come to its end."""
        for role, process in self._processes.items():
            if process.poll() is not None:
                if role == "trainer" and process.returncode == 0:
                    return True
                self._start(role)
        return False

    def wait_for(self, version: int, timeout_s: float) -> None:
        """Return when that version is committed."""
        until = time.monotonic() + timeout_s
        while self.version < version and not self.revive():
            assert time.monotonic() < until, f"stuck at version {self.version}: {self.logs()}"
            time.sleep(0.05)

    def finish(self, timeout_s: float) -> None:
        """Wait for the end of training, then stop the others in order."""
        until = time.monotonic() + timeout_s
        while not self.revive():
            assert time.monotonic() < until, f"stuck at version {self.version}: {self.logs()}"
            time.sleep(0.05)
        self._trained_s = time.monotonic()
        time.sleep(1.5)  # for the observer
        for role in ("rollout", "dataflow"):
            self._processes[role].terminate()
            assert self._processes[role].wait(timeout=60) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(f"== {role}\n{(self.folder / f'{role}.log').read_text()[-1500:]}" for role in ROLES)

    def _observe(self) -> None:
        """Note the versions that everyone tells of, as time goes by."""
        while not self._over.wait(0.1):
            self.seen["checkpoints"].append(self.version)
            self._note_rollout()
            try:
                with urllib.request.urlopen(f"{self._url}/status", timeout=5) as answer:
                    status = json.load(answer)
            except (OSError, ValueError):
                continue
            self.seen["committed"].append(status["committed"])
            if status["version"] >= 0:  # a dataflow that has just started has not been told yet
                self.seen["serving"].append(status["version"])

    def _note_rollout(self) -> None:
        try:
            version = json.loads((self.folder / "status-rollout.json").read_text())["serving_version"]
        except (OSError, ValueError):
            return
        if version is not None:  # a service that has just started does not know yet
            self.seen["rollout"].append(version)

    def assert_sound(self) -> None:
        """Every task ended once, nothing was trained on twice, no version went back."""
        for observer, versions in self.seen.items():
            assert versions == sorted(versions), f"{observer} went back: {versions}"
            assert versions[-1] == self.steps, observer
        self._assert_tasks_ended()
        self._assert_consumed_once()

    def _assert_tasks_ended(self) -> None:
        with sqlite3.connect(self.folder / "dataflow.sqlite") as db:
            states = dict(db.execute("SELECT state, COUNT(*) FROM policy_groups GROUP BY state"))
            batches = db.execute("SELECT step, group_id FROM batches").fetchall()
            unplayed = db.execute(
                "SELECT group_id, state, worker, deadline_s FROM episodes WHERE state IN ('waiting', 'leased')"
            ).fetchall()
            still_open = {
                group_id for (group_id,) in db.execute("SELECT group_id FROM policy_groups WHERE state = 'open'")
            }
            trained = {
                group_id
                for (group_id,) in db.execute(
                    "SELECT group_id FROM policy_groups WHERE state NOT IN ('dropped', 'ready', 'open')"
                )
            }
        assert "complete" not in states, states
        # A group whose worker was killed is replaced when it would come too late. It may be played in time after all,
        # or the run may end before its lease does.
        assert states.get("ready", 0) + states.get("open", 0) <= GROUPS, states
        live = str(self._processes["rollout"].pid)
        for group_id, state, worker, deadline_s in unplayed:
            assert group_id in still_open, "an episode that nobody has played belongs to a group that is said to be in"
            assert state == "leased" and worker.rpartition("-")[2] != live, (state, worker, live)
            assert deadline_s > self._trained_s - LATE_S, (deadline_s, self._trained_s)
        assert Counter(step for step, _ in batches) == dict.fromkeys(range(self.steps), GROUPS)
        assert len(batches) == len({group_id for _, group_id in batches}), "a group is in two batches"
        assert {group_id for _, group_id in batches} == trained

    def _assert_consumed_once(self) -> None:
        consumed: list[tuple[float, ...]] = []
        for version in range(1, self.steps + 1):
            data: dict[str, Any] = json.loads(
                (self.folder / "checkpoints" / "agent" / str(version) / "data" / "metadata").read_text()
            )
            assert data["fingerprints"] and 0 <= data["lag"] <= STALENESS
            consumed += map(tuple, data["fingerprints"])
        assert len(consumed) == len(set(consumed)), "a turn was trained on twice"
        written: list[str] = []
        for step in batches_of(self.folder, "agent"):
            written += [line["trajectory_id"] for line in read_lines(batch_path(self.folder, "agent", step))]
        assert written
        assert len(written) == len(set(written)), "a trajectory is in two batches"
