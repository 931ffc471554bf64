"""Trainers of several hosts: the files of launch/slurm under a real SLURM, processes that are restarted one by one as
Kubernetes does, and what could be wrong in a file without anybody being told."""

import asyncio
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from light_run import ROOT, LightRun, environment
from ml_collections import ConfigDict
from rich.console import Console
from slurm_cluster import Slurm, missing

from flowjax.config import ConfigError, load_run, save_run
from flowjax.launch import join
from flowjax.launch.__main__ import LaunchRequest, main, read_request
from flowjax.launch.machine import check_accelerators, free_port
from flowjax.launch.preflight import Findings, device_lines
from flowjax.launch.probe import inspect_run
from flowjax.launch.roles import check_reached
from flowjax.launch.supervisor import USER_MISTAKE
from flowjax.monitor.metrics import read_metrics, write_status
from flowjax.monitor.token import VARIABLE
from flowjax.run import write_endpoints
from flowjax.weights.publish import committed_steps

RUN_SH, NODE_SH = ROOT / "launch/slurm/run.sh", ROOT / "launch/slurm/node.sh"
TWO_PROCESSES: dict[str, Any] = {"mesh__fsdp": 2, "mesh__data": 1, "trainer__steps": 6}


def wait_for(condition: Callable[[], Any], say: Callable[[], str], timeout_s: float = 1200.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, say()
        time.sleep(0.2)


def steps(run_dir: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [line["step"] for line in read_metrics(run_dir) if line["kind"] == "train"]
    return []


# ---------------------------------------------------------------------------------------------- one restarted by itself


@pytest.mark.integration
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_processes_that_are_restarted_one_by_one_go_on_together(tmp_path: Path, victim: int):
    """As the pods of an indexed Job: nobody ends the siblings of one that has died, and each is started again alone."""
    address = f"127.0.0.1:{free_port()}"
    overrides = TWO_PROCESSES | {"trainer__processes": 2, "trainer__coordinator": address, "elsewhere": ("trainer",)}
    living: dict[int, subprocess.Popen[bytes]] = {}
    ended: dict[int, list[int]] = {0: [], 1: []}

    def pod(number: int, run_dir: Path) -> None:
        command = [sys.executable, "-m", "flowjax.launch", "--role=trainer", f"--run={run_dir}"]
        while not ended[number] or ended[number][-1]:
            with (tmp_path / f"pod-{number}.log").open("ab") as log:
                env = environment() | {"FLOWJAX_PROCESS": str(number)}
                living[number] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
            ended[number].append(living[number].wait())
            assert len(ended[number]) < 10
            time.sleep(1)

    with LightRun(tmp_path, **overrides) as light:
        pods = [threading.Thread(target=pod, args=(number, light.run_dir), daemon=True) for number in (0, 1)]
        for each in pods:  # before there is a run
            each.start()
        run = light.launch()

        def logs() -> str:
            texts = [path.read_text(errors="replace")[-3000:] for path in sorted(tmp_path.glob("pod-*.log"))]
            return "\n".join([light.logs(), str(ended), *texts])

        try:
            wait_for(lambda: len(steps(light.run_dir)) >= 2, logs)
            living[victim].kill()
            assert run.wait(timeout=900) == 0, logs()
            for each in pods:
                each.join(timeout=120)
        finally:
            for process in (run, *living.values()):
                process.kill()
        assert [statuses[-1] for statuses in ended.values()] == [0, 0], logs()
        assert ended[victim][0] == -signal.SIGKILL and ended[1 - victim][0] not in (0, -signal.SIGKILL), logs()
        assert steps(light.run_dir) == [1, 2, 3, 4, 5, 6]
        assert committed_steps(light.run_dir / "checkpoints" / "agent")[-1] == 6


# ---------------------------------------------------------------------------------------------------------------- SLURM


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if lacking := missing():
        pytest.skip(f"a SLURM of its own needs {', '.join(lacking)} (apt-get install slurm-wlm munge)")
    with Slurm(tmp_path / "slurm") as cluster:
        cluster.env |= environment() | {name: cluster.env[name] for name in ("PATH", "SLURM_CONF")}
        yield cluster


def trainer_of(task: str) -> int:
    """Process of the trainer in a task of a step."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            runs_trainer = b"flowjax.trainer\0" in entry.with_name("cmdline").read_bytes()
            if runs_trainer and f"SLURM_PROCID={task}".encode() in entry.read_bytes().split(b"\0"):
                return int(entry.parent.name)
    raise AssertionError(f"no trainer is task {task}")


PROGRAM = """#!/bin/bash
# Stands for flowjax: task 1 of the first step dies, and nothing else ends before it may.
echo "${SLURM_RESTART_COUNT:-0} ${SLURM_STEP_ID:-batch} ${SLURM_STEP_NODELIST:-} ${SLURM_PROCID} $*" >> calls
case "$*" in
  *--role=trainer*) [ "${SLURM_RESTART_COUNT:-0}.$SLURM_STEP_ID.$SLURM_PROCID" = 0.0.1 ] && exit 9 ;;
  *) mkdir -p runs/a && touch runs/a/config.json ;;
