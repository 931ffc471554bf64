"""A run as its config means it: policies and bases with their own sections."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config, save_run
from flowjax.run import field_problems, read_run, resolve


def pair() -> ConfigDict:
    config = default_config()
    config.policies = ConfigDict({"solver": {}, "verifier": {"optimizer": {"learning_rate": 1e-4}}})
    config.policies.verifier.policy = ConfigDict({"lora": {"rank": 4}})
    return config.lock()


def test_one_policy_has_the_sections_of_the_config():
    run = resolve(default_config())
    (policy,) = run.policies.values()
    assert (policy.name, policy.train, policy.base) == ("agent", "lora", run.bases["base"])
    for section in ("reward", "credit", "loss", "trainer", "optimizer"):
        assert getattr(policy, section) == run.config[section]
    assert run.agents == {"agent": "agent"}


def test_each_policy_differs_in_its_own_sections_alone():
    policies = resolve(pair()).policies
    assert list(policies) == ["solver", "verifier"] == [policy.name for policy in policies.values()]
    solver, verifier = policies.values()
    assert (solver.optimizer.learning_rate, verifier.optimizer.learning_rate) == (1e-5, 1e-4)
    assert (solver.lora.rank, verifier.lora.rank) == (32, 4)
    verifier = ConfigDict(verifier.optimizer.to_dict() | {"learning_rate": 1e-5})
    assert verifier.to_dict() == solver.optimizer.to_dict()
    for section in ("reward", "credit", "loss", "trainer"):
        assert getattr(policies["verifier"], section) == getattr(solver, section)


def test_options_that_a_policy_does_not_name_are_those_of_the_run():
    """One option of a policy put all others back to their defaults; components of a reward are replaced."""
    config = default_config()
    config.loss.options = {"clip_low": 0.1, "clip_high": 0.2}
    config.credit.options, config.reward.components = {"gamma": 0.8}, {"success": 1.0, "step_penalty": 0.5}
    paid = {"components": {"success": 2.0}}
    config.policies = ConfigDict({"a": {}, "b": {"loss": {"options": {"clip_high": 0.5}}, "reward": paid}})
    config.policies.c = {"credit": {"name": "gigpo", "options": {"step_weight": 0.5}}}
    policies = resolve(config.lock()).policies
    assert policies["b"].loss.options.to_dict() == {"clip_low": 0.1, "clip_high": 0.5}
    assert policies["b"].reward.components.to_dict() == {"success": 2.0}
    assert policies["a"].loss.options.to_dict() == {"clip_low": 0.1, "clip_high": 0.2}
    assert policies["c"].credit.options.to_dict() == {"step_weight": 0.5}, "of another estimator, the run's are dropped"


def test_a_run_does_not_see_what_becomes_of_the_config():
    config = default_config()
    run = resolve(config)
    config.trainer.steps = 3
    assert run.policies["agent"].trainer.steps == run.config.trainer.steps == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"max_turns": 3}}, "config.policies.solver.env is set, .* only in policy, reward"),
        ({"optimizer": {"rate": 3}}, "config.policies.solver.optimizer.rate is no field: use one of .*learning_rate"),
        ({"trainer": {"processes": 2}}, "trainer.processes is 2, but policies have it in common: set config.trainer"),
        ({"trainer": {"step_timeout_s": 9.0}}, "config.policies.solver.trainer.step_timeout_s is 9.0, but policies"),
        (
            {"policy": {"name": "other"}},
            "config.policies.solver.policy.name is 'other', but the policy is named 'solver'",
        ),
        ({"policy": {"lora": 3}}, "config.policies.solver.policy.lora is 3: it is a section, set its fields"),
        ({"policy": {"lora": {"rank": "a"}}}, "config.policies.solver.policy.lora.rank is 'a': give a whole number"),
    ],
)
def test_what_a_policy_cannot_have_of_its_own_is_named(changes: dict, message: str):
    config = default_config()
    config.policies = ConfigDict({"solver": changes})
    with pytest.raises(ConfigError, match=message):
        resolve(config)


def test_policies_survive_the_run_folder(tmp_path: Path):
    save_run(pair(), tmp_path)
    assert read_run(tmp_path).policies.keys() == {"solver", "verifier"}


def bases(**judge: dict) -> ConfigDict:
    """A run with a further base model, on which one of two policies is trained."""
    config = pair().unlock()
    config.model.update({"path": "models/small", "nano": ConfigDict({"layers": 2})})
    config.engine.update({"port": 8000, "replicas": 2})
    config.bases = ConfigDict({"judge": judge or {"model": {"path": "models/large"}, "engine": {"replicas": 3}}})
    config.policies.verifier.policy.base = "judge"
    return config.lock()


def test_without_further_bases_there_is_the_runs_own():
    run = resolve(default_config())
    assert (run.bases["base"].model, run.bases["base"].engine) == (run.config.model, run.config.engine)
    assert run.policies_on("base") == run.policies and list(run.bases) == ["base"]


def test_a_base_differs_in_what_it_says_alone():
    run = resolve(bases())
    own, judge = run.bases.values()
    assert (own.model, own.engine) == (run.config.model, run.config.engine)
    assert (judge.model.path, judge.model.dtype, judge.engine.replicas) == ("models/large", own.model.dtype, 3)
    assert judge.model.nano is None, "another path is not built in the shape of the run's own"
    assert (judge.engine.port, judge.engine.urls) == (0, ()), "two bases cannot share an address"
    assert judge.engine.to_dict() | {"port": 8000, "replicas": 2} == own.engine.to_dict()
    assert judge.model.to_dict() | {"path": own.model.path, "nano": {"layers": 2}} == own.model.to_dict()


def test_a_base_has_a_warm_start_of_its_own():
    run = resolve(bases(model={"path": "models/executor", "nano": {"layers": 3}}, warm_start={"steps": 7}))
    own, executor = run.bases.values()
    assert own.warm_start == run.config.warm_start
    assert executor.warm_start.to_dict() == own.warm_start.to_dict() | {"steps": 7}
    assert field_problems(bases(warm_start={"steps": 0})) == [
        "config.bases.judge.warm_start.steps is 0: it must be at least 1 and at most 1,000,000,000"
    ]


def test_the_same_model_on_engines_of_its_own_is_built_alike():
    judge = resolve(bases(engine={"tensor_parallel": 2})).bases["judge"]
    assert (judge.model.path, judge.model.nano.layers, judge.engine.tensor_parallel) == ("models/small", 2, 2)


def test_each_policy_has_the_model_and_engines_of_its_base():
    run = resolve(bases())
    solver, verifier = run.policies.values()
    assert (solver.base.model.path, verifier.base.model.path) == ("models/small", "models/large")
    assert (solver.base.engine.replicas, verifier.base.engine.replicas) == (2, 3)
    assert (verifier.lora.rank, verifier.base.model.nano) == (4, None)
    assert [list(run.policies_on(base)) for base in ("base", "judge")] == [["solver"], ["verifier"]]
    alone = default_config()
    alone.bases = {"judge": {"model": {"path": "models/large"}}}
    alone.policy.base = "judge"
    assert resolve(alone).policies["agent"].base.model.path == "models/large"


def test_engines_have_the_ports_and_addresses_of_their_base():
    run = resolve(bases(engine={"urls": ("http://a:1", "http://b:1")}))
    assert [(engine.name, engine.base, engine.port, engine.url) for engine in run.engines] == [
        ("engine-0", "base", 8000, ""),
        ("engine-1", "base", 8001, ""),
        ("engine-judge-0", "judge", 0, "http://a:1"),
        ("engine-judge-1", "judge", 0, "http://b:1"),
    ]
    config = bases().unlock()
    config.elsewhere, config.engine.urls = ("rollout",), ("http://a:1",)
    assert resolve(config).engines == (), "a rollout service elsewhere has engines of its own"


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
        ({"judge": {"env": {}}}, "config.bases.judge.env is set, .* only in model, engine, warm_start: set config.env"),
        ({"judge": {"modle": {}}}, "config.bases.judge.modle is set, .* only in model, engine, warm_start: use one"),
        ({"judge": {"model": "a"}}, "config.bases.judge.model is 'a': give a dict"),
        ({"judge": "models/large"}, "config.bases.judge is 'models/large': give a dict"),
        ({"judge": {"model": {"folder": "a"}}}, "config.bases.judge.model.folder is no field: use one of .*dtype"),
        (
            {"judge": {"engine": {"replicas": "two"}}},
            "config.bases.judge.engine.replicas is 'two': give a whole number",
        ),
        ({"other": {}}, r"config.policy.base is 'judge' for policy verifier, .*: use one of base, other"),
    ],
)
def test_what_a_base_cannot_be_is_named(changes: dict, message: str):
    config = bases().unlock()
    config.bases = ConfigDict(changes)
    with pytest.raises(ConfigError, match=message):
        resolve(config)


def test_bases_survive_the_run_folder(tmp_path: Path):
    save_run(bases(engine={"urls": ("http://a:1",)}), tmp_path)
    assert read_run(tmp_path).bases["judge"].engine.urls == ("http://a:1",)
