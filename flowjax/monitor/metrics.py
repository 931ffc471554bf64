"""A run's progress on disk: `metrics.jsonl`, one JSON object a line, appended by several processes and read while it
grows; and `status-<role>.json`, replaced about once a second, by a trainer after each step, by the pool as it decides.
Also formats of their numbers for people."""

import contextlib
import fcntl
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from flowjax.files import replace_file
from flowjax.monitor.diagnosis import RECENT_STEPS, Symptom, diagnose, mean
from flowjax.monitor.trouble import write_whole

METRICS_FILE = "metrics.jsonl"
_BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = ("nan", "inf", "-inf")  # such values as a line has them
# Kinds of lines that are synced to the disk: once the ledger or a checkpoint counts a step as done, nobody would write
# its line again after a power cut.
_DURABLE = ("train", "eval")


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
        """Append one line; it is in the file when this returns, one of a step or an evaluation on the disk (4 ms)."""
        stamp = {} if step is None else {"step": int(step)}
        plain = {name: _plain(value) for name, value in values.items()}
        line = json.dumps({"time_s": round(time.time(), 3), "kind": kind, **stamp, **plain}) + "\n"
        with _locked(self._path), self._path.open("ab", buffering=0) as file:
            if _torn(self._path):  # by a process that was killed: its half line must not swallow this one
                line = "\n" + line
            end = file.seek(0, os.SEEK_END)
            try:
                write_whole(file.fileno(), line.encode())
                if kind in _DURABLE:
                    os.fsync(file.fileno())
            except OSError:  # a full disk, say: the half line is taken back, so that the file holds whole lines only
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


def lost_checkpoints(run_dir: Path, policies: Iterable[str]) -> list[str]:
    """Messages on policies that have been trained and have no checkpoint, as in a copy of a run without its largest
    files: their trainer would begin with version 0, and drop the lines of all steps."""
    trained = {line.get("policy") for line in read_metrics(run_dir) if line.get("kind") == "train"}
    folders = [run_dir / "checkpoints" / name for name in policies if name in trained]
    remedy = "bring its folders back, or start a new run"
    return [
        f"{folder} has no checkpoint, but this run has trained {folder.name}: {remedy}"
        for folder in folders
        if not any(step.name.isdecimal() for step in folder.glob("*"))
    ]


