"""The training loop, top to bottom in the order of a step."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from flowjax.losses.mismatch import mismatch_metrics
from flowjax.models.decoder import Decoder
from flowjax.monitor.metrics import MetricsWriter
from flowjax.records import TokenRow
from flowjax.trainer.batch import MicroBatch, pack
from flowjax.trainer.learner import Learner
from flowjax.trainer.numbers import memory_metrics, peak_flops, step_flops
from flowjax.trainer.processes import ROW_AXES, Shared, is_first, place
from flowjax.trainer.sources import Served, Source
from flowjax.weights.publish import Checkpoints


@dataclass
class Dispatched:
    """A step whose results may still be on their way."""

    learner: Learner
    step: int
    taken: list[dict[str, Any]]  # metrics of its updates, on the devices
    line: dict[str, float]  # what is known on the host
    started_s: float
    flops: float


def train(
    config: ConfigDict,
    model: Decoder,
    source: Source,
    *,
    mesh: Mesh,
    metrics: MetricsWriter | None,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Decoder:
    """Train the one policy `config.policy.name`; see `train_policies`."""
    name = config.policy.name
    learners = {name: Learner(name, config, model, checkpoints)}
    return train_policies(learners, source, mesh=mesh, metrics=metrics, on_step=on_step)[name]


def train_policies(
    learners: Mapping[str, Learner],
    source: Source,
    *,
    mesh: Mesh,
    metrics: MetricsWriter | None,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Decoder]:
    """Train every policy until its own `config.trainer.steps`, in the order in which their batches come.

    With checkpoints, every step is saved, which publishes it. Without, nothing is saved (the warm start exports the
    returned model instead), and steps are dispatched ahead of their results. `metrics` is None in all processes but
    the first.
    """
    # ------------------------------------------------------------------------------------------------------ compile
    for learner in learners.values():  # while the engine starts and the first episodes are played
        learner.try_out(place(_longest(learner.config), mesh))

    # --------------------------------------------------------------------------------------------------------- loop
    under_way: deque[Dispatched] = deque()
    clock = _Clock()
    batches = Shared(source)
    batches.ask(_open(learners))
    while _open(learners):
        # batch: wait for it, tell what is on disk by now
        started_s = time.perf_counter()
        served = batches.take()
        learner = learners[served.policy]
        _tell_committed(learner, source)

        # pack: shuffle its rows, split them into updates, lay each out in rows of fixed length
        waited_s = time.perf_counter()
        trainer = learner.config.trainer
        parts = _split(served.rows, trainer.updates_per_step, seed=learner.config.seed, step=learner.step)
        layout: dict[str, Any] = {"row_tokens": trainer.row_tokens, "micro_batch_rows": trainer.micro_batch_rows}
        layout |= {
            "tight": trainer.tight_micro_batches,
            "rows_multiple": math.prod(mesh.shape[axis] for axis in ROW_AXES),
        }
        packed = [pack(part, **layout) for part in parts]
        on_device = [[place(micro_batch, mesh) for micro_batch in part] for part in packed]
        packed_s = time.perf_counter()

        # agreement: the sampler's log-probs against ours, under the very version that sampled them
        agreement = _agreement(learner, packed[0][0], on_device[0][0], mesh) if learner.checkpoints and packed else {}
        agreed_s = time.perf_counter()

        # step: each update adds up its micro-batches and divides once
        taken = []
        for update, part in enumerate(on_device):
            sums = None
            anchors = learner.functions.anchors(learner.start(update), learner.trained, learner.frozen, part)
            for index, (micro_batch, anchor) in enumerate(zip(part, anchors, strict=True)):
                drops = learner.drops(update, index)
                sums = learner.functions.add(learner.trained, learner.frozen, micro_batch, anchor, sums, drops)
            taken.append(learner.apply(sums))
        learner.empty += trainer.updates_per_step - len(parts)
        if not parts:
            logging.warning("%s, step %d: no row has a sampled token, nothing is trained", served.policy, learner.step)
        learner.advance()
        batches.ask(_open(learners))  # the next batch comes while the devices work

        # log: before the checkpoint, so that a committed step always has its line
        line = {
            **agreement,
            **_episode_metrics(served),
            **_row_metrics(served.rows, packed, version=learner.step - 1),
            "learning_rate": float(np.asarray(learner.schedule(learner.step * trainer.updates_per_step - 1))),
            "compile_count": learner.functions.compile_count(),
            "wait_s": waited_s - started_s,
            "pack_s": packed_s - waited_s,
            "agreement_s": agreed_s - packed_s,
            "save_s": learner.save_s,  # of the step before
        }
        flops = step_flops(learner.model, learner.lora, served.rows)
        under_way.append(Dispatched(learner, learner.step, taken, line, waited_s, flops))
        while len(under_way) > (0 if learner.checkpoints else trainer.steps_in_flight):
            _log(under_way.popleft(), clock, metrics, on_step)

        # publish: the checkpoint's commit marker is the publication
        stepped_s = time.perf_counter()
        learner.publish()
        learner.save_s = time.perf_counter() - stepped_s

    # ---------------------------------------------------------------------------------------------------------- end
    while under_way:
        _log(under_way.popleft(), clock, metrics, on_step)
    for learner in learners.values():
        if learner.checkpoints is not None:
            learner.checkpoints.wait()
            _tell_committed(learner, source)
    return {name: learner.merged() for name, learner in learners.items()}


class _Clock:
    """When the devices were last known to have nothing to do: a step cannot have begun before."""

    def __init__(self) -> None:
        self.idle_s = 0.0


def _open(learners: Mapping[str, Learner]) -> dict[str, int]:
    """The step that each policy in training is at."""
    return {name: learner.step for name, learner in learners.items() if not learner.finished}


def _tell_committed(learner: Learner, source: Source) -> None:
    if is_first() and learner.checkpoints is not None and (latest := learner.checkpoints.latest()) is not None:
        source.committed(learner.name, latest)


def _longest(config: ConfigDict) -> MicroBatch:
    """A micro-batch of rows as long as an episode's turn may get."""
    prompt, reply = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    sampled = np.arange(prompt + reply) >= prompt
    nothing = np.zeros(prompt + reply, np.float32)
    row = TokenRow("", nothing.astype(np.int32), sampled, nothing, nothing, np.full(prompt + reply, -1, np.int32))
    rows = [row] * config.trainer.micro_batch_rows
    return pack(rows, row_tokens=config.trainer.row_tokens, micro_batch_rows=config.trainer.micro_batch_rows)[0]


