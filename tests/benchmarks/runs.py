"""Whole runs of a recipe over seeds, for benchmarks that compare what they learn; and engines without a run."""

import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.config import load_run
from flowjax.launch import command_line
from flowjax.launch.checks import differences
from flowjax.launch.machine import free_port
from flowjax.launch.roles import HUGE_PAGES, preloaded
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.provenance import read_starts
from flowjax.rollout.sidecar import engine_command
from flowjax.run import Engine, Run

KEPT_VARIABLE = "FLOWJAX_KEPT"  # environment variable: the file of kept results that a table is made from, alone
HOW = {"greedy": 0.0, "sampled": 1.0}  # temperature of each way to play


def folder_of(recipe: str, seed: str, out: Path) -> Path:
    """The folder in `out` of the run that `trained` makes."""
    file, _, variant = recipe.partition(":")
    return out / f"{file}-{variant or 'nano'}-{seed}".replace("_", "-").replace(",", "-")


def trained(recipe: str, seed: str, out: Path, fields: Sequence[str] = ()) -> tuple[Path, float]:
    """The folder of a finished run, and the seconds that its launches took; a run that was stopped goes on.

    `fields` are further ones to set, as on the command line.

    Raises:
        SystemExit: there is a run of that name with another config, which would be taken for this one.
    """
    file, _, variant = recipe.partition(":")
    variant = variant or "nano"
    run = folder_of(recipe, seed, out)
    source = [f"--config=configs/{file}.py:{variant}", f"--config.seed={seed}", f"--config.runs={out}", *fields]
    finished = run / "launch.json"
    if begun := (run / "config.json").exists():
        config, _ = command_line.parse(source)
        before = load_run(run)
        config.name, config.runs = run.name, before.runs  # it may have come here from elsewhere
        if changed := differences(before, config):
            said = "; ".join(f"{name} is {before} there, {now} here" for name, before, now in changed)
            raise SystemExit(f"{run} was made with another config ({said}): give another --out, or move it away")
    if not finished.exists():
        call("flowjax.launch", *([f"--resume={run}"] if begun else [*source, f"--name={run.name}"]))
        finished.write_text(json.dumps({"load": os.getloadavg()[1]}))
    return run, sum(until_s - from_s for from_s, until_s in launches(run))


def launches(run: Path) -> list[tuple[float, float]]:
    """When each launch of a run began, and when it ended or, where it was killed, wrote its last line."""
    lines_s = [line["time_s"] for line in read_metrics(run)]
    starts = read_starts(run)
    found = []
    for start, following in zip(starts, [*starts[1:], {"started_s": math.inf}], strict=True):
        began_s = start["started_s"]
        within = [time_s for time_s in lines_s if began_s <= time_s < following["started_s"]]
        found.append((began_s, start.get("ended_s") or max(within, default=began_s)))
    return found


def evaluated(run: Path, *, how: str, base: bool, tasks: int) -> Path:
    """The folder of an evaluation of a run's newest checkpoint or of its base model on so many tasks, or on more that
    it was made for before; what is missing is played."""
    folder = run / "skills" / f"{'base' if base else newest_version(run)}-{how}"
    if not (folder / "results.json").exists() or load_run(folder).eval.tasks < tasks:
        fields = [f"--config.eval.temperature={HOW[how]}", f"--config.eval.tasks={tasks}"]
        call("flowjax.evaluate", str(run), f"--out={folder}", *fields, *(["--base"] if base else []))
    return folder


def newest_version(run: Path) -> int:
    """The newest version of any policy, 0 before there is one."""
    steps = (step.name for step in (run / "checkpoints").glob("*/*"))
    return max((int(name) for name in steps if name.isdecimal()), default=0)


def success(evaluation: Path) -> Mapping[str, Any]:
    return json.loads((evaluation / "results.json").read_text())["metrics"]["success"]


def call(module: str, *arguments: str) -> None:
    """Run a command of flowjax to its end.

    Raises:
        SystemExit: it failed; its own words are above. Or a table is made from kept results alone, which lack its own.
    """
    if kept := os.environ.get(KEPT_VARIABLE):
        lacking = shlex.join([module, *arguments])
        raise SystemExit(f"{kept} lacks what this makes: python -m {lacking}: run it, and keep all of its table anew")
    command = [sys.executable, "-m", module, *arguments]
    print("$", "python -m", module, *arguments, flush=True)
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """A thread that does `work` until the event is set, at the end of the block."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class Served:
    """An engine that answers, in a process group of its own."""

    engine: Engine
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(run: Run, engines: Sequence[Engine]) -> Iterator[list[Served]]:
    """Engines of a run, started side by side and waited for, and killed afterwards. Their logs are in its folder.

    Raises:
        SystemExit: one of them has ended, or does not answer within its `start_timeout_s`; with its log's last words.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for engine in engines:
            port = free_port()
            argv, env = engine_command(run, engine, port)
            log = stack.enter_context((run.folder / f"{engine.name}.log").open("wb"))
            process = subprocess.Popen(argv, env=os.environ | env, stdout=log, stderr=log, start_new_session=True)
            stack.callback(_killed, process)
            found.append(Served(engine, f"http://127.0.0.1:{port}", process))
        began_s = time.monotonic()
        for served in found:
            longest_s = run.bases[served.engine.base].engine.start_timeout_s
            while not _answers(served.url):
                if served.process.poll() is not None or time.monotonic() > began_s + longest_s:
                    words = (run.folder / f"{served.engine.name}.log").read_text(errors="replace")[-3000:]
                    raise SystemExit(f"{words}\n{served.engine.name} has ended, or not come up in {longest_s:g} s")
                time.sleep(0.2)
        yield found


