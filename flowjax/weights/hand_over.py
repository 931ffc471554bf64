"""The form in which a published version reaches the engine: a PEFT adapter beside others, or all weights in place.

Either is an immutable folder, which appears once all of it is on disk, under a name that no other weights ever had.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from flowjax.files import new_folder, shared_like_others
from flowjax.models.config import read_config
from flowjax.models.decoder import Decoder, base_specs
from flowjax.models.hf import save_decoder
from flowjax.models.lora import Lora, hf_targets, peft_tensors
from flowjax.models.shape import ModelConfig, ModelError
from flowjax.run import Policy
from flowjax.weights.publish import COMMIT_MARKER, HANDED_OVER, CheckpointError, read_adapter
from flowjax.workflows import served_version


def peft_config(lora: Lora, base_path: str) -> dict[str, Any]:
    """The adapter_config.json of PEFT and vLLM."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_path),
        "r": lora.rank,
        # The scale is written as plain LoRA's alpha / r, also of rsLoRA: PEFT joins experts' gate and up into one map
        # of twice the rank and alpha. That keeps alpha / r, but not rsLoRA's alpha / sqrt(r).
        "lora_alpha": lora.scale * lora.rank,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": lora.dropout,
        "target_modules": hf_targets(lora),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }


def write_peft_folder(
    folder: Path, tensors: Mapping[str, np.ndarray], described: Mapping[str, Any], *, card: str = ""
) -> None:
    """Write adapter_model.safetensors and adapter_config.json into a new folder; also README.md, if there is a model
    card."""
    with new_folder(folder) as unfinished:
        path = unfinished / "adapter_model.safetensors"
        with shared_like_others(path):
            save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
        (unfinished / "adapter_config.json").write_text(json.dumps(dict(described), indent=2))
        if card:
            (unfinished / "README.md").write_text(card)


def link_folder(made: Path, folder: Path) -> None:
    """Make the folder of a version from files that are on this disk already: by hard links, else by copies."""
    with new_folder(folder) as unfinished:
        for path in made.iterdir():
            if path.name != COMMIT_MARKER:  # Orbax's own, of the folder as a part of a checkpoint
                _link(path, unfinished / path.name)


def link_version(checkpoint: Path, folder: Path) -> None:
    """Make `folder` a version like that of a committed checkpoint, with what engines need of it: it stays when a
    trainer deletes the checkpoint.

    Raises:
        CheckpointError: it has been deleted meanwhile.
    """
    needed = HANDED_OVER if (checkpoint / HANDED_OVER).exists() else "adapter"
    try:
        with new_folder(folder) as unfinished:
            shutil.copytree(checkpoint / needed, unfinished / needed, copy_function=_link)
            _link(checkpoint / COMMIT_MARKER, unfinished / COMMIT_MARKER)
    except OSError as error:
        if (checkpoint / COMMIT_MARKER).exists():
            raise
        raise CheckpointError(
            f"{checkpoint} has been deleted by its trainer, which keeps the newest alone: take a newer one, or raise "
            "config.trainer.keep_checkpoints in the next run"
        ) from error


def _link(path: os.PathLike[str] | str, to: os.PathLike[str] | str) -> None:
    """A hard link, or a copy where there can be none, of the same times: that of its marker is a version's commit."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)


def remove_unfinished(parent: Path, policy: str) -> None:
    """Delete unfinished folders of the policy's versions that a killed writer left in `parent`."""
    for path in parent.glob(f".{policy}@*"):
        shutil.rmtree(path, ignore_errors=True)


def model_name(policy: str, version: int, commit: str = "") -> str:
    """The engines' name of a version, with the commit of one that was made anew; `flowjax.workflows.served_version`
    reads it back."""
    return f"{policy}@{version}.{commit}" if commit else f"{policy}@{version}"


class ServedNames:
    """The engines' names of versions, and the commit that each has ever stood for.

    Written down before a name is used, and kept when its folder is gone: an engine that was away may still serve it,
    and one that has unloaded it may still have its prefixes cached.

    Args:
        path: of the file that holds them, one line `<name> <commit>` each; made if missing.
    """

    def __init__(self, path: Path):
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._commits = dict(line.split(" ") for line in lines if line.count(" ") == 1)
        self._newest = {served_version(name): name for name in self._commits}
        self._others: set[str] = set()

    def of(self, policy: str, version: int, commit: str | None) -> str:
        """The name of a version of that commit. If the commit is not known, since the checkpoint was thinned out, or is
        lost and not made anew yet: the name that was given last."""
        plain = model_name(policy, version)
        newest = self._newest.get((policy, version), plain)
        if commit is None or (self._commits.get(newest, commit) == commit and newest not in self._others):
            return newest
        return model_name(policy, version, commit)

    def commit(self, name: str) -> str:
        """The commit that a name stands for, "" where that was not written down."""
        return self._commits.get(name, "")

    def seen(self, names: Collection[str]) -> None:
        """Note the names that an engine lists. A name without a commit that was never written down here stands for
        weights of another run or folder: it will not be used for ours."""
        self._others.update(name for name in names if name not in self._commits and "." not in name.partition("@")[2])

    def note(self, name: str, commit: str) -> None:
        """Write down that the name, which `of` gave for the commit, stands for it."""
        if name not in self._commits:
            with self._path.open("a") as file:
                file.write(f"{name} {commit}\n")
            self._commits[name] = commit
        self._newest[served_version(name)] = name


