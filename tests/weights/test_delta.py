"""Packed versions stand for their folders bit for bit, against whatever base, or say that they do not."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from flowjax.weights import delta
from flowjax.weights.delta import DeltaError, open_folder, pack_folder
from tests.benchmarks.weights import row

KINDS = (ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32)


def write(folder: Path, tensors: dict[str, np.ndarray], **files: str) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    for name, text in {"config": "{}", **files}.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def through(folder: Path, base: Path | None, known: Path | None = None) -> int:
    """Pack and open; the size of the packed version."""
    packed, opened = folder.parent / f"{folder.name}.pack", folder.parent / f"{folder.name}.opened"
    pack_folder(folder, base, packed)
    opened.mkdir()
    open_folder(packed, known or base, opened)
    assert contents(opened) == contents(folder)
    return packed.stat().st_size


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.lists(st.integers(0, 20), min_size=0, max_size=3),
    changed=st.floats(0, 1),
    chunk=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_come_through(tmp_path_factory, kind, shape, changed, chunk, seed):
    rng = np.random.default_rng(seed)

    def bits() -> np.ndarray:
        array = np.zeros(shape, kind)
        return np.frombuffer(rng.bytes(array.nbytes), kind).reshape(shape).copy()  # NaN of every kind among them

    old = bits()
    new = np.where(rng.random(shape) < changed, bits(), old).astype(kind)
    same = bits()
    place = tmp_path_factory.mktemp("delta")
    before = write(place / "before", {"moved": old, "same": same, "gone": old})
    after = write(place / "after", {"moved": new, "same": same, "new": new}, config='{"a": 1}', further="x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_NUMBERS", chunk)
        through(after, None)
        for path in place.glob("after.*"):
            path.unlink() if path.is_file() else [file.unlink() for file in path.iterdir()] and path.rmdir()
        through(after, before)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_of_any_length(tmp_path, gap):
    old = np.zeros(200_000, np.float32)
    new = old.copy()
    new[[gap, 2 * gap + 1]] = 1.0
    through(write(tmp_path / "after", {"x": new}), write(tmp_path / "before", {"x": old}))


def test_a_tensor_of_another_shape_or_kind_has_no_base(tmp_path):
    before = write(tmp_path / "before", {"x": np.zeros(8, np.float32), "y": np.zeros(8, np.float32)})
    after = write(tmp_path / "after", {"x": np.zeros(16, np.float16), "y": np.zeros((2, 4), np.float32)})
    through(after, before)


def test_a_thousand_versions_in_a_chain_are_the_last_one_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=4096).astype(ml_dtypes.bfloat16)
    made = known = write(tmp_path / "0", {"x": weights})
    for number in range(1, 1001):
        moved = rng.random(weights.shape) < rng.choice([0.001, 0.025, 0.9])
        weights = np.where(moved, 1.01 * weights.astype(np.float32), weights).astype(ml_dtypes.bfloat16)
        made = write(tmp_path / f"made-{number}", {"x": weights})
        opened = tmp_path / str(number)
        opened.mkdir()
        pack_folder(made, known, tmp_path / "pack")
        open_folder(tmp_path / "pack", known, opened)
        known = opened
    assert contents(known) == contents(made)


def adam_like(numbers: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 weights before and after a small step: so many differ, nearly all by one in the last place."""
    rng = np.random.default_rng(0)
    old = (0.02 * rng.normal(size=numbers)).astype(ml_dtypes.bfloat16)
    bits = old.view(np.uint16).copy()
    moved = rng.random(numbers) < share
    bits[moved] += rng.choice(
        np.array([1, 65535, 2, 65534], np.uint16), size=int(moved.sum()), p=[0.48, 0.48, 0.02, 0.02]
    )
    return old, bits.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("share", "most_bytes"), [(0.01, 1.5), (0.025, 1.4), (0.1, 1.2)])
def test_bytes_for_each_number_that_differs(tmp_path, share, most_bytes):
    old, new = adam_like(2**22, share)
    size = through(write(tmp_path / "after", {"x": new}), write(tmp_path / "before", {"x": old}))
    assert size / (old.view(np.uint16) != new.view(np.uint16)).sum() < most_bytes


def test_another_base_than_it_was_packed_against_is_noticed(tmp_path):
    old, new = adam_like(10_000, 0.1)
    before = write(tmp_path / "before", {"x": old})
    after = write(tmp_path / "after", {"x": new})
    pack_folder(after, before, tmp_path / "pack")
    other = write(tmp_path / "other", {"x": new})
    (tmp_path / "opened").mkdir()
    with pytest.raises(DeltaError, match=r"model\.safetensors is not what was packed: its base is another"):
        open_folder(tmp_path / "pack", other, tmp_path / "opened")
    with pytest.raises(DeltaError, match="it needs a base, and there is none"):
        open_folder(tmp_path / "pack", None, tmp_path / "opened")


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    old, new = adam_like(3000, 0.1)
    before, after = write(tmp_path / "before", {"x": old}), write(tmp_path / "after", {"x": new})
    pack_folder(after, before, tmp_path / "pack")
    packed = (tmp_path / "pack").read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(packed), size=min(300, len(packed)), replace=False):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "damaged").write_bytes(damaged)
        opened = tmp_path / f"opened-{place}"
        opened.mkdir()
        try:
            open_folder(tmp_path / "damaged", before, opened)
        except DeltaError:
            continue
        assert contents(opened) == contents(after), f"byte {place} of {len(packed)}"


def test_files_outside_are_not_written(tmp_path):
    before = write(tmp_path / "before", {"x": np.zeros(3, np.float32)})
    pack_folder(before, None, tmp_path / "pack")
    data = (tmp_path / "pack").read_bytes()
    _, length = delta._END.unpack(data[-delta._END.size :])
    index = data[-delta._END.size - length : -delta._END.size].replace(b"config.json", b"../evil.jsn")
    forged = data[: -delta._END.size - length] + index + delta._END.pack(delta._mark(index), length)
    (tmp_path / "pack").write_bytes(forged)
    (tmp_path / "opened").mkdir()
    with pytest.raises(DeltaError, match="outside"):
        open_folder(tmp_path / "pack", None, tmp_path / "opened")
    assert not (tmp_path / "evil.jsn").exists()
    assert json.loads((before / "config.json").read_text()) == {}


@pytest.mark.parametrize(("changed", "megabytes"), [(1, "0.12"), (1 << 16, "0.12"), ((1 << 16) + 1, "0.24")])
def test_the_benchmark_counts_astraflows_delta_in_halves_of_a_float32(tmp_path: Path, changed: int, megabytes: str):
    """An index of 4 bytes and a value of 2 for each 16 bits that differ."""
    bits = np.full(20_000, 0x3F800000, np.uint32)
    base, new = (write(tmp_path / name, {"w": array}) for name, array in (("base", bits), ("new", bits ^ changed)))
    assert row("made", base, new, tmp_path).split(" | ")[3] == megabytes
