"""The config of a run, and of each of its policies."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from flowjax.config import (
    ConfigError,
    base_configs,
    default_config,
    load_run,
    policies_on,
    policy_configs,
    save_run,
)


def pair() -> ConfigDict:
    config = default_config()
    config.policies = ConfigDict({"solver": {}, "verifier": {"optimizer": {"learning_rate": 1e-4}}})
    config.policies.verifier.policy = ConfigDict({"lora": {"rank": 4}})
    return config.lock()


def test_one_policy_is_the_config_itself():
    config = default_config()
    assert policy_configs(config) == {"agent": config}


def test_each_policy_differs_in_its_own_sections_alone():
    configs = policy_configs(pair())
    assert list(configs) == ["solver", "verifier"] == [config.policy.name for config in configs.values()]
    solver, verifier = configs.values()
    assert (solver.optimizer.learning_rate, verifier.optimizer.learning_rate) == (1e-5, 1e-4)
    assert (solver.policy.lora.rank, verifier.policy.lora.rank) == (32, 4)
    verifier = ConfigDict(verifier.to_dict())
    verifier.policy.update(solver.policy)
    verifier.optimizer.update(solver.optimizer)
    assert verifier.to_dict() == solver.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"max_turns": 3}}, "config.policies.solver.env is set, .* only in policy, reward"),
        ({"optimizer": {"rate": 3}}, "config.policies.solver.optimizer.rate is no field: use one of .*learning_rate"),
    ],
)
def test_what_a_policy_cannot_have_of_its_own_is_named(changes: dict, message: str):
    config = default_config()
    config.policies = ConfigDict({"solver": changes})
    with pytest.raises(ConfigError, match=message):
        policy_configs(config)


def test_policies_survive_the_run_folder(tmp_path: Path):
    save_run(pair(), tmp_path)
    assert policy_configs(load_run(tmp_path)).keys() == {"solver", "verifier"}


def bases(**judge: dict) -> ConfigDict:
    """A run with a further base model, on which one of two policies is trained."""
    config = pair().unlock()
    config.model.update({"path": "models/small", "nano": ConfigDict({"layers": 2})})
    config.engine.update({"port": 8000, "replicas": 2})
    config.bases = ConfigDict({"judge": judge or {"model": {"path": "models/large"}, "engine": {"replicas": 3}}})
    config.policies.verifier.policy.base = "judge"
    return config.lock()


def test_without_further_bases_there_is_the_runs_own():
    config = default_config()
    assert base_configs(config) == {"base": config}
    assert policies_on(config, "base") == {"agent": config}


def test_a_base_differs_in_its_model_and_its_engines_alone():
    config = bases()
    own, judge = base_configs(config).values()
    assert own is config
    assert (judge.model.path, judge.model.dtype, judge.engine.replicas) == ("models/large", own.model.dtype, 3)
    assert judge.model.nano is None, "another path is not built in the shape of the run's own"
    assert (judge.engine.port, judge.engine.urls) == (0, ()), "two bases cannot share an address"
    judge = ConfigDict(judge.to_dict())
    judge.update({"model": own.model, "engine": own.engine})
    assert judge.to_dict() == own.to_dict()


def test_the_same_model_on_engines_of_its_own_is_built_alike():
    judge = base_configs(bases(engine={"tensor_parallel": 2}))["judge"]
    assert (judge.model.path, judge.model.nano.layers, judge.engine.tensor_parallel) == ("models/small", 2, 2)


def test_each_policy_has_the_model_and_engines_of_its_base():
    config = bases()
    solver, verifier = policy_configs(config).values()
    assert (solver.model.path, verifier.model.path) == ("models/small", "models/large")
    assert (solver.engine.replicas, verifier.engine.replicas) == (2, 3)
    assert (verifier.policy.lora.rank, verifier.model.nano) == (4, None)
    assert [list(policies_on(config, base)) for base in ("base", "judge")] == [["solver"], ["verifier"]]
    alone = default_config()
    alone.bases = {"judge": {"model": {"path": "models/large"}}}
    alone.policy.base = "judge"
    assert policy_configs(alone)["agent"].model.path == "models/large"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": {}}, r"config\.bases has 'base': give a name of letters, .* other than 'base'"),
        ({"0": {}}, r"config\.bases has '0': .* is no number and does not end in '-' and one"),
        ({"judge-1": {}}, "config.bases has 'judge-1'"),
        ({"judge@1": {}}, "config.bases has 'judge@1'"),
        ({"a/b": {}}, "config.bases has 'a/b'"),
        ({"a b": {}}, "config.bases has 'a b'"),
        ({"solver": {}}, "config.bases.solver is also the name of a policy"),
        ({"judge": {"env": {}}}, "config.bases.judge.env is set, .* only in model, engine: set config.env for all"),
        ({"judge": {"modle": {}}}, "config.bases.judge.modle is set, .* only in model, engine: use one of these"),
        ({"judge": {"model": "a"}}, "config.bases.judge.model is 'a': give a dict"),
        ({"judge": "models/large"}, "config.bases.judge is 'models/large': give a dict"),
        ({"judge": {"model": {"folder": "a"}}}, "config.bases.judge.model.folder is no field: use one of .*dtype"),
        ({"judge": {"engine": {"replicas": "two"}}}, "config.bases.judge.engine.replicas is 'two', which does not fit"),
        ({"other": {}}, r"policy verifier is to be trained on 'judge' .*: use one of base, other"),
    ],
)
def test_what_a_base_cannot_be_is_named(changes: dict, message: str):
    config = bases().unlock()
    config.bases = ConfigDict(changes)
    with pytest.raises(ConfigError, match=message):
        policy_configs(config)


def test_bases_survive_the_run_folder(tmp_path: Path):
    save_run(bases(engine={"urls": ("http://a:1",)}), tmp_path)
    assert base_configs(load_run(tmp_path))["judge"].engine.urls == ("http://a:1",)
