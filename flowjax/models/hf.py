"""Hugging Face model folders: safetensors straight into sharded arrays, and merged models back out. No torch."""

import argparse
import contextlib
import functools
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from flowjax.files import new_folder, shared_like_others
from flowjax.models.config import hf_config, read_config
from flowjax.models.decoder import Decoder, base_specs, init_adapter, make_placement
from flowjax.models.lora import ALL_TARGETS, Lora, hf_modules, merge
from flowjax.models.params import SPARSE, ParamSpec, owners
from flowjax.models.quantize import quantized_matrix
from flowjax.models.shape import ModelConfig, ModelError
from flowjax.models.sharding import ShardingRules

SHARD_BYTES = 4 * 2**30
PIECE_BYTES = 2**29  # host memory of one read
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_OUTER = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_LAYER = {
    "input_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_POST_NORMS = {  # with four norms a layer (Gemma), post_attention_layernorm is another norm than above
    "attention_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}
# Weights have a scale for each output; the engine rounds inputs at run time, with a scale for each token.
_INT8: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    }
}
_ORIGIN = "int8.json"  # file in an int8 copy that says what it was made from
_TEXT_PARTS = ("language_model.model.", "model.language_model.")  # in image models: older and newer folders
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def hf_names(name: str, config: ModelConfig) -> np.ndarray:
    """The Hugging Face tensors of our parameter `name`: one [], one per layer [layers], or [layers, experts]."""
    if name in _OUTER:
        return np.array(_OUTER[name])
    layers = owners(name, config)
    in_layer = _LAYER | (_POST_NORMS if config.post_norms else {})
    if name in in_layer:
        return np.array([f"model.layers.{layer}.{in_layer[name]}" for layer in layers])
    # What is left is a linear map, or its bias.
    target, suffix = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    return np.char.add(hf_modules(target, config), f".{suffix}")


def _transposed(name: str) -> bool:
    """True for linear maps, which are [out, in] in the files and [in, out] here; an embedding is the same in both."""
    return name in ("lm_head", *ALL_TARGETS, *SPARSE)


