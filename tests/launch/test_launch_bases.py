"""Several base models in one run: what is started for each, and what is said of configs that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from rich.console import Console

from flowjax.config import ConfigError
from flowjax.launch import machine
from flowjax.launch.checks import check_config, check_unchanged, on_each_base
from flowjax.launch.command_line import parse
from flowjax.launch.devices import Devices, engine_accelerators, share_out
from flowjax.launch.preflight import Findings, disk_bytes, model_lines, render_plan
from flowjax.launch.probe import inspect_run
from flowjax.launch.roles import (
    choose_ports,
    drop_copies,
    missing_bases,
    publish_endpoints,
    run_roles,
    warm_start_roles,
)
from flowjax.rollout.sidecar import served_folder
from flowjax.run import resolve

WORKFLOW = "flowjax.workflows.solver_verifier:play"
JUDGE = {"model": {"path": "models/Qwen3-8B"}, "engine": {"tensor_parallel": 2, "replicas": 2}}


@pytest.fixture
def judged(config) -> ConfigDict:
    """A frozen judge beside the policy."""
    config.bases = ConfigDict({"judge": JUDGE})
    config.workflow = WORKFLOW
    config.agents = {"solver": "agent", "verifier": "judge"}
    return config


@pytest.fixture
def both(config) -> ConfigDict:
    """A policy trained on each of two base models."""
    config.bases = ConfigDict({"small": {"model": {"path": "absent-small", "nano": {"hidden_size": 32, "layers": 1}}}})
    config.policies = {"solver": {}, "verifier": {"policy": {"base": "small"}}}
    config.workflow = WORKFLOW
    config.agents = {"solver": "solver", "verifier": "verifier"}
    config.separate_trainers = True
    return config


def _value(role, name: str) -> str:
    return role.argv[role.argv.index(name) + 1]


def test_each_base_has_engines_ports_and_accelerators_of_its_own(judged, tmp_path):
    devices = share_out(tuple("01234567"), engine_accelerators(resolve(judged)))
    assert (devices.trainer, devices.engine) == (("0", "1", "2"), ("3", "4", "5", "6", "7"))
    ports = choose_ports(resolve(judged))
    assert list(ports) == ["engine", "engine-judge-0", "engine-judge-1", "dataflow"]
    own, *judges = run_roles(resolve(judged, tmp_path), ports, devices)[:3]
    assert [role.name for role in (own, *judges)] == ["engine", "engine-judge-0", "engine-judge-1"]
    assert [role.env["CUDA_VISIBLE_DEVICES"] for role in (own, *judges)] == ["3", "4,5", "6,7"]
    assert [_value(role, "--served-model-name") for role in (own, *judges)] == ["base", "judge", "judge"]
    assert [_value(role, "--tensor-parallel-size") for role in (own, *judges)] == ["1", "2", "2"]
    assert ["--enable-lora" in role.argv for role in (own, *judges)] == [True, False, False]
    assert all(int(_value(role, "--port")) == ports[role.name] for role in (own, *judges))
    fields = ["config.engine.start_timeout_s", *["config.bases.judge.engine.start_timeout_s"] * 2]
    assert [role.if_slow.split()[-1].strip(")") for role in (own, *judges)] == fields
    publish_endpoints(resolve(judged, tmp_path), ports)
    endpoints = json.loads((tmp_path / "endpoints.json").read_text())
    assert endpoints == {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    assert check_config(judged) == []


def test_engines_of_one_base_may_run_elsewhere(judged, tmp_path):
    judged.bases.judge.engine = {"urls": ("http://one:1", "http://two:1"), "python": "/no/such/python"}
    ports = choose_ports(resolve(judged))
    assert list(ports) == ["engine", "dataflow"]
    assert engine_accelerators(resolve(judged)) == 1
    assert on_each_base(resolve(judged), machine.check_engine) == []
    publish_endpoints(resolve(judged, tmp_path), ports)
    endpoints = json.loads((tmp_path / "endpoints.json").read_text())
    assert (endpoints["engine-judge-0"], endpoints["engine-judge-1"]) == ("http://one:1", "http://two:1")
    assert endpoints["engine"] == f"http://127.0.0.1:{ports['engine']}"


def test_policies_on_two_bases_have_a_trainer_each(both, tmp_path):
    assert check_config(both) == []
    roles = run_roles(resolve(both, tmp_path), choose_ports(resolve(both)), Devices())
    assert [role.name for role in roles] == [
        "engine", "engine-small", "dataflow", "trainer-solver", "trainer-verifier", "rollout",
    ]  # fmt: skip
    assert all("--enable-lora" in role.argv for role in roles[:2])


def test_missing_nano_bases_are_made_one_after_the_other(both, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, small = warm_start_roles(resolve(both, tmp_path), Devices())
    assert (own.name, own.argv[-1]) == ("warm_start", "--base=base")
    assert (small.name, small.argv[-1]) == ("warm_start-small", "--base=small")
    both.bases.again = {}  # the same folder is made once
    assert missing_bases(resolve(both)) == ["base", "small"]
    (tmp_path / "absent-model").mkdir()
    (tmp_path / "absent-model" / "config.json").write_text("{}")
    assert missing_bases(resolve(both)) == ["small"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"separate_trainers": False}, "config.separate_trainers is False, but policies are trained on 2 base models"),
        ({"bases.spare": {}}, "config.bases.spare speaks for no agent, no policy is trained on it"),
        ({"policies.solver": {"policy": {"base": "small"}}}, "the run's own base model (config.model) neither speaks"),
        ({"bases.small.engine": {"max_model_tokens": 9}}, "config.bases.small.engine.max_model_tokens is 9, but"),
        ({"bases.small.engine": {"replicas": 0}}, "config.bases.small.engine.replicas is 0: it must be at least 1"),
        ({"bases.small.model": {"remat": "some"}}, "config.bases.small.model.remat is 'some': use one of"),
        ({"bases.small.engine": {"urls": ("a",)}}, "config.bases.small.engine.urls has 'a': give addresses"),
        ({"bases.env": {"env": {}}}, "config.bases.env.env is set"),
        ({"policies.third": {"policy": {"base": "small", "train": "full"}}}, "config.policies.third trains 'full'"),
    ],
)
def test_what_cannot_be(both, changes, message):
    for field, value in changes.items():
        *sections, name = field.split(".")
        node = both
        for section in sections:
            node = node[section]
        node[name] = ConfigDict(value) if isinstance(value, dict) else value
    assert any(text.startswith(message) or message in text for text in check_config(both)), check_config(both)


def test_what_bases_have_in_common_is_told_once(judged):
    judged.engine.request_timeout_s = judged.engine.max_restarts = -1
    judged.engine.max_model_tokens = 10
    lengths = [text for text in check_config(judged) if "max_model_tokens is 10" in text]
    assert [text.partition(" is ")[0] for text in lengths] == ["config.engine.max_model_tokens"]


def test_a_policy_alone_on_its_base_may_train_all_its_weights(both, tmp_path):
    both.policies.verifier.policy.train = "full"
    assert check_config(both) == []
    own, small = run_roles(resolve(both, tmp_path), choose_ports(resolve(both)), Devices())[:2]
    assert "--enable-lora" in own.argv and "--worker-extension-cls" not in own.argv
    assert "--enable-lora" not in small.argv and "--worker-extension-cls" in small.argv


def test_bases_cannot_share_an_address(both):
    urls = ("http://one:1",)
    both.engine.urls, both.bases.small.engine = urls, {"urls": urls}
    (message,) = check_config(both)
    assert message.startswith("config.engine.urls and config.bases.small.engine.urls both have 'http://one:1'")
    both.engine.urls = ()
    both.bases.small.engine = {"port": 18001, "replicas": 1}
    both.engine.port, both.engine.replicas, both.dataflow.port = 18000, 2, 18001
    problems = machine.check_ports(resolve(both))
    assert "config.engine.port and config.bases.small.engine.port are 18000 (for 2 engines) and 18001" in problems[0]
    assert "config.engine.port and config.dataflow.port are 18000 (for 2 engines) and 18001" in problems[1]
    assert "config.bases.small.engine.port and config.dataflow.port are both 18001" in problems[2]
    both.engine.port = 0
    assert choose_ports(resolve(both))["engine-small"] == 18001


def test_a_model_that_is_not_there_and_too_few_accelerators_are_told_by_base(judged):
    assert on_each_base(resolve(judged), machine.check_model) == [
        "config.bases.judge.model.path is 'models/Qwen3-8B', which does not exist, and config.bases.judge.model.nano "
        "gives no shape to build: download the model into that folder, or name the one where it is"
    ]
    (message,) = machine.check_accelerators(
        resolve(judged), share_out(tuple("012"), engine_accelerators(resolve(judged)))
    )
    assert message == (
        "config.engine.tensor_parallel is 1, config.bases.judge.engine.replicas is 2 and "
        "config.bases.judge.engine.tensor_parallel is 2, which takes 5 accelerators, but there are 3: lower one of them"
    )


def test_engines_of_a_base_may_change_on_resuming_and_its_model_may_not(judged):
    now = ConfigDict(judged.to_dict())
    now.bases.judge.engine.replicas = 1
    now.bases.judge.engine.port = 8000
    assert check_unchanged(judged, now) == []
    now.bases.judge.model.path = "models/Qwen3-14B"
    (message,) = check_unchanged(judged, now)
    assert message.startswith("config.bases.judge.model.path is 'models/Qwen3-14B', but this run was started with")


def test_bases_on_the_command_line(recipe):
    config, _ = parse([f"--config={recipe}", "--config.bases={'judge': {'model': {'path': 'large'}}}"])
    assert config.bases.judge.model.path == "large"
    with recipe.open("a") as file:
        file.write("\n\nplain = get_config\n\n\ndef get_config(arg='small'):\n    config = plain(arg)\n")
        file.write("    config.bases.judge = ConfigDict({'model': {'path': 'large'}})\n    return config\n")
    config, _ = parse([f"--config={recipe}", "--config.bases.judge.model.path=larger"])
    assert config.bases.judge.model.path == "larger"
    config, _ = parse([f"--config={recipe}", "--config.bases.judge.engine.port=1"])
    assert resolve(config).bases["judge"].engine.port == 1 != config.engine.port
    for override, message in (
        ("jugde.engine.port=1", r"config\.bases\.jugde is not there \(did you mean 'judge'\?\)"),
        ("judge.engine.prot=1", r"config\.bases\.judge\.engine\.prot is no field: use one of .*port"),
        ("judge.engine.port=70000", r"config\.bases\.judge\.engine\.port is 70000: it must be .*65,535"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse([f"--config={recipe}", f"--config.bases.{override}"])


def test_the_plan_shows_each_base_with_its_engines(judged, tmp_path: Path):
    devices = share_out(tuple("01234567"), engine_accelerators(resolve(judged)))
    judged.trainer.micro_batch_rows = 12
    judged.mesh.fsdp, judged.mesh.data = 1, 3
    answer = inspect_run(resolve(judged), devices.trainer_count, None)
    assert answer["problems"] == []
    ports = choose_ports(resolve(judged))
    found = Findings([], [], answer["plan"])
    console = Console(width=200, record=True, file=(tmp_path / "screen").open("w"))
    run = resolve(judged, tmp_path)
    console.print(render_plan(run, run_roles(run, ports, devices), ports, devices, found))
    plan = " ".join(console.export_text().split())
    assert "engine accelerators 3, tensor parallel 1" in plan
    assert "engine-judge 2 on accelerators 4,5,6,7, tensor parallel 2" in plan
    assert "model of judge base models/Qwen3-8B: 8,190,735,360 parameters, not trained" in plan
    assert "trainer memory per device of base" in plan and "per device of judge" not in plan
    assert f"engine-judge-1 {ports['engine-judge-1']} (free now" in plan
    assert "--served-model-name judge" in plan


def test_what_is_trained_on_each_base_takes_disk(both, tmp_path):
    solver, verifier = {"checkpoint_bytes": 30, "adapter_bytes": 10}, {"checkpoint_bytes": 3, "adapter_bytes": 10}
    models: dict[str, Any] = {"base": {"policies": {"solver": solver}}, "small": {"policies": {"verifier": verifier}}}
    plan = {"bases": {name: {"model": model} for name, model in models.items()}}
    both.trainer.keep_checkpoints, both.dataflow.max_staleness = 3, 1
    assert disk_bytes(resolve(both), plan) == (4 * 30 + 3 * 10) + (4 * 3 + 3 * 10)
    models["base"]["served_bytes"] = 7
    both.engine.quantize = "int8"
    run = resolve(both, tmp_path)
    assert disk_bytes(run, plan) == (4 * 30 + 3 * 10) + (4 * 3 + 3 * 10) + 7
    for folder in (".base.killed", "base"):  # a part, which gives way; then a whole one
        left = served_folder(run, run.bases["base"]).with_name(folder)
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"12345")
        needed_bytes = (4 * 30 + 3 * 10) + (4 * 3 + 3 * 10) + (2 if folder == ".base.killed" else 0)
        assert disk_bytes(run, plan) == needed_bytes, "what is there needs no room"
    (run.folder / "packed" / "agent@1").mkdir(parents=True)
    drop_copies(run)
    assert not served_folder(run, run.bases["base"]).exists() and not (run.folder / "packed").exists()
    both.engine.quantize = ""
    both.dataflow.host = "0.0.0.0"
    assert disk_bytes(resolve(both), plan) == (4 * 30 + 11 * 10) + (4 * 3 + 11 * 10), "four versions and their packs"
    both.elsewhere = ("dataflow", "trainer")
    assert disk_bytes(resolve(both), plan) == 2 * 4 * 10, "a node has no optimiser's state"


def test_policies_on_one_base_take_disk_each_by_its_own_rank(both):
    """All were counted with the sizes of the last one."""
    both.bases, both.policies.verifier = ConfigDict(), {"policy": {"lora": {"rank": 1}}, "trainer": {"steps": 3}}
    run = resolve(both)
    found = inspect_run(run, 3, None)
    saved = found["plan"]["bases"]["base"]["model"]["policies"]
    assert (
        saved["solver"]["checkpoint_bytes"] == run.policies["solver"].lora.rank * saved["verifier"]["checkpoint_bytes"]
    )
    kept, adapters = both.trainer.keep_checkpoints + 1, both.dataflow.max_staleness + 2
    assert disk_bytes(run, found["plan"]) == sum(
        kept * each["checkpoint_bytes"] + adapters * each["adapter_bytes"] for each in saved.values()
    )
    lines = dict(model_lines(run, run.bases["base"], found["plan"]["bases"]["base"]["model"]))
    assert lines["checkpoint of solver"].split()[0] != lines["checkpoint of verifier"].split()[0]


def test_a_base_that_only_a_backend_of_the_world_asks_is_started_and_checked(config):
    config.env.options = ConfigDict({"backends": {"large": {"kind": "run", "base": "judge"}}})
    config.bases = ConfigDict({"judge": JUDGE})
    assert check_config(config) == []
    assert list(choose_ports(resolve(config))) == ["engine", "engine-judge-0", "engine-judge-1", "dataflow"]
    config.env.options.backends.large.base = "jugde"
    assert [problem for problem in check_config(config) if "backends.large.base is 'jugde': use one of" in problem]
    config.env.options.backends.large.base = "base"
    problems = check_config(config)
    assert [problem for problem in problems if "config.bases.judge speaks for no agent" in problem]
    config.bases, config.policy.train = ConfigDict(), "full"
    assert [problem for problem in check_config(config) if "the engine replaces that base model" in problem]
