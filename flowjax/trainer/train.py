"""A whole training run, top to bottom.

`main` is what a trainer process does: config, mesh, models, and for each policy its objective, optimiser and restored
state (`start`). `train` compiles and loops: batch, pack, update, mismatch, log, publish. The step's arithmetic is in
`update.py`; rows are packed by `batch.py`; losses and models are packages of their own.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from flowjax.broker import connect_to_run
from flowjax.config import ConfigError
from flowjax.losses.policy import LossOptions
from flowjax.losses.ratios import mismatch_metrics, mismatch_of_sequences
from flowjax.models.cost import step_flops
from flowjax.models.decoder import Decoder, with_adapter
from flowjax.models.hf import load_decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.shape import ModelConfig, ModelError
from flowjax.models.sharding import ROW_AXES, Placement, make_mesh, on_mesh, place
from flowjax.monitor.metrics import MetricsWriter, lost_checkpoints
from flowjax.monitor.transcripts import trained_path
from flowjax.records import TokenRow
from flowjax.run import Policy, Run, read_run
from flowjax.trainer.batch import MicroBatch, Planned, lay_out, pack, plan, row_buckets, swapped, unusable_rows
from flowjax.trainer.log import (
    Comparison,
    OnStep,
    StepLog,
    StepResult,
    TrainerStatus,
    UpdateCounters,
    episode_metrics,
    row_metrics,
    write_trained,
)
from flowjax.trainer.optimizer import OptimizerMemory, learning_rate_schedule, make_optimizer, still_leaves
from flowjax.trainer.sources import DataflowSource, Shared, Source, is_first
from flowjax.trainer.update import (
    Arrays,
    DropoutSeed,
    FirstPass,
    GradientSum,
    Metrics,
    Objective,
    PolicyState,
    apply,
    compile_count,
    first_pass,
    gradient_of,
    logprobs_of,
)
from flowjax.weights.hand_over import FullHandOver
from flowjax.weights.publish import HANDED_OVER, Checkpoints, has_arrays

NUMBER_VARIABLE = "FLOWJAX_PROCESS"
COORDINATOR_VARIABLE = "FLOWJAX_COORDINATOR"  # of processes that the launcher starts on one machine
_WORTH_KEEPING_S = 0.2  # seconds; programs that compile faster are not kept in the compile cache


def main(run_dir: Path, only: str = "", *, scheduled: bool = False) -> None:
    """Train the policies of a run, or `only` one of them, from their newest checkpoints to `config.trainer.steps`.

    Args:
        scheduled: see `join`.

    Raises:
        ConfigError, ModelError: something does not fit; nothing was trained.
        CheckpointError: another trainer holds the checkpoints, none can be read, or a version could not be saved.
        BatchError, DataflowError, SourceError: no batch came, or one that cannot be trained on.
    """
    # ---------------------------------------------------------------------------------------------------------- config
    run = read_run(run_dir)
    config, trained = run.config, {name: policy for name, policy in run.policies.items() if only in ("", name)}
    if not trained:
        raise ConfigError(f"--policy is {only!r}: the run has {', '.join(run.policies)}")
    if lost := lost_checkpoints(run_dir, trained):  # deleted since the launch, which has checked this too
        raise ConfigError("; ".join(lost))

    # ------------------------------------------------------------------------------------------------------------ mesh
    use_compile_cache(config.trainer.compile_cache)
    join(config.trainer, scheduled=scheduled)  # before anything else touches a device
    try:
        mesh = make_mesh(**config.mesh.to_dict())
        for each in (policy.trainer for policy in trained.values()):
            Placement(mesh).check_batch(each.micro_batch_rows, row_buckets(each.row_tokens)[-1])
    except ModelError as error:  # a missing model file may be back after a restart; these sizes will be the same
        raise ConfigError(str(error)) from error

    # -------------------------------------------------------------------------------------- models, optimiser, restore
    decoders = make_models(run, mesh, trained)
    vocabularies = {name: decoder.config.vocab_size for name, decoder in decoders.items()}

    def unusable(policy: str, rows: Sequence[TokenRow]) -> dict[str, str]:
        row_tokens = trained[policy].trainer.row_tokens
        return unusable_rows(rows, row_tokens=row_tokens, vocabulary=vocabularies[policy])

    with contextlib.ExitStack() as opened:
        learners = {}
        for name, policy in trained.items():
            trainer = policy.trainer
            checkpoints = opened.enter_context(
                Checkpoints(
                    run_dir / "checkpoints" / name, keep=trainer.keep_checkpoints, keep_every=trainer.keep_every_steps
                )
            )
            # Popped, so that nothing but the learner refers to the arrays: else the initial weights stay in memory.
            learners[name] = start(run, policy, decoders.pop(name), checkpoints)
        steps = {name: learner.state.step for name, learner in learners.items()}

        # ------------------------------------------------------------------------------------- where data and lines go
        to_dataflow = partial(connect_to_run, run_dir)
        source = DataflowSource(to_dataflow, timeout_s=config.trainer.step_timeout_s, unusable=unusable)
        if is_first():
            source.claim(steps)  # from now on an older trainer, and late copies of its messages, are refused
        metrics, on_step = None, _no_report
        if is_first():
            metrics = MetricsWriter(run_dir, resume_step=steps)
            status = TrainerStatus(run_dir, f"trainer-{only}" if only else "trainer", steps)
            opened.enter_context(status.endpoint)
            on_step = status.update

        # ------------------------------------------------------------------------------------------ compile, then loop
        train(learners, source, mesh=mesh, metrics=metrics, on_step=on_step)


def _no_report(line: Mapping[str, object]) -> None:
    del line


# =========================================================================================================== processes


def use_compile_cache(folder: str) -> None:
    """Keep compiled programs in `folder`, for the next start of this run or one like it.

    "auto" is ~/.cache/flowjax/xla, "" is nowhere.
    """
    if not folder:
        return
    cache = Path(folder).absolute()
    if folder == "auto":
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flowjax" / "xla"
        except RuntimeError:  # HOME is not set, and the user has no entry in /etc/passwd, as in some containers
            said = "config.trainer.compile_cache is 'auto', but this user has no home folder: compiled programs are not"
            logging.warning("%s kept; set it, or XDG_CACHE_HOME, to a folder", said)
            return
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


def join(trainer: ConfigDict, *, scheduled: bool = False) -> None:
    """Join the other processes of the trainer, if there are any. To be called before anything else touches a device.

    Every process runs the same command. Its number, from 0, is the environment variable FLOWJAX_PROCESS, and
    `config.trainer.processes` says how many there are. A `scheduled` process without that variable gets all of this
    from the scheduler that started it, if JAX knows it: SLURM, Open MPI, Kubernetes (with jax[k8s]), or the TPU slice
    of its host.

    Raises:
        ConfigError: the number is missing or out of range, or there is no coordinator's address.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    count = trainer.processes
    address = trainer.coordinator or os.environ.get(COORDINATOR_VARIABLE, "")
    number = os.environ.get(NUMBER_VARIABLE, "")
    if scheduled and not number:
        try:
            _initialize()
            return
        except ValueError as error:
            if "be defined" not in str(error):  # JAX says so where it finds no scheduler: then the config counts
                raise
    if count == 1:
        return
    if not number.isdigit() or int(number) >= count:
        raise ConfigError(
            f"config.trainer.processes is {count}, but {NUMBER_VARIABLE} is {number!r}: "
            f"set it to the number of this process, 0 to {count - 1}"
        )
    if not address:
        raise ConfigError(
            f"config.trainer.processes is {count}, but config.trainer.coordinator is empty: "
            "give the host:port of process 0"
        )
    _initialize(address, count, int(number))


