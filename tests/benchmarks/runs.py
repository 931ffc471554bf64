"""Whole runs of a recipe over seeds, for benchmarks that compare what they learn."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flowjax.monitor.provenance import read_starts


def trained(recipe: str, seed: str, out: Path, fields: Sequence[str] = ()) -> tuple[Path, float]:
    """The folder of a finished run, and the seconds that the launcher took; a run that was stopped goes on.

    `fields` are further ones to set, as on the command line.
    """
    file, _, variant = recipe.partition(":")
    variant = variant or "nano"
    run = out / f"{file}-{variant}-{seed}".replace("_", "-")
    took = run / "launch.json"
    if not took.exists():
        named = [f"--config=configs/{file}.py:{variant}", f"--name={run.name}", f"--config.seed={seed}"]
        fresh = [*named, f"--config.runs={out}", *fields]
        started_s = time.monotonic()
        call("flowjax.launch", *([f"--resume={run}"] if (run / "config.json").exists() else fresh))
        took.write_text(json.dumps({"launch_s": time.monotonic() - started_s}))
    return run, json.loads(took.read_text())["launch_s"]


def call(module: str, *arguments: str) -> None:
    """Run a command of flowjax to its end.

    Raises:
        SystemExit: it failed; its own words are above.
    """
    command = [sys.executable, "-m", module, *arguments]
    print("$", "python -m", module, *arguments, flush=True)
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def machine(run: Path) -> str:
    """Commit and machine of a run, in a sentence."""
    start = read_starts(run)[0]
    where = start["machine"]
    return f"Commit {start['code'].get('commit', 'unknown')[:9]}, {where['cpus_allowed']} cores of {where['cpu']}."
