"""What every declared field refuses, on its own and on the command line, and the page made of the declarations."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from ml_collections import ConfigDict

from flowjax.config import FIELDS, default_config, may_change, page
from flowjax.fields import Entry, Free, Interval, NotNegative, Section, type_problem
from flowjax.launch.__main__ import main
from flowjax.launch.checks import check_config
from flowjax.run import field_problems, resolve

NAN, INFINITY = math.nan, math.inf
# For each type of field: NaN, infinite, negative, absurd and wrongly typed values.
IMPOSSIBLE: dict[type, tuple[Any, ...]] = {
    int: (NAN, INFINITY, -INFINITY, -(10**6), 10**30, 1.5, "many", None, True, (1,)),
    float: (NAN, INFINITY, -INFINITY, -1e6, 1e300, "fast", None, True, (0.5,)),
    bool: (NAN, -1, 10**30, "perhaps", None),
    str: (NAN, -1, 10**30, None, True, ("a",), "a\0b", "x" * 5000, "\ud800"),
    tuple: (NAN, -1, 10**30, None, "a", (NAN,), (None,), (-1e6,), ((1, 2), 3)),
}
# Values that stand among those and that a kind of field may have, with the reason.
HARMLESS = {(float, True): "ConfigDict stores the number 1.0"}


def fields(section: Section = FIELDS, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    for name, declared in section.fields.items():
        if isinstance(declared, Section):
            yield from fields(declared, f"{prefix}{name}.")
        elif isinstance(declared, Entry):
            yield f"{prefix}{name}", declared
        elif declared.known:
            yield from fields(declared.known, f"{prefix}{name}.")


def changed(path: str, value: Any) -> ConfigDict:
    """A sound config but for one field."""
    config = sound()
    *sections, name = path.split(".")
    holder = config
    for section in sections:
        if holder[section] is None:
            holder[section] = ConfigDict()
        holder = holder[section]
    with holder.ignore_type():
        holder[name] = value
    return config


def sound() -> ConfigDict:
    config = default_config()
    config.reward.components = ConfigDict({"success": 1.0})
    assert check_config(config) == []
    return config


def field_kind(declared: Entry) -> type:
    return tuple if isinstance(declared.default, tuple) else declared.kind


@pytest.mark.parametrize(("path", "declared"), fields(), ids=[path for path, _ in fields()])
def test_every_field_refuses_what_it_cannot_be_with_its_value_and_a_remedy(path: str, declared: Entry):
    for value in IMPOSSIBLE[field_kind(declared)]:
        if any(value is harmless for kind, harmless in HARMLESS if kind is field_kind(declared)):
            continue
        (message, *_) = check_config(changed(path, value)) or [""]
        assert message.startswith(f"config.{path} "), (value, message)
        field, _, remedy = message.partition(": ")
        assert repr(value)[:20].strip("()[],") in field or "has" in field, message
        assert remedy.split()[0] in ("give", "it", "use", "leave"), message
        assert "\n" not in message and len(message) < 600


def test_what_is_harmless_becomes_what_the_reason_says():
    stored = changed("optimizer.learning_rate", True).optimizer.learning_rate
    assert stored == 1.0 and isinstance(stored, float)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The launch command on a plain recipe, up to where something would start; its lines."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from flowjax.config import default_config as get_config\n")
    monkeypatch.chdir(tmp_path)

    def launch(*argv: str) -> list[str]:
        assert main([f"--config={recipe}", *argv]) == 2
        left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # Python's own, of the recipe
        assert left == {"recipe.py"}
        return capsys.readouterr().err.splitlines()

    return launch


def test_every_field_refuses_on_the_command_line_before_anything_starts(launched):
    for path, declared in fields():
        kind = field_kind(declared)
        texts = {int: ("nan", "-1000000", f"{10**30}"), float: ("nan", "-1e6", "inf"), bool: ("perhaps",)}.get(kind, ())
        texts = ("x" * 5000,) if kind is str else texts
        for text in texts:
            (line, *_) = launched(f"--config.{path}={text}")
            assert line.startswith(f"config.{path} "), line
            assert "Traceback" not in line


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.learning_rate", NAN),
        ("optimizer.learning_rate", INFINITY),
        ("optimizer.learning_rate", 0.0),
        ("optimizer.betas", (2.0, 3.0)),
        ("optimizer.betas", (0.9,)),
        ("optimizer.betas", (0.9, 1.0)),
        ("optimizer.clip_norm", -1.0),
        ("optimizer.clip_norm", 0.0),
        ("optimizer.weight_decay", -0.1),
        ("optimizer.warmup_steps", -5),
        ("rollout.temperature", NAN),
        ("rollout.temperature", -1.0),
        ("rollout.episode_timeout_s", 0.0),
        ("eval.temperature", -0.5),
        ("rollout.top_p", 0.0),
        ("rollout.top_p", 1.01),
        ("eval.top_p", NAN),
        ("rollout.top_k", -1),
        ("eval.top_k", 10**8),
        ("rollout.min_p", -0.1),
        ("eval.min_p", 1.5),
        ("rollout.stop", ("",)),
        ("rollout.stop", ("</action>", "a\x00b")),
        ("model.template_options", ConfigDict({"enable_thinking": NAN})),
        ("eval.slots", -1.0),
        ("eval.versions", (-1,)),
        ("engine.gpu_memory_fraction", 7.0),
        ("engine.gpu_memory_fraction", 0.0),
        ("engine.port", 70_000),
        ("engine.port", -1),
        ("engine.urls", ("http://host:70000",)),
        ("engine.urls", ("host:8000",)),
        ("engine.request_timeout_s", -1.0),
        ("engine.threads", 0),
        ("dataflow.port", 65_536),
        ("dataflow.host", "no host"),
        ("dataflow.max_message_bytes", -1),
        ("trainer.coordinator", "host:99999"),
        ("trainer.step_timeout_s", 0.0),
        ("trainer.keep_every_steps", -1),
        ("trainer.checkpoint_every", 0),
        ("policy.lora.rank", 0),
        ("policy.lora.alpha", NAN),
        ("policy.lora.dropout", 1.0),
        ("policy.lora.targets", ("q_porj",)),
        ("loss.kl_coefficient", -0.1),
        ("loss.entropy_coefficient", NAN),
        ("loss.options", ConfigDict({"clip_low": NAN})),
        ("credit.options", ConfigDict({"gamma": INFINITY})),
        ("env.sources", ConfigDict({"small": {"weight": -1.0}})),
        ("env.sources", ConfigDict({"small": {"weigth": 1.0}})),
        ("warm_start.noisy_share", 1.5),
        ("warm_start.label_noise", -0.1),
        ("mesh.data", 0),
        ("mesh.fsdp", -2),
        ("seed", -1),
        ("elsewhere", ("engine",)),
        ("env.name", "not a path"),
        ("model.nano", ConfigDict({"layers": 0})),
        ("model.nano", ConfigDict({"layer": 2})),
    ],
)
def test_values_between_possible_and_absurd(path: str, value: Any):
    messages = field_problems(changed(path, value))
    assert messages and all(message.startswith(f"config.{path}") for message in messages)


@pytest.mark.parametrize("name", ["/tmp/outside", "a/b", "..", ".", "", "a\nb", "a b", "x" * 65, "-a", "ä", "a@1"])
def test_a_policys_name_is_a_folder_of_the_run_and_nothing_else(name: str):
    (message,) = field_problems(changed("policy.name", name))
    assert "config.policy.name is" in message and "letters, digits" in message
    if "." not in name:  # which ConfigDict itself refuses in a name
        config = sound()
        config.policies = ConfigDict({name: {}})
        (message,) = field_problems(config)
        assert f"config.policies has {name[:20]!r}"[:40] in message and "letters, digits" in message


@pytest.mark.parametrize("name", ["/tmp/outside", "a/b", "..", ".", "a\nb", "x" * 201, "a\0b"])
def test_a_runs_name_is_one_folder(name: str, launched):
    (message,) = field_problems(changed("name", name))
    assert "config.name is" in message
    (message,) = launched(f"--name={name}")
    assert "without slashes" in message or "leave out" in message


def test_ports_of_several_engines_end_at_the_last_port():
    config = changed("engine.port", 65_534)
    assert check_config(config) == []
    config.engine.replicas = 3
    (message,) = check_config(config)
    assert "config.engine.port is 65534" in message and "65536" in message and "65533 or less" in message


def test_policies_and_bases_are_held_to_the_same_declarations():
    config = sound()
    config.policies = ConfigDict({"solver": {"optimizer": {"learning_rate": NAN}}, "verifier": {}})
    assert field_problems(config) == ["config.policies.solver.optimizer.learning_rate is nan: give a finite number"]
    config = sound()
    config.bases = ConfigDict({"judge": {"engine": {"gpu_memory_fraction": 2.0}}})
    (message,) = field_problems(config)
    assert message.startswith("config.bases.judge.engine.gpu_memory_fraction is 2.0")


def test_a_policy_that_names_another_estimator_starts_from_its_own_options():
    config = sound()
    config.credit.name, config.credit.options = "rewardflow", ConfigDict({"gamma": 0.8})
    config.policies = ConfigDict({"solver": {}, "verifier": {"credit": {"name": "dr_grpo"}}})
    solver, verifier = resolve(config).policies.values()
    assert (solver.credit.options.to_dict(), verifier.credit.options.to_dict()) == ({"gamma": 0.8}, {})


def test_a_field_that_nobody_declared_is_refused_in_a_recipe_too():
    config = sound()
    config.trainer.stepz = 3
    (message,) = check_config(config)
    assert message.startswith("config.trainer.stepz is not a field (did you mean 'steps'?)")
    config = sound()
    config.trainer = ConfigDict({"steps": 3})
    assert any(message.startswith("config.trainer lacks groups_per_step") for message in check_config(config))


def test_what_a_resumed_run_may_change_is_declared():
    assert may_change("engine.port") and may_change("bases.judge.engine.port") and may_change("trainer.steps")
    assert may_change("warm_start.env_options.max_moves") and not may_change("env.options.max_moves")
    assert (
        may_change("mesh.fsdp") and not may_change("optimizer.learning_rate") and not may_change("credit.options.gamma")
    )


def test_the_page_of_all_fields_is_the_one_in_the_docs():
    written = Path(__file__).parents[1] / "docs" / "config.md"
    assert written.read_text() == page(), "write it anew: python -m flowjax.config > docs/config.md"


def test_every_declaration_says_what_it_is():
    assert not [path for path, declared in fields() if not declared.doc and not path.startswith("model.nano.")]


def test_defaults_are_possible_themselves():
    assert field_problems(default_config()) == []
    for path, declared in fields():
        assert not list(declared.problems(path, declared.default))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (float, (1, 0.5, -3.0), (NAN, INFINITY, "1", True, None)),
        (int, (1, -1), (1.0, True, "1", None, NAN)),
        (bool, (True, False), (1, "True", None)),
        (str, ("", "a"), (1, None, ("a",))),
        (float | None, (None, 1.0), (NAN, "a")),
        (Literal["em", "f1"], ("em",), ("e", 1, None)),
        (Sequence[str], ((), ("a",), ["a"]), ("a", (1,), None)),
        (tuple[int, ...] | None, (None, (1, 2)), ((1.5,), 3)),
        (Sequence[int] | int, (3, (1, 2)), ("a", (1.5,), NAN)),
        (dict[str, float], ({"a": 1.0},), ({"a": NAN}, 3)),
        (Annotated[float, Interval(above=0, at_most=2)], (2, 0.1), (0, 2.5, NAN, "1", True)),
        (NotNegative | None, (0, 1.5, None), (-1, "a")),
        (Any, (1, "a", None), ()),
    ],
)
def test_annotated_types_take_what_they_say(kind: Any, good: tuple, bad: tuple):
    assert [type_problem(kind, value) for value in good] == [None] * len(good)
    assert all(type_problem(kind, value) for value in bad)


def test_free_sections_take_any_finite_value_of_any_depth():
    free = Free("")
    assert not list(free.problems("config.x", {"a": {"b": (1, 2.5, "c", None, True)}}))
    (message,) = free.problems("config.x", {"a": {"b": (1, NAN)}})
    assert message == "config.x.a.b is nan: give a finite number"
