"""What a benchmark's table is made of, kept in one small file, so that further seeds join it on another day or machine:

    python -m tests.benchmarks.kept runs/algorithms docs/results/estimators_sokoban.tar.xz   # keep
    mkdir -p runs/algorithms && tar -xf docs/results/estimators_sokoban.tar.xz -C runs/algorithms

The benchmark's own command takes what was unpacked for runs of its `--out` that have ended: it prints the table without
a run, or makes those of other seeds only. Kept of each run are its config, commit, versions and machine, the lines of
its batches, steps and evaluations, each task's outcome before and after training, and evaluations made later. Weights
and transcripts are not.
"""

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowjax.monitor.held_out import evaluation_of, oldest_first
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.provenance import read_starts
from tests.benchmarks.runs import newest_version

KINDS = ("batch", "train", "eval")  # of lines that curves are made of
START = ("started_s", "ended_s", "exit_status", "code", "versions")
MACHINE = ("cpu", "cpus", "cpus_allowed", "gpus", "memory_bytes")  # neither its name nor that of a folder on it


def keep(out: Path, file: Path) -> list[str]:
    """Write what is kept of the finished runs in `out` to `file`. Returns their names."""
    runs = sorted(path.parent for path in out.glob("*/launch.json"))
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for run in runs:
            folder = tarfile.TarInfo(f"{run.name}/checkpoints/newest/{newest_version(run)}")  # read by its name alone
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
            for name, text in kept_of(run):
                entry = tarfile.TarInfo(f"{run.name}/{name}")
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
    return [run.name for run in runs]


def unpack(file: Path, folder: Path) -> None:
    """Put what `keep` has written to `file` into a folder."""
    with tarfile.open(file) as archive:
        # Python has filters from 3.11.4 on, and Debian 12 has 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def kept_of(run: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of a run's files."""
    yield "config.json", _config(run)
    yield "launch.json", (run / "launch.json").read_text()
    yield "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in read_metrics(run) if line["kind"] in KINDS)
    starts = [_start(start) for start in read_starts(run)]
    yield "run.json", json.dumps({"starts": starts})
    beside = oldest_first((run / "held_out").glob("*.jsonl"))
    for evaluation in dict.fromkeys((beside[0], beside[-1])):
        yield f"held_out/{evaluation.name}", evaluation.read_text()
    for folder in sorted(path.parent for path in run.glob("skills/*/results.json")):
        name, episodes = folder.relative_to(run), evaluation_of(folder)
        yield f"{name}/config.json", _config(folder)
        yield (
            f"{name}/results.json",
            json.dumps({"metrics": json.loads((folder / "results.json").read_text())["metrics"]}),
        )
        yield f"{name}/held_out/{episodes.name}", episodes.read_text()


def _config(run: Path) -> str:
    config = json.loads((run / "config.json").read_text())
    return json.dumps({**config, "runs": "runs"})


def _start(start: dict[str, Any]) -> dict[str, Any]:
    machine = {name: start["machine"][name] for name in MACHINE if name in start["machine"]}
    return {**{name: start[name] for name in START if name in start}, "machine": machine}


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit(__doc__)
    out, file = map(Path, arguments)
    names = keep(out, file)
    print(f"{file}: {len(names)} runs, {file.stat().st_size:,} bytes: {' '.join(names)}")


if __name__ == "__main__":
    main(sys.argv[1:])
