"""The engine's command line and environment, and its health check."""

import sys
from pathlib import Path

import pytest

from flowjax.config import ConfigError, default_config
from flowjax.rollout import sidecar
from flowjax.rollout.sidecar import engine_command, serves_on_cpu
from flowjax.run import resolve


@pytest.fixture
def config(tmp_path):
    config = default_config()
    config.model.path = str(tmp_path / "model")
    return config


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(sidecar, "serves_on_cpu", lambda python: True)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sidecar, "serves_on_cpu", lambda python: False)


def _values(argv: list[str], option: str) -> list[str]:
    start = argv.index(option) + 1
    return argv[start : next((i for i in range(start, len(argv)) if argv[i].startswith("--")), len(argv))]


def _value(argv: list[str], option: str) -> str:
    (value,) = _values(argv, option)
    return value


def command(config, *, base: str = "base", port: int = 1) -> tuple[list[str], dict[str, str]]:
    run = resolve(config)
    return engine_command(run, run.bases[base].engines[0], port)


def test_serves_the_configured_model(config, cpu, tmp_path):
    config.engine.max_model_tokens, config.seed = 96, 5
    argv, env = command(config, port=1234)
    assert _value(argv, "--model") == str(tmp_path / "model")
    assert _value(argv, "--served-model-name") == "base"
    assert (_value(argv, "--host"), _value(argv, "--port")) == ("127.0.0.1", "1234")
    assert (_value(argv, "--max-model-len"), _value(argv, "--seed")) == ("96", "5")
    assert _value(argv, "--logprobs-mode") == "processed_logprobs"
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_no_two_engines_of_a_run_and_its_nodes_have_one_seed(config, cpu, monkeypatch):
    """Members of a group that began on two nodes were answered equally."""
    config.seed, config.engine.replicas = 7, 2
    seeds = []
    for node, host in (("", "a"), ("run-a", "a"), ("run-b", "b"), ("run", "c"), ("run", "d")):
        monkeypatch.setattr(sidecar.socket, "gethostname", lambda host=host: host)
        if node:
            config.name, config.elsewhere = node, ("dataflow", "trainer")
        run = resolve(config)
        seeds += [int(_value(engine_command(run, each, 1)[0], "--seed")) for each in run.engines]
    assert seeds[:2] == [7, 8] and len(set(seeds)) == 10 and all(0 <= seed < 2**31 for seed in seeds)


