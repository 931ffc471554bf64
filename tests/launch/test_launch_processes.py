"""A trainer of several processes on one machine, as the launcher starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from light_run import LightRun

from flowjax.launch import machine
from flowjax.launch.devices import Devices, processes_here, share_out
from flowjax.launch.roles import choose_ports, run_roles
from flowjax.launch.together import run_together
from flowjax.monitor.metrics import read_metrics
from flowjax.run import resolve
from flowjax.weights.publish import committed_steps

TOGETHER = Path(run_together.__code__.co_filename)


def together(environments: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOGETHER), environments, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_each_process_has_its_number_its_own_variables_and_one_coordinator():
    names = "('FLOWJAX_PROCESS', 'OWN', 'FLOWJAX_COORDINATOR')"
    code = f"import os; os.write(1, (' '.join(os.environ[n] for n in {names}) + chr(10)).encode())"
    done = together('[{"OWN": "a"}, {"OWN": "b"}]', code)
    first, second = sorted(line.split() for line in done.stdout.splitlines())
    assert (first[:2], second[:2]) == (["0", "a"], ["1", "b"])
    assert first[2] == second[2] and first[2].startswith("127.0.0.1:")
    assert done.returncode == 0


def test_when_one_dies_the_others_do_not_wait_for_it():
    code = "import os, time; os.environ['FLOWJAX_PROCESS'] == '1' and os._exit(7); time.sleep(600)"
    done = together("[{}, {}, {}]", code)
    assert done.returncode == 7
    assert "process 1 of 3 has ended with status 7" in done.stderr


def test_a_signal_ends_all_even_where_they_would_not_hear_it():
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os.write(1, b'up' + bytes([10])); time.sleep(600)"
    )
    command = [sys.executable, str(TOGETHER), "[{}, {}]", sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGKILL


def test_processes_share_the_trainers_accelerators_out(config, tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWJAX_PROCESS", raising=False)
    config.trainer.processes = 2
    devices = share_out(tuple("01234"), 1)
    assert (devices.trainer, devices.trainer_count) == (("0", "1", "2", "3"), 4)
    (trainer,) = [
        r for r in run_roles(resolve(config, tmp_path), choose_ports(resolve(config)), devices) if r.name == "trainer"
    ]
    assert '[{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]' in trainer.argv
    assert machine.check_accelerators(resolve(config), devices) == []
    (problem,) = machine.check_accelerators(resolve(config), share_out(tuple("0123"), 1))
    assert "config.trainer.processes is 2, but the trainer has 3 accelerators here" in problem
    assert Devices().process_envs(2) == [{"JAX_PLATFORMS": "cpu"}] * 2


def test_processes_of_several_hosts_are_started_one_on_each(config, tmp_path, monkeypatch):
    config.trainer.processes, config.trainer.coordinator = 2, "host:1"
    monkeypatch.delenv("FLOWJAX_PROCESS", raising=False)
    (problem,) = machine.check_accelerators(resolve(config), Devices())
    assert "FLOWJAX_PROCESS is not set" in problem and "leave coordinator empty" in problem
    config.trainer.processes = 1
    (problem,) = machine.check_accelerators(resolve(config), Devices())
    assert problem.startswith("config.trainer.coordinator is 'host:1', but config.trainer.processes is 1: set it to")
    config.trainer.processes = 2
    monkeypatch.setenv("FLOWJAX_PROCESS", "0")
    assert machine.check_accelerators(resolve(config), Devices()) == []
    assert processes_here(config.trainer) == 1
    (trainer,) = [
        r for r in run_roles(resolve(config, tmp_path), choose_ports(resolve(config)), Devices()) if r.name == "trainer"
    ]
    assert trainer.argv[1:] == ["-m", "flowjax.trainer", f"--run={tmp_path}"]
    hosts = share_out(tuple("0123"), 0, 8, hosts=2)
    assert (hosts.trainer, hosts.trainer_count) == (("0", "1", "2", "3"), 8)


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_run_with_two_trainer_processes_trains_to_its_end(tmp_path):
    overrides: dict[str, Any] = {"trainer__processes": 2, "mesh__fsdp": 2, "mesh__data": 1, "trainer__steps": 3}
    with LightRun(tmp_path, **overrides) as light:
        run = light.launch()
        try:
            assert run.wait(timeout=500) == 0, light.logs()
        finally:
            run.kill()
        assert [e["step"] for e in read_metrics(light.run_dir) if e["kind"] == "train"] == [1, 2, 3]
        assert committed_steps(light.run_dir / "checkpoints" / "agent")[-1] == 3
        started = [e for e in read_metrics(light.run_dir) if e["kind"] == "run" and e["role"] == "trainer"]
        assert [e["event"] for e in started] == ["start", "up", "done"], os.linesep.join(map(str, started))
