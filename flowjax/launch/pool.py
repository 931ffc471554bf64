"""Number of rollout nodes that a run could use, by how long its trainers wait for batches and how busy its nodes are.

Over the last `config.pool.steps` steps, with n nodes, the share w of a trainer's time that it waited (for the policy
that waited most) and the share b of the nodes' slots that were playing:

    w > 0.10    ceil(n / (1 - w))           by which the trainer would wait no longer
    w < 0.05    min(n, ceil(1.1 n b))       what idles may go, but for a tenth
    otherwise   n

Where nobody plays, the run's own machine included, no step ends and there is nothing to multiply: one, after a minute.

AstraFlow's balance report (arXiv 2605.15565), with the slots that idle in the place of its surplus of episodes: here
nothing is played that the bound on staleness does not admit. There a person reads the report; here
`config.pool.command` acts on it.
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
_LONGEST_WAIT = 0.95  # that is believed: what a window of nothing but waiting asks for is bounded
_KEPT = 1.1  # of the nodes that were busy
_EMPTY_S = 60.0  # without a node, until one is asked for: those of the launch before come back
_ROUNDING = 1e-9  # ten nodes are ten, also where a division makes a little more of it


def wanted_nodes(nodes: int, *, waiting: float, busy: float, least: int, most: int) -> int:
    """Nodes that a run could use, between `least` and `most`.

    Args:
        nodes: that play now.
        waiting: share of a trainer's time that it waited for batches.
        busy: share of the nodes' slots that were playing.
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
    """Follows a run that is under way: `look` is to be called again and again. Says what is wanted in
    `status-pool.json` and at a `/metrics` of its own, and runs the command of the config when it is not what there is.

    Args:
        config: of the run.
        say: prints a line.
        clock: in seconds; no setting of the machine's date moves it.
    """

    def __init__(
        self, run_dir: Path, config: ConfigDict, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self._run_dir, self._config, self._say, self._clock = run_dir, config.pool, say, clock
        self._plays = "rollout" not in config.elsewhere  # the run's own machine, which may take a while to start
        self.dataflow = NewStatus(run_dir, "dataflow")  # of this launch
        self._empty_s: float | None = None  # since when nobody has played, or has been asked for in vain
        self._nodes, self._seen = 0, 0  # nodes that played, and lines of steps, at the last look
        self._since = 0  # first line of this window
        self._busy: list[float] = []  # of the window, one a look
        self._hook: subprocess.Popen[bytes] | None = None
        # Nodes, and those that were asked for: while they are on their way, in a queue or starting, they are not asked
        # for again.
        self._asked: tuple[int, int] | None = None
        self.status: dict[str, Any] = {}
        self._metrics = MetricsEndpoint(lambda: self.status, role="pool")

    def __enter__(self) -> "Pool":
        with contextlib.suppress(OSError):  # of the launch before: its nodes may be gone
            (self._run_dir / "status-pool.json").unlink(missing_ok=True)
        self._metrics.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._metrics.__exit__()
        if self._hook is not None and self._hook.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._hook.pid, signal.SIGTERM)  # with what its shell has started

    def look(self, progress: Progress) -> None:
        """Take in what has happened since the last look."""
        status = self.dataflow.read()
        workers = status.get("workers", {}).values()
        lines = progress.train
        if self._asked is not None and len(workers) > self._asked[0]:
            self._asked = None  # some have come; those that are missing later on are others
        if len(workers) != self._nodes or len(lines) < self._seen:
            # What others played says nothing of these, and the next step began with them: a run's first with a start.
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
        """Ask for a node where nobody plays: without one no step ends."""
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
        with contextlib.suppress(OSError):  # a full disk is said elsewhere
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
    """Share of its time that a trainer waited for batches in these steps, of the policy that waited most."""
    found = []
    for policy in {line.get("policy", "") for line in lines}:
        steps = [line for line in lines if line.get("policy", "") == policy]
        waited_s, total_s = (sum(number(line, name) or 0.0 for line in steps) for name in ("wait_s", "total_s"))
        found.append(waited_s / total_s if total_s else 0.0)
    return max(found, default=0.0)


def pool_lines(run_dir: Path) -> list[str]:
    """The line of `--status` about a run's pool; none before its first window is over."""
    status = read_status(run_dir, "pool")
    return [f"pool: {sentence(status)}"] if status else []


def sentence(status: Mapping[str, Any]) -> str:
    """Words for what `status-pool.json` holds."""
    nodes, wanted = status["nodes"], status["wanted_nodes"]
    if not nodes:
        return f"0 nodes, {wanted} wanted: nobody plays"
    waits, play = (f"{100 * status[name]:.0f} %" for name in ("waiting_share", "busy_share"))
    return f"{nodes} node{'s' * (nodes != 1)}, {wanted} wanted: trainers wait {waits} of the time, {play} of slots play"
