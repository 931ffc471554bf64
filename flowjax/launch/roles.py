"""The roles of a run: their commands, environments, health and patience."""

import json
import sys
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.config import policy_configs
from flowjax.launch.devices import Devices
from flowjax.launch.health import answers
from flowjax.launch.machine import free_port
from flowjax.launch.supervisor import Role
from flowjax.monitor.token import reachable
from flowjax.rollout.names import engine_names

# Nothing is fetched or reported while a run lasts.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ON_CPU = {"JAX_PLATFORMS": "cpu"}  # must not take memory from the trainer's devices
# XLA on CPUs asks for its temporaries anew at every step: with huge pages a tenth of a training step is saved and more.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def trainer_roles(config: ConfigDict) -> dict[str, str]:
    """The run's trainers: name of the role -> the policy that it trains, "" for all of them."""
    if not config.separate_trainers:
        return {"trainer": ""}
    return {f"trainer-{policy}": policy for policy in policy_configs(config)}


def stop_order(config: ConfigDict) -> tuple[tuple[str, ...], ...]:
    """Rollout and trainers together; then dataflow and engines."""
    return (("rollout", *trainer_roles(config)),)


def choose_ports(config: ConfigDict) -> dict[str, int]:
    """A port for each server that is started here, as configured or free; kept for the whole run, restarts included."""
    engine = config.engine
    names = [] if engine.urls else engine_names(engine.replicas)
    ports = {name: engine.port + index if engine.port else free_port() for index, name in enumerate(names)}
    return {**ports, "dataflow": config.dataflow.port or free_port()}


def write_endpoints(config: ConfigDict, run_dir: Path, ports: dict[str, int]) -> None:
    """`endpoints.json`, where roles find each other, and the engines that run elsewhere."""
    given = (
        dict(zip(engine_names(len(config.engine.urls)), config.engine.urls, strict=True)) if config.engine.urls else {}
    )
    partial_file = run_dir / "endpoints.json.partial"
    hosts = {"dataflow": reachable(config.dataflow.host)}
    started = {name: f"http://{hosts.get(name, '127.0.0.1')}:{port}" for name, port in ports.items()}
    partial_file.write_text(json.dumps({**given, **started}))
    partial_file.replace(run_dir / "endpoints.json")


def needs_warm_start(config: ConfigDict) -> bool:
    return config.model.nano is not None and not (Path(config.model.path) / "config.json").exists()


def warm_start_role(run_dir: Path, devices: Devices) -> Role:
    return Role(
        "warm_start",
        [sys.executable, "-m", "flowjax.trainer.warm_start", f"--run={run_dir}"],
        env={**_OFFLINE, **HUGE_PAGES, **devices.trainer_env()},
        restarts=1,
        finite=True,
    )


def engine_accelerators(config: ConfigDict) -> int:
    """Accelerators that the engines of a run want of this machine."""
    return 0 if config.engine.urls else config.engine.replicas * config.engine.tensor_parallel


def engine_roles(config: ConfigDict, run_dir: Path, ports: dict[str, int], devices: Devices) -> list[Role]:
    """The engines that are started here, each supervised and restarted on its own."""
    from flowjax.rollout.sidecar import engine_command

    replicas = config.engine.replicas
    names = [] if config.engine.urls else engine_names(replicas)
    commands = [engine_command(config, run_dir, ports[name], replica) for replica, name in enumerate(names)]
    return [
        Role(
            name,
            argv,
            env={**_OFFLINE, **devices.engine_env(replica, replicas), **env},
            health=partial(answers, "127.0.0.1", ports[name], "/health"),
            restarts=config.engine.max_restarts,
            start_timeout_s=config.engine.start_timeout_s,
        )
        for replica, (name, (argv, env)) in enumerate(zip(names, commands, strict=True))
    ]


def run_roles(config: ConfigDict, run_dir: Path, ports: dict[str, int], devices: Devices) -> list[Role]:
    """Engines, dataflow, trainers and rollout, in the order in which they are started."""
    python = [sys.executable, "-m"]
    return [
        *engine_roles(config, run_dir, ports, devices),
        Role(
            "dataflow",
            [*python, "flowjax.dataflow", f"--run={run_dir}"],
            env={**_OFFLINE, **_ON_CPU},
            health=partial(answers, reachable(config.dataflow.host).strip("[]"), ports["dataflow"], "/health"),
            restarts=config.max_restarts,
        ),
        *(
            Role(
                name,
                [*python, "flowjax.trainer", f"--run={run_dir}", *([f"--policy={policy}"] if policy else [])],
                env={**_OFFLINE, **HUGE_PAGES, **devices.trainer_env(index)},
                told=run_dir / f"status-{name}.json",
                restarts=config.max_restarts,
                finite=True,
            )
            for index, (name, policy) in enumerate(trainer_roles(config).items())
        ),
        Role(
            "rollout",
            [*python, "flowjax.rollout", f"--run={run_dir}"],
            env={**_OFFLINE, **_ON_CPU},
            told=run_dir / "status-rollout.json",
            restarts=config.max_restarts,
        ),
    ]
