"""`metrics.jsonl`: one JSON object a line, appended by several processes of a run and read while it grows."""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowjax.files import replace_file
from flowjax.monitor.trouble import write_whole

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends `{"time_s", "kind", "step", ...}` lines to a run folder.

    Every role may hold one: a line is one write under a lock, to the file that is there at that moment. A trainer that
    resumes gives the step it resumes from, for each policy; lines of later steps, which it will write again, are
    dropped.
    """

    def __init__(self, run_dir: Path, resume_step: int | Mapping[str, int] | None = None):
        self._path = Path(run_dir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            _drop_later(self._path, resume_step)

    def write(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Append one line; it is in the file when this returns."""
        stamp = {} if step is None else {"step": int(step)}
        plain = {name: _plain(value) for name, value in values.items()}
        line = json.dumps({"time_s": round(time.time(), 3), "kind": kind, **stamp, **plain}) + "\n"
        with _locked(self._path), self._path.open("ab", buffering=0) as file:
            if _torn(self._path):
                line = "\n" + line
            end = file.seek(0, os.SEEK_END)
            try:
                write_whole(file.fileno(), line.encode())
            except OSError:  # half a line would be no line, and in the way of the next
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file (or of the run folder's); a torn line, the trace of a killed process, is left out."""
    path = path / METRICS_FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return list(parse_lines(data))


def parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The whole lines in `data` that hold a JSON object."""
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            if line and isinstance(entry := json.loads(line), dict):
                yield entry


def _plain(value: Any) -> Any:
    """JSON has no NaN: a value that is not finite is written as its name, so that every reader takes the line."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return round(value, 8) if isinstance(value, float) and abs(value) >= 1e-3 else value


def _torn(path: Path) -> bool:
    """True if the file ends in the middle of a line."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _drop_later(path: Path, step: int | Mapping[str, int]) -> None:
    """Lines without a policy are of the run."""

    def last(entry: dict[str, Any]) -> float:
        if isinstance(step, int):
            return step
        if "policy" in entry:
            return step.get(entry["policy"], math.inf)  # another trainer's
        return max(step.values(), default=math.inf)

    with _locked(path):
        entries = read_metrics(path)
        kept = [e for e in entries if e.get("kind") not in ("train", "eval") or e.get("step", 0) <= last(e)]
        replace_file(path, "".join(json.dumps(entry) + "\n" for entry in kept))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; beside the file, because dropping lines replaces the file itself."""
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
