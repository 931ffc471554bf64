"""Immutable folders, the form in which an engine takes a version; those of a LoRA policy are PEFT's."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], peft_config: Mapping[str, Any]) -> None:
    """Write adapter_model.safetensors and adapter_config.json into a new folder."""
    with new_folder(folder) as unfinished:
        save_file(
            {name: np.ascontiguousarray(array) for name, array in tensors.items()},
            unfinished / "adapter_model.safetensors",
        )
        (unfinished / "adapter_config.json").write_text(json.dumps(dict(peft_config), indent=2))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed into place once all of it is on disk.

    `folder` either does not exist or is complete, also after a crash or a power cut. An existing one is never touched:
    engines may have its bytes cached under its path.
    """
    if folder.exists():
        raise FileExistsError(f"adapter folder {folder} exists already, and adapter folders never change")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        for path in unfinished.iterdir():
            _sync(path)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove_unfinished(parent: Path, policy: str) -> None:
    """Sweep what a killed writer of the policy's versions left in `parent`."""
    for path in parent.glob(f".{policy}@*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
