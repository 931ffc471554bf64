"""Every recipe and variant can be planned on a machine that has neither its model nor its data."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flowjax.config import ConfigError, default_config
from flowjax.grading.sandbox import isolation
from flowjax.launch.__main__ import read_request
from flowjax.launch.checks import check_config, on_each_base
from flowjax.launch.command_line import load_recipe
from flowjax.launch.devices import engine_accelerators, mesh_count, share_out
from flowjax.launch.machine import check_model
from flowjax.launch.preflight import Findings, render_plan
from flowjax.launch.probe import inspect_run
from flowjax.launch.roles import choose_ports, run_roles
from flowjax.recipes import nano_on_two_cores, one_node_8_gpus
from flowjax.run import resolve

ROOT = Path(__file__).parents[2]
ROUTER = "math_router.py"  # the one recipe for Qwen3 with two base models


def variants() -> list[str]:
    """`configs/math.py:nano` and all others, as each recipe lists its own."""
    found = []
    for recipe in sorted((ROOT / "configs").glob("*.py")):
        with pytest.raises(ConfigError) as refused:
            load_recipe(f"{recipe}:no such variant")
        listed = re.search(r"use one of (.+)$", str(refused.value))
        assert listed, f"{recipe} does not list its variants"
        found += [f"configs/{recipe.name}:{name}" for name in listed[1].split(", ")]
    return found


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without models and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    return tmp_path


@pytest.mark.parametrize("variant", variants())
def test_every_recipe_can_be_planned_without_model_and_data(variant: str, elsewhere: Path):
    request = read_request([f"--config={ROOT / variant}", "--dry_run"])
    run, devices = request.run, request.devices
    assert check_config(run.config) == []
    answer = inspect_run(run, devices.trainer_count, None)
    assert answer["problems"] == []
    found = Findings([], [*on_each_base(run, check_model), *answer["here"]], answer["plan"])
    ports = choose_ports(run)
    roles = run_roles(run, ports, devices)
    console = Console(width=200, record=True, file=(elsewhere / "screen").open("w"))
    console.print(render_plan(run, roles, ports, devices, found))
    plan = console.export_text()
    assert "cannot run" not in plan and "parameters" in plan and "trainer memory per device" in plan
    if run.config.model.nano is None:
        assert f"first: {run.config.model.path} is fetched from Hugging Face" in plan
        each = 4 if "_8b" in variant else 1
        engines = max(each, len(run.bases))
        assert (len(devices.trainer), len(devices.engine)) == (each, engines), "its docstring promises as many"


def test_the_preset_for_two_cores_needs_no_accelerator_and_serves_what_is_trained():
    config = default_config()
    nano_on_two_cores(config, "world")
    run = resolve(config)
    assert share_out((), engine_accelerators(run)).trainer == ()
    assert config.model.dtype == config.engine.dtype == "float32", "the mismatch of a nano run is that of one precision"
    assert config.model.nano is not None and config.model.path.endswith("nano-world")
    assert check_config(config) == [
        "config.reward.components is empty: name at least one, for example {'success': 1.0}"
    ]


def test_the_preset_for_one_node_leaves_no_gpu_idle_or_shared():
    config = default_config()
    one_node_8_gpus(config, "world")
    gpus = [str(number) for number in range(8)]
    devices = share_out(gpus, engine_accelerators(resolve(config)), mesh_count(tuple(config.mesh.to_dict().values())))
    assert not devices.shared and sorted(devices.trainer + devices.engine) == gpus
    assert config.trainer.micro_batch_rows % len(devices.trainer) == 0


@pytest.mark.parametrize(
    "variant", [name for name in variants() if name.endswith(":qwen3_0_6b") and ROUTER not in name]
)
def test_a_small_recipe_fits_one_gpu_that_engine_and_trainer_share(variant: str, elsewhere: Path):
    request = read_request([f"--config={ROOT / variant}", "--dry_run", "--devices=1"])
    run, devices = request.run, request.devices
    assert devices.shared and devices.trainer == devices.engine == ("0",)
    assert devices.trainer_env()["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    (base,) = inspect_run(run, devices.trainer_count, None)["plan"]["bases"].values()
    gpu_bytes = 16e9
    engine_bytes = run.config.engine.gpu_memory_fraction * gpu_bytes
    longest = base["model"]["kv_bytes_per_token"] * run.config.engine.max_model_tokens
    assert base["model"]["served_bytes"] + 2 * longest < engine_bytes - 1e9, "weights, two long replies, activations"
    assert sum(base["memory"].values()) + engine_bytes < gpu_bytes - 0.5e9, base["memory"]
    assert run.config.model.template_options.to_dict() == {"enable_thinking": False}


@pytest.mark.parametrize("variant", [name for name in variants() if name.endswith("_v5e")])
def test_a_chip_of_16_gb_has_room_for_the_trainer(variant: str, elsewhere: Path):
    request = read_request([f"--config={ROOT / variant}", "--dry_run", "--devices=8"])
    (base,) = inspect_run(request.run, request.devices.trainer_count, None)["plan"]["bases"].values()
    assert sum(base["memory"].values()) < 14e9, "TPU compilers need more than the plan says, docs/benchmarks"


def test_the_router_has_an_engine_for_each_of_its_models(elsewhere: Path):
    for variant, gpus in ("qwen3_8b", 8), ("qwen3_0_6b", 2):
        request = read_request([f"--config={ROOT}/configs/{ROUTER}:{variant}", "--dry_run", f"--devices={gpus}"])
        small, large = (base.model.template_options.enable_thinking for base in request.run.bases.values())
        assert (small, large) == (False, True)
        wanted = [base.engine.tensor_parallel for base in request.run.bases.values()]
        assert wanted[0] == wanted[1] and sum(wanted) == len(request.devices.engine)
        assert request.devices.shared == (gpus == 2)


@pytest.mark.parametrize("variant", [name for name in variants() if ":qwen3" in name and ROUTER not in name])
def test_a_model_thinks_where_its_replies_have_room_for_it(variant: str):
    config = load_recipe(str(ROOT / variant))
    assert ("enable_thinking" in config.model.template_options) == (config.rollout.max_new_tokens < 4096)


@pytest.mark.parametrize("variant", variants())
def test_a_batch_is_waited_for_longer_than_an_episode_may_take(variant: str):
    config = load_recipe(str(ROOT / variant))
    assert config.trainer.step_timeout_s > config.rollout.episode_timeout_s


@pytest.mark.parametrize("variant", [name for name in variants() if "nano" not in name])
def test_an_episode_of_a_real_model_has_time_for_all_its_turns(variant: str):
    """One that has not is given up, and it is those that do not succeed which take all of them."""
    config = load_recipe(str(ROOT / variant))
    sampled_tokens = config.env.max_turns * config.rollout.max_new_tokens * max(len(config.agents), 1)
    assert sampled_tokens / config.rollout.episode_timeout_s < 20, "tokens a second of one reply in a full batch"


@pytest.mark.parametrize("variant", [name for name in variants() if "," not in name])
def test_every_recipe_takes_another_estimator(variant: str):
    before, after = load_recipe(str(ROOT / variant)), load_recipe(f"{ROOT / variant},maxrl")
    assert (after.credit.name, after.credit.options.to_dict()) == ("maxrl", {})
    assert after.name == f"{before.name}-maxrl" and after.env == before.env
    assert check_config(after) == []


def test_an_estimator_in_place_of_a_variant_is_refused_with_what_was_meant():
    with pytest.raises(ConfigError, match="an estimator comes after one: nano,gigpo"):
        load_recipe(f"{ROOT}/configs/math.py:gigpo")


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants())
def test_every_recipe_can_be_planned_by_the_command(variant: str, elsewhere: Path):
    command = [sys.executable, "-m", "flowjax.launch", f"--config={ROOT / variant}", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def without_bubblewrap(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    """No program is found by name."""
    (elsewhere / "bin").mkdir()
    monkeypatch.setenv("PATH", str(elsewhere / "bin"))
    isolation.cache_clear()
    yield
    isolation.cache_clear()


@pytest.mark.parametrize("variant", ["configs/canvas.py:nano", "configs/code.py:nano"])
def test_a_machine_without_bubblewrap_is_not_ready(variant: str, without_bubblewrap: None):
    config = load_recipe(str(ROOT / variant))
    answer = inspect_run(resolve(config), 1, None)
    assert answer["problems"] == []
    (message,) = answer["here"]
    assert "bubblewrap is not installed" in message and "apt-get install bubblewrap" in message
    config.env.options.allow_no_isolation = True
    assert inspect_run(resolve(config), 1, None)["here"] == []


@pytest.mark.slow
def test_a_machine_without_bubblewrap_is_told_before_anything_starts(without_bubblewrap: None, elsewhere: Path):
    command = [sys.executable, "-m", "flowjax.launch", f"--config={ROOT}/configs/canvas.py:nano"]
    planned = subprocess.run([*command, "--dry_run"], capture_output=True, text=True, timeout=120, check=False)
    assert planned.returncode == 0, planned.stderr
    plan = " ".join(planned.stdout.split())
    assert re.search("not ready on this machine .*apt-get install bubblewrap", plan)
    started = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert started.returncode == 2 and "apt-get install bubblewrap" in started.stderr
    assert not (elsewhere / "runs").exists()
