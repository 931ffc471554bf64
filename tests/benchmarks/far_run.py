"""A whole run that far nodes play, beside the same run on one machine: python -m tests.benchmarks.far_run [--seeds=0]

Everything is real: vLLM on each node, the trainer, a NATS server. Run and nodes are network namespaces of this machine
that reach the server and nothing else, on lines that make 300 ms there and back, carry 50 Mbit/s and lose one packet in
a hundred on the way (tests/cluster/link.py; as root); a node sees nothing of the folder of runs. Berlin and Lima play
from the start, Tokyo joins after version 5; then Berlin is killed, and Lima is cut off for a minute, which is longer
than its leases last. Ends with an error where a version was made twice or not at all, anything was trained on twice or
was older than `max_staleness` when it was, or a task was left; also where the run ends before Lima plays again, as on a
fast machine with few `--steps`. Prints a row for each run; all its processes share this machine.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from link import Link

from flowjax.monitor.metrics import evaluation_lines, read_metrics, read_status
from flowjax.run import read_run
from tests.benchmarks.runs import machine, trained
from tests.integration.whole_run_checks import (
    assert_evaluated,
    assert_tasks_ended,
    assert_trained_once,
    assert_versions_in_order,
)
from tests.nats_server import nats_server

ROOT = Path(__file__).parents[2]
NODES = ("berlin", "lima", "tokyo")
LEASE_S = 45.0
JOIN_AT_VERSION = 5
# A folder is hidden from the command behind it.
HIDDEN = ("unshare", "--mount", "--", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
COLUMNS = (
    "run", "seed", "minutes", "trajectories/s", "held-out success before", "after", "oldest token, versions",
    "groups too old", "k3, worst step",
)  # fmt: skip


class Process:
    """A launcher, and what it says in `<folder>/output.txt`."""

    def __init__(self, folder: Path, command: Sequence[str], **variables: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.txt"
        with self.output.open("w") as out:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)

    def wait(self) -> None:
        if status := self.process.wait(timeout=3600):
            raise SystemExit(f"{self.output}: ended with status {status}:\n{self.output.read_text()[-3000:]}")


class FarRun:
    """One launched run whose own machine plays nothing, and its nodes. Use as a context manager."""

    def __init__(self, link: Link, folder: Path, nats_port: int, settings: Sequence[str]):
        self.folder, self.link, self._port, self._settings = folder, link, nats_port, settings
        self.nodes: dict[str, Process] = {}
        self._apart = Path(tempfile.mkdtemp(prefix="far-nodes-"))

    def __enter__(self) -> "FarRun":
        relay = f"--config.dataflow.relay={self._seen_by('run')}"
        flags = [*self._settings, f"--name={self.folder.name}", relay, "--config.elsewhere=('rollout',)"]
        command = [*self.link.on("run"), sys.executable, "-m", "flowjax.launch", *flags]
        self.run = Process(self.folder.parent / f"{self.folder.name}-launch", command)
        try:
            self.wait_until(lambda: "nodes join by" in self._said_by_relay())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in (self.run, *self.nodes.values()):
            process.process.kill()  # its guards end the roles
            process.process.wait()
        if not any(exc_info):  # else there is something to read in it
            shutil.rmtree(self._apart, ignore_errors=True)

    def join(self, name: str) -> None:
        """Have a node invited and start it, with nothing of the run's folder or base model."""
        asked = [sys.executable, "-m", "flowjax.launch", f"--status={self.folder}", f"--invite={name}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        printed = subprocess.run(asked, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        key, *_, join = shlex.split(printed)
        flags = [join.replace(self._seen_by("run"), self._seen_by(name)), "--name=node", "--config.model.path=base"]
        there = [*self.link.on(name), *HIDDEN, str(self.folder.parent)]
        command = [*there, sys.executable, "-m", "flowjax.launch", *flags]
        self.nodes[name] = Process(self._apart / name, command, FLOWJAX_TOKEN=key.partition("=")[2])

    def played(self, name: str) -> int:
        """Episodes that a node has played."""
        return read_status(self._apart / name / "runs" / "node", "rollout").get("episodes", 0)

    @property
    def version(self) -> int:
        """The version that all policies have come to."""
        newest = dict.fromkeys(read_run(self.folder).policies, 0)
        newest |= {line["policy"]: line["step"] for line in read_metrics(self.folder) if line["kind"] == "train"}
        return min(newest.values())

    def wait_until(self, holds: Callable[[], Any], timeout_s: float = 1800.0) -> None:
        """Return when it holds; give up when the run or a node that should play has ended."""
        until_s = time.monotonic() + timeout_s
        while not holds():
            for process in (self.run, *self.nodes.values()):
                if process.process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"{process.output}:\n{process.output.read_text()[-3000:]}")
            time.sleep(0.2)

    def _said_by_relay(self) -> str:
        log = self.folder / "logs" / "relay.log"
        return log.read_text() if log.exists() else ""

    def _seen_by(self, host: str) -> str:
        return f"nats://{self.link.address('nats', seen_by=host)}:{self._port}"