def evaluation_lines(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of evaluations by step. Several are played at once, and each is written when its last episode ends; of one
    that was written twice, as after the death of a process, the last line."""
    last = {str(entry.get("versions", entry.get("step", 0))): entry for entry in entries if entry.get("kind") == "eval"}
    return sorted(last.values(), key=lambda entry: entry.get("step", 0))


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
    # Rounding shortens lines; a small value, such as a learning rate, would lose digits that matter.
    return round(value, 8) if isinstance(value, float) and abs(value) >= 1e-3 else value


def _torn(path: Path) -> bool:
    """True if the file ends in the middle of a line."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _drop_later(path: Path, step: int | Mapping[str, int]) -> None:
    """Drop lines of training and evaluation after `step`, which may differ by policy.

    Lines of other policies stay. With several steps an evaluation goes if any of its versions is later, and a line of
    training without a policy if it is after the largest.
    """

    def is_lost(entry: dict[str, Any]) -> bool:
        if entry.get("kind") == "eval" and not isinstance(step, int):  # its step is that of one policy
            return any(entry.get("versions", {}).get(policy, 0) > newest for policy, newest in step.items())
        return entry.get("kind") in ("train", "eval") and entry.get("step", 0) > last(entry)

    def last(entry: dict[str, Any]) -> float:
        if isinstance(step, int):
            return step
        if "policy" in entry:
            return step.get(entry["policy"], math.inf)  # inf: a policy of another trainer, which loses no line
        return max(step.values(), default=math.inf)

    with _locked(path):
        entries = read_metrics(path)
        kept = [entry for entry in entries if not is_lost(entry)]
        replace_file(path, "".join(json.dumps(entry) + "\n" for entry in kept))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock that one process holds at a time. It is a file beside: `_drop_later` replaces the metrics file itself."""
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_status(run_dir: Path, role: str) -> Mapping[str, Any]:
    """`status-<role>.json`; empty when it is not there."""
    try:
        status = json.loads((run_dir / f"status-{role}.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


class NewStatus:
    """`status-<role>.json` as it is written from now on, empty until then: what is there now is of the launch before.

    The two are told apart by content, not by time: the machine's clock may be set back meanwhile.
    """

    def __init__(self, run_dir: Path, role: str):
        self._run_dir, self._role, self._old = run_dir, role, read_status(run_dir, role)

    def read(self) -> Mapping[str, Any]:
        status = read_status(self._run_dir, self._role)
        return {} if status == self._old else status


def write_status(run_dir: Path, role: str, status: Mapping[str, Any]) -> None:
    """Replace `status-<role>.json` atomically, with the time added: a reader never sees half of it."""
    text = json.dumps({**status, "time_s": time.time()})
    replace_file(run_dir / f"status-{role}.json", text, durable=False)


# ------------------------------------------------------------------------------------------------ followed as they grow

_SUMMED = ("episodes", "turns", "trained_tokens", "row_tokens", "wait_s", "step_s", "save_s", "total_s")


@dataclass
class RoleState:
    """State of one role, as the launcher shows it.

    `phase` is one of starting, up, waiting (to be restarted), paused (until the disk can be written), stopping,
    stopped, done, failed. `log_start_bytes` is the size of the role's log at its last start.
    """

    name: str
    phase: str = "starting"
    restarts: int = 0
    pid: int = 0
    started_s: float = 0.0
    detail: str = ""
    log_start_bytes: int = 0


class Progress:
    """A run's metrics in memory, cheap to bring up to date: `update` reads only what was appended.

    Args:
        apart: each policy has a trainer of its own, and these work side by side; else one trainer takes them in turn.
    """

    def __init__(self, run_dir: Path, *, apart: bool = False):
        self.run_dir, self._apart = Path(run_dir), apart
        self._file: BinaryIO | None = None  # held open: no file that replaces it can get the same inode number
        self._rest = b""  # beginning of a line whose end is not written yet
        self._newest_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self.train: list[dict[str, Any]] = []
        self._batches: list[dict[str, Any]] = []
        self.by_policy: dict[str, list[dict[str, Any]]] = {}
        self._symptoms: list[Symptom] | None = None
        self.evals: dict[int, dict[str, Any]] = {}
        self.totals: dict[str, float] = dict.fromkeys(_SUMMED, 0.0)

    def update(self) -> list[dict[str, Any]]:
        """Read on. Returns the new lines; of a file that was replaced, those later than any seen before."""
        try:
            on_disk = (self.run_dir / METRICS_FILE).stat()
            # Another file under the name: a trainer that resumed from an earlier step has dropped lines.
            if replaced := self._file is None or not os.path.samestat(on_disk, os.fstat(self._file.fileno())):
                file = (self.run_dir / METRICS_FILE).open("rb")
                if self._file is not None:
                    self._file.close()
                self._file, self._rest = file, b""
                self._clear()
        except FileNotFoundError:
            return []
        assert self._file is not None
        data = self._file.read()
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        self._rest = rest
        entries = list(parse_lines(whole)) if newline else []
        self._fold(entries)
        if replaced:
            entries = [entry for entry in entries if entry.get("time_s", 0.0) > self._newest_s]
        self._newest_s = max([self._newest_s, *(entry.get("time_s", 0.0) for entry in entries)])
        return entries

    def _fold(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            kind = entry.get("kind")
            if kind == "train":
                self.train.append(entry)
                self.by_policy.setdefault(str(entry.get("policy", "")), []).append(entry)
                self._symptoms = None
                for name in _SUMMED:
                    self.totals[name] += number(entry, name) or 0.0
            elif kind == "batch":
                self._batches.append(entry)  # before its step, with which it is diagnosed
            elif kind == "eval":
                self.evals[entry.get("step", 0)] = entry

    @property
    def newest(self) -> dict[str, dict[str, Any]]:
        """The newest line of each policy, by its name."""
        return {policy: lines[-1] for policy, lines in self.by_policy.items()}

    @property
    def symptoms(self) -> list[Symptom]:
        """Everything that is wrong in the newest steps; computed once for each new step, not for each redraw."""
        if self._symptoms is None:
            self._symptoms = diagnose(self.train, self._batches)
        return self._symptoms

    @property
    def several(self) -> bool:
        """True if the run has several policies."""
        evaluated = (policy for entry in self.evals.values() for policy in entry.get("versions", {}))
        return len({*self.newest, *evaluated}) > 1

    @property
    def step(self) -> int:
        """Steps done, of all policies together."""
        return sum(entry.get("step", 0) for entry in self.newest.values())

    @property
    def spent_s(self) -> float:
        """Time of all steps, of the trainer that took longest."""
        return max((sum(number(e, "total_s") or 0.0 for e in lines) for lines in self._by_trainer()), default=0.0)

    def rate(self, name: str) -> float | None:
        """Sum over the trainers of a rate, such as tokens per second: of each the mean of its last steps."""
        found = [mean(lines[-RECENT_STEPS:], name) for lines in self._by_trainer()]
        return sum(values) if (values := [value for value in found if value is not None]) else None

    def _by_trainer(self) -> Iterable[list[dict[str, Any]]]:
        return self.by_policy.values() if self._apart else (self.train,)

    def recent(self, name: str) -> float | None:
        """Mean of a metric over the last steps; nan where one of them is."""
        values = [value for entry in self.train[-RECENT_STEPS:] if (value := measured(entry, name)) is not None]
        return sum(values) / len(values) if values else None  # fmean refuses inf beside -inf

    def last(self, name: str) -> float | None:
        return measured(self.train[-1], name) if self.train else None

    def success(self) -> float | None:
        """Share of the episodes of the last steps that succeeded."""
        entries = [e for e in self.train[-RECENT_STEPS:] if number(e, "success_rate") is not None]
        episodes = sum(e.get("episodes", 1.0) for e in entries)
        return sum(e["success_rate"] * e.get("episodes", 1.0) for e in entries) / episodes if episodes else None

    def share(self, name: str, *, first: bool = False) -> float | None:
        """Mean of a share of the turns over the last steps, or the first ones, each step weighted by its turns."""
        return mean(self.train[:RECENT_STEPS] if first else self.train[-RECENT_STEPS:], name, by="turns")

    def remaining_s(self, steps: Mapping[str, int]) -> float | None:
        """Seconds until every policy has made its last of `steps`, at the median pace of its newest ones.

        The first step compiles and does not count. A policy without a pace yet gets that of all policies; None while
        there is no pace at all. Trainers that work side by side take as long as the slowest; one trainer takes the sum.
        """
        left_s: list[float] = []
        for policy, last in steps.items():
            lines = self.by_policy.get(policy, [])
            pace_s = _pace_s(lines) or _pace_s(self.train)
            left = last - (lines[-1].get("step", 0) if lines else 0)
            if left and pace_s is None:
                return None
            left_s.append((pace_s or 0.0) * left)
        return (max if self._apart else sum)(left_s) if left_s else None


def _pace_s(lines: Sequence[Mapping[str, Any]]) -> float | None:
    paced = (number(line, "total_s") for line in lines[max(1, len(lines) - 2 * RECENT_STEPS) :])
    values = [value for value in paced if value is not None]
    return statistics.median(values) if values else None


def printable(text: str) -> str:
    """Text from outside, such as names of workers, without control characters that a terminal would act on."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def number(entry: Mapping[str, Any], name: str) -> float | None:
    """A finite number of an entry; None where it is missing or "nan" and the like."""
    value = entry.get(name)
    return value if isinstance(value, int | float) else None


def measured(entry: Mapping[str, Any], name: str) -> float | None:
    """As `number`, but nan or infinite as a float where the line has that."""
    return float(entry[name]) if entry.get(name) in NOT_FINITE else number(entry, name)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def fixed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def count(entry: Mapping[str, Any], *names: str) -> str:
    """The first of the named numbers that is known, as a whole number; "-" for none."""
    return next((f"{int(value):,}" for name in names if (value := number(entry, name)) is not None), "-")


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(max(int(seconds), 0), 60)  # negative where another machine's clock is ahead
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def interval(entry: Mapping[str, Any] | None, *, reasons: bool = False) -> str:
    """Success of an evaluation with its 95 % interval, the number of its tasks, episodes that are left out, and whether
    it has no rewards; with `reasons` also why, in the user's own words, which are no text for rich to mark up."""
    if entry is None:
        return "-"
    low, high = number(entry, "low"), number(entry, "high")
    episodes = entry.get("episodes", "-")
    tasks = entry.get("tasks", episodes)
    played = "" if tasks == episodes else f" tasks in {episodes} episodes"
    asked = (number(entry, "asked") or 0) * entry.get("samples", 1)
    unfinished = entry.get("unfinished", 0)
    nothing = f", {unfinished} came to nothing" if unfinished else ""
    why = entry.get("unrewarded", "")
    unrewarded = "" if not why else f"; {printable(why)}" if reasons else ", without rewards"
    few = ", all there are" if entry.get("episodes", 0) + unfinished < asked else ""
    return (
        f"{percent(number(entry, 'success_rate'))} [{fixed(100 * low if low is not None else None, 1)}, "
        f"{fixed(100 * high if high is not None else None, 1)}] of {tasks}{played}{few}{nothing}{unrewarded}"
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` points of a curve as bars, scaled between their own least and greatest."""
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high - low
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)
