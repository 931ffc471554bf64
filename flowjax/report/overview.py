"""Overview of a run as data for the page: metrics by step, evaluations, where the time went, how runs differ."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flowjax.config import ConfigError, load_run
from flowjax.monitor.diagnosis import diagnose, not_judged
from flowjax.monitor.held_out import oldest_first, read_held_out, summarise
from flowjax.monitor.metrics import NOT_FINITE, evaluation_lines, read_metrics
from flowjax.monitor.provenance import read_starts

_SEED_FIELDS = ("seed", "name", "runs")  # the only fields in which runs of one method with different seeds differ
_PHASES = {  # of a step: field of its line -> name on the page
    "wait_s": "waiting for episodes",
    "pack_s": "packing rows",
    "compute_s": "forward and backward passes",
    "save_s": "saving checkpoints",
    "keep_s": "keeping transcripts",
}
_EVALUATED = (
    "step", "versions", "success_rate", "low", "high", "tasks", "episodes", "unfinished", "seconds", "asked", "sources",
    "policies", "turns_mean", "unrewarded",
)  # fmt: skip
_SHOWN_EVENTS = ("restart", "down", "failed", "paused", "kill", "moved")


def overview(run_dir: Path) -> dict[str, Any]:
    """Everything about a run that the page shows in its first section, and its config.

    Raises:
        ConfigError: the folder is not a run's, or has no step and no evaluation yet.
    """
    config, entries, warm = load_run(run_dir), read_metrics(run_dir), read_metrics(run_dir / "warm_start")
    train = [entry for entry in entries if entry["kind"] == "train"]
    evaluations = evaluation_lines(entries)
    if not train and not evaluations:  # the folder of a `flowjax.evaluate` has only episodes, no metrics.jsonl
        evaluations = [_played(file) for file in oldest_first((run_dir / "held_out").glob("*.jsonl"))]
    if not train and not evaluations:
        warming = ", it is in its warm start" if warm else ""
        ended = [status for start in read_starts(run_dir)[-1:] if (status := start.get("exit_status"))]
        remedy = (
            f"its launch ended with status {ended[0]}: go on with --resume" if ended else "look again when it has one"
        )
        raise ConfigError(f"{run_dir} has no step and no evaluation yet{warming}: {remedy}")
    batches = [entry for entry in entries if entry["kind"] == "batch"]
    events = [entry for entry in entries if entry["kind"] == "run"]
    warm_start = _warm_start(warm)
    starts = [start for start in read_starts(run_dir) if isinstance(start.get("started_s"), int | float)]
    ends = ends_of(starts, [*entries, *warm])
    paused = pauses(starts, ends)
    warm_s = _awake(warm_start[1], paused) - _awake(warm_start[0], paused) if warm_start else 0.0
    wall_s = sum(end - start["started_s"] for start, end in zip(starts, ends, strict=True))
    return {
        "name": run_dir.name,
        "folder": str(run_dir),
        "world": config.env.name.rpartition(":")[2],
        "steps": config.trainer.steps,
        "config": dict(_flat(config.to_dict())),
        "starts": starts,
        "policies": _by_policy(train),
        "evaluations": list(_evaluations(evaluations)),
        "problems": [str(finding) for finding in diagnose(train, batches)],
        "unjudged": not_judged(train),
        "timeline": timeline(train, evaluations, events, warm_start, paused),
        "spent": spent(train, evaluations, warm_s, wall_s),
        "events": [
            {name: event.get(name, "") for name in ("time_s", "role", "event", "text")}
            for event in events
            if event.get("event") in _SHOWN_EVENTS or "held-out" in str(event.get("event"))
        ],
    }


def version_of(evaluation: str) -> int:
    """Version of a policy in the name of an evaluation, the lowest of several; 0 of a model that was not trained."""
    versions = [part.rpartition("@")[2] for part in evaluation.split(",")]
    return min((int(version) for version in versions if version.isdecimal()), default=0)


def _played(file: Path) -> dict[str, Any]:
    """The line that an evaluation would have in metrics.jsonl, computed from its episodes."""
    results = summarise(read_held_out(file))
    success = results["metrics"]["success"]
    found = {"step": version_of(file.stem), "success_rate": success["mean"], "low": success["low"]}
    return {**found, "high": success["high"], "tasks": results["tasks"], "episodes": results["episodes"]}


def _by_policy(train: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns of numbers by policy and metric: None where a step lacks it, "nan" or "inf" where it is that."""
    found: dict[str, Any] = {}
    for policy in dict.fromkeys(str(entry.get("policy", "")) for entry in train):
        lines = [entry for entry in train if str(entry.get("policy", "")) == policy]
        numbers = (name for line in lines for name, value in line.items() if _number(value) is not None)
        names = [name for name in dict.fromkeys(numbers) if name not in ("step", "time_s")]
        columns = {name: [_number(line.get(name)) for line in lines] for name in names}
        found[policy] = {"step": [line.get("step") for line in lines], "metrics": columns}
    return found


