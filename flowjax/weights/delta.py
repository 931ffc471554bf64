"""Versions of weights as they travel: whole, or as a delta against a version that the receiver has, the base.

A packed version stands for a folder of safetensors and other files, bit for bit. Each tensor is cut into chunks, and
each chunk takes one of three forms: sparse where few numbers differ, else the smaller of the other two. All are byte
planes (the first bytes of all numbers, then the second ones, ...) compressed by zstd:

    whole    its numbers
    dense    the differences to the base's numbers, as integers in zigzag code: small ones of either sign are small
    sparse   the differences of only those numbers that differ, after the gaps between them (a byte each, up to 254)

AstraFlow's deltas are an index of four bytes and a value of two for each 16 bits that differ (its sender_agent.py);
SkyRL's are an exclusive or (XOR) under zstd. After a step of Adam most bfloat16 numbers are unchanged, and the others
differ in their last bits: sparse takes a little over one byte for each (`python -m tests.benchmarks.weights`).
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgpack
import numpy as np
import zstandard
from jaxtyping import Int, UInt

from flowjax.files import digest_of

CHUNK_NUMBERS = 2**20  # of a tensor that are coded together: a few MB, which the processor's cache holds
_SPARSE_BELOW = 0.4  # share of numbers that differ, above which coding their places costs more than it saves
_LEVEL = 1  # of zstd: planes of small differences shrink no further with more
_NUMBER_BYTES = {"F64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_END = struct.Struct("<32sQ")  # digest and length of the index before it
_GAP = 255  # a byte of this value adds 255 to a gap, which goes on with the next byte; any other value ends the gap


class DeltaError(ValueError):
    """A packed version that cannot be opened with the base that is there; says why."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Place of a tensor in its file; `number_bytes` is 1 where its kind of number is not known here."""

    name: str
    kind: tuple[Any, ...]
    start: int
    end: int
    number_bytes: int


class _TensorFile:
    """A safetensors file: its head as it stands there, and its tensors in the order of their data."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            size = file.read(8)
            self.head = size + file.read(struct.unpack("<Q", size)[0])
        self.tensors = _tensors(self.head)
        self._alike = {(tensor.name, tensor.kind): tensor for tensor in self.tensors}  # up to 37,000, with experts
        self._data = np.memmap(path, np.uint8, "r", offset=len(self.head)) if self.tensors else np.zeros(0, np.uint8)

    def numbers(self, tensor: _Tensor) -> UInt[np.ndarray, "numbers"]:
        """A tensor's numbers as unsigned integers of their size; nothing is read yet."""
        return self._data[tensor.start : tensor.end].view(_UNSIGNED[tensor.number_bytes])

    def like(self, tensor: _Tensor) -> UInt[np.ndarray, "numbers"] | None:
        """The numbers of the tensor of the same name, type and shape, if there is one."""
        found = self._alike.get((tensor.name, tensor.kind))
        return None if found is None else self.numbers(found)


def _tensors(head: bytes) -> list[_Tensor]:
    described = json.loads(head[8:])
    described.pop("__metadata__", None)
    tensors = []
    for name, each in described.items():
        start, end = each["data_offsets"]
        kind = each["dtype"], tuple(each["shape"])
        tensors.append(_Tensor(name, kind, start, end, _NUMBER_BYTES.get(each["dtype"], 1)))
    return sorted(tensors, key=lambda tensor: tensor.start)


def pack_folder(folder: Path, base: Path | None, target: Path) -> None:
    """Write the files of `folder` into one file, as a delta against `base`, or whole without a base."""
    files = []
    with target.open("wb") as out:
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            entry: dict[str, Any] = {"name": path.name, "digest": digest_of(path)}
            if path.suffix == ".safetensors":
                new = _TensorFile(path)
                entry |= {"head": new.head, "chunks": list(_write_chunks(out, new, _base_of(path.name, base)))}
            else:
                entry["content"] = path.read_bytes()
            files.append(entry)
        # At the end, because the sizes of chunks are known only once they are compressed.
        index = cast(bytes, msgpack.packb(files))
        out.write(index + _END.pack(_mark(index), len(index)))


def _base_of(name: str, base: Path | None) -> _TensorFile | None:
    return _TensorFile(base / name) if base is not None and (base / name).exists() else None


def _write_chunks(out: BinaryIO, new: _TensorFile, base: _TensorFile | None) -> Iterator[list[int | str]]:
    """Write the chunks of a file. Yields [form, bytes of its first part, bytes of its second]."""
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    for tensor in new.tensors:
        numbers, before = new.numbers(tensor), base.like(tensor) if base else None
        for start in range(0, len(numbers), CHUNK_NUMBERS):
            cut = slice(start, start + CHUNK_NUMBERS)
            form, parts = _in_some_form(numbers[cut], None if before is None else before[cut], compress)
            out.writelines(parts)
            yield [form, *(len(part) for part in parts)]


