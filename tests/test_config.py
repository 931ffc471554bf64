"""The config of a run, and of each of its policies."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config, load_run, policy_configs, save_run


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
