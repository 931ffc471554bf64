"""Seeds that tell apart the equal branches of a parallel, and nothing else."""

import functools
import hashlib
from dataclasses import replace

from flowjax.canvas.graph import Call, Node, Parallel, children, walk, with_children


def branch_seeds(parallel: Parallel, seed: int, level: int) -> tuple[int, ...]:
    """One seed per branch: `seed` itself, but another one for each further branch that equals an earlier one.

    So three equal branches give three samples, and adding a branch changes none of the others. `level` is how many
    parallels are around this one: their branches must not get the seeds of its own.
    """
    return tuple(seed if index == 0 else _derived(seed, level, index) for index in _equals_before(parallel))


@functools.lru_cache(maxsize=4096)
def _equals_before(parallel: Parallel) -> tuple[int, ...]:
    """For each branch, how many of those before it are equal to it."""
    shapes = [_shape(branch) for branch in parallel.branches]
    return tuple(shapes[:index].count(shape) for index, shape in enumerate(shapes))


def _shape(branch: Node) -> Node:
    """The branch with ids that count from its own start, so that equal branches are equal values."""
    names = {node.id: f"#{index}" for index, node in enumerate(walk(branch)) if node.id}

    def rename(node: Node) -> Node:
        if isinstance(node, Call):
            return replace(node, id="", inputs=tuple((field, _renamed(source, names)) for field, source in node.inputs))
        return replace(with_children(node, tuple(rename(child) for child in children(node))), id="")

    return rename(branch)


def _renamed(reference: str, names: dict[str, str]) -> str:
    node_id, _, field = reference.rpartition(".")
    return f"{names.get(node_id, node_id)}.{field}"


def _derived(seed: int, level: int, index: int) -> int:
    """A number of 31 bits, which every endpoint takes as a seed."""
    digest = hashlib.blake2b(f"{seed}/{level}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
