import json

import pytest
from ml_collections import ConfigDict

from flowjax.launch.checks import check_config, check_unchanged


def test_a_sound_config_passes(config):
    assert check_config(config) == []


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("trainer.row_tokens", 1000, ("config.trainer.row_tokens is 1000", "is 1280", "raise row_tokens to 1280")),
        ("engine.max_model_tokens", 1024, ("config.engine.max_model_tokens is 1024", "1280", "raise max_model_tokens")),
        ("trainer.updates_per_step", 129, ("config.trainer.updates_per_step is 129", "128 episodes", "lower it")),
        ("rollout.group_size", 1, ("config.rollout.group_size is 1", "'grpo'", "raise group_size to 2")),
        ("trainer.steps", 0, ("config.trainer.steps is 0", "at least 1")),
        ("rollout.temperature", 0.0, ("config.rollout.temperature is 0.0", "at least 0.01")),
        ("optimizer.learning_rate", -1.0, ("config.optimizer.learning_rate is -1.0", "positive")),
        (
            "optimizer.warmup_steps",
            100,
            ("config.optimizer.warmup_steps is 100", "only 100 optimiser updates", "lower"),
        ),
        ("optimizer.schedule", "cosin", ("config.optimizer.schedule is 'cosin'", "constant, cosine, linear")),
        ("model.dtype", "bf16", ("config.model.dtype is 'bf16'", "bfloat16")),
        ("model.quantize", "int4", ("config.model.quantize is 'int4'", "int8, nf4")),
        ("model.remat", "some", ("config.model.remat is 'some'", "none, dots, layer")),
        ("optimizer.name", "adam", ("config.optimizer.name is 'adam'", "adamw, muon, sgd")),
        ("policy.name", "a@1", ("config.policy.name is 'a@1'", "letters, digits")),
        ("dataflow.max_staleness", -1, ("config.dataflow.max_staleness is -1", "at least 0")),
        ("dataflow.lease_s", 2.0, ("config.dataflow.lease_s is 2.0", "config.env.step_timeout_s is 10.0", "raise")),
        (
            "dataflow.max_message_bytes",
            50_000,  # of 12 turns of 1,024 and 256 tokens, or what the recipe of these tests has
            ("config.dataflow.max_message_bytes is 50000", "of tokens and log-probs", "raise it beyond that"),
        ),
        (
            "dataflow.algorithms",
            ConfigDict({"overlong_filter": {"limit_tokens": 257}}),
            ("overlong_filter.limit_tokens is 257", "config.rollout.max_new_tokens, 256", "lower it to 256"),
        ),
        *(
            (
                "dataflow.algorithms",
                ConfigDict({name: options}),
                (f"config.dataflow.algorithms.{name} is {options!r}: give a dict of its options", '{"path": "'),
            )
            for name, options in (("mine", "curation:OnlyHard"), ("overlong_filter", 0.5), ("greso", None))
        ),
        (
            "reward.components",
            ConfigDict({"overlong": {"limit_tokens": 512, "buffer_tokens": 256}}),
            ("components.overlong.limit_tokens is 512", "more than 256 tokens", "max_new_tokens, 256: lower"),
        ),
        ("reward.components", ConfigDict(), ("config.reward.components is empty", "success")),
    ],
)
def test_each_conflict_names_field_value_and_remedy(config, field, value, parts):
    section, _, name = field.rpartition(".")
    config[section][name] = value
    (message,) = check_config(config)
    for part in parts:
        assert part in message


def test_a_component_for_long_replies_may_begin_below_a_limit_that_none_reaches(config):
    config.reward.components.overlong = {"limit_tokens": 512, "buffer_tokens": 257}
    assert check_config(config) == []


@pytest.mark.parametrize(
    "name", ["dr_grpo", "gigpo", "published.grpo", "reinforce_plus_plus_baseline", "rewardflow", "rloo"]
)
def test_groups_of_one_are_refused_where_episodes_are_compared(config, name):
    config.rollout.group_size, config.credit.name = 1, name
    (message,) = check_config(config)
    assert "config.rollout.group_size is 1" in message and repr(name) in message
    config.credit.name = "reinforce_plus_plus"
    assert check_config(config) == []


@pytest.mark.parametrize(("group_size", "options"), [(4, {}), (8, {"k": 8})])
def test_groups_without_a_second_subset_of_k_are_refused(config, group_size, options):
    config.rollout.group_size, config.credit.name = group_size, "pass_at_k"
    config.credit.options = ConfigDict(options)
    (message,) = check_config(config)
    assert f"config.credit.options.k of 'pass_at_k' is {group_size}" in message and "lower k or raise" in message
    config.rollout.group_size += 1
    assert check_config(config) == []


@pytest.mark.parametrize(("name", "value", "off"), [("top_p", 0.9, 1.0), ("top_k", 20, 0), ("min_p", 0.05, 0.0)])
def test_training_on_what_sampling_left_is_refused_unless_the_loss_weighs_it(config, name, value, off):
    config.rollout[name] = value
    (message,) = check_config(config)
    assert message.startswith(f"config.rollout.{name} is {value}") and "correction is 'none'" in message
    assert f"back to {off}" in message and f"config.eval.{name}" in message and "'token_truncate'" in message
    config.loss.options = ConfigDict({"correction": "token_mask"})
    assert len(check_config(config)) == 1, "a mask weighs nothing"
    config.loss.options.correction = "token_truncate"
    assert check_config(config) == []
    config.rollout[name], config.eval[name], config.loss.options = off, value, ConfigDict()
    assert check_config(config) == [], "an evaluation trains nothing"
    config.rollout[name], config.eval.versions = value, (1,)
    assert check_config(config) == [], "nor does the command"