@contextlib.contextmanager
def far(folder: Path, settings: Sequence[str]) -> Iterator[FarRun]:
    # The server is in the middle, so that a packet goes over two lines of half the way.
    line = {"delay_s": 0.075, "loss": 0.005, "rate_bits_per_s": 50e6}
    with (
        Link(["nats", "run", *NODES], **line) as link,
        nats_server(host="0.0.0.0", on=link.on("nats")) as server,
        FarRun(link, folder, server.port, settings) as run,
    ):
        yield run


def play_far(folder: Path, settings: Sequence[str]) -> Mapping[str, int]:
    """Launch the run, have nodes join, die and come back, and wait for its end. Returns what each node has played."""
    with far(folder, settings) as run:
        for name in ("berlin", "lima"):
            run.join(name)
        run.wait_until(lambda: run.version >= JOIN_AT_VERSION)
        run.join("tokyo")
        run.wait_until(lambda: run.played("tokyo"))
        berlin, before = run.nodes.pop("berlin"), run.played("berlin")
        berlin.process.send_signal(signal.SIGKILL)  # its guards end the roles
        berlin.process.wait()
        logged(run, "berlin was killed")
        run.link.cut("lima")
        cut_s, alone = time.monotonic(), run.played("lima")
        run.wait_until(lambda: time.monotonic() - cut_s > flags.FLAGS.cut_s)
        run.link.mend("lima")
        logged(run, f"lima was cut off for {flags.FLAGS.cut_s:.0f} s")
        run.wait_until(lambda: run.played("lima") > alone)
        logged(run, "lima plays again")
        for process in (run.run, *run.nodes.values()):
            process.wait()
        return {"berlin": before, **{name: run.played(name) for name in run.nodes}}


def logged(run: FarRun, event: str) -> None:
    print(f"  {event}; version {run.version}", file=sys.stderr, flush=True)


def assert_sound(run: Path) -> None:
    """Each version once, each task ended, nothing trained on twice or too old, each evaluation whole."""
    assert_versions_in_order(run)
    assert_tasks_ended(run)
    assert_trained_once(run)
    assert_evaluated(run)


def row(name: str, seed: str, run: Path) -> str:
    lines = read_metrics(run)
    train = [line for line in lines if line["kind"] == "train"]
    batches = [line for line in lines if line["kind"] == "batch"]
    taken_s = train[-1]["time_s"] - train[0]["time_s"]
    trajectories = sum(line["episodes"] for line in train[1:])
    oldest = max(int(age) for line in batches for age in line["ages"])
    dropped = {line["policy"]: line["dropped"].get("too_old", 0) for line in batches}
    too_old = sum(dropped.values()) / (sum(dropped.values()) + sum(line["groups"] for line in batches))
    worst = np.max([float(line["mismatch_kl"]) for line in train if "mismatch_kl" in line])  # "nan" where one is
    evaluations = [line["policies"] for line in evaluation_lines(lines)]
    cells = [f"{taken_s / 60:.1f}", f"{trajectories / taken_s:.1f}", success(evaluations[0]), success(evaluations[-1])]
    return f"| {' | '.join([name, seed, *cells, str(oldest), f'{100 * too_old:.1f} %', f'{worst:.0e}'])} |"


def success(of_policies: Mapping[str, Mapping[str, float]]) -> str:
    """Of each policy, with its interval."""
    parts = [
        f"{policy} {100 * found['success_rate']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
        for policy, found in sorted(of_policies.items())
    ]
    return ", ".join(parts)


def main(argv: Sequence[str]) -> None:
    del argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces and processes go, too
    given, out = flags.FLAGS, Path(flags.FLAGS.out).absolute()
    file, _, variant = given.recipe.partition(":")
    fields = [f"--config.model.path={out / 'base'}", f"--config.dataflow.lease_s={LEASE_S}"]
    if given.steps:
        fields.append(f"--config.trainer.steps={given.steps}")
    rows = []
    for seed in given.seeds:
        near, _ = trained(given.recipe, seed, out, fields)
        rows.append(row("one machine", seed, near))
        folder = out / f"far-{seed}"
        if not (folder / "played.txt").exists():
            source = [f"--config={ROOT / 'configs' / file}.py:{variant or 'nano'}", f"--config.seed={seed}"]
            played = play_far(folder, [*source, f"--config.runs={out}", *fields])
            assert_sound(folder)
            (folder / "played.txt").write_text(", ".join(f"{name} {count}" for name, count in played.items()))
        rows.append(row("far nodes", seed, folder))
        print(f"  episodes of seed {seed}: {(folder / 'played.txt').read_text()}", file=sys.stderr, flush=True)
    print("\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]))
    print(f"\n{machine(out / f'far-{given.seeds[-1]}')}")


if __name__ == "__main__":
    flags.DEFINE_string("recipe", "math_pair:nano", "Recipe and variant.")
    flags.DEFINE_list("seeds", ["0"], "Of config.seed.")
    flags.DEFINE_integer("steps", 0, "Versions of each policy; 0 for the recipe's own number.", lower_bound=0)
    flags.DEFINE_float("cut_s", 60.0, "How long Lima is cut off.", lower_bound=0.0)
    flags.DEFINE_string("out", "runs/far", "Folder of the runs and their base model; what is finished is kept.")
    app.run(main)
