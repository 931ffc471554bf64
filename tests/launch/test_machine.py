import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from flowjax.launch import machine
from flowjax.launch.checks import check_config
from flowjax.launch.devices import host_device_count, mesh_count, share_out, visible_accelerators
from flowjax.rollout import sidecar
from flowjax.run import TAUGHT_FILE, resolve


def test_absent_model_folder_is_named_with_the_remedy(config, tmp_path):
    config.model.path, config.model.nano = str(tmp_path / "Qwen3-8B"), None
    (message,) = machine.check_model(resolve(config).bases["base"])
    assert "does not exist" in message
    assert "download" in message
    (tmp_path / "Qwen3-8B").mkdir()
    assert "has no config.json" in machine.check_model(resolve(config).bases["base"])[0]
    (tmp_path / "Qwen3-8B" / "config.json").write_text("{}")
    assert "lacks tokenizer.json and *.safetensors" in machine.check_model(resolve(config).bases["base"])[0]
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "Qwen3-8B" / name).write_text("")
    assert machine.check_model(resolve(config).bases["base"]) == []


def test_a_download_that_lacks_some_of_its_files_is_named(config, tmp_path):
    """A run began with it, and its engine and its trainer failed one after the other."""
    config.model.path, config.model.nano = str(tmp_path), None
    files = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    index = {"weight_map": {f"layer.{number}": file for number, file in enumerate([*files, *files])}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "tokenizer.json", files[2]):
        (tmp_path / name).write_text("{}")
    (message,) = machine.check_model(resolve(config).bases["base"])
    assert message.endswith(f"which lacks {files[0]} and {files[1]} and 2 more: download it again")
    for name in files:
        (tmp_path / name).write_text("")
    assert machine.check_model(resolve(config).bases["base"]) == []


def test_nano_base_is_built_when_absent_and_refused_when_of_another_shape(config, tmp_path):
    config.model.path = str(tmp_path / "nano")
    assert machine.check_model(resolve(config).bases["base"]) == []
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "config.json").write_text(json.dumps({"hidden_size": 128, "num_hidden_layers": 2}))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "nano" / name).write_text("")
    (message,) = machine.check_model(resolve(config).bases["base"])
    assert message.startswith("config.model.nano.hidden_size is 64, but the model in")
    assert "128" in message
    assert "remove the folder" in message


def test_a_warm_start_that_would_change_nothing_is_refused(config, tmp_path):
    config.model.path = str(tmp_path / "nano")
    (tmp_path / "nano").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", TAUGHT_FILE):
        (tmp_path / "nano" / name).write_text(config.warm_start.to_json() if name == TAUGHT_FILE else "{}")
    assert machine.check_model(resolve(config).bases["base"]) == []
    before, config.warm_start.steps = config.warm_start.steps, 7
    (message,) = machine.check_model(resolve(config).bases["base"])
    assert message.startswith(
        f"config.warm_start.steps is 7, but the model in {config.model.path!r} was made with {before}"
    )
    assert "remove the folder" in message


def test_a_base_of_before_a_field_was_made_with_its_default(config, tmp_path):
    config.model.path = str(tmp_path)
    noted = {name: value for name, value in config.warm_start.to_dict().items() if name != "env_options"}
    for name in ("config.json", "tokenizer.json", "model.safetensors", TAUGHT_FILE):
        (tmp_path / name).write_text(json.dumps(noted) if name == TAUGHT_FILE else "{}")
    assert machine.check_model(resolve(config).bases["base"]) == []
    config.warm_start.env_options = {"kinds": ("int",)}
    (tmp_path / TAUGHT_FILE).write_text(config.warm_start.to_json())
    assert machine.check_model(resolve(config).bases["base"]) == [], "a tuple is a list in the file"
    (tmp_path / TAUGHT_FILE).write_text(json.dumps(noted))
    config.warm_start.env_options = {"max_moves": 3}
    (message,) = machine.check_model(resolve(config).bases["base"])
    assert message.startswith("config.warm_start.env_options is {'max_moves': 3}, but") and "made with {}" in message


