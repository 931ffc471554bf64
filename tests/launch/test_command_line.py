from pathlib import Path

import pytest
from absl import flags

from flowjax.config import ConfigError, default_config
from flowjax.launch.command_line import load_recipe, parse
from flowjax.run import resolve

ROOT = Path(__file__).parents[2]
IMPORTS = "from flowjax.config import default_config\nfrom ml_collections import ConfigDict, FrozenConfigDict"


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
        ("config.traner.steps", "config.trainer.steps"),
        ("config.rollout.groupsize", "config.rollout.group_size"),
        ("config.sed", "config.seed"),
    ],
)
def test_mistyped_field_names_the_nearest(recipe, wrong, right):
    message = refuse([f"--config={recipe}", f"--{wrong}=3"])
    assert message == f"{wrong} is not a field of this config: did you mean {right}?"


@pytest.mark.parametrize("text", ["a,b", r"\n"])
def test_a_text_that_looks_like_several_or_like_another_is_refused(recipe, text):
    message = refuse([f"--config={recipe}", f"--config.rollout.stop={text}"])
    assert message.startswith(f"config.rollout.stop takes a tuple such as ('a', 'b'), not {text!r}: put its texts in")


@pytest.mark.parametrize(
    ("text", "stop"), [("a", ("a",)), ("'a', 'b'", ("a", "b")), ("'a,b'", ("a,b",)), (r"('\n',)", ("\n",))]
)
def test_texts_of_a_tuple_are_read_as_python(recipe, text, stop):
    config, _ = parse([f"--config={recipe}", f"--config.rollout.stop={text}"])
    assert config.rollout.stop == stop


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
        ("--config.separate_trainers=perhaps", ("config.separate_trainers", "true or false", "'perhaps'")),
        ("--config.credit.options=[1]", ("config.credit.options", "a dict", "'[1]'")),
        ("--config.model={'path': 'x'}", ("config.model is a section", "config.model.")),
        ("--config.loss.options.clip_low.x=1", ("config.loss.options.clip_low is 0.2", "set it as a whole")),
        ("--config.model.nano.layer=2", ("config.model.nano.layer is not a field", "did you mean 'layers'?")),
        ("--config.bases={'a/b': {}}", ("config.bases has 'a/b'", "give a name of letters")),
        ("--config.runs=~/runs", ("config.runs is '~/runs'", "write the home folder out")),
        ("--config.policy.base=judge", ("config.policy.base is 'judge' for policy agent", "use one of base")),
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


def test_policies_are_set_one_by_one_where_the_recipe_names_none(recipe):
    given = ["--config.policies.a={}", "--config.policies.b.optimizer.learning_rate=1e-4"]
    config, _ = parse([f"--config={recipe}", *given])
    assert config.policies.to_dict() == {"a": {}, "b": {"optimizer": {"learning_rate": 1e-4}}}


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
    broken.write_text("import surely_not_there\ndef get_config():\n    pass\n")
    assert f"modules beside it are found with PYTHONPATH={tmp_path}" in refuse([f"--config={broken}"])
    text = tmp_path / "README.md"
    text.write_text("# A page\n")
    assert f"--config: {text} is no Python file: give a recipe" in refuse([f"--config={text}"])


def test_a_recipe_knows_its_folder_however_it_is_named(tmp_path, monkeypatch):
    body = "config = default_config(); config.model.path = str(Path(__file__).parent / 'model'); return config"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\n{IMPORTS}\ndef get_config():\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("own.py").model.path == str(tmp_path / "model")


def test_a_config_of_ones_own_making_lacks_fields(tmp_path):
    recipe = tmp_path / "own.py"
    recipe.write_text("from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'seed': 1})\n")
    assert "config lacks name, runs" in refuse([f"--config={recipe}:,grpo"])
    changed = "config = default_config(); config.credit = ConfigDict({}); return config"
    recipe.write_text(f"{IMPORTS}\ndef get_config():\n    {changed}\n")
    assert "config.credit lacks name, options" in refuse([f"--config={recipe}"])


def test_a_recipe_may_freeze_its_config_and_declare_its_annotations_late(tmp_path):
    recipe = tmp_path / "frozen.py"
    recipe.write_text(
        f"from __future__ import annotations\nfrom dataclasses import KW_ONLY, dataclass\n{IMPORTS}\n"
        "@dataclass\nclass Sizes:\n    _: KW_ONLY\n    rows: int = 3\n"
        "def get_config():\n    return FrozenConfigDict(default_config())\n"
    )
    config, _ = parse([f"--config={recipe}", "--config.agents={'agent': 'base'}", "--config.seed=4"])
    assert (config.seed, config.agents.to_dict(), config.is_locked) == (4, {"agent": "base"}, True)


