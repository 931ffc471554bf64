"""Several policies on one base, each as if it were alone."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from test_train import SeededSource

from flowjax.config import ConfigError, default_config
from flowjax.models.decoder import Decoder
from flowjax.models.hf import save_decoder
from flowjax.models.lora import LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter, read_metrics
from flowjax.run import resolve
from flowjax.trainer import train as training
from flowjax.trainer.sources import NO_MISMATCHES, Mismatches, ServedBatch
from flowjax.trainer.train import make_models, start, trained_model
from flowjax.weights.publish import Checkpoints, committed_steps

MODEL = nano_config(40, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_size=16)


class InOrder(SeededSource):
    """Batches in a given order of policies; those of each are the same in any order."""

    def __init__(self, order: str):
        super().__init__()
        self.order = iter(order.split())
        self.commits: list[tuple[str, int]] = []

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        policy = next(self.order)
        served = super().batch({policy: steps[policy] + (100 if policy == "verifier" else 0)})
        for row in served.rows:
            row.versions[row.sampled] = steps[policy]
        return served

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        self.commits.append((policy, version))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_decoder(Decoder(MODEL, dtype=np.float32, key=jax.random.key(0)), folder)
    config = default_config()
    config.model.update({"path": str(folder), "dtype": "float32", "remat": "none"})
    config.trainer.update({"steps": 3, "row_tokens": 16, "micro_batch_rows": 8})
    config.optimizer.update({"learning_rate": 1e-2, "warmup_steps": 0})
    config.rollout.update({"max_prompt_tokens": 6, "max_new_tokens": 2})
    config.policy.lora.update({"rank": 2, "targets": ("q_proj", "down_proj"), "dropout": 0.1})
    config.policies = {
        "solver": {},
        "verifier": {
            "policy": {"lora": {"rank": 4, "targets": ("v_proj",)}},
            "optimizer": {"name": "sgd", "learning_rate": 1e-1},
            "trainer": {"steps": 2},
        },
    }
    return config.lock()


def train(folder: Path, config, source: InOrder, names: list[str]):
    mesh = make_mesh(data=1, fsdp=1)
    run = resolve(config)
    models = make_models(run, mesh)
    opened = {name: Checkpoints(folder / "checkpoints" / name, keep=9) for name in names}
    policies = {name: start(run, run.policies[name], models[name], opened[name]) for name in names}
    steps = {name: policy.state.step for name, policy in policies.items()}
    training.train(policies, source, mesh=mesh, metrics=MetricsWriter(folder, resume_step=steps))
    for checkpoints in opened.values():
        checkpoints.close()
    return {name: nnx.state(trained_model(policy), LoraParam) for name, policy in policies.items()}


def test_policies_in_turn_train_as_each_alone(config, tmp_path: Path):
    source = InOrder("verifier solver solver verifier solver")
    together = train(tmp_path / "both", config, source, ["solver", "verifier"])
    alone = train(tmp_path / "solver", config, InOrder("solver " * 3), ["solver"])
    alone |= train(tmp_path / "verifier", config, InOrder("verifier " * 2), ["verifier"])
    for name, state in together.items():
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(alone[name]), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    assert committed_steps(tmp_path / "both/checkpoints/solver") == [0, 1, 2, 3]
    assert committed_steps(tmp_path / "both/checkpoints/verifier") == [0, 1, 2]
    assert {("solver", 3), ("verifier", 2)} <= set(source.commits)
    lines = [(line["policy"], line["step"]) for line in read_metrics(tmp_path / "both") if line["kind"] == "train"]
    assert lines == [("verifier", 1), ("solver", 1), ("solver", 2), ("verifier", 2), ("solver", 3)]


def test_the_last_version_of_a_policy_is_reported_while_others_go_on(config, tmp_path: Path):
    """It was when all were through: until then tasks were opened for a policy that learnt no more."""

    class Patient(InOrder):
        def batch(self, steps: Mapping[str, int]) -> ServedBatch:
            while "verifier" not in steps and 2 not in committed_steps(tmp_path / "checkpoints/verifier"):
                time.sleep(0.01)
            return super().batch(steps)

    source = Patient("verifier verifier solver solver solver")
    train(tmp_path, config, source, ["solver", "verifier"])
    assert source.commits.index(("verifier", 2)) < source.commits.index(("solver", 3))


def test_policies_share_the_very_arrays_of_the_base(config):
    solver, verifier = make_models(resolve(config), make_mesh(data=1, fsdp=1)).values()
    assert solver.layers["q_proj"].get_value() is verifier.layers["q_proj"].get_value()
    assert set(solver.adapter) == {"q_proj", "down_proj"} and set(verifier.adapter) == {"v_proj"}


def test_a_trainer_of_its_own_has_the_same_model(config):
    mesh = make_mesh(data=1, fsdp=1)
    (alone,) = make_models(resolve(config), mesh, ["verifier"]).items()
    assert alone[0] == "verifier"
    together = nnx.state(make_models(resolve(config), mesh)["verifier"])
    assert all(map(np.array_equal, jax.tree.leaves(nnx.state(alone[1])), jax.tree.leaves(together)))


def test_a_trainer_loads_the_base_of_its_policy(config, tmp_path):
    save_decoder(Decoder(replace(MODEL, hidden_size=32), dtype=np.float32, key=jax.random.key(1)), tmp_path)
    own = default_config()
    own.update(config.to_dict())
    own.bases.large = {"model": {"path": str(tmp_path)}}
    own.policies.verifier.policy.base = "large"
    mesh = make_mesh(data=1, fsdp=1)
    sizes = {name: make_models(resolve(own), mesh, [name])[name].config.hidden_size for name in ("solver", "verifier")}
    assert sizes == {"solver": 16, "verifier": 32}
    with pytest.raises(ConfigError, match="solver, verifier are on the base models base, large, but a trainer holds"):
        make_models(resolve(own), mesh)
    own.policies.verifier.policy.train = "full"
    assert make_models(resolve(own), mesh, ["verifier"])["verifier"].lora is None
    assert make_models(resolve(own), mesh, ["solver"])["solver"].lora is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies.solver": {"policy": {"train": "full"}}}, r"config\.policies\.solver trains 'full' weights"),
        ({"policies": {}, "policy.train": "full", "model.quantize": "nf4"}, r"config\.model\.quantize is 'nf4'"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(config, changes, message):
    own = default_config()
    own.update(config.to_dict())
    for field, value in changes.items():
        section, _, name = field.rpartition(".")
        (own[section] if section else own)[name] = value
    with pytest.raises(ConfigError, match=message):
        make_models(resolve(own), make_mesh(data=1, fsdp=1))