def _split(rows: Sequence[TokenRow], parts: int, *, seed: int, step: int) -> list[list[TokenRow]]:
    """Rows in an order fixed by (seed, step), cut into nearly equal parts; those with nothing to train are left out."""
    order = np.random.default_rng((seed, step)).permutation(len(rows))
    cut = [[rows[index] for index in part] for part in np.array_split(order, parts)]
    return [part for part in cut if any(row.sampled.any() for row in part)]


def _log(
    done: Dispatched, clock: _Clock, metrics: MetricsWriter | None, on_step: Callable[[dict[str, Any]], None]
) -> None:
    """Wait for a step's results and write its line."""
    learner = done.learner
    taken = jax.device_get(done.taken)
    now_s = time.perf_counter()
    step_s = now_s - max(done.started_s, clock.idle_s)
    clock.idle_s = now_s
    skipped = int(sum(values["skipped"] for values in taken))
    learner.skipped += skipped
    if skipped:
        logging.warning("%s, step %d: %d updates skipped, not finite", learner.name, done.step, skipped)
    line = {
        "policy": learner.name,
        "step": done.step,
        **_mean_of(taken),
        **done.line,
        "skipped_updates": learner.skipped,
        "empty_updates": learner.empty,
        "step_s": step_s,
        "total_s": done.line["wait_s"] + step_s + done.line["save_s"],
        "tokens_per_s": done.line["row_tokens"] / step_s,
        "flops_per_s": done.flops / step_s,
        **memory_metrics(),
    }
    if peak := peak_flops(jax.devices()[0].device_kind):
        line["flops_utilisation"] = line["flops_per_s"] / (peak * jax.device_count())
    if metrics is not None:
        metrics.write("train", **line)
        on_step(line)


def _agreement(learner: Learner, batch: MicroBatch, on_device: MicroBatch, mesh: Mesh) -> dict[str, float]:
    """k3 KL (per token) and largest log-prob difference between engine and trainer, over one micro-batch."""
    versions = np.asarray(batch.versions)
    sums = {"mismatch_k3": 0.0, "mismatch_max": 0.0}
    tokens = 0
    for version in sorted(set(versions[np.asarray(batch.mask)].tolist()) & set(learner.recent)):
        mask = versions == version
        ours = learner.functions.logprobs(learner.recent[version], learner.frozen, on_device)
        gap = jax.device_get(_mismatch(ours, on_device.behaviour_logprobs, place(mask, mesh)))
        sums["mismatch_k3"] += float(gap["k3"])
        sums["mismatch_max"] = max(sums["mismatch_max"], float(gap["max"]))
        tokens += int(mask.sum())
    if not tokens:
        return {}
    return {"mismatch_k3": sums["mismatch_k3"] / tokens, "mismatch_max": sums["mismatch_max"]}


_mismatch = jax.jit(mismatch_metrics)


def _mean_of(taken: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the updates of a step: means, but the counts added up."""
    if not taken:
        return {"trained_tokens": 0.0}
    values = {name: float(np.mean([update[name] for update in taken])) for name in taken[0]}
    values["trained_tokens"] = float(sum(update["trained_tokens"] for update in taken))
    shown = {"ratio": "ratio_mean", "clipped": "clip_share"}
    hidden = ("skipped", "tokens", "denominator", "clipped_low", "clipped_high")
    return {shown.get(name, name): value for name, value in values.items() if name not in hidden}


def _episode_metrics(served: Served) -> dict[str, float]:
    """Means over the batch's episodes and turns."""
    totals = dict(served.totals)
    if not totals:
        return {}
    episodes, turns, groups = totals.pop("episodes"), totals.pop("turns"), totals.pop("groups", 0)
    means = {
        "reward_mean": totals.pop("reward") / episodes,
        "success_rate": totals.pop("success") / episodes,
        "invalid_share": totals.pop("invalid_turns") / turns,
        "turns_mean": turns / episodes,
        "no_signal_share": totals.pop("groups_without_signal", 0) / max(groups, 1),
    }
    named = {name: value / episodes for name, value in totals.items()}
    return {"episodes": episodes, "turns": turns, "dropped_groups": served.dropped, **means, **named}


def _row_metrics(rows: Sequence[TokenRow], packed: Sequence[Sequence[MicroBatch]], *, version: int) -> dict[str, float]:
    """Real tokens, share of padding, and how many versions the trained tokens lag."""
    found: dict[str, float] = {"row_tokens": sum(len(row.tokens) for row in rows)}
    if slots := sum(batch.tokens.size for part in packed for batch in part):
        filled = sum(int((batch.segments > 0).sum()) for part in packed for batch in part)
        lag = version - np.concatenate([row.versions[row.sampled] for row in rows])
        found |= {
            "padding_share": 1.0 - filled / slots,
            "staleness_mean": float(lag.mean()),
            "staleness_max": int(lag.max()),
        }
    return found
