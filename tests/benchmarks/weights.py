"""Bytes and time of a version on its way: python -m tests.benchmarks.weights [--gigabytes=1] [--run=runs/<name>]

Prints a table in Markdown. Made weights: bfloat16 normals of which a share has moved by one or two in the last place,
as a step of Adam leaves them. With --run, consecutive versions of that run as an engine is given them. Compared are all
numbers; AstraFlow's delta (an index of 4 bytes and a value of 2 for each 16 bits that differ, its sender_agent.py, so
that a float32 number may count twice); an exclusive or with the base under zstd; and `flowjax.weights.delta`. Times are
of one core.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import zstandard
from absl import app, flags
from safetensors.numpy import load_file, save_file

from flowjax.run import read_run
from flowjax.weights.delta import open_folder, pack_folder
from flowjax.weights.hand_over import hand_over
from flowjax.weights.publish import committed_steps, read_adapter

STEPS = np.array([1, 65535, 2, 65534], np.uint16)
SHARES = (0.01, 0.025, 0.1)


def made(folder: Path, share: float, gigabytes: float) -> tuple[Path, Path]:
    """Folders of weights before and after a step."""
    rng = np.random.default_rng(0)
    base, new = {}, {}
    for index in range(max(1, round(gigabytes * 8))):
        old = (0.02 * rng.standard_normal(2**26, np.float32)).astype(ml_dtypes.bfloat16)
        bits = old.view(np.uint16).copy()
        moved = rng.random(bits.shape, np.float32) < share
        bits[moved] += rng.choice(STEPS, int(moved.sum()), p=[0.48, 0.48, 0.02, 0.02])
        base[f"layer-{index}"], new[f"layer-{index}"] = old, bits.view(ml_dtypes.bfloat16)
    for name, tensors in (("base", base), ("new", new)):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
    return folder / "base", folder / "new"


def of_run(folder: Path, run_dir: Path) -> Iterator[tuple[str, Path, Path]]:
    """The two newest versions of each policy, in the form that engines are given."""
    for name, policy in read_run(run_dir).policies.items():
        steps = committed_steps(run_dir / "checkpoints" / name)[-2:]
        if len(steps) < 2:
            raise SystemExit(f"{run_dir} has {len(steps)} versions of {name}: two are needed")
        for step in steps:
            hand_over(policy).write(folder / f"{name}@{step}", read_adapter(run_dir / "checkpoints" / name, step))
        yield f"{name} {steps[0]} to {steps[1]}", folder / f"{name}@{steps[0]}", folder / f"{name}@{steps[1]}"


def row(label: str, base: Path, new: Path, folder: Path) -> str:
    """A line of the table."""
    whole = changed = halves = exclusive = width = 0
    for path in new.glob("*.safetensors"):
        before, after = load_file(base / path.name), load_file(path)
        for name, array in after.items():
            kind = {2: np.uint16, 4: np.uint32}[array.itemsize]
            bits = array.reshape(-1).view(kind) ^ before[name].reshape(-1).view(kind)
            whole, changed = whole + array.nbytes, changed + int(np.count_nonzero(bits))
            halves += int(np.count_nonzero(bits.view(np.uint16)))
            exclusive += len(zstandard.ZstdCompressor(level=1).compress(bits.tobytes()))
            width = array.itemsize
    packed, opened = folder / "packed", folder / "opened"
    opened.mkdir()
    began_s = time.perf_counter()
    pack_folder(new, base, packed)
    packed_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    open_folder(packed, base, opened)
    opened_s = time.perf_counter() - began_s
    ours = packed.stat().st_size
    for path in opened.iterdir():
        assert path.read_bytes() == (new / path.name).read_bytes()
        path.unlink()
    opened.rmdir()
    astraflow = halves * (4 + 2)
    return (
        f"| {label} | {whole / 1e6:,.1f} | {100 * changed * width / whole:.1f} % | {astraflow / 1e6:.2f} "
        f"| {exclusive / 1e6:.2f} "
        f"| {ours / 1e6:.2f} | {ours / changed:.2f} | {astraflow / ours:.1f} x | {whole / ours:.1f} x "
        f"| {whole / packed_s / 1e9:.2f} | {whole / opened_s / 1e9:.2f} |"
    )


def main(argv: list[str]) -> None:
    del argv
    print("| weights | MB | differ | AstraFlow's MB | xor, zstd MB | ours MB | bytes each | to AstraFlow's | to all "
          "| pack GB/s | open GB/s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for share in SHARES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            print(row(f"made, {100 * share:.1f} %", *made(folder, share, flags.FLAGS.gigabytes), folder), flush=True)
    if flags.FLAGS.run:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for label, base, new in of_run(folder, Path(flags.FLAGS.run)):
                print(row(label, base, new, folder), flush=True)


if __name__ == "__main__":
    flags.DEFINE_float("gigabytes", 1.0, "Size of the made weights.")
    flags.DEFINE_string("run", "", "Run folder whose newest versions are taken, too.")
    app.run(main)
