"""Number of rollout nodes that a run could use, from how long its trainers wait for batches and how busy its nodes are.

Measured over the last `config.pool.steps` steps with n nodes: w is the share of a trainer's time that it waited for
batches (of the policy that waited most), b the share of the nodes' slots that were playing.

    w > 0.10    ceil(n / (1 - w))           n nodes give a trainer 1 - w of the work that it could do
    w < 0.05    min(n, ceil(1.1 n b))       the nodes that were busy and a tenth more: the others may go
    otherwise   n

Where nobody plays, not even the run's own machine, no step ends and nothing can be measured: one node is asked for
after a minute.

Source: AstraFlow's balance report (arXiv 2605.15565). Idle slots stand for its surplus of episodes, since no episode is
played here that the bound on staleness does not admit. There a person reads the report; here `config.pool.command`
acts on it.
"""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flowjax.monitor.metrics import NewStatus, Progress, number, read_status, write_status
from flowjax.monitor.prometheus import MetricsEndpoint

_GROW_ABOVE, _SHRINK_BELOW = 0.10, 0.05  # of a trainer's time
_LONGEST_WAIT = 0.95  # bound on w: at w = 1, a window of nothing but waiting, n / (1 - w) would be infinite
_KEPT = 1.1  # times the nodes that were busy
_EMPTY_S = 60.0  # without a node, before one is asked for: nodes of the launch before may come back by themselves
_ROUNDING = 1e-9  # taken off before `ceil`: 10 nodes that a division makes 10.000000001 are not 11


def wanted_nodes(nodes: int, *, waiting: float, busy: float, least: int, most: int) -> int:
    """Nodes that a run could use, between `least` and `most`.

    Args:
        nodes: number of those that play now.
        waiting: share of a trainer's time that it waited for batches, 0 to 1.
        busy: share of the nodes' slots that were playing, 0 to 1.
    """
    wanted = nodes
    if not nodes:
        wanted = 1
    elif waiting > _GROW_ABOVE:
        wanted = math.ceil(nodes / (1 - min(waiting, _LONGEST_WAIT)) - _ROUNDING)
    elif waiting < _SHRINK_BELOW:
        wanted = min(nodes, math.ceil(_KEPT * nodes * busy - _ROUNDING))
    return min(max(wanted, least), most)


