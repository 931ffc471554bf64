"""Immutable PEFT adapter folders, the form in which an engine takes a LoRA policy."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], peft_config: Mapping[str, Any]) -> None:
    """Write adapter_model.safetensors and adapter_config.json, then rename the whole folder into place.

    `folder` either does not exist or is complete, also after a crash or a power cut. An existing one is never touched:
    engines may have its bytes cached under its path.
    """
    if folder.exists():
        raise FileExistsError(f"adapter folder {folder} exists already, and adapter folders never change")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_file(
            {name: np.ascontiguousarray(array) for name, array in tensors.items()},
            unfinished / "adapter_model.safetensors",
        )
        (unfinished / "adapter_config.json").write_text(json.dumps(dict(peft_config), indent=2))
        unfinished.chmod(0o755)
        for path in unfinished.iterdir():
            _sync(path)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove_unfinished(parent: Path) -> None:
    """Sweep what a killed `write_peft_folder` left in `parent`."""
    for path in parent.glob(".*@*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