def test_taken_port_is_named(config):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config.engine.port = other.getsockname()[1]
        (message,) = machine.check_ports(resolve(config))
    assert message == f"config.engine.port is {config.engine.port}, which another process uses: " + (
        "free it, or set it to 0 for a free one"
    )
    assert machine.check_ports(resolve(config)) == []
    config.dataflow.port = config.engine.port
    assert "are both" in machine.check_ports(resolve(config))[0]


def test_a_port_is_free_at_the_address_that_its_server_listens_at(config):
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))  # another address than the engines'
        other.listen()
        config.dataflow.host, config.dataflow.port = "127.0.0.2", other.getsockname()[1]
        (message,) = machine.check_ports(resolve(config))
        assert message.startswith(f"config.dataflow.port is {config.dataflow.port}, which another process uses")
        config.dataflow.host = "127.0.0.1"
        assert machine.check_ports(resolve(config)) == []


def test_ports_beyond_the_last_are_for_the_checks_of_the_config(config):
    config.engine.port, config.engine.replicas = 65535, 3
    assert not any("65536" in text for text in machine.check_ports(resolve(config)))
    assert any("lower the port to 65533 or less" in text for text in check_config(config))


def test_a_dataflow_listens_at_an_address_of_this_machine(config):
    for host in ("0.0.0.0", "localhost", "127.0.0.1"):
        config.dataflow.host = host
        assert machine.check_ports(resolve(config)) == []
    config.dataflow.host = "192.0.2.1"
    (message,) = machine.check_ports(resolve(config))
    assert message.startswith("config.dataflow.host is '192.0.2.1', which is no address of this machine: give one")
    config.eval.versions = (3,)  # an evaluation starts no dataflow
    assert machine.check_ports(resolve(config)) == []