class EngineWeights(Protocol):
    """The two ways of an engine to take weights."""

    async def load_adapter(self, name: str, path: Path) -> None: ...

    async def load_weights(self, name: str, path: Path) -> None: ...


class HandOver(Protocol):
    """A form of hand-over. `in_place`: a version replaces the one before it, so that the engine holds only one."""

    in_place: bool

    def write(self, folder: Path, arrays: Any) -> None:
        """Make the immutable folder of a version from the arrays of its checkpoint."""
        ...

    async def load(self, engine: Any, name: str, folder: Path) -> None:
        """Have the engine serve the folder as `name`."""
        ...


def make_folder(form: HandOver, checkpoints: Path, version: int, folder: Path) -> None:
    """Make the folder of a version: from `handed_over` of its checkpoint if it has that, else from its arrays.

    Raises:
        CheckpointError: it cannot be read.
    """
    if (made := checkpoints / str(version) / HANDED_OVER).exists():
        link_folder(made, folder)
    else:
        form.write(folder, read_adapter(checkpoints, version))


class PeftHandOver:
    """A LoRA adapter as PEFT lays it out; the engine holds several, beside its base."""

    in_place = False

    def __init__(self, model: ModelConfig, lora: Lora, base_path: str, dtype: str):
        self._model, self._lora, self._described = model, lora, peft_config(lora, base_path)
        self._dtype = jnp.dtype(dtype)  # the engine's: it would round the adapter so anyway, and files are smaller

    def tensors(self, arrays: Any) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
        """The adapter's tensors and its adapter_config.json."""
        return peft_tensors(arrays, self._model, self._lora), self._described

    def write(self, folder: Path, arrays: Any) -> None:
        tensors, described = self.tensors(arrays)
        write_peft_folder(folder, {name: x.astype(self._dtype) for name, x in tensors.items()}, described)

    async def load(self, engine: EngineWeights, name: str, folder: Path) -> None:
        await engine.load_adapter(name, folder)


class FullHandOver:
    """All weights as a Hugging Face folder in the engine's precision, loaded into the running model."""

    in_place = True

    def __init__(self, model: ModelConfig, dtype: str):
        self._model, self._dtype = model, dtype

    def write(self, folder: Path, arrays: Any) -> None:
        with new_folder(folder) as unfinished:
            save_decoder(decoder_of(self._model, arrays), unfinished, dtype=jnp.dtype(self._dtype))

    def writer(self, trained: nnx.State) -> Callable[[Path], None]:
        """Function that makes the folder of these arrays. They are copied off the devices at once, in the engine's
        precision, since the trainer goes on to change them."""
        arrays = jax.tree.map(lambda leaf: np.array(leaf.astype(self._dtype)), nnx.to_pure_dict(trained))
        return partial(self.write, arrays=arrays)

    async def load(self, engine: EngineWeights, name: str, folder: Path) -> None:
        await engine.load_weights(name, folder)


def hand_over(policy: Policy) -> HandOver:
    """The form that a policy needs."""
    base = policy.base
    model = read_config(Path(base.model.path))
    if policy.train == "full":
        return FullHandOver(model, base.engine.dtype)
    return PeftHandOver(model, Lora(**policy.lora.to_dict()), base.model.path, base.engine.dtype)


def decoder_of(model: ModelConfig, arrays: Mapping[str, Any]) -> Decoder:
    """A decoder without adapter around the host arrays of a full checkpoint; nothing is put on a device.

    Raises:
        ModelError: an array is missing or has another shape.
    """
    decoder = nnx.eval_shape(lambda: Decoder(model, dtype=jnp.float32, key=jax.random.key(0)))
    layers = arrays.get("layers", {})
    for name, spec in base_specs(model, jnp.float32).items():
        array = layers.get(name, arrays.get(name))
        if array is None or np.shape(array) != tuple(spec.shape):
            found = "is missing" if array is None else f"has shape {np.shape(array)} instead of {tuple(spec.shape)}"
            raise ModelError(f"the checkpoint's {name} {found}: it belongs to another model, or holds an adapter")
        decoder.parameter(name).set_value(array)
    return decoder