def _in_some_form(new: np.ndarray, base: np.ndarray | None, compress: Any) -> tuple[str, list[bytes]]:
    if base is None:
        return "whole", [compress(_planes(new))]
    places = np.flatnonzero(new != base)  # of bits: as integers, also 0.0 and -0.0 differ, and a NaN equals itself
    if len(places) <= _SPARSE_BELOW * len(new):
        difference = _zigzag(new[places] - base[places])
        return "sparse", [compress(_gaps(places)), compress(_planes(difference))]
    whole, dense = compress(_planes(new)), compress(_planes(_zigzag(new - base)))
    return ("dense", [dense]) if len(dense) < len(whole) else ("whole", [whole])


def open_folder(packed: Path, base: Path | None, folder: Path) -> None:
    """Write the files that a packed version stands for into `folder`, which exists and is empty.

    Raises:
        DeltaError: `base` is not the one it was packed against, or the file is damaged.
        OSError: the file cannot be read, or the folder cannot be written.
    """
    try:
        with packed.open("rb") as source:
            for entry in _index(source, packed.stat().st_size):
                if Path(entry["name"]).name != entry["name"]:
                    raise DeltaError(f"it names the file {entry['name'][:100]!r}, which lies outside")
                with (folder / entry["name"]).open("wb") as out:
                    _write_file(out, entry, source, base)
                if digest_of(folder / entry["name"]) != entry["digest"]:
                    raise DeltaError(f"{entry['name']} is not what was packed: its base is another, or it is damaged")
    except (DeltaError, OSError):
        raise
    except Exception as error:  # damage may look like anything
        raise DeltaError(f"{packed.name} is damaged ({type(error).__name__}: {error})") from error


def _index(source: BinaryIO, size_bytes: int) -> list[dict[str, Any]]:
    """The files of a packed version; `source` is then where their chunks begin."""
    if size_bytes < _END.size:
        raise DeltaError("it is cut off")
    source.seek(size_bytes - _END.size)
    mark, index_bytes = _END.unpack(source.read(_END.size))
    source.seek(max(size_bytes - _END.size - index_bytes, 0))
    index = source.read(index_bytes)
    if _mark(index) != mark:
        raise DeltaError("its index is damaged")
    source.seek(0)
    return msgpack.unpackb(index)


def _mark(index: bytes) -> bytes:
    return hashlib.sha256(index).digest()


def _write_file(out: BinaryIO, entry: Mapping[str, Any], source: BinaryIO, base: Path | None) -> None:
    if "content" in entry:
        out.write(entry["content"])
        return
    out.write(entry["head"])
    before = _base_of(entry["name"], base)
    decompress = zstandard.ZstdDecompressor().decompress
    chunks = iter(entry["chunks"])
    for tensor in _tensors(entry["head"]):
        known = before.like(tensor) if before else None
        count = (tensor.end - tensor.start) // tensor.number_bytes
        for start in range(0, count, CHUNK_NUMBERS):
            form, *sizes = next(chunks)
            parts = [decompress(source.read(size)) for size in sizes]
            length = min(CHUNK_NUMBERS, count - start)
            numbers = _numbers(form, parts, length, _UNSIGNED[tensor.number_bytes], known, start)
            out.write(numbers.tobytes())


def _numbers(form: str, parts: list[bytes], length: int, kind: Any, known: np.ndarray | None, start: int) -> np.ndarray:
    """The numbers of a chunk."""
    if form == "whole":
        return _from_planes(parts[0], kind)
    if known is None:
        raise DeltaError("it needs a base, and there is none")
    base = known[start : start + length]
    if form == "dense":
        return base + _from_zigzag(_from_planes(parts[0], kind))
    numbers = np.array(base)
    places = _from_gaps(parts[0])
    numbers[places] += _from_zigzag(_from_planes(parts[1], kind))
    return numbers


def _planes(numbers: UInt[np.ndarray, "numbers"]) -> bytes:
    """First bytes of all numbers, then the second ones, and so on."""
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T).tobytes()


def _from_planes(data: bytes, kind: Any) -> UInt[np.ndarray, "numbers"]:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(size, -1).T).view(kind).reshape(-1)


def _zigzag(difference: UInt[np.ndarray, "numbers"]) -> UInt[np.ndarray, "numbers"]:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...; differences are modulo the numbers' range, so that adding them is exact."""
    # A negative number shifted right by all bits but one is all ones, and XOR with that flips every bit.
    signed = difference.view(difference.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _from_zigzag(code: UInt[np.ndarray, "numbers"]) -> UInt[np.ndarray, "numbers"]:
    one = code.dtype.type(1)
    return (code >> one) ^ (~(code & one) + one)


def _gaps(places: Int[np.ndarray, "places"]) -> bytes:
    """Ascending places as gaps: for each, the count of numbers skipped before it, coded in bytes."""
    gaps = np.diff(places, prepend=-1) - 1
    # A gap of 600 is 255, 255, 90: as many bytes of 255 as fit, then the rest, which ends it and is below 255.
    ends = np.cumsum(gaps // _GAP + 1)
    coded = np.full(int(ends[-1]) if len(ends) else 0, _GAP, np.uint8)
    coded[ends - 1] = gaps % _GAP
    return coded.tobytes()


def _from_gaps(data: bytes) -> Int[np.ndarray, "places"]:
    coded = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(coded != _GAP)
    gaps = (np.diff(ends, prepend=-1) - 1) * _GAP + coded[ends]
    return np.cumsum(gaps + 1) - 1
