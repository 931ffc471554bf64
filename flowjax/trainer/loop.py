"""The training loop, top to bottom in the order of a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from flowjax.losses.mismatch import mismatch_metrics
from flowjax.models.decoder import Decoder
from flowjax.models.lora import LoraParam
from flowjax.monitor.metrics import MetricsWriter
from flowjax.records import TokenRow
from flowjax.trainer.batch import MicroBatch, pack
from flowjax.trainer.optimizer import learning_rate_schedule, make_optimizer
from flowjax.trainer.sources import Served, Source
from flowjax.trainer.step import UpdateFunctions, make_update
from flowjax.weights.publish import Checkpoints

Arrays = Any


@dataclass
class State:
    """Everything a checkpoint holds, and the frozen base that it does not."""

    trained: Arrays
    frozen: Arrays
    optimizer: Arrays
    step: int = 0
    skipped: int = 0


def train(
    config: ConfigDict,
    model: Decoder,
    source: Source,
    *,
    mesh: Mesh,
    metrics: MetricsWriter,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[dict[str, float]], None] = lambda line: None,
) -> Decoder:
    """Train until `config.trainer.steps`, from the newest checkpoint if there is one.

    With `checkpoints`, every step is saved, which publishes it; version 0 is published before the first batch. Without,
    nothing is saved (the warm start exports the returned model instead).
    """
    # ------------------------------------------------------------------------------------------ model and optimiser
    trainer, updates = config.trainer, config.trainer.steps * config.trainer.updates_per_step
    graph, trained, frozen = nnx.split(model, LoraParam if model.lora else nnx.Param, ...)
    optimizer = make_optimizer(config.optimizer, updates)
    schedule = learning_rate_schedule(config.optimizer, updates)
    state = State(trained, frozen, optimizer.init(trained))
    functions = make_update(
        graph,
        optimizer,
        kind=config.loss.kind,
        options=config.loss.options.to_dict(),
        kl_coefficient=config.loss.kl_coefficient,
        entropy_coefficient=config.loss.entropy_coefficient,
        temperature=config.rollout.temperature,
        chunk_tokens=trainer.logprob_chunk_tokens,
    )

    # ------------------------------------------------------------------------------------------------------ restore
    if checkpoints is not None and (latest := checkpoints.latest()) is not None:
        saved = checkpoints.restore(latest, adapter=state.trained, optimizer=state.optimizer)
        state = State(saved.adapter, frozen, saved.optimizer, step=latest, skipped=saved.data["skipped"])
    elif checkpoints is not None:
        checkpoints.save(0, state.trained, state.optimizer, {"skipped": 0})
    recent = _recent(checkpoints, state, max_staleness=config.dataflow.max_staleness)
    save_s = 0.0

    # ------------------------------------------------------------------------------------------------------ compile
    _compile_ahead(functions, state, config, mesh)  # while the engine starts and the first episodes are played

    # --------------------------------------------------------------------------------------------------------- loop
    while state.step < trainer.steps:
        started_s = time.perf_counter()

        # batch: wait for it, shuffle its rows, split them into updates, pack each
        served = source.batch(state.step)
        if checkpoints is not None and (latest := checkpoints.latest()) is not None:
            source.committed(latest)
        waited_s = time.perf_counter()
        parts = _split(served.rows, trainer.updates_per_step, seed=config.seed, step=state.step)
        packed = [
            pack(part, row_tokens=trainer.row_tokens, micro_batch_rows=trainer.micro_batch_rows) for part in parts
        ]
        on_device = [[_place(micro_batch, mesh) for micro_batch in part] for part in packed]

        # agreement: the sampler's log-probs against ours, under the very version that sampled them
        agreement = _agreement(functions, recent, state.frozen, on_device[0][0]) if checkpoints else {}

        # step: each update adds up its micro-batches and divides once
        taken = []
        for part in on_device:
            sums = None
            anchors = functions.anchors(recent[state.step], state.trained, state.frozen, part)
            for micro_batch, anchor in zip(part, anchors, strict=True):
                sums = functions.add(state.trained, state.frozen, micro_batch, anchor, sums)
            state.trained, state.optimizer, values = functions.apply(state.trained, state.optimizer, sums)
            taken.append(values)
        state.step += 1
        taken = jax.device_get(taken)
        state.skipped += int(sum(values["skipped"] for values in taken))
        stepped_s = time.perf_counter()

        # log: before the checkpoint, so that a committed step always has its line
        line = {
            "step": state.step,
            **_mean_of(taken),
            **agreement,
            **_episode_metrics(served),
            **_row_metrics(served.rows, packed, version=state.step - 1),
            "learning_rate": float(np.asarray(schedule(state.step * trainer.updates_per_step - 1))),
            "skipped_updates": state.skipped,
            "compile_count": functions.compile_count(),
            "wait_s": waited_s - started_s,
            "step_s": stepped_s - waited_s,
            "save_s": save_s,  # of the step before
            "total_s": stepped_s - started_s + save_s,
        }
        line["tokens_per_s"] = line["row_tokens"] / line["step_s"]
        metrics.write("train", **line)
        on_step(line)

        # publish: the checkpoint's commit marker is the publication
        recent[state.step] = _copy(state.trained)
        for version in sorted(recent)[: -(config.dataflow.max_staleness + 1)]:
            del recent[version]
        if checkpoints is not None:
            checkpoints.save(state.step, state.trained, state.optimizer, {"skipped": state.skipped})
        save_s = time.perf_counter() - stepped_s

    # ---------------------------------------------------------------------------------------------------------- end
    if checkpoints is not None:
        checkpoints.wait()
        source.committed(state.step)
    return nnx.merge(graph, state.trained, state.frozen)


def _copy(arrays: Arrays) -> Arrays:
    return jax.tree.map(jnp.copy, arrays)


def _recent(checkpoints: Checkpoints | None, state: State, *, max_staleness: int) -> dict[int, Arrays]:
    """Trained arrays of the versions that a batch may have been sampled from, by version."""
    versions = checkpoints.committed_steps() if checkpoints else []
    known = [version for version in versions if state.step - max_staleness <= version < state.step]
    earlier = {v: checkpoints.restore_adapter(v, state.trained) for v in known if checkpoints}
    return earlier | {state.step: _copy(state.trained)}


def _compile_ahead(functions: UpdateFunctions, state: State, config: ConfigDict, mesh: Mesh) -> None:
    """Run every function once on rows as long as an episode's turn may get; its results are thrown away."""
    prompt, reply = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    sampled = np.arange(prompt + reply) >= prompt
    nothing = np.zeros(prompt + reply, np.float32)
    row = TokenRow("", nothing.astype(np.int32), sampled, nothing, nothing, np.full(prompt + reply, -1, np.int32))
    rows = [row] * config.trainer.micro_batch_rows
    batch = _place(
        pack(rows, row_tokens=config.trainer.row_tokens, micro_batch_rows=config.trainer.micro_batch_rows)[0], mesh
    )
    functions.logprobs(state.trained, state.frozen, batch)
    (anchor,) = functions.anchors(state.trained, state.trained, state.frozen, [batch])
    sums = functions.add(state.trained, state.frozen, batch, anchor, None)
    sums = functions.add(state.trained, state.frozen, batch, anchor, sums)
    functions.apply(_copy(state.trained), _copy(state.optimizer), sums)