class Pool:
    """Compares a running run's nodes with the number that it could use, each time `look` is called.

    Writes both to `status-pool.json` and to a `/metrics` endpoint of its own, and runs `config.pool.command` when they
    differ.

    Args:
        config: of the run.
        say: prints a line.
        clock: seconds of a monotonic clock, which a change of the machine's date does not move.
    """

    def __init__(
        self, run_dir: Path, config: ConfigDict, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self._run_dir, self._config, self._say, self._clock = run_dir, config.pool, say, clock
        self._plays = "rollout" not in config.elsewhere  # the run's own machine, which may take a while to start
        self.dataflow = NewStatus(run_dir, "dataflow")  # of this launch
        self._empty_s: float | None = None  # since when nobody has played, or since a node was last asked for
        self._nodes, self._seen = 0, 0  # nodes that played, and lines of steps, at the last look
        self._since = 0  # index of this window's first line of a step
        self._busy: list[float] = []  # share of slots that played, one value for each look of this window
        self._hook: subprocess.Popen[bytes] | None = None
        # Number of nodes at the last request, and the number asked for. New nodes may wait in a cluster's queue or
        # start slowly: the same request is not made twice.
        self._asked: tuple[int, int] | None = None
        self.status: dict[str, Any] = {}
        self._metrics = MetricsEndpoint(lambda: self.status, role="pool")

    def __enter__(self) -> "Pool":
        with contextlib.suppress(OSError):  # a status of the launch before: its nodes may be gone
            (self._run_dir / "status-pool.json").unlink(missing_ok=True)
        self._metrics.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._metrics.__exit__()
        if self._hook is not None and self._hook.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._hook.pid, signal.SIGTERM)  # the group: the shell and what it has started

    def look(self, progress: Progress) -> None:
        """Take in what has happened since the last look."""
        status = self.dataflow.read()
        workers = status.get("workers", {}).values()
        lines = progress.train
        if self._asked is not None and len(workers) > self._asked[0]:
            self._asked = None  # some of those asked for have come: what is missing from now on is a new request
        if len(workers) != self._nodes or len(lines) < self._seen:
            # Other nodes than before, or a trainer went back to a checkpoint: a new window. It skips the step that is
            # under way, which the former nodes began (or which, in a run's first step, waits for all to start).
            self._nodes = len(workers)
            self._begin(len(lines) + 1)
        self._seen = len(lines)
        if slots := sum(worker.get("playing", 0) + worker.get("free_slots", 0) for worker in workers):
            self._busy.append(sum(worker.get("playing", 0) for worker in workers) / slots)
        policies = {line.get("policy", "") for line in lines[self._since :]}
        if self._nodes and policies and len(lines) - self._since >= self._config.steps * len(policies):
            self._decide(waiting_share(lines[self._since :]))
            self._begin(len(lines))
        self._follow_hook()
        self._look_at_empty(status)

    def _look_at_empty(self, status: Mapping[str, Any]) -> None:
        """Ask for a node where nobody plays: no step ends then, so `look` would never decide."""
        if self._plays or not status or status["workers"] or status["finished"]:
            self._empty_s = None
            return
        now_s = self._clock()
        if self._empty_s is None:
            self._empty_s = now_s
        elif now_s - self._empty_s >= _EMPTY_S:
            self._empty_s = now_s
            self._decide(1.0)

    def _begin(self, line: int) -> None:
        self._since, self._busy = line, []

    def _decide(self, waiting: float) -> None:
        busy = sum(self._busy) / len(self._busy) if self._busy else float(self._nodes > 0)
        config = self._config
        bounds = {"least": config.least_nodes, "most": max(config.least_nodes, config.most_nodes)}
        wanted = wanted_nodes(self._nodes, waiting=waiting, busy=busy, **bounds)
        self.status = {
            "nodes": self._nodes,
            "wanted_nodes": wanted,
            "waiting_share": waiting,
            "busy_share": busy,
            "metrics_url": self._metrics.url,
        }
        with contextlib.suppress(OSError):  # the session reports a full disk
            write_status(self._run_dir, "pool", self.status)
        if wanted == self._nodes:
            self._asked = None
        elif config.command and self._hook is None and self._asked != (self._nodes, wanted):
            self._say(f"pool: {sentence(self.status)}: {config.command}")
            self._start_hook(wanted)

    def _start_hook(self, wanted: int) -> None:
        known = {"FLOWJAX_WANTED_NODES": str(wanted), "FLOWJAX_NODES": str(self._nodes)}
        try:
            with (self._run_dir / "logs" / "pool.log").open("ab") as log:
                self._hook = subprocess.Popen(
                    ["/bin/sh", "-c", self._config.command],
                    env={**os.environ, **known, "FLOWJAX_RUN": str(self._run_dir)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                self._asked = self._nodes, wanted
        except OSError as error:  # the run goes on with the nodes that it has
            self._say(f"pool: the command could not be started ({error})")

    def _follow_hook(self) -> None:
        if self._hook is not None and (status := self._hook.poll()) is not None:
            self._hook = None
            if status:
                self._asked = None
                self._say(
                    f"pool: the command ended with exit status {status}: see {self._run_dir / 'logs' / 'pool.log'}"
                )


def waiting_share(lines: Sequence[Mapping[str, Any]]) -> float:
    """Share of the steps' time that a trainer waited for batches, 0 to 1: of the policy that waited most."""
    found = []
    for policy in {line.get("policy", "") for line in lines}:
        steps = [line for line in lines if line.get("policy", "") == policy]
        waited_s, total_s = (sum(number(line, name) or 0.0 for line in steps) for name in ("wait_s", "total_s"))
        found.append(waited_s / total_s if total_s else 0.0)
    return max(found, default=0.0)


def pool_lines(run_dir: Path) -> list[str]:
    """The line of `--status` about a run's pool; none before the pool's first decision."""
    status = read_status(run_dir, "pool")
    return [f"pool: {sentence(status)}"] if status else []


def sentence(status: Mapping[str, Any]) -> str:
    """Words for what `status-pool.json` holds."""
    nodes, wanted = status["nodes"], status["wanted_nodes"]
    if not nodes:
        return f"0 nodes, {wanted} wanted: nobody plays"
    waits, play = (f"{100 * status[name]:.0f} %" for name in ("waiting_share", "busy_share"))
    return f"{nodes} node{'s' * (nodes != 1)}, {wanted} wanted: trainers wait {waits} of the time, {play} of slots play"