esac
until [ -e may_end ]; do sleep 0.1; done
"""


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_slurm_ends_the_siblings_of_a_dead_task_and_requeues_a_job_whose_time_is_over(tmp_path: Path, slurm: Slurm):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(PROGRAM)
    (tmp_path / "bin/python").chmod(0o755)
    slurm.env["PATH"] = f"{tmp_path / 'bin'}:{slurm.env['PATH']}"
    where = [f"--chdir={tmp_path}", f"--output={tmp_path / 'job.log'}"]
    command = [*where, "--nodes=3", str(RUN_SH), "runs/a", "--config=recipe.py"]
    job = slurm.call("sbatch", "--parsable", *command).strip()

    def calls(restart: int, step: str) -> list[str]:
        lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        return sorted(
            line.partition(f"{restart} {step} ")[2] for line in lines if line.startswith(f"{restart} {step} ")
        )

    def logs() -> str:
        return "\n".join(path.read_text() for path in (tmp_path / "calls", tmp_path / "job.log") if path.exists())

    role = "-m flowjax.launch --role=trainer --run=runs/a"
    tasks = [f"127.0.0.[2-3] {number} {role}" for number in (0, 1)]
    wait_for(lambda: calls(0, "1") == tasks, logs)  # task 0 of step 0 has not ended by itself
    assert calls(0, "0") == tasks
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # as `--signal=B:USR1@120` of the script does
    wait_for(lambda: calls(1, "0") == tasks, logs)
    (first,), (again,) = calls(0, "batch"), calls(1, "batch")
    assert "--name=a --config.runs=runs" in first and "--resume=runs/a" in again
    (tmp_path / "may_end").touch()
    wait_for(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), logs)
    assert slurm.state(job) == "COMPLETED", logs()


@pytest.mark.integration
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_slurm_job_goes_on_after_the_death_of_a_process_and_after_a_requeue(tmp_path: Path, slurm: Slurm):
    overrides = {**TWO_PROCESSES, "trainer__steps": 15}
    with LightRun(tmp_path, **overrides) as light:
        log = tmp_path / "job.log"
        command = [str(RUN_SH), str(light.run_dir), f"--config={light.folder / 'recipe.py'}"]
        job = slurm.call("sbatch", "--parsable", "--nodes=3", f"--output={log}", *command).strip()

        def logs() -> str:
            roles = [path.read_text(errors="replace")[-1500:] for path in light.run_dir.glob("logs/*.log")]
            return "\n".join([slurm.state(job), log.read_text()[-6000:] if log.exists() else "", *roles])

        wait_for(lambda: steps(light.run_dir) or slurm.state(job) == "FAILED", logs)
        os.kill(trainer_of("1"), signal.SIGKILL)
        wait_for(lambda: "the trainer has ended with status 137, 1 within an hour" in log.read_text(), logs)
        seen = len(steps(light.run_dir))
        wait_for(lambda: len(steps(light.run_dir)) > seen, logs)
        # What the script does by itself two minutes before the job's time is over.
        slurm.call("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: "resuming" in log.read_text(), logs)
        wait_for(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), logs)
        assert slurm.state(job) == "COMPLETED", logs()
        assert steps(light.run_dir) == list(range(1, 16)), logs()
        assert committed_steps(light.run_dir / "checkpoints" / "agent")[-1] == 15
        assert "Restarts=1 " in slurm.call("scontrol", "show", "job", "--oneliner", job)
        config = load_run(light.run_dir)
        assert config.elsewhere == ("trainer",) and config.dataflow.host == "127.0.0.1"  # as the first node is called


def documented(beginning: str, *pages: str) -> list[str]:
    """Commands that begin so, of a page or of the head of a script."""
    lines = [line.strip("# ") for page in pages for line in (ROOT / page).read_text().splitlines()]
    return [line.partition(" [--config.")[0] for line in lines if line.startswith(beginning)]


def planned(argv: list[str], hosts: int, gpus: int) -> LaunchRequest:
    """A launch with its trainer on other hosts, whose mesh and batch fit all their GPUs, and its engines its own."""
    argv = [argument.replace("=configs/", f"={ROOT}/configs/") for argument in argv]
    request = read_request([*argv, "--dry_run", f"--devices={gpus}"])
    answer = inspect_run(request.run, hosts * gpus, None)
    assert request.run.trained_remotely and answer["problems"] == []
    assert math.prod(answer["plan"]["mesh"].values()) == hosts * gpus
    assert check_accelerators(request.run, request.devices) == []
    return request


def joined(argv: list[str], run: LaunchRequest, gpus: int, monkeypatch: pytest.MonkeyPatch) -> LaunchRequest:
    """A node of such a run, whose engines have room on its GPUs."""
    config = ConfigDict(run.run.config.to_dict())
    config.update({"elsewhere": ("dataflow", "trainer"), "name": "node"})
    config.dataflow.url = "http://first:8400"
    monkeypatch.setattr(join, "config_of_run", lambda url: config.copy_and_resolve_references())
    request = read_request([*argv, "--dry_run", f"--devices={gpus}"])
    assert check_accelerators(request.run, request.devices) == []
    return request


def test_what_is_started_by_hand_fits_its_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The mesh of the recipe was that of four GPUs, and 16 of two hosts were refused once the engines were up."""
    monkeypatch.chdir(tmp_path)
    (command,) = documented("python -m flowjax.launch --config=", "docs/clusters.md")
    request = planned(shlex.split(command)[3:], 2, 8)
    assert request.devices.remote == 16, "processes times GPUs, as --devices has it planned"
    assert request.run.config.trainer.coordinator and check_reached(request.run) == []