def test_engine_interpreter_without_vllm_is_named(config, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    config.engine.python = str(bare)
    (message,) = machine.check_engine(resolve(config).bases["base"])
    assert message.startswith(f"config.engine.python is '{bare}'")
    assert "has no vLLM: pip install 'vllm>=0.24' there" in message
    config.engine.python = "/no/such/python"
    assert "not an executable" in machine.check_engine(resolve(config).bases["base"])[0]
    config.engine.python = str(bare)
    bare.write_text("#!/no/such/interpreter\n")
    assert "cannot be run" in machine.check_engine(resolve(config).bases["base"])[0]
    bare.write_bytes(b"\x7f of no format")
    assert "cannot be run" in machine.check_engine(resolve(config).bases["base"])[0]


def test_fp8_is_for_gpus(config, monkeypatch):
    config.engine.quantize = "fp8"
    for on_cpu in (False, True):
        monkeypatch.setattr(machine, "serves_on_cpu", lambda python, on_cpu=on_cpu: on_cpu)
        found = [text for text in machine.check_engine(resolve(config).bases["base"]) if "fp8" in text]
        assert found == ["config.engine.quantize is 'fp8', but the engine runs on a CPU: use 'int8' or ''"] * on_cpu


@pytest.mark.parametrize(
    ("dtype", "adapters", "on_cpu", "refused"),
    [
        ("float32", True, False, True),
        ("bfloat16", True, False, False),
        ("float32", False, False, False),
        ("float32", True, True, False),
    ],
)
def test_adapters_in_float32_are_for_cpus(config, monkeypatch, dtype, adapters, on_cpu, refused):
    """vLLM's kernels for adapters on GPUs assert on it while the engine starts: seen on an H200."""
    config.engine.dtype = dtype
    monkeypatch.setattr(machine, "serves_on_cpu", lambda python: on_cpu)
    found = machine.check_engine(resolve(config).bases["base"], adapters=adapters)
    assert ["config.engine.dtype is 'float32'" in text for text in found] == [True] * refused


def test_8_bits_want_16_around_them(config, monkeypatch, tmp_path):
    """vLLM asserts on it while the engine starts, minutes later."""
    config.engine.dtype = "float32"
    cpus = {"": "flags : avx2", "on a CPU with AMX": "flags : avx512f amx_tile amx_int8", "on GPUs": None}
    for quantize in ("int8", "fp8", ""):
        config.engine.quantize = quantize
        for where, flags in cpus.items():
            (tmp_path / "cpuinfo").write_text(flags or "")
            found = machine._quantize_problems(config.engine, on_cpu=flags is not None, cpu=tmp_path / "cpuinfo")
            text = f"'{quantize}' and config.engine.dtype 'float32', which vLLM does not serve {where}: set dtype to"
            refused = (quantize == "int8" and where) or (quantize == "fp8" and where == "on GPUs")
            assert (text in "".join(found)) == bool(refused), (quantize, where, found)
    config.engine.dtype, config.engine.quantize = "bfloat16", "int8"
    assert not machine._quantize_problems(config.engine, on_cpu=False)


@pytest.mark.parametrize(("said", "refused"), [("9.0\\n10.0", True), ("8.0\\n8.0", False), ("No devices", False)])
def test_int8_ends_with_hopper(config, monkeypatch, tmp_path, said, refused):
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\nprintf "{said}"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    config.engine.quantize = "int8"
    found = machine._quantize_problems(config.engine, on_cpu=False)
    assert [text for text in found if "no such products for GPUs as new" in text] == found
    assert bool(found) == refused
    config.engine.quantize = "fp8"
    assert not machine._quantize_problems(config.engine, on_cpu=False)


def test_too_few_accelerators_for_the_engine(config, tmp_path):
    config.engine.tensor_parallel = 4
    (message,) = machine.check_accelerators(resolve(config), share_out(("0", "1"), 4))
    assert "config.engine.tensor_parallel is 4, which takes 4 accelerators, but there are 2" in message


def test_an_evaluation_needs_no_processes_of_a_trainer(config):
    config.trainer.processes, config.trainer.coordinator = 2, "b:9876"
    assert machine.check_accelerators(resolve(config), share_out((), 1))
    config.eval.versions = (3,)
    assert machine.check_accelerators(resolve(config), share_out((), 1)) == []


def test_full_disk_is_told_before_anything_is_written(tmp_path):
    run_dir = tmp_path / "runs" / "new"
    assert machine.check_folder(run_dir) == []
    (message,) = machine.check_folder(run_dir, needed_bytes=2**60)
    assert "no space left" in message
    assert "--config.runs" in message
    (message,) = machine.check_folder(run_dir, needed_bytes=2**60, kind="evaluation")
    assert message.endswith("make room, or give another --out=<folder>")
    assert not run_dir.exists()
    assert not run_dir.parent.exists()


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (message,) = machine.check_folder(tmp_path / "file" / "run")
    assert f"{tmp_path / 'file'} cannot be written" in message


@pytest.mark.parametrize("name", ["run [copy]", "a*b", "what?", "a\\b", "[0-9]*"])
def test_a_folder_below_which_orbax_would_lose_arrays_is_named(tmp_path, name):
    for run_dir in (tmp_path / name, tmp_path / name / "run"):
        (message,) = machine.check_folder(run_dir)
        assert message.startswith(f"run folder {run_dir} has [ ] * ? or \\ in its path") and "move it" in message
        assert machine.check_folder(run_dir, kind="evaluation") == []
    assert machine.check_folder(tmp_path / "with space, comma{1}" / "-run") == []


def test_one_supervisor_per_run_folder(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from flowjax.launch.machine import hold\n"
        "with hold(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert machine.check_unused(tmp_path) == [
            f"run folder {tmp_path} is in use by process {holder.pid}: stop that one first; a new run takes another "
            "--name"
        ]
        for kind, other in (("evaluation", "--out"), ("sweep", "NAME")):
            said = f"a new {kind} takes another {other}$"
            with pytest.raises(machine.RunInUse, match=said), machine.hold(tmp_path, kind):
                pass
        with pytest.raises(machine.RunInUse, match=str(holder.pid)), machine.hold(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert machine.check_unused(tmp_path) == []
    with machine.hold(tmp_path):
        pass


def test_who_looks_at_a_run_keeps_no_launch_from_it(tmp_path, monkeypatch):
    with (tmp_path / machine._LOCK_FILE).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(machine.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with machine.hold(tmp_path):
            pass


def test_a_folder_that_may_not_be_looked_at_is_a_line(tmp_path):
    """A name that is too long raises as a folder does that this user may not search."""
    (tmp_path / "there").mkdir()
    assert machine.check_folder(tmp_path / "there" / ("n" * 300) / "run") == []


def test_accelerators_are_counted_as_cuda_would(tmp_path):
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:02:00.0").mkdir()
    assert visible_accelerators({}, tmp_path) == ("0", "1")
    assert visible_accelerators({"CUDA_VISIBLE_DEVICES": "3, 5"}, tmp_path) == ("3", "5")
    assert visible_accelerators({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    container = tmp_path / "container"
    assert visible_accelerators({}, container) == ()
    (container / "dev").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (container / "dev" / name).write_text("")
    assert visible_accelerators({}, container) == ("0", "1", "2")
    for number in range(8):  # of the host, which grants three of them
        (container / f"proc/driver/nvidia/gpus/0000:{number:02}:00.0").mkdir(parents=True)
    assert visible_accelerators({}, container) == ("0", "1", "2")


def test_tpu_chips_are_counted_where_there_is_no_gpu(tmp_path, monkeypatch):
    for number, (vendor, kind) in enumerate([("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042")]):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "device").write_text(f"{kind}\n")
    assert visible_accelerators({}, tmp_path) == ("tpu0", "tpu1")  # the third is a network card
    monkeypatch.setattr(sidecar, "_is_cpu_build", lambda python: False)
    assert not sidecar.serves_on_cpu("python", {}, tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert visible_accelerators({}, tmp_path) == ("0",)


def test_sharing_out():
    eight = tuple("01234567")
    devices = share_out(eight, 4)
    assert (devices.trainer, devices.engine, devices.shared) == (("0", "1", "2", "3"), ("4", "5", "6", "7"), False)
    assert devices.engine_env(0, 4) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert share_out(eight, 2, 2).trainer == ("0", "1")
    one = share_out(("6",), 1)
    assert one.shared
    assert one.trainer_env() == {"CUDA_VISIBLE_DEVICES": "6", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    none = share_out((), 2, cpu_devices=8)
    assert (none.trainer_count, none.trainer_env(), none.engine_env(0, 2)) == (8, {}, {})


def test_a_trainer_of_several_gpus_has_its_collectives_overlapped_and_its_memory():
    devices = share_out(tuple("01234567"), 4)
    env = devices.trainer_env(env={})
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in env["XLA_FLAGS"].split()
    own = {"XLA_FLAGS": "--a --xla_gpu_enable_latency_hiding_scheduler=false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    env = devices.trainer_env(env=own)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env
    newer = {"XLA_CLIENT_MEM_FRACTION": "0.5"}  # JAX ends where it is given both
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in devices.trainer_env(env=newer)
    shared = share_out(tuple("0"), 1)
    assert shared.trainer_env(env={})["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in shared.trainer_env(env={"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
    assert env["XLA_FLAGS"].startswith(own["XLA_FLAGS"]) and env["XLA_FLAGS"].count("latency_hiding") == 1
    assert "XLA_FLAGS" not in share_out(tuple("01"), 1).trainer_env(env={})  # one GPU waits for nobody


def test_xla_knows_the_flags_of_a_trainer_of_several_gpus():
    """An unknown one ends the process; the flags of GPUs are read by the build for CPUs as well."""
    flags = share_out(tuple("01234567"), 4).trainer_env(env={})["XLA_FLAGS"]
    code = "import jax; print(jax.jit(lambda x: x + 1)(1))"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_device_counts():
    assert host_device_count({}) == 1
    assert host_device_count({"XLA_FLAGS": "--a --xla_force_host_platform_device_count=8"}) == 8
    assert mesh_count((1, -1, 1)) is None
    assert mesh_count((2, 4, 1)) == 8