def _initialize(*known: Any) -> None:
    # The service catches SIGTERM to announce a preemption to those who ask for it, which nothing here does.
    jax.config.update("jax_enable_preemption_service", False)
    # An empty list: all devices that this process sees. With None, JAX takes only one where it knows the scheduler.
    jax.distributed.initialize(*known, local_device_ids=[])
    # A barrier now, while all processes are here: Gloo connects them at their first collective, and fails in all if one
    # comes half a minute late, as after loading a model.
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("all have joined")


# ============================================================================================================== models


def make_models(run: Run, mesh: Mesh, trained: Collection[str] | None = None) -> dict[str, Decoder]:
    """The models of the policies that are trained here (None: all): their base with an adapter for each, or, where all
    weights are trained, the base itself.

    Raises:
        ConfigError: a policy trains all weights of a base that others share, or the policies have several bases.
        ModelError: the model's folder, its adapter or the mesh does not fit.
    """
    policies = {name: policy for name, policy in run.policies.items() if trained is None or name in trained}
    bases = list(dict.fromkeys(policy.base.name for policy in policies.values()))
    if len(bases) > 1:
        raise ConfigError(
            f"policies {', '.join(policies)} are on the base models {', '.join(bases)}, but a trainer holds one: set "
            "config.separate_trainers to True"
        )
    (base,) = bases
    sharing = run.policies_on(base)
    full = [name for name, each in sharing.items() if each.train == "full"]
    if full and len(sharing) > 1:
        raise ConfigError(
            f"config.policies.{full[0]} trains 'full' weights, but {len(sharing)} policies share the base: "
            "set policy.train to 'lora'"
        )
    model = run.bases[base].model
    if full and model.quantize:
        raise ConfigError(
            f"config.model.quantize is {model.quantize!r}, but config.policy.train is 'full', and quantised "
            "weights cannot be trained: set it to '' or train 'lora'"
        )
    decoder = load_decoder(
        Path(model.path),
        dtype=model.dtype,
        mesh=mesh,
        remat=model.remat,
        attention=model.attention,
        quantize=model.quantize,
        key=jax.random.key(run.config.seed),
    )
    if full:
        return {full[0]: decoder}
    return {  # one key for all: each adapter starts as it would if its policy trained alone
        name: with_adapter(decoder, Lora(**policy.lora.to_dict()), jax.random.key(run.config.seed))
        for name, policy in policies.items()
    }