def test_what_starts_a_process_again_by_hand_ends_at_a_mistake(tmp_path: Path):
    loops = documented("until ", "docs/clusters.md")
    assert [re.findall(r"FLOWJAX_PROCESS=(\d)", loop) for loop in loops] == [["0"], ["1"]]
    for loop in loops:
        for statuses in ([USER_MISTAKE], [1, 137, 0], [1, USER_MISTAKE]):
            (tmp_path / "calls").write_text("")
            body = f"set -- {' '.join(map(str, statuses))}; shift $(($(grep -c ^python {tmp_path}/calls) - 1)); exit $1"
            env = stubs(tmp_path, python=body, sleep="")
            subprocess.run(["bash", "-c", loop], env=env, timeout=120, check=False)
            assert len(called(tmp_path, "python")) == len(statuses)


def test_a_plan_says_what_does_not_fit_the_hosts_of_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    elsewhere = ["--config.elsewhere=('trainer',)", "--config.trainer.processes=2", f"--config.runs={tmp_path}"]
    command = [f"--config={ROOT}/configs/math.py:qwen3_8b", *elsewhere, "--dry_run", "--devices=8"]
    assert main(command) == USER_MISTAKE
    plan = " ".join(capsys.readouterr().out.split())
    assert "trainer on other hosts, 16 devices together, mesh does not fit" in plan
    assert "config.mesh is data=4, fsdp=1, which does not fit 16 devices" in plan
    # Without devices to plan for the mesh says how many there are, or nobody knows.
    rows = [*command[:-2], "--config.mesh.data=16", "--dry_run"]
    refused = inspect_run((request := read_request(rows)).run, request.devices.remote, None)["problems"]
    assert refused[0].startswith("config.trainer.micro_batch_rows is 4, but rows are split over 16 devices")
    fits = [*command[:-2], "--config.mesh.data=-1", "--config.trainer.micro_batch_rows=16", "--dry_run", "--devices=8"]
    request = read_request(fits)
    (part,) = inspect_run(request.run, request.devices.remote, None)["plan"]["bases"].values()
    assert part["memory"]["base"] > 2 * 8e9 and part["memory"]["activations"], "of a device, as of a trainer here"
    request = read_request([*fits, "--config.trainer.processes=3", "--config.mesh.data=1", "--config.mesh.tensor=24"])
    (refused,) = inspect_run(request.run, request.devices.remote, None)["problems"]
    assert "tensor" in refused
    request = read_request([*command[:-2], "--config.mesh.data=-1", "--dry_run"])
    found = inspect_run(request.run, request.devices.remote, None)
    assert request.devices.remote == 0 and found["problems"] == []
    shown = dict(device_lines(request.run, request.devices, Findings(plan=found["plan"])))
    assert "on other hosts, all their devices together" in shown["trainer"] and "not fit" not in shown["trainer"]