def test_relative_model_folder_does_not_depend_on_the_engines_working_directory(config, cpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config.model.path = "models/nano"
    assert Path(_value(command(config)[0], "--model")) == tmp_path / "models/nano"


@pytest.mark.parametrize(("rank", "served"), [(1, "1"), (4, "8"), (32, "32"), (65, "128"), (512, "512")])
def test_rank_is_rounded_up_to_what_vllm_serves(config, cpu, tmp_path, rank, served):
    config.policy.lora.rank = rank
    assert _value(command(config)[0], "--max-lora-rank") == served


def test_rank_beyond_vllms_is_refused(config, cpu, tmp_path):
    config.policy.lora.rank = 513
    with pytest.raises(ConfigError, match=r"config\.policy\.lora\.rank is 513.*512"):
        command(config)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_room_for_every_version_within_the_bound(config, cpu, tmp_path, staleness):
    config.dataflow.max_staleness = staleness
    argv, _ = command(config)
    in_batch, in_memory = int(_value(argv, "--max-loras")), int(_value(argv, "--max-cpu-loras"))
    assert in_batch > staleness + 1  # the current one, those behind it, and its successor
    assert in_memory > in_batch


def test_only_the_trained_modules_get_adapter_slots(config, cpu, tmp_path):
    config.policy.lora.targets = ("q_proj", "v_proj")
    assert _values(command(config)[0], "--lora-target-modules") == ["q_proj", "v_proj"]
    config.policy.lora.targets = ("q_proj", "up_proj", "router")
    wanted = ["q_proj", "up_proj", "experts", "gate"]  # vLLM's names: without them it would leave adapters out
    assert _values(command(config)[0], "--lora-target-modules") == wanted


def test_full_training_serves_no_adapters(config, cpu, tmp_path):
    config.policy.train = "full"
    argv, _ = command(config)
    assert not any("lora" in part for part in argv)


def test_each_base_is_served_under_its_name_with_the_adapters_of_its_policies_alone(config, cpu, tmp_path):
    config.bases = {"judge": {"model": {"path": str(tmp_path / "large")}, "engine": {"max_model_tokens": 96}}}
    config.policies = {
        "solver": {},
        "critic": {"policy": {"base": "judge", "lora": {"rank": 65, "targets": ("v_proj",)}}},
        "second": {"policy": {"base": "judge", "lora": {"rank": 4, "targets": ("q_proj",)}}},
    }
    own, _ = command(config)
    judge, _ = command(config, base="judge")
    assert (_value(own, "--served-model-name"), _value(judge, "--served-model-name")) == ("base", "judge")
    assert (_value(own, "--model"), _value(judge, "--model")) == (str(tmp_path / "model"), str(tmp_path / "large"))
    assert (_value(own, "--max-model-len"), _value(judge, "--max-model-len")) == ("2048", "96")
    assert (_value(own, "--max-lora-rank"), _value(judge, "--max-lora-rank")) == ("32", "128")
    assert (_value(own, "--max-loras"), _value(judge, "--max-loras")) == ("3", "6")
    assert _values(judge, "--lora-target-modules") == ["v_proj", "q_proj"]


def test_a_base_that_is_not_trained_is_served_without_adapters(config, cpu, tmp_path):
    config.bases = {"judge": {}}
    argv, environment = command(config, base="judge")
    assert not any("lora" in part or part.startswith(("--middleware", "--worker")) for part in argv)
    assert "PYTHONPATH" not in environment


def test_cpu_settings_stay_off_gpus(config, gpu, tmp_path):
    config.engine.gpu_memory_fraction, config.engine.tensor_parallel = 0.7, 2
    argv, env = command(config)
    assert _value(argv, "--gpu-memory-utilization") == "0.7"
    assert _value(argv, "--tensor-parallel-size") == "2"
    assert "--enforce-eager" not in argv
    assert "--distributed-executor-backend" not in argv
    assert not {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & env.keys()


def test_cpu_settings(config, cpu, tmp_path):
    config.engine.threads, config.engine.kv_cache_bytes = 3, 2**28
    argv, env = command(config)
    assert env["OMP_NUM_THREADS"] == "3"
    assert _value(argv, "--kv-cache-memory-bytes") == str(2**28)
    assert "--gpu-memory-utilization" not in argv


@pytest.mark.parametrize("sequences", [16, 5000])
def test_cpu_steps_are_small_but_hold_a_token_of_every_sequence(config, cpu, tmp_path, sequences):
    """vLLM refuses to start otherwise."""
    config.engine.max_concurrent_sequences = sequences
    assert sequences <= int(_value(command(config)[0], "--max-num-batched-tokens")) <= 5000


def test_prompts_are_read_whole_on_a_cpu(config, cpu, tmp_path):
    """Of a prompt that is read in parts the samples are taken back, which a CPU's generator with a seed cannot."""
    config.engine.max_model_tokens = 4000
    argv, _ = command(config)
    assert "--no-enable-chunked-prefill" in argv and int(_value(argv, "--max-num-batched-tokens")) >= 4000


def test_adapters_on_tpus_take_the_form_of_the_model_that_has_them(config, gpu, tmp_path, monkeypatch):
    assert "MODEL_IMPL_TYPE" not in command(config)[1]
    monkeypatch.setattr(sidecar, "tpu_chips", lambda: 8)
    assert command(config)[1]["MODEL_IMPL_TYPE"] == "vllm"


def test_extra_arguments_come_last_and_so_win(config, cpu, tmp_path):
    config.engine.python, config.engine.extra_args = "/opt/vllm/bin/python", ("--max-num-seqs", "7")
    argv, _ = command(config)
    assert argv[0] == "/opt/vllm/bin/python"
    assert argv[-2:] == ["--max-num-seqs", "7"]


def _machine(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("paths", "environment", "cpu_build", "on_cpu"),
    [
        ((), {}, False, True),
        (("proc/driver/nvidia/gpus/0000:01:00.0",), {}, False, False),
        (("proc/driver/nvidia/gpus/0000:01:00.0",), {}, True, True),
        (("proc/driver/nvidia/gpus/0000:01:00.0",), {"CUDA_VISIBLE_DEVICES": ""}, False, True),
        (("proc/driver/nvidia/gpus/0000:01:00.0",), {"CUDA_VISIBLE_DEVICES": "1"}, False, False),
        (("proc/driver/nvidia/gpus",), {}, False, True),
        (("dev/nvidia0",), {}, False, False),  # in containers that show the device alone
        (("dev/nvidiactl",), {}, False, True),
        (("dev/kfd",), {}, False, False),
    ],
)
def test_cpu_or_gpu_is_told_from_devices_and_build(monkeypatch, tmp_path, paths, environment, cpu_build, on_cpu):
    monkeypatch.setattr(sidecar, "_is_cpu_build", lambda python: cpu_build)
    assert serves_on_cpu("python", environment, _machine(tmp_path, *paths)) is on_cpu


def test_build_is_read_from_the_interpreter(tmp_path, monkeypatch):
    """An interpreter of another environment is asked; it need not have flowjax."""
    package = tmp_path / "vllm-0.30.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert sidecar._is_cpu_build(str(python))
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0\n")
    assert not sidecar._is_cpu_build(str(python))