# =========================================================================== one policy: objective, optimiser, restore


@dataclass
class Learner:
    """One policy in training: its arrays, what acts on them, and its counters.

    recent: trained arrays by version, of the versions that a batch may have been sampled from. The newest is a copy,
        since the next update donates the buffers of `state`.
    base_digest: see `Base.weights_digest`; "" where all weights are trained.
    mismatches: see `sources.Mismatches`; those not yet reported to the source.
    reported: newest version that was reported to the source as committed.
    """

    run: Run
    policy: Policy
    model: ModelConfig
    lora: Lora | None
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    memory: OptimizerMemory
    checkpoints: Checkpoints | None
    state: PolicyState
    recent: dict[int, Arrays]
    counters: UpdateCounters = field(default_factory=UpdateCounters)
    base_digest: str = ""
    mismatches: dict[str, tuple[float, int]] = field(default_factory=dict)
    reported: int = -1
    save_s: float = 0.0  # seconds that `publish` of the newest version took; the rest is in the background

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def is_checkpoint(self) -> bool:
        """True if the whole state is saved at this step, and not only what engines need."""
        trainer, step = self.policy.trainer, self.state.step
        return step % trainer.checkpoint_every == 0 or step >= trainer.steps

    @property
    def uses_dropout(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0


def start(run: Run, policy: Policy, decoder: Decoder, checkpoints: Checkpoints | None) -> Learner:
    """A policy as its newest checkpoint left it; if there is none, version 0 is published at once.

    Args:
        policy: one of the run's.
        decoder: with the policy's own adapter, or without one to train all of it. Several policies may share its base.
        checkpoints: where versions are published; None publishes nothing.

    Raises:
        ConfigError: an objective or optimiser that does not fit the model; an adapter was trained on another base.
        CheckpointError: there are checkpoints, but none can be read, as where all have another shape.
    """
    if decoder.lora is None and policy.loss.kl_coefficient:
        raise ConfigError(
            f"config.loss.kl_coefficient is {policy.loss.kl_coefficient}, but with config.policy.train 'full' no "
            "copy of the base is kept to compare with: set it to 0, or train 'lora'"
        )

    # ------------------------------------------------------------------------------------------------------- objective
    graph, trained, frozen = nnx.split(decoder, LoraParam if decoder.lora else nnx.Param, ...)
    objective = make_objective(run, policy, graph, trained)
    # Master weights in float32, cast for each pass: bfloat16 has 8 significant bits and would round small updates away.
    trained = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)

    # ------------------------------------------------------------------------------------------------------- optimiser
    updates = policy.trainer.steps * policy.trainer.updates_per_step
    optimizer = make_optimizer(policy.optimizer, updates, trained)
    optimizer_state = optimizer.init(trained)
    if decoder.placement is not None:
        # optax makes its counters on one device. Left there, they would come back from the first update on the whole
        # mesh, and the second update would be another program.
        mesh = decoder.placement.mesh
        optimizer_state = jax.tree.map(lambda leaf: on_mesh(leaf, mesh), optimizer_state)
    memory = OptimizerMemory(policy.trainer.offload_optimizer)

    # --------------------------------------------------------------------------------------------------------- restore
    step, counters, base_digest = 0, UpdateCounters(), policy.base.weights_digest() if decoder.lora is not None else ""
    newest = checkpoints.restore_newest(adapter=trained, optimizer=optimizer_state) if checkpoints is not None else None
    if newest is not None:
        step, saved = newest
        trained, optimizer_state = saved.adapter, saved.optimizer
        counters = UpdateCounters(saved.data["skipped"], saved.data.get("empty", 0))
        if (before := saved.data.get("base", "")) and before != base_digest:
            raise ConfigError(
                f"config.model.path is {policy.base.model.path!r}, where other weights lie than those that "
                f"{policy.name} has been trained on until now: bring these back, or start a new run"
            )
    learner = Learner(
        run=run,
        policy=policy,
        model=decoder.config,
        lora=decoder.lora,
        objective=objective,
        optimizer=optimizer,
        schedule=learning_rate_schedule(policy.optimizer, updates),
        memory=memory,
        checkpoints=checkpoints,
        state=PolicyState(step, trained, memory.to_host(optimizer_state), frozen),
        recent={},
        counters=counters,
        base_digest=base_digest,
    )
    if newest is None:
        publish(learner)  # engines serve version 0, so that the first batch has a version like any other
    if checkpoints is not None:
        # After a resume, batches still hold rows that these versions sampled: log-probs are compared under each.
        oldest = step - run.config.dataflow.max_staleness
        known = [version for version in checkpoints.committed_steps() if oldest <= version < step]
        with_arrays = {version for version in known if has_arrays(checkpoints.directory, version)}
        learner.recent |= checkpoints.restore_adapters(sorted(with_arrays), trained)
        for version in sorted(set(known) - with_arrays):
            served = checkpoints.directory / str(version) / HANDED_OVER
            try:
                learner.recent[version] = _as_served(served, decoder, trained)
            except (ModelError, OSError) as error:
                logging.warning("%s; the sampler's log-probs of that version are not compared with", error)
    learner.recent[step] = _copied(trained)
    return learner