def test_training_on_what_a_grammar_left_is_refused_unless_the_loss_weighs_it(config):
    config.rollout.structured_outputs = True
    (message,) = check_config(config)
    assert message.startswith("config.rollout.structured_outputs is True") and message.endswith("back to False")
    config.loss.options = ConfigDict({"correction": "token_truncate"})
    assert check_config(config) == []


def test_each_policy_weighs_for_itself_what_sampling_left(config):
    config.rollout.top_p = 0.9
    config.policies = {
        "one": {"loss": {"options": {"correction": "token_truncate"}}},
        "two": {"loss": {"kind": "gspo"}},
    }
    config.agents = {"solver": "one", "verifier": "two"}
    (message,) = check_config(config)
    assert "config.policies.two.loss.options.correction is 'none'" in message


def test_a_policy_that_speaks_for_nobody_is_refused(config):
    config.policies = {"one": {}, "two": {}}
    (message,) = check_config(config)
    assert message.startswith("config.policies.two speaks for no agent") and "config.agents" in message
    config.agents = {"solver": "one", "verifier": "two"}
    assert check_config(config) == []
    config.agents = {"solver": "one", "verifier": "one"}
    assert len(check_config(config)) == 1
    config.eval.versions = (1, 1)
    assert check_config(config) == [], "an evaluation trains none of them"


def test_full_training_has_no_reference_and_no_quantised_base(config):
    config.policy.train, config.loss.kl_coefficient, config.model.quantize = "full", 0.1, "nf4"
    reference, quantised = check_config(config)
    assert "config.loss.kl_coefficient is 0.1" in reference and "set it to 0, or train 'lora'" in reference
    assert "config.model.quantize is 'nf4'" in quantised and "set it to ''" in quantised
    config.loss.kl_coefficient, config.model.quantize = 0.0, ""
    config.policies = {"one": {}, "two": {"policy": {"train": "lora"}}}
    config.agents = {"solver": "one", "verifier": "two"}
    (shared,) = check_config(config)
    assert "config.policies.one trains 'full' weights, but 2 policies share the base" in shared


def test_engines_in_8_bits_take_adapters_and_are_started_here(config):
    config.engine.quantize, config.policy.train = "int8", "full"
    (message,) = check_config(config)
    assert "config.engine.quantize is 'int8'" in message and "set it to '' or train 'lora'" in message
    config.policy.train, config.engine.urls = "lora", ("http://127.0.0.1:1",)
    (message,) = check_config(config)
    assert "config.engine.urls names engines that run elsewhere: start those with it" in message


def test_all_conflicts_are_told_together(config):
    config.trainer.row_tokens, config.engine.max_model_tokens, config.trainer.steps = 10, 10, -1
    assert len(check_config(config)) == 3


def test_a_resumed_run_may_be_longer_but_not_another(config):
    longer = ConfigDict(config.to_dict())
    longer.trainer.steps = 200
    longer.engine.port = 8000
    longer.name = "elsewhere"
    assert check_unchanged(config, longer) == []
    longer.rollout.top_p, longer.eval.top_k = 0.9, 5
    longer.rollout.stop, longer.model.template_options = ("</action>",), ConfigDict({"enable_thinking": False})
    changed = check_unchanged(config, longer)
    for field in ("eval.top_k", "model.template_options.enable_thinking", "rollout.stop", "rollout.top_p"):
        assert any(text.startswith(f"config.{field} is ") for text in changed), field
    longer.rollout, longer.eval, longer.model = config.rollout, config.eval, config.model
    longer.policy.lora.rank = 8
    longer.credit.options = ConfigDict({"gamma": 0.5})
    rank, gamma = sorted(check_unchanged(config, longer), key=lambda text: "gamma" in text)
    assert "config.policy.lora.rank is 8, but this run was started with 32" in rank
    assert "config.credit.options.gamma is 0.5" in gamma


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"greso": {}}, "config.dataflow.algorithms.greso is {}, but this run was started with None"),
        ({"greso": {}}, {}, "config.dataflow.algorithms.greso is None, but this run was started with {}"),
        ({"greso": {}}, {"replay": {"ratio": 0.5}}, "config.dataflow.algorithms.greso is None, but"),
        ({"greso": {}}, {"greso": {"window": 3}}, "config.dataflow.algorithms.greso.window is 3, but"),
        ({"greso": {}}, {"greso": {}}, ""),
    ],
)
def test_an_empty_map_that_comes_or_goes_is_a_change(config, before, now, said):
    """Algorithms, sources and policies are asked for by their names alone."""
    config.dataflow.algorithms = before
    saved = ConfigDict(json.loads(config.to_json()))
    config.dataflow.algorithms = now
    changed = check_unchanged(saved, config)
    assert any(text.startswith(said) for text in changed) if said else changed == []
    assert len(changed) == len({text.partition(" is ")[0] for text in changed}) <= 2


def test_a_policy_of_another_name_is_another_run(config):
    saved = ConfigDict(json.loads(config.to_json()))
    config.policies = {"second": {}}
    assert len(check_unchanged(saved, config)) == 1


def test_rules_that_went_through_json_are_not_a_change(config):
    config.optimizer.rules = (("norm", {"frozen": True}), (".*", {}))
    assert check_unchanged(ConfigDict(json.loads(config.to_json())), config) == []


def test_tuples_that_went_through_json_are_not_a_change(config):
    assert isinstance(config.policy.lora.targets, tuple)
    assert check_unchanged(ConfigDict(json.loads(config.to_json())), config) == []