class TensorFolder:
    """The tensors of a folder's safetensors files, read slice by slice."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                files = dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise ModelError(f"{index} cannot be read ({error}): download it again") from error
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                raise ModelError(
                    f"{folder} has no *.safetensors file: download the model in safetensors format "
                    "(PyTorch .bin files are not read)"
                )
            files = {}
            # Mistral's own layout of the same weights may lie beside them: "consolidated.safetensors".
            for path in [each for each in paths if not each.name.startswith("consolidated")] or paths:
                names = set(self._open(path).keys())
                if twice := sorted(names & files.keys()):  # engines read all files, and the last would count
                    raise ModelError(f"{folder} has {twice[0]} in {files[twice[0]]} and in {path.name}: remove one")
                files |= dict.fromkeys(names, path.name)
        self._names = {_text_name(name): name for name in files if not name.startswith(_OTHER_PARTS)}
        self._files: dict[str, str] = files
        self._handles: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> set[str]:
        """Names of the text model's tensors, without the prefixes that they have in an image model."""
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part of a tensor that `index` cuts out."""
        return self._slice(name)[index]

    def _slice(self, name: str) -> Any:
        name = self._names[name]
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = self._open(self.folder / file)
        return self._handles[file].get_slice(name)

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safetensors.safe_open(str(path), framework="np")
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}): download it again") from error


def _text_name(name: str) -> str:
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    prefix = next((part for part in _TEXT_PARTS if name.startswith(part)), None)
    return name if prefix is None else f"model.{name.removeprefix(prefix)}"


def load_decoder(
    folder: str | Path,
    *,
    lora: Lora | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    remat: str = "layer",
    attention: str = "auto",
    quantize: str = "",
    key: jax.Array | None = None,
) -> Decoder:
    """The model of a Hugging Face folder, with a fresh adapter if `lora` is given, its matrices quantised if asked for.

    Weights go from the files straight to the devices that hold them. Host memory holds one piece at a time: a few
    layers of one device's part of a parameter, `PIECE_BYTES` at most unless a single layer has more.

    Raises:
        ModelError: the folder, a tensor or a shape is not what config.json promises, or the mesh does not divide it.
    """
    folder = Path(folder)
    config = read_config(folder)
    specs = base_specs(config, dtype)
    tensors = TensorFolder(folder)
    _check_tensors(tensors, specs, config)
    placement = make_placement(config, mesh, rules)
    key = jax.random.key(0) if key is None else key
    options: dict[str, Any] = {"remat": remat, "attention": attention, "mesh": mesh, "rules": rules}
    decoder = nnx.eval_shape(lambda: Decoder(config, lora=lora, dtype=dtype, key=key, **options))  # shapes, no arrays
    for name, spec in specs.items():
        sharding = placement.of(spec.axes) if placement else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        read = functools.partial(_read_part, tensors, name, spec, config)
        parts = [
            _stream(read, spec, index, device)
            for device, index in sharding.addressable_devices_indices_map(spec.shape).items()
        ]
        array = jax.make_array_from_single_device_arrays(spec.shape, sharding, parts)
        quantized = quantize and name in ALL_TARGETS
        decoder.parameter(name).set_value(quantized_matrix(array, quantize) if quantized else array)
    if lora is not None:
        for target, parts in init_adapter(config, lora, key, placement).items():
            for part, array in parts.items():
                decoder.adapter[target][part].set_value(array)
    return decoder


def check_weights(folder: Path) -> None:
    """Raise ModelError for a folder that `load_decoder` would refuse. Reads config.json and the heads of the files."""
    config = read_config(folder)
    _check_tensors(TensorFolder(folder), base_specs(config, jnp.float32), config)


def _check_tensors(tensors: TensorFolder, specs: dict[str, ParamSpec], config: ModelConfig) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for name, spec in specs.items():
        names = hf_names(name, config)
        shape = spec.shape[names.ndim :]
        wanted |= dict.fromkeys(names.reshape(-1).tolist(), shape[::-1] if _transposed(name) else shape)
    missing = sorted(name for name in wanted if name not in tensors)
    if missing:
        raise ModelError(
            f"{tensors.folder} lacks {len(missing)} tensors that its config.json calls for, such as {missing[0]}: "
            "the download is incomplete, or config.json belongs to another model"
        )
    for name, shape in wanted.items():
        if tensors.shape(name) != shape:
            raise ModelError(
                f"{tensors.folder}: {name} has shape {tensors.shape(name)}, and config.json makes it {shape}: "
                "config.json belongs to another model"
            )
    # Some folders also store a tied head, or the rotary frequencies, which follow from config.json.
    ignored = {_OUTER["lm_head"]} if config.tie_embeddings else set()
    if any(name in tensors and not _same(tensors, name, _OUTER["embedding"]) for name in ignored):
        raise ModelError(f"{tensors.folder}: lm_head.weight is not the embedding: set tie_word_embeddings to false")
    unknown = sorted(n for n in tensors.names() - set(wanted) - ignored if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ModelError(
            f"{tensors.folder} has {len(unknown)} tensors that a {config.architecture} model does not use, such as "
            f"{unknown[0]}: adapters must be merged, and quantised models are not supported"
        )


def _same(tensors: TensorFolder, name: str, other: str) -> bool:
    """True for two tensors with the same numbers; a thousand rows at a time, since tables are large."""
    shape = tensors.shape(other)
    cuts = [(slice(first, min(first + 1000, shape[0])),) for first in range(0, shape[0], 1000)]
    return tensors.shape(name) == shape and all(
        np.array_equal(tensors.read(name, cut), tensors.read(other, cut)) for cut in cuts
    )


def _read_part(tensors: TensorFolder, name: str, spec: ParamSpec, config: ModelConfig, index: Any) -> np.ndarray:
    """One device's part of a parameter: `index` is in our layout, stacked and [in, out]."""
    names = hf_names(name, config)
    # The first axes of the index choose tensors, by layer and expert; the others cut a part out of each in the file.
    names, index = np.asarray(names[index[: names.ndim]]), index[names.ndim :]
    file_index = index[::-1] if _transposed(name) else index
    shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, spec.shape[-len(index) :], strict=True))
    part = np.empty((*names.shape, *shape), np.dtype(spec.dtype))
    for place in np.ndindex(names.shape):
        values = tensors.read(str(names[place]), file_index)
        part[place] = values.T if _transposed(name) else values
    return part


