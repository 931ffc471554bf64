"""What a compiled program holds: shapes and collectives in its HLO text. Helper of the tests in this folder."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_ALONE = re.compile(r"replica_groups=(?:\{(?:\{\d+\},?)+\}|\[\d+,1\])")
_SHAPE = re.compile(r"\b(?:f32|bf16|f16|s32|s64|u32|pred|u8|s8)\[([\d,]*)\]")

_H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")


def described_mesh(platform: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    """A mesh to lower programs for, of H100s that are not there if the platform is CUDA.

    JAX 0.11 lowers Triton's kernels for a kind of GPU: the mesh's own, or else that of the GPU which it finds.
    """
    device: Any = _H100 if platform == "cuda" else None
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), abstract_device=device)


def described_gpu() -> AbstractContextManager[Any]:
    """A program without a mesh that is traced in here is lowered for an H100: see `described_mesh`."""
    return use_abstract_mesh(described_mesh("cuda", (), ()))


def shapes(text: str) -> set[tuple[int, ...]]:
    """Dimensions of every array in a program."""
    return {_dimensions(found) for found in _SHAPE.findall(text)}


def collectives(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(kind, shape of a result) of every collective operation in a program that has more than one participant."""
    for line in text.splitlines():
        found = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if found and not _ALONE.search(line):
            for dimensions in _SHAPE.findall(found[1]):
                yield found[2], _dimensions(dimensions)


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
