"""Where arrays live: logical axis names -> mesh axes -> NamedSharding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flowjax.models.config import ModelConfig, ModelError

MESH_AXES = ("data", "fsdp", "tensor")
MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical axis; None replicates.

    The first block names dimensions of parameters, the second those of activations. The defaults are fully sharded
    data parallelism with Megatron's tensor parallelism: parameters are split over `fsdp` along the hidden size and over
    `tensor` along heads, feed-forward and vocabulary; rows are split over `data` and `fsdp`.
    """

    layers: MeshAxes = None
    vocab: MeshAxes = "tensor"
    embed: MeshAxes = "fsdp"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    ffn: MeshAxes = "tensor"
    rank: MeshAxes = None

    rows: MeshAxes = ("data", "fsdp")
    tokens: MeshAxes = None
    act_embed: MeshAxes = None
    act_heads: MeshAxes = "tensor"
    act_kv_heads: MeshAxes = "tensor"
    act_ffn: MeshAxes = "tensor"

    def __post_init__(self):
        for rule in fields(self):
            unknown = set(_as_tuple(getattr(self, rule.name))) - set(MESH_AXES)
            if unknown:
                raise ModelError(f"sharding rule {rule.name} names {sorted(unknown)}; mesh axes are {list(MESH_AXES)}")

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes.

        Raises:
            ModelError: an axis has no rule, or two dimensions would be split over one mesh axis.
        """
        names = {rule.name for rule in fields(self)}
        unknown = [axis for axis in axes if axis is not None and axis not in names]
        if unknown:
            raise ModelError(f"logical axis {unknown[0]!r} has no sharding rule; known are {', '.join(sorted(names))}")
        physical = [None if axis is None else getattr(self, axis) for axis in axes]
        used = [name for entry in physical for name in _as_tuple(entry)]
        for name in used:
            if used.count(name) > 1:
                raise ModelError(
                    f"sharding rules split two dimensions of an array with axes {tuple(axes)} over mesh axis {name!r}: "
                    "give one of them another mesh axis or None"
                )
        return PartitionSpec(*physical)


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else axes


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules by which arrays are laid out on it."""

    mesh: Mesh
    rules: ShardingRules = field(default_factory=ShardingRules)

    def of(self, axes: Sequence[str | None]) -> NamedSharding:
        return NamedSharding(self.mesh, self.rules.spec(axes))

    def ways(self, axis: str) -> int:
        """How many parts the logical axis is cut into."""
        return math.prod(self.mesh.shape[name] for name in _as_tuple(getattr(self.rules, axis)))

    def check(self, config: ModelConfig) -> None:
        """Raise ModelError unless every dimension of the model divides over the mesh."""
        sizes = {
            "vocab": ("vocab_size", config.vocab_size),
            "embed": ("hidden_size", config.hidden_size),
            "heads": ("heads", config.heads),
            "kv_heads": ("kv_heads", config.kv_heads),
            "ffn": ("ffn_size", config.ffn_size),
            "layers": ("layers", config.layers),
        }
        for axis, (name, size) in sizes.items():
            if size % self.ways(axis):
                mesh_axes = _as_tuple(getattr(self.rules, axis))
                raise ModelError(
                    f"the model's {name} is {size}, which does not divide over the {self.ways(axis)} devices of mesh "
                    f"axis {' x '.join(mesh_axes)}: lower config.mesh.{mesh_axes[-1]} to a divisor of {size}"
                )


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices; one of the three sizes may be -1 and takes the rest.

    Raises:
        ModelError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(MESH_AXES, resolve_mesh(data, fsdp, tensor, len(devices)), strict=True))
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), MESH_AXES)


def resolve_mesh(data: int, fsdp: int, tensor: int, device_count: int) -> tuple[int, int, int]:
    """The three mesh sizes with -1 replaced by what is left of `device_count`."""
    sizes = [data, fsdp, tensor]
    stated = ", ".join(f"{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ModelError(f"config.mesh is {stated}: sizes are positive, and at most one of them may be -1")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and device_count % fixed == 0:
        sizes[sizes.index(-1)] = device_count // fixed
    if math.prod(sizes) != device_count:
        raise ModelError(
            f"config.mesh is {stated}, which does not fit {device_count} devices: "
            "make the product equal to it, or set one size to -1"
        )
    return sizes[0], sizes[1], sizes[2]
