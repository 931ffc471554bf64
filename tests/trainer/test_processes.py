"""Two processes train as one, and go on from each other's checkpoints; what is missing is named."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_train import run, settings

from flowjax.config import ConfigError, default_config
from flowjax.monitor.metrics import read_metrics
from flowjax.trainer import train as training
from flowjax.trainer.train import use_compile_cache
from flowjax.weights.publish import committed_steps, read_adapter


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_two_processes_train_as_one(tmp_path: Path):
    expected, _ = run(tmp_path / "one", settings(4, data=1, fsdp=1, tensor=1))
    address = free_address()
    # The second time they go on from what they saved together. The first time one loads for longer than Gloo waits.
    for steps, late_s in ((2, 35), (4, 0)):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        children = [
            subprocess.Popen(
                [sys.executable, __file__, str(tmp_path / "two"), address, str(steps), str(late_s * number)],
                env=environment | {training.NUMBER_VARIABLE: str(number)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        errors = [child.communicate(timeout=600)[1] for child in children]
        assert [child.returncode for child in children] == [0, 0], "\n".join(error[-1500:] for error in errors)
        assert committed_steps(tmp_path / "two/checkpoints")[-1] == steps
    saved = read_adapter(tmp_path / "two/checkpoints", 4)
    leaves = zip(jax.tree.leaves(saved), jax.tree.leaves(expected), strict=True)
    for one, other in leaves:
        np.testing.assert_allclose(one, other, atol=2e-5)
    lines = [line for line in read_metrics(tmp_path / "two") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "only the first process writes them"
    programs = 4  # log-probs, gradient, gradient added to another, update
    assert [line["compile_count"] for line in lines] == [programs] * 4


@pytest.mark.parametrize(
    ("number", "address", "message"),
    [
        ("", "host:1", r"config\.trainer\.processes is 2, but FLOWJAX_PROCESS is '': set it to the number"),
        ("2", "host:1", r"FLOWJAX_PROCESS is '2': .*0 to 1"),
        ("0", "", r"config\.trainer\.coordinator is empty: give the host:port of process 0"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, number, address, message):
    config = default_config()
    config.trainer.processes, config.trainer.coordinator = 2, address
    monkeypatch.setenv(training.NUMBER_VARIABLE, number)
    with pytest.raises(ConfigError, match=message):
        training.join(config.trainer)


def test_one_process_joins_nobody():
    training.join(default_config().trainer)
    assert training.is_first()


SCHEDULED = """
import jax
from flowjax.config import default_config
from flowjax.trainer.train import join
join(default_config().trainer, scheduled=True)
devices = jax.config.values["jax_cuda_visible_devices"]
print(jax.process_index(), jax.process_count(), jax.distributed.is_initialized(), devices)
"""
SIGNALLED = """
import os, signal, time
from flowjax.config import default_config
from flowjax.trainer.train import join
join(default_config().trainer, scheduled=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""
TASK = {  # of a step with one, as SLURM 22.05 describes it
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "127.0.0.[1,3-4]",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(("task", "printed"), [({}, "0 1 False all"), (TASK, "0 1 True all")])
def test_a_scheduled_process_learns_from_its_scheduler_who_it_is_and_takes_all_devices(task, printed):
    done = scheduled(SCHEDULED, task)
    assert done.stdout.strip() == printed, done.stderr


def test_a_process_that_has_joined_others_still_ends_of_sigterm():
    assert scheduled(SIGNALLED, TASK).returncode == -signal.SIGTERM


def scheduled(code: str, task: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FLOWJAX_"))}
    port = free_address().rpartition(":")[2]
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_PORT": port} | task
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=250
    )


SAVE = """
import os, resource, signal, sys, time
import jax, jax.numpy as jnp
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec
from flowjax.config import default_config
from flowjax.trainer.train import join
from flowjax.weights.publish import CheckpointError, Checkpoints
config = default_config()
config.trainer.processes, config.trainer.coordinator = 2, sys.argv[2]
join(config.trainer)
halves = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
array = jax.jit(lambda: jax.random.normal(jax.random.key(0), (512, 512)), out_shardings=halves)()
try:
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
        checkpoints.save(0, {"a": array}, {}, {})
        checkpoints.wait()
        if jax.process_index() == 1:  # as a disk that is full, to this one alone
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        checkpoints.save(1, {"a": array}, {}, {})
        while True:
            checkpoints.check()
            time.sleep(0.1)
except CheckpointError as error:
    os.write(1, f"{jax.process_index()} {error}".encode())
    os._exit(1)
"""


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_save_that_fails_in_one_process_of_two_is_told_at_once(tmp_path):
    """Orbax has it wait for the other for 20 minutes, and the other for it."""
    address = free_address()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(tmp_path / "saved"), address],
            env=environment | {training.NUMBER_VARIABLE: str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = children[1].communicate(timeout=300)[0]
        assert f"1 a checkpoint in {tmp_path / 'saved'} could not be written" in said
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert committed_steps(tmp_path / "saved") == [0]


FAIL = """
import sys, time
import jax
from flowjax.trainer import __main__ as role, train
from flowjax.weights.publish import CheckpointError
def fails(run, policy, scheduled):
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    if jax.process_index() == 0:
        time.sleep(600)
    raise {"a": CheckpointError("another trainer"), "b": train.ConfigError("a value"), "c": KeyError("k")}[sys.argv[3]]
train.main = fails
role.flags.FLAGS(["trainer", "--run=there"])
role.main([])
"""


@pytest.mark.parametrize(("error", "status", "said"), [("a", 1, "another"), ("b", 2, "a value"), ("c", 1, "KeyError")])
def test_one_process_that_fails_does_not_wait_for_those_that_wait_for_it(error, status, said):
    address = free_address()
    command = [sys.executable, "-c", FAIL, address]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen([*command, "0", error], env=environment)
    try:
        done = subprocess.run(
            [*command, "1", error], env=environment, capture_output=True, text=True, check=False, timeout=250
        )
    finally:
        first.kill()
        first.wait()
    assert done.returncode == status and said in done.stderr


def main(folder: Path, address: str, steps: int, late_s: int) -> None:
    config = settings(steps, data=1, fsdp=2, tensor=2)
    with config.unlocked():
        config.trainer.processes, config.trainer.coordinator = 2, address
    use_compile_cache(str(folder / "programs"))
    training.join(config.trainer)
    time.sleep(late_s)
    run(folder, config, logs=training.is_first())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