def make_objective(run: Run, policy: Policy, graph: Any, trained: Arrays) -> Objective:
    """The loss of a policy by its config; `graph` and `trained` are parts of its model (`nnx.split`)."""
    return Objective(
        graph,
        dtypes=tuple(leaf.dtype for leaf in jax.tree.leaves(trained)),
        kind=policy.loss.kind,
        options=LossOptions(**policy.loss.options.to_dict()),
        kl_coefficient=policy.loss.kl_coefficient,
        entropy_coefficient=policy.loss.entropy_coefficient,
        temperature=run.config.rollout.temperature,
        chunk_tokens=policy.trainer.logprob_chunk_tokens,
        still=still_leaves(policy.optimizer, trained),
    )


def _as_served(folder: Path, decoder: Decoder, like: Arrays) -> Arrays:
    """All weights of a version from the folder that engines loaded, so exactly those that sampled; placed as those of
    `decoder`."""
    mesh = decoder.placement.mesh if decoder.placement is not None else None
    assert not isinstance(mesh, AbstractMesh), "weights were put on its devices"
    served = nnx.state(load_decoder(folder, dtype=jnp.float32, mesh=mesh), nnx.Param)
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(served))


def publish(learner: Learner) -> None:
    """Save a policy's current version, as a checkpoint where one is due. It is written in the background; its commit
    marker is the publication of the version."""
    if learner.checkpoints is not None:
        state, made = learner.state, None
        if learner.policy.train == "full" and jax.process_count() == 1:  # of several, each holds a part of the arrays
            made = FullHandOver(learner.model, learner.policy.base.engine.dtype).writer(state.trained)
        data = {"skipped": learner.counters.skipped_updates, "empty": learner.counters.empty_updates}
        data |= {"base": learner.base_digest} if learner.base_digest else {}
        whole = learner.is_checkpoint
        learner.checkpoints.save(state.step, state.trained, state.optimizer, data, hand_over=made, whole=whole)


