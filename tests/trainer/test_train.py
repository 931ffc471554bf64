"""The loop as a whole: exact resume, the same result on one device and on eight, refusal of useless batches."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flowjax.config import ConfigError, default_config
from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter, read_metrics
from flowjax.records import TokenRow
from flowjax.run import resolve
from flowjax.trainer.batch import BatchError
from flowjax.trainer.sources import NO_MISMATCHES, Mismatches, ServedBatch
from flowjax.trainer.train import train_one
from flowjax.weights.publish import CheckpointError, Checkpoints, committed_steps

MODEL = nano_config(40, hidden_size=32, layers=2, heads=4, kv_heads=4, head_dim=8, ffn_size=64)


class SeededSource:
    """The same rows for the same step, in any process."""

    def __init__(self):
        self.asked: list[int] = []
        self.newest_commit = -1

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        ((policy, step),) = steps.items()
        self.asked.append(step)
        rng = np.random.default_rng(step)
        rows = []
        for _ in range(20):
            sampled = np.arange(8) >= 6
            values = [np.where(sampled, rng.normal(size=8), 0).astype(np.float32) for _ in range(2)]
            rows.append(
                TokenRow(
                    "agent",
                    rng.integers(0, 43, 8).astype(np.int32),
                    sampled,
                    values[0] - 3.8 * sampled,
                    values[1],
                    np.where(sampled, step, -1),
                )
            )
        return ServedBatch(policy, rows)

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        self.newest_commit = version


def settings(steps: int, *, every: int = 1, **mesh: int):
    config = default_config()
    config.trainer.checkpoint_every = every
    config.trainer.update({"steps": steps, "updates_per_step": 2, "row_tokens": 16, "micro_batch_rows": 8})
    config.optimizer.update({"learning_rate": 1e-2, "warmup_steps": 0})
    config.rollout.update({"max_prompt_tokens": 6, "max_new_tokens": 2})
    config.loss.kl_coefficient = 0.1
    config.mesh.update(mesh)
    return config.lock()


def run(
    folder: Path,
    config,
    *,
    source: SeededSource | None = None,
    save: bool = True,
    dropout: float = 0.0,
    logs: bool = True,
):
    """Train in `folder`; returns the trained arrays and the source."""
    mesh, source = make_mesh(**config.mesh.to_dict()), source or SeededSource()
    lora = Lora(rank=4, alpha=8.0, rslora=False, targets=("q_proj", "down_proj"), dropout=dropout)
    model = Decoder(MODEL, lora=lora, dtype=jnp.float32, remat="none", key=jax.random.key(0), mesh=mesh)
    metrics = MetricsWriter(folder) if logs else None
    if not save:
        return nnx.state(train_one(resolve(config), model, source, mesh=mesh, metrics=metrics), LoraParam), source
    with Checkpoints(folder / "checkpoints", keep=20) as checkpoints:
        model = train_one(resolve(config), model, source, mesh=mesh, metrics=metrics, checkpoints=checkpoints)
    return nnx.state(model, LoraParam), source


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in read_metrics(folder) if entry["kind"] == "train"]


def test_resumed_training_is_bitwise_the_same(tmp_path: Path):
    """10 steps straight are 5, a stop, and 5 more: weights, optimiser, dropout and the log."""
    straight, _ = run(tmp_path / "straight", settings(10), dropout=0.2)
    # The schedule is a function of the run's length, so that the first half runs under the same config.
    interrupted = SeededSource()

    def stop_at(steps: Mapping[str, int]) -> ServedBatch:
        if steps["agent"] == 5:
            raise KeyboardInterrupt
        return SeededSource.batch(interrupted, steps)

    interrupted.batch = stop_at
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", settings(10), source=interrupted, dropout=0.2)
    resumed, source = run(tmp_path / "resumed", settings(10), dropout=0.2)
    assert source.asked == [5, 6, 7, 8, 9]
    assert source.newest_commit == 10
    for one, other in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    assert losses(tmp_path / "straight") == losses(tmp_path / "resumed")
    assert len(losses(tmp_path / "straight")) == 10


def test_an_adapter_is_not_trained_on_with_another_base(tmp_path: Path):
    weights, config = tmp_path / "base" / "model.safetensors", settings(1).copy_and_resolve_references()
    weights.parent.mkdir()
    with config.unlocked():
        config.model.update({"path": str(weights.parent), "nano": {}})
    weights.write_bytes(b"of one run")
    run(tmp_path, config)
    config.trainer.steps = 2
    weights.write_bytes(b"made anew by another, with its seed")
    with pytest.raises(ConfigError, match="other weights lie than those that agent has been trained on"):
        run(tmp_path, config)
    weights.write_bytes(b"of one run")
    _, source = run(tmp_path, config)
    assert source.newest_commit == 2


def test_version_0_is_published_before_the_first_batch(tmp_path: Path):
    class Refusing(SeededSource):
        def batch(self, steps: Mapping[str, int]) -> ServedBatch:
            raise BatchError("nothing to train on")

    with pytest.raises(BatchError):
        run(tmp_path, settings(2), source=Refusing())
    with Checkpoints(tmp_path / "checkpoints", keep=20) as checkpoints:
        assert checkpoints.committed_steps() == [0]


def test_a_save_that_fails_is_told_while_its_batch_cannot_come(tmp_path: Path, monkeypatch):
    class Waiting(SeededSource):
        def batch(self, steps: Mapping[str, int]) -> ServedBatch:
            if steps["agent"] == 1:
                threading.Event().wait()  # for version 1, which nobody gets
            return super().batch(steps)

    def no_room(folder: Path) -> None:
        raise OSError("No space left on device")

    def save(checkpoints: Checkpoints, step: int, *args: Any, hand_over: Any, whole: bool) -> None:
        saving(checkpoints, step, *args, hand_over=no_room if step else hand_over, whole=whole)

    saving = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(CheckpointError, match="could not be written"):
        run(tmp_path, settings(2), source=Waiting())
    assert committed_steps(tmp_path / "checkpoints") == [0]


MESHES = {"fsdp": (1, 8, 1), "data_fsdp": (2, 4, 1), "fsdp_tensor": (1, 4, 2), "all": (2, 2, 2)}


@pytest.mark.slow  # loss and gradients on eight devices are tested with the models; this adds the loop
def test_eight_devices_train_as_one(tmp_path: Path):
    expected, _ = run(tmp_path, settings(3, data=1, fsdp=1, tensor=1), save=False)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stderr[-2000:]
    sums = json.loads(child.stdout.splitlines()[-1])
    leaves = jax.tree.leaves(expected)
    for name in MESHES:
        for index, leaf in enumerate(leaves):
            got = np.load(tmp_path / f"{name}-{index}.npy")
            np.testing.assert_allclose(got, leaf, atol=2e-5, err_msg=f"{name} {index}")
    assert sums["devices"] == 8


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, (data, fsdp, tensor) in MESHES.items():
        state, _ = run(folder / name, settings(3, data=data, fsdp=fsdp, tensor=tensor), save=False)
        for index, leaf in enumerate(jax.tree.leaves(state)):
            np.save(folder / f"{name}-{index}.npy", np.asarray(leaf))
    print(json.dumps({"devices": jax.device_count()}))
