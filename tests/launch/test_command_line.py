import pytest
from absl import flags

from flowjax.config import ConfigError
from flowjax.launch.command_line import parse


def refuse(argv) -> str:
    with pytest.raises(ConfigError) as error:
        parse([str(a) for a in argv], lambda values: flags.DEFINE_bool("dry_run", False, "", flag_values=values))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_overrides_are_typed_and_the_config_is_locked(recipe):
    argv = [
        f"--config={recipe}:named",
        "--config.optimizer.learning_rate=3e-4",
        "--config.trainer.steps",
        "7",
        "--noconfig.dataflow.keep_trajectories",
        "--config.engine.extra_args=('--seed', '1')",
        "--config.credit.options={'gamma': 0.5}",
        "--config.policy.lora.targets=q_proj",
    ]
    config, _ = parse(argv)
    assert config.name == "given"
    assert config.optimizer.learning_rate == 3e-4
    assert config.trainer.steps == 7
    assert config.dataflow.keep_trajectories is False
    assert config.engine.extra_args == ("--seed", "1")
    assert config.credit.options.gamma == 0.5
    assert config.policy.lora.targets == ("q_proj",)
    with pytest.raises((AttributeError, KeyError)):
        config.trainer.stepz = 1


def test_a_nano_base_can_be_switched_off(recipe):
    config, _ = parse([f"--config={recipe}", "--config.model.nano=None", "--config.seed=4"])
    assert config.model.nano is None
    assert config.seed == 4


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("config.trainer.stepz", "config.trainer.steps"),
        ("config.trainer.learning_rate", "config.optimizer.learning_rate"),
        ("config.optimiser.learning_rate", "config.optimizer.learning_rate"),
        ("config.rollout.groupsize", "config.rollout.group_size"),
        ("config.sed", "config.seed"),
    ],
)
def test_mistyped_field_names_the_nearest(recipe, wrong, right):
    message = refuse([f"--config={recipe}", f"--{wrong}=3"])
    assert message == f"{wrong} is not a field of this config: did you mean {right}?"


def test_field_with_no_near_name_lists_what_there_is(recipe):
    assert "config.mesh has data, expert, fsdp, sequence, tensor" in refuse(
        [f"--config={recipe}", "--config.mesh.qqqqqq=3"]
    )


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("--config.seed=abc", ("config.seed", "whole number", "'abc'", "now 0")),
        ("--config.trainer.steps=1.5", ("config.trainer.steps", "whole number", "'1.5'")),
        ("--config.optimizer.learning_rate=fast", ("config.optimizer.learning_rate", "a number", "'fast'")),
        ("--config.trainer.tensorboard=perhaps", ("config.trainer.tensorboard", "true or false", "'perhaps'")),
        ("--config.credit.options=[1]", ("config.credit.options", "a dict", "'[1]'")),
        ("--config.model={'path': 'x'}", ("config.model is a section", "config.model.")),
        ("--config.credit.options.gamma=1", ("config.credit.options.gamma", "config.credit.options is {}")),
        ("--config.seed.x=1", ("config.seed.x is not a field",)),
        ("--dryrun", ("--dryrun is not a flag", "did you mean --dry_run?")),
        ("dry_run", ("'dry_run' is not a flag",)),
    ],
)
def test_other_mistakes_take_one_line(recipe, override, parts):
    message = refuse([f"--config={recipe}", override])
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataflow.algorithms", {"greso": {"window": 32}, "dynamic_sampling": {}}),
        ("env.sources", {"small": {"weight": 3.0}, "large": {"options": {"rows": 8}}}),
        ("agents", {"agent": "base"}),
        ("policies", {"solver": {}, "verifier": {"optimizer": {"learning_rate": 1e-4}}}),
    ],
)
def test_a_section_of_free_names_is_set_as_a_whole(recipe, field, value):
    config, _ = parse([f"--config={recipe}", f"--config.{field}={value}"])
    section = config
    for name in field.split("."):
        section = section[name]
    assert section.to_dict() == value


def test_recipe_that_is_not_there_names_the_nearest(recipe):
    assert f"did you mean {recipe}?" in refuse([f"--config={recipe.parent}/recpie.py"])
    assert "give the path of a recipe" in refuse(["--config=/no/such/folder/x.py"])
    assert "--config is missing" in refuse([])


def test_recipe_that_fails_is_told_with_its_line(recipe, tmp_path):
    assert "no variant 'large'" in refuse([f"--config={recipe}:large"])
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config():\n    return undefined_name\n")
    message = refuse([f"--config={broken}"])
    assert f"{broken} line 2: NameError" in message
    broken.write_text("x = 1\n")
    assert "get_config" in refuse([f"--config={broken}"])
    broken.write_text("def get_config():\n    return {}\n")
    assert "return a ConfigDict" in refuse([f"--config={broken}"])