def trained_model(learner: Learner) -> Decoder:
    """The model as trained, in the precision that it computes in."""
    leaves, structure = jax.tree.flatten(learner.state.trained)
    cast = [leaf.astype(dtype) for leaf, dtype in zip(leaves, learner.objective.dtypes, strict=True)]
    return nnx.merge(learner.objective.graph, jax.tree.unflatten(structure, cast), learner.state.frozen)


def _copied(arrays: Arrays) -> Arrays:
    return jax.tree.map(jnp.copy, arrays)


# =============================================================================================================== train


def train_one(
    run: Run,
    decoder: Decoder,
    source: Source,
    *,
    mesh: Mesh,
    metrics: MetricsWriter | None,
    checkpoints: Checkpoints | None = None,
    on_step: OnStep = _no_report,
) -> Decoder:
    """Train the only policy of a run, see `train`; returns the model as trained."""
    (policy,) = run.policies.values()
    learner = start(run, policy, decoder, checkpoints)
    train({policy.name: learner}, source, mesh=mesh, metrics=metrics, on_step=on_step)
    return trained_model(learner)


def train(
    learners: Mapping[str, Learner],
    source: Source,
    *,
    mesh: Mesh,
    metrics: MetricsWriter | None,
    on_step: OnStep = _no_report,
) -> None:
    """Train every policy until its own `config.trainer.steps`, in the order in which their batches come.

    With checkpoints, every step is saved, which publishes it. Without, nothing is saved (the warm start exports the
    trained model instead), and steps are dispatched ahead of their results. `metrics` is None in all processes but
    the first.
    """
    # --------------------------------------------------------------------------------------------------------- compile
    for learner in learners.values():  # while the engine starts and the first episodes are played
        _compile(learner, place(_longest_micro_batch(learner), mesh))

    # ------------------------------------------------------------------------------------------------------------ loop
    log = StepLog(metrics, on_step)
    batches = Shared(source)
    batches.ask(_unfinished(learners))
    while _unfinished(learners):
        # batch: wait for it; report which versions were committed meanwhile
        started_s = time.perf_counter()
        served = batches.take(partial(_check_saves, learners))
        learner = learners[served.policy]
        for each in learners.values():  # all policies: one that has finished may have its last version to report
            _report_committed(each, source)

        # pack: shuffle its rows, split them into updates, lay each out in rows of fixed length
        waited_s = time.perf_counter()
        trainer, step = learner.policy.trainer, learner.state.step
        updates = _split(served.rows, trainer.updates_per_step, seed=learner.run.config.seed, step=step)
        plans = [plan(rows, **_packing(trainer, mesh)) for rows in updates]
        packed = [[lay_out(rows, each) for each in planned] for rows, planned in zip(updates, plans, strict=True)]
        on_devices = [[place(micro_batch, mesh) for micro_batch in micro_batches] for micro_batches in packed]
        packed_s = time.perf_counter()

        # update: add up the gradients of its micro-batches, divide once, take the optimiser's step
        results: list[Metrics] = []
        pass_logprobs: list[list[jax.Array]] = []  # by update and micro-batch, of the pass that was differentiated
        for update, micro_batches in enumerate(on_devices):
            pass_logprobs.append([])
            # The first update trains the policy of the step's start, whose own log-probs are the proximal ones. Later
            # updates, and passes with dropout, need a forward pass under the weights of the start.
            at_start = learner.recent[step] if update or learner.uses_dropout else None
            first_passes = first_pass(learner.objective, learner.state, micro_batches, start=at_start)
            total = None
            for index, (micro_batch, known) in enumerate(zip(micro_batches, first_passes, strict=True)):
                seed = _dropout_seed(learner, update, index)
                total, logprobs = gradient_of(
                    learner.objective, learner.state, micro_batch, known, dropout_seed=seed, total=total
                )
                pass_logprobs[update].append(logprobs)
            assert total is not None  # `_split` left out updates without rows
            results.append(_apply_update(learner, total))

        # mismatch: the engine's log-probs against ours, under the version that sampled them
        compared, trajectories = [], []
        if learner.checkpoints is not None and packed:
            chosen = step % len(packed[0])  # another one each step: the first always holds the longest sequences
            ours = None if learner.uses_dropout else pass_logprobs[0][chosen]  # under the weights of the step's start
            compared = _compared(learner, packed[0][chosen], on_devices[0][chosen], mesh, ours=ours)
            trajectories = [updates[0][index].trajectory_id for index in plans[0][chosen].numbered]

        # count the step, also when nothing was trained: the batch is used
        keep = _writer_of_logprobs(learner, served.rows, updates, plans, packed, pass_logprobs)
        learner.counters.empty_updates += trainer.updates_per_step - len(updates)
        if not updates:
            logging.warning("%s, step %d: no row has a sampled token, nothing is trained", learner.name, step)
        learner.state = replace(learner.state, step=step + 1)
        _remember(learner)
        batches.ask(_unfinished(learners))  # the next batch comes while the devices work

        # log: before the checkpoint, so that a committed step always has its line
        trained_rows = [row for part in updates for row in part]
        line = {
            **episode_metrics(served),
            **row_metrics(trained_rows, packed, version=step),
            "empty_updates": learner.counters.empty_updates,
            "compile_count": compile_count(),
            "wait_s": waited_s - started_s,
            "pack_s": packed_s - waited_s,
            "save_s": learner.save_s,  # of the step before
        }
        flops = step_flops(learner.model, learner.lora, trained_rows)
        log.add(
            StepResult(
                policy=learner.name,
                step=step + 1,
                counters=learner.counters,
                updates=results,
                compared=compared,
                trajectories=trajectories,
                mismatches=learner.mismatches,
                line=line,
                started_s=waited_s,
                flops=flops,
                keep=keep,
                rate=_rate_of(learner),
            )
        )
        # Without checkpoints nothing waits for a step's results: the next ones are dispatched meanwhile.
        log.write(in_flight=0 if learner.checkpoints else trainer.steps_in_flight)

        # publish: a version's commit marker is the publication, whether it is a checkpoint or not
        logged_s = time.perf_counter()
        publish(learner)
        learner.save_s = time.perf_counter() - logged_s

    # ------------------------------------------------------------------------------------------------------------- end
    log.write(in_flight=0)
    for learner in learners.values():
        if learner.checkpoints is not None:
            learner.checkpoints.wait()
            _report_committed(learner, source)