def _killed(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def peer_python(peers: Path) -> Path:
    """The interpreter of the peers' environment.

    Raises:
        SystemExit: there is none.
    """
    python = peers / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"--peers is {peers}, which has no bin/python: run bash launch/benchmark_peers.sh")
    return python


def peer_environment(threads: int, *, memory: bool = True) -> dict[str, str]:
    """Environment variables of a trainer that is measured: nothing is fetched, `threads` cores are used, and with
    `memory` freed memory is handled as the launcher has it for our trainer."""
    quiet = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    cores = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, **quiet, **cores, **(HUGE_PAGES | preloaded(()) if memory else {})}


def machine(run: Path) -> str:
    """Commit and machine of a run, in a sentence."""
    start = read_starts(run)[0]
    where = start["machine"]
    return f"Commit {start['code'].get('commit', 'unknown')[:9]}, {where['cpus_allowed']} cores of {where['cpu']}."


@dataclass(frozen=True)
class Curve:
    """Held-out success of a run by what had been spent, one entry for each evaluation, and when its spending began."""

    success: np.ndarray
    spent: Mapping[str, np.ndarray]
    begun_s: float = 0.0

    def until(self, target: float) -> Mapping[str, float] | None:
        """What was spent until success first meets `target`, by straight lines between evaluations; None if never."""
        met = np.flatnonzero(self.success >= target)
        if not len(met):
            return None
        last = int(met[0])
        if last == 0:
            return {name: float(values[0]) for name, values in self.spent.items()}
        before, after = self.success[last - 1 : last + 1]
        part = (target - before) / (after - before)
        return {name: float(v[last - 1] + part * (v[last] - v[last - 1])) for name, v in self.spent.items()}


def curve(run: Path, later: Mapping[int, float] | None = None) -> Curve:
    """Read a finished run's metrics. An evaluation of step 0 has spent nothing. `rollouts` are episodes that were
    begun, `tokens` those that the engine sampled and the trainer trained on; `seconds` are without those between a
    launch's end and the next. `later`: success by step of evaluations that were made after the run, which stand in
    place of its own but for that of step 0."""
    lines = read_metrics(run)
    group_size = load_run(run).rollout.group_size
    leased = {line["step"]: line["tasks"] * group_size for line in lines if line["kind"] == "batch"}
    trained_lines = [line for line in lines if line["kind"] == "train"]
    steps = {line["step"]: line["time_s"] for line in trained_lines}
    tokens = dict(zip(steps, np.cumsum([line["trained_tokens"] for line in trained_lines]).tolist(), strict=True))
    # A line is written at the end of its evaluation, beside which training is already under way.
    start = next(line for line in lines if line["kind"] == "eval" and line["step"] == 0)
    begun_s = start["time_s"] - start.get("seconds", 0.0)
    at_work = launches(run)
    between = [(ended_s, began_s) for (_, ended_s), (began_s, _) in itertools.pairwise(at_work)]

    def worked_s(until_s: float) -> float:
        return until_s - begun_s - sum(back_s - gone_s for gone_s, back_s in between if begun_s <= gone_s < until_s)

    evals = {line["step"]: line["success_rate"] for line in lines if line["kind"] == "eval"}
    if later is not None:
        evals = {0: evals[0], **{step: success for step, success in later.items() if step}}
    at = sorted(evals)
    spent = {
        "rollouts": [leased[step] if step else 0 for step in at],
        "steps": at,
        "tokens": [tokens[step] if step else 0 for step in at],
        "seconds": [worked_s(steps[step]) if step else 0.0 for step in at],
    }
    success = np.array([evals[step] for step in at])
    return Curve(success, {name: np.array(values, float) for name, values in spent.items()}, begun_s)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, and each of them; one value has no deviation."""
    deviation = f" ± {statistics.stdev(values):,.0f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.0f}{deviation} ({', '.join(f'{value:,.0f}' for value in values)})"