def _evaluations(entries: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        yield {name: entry[name] for name in _EVALUATED if name in entry}


def _number(value: Any) -> float | str | None:
    if value in NOT_FINITE:
        return value
    return float(f"{value:.5g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _warm_start(entries: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Times of the first and the last step of the warm start; None for a run without."""
    times = [entry["time_s"] for entry in entries if "time_s" in entry]
    return (min(times), max(times)) if len(times) > 1 else None


# ------------------------------------------------------------------------------------------------- where the time went


def timeline(
    train: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    warm_start: tuple[float, float] | None,
    paused: Sequence[tuple[float, float]] = (),
) -> list[dict[str, Any]]:
    """Rows of spans `[start, end, phase]`: the warm start, each role, each policy's steps by phases, the evaluations.

    Times are in seconds since the epoch, but those after a pause (`paused`) are moved back by its length, so that the
    page shows no gaps.
    """
    rows: list[dict[str, Any]] = []
    last_s = max((entry.get("time_s", 0.0) for entry in (*train, *evaluations, *events)), default=0.0)
    for role in dict.fromkeys(str(event.get("role", "")) for event in events):
        spans = list(_role_spans([event for event in events if event.get("role") == role], last_s))
        if spans:
            rows.append({"name": role, "spans": spans})
    if warm_start is not None:
        rows.insert(0, {"name": "warm start: steps", "spans": [[*warm_start, "warm start"]]})
    for policy in dict.fromkeys(str(entry.get("policy", "")) for entry in train):
        lines = [entry for entry in train if str(entry.get("policy", "")) == policy]
        rows.append({"name": f"steps of {policy}".strip(), "spans": [span for line in lines for span in _phases(line)]})
    spans = [[e["time_s"] - e["seconds"], e["time_s"], "evaluation"] for e in evaluations if e.get("seconds")]
    if spans:
        rows.append({"name": "evaluations", "spans": spans})
    for row in rows:
        moved = ([_awake(start, paused), _awake(end, paused), phase] for start, end, phase in row["spans"])
        row["spans"] = [span for span in moved if span[1] > span[0]]
    return rows


def ends_of(starts: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> list[float]:
    """End of each launch; of one that was killed or goes on, the time of its last line."""
    found = []
    later = [*(start["started_s"] for start in starts[1:]), math.inf]
    for start, after_s in zip(starts, later, strict=False):  # a folder without run.json has no starts
        lines = [time_s for entry in entries if start["started_s"] <= (time_s := entry.get("time_s", 0.0)) < after_s]
        found.append(start.get("ended_s", max(lines, default=start["started_s"])))
    return found


def pauses(starts: Sequence[Mapping[str, Any]], ends: Sequence[float]) -> list[tuple[float, float]]:
    """Spans between the end of a launch and the start of the next."""
    between = zip(ends, (start["started_s"] for start in starts[1:]), strict=False)
    return [(ended_s, started_s) for ended_s, started_s in between if started_s > ended_s]


def _awake(time_s: float, paused: Sequence[tuple[float, float]]) -> float:
    """The time less the pauses before it; a time within a pause becomes the pause's start."""
    return round(time_s - sum(min(time_s, to) - since for since, to in paused if time_s > since), 3)


def _role_spans(events: Sequence[Mapping[str, Any]], until_s: float) -> Iterator[list[Any]]:
    """Spans of starting, up and down of one role, from its supervisor's events."""
    # Some roles never report "up": they count as up from their start.
    begins = "starting" if any(event.get("event") == "up" for event in events) else "up"
    phases = {"start": begins, "restart": begins, "up": "up", "down": "down", "paused": "down"}
    at, phase = 0.0, ""
    for event in events:
        name, time_s = str(event.get("event")), float(event.get("time_s", 0.0))
        if phase and time_s > at:
            yield [at, time_s, phase]
        phase = "" if name in ("done", "stopped", "failed") else phases.get(name, phase)
        at = time_s
    if phase and until_s > at:  # the run goes on, or was killed
        yield [at, until_s, phase]


def _phases(line: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Phases of one step, laid end to end up to the time of its line. Saving comes first: it is the save of the step
    before."""
    seconds = phase_seconds(line)
    at = float(line.get("time_s", 0.0)) - sum(seconds.values())
    for name in ("save_s", *(name for name in _PHASES if name != "save_s")):
        if seconds.get(name, 0.0) > 0:
            yield [round(at, 3), round(at + seconds[name], 3), _PHASES[name]]
            at += seconds[name]


def phase_seconds(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a step. `step_s` contains `pack_s`: computing is the rest of it."""
    found = {name: float(line[name]) for name in _PHASES if isinstance(line.get(name), int | float)}
    if isinstance(line.get("step_s"), int | float):
        found["compute_s"] = max(line["step_s"] - found.get("pack_s", 0.0), 0.0)
    return found


def spent(
    train: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    warm_s: float,
    wall_s: float,
) -> dict[str, Any]:
    """Seconds by phase over the whole run, and counts of episodes, turns and trained tokens.

    Where each policy has a trainer of its own, these work side by side: their phases may be more than the wall time.
    """
    phases: dict[str, float] = {"warm start": warm_s} if warm_s else {}
    for line in train:
        for name, seconds in phase_seconds(line).items():
            phases[_PHASES[name]] = phases.get(_PHASES[name], 0.0) + seconds
    if wall_s > sum(phases.values()):
        phases["starting, stopping and evaluating alone"] = wall_s - sum(phases.values())
    sums = {name: sum(line.get(name, 0) or 0 for line in train) for name in ("episodes", "turns", "trained_tokens")}
    return {
        "phases": phases,
        "wall_s": wall_s or sum(phases.values()),  # the latter for a run without run.json
        "evaluation_s": sum(entry.get("seconds", 0.0) for entry in evaluations),
        **sums,
    }


# ------------------------------------------------------------------------------------------------------ how runs differ


def differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fields in which the configs of runs differ, with each run's value; the field `name` is left out."""
    fields = dict.fromkeys(field for run in runs for field in run["config"])
    found = []
    for field in fields:
        values = [run["config"].get(field, "") for run in runs]
        if field != "name" and any(value != values[0] for value in values):
            found.append({"field": field, "values": values})
    return found


def methods(runs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Indices of runs that differ only in their seed, as one list for each method."""
    alike: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        alike.setdefault(_setting(run), []).append(index)
    found: dict[str, list[int]] = {}
    for same in alike.values():
        # Seeds 0 and 3 of one base "llama-3" are alike as they are: then the base is no seed's own.
        per_seed = {_setting(runs[index], base_per_seed=True) for index in same}
        found.setdefault(per_seed.pop() if len(per_seed) == 1 else _setting(runs[same[0]]), []).extend(same)
    return list(map(sorted, found.values()))


def _setting(run: Mapping[str, Any], *, base_per_seed: bool = False) -> str:
    """A run's config as text, without the fields of its seed: equal for runs of one method.

    With `base_per_seed` bases `<base>-<seed>` count as equal, too: each seed may have a base of its own.
    """
    rest = {field: value for field, value in run["config"].items() if field not in _SEED_FIELDS}
    of_seed = f"-{run['config'].get('seed')}"
    for field, value in rest.items():  # paths with the run's own name in them, such as that of its nano base
        if isinstance(value, str):
            text = "/".join("<run>" if part == run["name"] else part for part in value.split("/"))
            is_of_seed = base_per_seed and field.endswith("model.path") and text.endswith(of_seed)
            rest[field] = f"{text.removesuffix(of_seed)}-<seed>" if is_of_seed else text
    return str(sorted(rest.items()))


def names_of(runs: Sequence[Path]) -> list[str]:
    """Names of runs as they are shown: those of their folders, or the whole paths where two have the same name."""
    names = [run.name for run in runs]
    return [str(run) if names.count(run.name) > 1 else run.name for run in runs]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of a config by dotted names; values that JSON lacks are turned into text."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, str | int | float | bool | None):
            yield f"{before}{name}", value
        else:
            yield f"{before}{name}", str(value.to_dict() if isinstance(value, ConfigDict) else value)