def stubs(folder: Path, **programs: str) -> dict[str, str]:
    """Environment of a script on the first of three nodes, whose programs write down how they are called."""
    for name, body in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name}" "$(printf " %q" "$@")" >> {folder}/calls\n{body}\n')
        path.chmod(0o755)
    node = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "first"}
    return {**os.environ, **node, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def called(folder: Path, program: str) -> list[list[str]]:
    calls = [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]
    return [call[1:] for call in calls if call[0] == program]


def run_script(script: Path, *arguments: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("dies_with", "lives"), [(1, 6), (USER_MISTAKE, 1)])
def test_a_trainer_that_dies_again_and_again_ends_the_job(tmp_path: Path, dies_with: int, lives: int):
    env = stubs(tmp_path, srun=f"exit {dies_with}", sleep="", python="exec tail -f /dev/null")
    done = run_script(RUN_SH, "runs/a", "--config=recipe.py", folder=tmp_path, env=env)
    assert len(called(tmp_path, "srun")) == lives
    assert done.returncode == 128 + signal.SIGTERM, "the launcher was stopped"


def test_a_job_starts_a_run_or_goes_on_with_it(tmp_path: Path):
    env = stubs(tmp_path, srun="", python="")
    given = ["--config=configs/math.py:nano", "--config.trainer.steps=7"]
    assert run_script(RUN_SH, "runs/a", *given, folder=tmp_path, env=env).returncode == 0
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.json").write_text("{}")
    assert run_script(RUN_SH, "runs/a", *given, folder=tmp_path, env=env).returncode == 0
    assert run_script(RUN_SH, "runs/a", *given, folder=tmp_path, env=env | {"SLURM_JOB_NUM_NODES": "1"}).returncode == 0
    first, second, alone = called(tmp_path, "python")
    assert first[:4] == ["-m", "flowjax.launch", "--name=a", "--config.runs=runs"] and second[2] == "--resume=runs/a"
    assert set(given) < set(first) and set(given) < set(second)
    assert not any("elsewhere" in argument for argument in alone)
    request = read_request([*[a.replace("configs/", f"{ROOT}/configs/") for a in first[2:]], "--dry_run"])
    assert (request.run.config.elsewhere, request.run.config.dataflow.host) == (("trainer",), "first")
    *options, role, run = called(tmp_path, "srun")[0]
    assert options[:3] == ["--nodes=2", "--ntasks=2", "--relative=1"] and "--kill-on-bad-exit=1" in options
    assert (role, run) == ("--role=trainer", "--run=runs/a")


def test_what_is_submitted_fits_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    submitted = documented("sbatch --nodes=", "docs/clusters.md", "launch/slurm/run.sh")
    assert len(submitted) == 2
    for number, command in enumerate(submitted):
        (tmp_path / str(number)).mkdir()
        _, nodes, gpus, script, *given = shlex.split(command)
        node_count, gpu_count = (int(option.partition("=")[2]) for option in (nodes, gpus))
        assert (nodes[:8], gpus[:16], script) == ("--nodes=", "--gpus-per-node=", "launch/slurm/run.sh")
        env = stubs(tmp_path / str(number), srun="", python="") | {"SLURM_JOB_NUM_NODES": str(node_count)}
        run_script(RUN_SH, *given, "--config.dataflow.host=10.0.0.1", folder=tmp_path / str(number), env=env)
        (start,) = called(tmp_path / str(number), "python")
        request = planned(start[2:], node_count - 1, gpu_count)
        assert request.run.config.dataflow.host == "10.0.0.1", "a name that is loopback here can be given an address"


def test_a_node_is_invited_and_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = f"""case "$*" in
      *endpoints.json) exec {sys.executable} "$@";;
      *--invite=*) echo {VARIABLE}=node-7:key;;
      *) echo token {VARIABLE}=${VARIABLE} >> {tmp_path}/calls;;
    esac"""
    env = stubs(tmp_path, python=python)
    (tmp_path / "endpoints.json").write_text('{"dataflow": "http://first:8400"}')
    env["SLURM_GPUS_ON_NODE"] = "8"
    done = run_script(NODE_SH, str(tmp_path), "--config.env.workers=2", folder=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert called(tmp_path, "token") == [[f"{VARIABLE}=node-7:key"]]
    *_, argv = called(tmp_path, "python")
    assert {"--join=http://first:8400", "--name=node-7", "--config.env.workers=2"} < set(argv)
    fields = [re.fullmatch(r"--config\.([\w.]+)=.*", argument) for argument in argv]
    assert all(join._OF_HARDWARE.fullmatch(field[1]) for field in fields if field)
    monkeypatch.chdir(tmp_path)
    (command,) = documented("python -m flowjax.launch --config=", "docs/clusters.md")
    argv = [argument for argument in argv[2:] if not argument.startswith("--config.runs=")]
    node = joined(argv, planned(shlex.split(command)[3:], 2, 8), 8, monkeypatch)
    assert len(node.run.engines) == 8, "one on each GPU"


# ----------------------------------------------------------------------------------------------------------- Kubernetes


def manifests() -> dict[tuple[str, str], Any]:
    texts = [path.read_text() for path in (ROOT / "launch/kubernetes").glob("*.yaml")]
    return {(each["kind"], each["metadata"]["name"]): each for text in texts for each in yaml.safe_load_all(text)}


def pod_of(manifest: Any) -> tuple[Any, Any]:
    """Specification of a manifest's pods and of their only container."""
    spec = manifest["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def variables(container: Any) -> dict[str, str]:
    return {each["name"]: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}


def ports(container: Any) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def launched() -> LaunchRequest:
    """The run that run.yaml starts, with as many GPUs as there and in trainer.yaml."""
    _, container = pod_of(manifests()["Job", "flowjax-run"])
    first, flags = container["args"][0].split("exec python -m flowjax.launch ")
    assert "--resume=/runs/math" in first and "/runs/math/config.json" in first
    (start,) = re.findall(r"else set -- (.*); fi", first)
    assert "POD_IP" in variables(container)
    argv = shlex.split(flags.replace('"$@"', start).replace("\\\n", " ").replace("$POD_IP", "10.0.0.1"))
    job = manifests()["Job", "flowjax-trainer"]
    assert gpus_of(container) == gpus_of(pod_of(job)[1])
    return planned(argv, job["spec"]["completions"], gpus_of(container))


def gpus_of(container: Any) -> int:
    return container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_pods_of_a_run_find_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    made, config = manifests(), launched().run.config
    _, run = pod_of(made["Job", "flowjax-run"])
    job = made["Job", "flowjax-trainer"]
    spec, trainer = pod_of(job)
    assert config.elsewhere == ("trainer",) and config.dataflow.host == "10.0.0.1"
    assert config.trainer.processes == job["spec"]["completions"] == job["spec"]["parallelism"]
    named = f"{job['metadata']['name']}-0.{spec['subdomain']}:{ports(trainer)['coordinator']}"
    assert config.trainer.coordinator == named
    headless = made["Service", spec["subdomain"]]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert headless["selector"] == {"job-name": job["metadata"]["name"]}
    service = made["Service", "flowjax-run"]["spec"]
    (port,) = service["ports"]
    assert service["selector"] == {"job-name": "flowjax-run"}
    assert config.dataflow.port == ports(run)[port["targetPort"]] == port["port"]
    assert run["readinessProbe"]["httpGet"] == {"path": "/health", "port": port["targetPort"]}
    assert f"--run={config.runs}/{config.name}" in trainer["command"]
    assert variables(run)["HF_HOME"] == variables(trainer)["HF_HOME"]
    assert variables(trainer)["FLOWJAX_PROCESS"].startswith("metadata.annotations['batch.kubernetes.io/job-completion")
    for container in (run, trainer):
        assert {"name": "runs", "mountPath": config.runs} in container["volumeMounts"]


def test_pods_that_are_to_be_replaced_are(monkeypatch: pytest.MonkeyPatch):
    """What a policy on failures needs: pods that are replaced and not restarted, and the status of a user's mistake."""
    for name in ("flowjax-run", "flowjax-trainer"):
        job = manifests()["Job", name]
        spec, _ = pod_of(job)
        assert spec["restartPolicy"] == "Never"
        mistake, disruption = job["spec"]["podFailurePolicy"]["rules"]
        assert mistake == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [USER_MISTAKE]}}
        assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        (claim,) = (each["persistentVolumeClaim"] for each in spec["volumes"] if "persistentVolumeClaim" in each)
        assert ("PersistentVolumeClaim", claim["claimName"]) in manifests()


def test_the_trainers_pods_are_given_what_a_task_understands(monkeypatch: pytest.MonkeyPatch):
    _, trainer = pod_of(manifests()["Job", "flowjax-trainer"])
    asked = []
    monkeypatch.setattr(join, "train", lambda run_dir, console: asked.append(run_dir))
    assert trainer["command"][:3] == ["python", "-m", "flowjax.launch"]
    assert main(trainer["command"][3:]) == 0 and asked == [Path("/runs/math")]


def test_nodes_join_the_run(monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "launch/kubernetes/nodes.yaml").read_text()
    made = manifests()
    deployment = made["Deployment", "flowjax-nodes"]
    _, node = pod_of(deployment)
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    port = made["Service", "flowjax-run"]["spec"]["ports"][0]["port"]
    assert f"--join=http://flowjax-run:{port}" in node["command"]
    (secret,) = (each["secretRef"]["name"] for each in node["envFrom"])
    assert f"create secret generic {secret} --from-literal" in text and "exec job/flowjax-run" in text
    monkeypatch.chdir(ROOT)
    run = launched()
    config = run.run.config
    joined(node["command"][3:], run, gpus_of(node), monkeypatch)
    assert f"--status={config.runs}/{config.name}" in text
    fields = [argument[9:].partition("=")[0] for argument in node["command"] if argument.startswith("--config.")]
    assert fields and all(join._OF_HARDWARE.fullmatch(field) for field in fields)


# ------------------------------------------------------------------------------------------------------------- the task


@pytest.mark.parametrize(
    "argv", [["--role=trainer"], ["--role=rollout", "--run=a"], ["--role=trainer", "--run=a", "--config.seed=1"]]
)
def test_a_task_is_told_its_run_and_nothing_else(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == USER_MISTAKE
    assert "is --role=trainer --run=<run folder> and nothing else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {},
            r"config\.elsewhere of .* is \(\), so that its launch has the trainer: launch it with --config\.elsewhere",
        ),
        ({"elsewhere": ("trainer",), "separate_trainers": True}, r"config\.separate_trainers is True"),
        ({"elsewhere": ("trainer",)}, r"config\.model\.path is 'absent-model', which is no folder of a model on \S+:"),
    ],
)
def test_a_host_that_could_not_train_says_why(config, tmp_path, monkeypatch, fields, message):
    monkeypatch.delenv("FLOWJAX_PROCESS", raising=False)
    config.update(fields)
    save_run(config, tmp_path)

    async def under_way(run_dir: Path, console: object) -> Any:
        return join.read_run(run_dir)

    monkeypatch.setattr(join, "_under_way", under_way)
    with pytest.raises(ConfigError, match=message):
        join.train(tmp_path, Console())