def _stream(read: Callable[[Any], np.ndarray], spec: ParamSpec, index: Any, device: Any) -> jax.Array:
    """One device's part of a parameter, put there in pieces of a few layers, or of a few rows of a table."""
    shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, spec.shape, strict=True))
    start, stop, _ = index[0].indices(spec.shape[0])
    slice_bytes = math.prod(shape[1:]) * np.dtype(spec.dtype).itemsize
    step = max(1, PIECE_BYTES // max(1, slice_bytes))
    if step >= stop - start:
        return jax.device_put(read(index), device)
    array = jnp.zeros(shape, spec.dtype, device=device)
    for first in range(start, stop, step):
        array = _write_piece(
            array, read((slice(first, min(first + step, stop)), *index[1:])), jnp.asarray(first - start)
        )
        array.block_until_ready()  # the piece is free before the next is read
    return array


# Donated, so that the piece is written in place: otherwise the part would be in memory twice.
@functools.partial(jax.jit, donate_argnums=0)
def _write_piece(array: jax.Array, piece: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, piece, first, axis=0)


def merged_tensors(decoder: Decoder, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, tensor) of the base with the adapter merged in, in float32 and then cast once."""
    config, lora = decoder.config, decoder.lora
    for name in base_specs(config, dtype):
        array = decoder.parameter(name).get_value()
        names = hf_names(name, config)
        for place in np.ndindex(names.shape):
            values = np.asarray(array[place])
            if lora is not None and name in decoder.adapter:
                a, b = (np.asarray(decoder.adapter[name][part].get_value()[place]) for part in ("a", "b"))
                values = merge(values, a, b, lora.scale)
            with np.errstate(over="ignore"):
                values = values.astype(np.dtype(dtype))
            if values.dtype == np.float16 and not np.isfinite(values).all():
                raise ModelError(f"{names[place]} has numbers that float16 does not hold, or not finite: use bfloat16")
            yield str(names[place]), np.ascontiguousarray(values.T if _transposed(name) else values)


def save_decoder(
    decoder: Decoder, folder: str | Path, *, dtype: DTypeLike | None = None, tokenizer: str | Path | None = None
) -> None:
    """Write the decoder, its adapter merged in, as a Hugging Face folder; copy the tokenizer's files if it is given.

    `dtype` is that of the decoder unless stated. Files hold at most `SHARD_BYTES` of tensors, in memory one at a time.
    """
    folder, dtype = Path(folder), np.dtype(decoder.dtype if dtype is None else dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    files = _write_shards(merged_tensors(decoder, dtype), folder)
    if len(set(files.values())) > 1:
        total = decoder.config.parameter_count() * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(hf_config(decoder.config, dtype.name), indent=2))
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        source = Path(tokenizer or "") / name
        if source.exists() and source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)


def save_int8(model: str | Path, folder: str | Path, *, largest_code: int = 127) -> None:
    """Write a Hugging Face folder's model anew with its layers' matrices in int8, in vLLM's compressed-tensors format.

    Each output has a scale and is rounded as in `flowjax.models.quantize`; the engine rounds each token's inputs as it
    multiplies. Embedding, head, norms and biases stay. The folder appears once it is complete, and says in `int8.json`
    what it was made from: a copy of the same files and `largest_code` is left as it is, another copy is replaced.

    Args:
        largest_code: 63 for engines on CPUs. Those without VNNI add two products in 16 bits before they go on in 32;
            with codes up to 127 such sums saturate, and vLLM's products were wrong by a quarter of the largest.

    Raises:
        ModelError: the model has experts or is not what its config.json promises, or `folder` is there and is no int8
            copy.
        OSError: it cannot be written; nothing of it is left.
    """
    model, folder = Path(model), Path(folder)
    config, tensors = read_config(model), TensorFolder(model)
    if config.experts is not None:
        raise ModelError(
            f"{model} has experts, which are not stored in int8: set config.engine.quantize to 'fp8' or ''"
        )
    specs = base_specs(config, jnp.float32)
    _check_tensors(tensors, specs, config)
    origin = _origin(model, largest_code)
    with contextlib.suppress(OSError, ValueError):
        if json.loads((folder / _ORIGIN).read_text()) == origin:
            return
    if folder.exists():
        if not (folder / _ORIGIN).exists():
            raise ModelError(f"folder {folder} is there already and no int8 copy: name a new one, or remove it")
        shutil.rmtree(folder)
    for left in folder.parent.glob(f".{folder.name}.*"):  # unfinished folders of killed processes
        shutil.rmtree(left, ignore_errors=True)
    matrices = {name for target in ALL_TARGETS if target in specs for name in hf_names(target, config).flat}

    def parts() -> Iterator[tuple[str, np.ndarray]]:
        for name in sorted(tensors.names()):
            values = tensors.read(name, (slice(None),) * len(tensors.shape(name)))
            if name not in matrices:
                yield name, values
                continue
            values = values.astype(np.float32)
            top = np.abs(values).max(axis=1, keepdims=True)
            scales = np.where(top > 0, top, 1.0) / np.float32(largest_code)
            yield name, np.round(values / scales).astype(np.int8)
            yield f"{name}_scale", scales.astype(np.float32)

    with new_folder(folder) as unfinished:
        files = _write_shards(parts(), unfinished)
        if len(set(files.values())) > 1:
            (unfinished / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        (unfinished / "config.json").write_text(json.dumps(hf_config(config, "bfloat16") | _INT8, indent=2))
        for source in (model / name for name in TOKENIZER_FILES):
            if source.exists():
                shutil.copyfile(source, unfinished / source.name)
        (unfinished / _ORIGIN).write_text(json.dumps(origin))


def _origin(model: Path, largest_code: int) -> dict[str, Any]:
    """The source of an int8 copy: the model's files with their sizes and times, and the codes' bound."""
    files = (path for path in sorted(model.iterdir()) if path.suffix in (".safetensors", ".json", ".jinja"))
    stats = {path.name: path.stat() for path in files}
    return {
        "model": str(model.resolve()),
        "files": {name: [found.st_size, found.st_mtime_ns] for name, found in stats.items()},
        "largest_code": largest_code,
    }


def _write_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path) -> dict[str, str]:
    """Write safetensors files; returns the file of each tensor. One file alone is called model.safetensors.

    Final names have the number of files in them, so files are renamed at the end.
    """
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        shards.append(list(pending))
        path = folder / f"part-{len(shards)}.safetensors"
        with shared_like_others(path):
            save_file(pending, str(path), metadata={"format": "pt"})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(x.nbytes for x in pending.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor
    flush()
    files = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / file)
        files |= dict.fromkeys(names, file)
    return files


def main() -> None:
    """An int8 copy of a model's folder, for the run's engines."""
    # absl's flags are one table for all that a process imports.
    parser = argparse.ArgumentParser("python -m flowjax.models.hf", description=main.__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder of the base model")
    parser.add_argument("--int8", required=True, help="folder to write; a copy of the same is left as it is")
    parser.add_argument("--largest_code", type=int, default=127, help="63 for engines on CPUs")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, at which the unfinished copy is removed
    try:
        save_int8(given.model, given.int8, largest_code=given.largest_code)
    except (ModelError, OSError, safetensors.SafetensorError) as error:
        sys.exit(f"{given.int8} cannot be made: {error}")


if __name__ == "__main__":
    main()