def _check_saves(learners: Mapping[str, Learner]) -> None:
    """Raise the error of a save that failed in the background."""
    for learner in learners.values():
        if learner.checkpoints is not None:
            learner.checkpoints.check()


# ----------------------------------------------------------------------------------------------- pieces of the compile


def _longest_micro_batch(learner: Learner) -> MicroBatch:
    """A micro-batch of token rows of one turn each, of the greatest length that the config allows."""
    rollout, trainer = learner.run.config.rollout, learner.policy.trainer
    prompt, reply = rollout.max_prompt_tokens, rollout.max_new_tokens
    sampled = np.arange(prompt + reply) >= prompt
    nothing = np.zeros(prompt + reply, np.float32)
    row = TokenRow("", nothing.astype(np.int32), sampled, nothing, nothing, np.full(prompt + reply, -1, np.int32))
    rows = [row] * trainer.micro_batch_rows
    return pack(rows, row_tokens=trainer.row_tokens, micro_batch_rows=trainer.micro_batch_rows)[0]


def _compile(learner: Learner, batch: MicroBatch) -> None:
    """Run every function of a step once, so that it is compiled for this batch's shape; nothing changes. Other shapes,
    as with another power of two of sampled tokens in a row, are compiled when their first batch comes."""
    state, objective = learner.state, learner.objective
    if _compares_apart(learner):
        logprobs_of(objective, state, batch)
    # The first update of a step needs no pass under the weights of the start, which are its own, except with dropout.
    starts = [] if learner.uses_dropout else [None]
    if learner.policy.trainer.updates_per_step > 1 or learner.uses_dropout:
        starts.append(state.trained)
    found = [first_pass(objective, state, [batch], start=start)[0] for start in starts]
    *others, last = {jax.tree.structure(known): known for known in found}.values()  # a program for each structure
    for known in others:
        _compile_gradient(learner, batch, known)
    total = _compile_gradient(learner, batch, last)  # kept for the last structure only: a step holds one sum at a time
    # NaN gradients, at which `apply` leaves weights and moments as they are. The state itself is donated and comes
    # back: with a copy of it for this trial run, memory would exceed that of a step.
    _apply_update(learner, replace(total, gradient=jax.tree.map(lambda leaf: leaf * jnp.nan, total.gradient)))


