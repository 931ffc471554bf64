"""One policy in training: its parameters, optimiser, compiled functions, checkpoints and counters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.models.decoder import Decoder
from flowjax.models.lora import LoraParam
from flowjax.trainer.optimizer import OptimizerMemory, learning_rate_schedule, make_optimizer
from flowjax.trainer.processes import on_mesh
from flowjax.trainer.step import make_update
from flowjax.weights.publish import Checkpoints

Arrays = Any


class Learner:
    """The state that a checkpoint holds, the frozen base that it does not, and what acts on them.

    Made from the newest checkpoint if there is one; if there is none, version 0 is published at once.

    Args:
        name: of the policy.
        config: the whole config, as this policy alone would have it.
        model: with the policy's own adapter, or without one to train all of it. Several policies may share its base.
        checkpoints: where versions are published; None publishes nothing.

    Raises:
        ConfigError: an objective or optimiser that does not fit the model.
        CheckpointError: the newest checkpoint is of another shape.
    """

    def __init__(self, name: str, config: ConfigDict, model: Decoder, checkpoints: Checkpoints | None):
        self.name, self.config, self.model, self.lora = name, config, model.config, model.lora
        self.checkpoints, self.steps = checkpoints, config.trainer.steps
        updates = config.trainer.steps * config.trainer.updates_per_step
        self._graph, trained, self.frozen = nnx.split(model, LoraParam if model.lora else nnx.Param, ...)
        # Small steps would be lost in bfloat16: what is trained is kept in float32 and cast for each pass.
        self._dtypes = jax.tree.map(lambda leaf: leaf.dtype, trained)
        self.trained = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)
        optimizer = make_optimizer(config.optimizer, updates, self.trained)
        self.schedule = learning_rate_schedule(config.optimizer, updates)
        self._memory = OptimizerMemory(config.trainer.offload_optimizer)
        mesh = None if model.placement is None else model.placement.mesh
        self._optimizer_state = optimizer.init(self.trained)
        if mesh is not None:
            self._optimizer_state = jax.tree.map(lambda leaf: on_mesh(leaf, mesh), self._optimizer_state)
        if model.lora is None and config.loss.kl_coefficient:
            raise ConfigError(
                f"config.loss.kl_coefficient is {config.loss.kl_coefficient}, but with config.policy.train 'full' no "
                "copy of the base is kept to compare with: set it to 0, or train 'lora'"
            )
        self.functions = make_update(
            self._graph,
            optimizer,
            kind=config.loss.kind,
            options=config.loss.options.to_dict(),
            kl_coefficient=config.loss.kl_coefficient,
            entropy_coefficient=config.loss.entropy_coefficient,
            temperature=config.rollout.temperature,
            chunk_tokens=config.trainer.logprob_chunk_tokens,
            dtypes=self._dtypes,
            layout=None if mesh is None else (_shardings(self.trained), _shardings(self._optimizer_state)),
        )
        self.step = self.skipped = self.empty = 0
        self.save_s = 0.0  # of the newest checkpoint
        self._restore()
        self.recent = self._recent()

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def drops(self, update: int, micro_batch: int) -> np.ndarray | None:
        """What the dropout of a pass follows from: nothing but the seed and the place in the run."""
        if self.lora is None or not self.lora.dropout:
            return None
        return np.array([self.config.seed, self.step, update, micro_batch], np.uint32)

    def start(self, update: int) -> Arrays | None:
        """The trained arrays at the start of the step; None where they are those about to be trained, dropout apart."""
        drops = self.lora is not None and self.lora.dropout > 0
        return self.recent[self.step] if update or drops else None

    def apply(self, sums: Any) -> dict[str, Any]:
        """Take the update; returns its metrics, still on the devices."""
        state = self._memory.to_device(self._optimizer_state)
        self.trained, state, values = self.functions.apply(self.trained, state, sums)
        self._optimizer_state = self._memory.to_host(state)
        return values

    def advance(self) -> None:
        """The step is dispatched: a new version."""
        self.step += 1
        self.recent[self.step] = copy(self.trained)
        for version in sorted(self.recent)[: -(self.config.dataflow.max_staleness + 1)]:
            del self.recent[version]

    def publish(self) -> None:
        """Save a checkpoint; its commit marker, written in the background, is the publication."""
        if self.checkpoints is not None:
            counters = {"skipped": self.skipped, "empty": self.empty}
            self.checkpoints.save(self.step, self.trained, self._optimizer_state, counters)

    def merged(self) -> Decoder:
        """The model as trained."""
        trained = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), self.trained, self._dtypes)
        return nnx.merge(self._graph, trained, self.frozen)

    def try_out(self, batch: Any) -> None:
        """Run every function once, so that all are compiled; the results are thrown away."""
        self.functions.logprobs(self.trained, self.frozen, batch)
        several = self.config.trainer.updates_per_step > 1
        start = self.trained if several else self.start(0)
        (anchor,) = self.functions.anchors(start, self.trained, self.frozen, [batch])
        sums = self.functions.add(self.trained, self.frozen, batch, anchor, None, self.drops(0, 0))
        sums = self.functions.add(self.trained, self.frozen, batch, anchor, sums, self.drops(0, 1))
        state = self._memory.to_device(self._optimizer_state)
        self.functions.apply(copy(self.trained), copy(state), sums)

    def _restore(self) -> None:
        latest = self.checkpoints.latest() if self.checkpoints is not None else None
        if self.checkpoints is not None and latest is not None:
            saved = self.checkpoints.restore(latest, adapter=self.trained, optimizer=self._optimizer_state)
            self.trained, self._optimizer_state, self.step = saved.adapter, saved.optimizer, latest
            self.skipped, self.empty = saved.data["skipped"], saved.data.get("empty", 0)
        self._optimizer_state = self._memory.to_host(self._optimizer_state)
        if latest is None:
            self.publish()

    def _recent(self) -> dict[int, Arrays]:
        """Trained arrays of the versions that a batch may have been sampled from, by version."""
        oldest = self.step - self.config.dataflow.max_staleness
        versions = self.checkpoints.committed_steps() if self.checkpoints else []
        known = [version for version in versions if oldest <= version < self.step]
        earlier = {v: self.checkpoints.restore_adapter(v, self.trained) for v in known if self.checkpoints}
        return earlier | {self.step: copy(self.trained)}


def _shardings(arrays: Arrays) -> Arrays:
    return jax.tree.map(lambda leaf: leaf.sharding, arrays)


def copy(arrays: Arrays) -> Arrays:
    return jax.tree.map(jnp.copy, arrays)
