"""The line that each step writes (metrics of updates, episodes and rows, seconds, speed), and the trainer's status."""

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from flowjax.models.cost import peak_flops
from flowjax.monitor.metrics import MetricsWriter, write_status
from flowjax.monitor.prometheus import MetricsEndpoint
from flowjax.monitor.transcripts import write_lines
from flowjax.records import TokenRow
from flowjax.trainer.batch import MicroBatch, swapped
from flowjax.trainer.sources import ServedBatch
from flowjax.trainer.update import Metrics

OnStep = Callable[[dict[str, Any]], None]


@dataclass
class UpdateCounters:
    """Numbers of one policy that a checkpoint keeps."""

    skipped_updates: int = 0  # updates whose gradient was not finite
    empty_updates: int = 0  # updates without a sampled token


class Comparison(NamedTuple):
    """Log-probs of engine and trainer under one version, on the devices: see `losses.ratios`."""

    mismatch: Metrics
    of_sequences: tuple[jax.Array, jax.Array]


@dataclass
class StepResult:
    """A dispatched step, whose results may still be on their way."""

    policy: str
    step: int
    counters: UpdateCounters
    updates: list[Metrics]  # of its updates, on the devices
    compared: list[Comparison]  # engine and trainer, under each version that was compared
    trajectories: Sequence[str]  # trajectory of each compared sequence, by the sequence's number
    mismatches: dict[str, tuple[float, int]]  # the policy's, which this step's are added to: see `sources.Mismatches`
    line: dict[str, float]  # metrics that the host knows already
    started_s: float
    flops: float
    keep: Callable[[], None]  # to be called once the results are there
    rate: Callable[[int], float]  # learning rate of the newest update, by the number of updates skipped so far


class StepLog:
    """Writes the line of each step once its results are there, in the order in which steps were dispatched."""

    def __init__(self, metrics: MetricsWriter | None, on_step: OnStep):
        self._metrics, self._on_step = metrics, on_step
        self._in_flight: deque[StepResult] = deque()
        self._devices_idle_s = 0.0  # when the newest results came: no later step can have begun before

    def add(self, result: StepResult) -> None:
        self._in_flight.append(result)

    def write(self, *, in_flight: int) -> None:
        """Write lines of the oldest steps, waiting for their results, until at most `in_flight` steps lack theirs."""
        while len(self._in_flight) > in_flight:
            line = self._line_of(self._in_flight.popleft())
            if self._metrics is not None:
                self._metrics.write("train", **line)
                self._on_step(line)

    def _line_of(self, result: StepResult) -> dict[str, Any]:
        updates, compared = jax.device_get((result.updates, result.compared))  # waits for the devices
        now_s = time.perf_counter()
        # With steps in flight, this one was dispatched while the devices still worked on the one before.
        step_s = now_s - max(result.started_s, self._devices_idle_s)
        self._devices_idle_s = now_s
        skipped = int(sum(values["skipped"] for values in updates))
        result.counters.skipped_updates += skipped
        if skipped:
            logging.warning("%s, step %d: %d updates skipped, not finite", result.policy, result.step, skipped)
        _add_mismatches(result.mismatches, result.trajectories, compared)
        result.keep()
        keep_s = time.perf_counter() - now_s
        line = {
            "policy": result.policy,
            "step": result.step,
            **_update_metrics(updates),
            **_mismatch_metrics([each.mismatch for each in compared]),
            **result.line,
            "skipped_updates": result.counters.skipped_updates,
            "learning_rate": result.rate(result.counters.skipped_updates),
            "step_s": step_s,
            "keep_s": keep_s,
            "total_s": result.line["wait_s"] + step_s + keep_s + result.line["save_s"],
            "tokens_per_s": result.line["row_tokens"] / step_s,
            "flops_per_s": result.flops / step_s,
            **memory_metrics(),
        }
        if peak := peak_flops(jax.devices()[0].device_kind):
            line["flops_utilisation"] = line["flops_per_s"] / (peak * jax.device_count())
        return line


def write_trained(
    path: Path,
    rows: Sequence[TokenRow],
    order: Sequence[Sequence[int]],
    micro_batches: Sequence[MicroBatch],
    logprobs: Sequence[jax.Array],
) -> None:
    """Write the log-probs that each trajectory's sampled tokens had in the pass that was differentiated.

    Args:
        path: of the file.
        rows: of the batch, in its order.
        order: for each micro-batch, the index in `rows` of each of its sequences, by `MicroBatch.sequences`.
        logprobs: of each micro-batch, [rows, sampled].
    """
    found: dict[int, list[float]] = {}  # by index in `rows`
    for places, batch, values in zip(order, micro_batches, jax.device_get(list(logprobs)), strict=True):
        masked = np.asarray(batch.mask)
        numbers = np.asarray(batch.sequences)[masked]
        cuts = np.flatnonzero(np.diff(numbers)) + 1  # a sequence's tokens lie together
        firsts = numbers[np.concatenate([[0], cuts])]
        for number, part in zip(firsts, np.split(np.round(values[masked].astype(np.float64), 5), cuts), strict=True):
            found[places[number]] = part.tolist()
    by_trajectory: dict[str, list[float]] = {}
    for place in sorted(found):
        by_trajectory.setdefault(rows[place].trajectory_id, []).extend(found[place])
    with contextlib.suppress(OSError):  # a full disk will stop the next checkpoint, with a better message
        write_lines(path, ({"trajectory_id": name, "logprobs": values} for name, values in by_trajectory.items()))