def _compile_gradient(learner: Learner, batch: MicroBatch, known: FirstPass) -> GradientSum:
    """The gradient sum of two passes. A first pass, and one that adds to an earlier sum, are two programs."""
    arguments = learner.objective, learner.state, batch, known
    one, _ = gradient_of(*arguments, dropout_seed=_dropout_seed(learner, 0, 0), total=None)
    two, _ = gradient_of(*arguments, dropout_seed=_dropout_seed(learner, 0, 1), total=one)
    return two


# -------------------------------------------------------------------------------------------------- pieces of the loop


def _rate_of(learner: Learner) -> Callable[[int], float]:
    """A function from the number of updates skipped so far, which is known once the devices are done, to the learning
    rate of the newest update. The optimiser's schedule counts the updates that were made, from 0."""
    tried = learner.state.step * learner.policy.trainer.updates_per_step - learner.counters.empty_updates
    return lambda skipped: float(np.asarray(learner.schedule(max(tried - skipped - 1, 0))))


def _unfinished(learners: Mapping[str, Learner]) -> dict[str, int]:
    """The current step of each policy that still trains."""
    steps = {name: learner.state.step for name, learner in learners.items()}
    return {name: step for name, step in steps.items() if step < learners[name].policy.trainer.steps}


def _report_committed(learner: Learner, source: Source) -> None:
    latest = learner.checkpoints.latest() if is_first() and learner.checkpoints is not None else None
    if latest is not None and (latest != learner.reported or learner.mismatches):
        source.committed(learner.name, latest, dict(learner.mismatches))
        learner.reported = latest
    learner.mismatches.clear()


def _split(rows: Sequence[TokenRow], parts: int, *, seed: int, step: int) -> list[list[TokenRow]]:
    """Rows in an order fixed by (seed, step), cut into nearly equal parts; rows without a sampled token, and parts that
    are empty without them, are left out."""
    order = np.random.default_rng((seed, step)).permutation(len(rows))
    cut = [[rows[index] for index in part if rows[index].sampled.any()] for part in np.array_split(order, parts)]
    return [part for part in cut if part]


def _packing(trainer: ConfigDict, mesh: Mesh) -> dict[str, Any]:
    """Arguments of `plan`."""
    return {
        "row_tokens": trainer.row_tokens,
        "micro_batch_rows": trainer.micro_batch_rows,
        "trim": trainer.trim_micro_batches,
        "rows_multiple": math.prod(mesh.shape[axis] for axis in ROW_AXES),
    }