OWN = """
from flowjax.config import default_config
from ml_collections import ConfigDict

def get_config():
    config = default_config()
    config.credit.name = "rewardflow"
    config.credit.options = ConfigDict({"gamma": 0.8, "step_norm": "none"})
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({"rows": 6})
    config.env.sources = ConfigDict({"large": {"options": {"rows": 8}}})
    config.warm_start.env_options = ConfigDict({"max_moves": 3})
    config.warm_start.noisy_env_options = ConfigDict({"max_moves": 2})
    config.loss.options.aggregation = "constant"
    config.policies = ConfigDict({"solver": {}, "verifier": {"credit": {"options": {"gamma": 0.5}}}})
    config.policies.checker = ConfigDict({"credit": {"name": "gigpo", "options": {"gamma": 0.7}}})
    return config
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_another_estimator_leaves_the_options_of_the_one_before(own, capsys):
    config, _ = parse([f"--config={own}", "--config.credit.name=grpo"])
    assert config.credit.options.to_dict() == {}
    configs = resolve(config).policies
    assert (configs["solver"].credit.name, configs["solver"].credit.options.to_dict()) == ("grpo", {})
    assert (configs["verifier"].credit.name, configs["verifier"].credit.options.to_dict()) == ("grpo", {})
    assert configs["checker"].credit.options.to_dict() == {"gamma": 0.7}, "it names an estimator of its own"
    first, second = capsys.readouterr().err.splitlines()
    assert (
        first == "config.credit.name is 'grpo': the options of 'rewardflow' are left out (gamma=0.8, step_norm='none')"
    )
    assert second.startswith("config.policies.verifier.credit.name is 'grpo'")


def test_a_recipes_argument_names_the_estimator(own, recipe, capsys):
    named, _ = parse([f"--config={own}:,gigpo"])
    said = capsys.readouterr().err
    asked, _ = parse([f"--config={own}", "--config.credit.name=gigpo"])
    assert named == asked and named.credit.name == "gigpo" and named.credit.options.to_dict() == {}
    assert said == capsys.readouterr().err and "gamma=0.8" in said
    config, _ = parse([f"--config={recipe}:named,rloo"])
    assert (config.name, config.credit.name) == ("given-rloo", "rloo"), "the folder's name says which"
    config, _ = parse([f"--config={recipe}:named,grpo"])
    assert config.name == "given", "the recipe's own"
    config, _ = parse([f"--config={recipe}:named,own_credit:flat"])
    assert (config.name, config.credit.name) == ("given-flat", "own_credit:flat")


def test_fields_beside_a_recipes_estimator_count(own):
    config, _ = parse([f"--config={own}:,gigpo", "--config.credit.options.gamma=0.5"])
    assert (config.credit.name, config.credit.options.to_dict()) == ("gigpo", {"gamma": 0.5})
    config, _ = parse([f"--config={own}:,rewardflow"])
    assert config.credit.options.to_dict() == {"gamma": 0.8, "step_norm": "none"}, (
        "that of the recipe keeps its options"
    )
    config, _ = parse([f"--config={own}:,gigpo", "--config.credit.name=grpo", "--config.credit.options.norm=mean"])
    assert (config.credit.name, config.credit.options.to_dict()) == ("grpo", {"norm": "mean"})


@pytest.mark.parametrize("name", ["gippo", "", "grpo,rloo", "no:such thing", "published"])
def test_an_estimator_that_there_is_not_is_refused_with_those_that_there_are(recipe, name):
    message = refuse([f"--config={recipe}:named,{name}"])
    assert f"there is no estimator {name!r}" in message and "use one of best_of_group, " in message
    assert ("did you mean 'gigpo'?" in message) == (name == "gippo")


def test_a_variant_with_a_comma_in_its_name_is_no_estimator(tmp_path):
    path = tmp_path / "whole.py"
    path.write_text(
        "from flowjax.config import default_config\nVARIANTS = {'published,gigpo': 3}\n\n"
        "def get_config(arg):\n    config = default_config()\n    config.name = arg\n    return config\n"
    )
    config = load_recipe(f"{path}:published,gigpo")
    assert (config.name, config.credit.name) == ("published,gigpo", "grpo")
    config = load_recipe(f"{path}:published,rloo")
    assert (config.name, config.credit.name) == ("published-rloo", "rloo")


def test_options_given_with_another_estimator_stay(own, capsys):
    config, _ = parse([f"--config={own}", "--config.credit.options.gamma=0.5", "--config.credit.name", "gigpo"])
    assert config.credit.options.to_dict() == {"gamma": 0.5}
    config, _ = parse([f"--config={own}", "--config.credit.name=gigpo", "--config.credit.options={'gamma': 1.0}"])
    assert config.credit.options.to_dict() == {"gamma": 1.0}
    capsys.readouterr()
    config, _ = parse([f"--config={own}", "--config.credit.name=rewardflow"])
    assert config.credit.options.gamma == 0.8
    assert capsys.readouterr().err == ""
    config, _ = parse([f"--config={own}", "--config.policies.checker.credit.name=grpo"])
    assert resolve(config).policies["checker"].credit.options.to_dict() == {}


def test_another_objective_or_world_leaves_its_options_too(own, capsys):
    config, _ = parse([f"--config={own}", "--config.loss.kind=gspo", "--config.env.name=flowjax.envs.math:Math"])
    assert config.loss.options.to_dict() == default_config().loss.options.to_dict()
    assert (config.env.options.to_dict(), config.env.sources.to_dict()) == ({}, {})
    assert config.warm_start.env_options.to_dict() == {}
    objective, world = sorted(capsys.readouterr().err.splitlines(), reverse=True)
    assert "the options of 'ppo' are left out (" in objective and "aggregation='constant'" in objective
    assert "the options of 'flowjax.envs.sokoban:Sokoban' are left out (rows=6, sources=" in world
    assert "env_options={'max_moves': 3}" in world


def test_the_published_form_of_a_world_keeps_its_options(own, capsys):
    published = "flowjax.published.worlds:PublishedSokoban"
    config, _ = parse([f"--config={own}", f"--config.env.name={published}"])
    assert (config.env.name, config.env.options.rows) == (published, 6)
    assert "sokoban" not in capsys.readouterr().err.lower()


def test_a_world_with_further_options_keeps_those_of_the_world_that_it_derives_from(capsys):
    canvas = f"--config={ROOT}/configs/canvas.py:nano"
    own, _ = parse([canvas])
    config, _ = parse([canvas, "--config.env.name=flowjax.published.canvas:PublishedCanvas"])
    assert config.env.options.to_dict() == own.env.options.to_dict()
    assert config.env.options.turns == config.env.max_turns
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("credit.options.step_weight=2", "credit.options.step_weight", 2),
        ("credit.options.gamma=1", "credit.options.gamma", 1.0),
        ("credit.options.step_norm=mean", "credit.options.step_norm", "mean"),
        ("env.options.kinds=('int', 'list')", "env.options.kinds", ("int", "list")),
        ("env.options.require_structure=true", "env.options.require_structure", True),
        ("env.options.path=None", "env.options.path", None),
        (
            "env.options.backends.executor.base_url=http://a:1/v1",
            "env.options.backends.executor.base_url",
            "http://a:1/v1",
        ),
        ("dataflow.algorithms.greso.window=32", "dataflow.algorithms.greso.window", 32),
        ("reward.components.invalid_actions=0.1", "reward.components.invalid_actions", 0.1),
        ("env.sources.small.weight=3", "env.sources.small.weight", 3),
        ("agents.agent=base", "agents.agent", "base"),
        ("model.nano.layers=2", "model.nano.layers", 2),
        ("policies.solver.optimizer.learning_rate=1e-4", "policies.solver.optimizer.learning_rate", 1e-4),
    ],
)
def test_what_lies_in_an_open_section_is_set_whether_or_not_the_recipe_has_it(own, override, field, value):
    name, _, text = override.partition("=")
    for argv in ([f"--config.{override}"], [f"--config.{name}", text]):
        config, _ = parse([f"--config={own}", *argv])
        found = config
        for part in field.split("."):
            found = found[part]
        assert found == value and type(found) is type(value)


def test_switches_in_an_open_section(own):
    config, _ = parse(
        [f"--config={own}", "--noconfig.env.options.require_structure", "--config.env.options.require_checker"]
    )
    assert (config.env.options.require_structure, config.env.options.require_checker) == (False, True)


def test_a_value_of_another_type_in_a_recipe_is_told_with_its_line(tmp_path):
    path = tmp_path / "typed.py"
    path.write_text(
        "from flowjax.config import default_config\n\ndef get_config():\n    config = default_config()\n"
        "    config.trainer.steps = 'many'\n    return config\n"
    )
    message = refuse([f"--config={path}"])
    assert f"{path} line 5 (config.trainer.steps = 'many'): TypeError" in message
