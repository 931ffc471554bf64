"""The roles of a run: their commands, environments, health and patience."""

import ctypes.util
import errno
import functools
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowjax.config import BASE_NAME
from flowjax.launch.checks import in_base
from flowjax.launch.devices import Devices, processes_here
from flowjax.launch.machine import LOOPBACK, can_bind, free_port
from flowjax.launch.supervisor import Role, answers
from flowjax.monitor.token import is_loopback, reachable
from flowjax.run import Base, Run, write_endpoints

_TOGETHER = Path(__file__).with_name("together.py")
# Nothing is fetched or reported while a run lasts.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ON_CPU = {"JAX_PLATFORMS": "cpu"}  # these roles must not take memory from the trainer's devices
# For trainers without tcmalloc. What is smaller than 32 MiB, the most that glibc allows, is kept once it is free.
_KEPT = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296"
HUGE_PAGES = {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:{_KEPT}"}


def preloaded(accelerators: Sequence[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A variable that preloads tcmalloc for a process that computes on CPUs, where this machine has it.

    XLA and engines allocate their temporaries anew at every step. tcmalloc keeps that memory; glibc's malloc gives it
    back to the kernel, and waits until it is there again. Another allocator that `env` preloads stays.
    """
    loaded = env.get("LD_PRELOAD", "")
    if accelerators or "malloc" in loaded or (library := tcmalloc()) is None:
        return {}
    return {"LD_PRELOAD": f"{library}:{loaded}".strip(":")}


@functools.cache
def tcmalloc() -> str | None:
    """Name by which tcmalloc is loaded; None where this machine lacks it."""
    return ctypes.util.find_library("tcmalloc_minimal")


def trainer_roles(run: Run) -> dict[str, str]:
    """The trainers that are started here: name of the role -> the policy that it trains, "" for all policies."""
    if not run.trains:
        return {}
    if not run.config.separate_trainers:
        return {"trainer": ""}
    return {f"trainer-{policy}": policy for policy in run.policies}


def stop_order(run: Run) -> tuple[tuple[str, ...], ...]:
    """Waves of roles that stop one after the other: rollout and trainers first, then all others.

    On a run with a relay the dataflow stops before it: its last message to nodes goes through the relay.
    """
    together = ("rollout", *trainer_roles(run))
    return (together, ("dataflow",)) if run.is_relayed and not run.is_node else (together,)


def choose_ports(run: Run) -> dict[str, int]:
    """A port for each server that is started here, as configured or free; kept for the whole run, restarts included.

    Another process may take a free port before its server binds it: the restart then chooses another (`_again`).
    """
    ports = {engine.name: engine.port or free_port() for engine in run.engines if not engine.url}
    if not run.is_node:
        return {**ports, "dataflow": run.config.dataflow.port or free_port()}
    return {**ports, "relay": free_port()} if run.is_relayed else ports


def publish_endpoints(run: Run, ports: Mapping[str, int]) -> None:
    """Write `endpoints.json`, in which roles find each other and the engines that run elsewhere."""
    given = {engine.name: engine.url for engine in run.engines if engine.url}
    hosts = {"dataflow": reachable(run.config.dataflow.host)}
    started = {name: f"http://{hosts.get(name, '127.0.0.1')}:{port}" for name, port in ports.items()}
    given |= {"dataflow": str(started.get("relay", run.config.dataflow.url))} if run.is_node else {}
    write_endpoints(run.folder, {**given, **started})


def check_reached(run: Run) -> list[str]:
    """A problem where a trainer on other hosts cannot reach the dataflow's address in endpoints.json.

    Checked where the config names an address for others: the trainer's coordinator, or the dataflow's host, is not
    loopback by its text. A name can still resolve to loopback here, as a machine's own name does on Debian: then the
    dataflow would listen for this machine alone.
    """
    config, host = run.config, reachable(run.config.dataflow.host).strip("[]")
    first = config.trainer.coordinator.rpartition(":")[0].strip("[]")
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # no address of this machine: `check_ports` says so
        return []
    meant_for_others = (first and not is_loopback(first)) or not is_loopback(host)
    if not run.trained_remotely or not meant_for_others or not all(map(is_loopback, addresses)):
        return []
    alone = f"by which only this machine finds the dataflow ({min(addresses)}), and the trainer is on others"
    remedy = "give the address at which they reach this machine"
    return [f"config.dataflow.host is {config.dataflow.host!r}, {alone}: {remedy}"]


def missing_bases(run: Run) -> list[str]:
    """Names of nano base models that have to be made first, one for each folder; none where no role here reads them, or
    where a node fetches them."""
    if run.is_node or {"rollout", "trainer"} <= set(run.config.elsewhere):
        return []
    # Reversed twice: where several names have one folder, a dict keeps the last, which is then the first.
    missing = {
        base.model.path: name
        for name, base in reversed(run.bases.items())
        if base.model.nano is not None and not (Path(base.model.path) / "config.json").exists()
    }
    return list(reversed(missing.values()))


def warm_start_roles(run: Run, devices: Devices) -> list[Role]:
    """Roles that make the missing nano base models, one after the other."""
    return [
        Role(
            "warm_start" if base == BASE_NAME else f"warm_start-{base}",
            [sys.executable, "-m", "flowjax.trainer.warm_start", f"--run={run.folder}", f"--base={base}"],
            env={**OFFLINE, **HUGE_PAGES, **preloaded(devices.trainer), **devices.trainer_env()},
            restarts=1,
            finite=True,
        )
        for base in missing_bases(run)
    ]


def int8_roles(run: Run) -> list[Role]:
    """Roles that make the int8 copies for engines that start here. A copy that is there already is left as it is."""
    from flowjax.rollout.sidecar import largest_code, served_folder

    def command(base: Base) -> list[str]:
        argv = ["-m", "flowjax.models.hf", f"--model={base.model.path}", f"--int8={served_folder(run, base)}"]
        return [sys.executable, *argv, f"--largest_code={largest_code(base)}"]

    return [
        Role(
            "int8" if name == BASE_NAME else f"int8-{name}",
            command(base),
            env={**OFFLINE, **_ON_CPU},
            restarts=1,
            finite=True,
        )
        for name, base in run.bases.items()
        if base.engine.quantize == "int8" and base.engines
    ]


def drop_copies(run: Run) -> None:
    """Delete files that nobody reads once no role runs: int8 copies of base models, and versions packed for nodes."""
    from flowjax.dataflow.files import PACKED
    from flowjax.rollout.sidecar import INT8_FOLDER

    for name in (INT8_FOLDER, PACKED):
        shutil.rmtree(run.folder / name, ignore_errors=True)


def engine_roles(run: Run, ports: Mapping[str, int], devices: Devices) -> list[Role]:
    """The engines that are started here, each supervised and restarted on its own."""
    from flowjax.rollout.sidecar import engine_command

    roles, used = [], 0
    for engine in run.engines:
        if engine.url:
            continue
        settings, port = run.bases[engine.base].engine, ports[engine.name]
        argv, env = engine_command(run, engine, port)
        role = Role(
            engine.name,
            argv,
            env={**OFFLINE, **preloaded(devices.engine), **devices.engine_env(used, settings.tensor_parallel), **env},
            health=partial(answers, "127.0.0.1", port, "/health"),
            restarts=settings.max_restarts,
            start_timeout_s=settings.start_timeout_s,
            if_slow=in_base(engine.base, " (if it was loading, raise config.engine.start_timeout_s)"),
        )
        roles.append(role)
        used += settings.tensor_parallel
    return roles


def _trainer_command(run: Run, policy: str, devices: Devices) -> Sequence[str]:
    """The command of a trainer; of several processes on this machine it is `together.py` with the trainer's."""
    command = [
        sys.executable,
        "-m",
        "flowjax.trainer",
        f"--run={run.folder}",
        *([f"--policy={policy}"] if policy else []),
    ]
    if (count := processes_here(run.config.trainer)) == 1:
        return command
    return [sys.executable, str(_TOGETHER), json.dumps(devices.process_envs(count)), *command]


def _relay_roles(run: Run) -> list[Role]:
    """This machine's end of the connection to nodes (on a node: to the run), where a NATS server relays it."""
    if not run.is_relayed:
        return []
    return [
        Role(
            "relay",
            [sys.executable, "-m", "flowjax.relay", f"--run={run.folder}"],
            env={**OFFLINE, **_ON_CPU},
            restarts=run.config.max_restarts,
        )
    ]


def run_roles(run: Run, ports: dict[str, int], devices: Devices) -> list[Role]:
    """Engines, relay, dataflow (on a node: the mirror of the run), trainers and rollout, in the order in which they
    start."""
    python = [sys.executable, "-m"]
    roles = [
        *engine_roles(run, ports, devices),
        *_relay_roles(run),
        Role(
            "mirror",
            [*python, "flowjax.weights.mirror", f"--run={run.folder}"],
            env={**OFFLINE, **_ON_CPU},
            restarts=run.config.max_restarts,
        )
        if run.is_node
        else Role(
            "dataflow",
            [*python, "flowjax.dataflow", f"--run={run.folder}"],
            env={**OFFLINE, **_ON_CPU},
            health=partial(answers, reachable(run.config.dataflow.host).strip("[]"), ports["dataflow"], "/health"),
            restarts=run.config.max_restarts,
        ),
        *(
            Role(
                name,
                _trainer_command(run, policy, devices),
                env={**OFFLINE, **HUGE_PAGES, **preloaded(devices.trainer), **devices.trainer_env(index)},
                written=run.folder / f"status-{name}.json",
                restarts=run.config.max_restarts,
                finite=True,
            )
            for index, (name, policy) in enumerate(trainer_roles(run).items())
        ),
        Role(
            "rollout",
            [*python, "flowjax.rollout", f"--run={run.folder}"],
            env={**OFFLINE, **_ON_CPU},
            written=run.folder / "status-rollout.json",
            restarts=run.config.max_restarts,
        ),
    ]
    again = partial(_again, run, ports, devices)
    roles = [replace(role, again=partial(again, role.name)) if role.name in ports else role for role in roles]
    return [role for role in roles if role.name not in run.config.elsewhere]


def _again(run: Run, ports: dict[str, int], devices: Devices, name: str) -> tuple[Role, str]:
    """A server's role for a restart, and news: at another port if another process has taken the port meanwhile.

    Clients learn the new port from endpoints.json.

    Raises:
        OSError: the port is in use, and the config fixes it.
    """
    news, port = "", ports[name]
    if not can_bind(port, run.config.dataflow.host if name == "dataflow" else LOOPBACK):
        if name in fixed_ports(run):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), f"port {port}")
        ports[name] = free_port()
        publish_endpoints(run, ports)
        news = f"another process has taken port {port}: it listens at {ports[name]} from now on"
    return next(role for role in run_roles(run, ports, devices) if role.name == name), news


def fixed_ports(run: Run) -> set[str]:
    """Names of the servers whose ports the config gives."""
    fixed = {engine.name for engine in run.engines if engine.port}
    return fixed | ({"dataflow"} if run.config.dataflow.port else set())