def _writer_of_logprobs(
    learner: Learner,
    rows: Sequence[TokenRow],
    updates: Sequence[Sequence[TokenRow]],
    plans: Sequence[Sequence[Planned]],
    packed: Sequence[Sequence[MicroBatch]],
    logprobs: Sequence[Sequence[jax.Array]],
) -> Callable[[], None]:
    """A function to be called once the step's log-probs at training are there: it writes them beside the transcripts of
    the batch. Where no transcripts are kept, it does nothing."""
    run, step = learner.run, learner.state.step
    kept = run.config.dataflow.keep_trajectories and learner.checkpoints is not None and run.folder != Path()
    if not kept or not is_first() or jax.process_count() > 1:  # of several processes, each holds a part of them
        return _write_nothing
    place = {id(row): index for index, row in enumerate(rows)}
    order = [
        [place[id(part[index])] for index in planned.numbered]
        for part, of_part in zip(updates, plans, strict=True)
        for planned in of_part
    ]
    micro_batches = list(itertools.chain(*packed))
    path = trained_path(run.folder, learner.name, step)
    return partial(write_trained, path, rows, order, micro_batches, list(itertools.chain(*logprobs)))


def _write_nothing() -> None:
    pass


def _compares_apart(learner: Learner) -> bool:
    """True if the comparison with the engine's log-probs may need a forward pass of its own: tokens were sampled by
    older weights than the differentiated pass has, or that pass has dropout."""
    may_lag = learner.run.config.dataflow.max_staleness > 0
    return learner.checkpoints is not None and (may_lag or learner.uses_dropout)


def _compared(
    learner: Learner, batch: MicroBatch, on_devices: MicroBatch, mesh: Mesh, *, ours: jax.Array | None
) -> list[Comparison]:
    """Engine and trainer compared over one micro-batch, under each of its versions whose weights `recent` has.

    Swapped tokens are left out: see `swapped`. `ours` are the micro-batch's log-probs under the weights that the step
    began with, if a pass has found them already. Nothing is waited for: the results stay on the devices.
    """
    versions = np.asarray(batch.versions)
    compared = np.asarray(batch.mask) & ~swapped(np.asarray(batch.places), versions)
    found = []
    for version in sorted(set(versions[compared].tolist()) & set(learner.recent)):
        known = ours if version == learner.state.step else None
        if known is None:
            known = logprobs_of(learner.objective, replace(learner.state, trained=learner.recent[version]), on_devices)
        mask = place(compared & (versions == version), mesh)
        found.append(_compare(mesh)(known, on_devices.behaviour_logprobs, mask, on_devices.sequences))
    return found


@cache
def _compare(mesh: Mesh) -> Callable[..., Comparison]:
    """A jitted function that compares a micro-batch under one version; every process gets the whole result."""

    def compare(ours: jax.Array, theirs: jax.Array, mask: jax.Array, sequences: jax.Array) -> Comparison:
        of_sequences = mismatch_of_sequences(ours, theirs, mask, sequences, sequences.size)
        return Comparison(mismatch_metrics(ours, theirs, mask), of_sequences)

    return jax.jit(compare, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _dropout_seed(learner: Learner, update: int, micro_batch: int) -> DropoutSeed | None:
    """Numbers that determine a pass's dropout: the seed and the place in the run, so that a resumed run repeats it."""
    if not learner.uses_dropout:
        return None
    return np.array([learner.run.config.seed, learner.state.step, update, micro_batch], np.uint32)


def _apply_update(learner: Learner, total: GradientSum) -> Metrics:
    """Take the optimiser's step. An optimiser state that is kept on the host is on the devices for this only."""
    fetched = replace(learner.state, optimizer=learner.memory.to_device(learner.state.optimizer))
    state, metrics = apply(learner.optimizer, fetched, total)
    learner.state = replace(state, optimizer=learner.memory.to_host(state.optimizer))
    return metrics


def _remember(learner: Learner) -> None:
    """Keep a copy of the new version, and drop versions too old for a batch to have been sampled from. Without
    checkpoints, no engine samples; with one update a step and no dropout besides, as in the warm start, nothing reads
    a copy."""
    if learner.checkpoints is None and learner.policy.trainer.updates_per_step == 1 and not learner.uses_dropout:
        return
    learner.recent[learner.state.step] = _copied(learner.state.trained)
    for version in sorted(learner.recent)[: -(learner.run.config.dataflow.max_staleness + 1)]:
        del learner.recent[version]