def _update_metrics(updates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of a step: means over the tokens of its updates, without skipped ones unless all were; `trained_tokens`
    is the sum over all."""
    if not updates:
        return {"trained_tokens": 0.0}
    made = [update for update in updates if not update["skipped"]] or updates
    tokens = [max(float(update["trained_tokens"]), 1.0) for update in made]
    values = {name: float(np.average([update[name] for update in made], weights=tokens)) for name in made[0]}
    values["trained_tokens"] = float(sum(update["trained_tokens"] for update in updates))
    shown = {"ratio": "ratio_mean", "clipped": "clip_share"}
    hidden = ("skipped", "tokens", "denominator")
    return {shown.get(name, name): value for name, value in values.items() if name not in hidden}


def _mismatch_metrics(versions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """k3 KL (nats per token) and largest log-prob difference between engine and trainer; empty if none was compared."""
    tokens = sum(float(version["tokens"]) for version in versions)
    if not tokens:
        return {}
    k3 = sum(float(version["k3"]) for version in versions) / tokens
    return {"mismatch_kl": k3, "mismatch_max": max(float(version["max"]) for version in versions)}


def _add_mismatches(
    found: dict[str, tuple[float, int]], trajectories: Sequence[str], compared: Sequence[Comparison]
) -> None:
    """Add each compared sequence's k3 sum and number of tokens to those of its trajectory in `found`."""
    for each in compared:
        of_sequences = (values.tolist() for values in each.of_sequences)
        # The arrays are longer: they have a slot for each number below a static bound.
        for name, k3, tokens in zip(trajectories, *of_sequences, strict=False):
            if tokens and math.isfinite(k3):
                k3_before, tokens_before = found.get(name, (0.0, 0))
                found[name] = (k3_before + max(k3, 0.0), tokens_before + int(tokens))


def memory_metrics() -> dict[str, int]:
    """Peak memory in bytes: of the process, and of its fullest device where the platform counts that."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB, but on macOS in bytes
    found = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if known := [peak for peak in peaks if peak]:
        found["device_peak_bytes"] = max(known)
    return found


def episode_metrics(served: ServedBatch) -> dict[str, float]:
    """Means over the batch's trajectories and turns."""
    totals = dict(served.totals)
    if not totals:
        return {}
    episodes, turns, groups = totals.pop("episodes"), totals.pop("turns"), totals.pop("groups", 0)
    means = {
        "reward_mean": totals.pop("reward") / episodes,
        "success_rate": totals.pop("success") / episodes,
        "invalid_share": totals.pop("invalid_turns") / turns,
        "cut_share": totals.pop("cut_turns", 0.0) / turns,
        "reply_tokens_mean": totals.pop("sampled_tokens", 0.0) / turns,
        "turns_mean": turns / episodes,
        "no_signal_share": totals.pop("groups_without_signal", 0) / max(groups, 1),
    }
    named = {name: value / episodes for name, value in totals.items()}
    return {"episodes": episodes, "turns": turns, "dropped_groups": served.dropped, **means, **named}


def row_metrics(rows: Sequence[TokenRow], packed: Sequence[Sequence[MicroBatch]], *, version: int) -> dict[str, float]:
    """Tokens of the rows, share of padding in the micro-batches' token slots, staleness of the trained tokens in
    versions, and the share of these that was swapped (see `swapped`)."""
    found: dict[str, float] = {"row_tokens": sum(len(row.tokens) for row in rows)}
    if slots := sum(batch.tokens.size for part in packed for batch in part):
        filled = sum(int((batch.segments > 0).sum()) for part in packed for batch in part)
        lag = version - np.concatenate([row.versions[row.sampled] for row in rows])
        after = np.concatenate([swapped(np.flatnonzero(row.sampled), row.versions[row.sampled]) for row in rows])
        found |= {
            "padding_share": 1.0 - filled / slots,
            "staleness_mean": float(lag.mean()),
            "staleness_max": int(lag.max()),
            "swapped_share": float(after.mean()),
        }
    return found


class TrainerStatus:
    """The newest line of each policy, in `status-<role>.json` and at a `/metrics` of its own."""

    def __init__(self, run_dir: Path, role: str, steps: Mapping[str, int]):
        self._run_dir, self._role = run_dir, role
        self._policies: dict[str, Mapping[str, Any]] = {policy: {"step": step} for policy, step in steps.items()}
        self.endpoint = MetricsEndpoint(lambda: {"policies": dict(self._policies)}, role="trainer")
        self._write()

    def update(self, line: Mapping[str, Any]) -> None:
        logging.info("%s: step %d loss %.4f", line["policy"], line["step"], line.get("loss", float("nan")))
        self._policies[line["policy"]] = {name: value for name, value in line.items() if name != "policy"}
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk will stop the next checkpoint, with a better message
            steps = {policy: {"step": line["step"]} for policy, line in self._policies.items()}
            write_status(self._run_dir, self._role, {"policies": steps, "metrics_url": self.endpoint.url})