def _split(rows: Sequence[TokenRow], parts: int, *, seed: int, step: int) -> list[list[TokenRow]]:
    """Rows in an order fixed by (seed, step), cut into nearly equal parts."""
    order = np.random.default_rng((seed, step)).permutation(len(rows))
    return [[rows[index] for index in part] for part in np.array_split(order, parts) if len(part)]


def _place(batch: MicroBatch, mesh: Mesh) -> MicroBatch:
    """Put a micro-batch on the devices, its rows spread over the data and fsdp axes."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))


def _agreement(functions: UpdateFunctions, recent: dict[int, Arrays], frozen: Arrays, batch: MicroBatch) -> dict:
    """k3 KL (per token) and largest log-prob difference between engine and trainer, over one micro-batch."""
    versions = np.asarray(batch.versions)
    sums = {"mismatch_k3": 0.0, "mismatch_max": 0.0}
    tokens = 0
    for version in sorted(set(versions[np.asarray(batch.mask)].tolist()) & set(recent)):
        mask = versions == version
        ours = functions.logprobs(recent[version], frozen, batch)
        gap = jax.device_get(mismatch_metrics(ours, batch.behaviour_logprobs, jnp.asarray(mask)))
        sums["mismatch_k3"] += float(gap["k3"])
        sums["mismatch_max"] = max(sums["mismatch_max"], float(gap["max"]))
        tokens += int(mask.sum())
    if not tokens:
        return {}
    return {"mismatch_k3": sums["mismatch_k3"] / tokens, "mismatch_max": sums["mismatch_max"]}


def _mean_of(taken: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the updates of a step: means, but the counts added up."""
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
    episodes, turns = totals.pop("episodes"), totals.pop("turns")
    means = {
        "reward_mean": totals.pop("reward") / episodes,
        "success_rate": totals.pop("success") / episodes,
        "invalid_share": totals.pop("invalid_turns") / turns,
        "turns_mean": turns / episodes,
    }
    named = {name: value / episodes for name, value in totals.items()}
    return {"episodes": episodes, "turns": turns, "dropped_groups": served.dropped, **means, **named}


def _row_metrics(rows: Sequence[TokenRow], packed: Sequence[Sequence[MicroBatch]], *, version: int) -> dict[str, float]:
    """Real tokens, share of padding, and how many versions the trained tokens lag."""
    tokens = sum(len(row.tokens) for row in rows)
    slots = sum(batch.tokens.size for part in packed for batch in part)
    lag = version - np.concatenate([row.versions[row.sampled] for row in rows])
    return {
        "row_tokens": tokens,
        "padding_share": 1.0 - tokens / slots,
        "staleness_mean": float(lag.mean()),
        "staleness_max": int(lag.max()),
    }
