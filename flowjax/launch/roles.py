"""The roles of a run: their commands, environments, health and patience."""

import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.config import BASE_NAME, base_configs, policy_configs
from flowjax.files import replace_file
from flowjax.launch.devices import Devices, processes_here
from flowjax.launch.health import answers
from flowjax.launch.machine import can_bind, free_port
from flowjax.launch.supervisor import Role
from flowjax.monitor.token import reachable
from flowjax.rollout.names import engines_by_base

_TOGETHER = Path(__file__).with_name("together.py")
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
    """The trainers that are started here: name of the role -> the policy that it trains, "" for all of them."""
    if "trainer" in config.elsewhere:
        return {}
    if not config.separate_trainers:
        return {"trainer": ""}
    return {f"trainer-{policy}": policy for policy in policy_configs(config)}


def stop_order(config: ConfigDict) -> tuple[tuple[str, ...], ...]:
    """Rollout and trainers together; then dataflow and engines."""
    return (("rollout", *trainer_roles(config)),)


def choose_ports(config: ConfigDict) -> dict[str, int]:
    """A port for each server that is started here, as configured or free; kept for the whole run, restarts included."""
    ports, bases = {}, base_configs(config)
    for base, names in engines_by_base(config).items():
        engine = bases[base].engine
        for index, name in enumerate(() if engine.urls else names):
            ports[name] = engine.port + index if engine.port else free_port()
    return {**ports, "dataflow": config.dataflow.port or free_port()}


def write_endpoints(config: ConfigDict, run_dir: Path, ports: dict[str, int]) -> None:
    """`endpoints.json`, where roles find each other, and the engines that run elsewhere."""
    bases = base_configs(config)
    given = {
        name: url
        for base, names in engines_by_base(config).items()
        for name, url in zip(names, bases[base].engine.urls, strict=False)
    }
    hosts = {"dataflow": reachable(config.dataflow.host)}
    started = {name: f"http://{hosts.get(name, '127.0.0.1')}:{port}" for name, port in ports.items()}
    replace_file(run_dir / "endpoints.json", json.dumps({**given, **started}))


def missing_bases(config: ConfigDict) -> list[str]:
    """Nano base models that have to be made first, each folder once; none where no role here reads them."""
    if {"rollout", "trainer"} <= set(config.elsewhere):
        return []
    missing = {
        own.model.path: base
        for base, own in reversed(base_configs(config).items())
        if own.model.nano is not None and not (Path(own.model.path) / "config.json").exists()
    }
    return list(reversed(missing.values()))


def warm_start_roles(config: ConfigDict, run_dir: Path, devices: Devices) -> list[Role]:
    """What makes the missing nano base models, one after the other."""
    return [
        Role(
            "warm_start" if base == BASE_NAME else f"warm_start-{base}",
            [sys.executable, "-m", "flowjax.trainer.warm_start", f"--run={run_dir}", f"--base={base}"],
            env={**_OFFLINE, **HUGE_PAGES, **devices.trainer_env()},
            restarts=1,
            finite=True,
        )
        for base in missing_bases(config)
    ]


def engine_roles(config: ConfigDict, run_dir: Path, ports: dict[str, int], devices: Devices) -> list[Role]:
    """The engines that are started here, each supervised and restarted on its own."""
    from flowjax.rollout.sidecar import engine_command

    roles, bases, taken = [], base_configs(config), 0
    for base, names in engines_by_base(config).items():
        engine = bases[base].engine
        for replica, name in enumerate(() if engine.urls else names):
            argv, env = engine_command(config, run_dir, ports[name], replica, base=base)
            own = Role(
                name,
                argv,
                env={**_OFFLINE, **devices.engine_env(taken, engine.tensor_parallel), **env},
                health=partial(answers, "127.0.0.1", ports[name], "/health"),
                restarts=engine.max_restarts,
                start_timeout_s=engine.start_timeout_s,
            )
            roles.append(own)
            taken += engine.tensor_parallel
    return roles


def _trainer_command(config: ConfigDict, run_dir: Path, policy: str, devices: Devices) -> Sequence[str]:
    """A trainer, or all processes of one on this machine."""
    command = [sys.executable, "-m", "flowjax.trainer", f"--run={run_dir}", *([f"--policy={policy}"] if policy else [])]
    if (count := processes_here(config)) == 1:
        return command
    return [sys.executable, str(_TOGETHER), json.dumps(devices.process_envs(count)), *command]


def run_roles(config: ConfigDict, run_dir: Path, ports: dict[str, int], devices: Devices) -> list[Role]:
    """Engines, dataflow, trainers and rollout, in the order in which they are started."""
    python = [sys.executable, "-m"]
    roles = [
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
                _trainer_command(config, run_dir, policy, devices),
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
    again = partial(_again, config, run_dir, ports, devices)
    roles = [replace(role, again=partial(again, role.name)) if role.name in ports else role for role in roles]
    return [role for role in roles if role.name not in config.elsewhere]


def _again(config: ConfigDict, run_dir: Path, ports: dict[str, int], devices: Devices, name: str) -> tuple[Role, str]:
    """A server as it is started anew: at another port where somebody else has taken its own meanwhile.

    Who calls it learns of it by endpoints.json.

    Raises:
        OSError: the port is taken, and the config fixes it.
    """
    news, port = "", ports[name]
    if not can_bind(port):
        if name in fixed_ports(config):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), f"port {port}")
        ports[name] = free_port()
        write_endpoints(config, run_dir, ports)
        news = f"another process has taken port {port}: it listens at {ports[name]} from now on"
    return next(role for role in run_roles(config, run_dir, ports, devices) if role.name == name), news


def fixed_ports(config: ConfigDict) -> set[str]:
    """Servers whose ports the config gives."""
    bases = base_configs(config)
    fixed = {name for base, names in engines_by_base(config).items() if bases[base].engine.port for name in names}
    return fixed | ({"dataflow"} if config.dataflow.port else set())