def test_a_file_in_the_place_of_the_run_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"--run is '\S+run', which is no folder: give the run's folder"):
        join.train(tmp_path / "run", Console())


@pytest.mark.parametrize(("address", "named"), [("http://127.0.0.1:9", True), ("http://0.0.0.0:9", False)])
def test_a_process_that_waits_at_its_own_address_says_where_to_look(tmp_path, address, named):
    write_endpoints(tmp_path, {"dataflow": address})
    console = Mock(print=Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        asyncio.run(join._under_way(tmp_path, console))
    ((said,), _) = console.print.call_args
    assert said.startswith(f"waiting for the run in {tmp_path} (") and ("see config.dataflow.host" in said) == named


def test_a_trainer_of_a_run_that_is_over_does_not_wait_for_ever(config, tmp_path, monkeypatch):
    """A pod that was replaced after the last step kept its GPUs."""
    monkeypatch.setattr(join, "_OVER_AFTER_S", 0.0)
    monkeypatch.setattr(join, "_LOOK_EVERY_S", 0.0)
    config.trainer.steps = 40
    save_run(config, tmp_path)
    write_endpoints(tmp_path, {"dataflow": "http://127.0.0.1:9"})
    names = list(join.read_run(tmp_path).policies)

    def ended(committed: int) -> dict[str, Any]:
        return {"finished": True, "policies": {name: {"committed": committed} for name in names}}

    for status in (ended(39), {"finished": False}):
        write_status(tmp_path, "dataflow", status)
        with pytest.raises(InterruptedError):
            asyncio.run(join._under_way(tmp_path, Mock(print=Mock(side_effect=InterruptedError))))
    write_status(tmp_path, "dataflow", ended(40))
    assert asyncio.run(join._under_way(tmp_path, Mock())) is None


def test_a_trainer_in_a_copied_folder_waits_for_the_launch_of_the_copy(config, tmp_path):
    """It took over the policies of the original, whose dataflow the copy names."""
    run_dir = tmp_path / "run"
    save_run(config, run_dir)
    written = 0

    async def finished(request: web.Request) -> web.Response:
        nonlocal written
        written += 1  # a status is written between any two looks
        write_status(run_dir, "dataflow", {"written": written})
        return web.json_response({"finished": False})

    async def scenario() -> None:
        app = web.Application()
        app.router.add_get("/finished", finished)
        async with TestServer(app) as server:
            write_endpoints(run_dir, {"dataflow": str(server.make_url("")).rstrip("/")})
            assert await join._under_way(run_dir, Mock()) is not None
            copy = shutil.copytree(run_dir, tmp_path / "copy")
            console = Mock(print=Mock(side_effect=InterruptedError))
            with pytest.raises(InterruptedError):
                await join._under_way(copy, console)
            ((said,), _) = console.print.call_args
            assert "has not written status-dataflow.json here" in said and "a copy of its folder" in said

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 4, "fsdp": 1}, "trainer: config.mesh is data=4, fsdp=1, which does not fit 8 devices"),
        ({"data": -1, "fsdp": 1}, "trainer: a batch has 4 rows, which do not divide over the 8 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_the_hosts_is_a_mistake_that_no_new_start_mends(config, tmp_path, fields, message):
    """It ended as a death does, and was started again and again."""
    config.mesh.update(fields)
    config.trainer.micro_batch_rows = 4
    save_run(config, tmp_path)
    env = environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "flowjax.trainer", f"--run={tmp_path}", "--scheduled"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == USER_MISTAKE and message in done.stderr, done.stderr
