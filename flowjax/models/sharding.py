"""Placement of arrays on devices: logical axis names -> mesh axes -> NamedSharding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from flowjax.models.shape import ModelConfig, ModelError

MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")  # neighbouring devices are on the last, which talks most
ROW_AXES = ("data", "fsdp", "expert")  # rows of a batch are split over these
MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical axis; None replicates.

    The first block names dimensions of parameters, the second those of activations. The defaults are fully sharded
    data parallelism with Megatron's tensor parallelism: parameters are split along the hidden size over every axis
    that splits the batch within a replica (`fsdp`, `expert`, `sequence`), and over `tensor` along heads, feed-forward
    and vocabulary. Experts are stored split over the former axes, and over `expert` alone while in use. Rows are split
    over `data`, `fsdp` and `expert`, the tokens of a row over `sequence`.
    """

    layers: MeshAxes = None
    vocab: MeshAxes = "tensor"
    embed: MeshAxes = ("fsdp", "expert", "sequence")
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    ffn: MeshAxes = "tensor"
    rank: MeshAxes = None
    experts: MeshAxes = ("expert", "fsdp", "sequence")
    expert_embed: MeshAxes = None
    expert_ffn: MeshAxes = "tensor"

    rows: MeshAxes = ROW_AXES
    tokens: MeshAxes = "sequence"
    act_embed: MeshAxes = None
    act_heads: MeshAxes = "tensor"
    act_kv_heads: MeshAxes = "tensor"
    act_ffn: MeshAxes = "tensor"
    act_experts: MeshAxes = "expert"

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

    mesh: Mesh | AbstractMesh  # the latter where sizes are checked before there are devices
    rules: ShardingRules = field(default_factory=ShardingRules)

    def of(self, axes: Sequence[str | None]) -> NamedSharding:
        """Layout of an array with these logical axes.

        Mesh axes of one device split nothing, and are left out: JAX gives a program's results the shortest of equal
        specs, and arrays with a longer one would compile the next program anew.
        """
        split = [
            tuple(name for name in _as_tuple(entry) if self.mesh.shape[name] > 1) for entry in self.rules.spec(axes)
        ]
        while split and not split[-1]:
            split.pop()
        return NamedSharding(self.mesh, PartitionSpec(*(names or None for names in split)))

    @property
    def device(self) -> Any:
        """One of the mesh's devices, for choices by their kind; for a mesh without devices, one of this process."""
        return self.mesh.devices.flat[0] if isinstance(self.mesh, Mesh) else jax.devices()[0]

    def axes(self, axis: str) -> tuple[str, ...]:
        """Mesh axes that the logical axis is split over."""
        return _as_tuple(getattr(self.rules, axis))

    def ways(self, axis: str) -> int:
        """Number of parts that the logical axis is cut into."""
        return math.prod(self.mesh.shape[name] for name in self.axes(axis))

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
        if config.experts:
            sizes["experts"] = ("number of experts", config.experts.count)
            sizes["expert_ffn"] = ("experts' ffn_size", config.experts.ffn_size)
        elif self.mesh.shape["expert"] > 1:
            raise ModelError(
                f"config.mesh.expert is {self.mesh.shape['expert']}, but a {config.architecture} model has no experts: "
                "set it to 1 and give its devices to config.mesh.fsdp"
            )
        for axis, (name, size) in sizes.items():
            if size % self.ways(axis):
                split = [name for name in _as_tuple(getattr(self.rules, axis)) if self.mesh.shape[name] > 1]
                raise ModelError(
                    f"the model's {name} is {size}, which does not divide over the {self.ways(axis)} devices of mesh "
                    f"axis {' x '.join(split)}: lower config.mesh.{split[0]} to a divisor of {size}"
                )

    def check_batch(self, rows: int, tokens: int) -> None:
        """Raise ModelError unless rows and tokens divide over the mesh."""
        for axis, size, remedy in (
            ("rows", rows, "make config.trainer.micro_batch_rows a multiple of it"),
            ("tokens", tokens, "make config.trainer.row_tokens a multiple of it, or set config.mesh.sequence to 1"),
        ):
            if size % self.ways(axis):
                axes = " x ".join(_as_tuple(getattr(self.rules, axis)))
                raise ModelError(
                    f"a batch has {size} {axis}, which do not divide over the {self.ways(axis)} devices of mesh axes "
                    f"{axes}: {remedy}"
                )


def take_tokens(
    x: Shaped[Array, "rows tokens *rest"], places: Int[Array, "rows n"], placement: Placement | None
) -> Shaped[Array, "rows_by_n *rest"]:
    """x[row, place] for every place of a row, rows and places as one axis; `split_tokens` splits that axis again.

    Where tokens are split over devices, so are the places, a multiple of them in number: each device gets its part of
    every row's places from the devices that hold the tokens (reduce-scatter), and the axis is in order of devices.
    """
    places = places.reshape(*places.shape, *(1,) * (x.ndim - 2))
    if placement is None or placement.ways("tokens") == 1:
        return jnp.take_along_axis(x, places, axis=1).reshape(-1, *x.shape[2:])
    axes = placement.axes("tokens")

    def of_part(x: jax.Array, places: jax.Array) -> jax.Array:
        # Each device fills in the tokens that it holds, and zeros for the others: their sum has every token.
        local = places - jax.lax.axis_index(axes) * x.shape[1]
        here = (local >= 0) & (local < x.shape[1])
        found = jnp.where(here, jnp.take_along_axis(x, jnp.where(here, local, 0), axis=1), 0)
        return jax.lax.psum_scatter(found, axes, scatter_dimension=1, tiled=True).reshape(-1, *x.shape[2:])

    of = placement.rules.spec
    specs = (of(("rows", "tokens")), of(("rows",)))
    return jax.shard_map(of_part, mesh=placement.mesh, in_specs=specs, out_specs=_merged(placement))(x, places)


def split_tokens(
    x: Shaped[Array, "rows_by_n *rest"], rows: int, placement: Placement | None
) -> Shaped[Array, "rows n *rest"]:
    """Rows and places as two axes again, of an array made place by place from `take_tokens`; split by rows alone."""
    if placement is None or placement.ways("tokens") == 1:
        return x.reshape(rows, -1, *x.shape[1:])
    local = rows // placement.ways("rows")
    apart = jax.shard_map(
        lambda x: x.reshape(local, -1, *x.shape[1:]),
        mesh=placement.mesh,
        in_specs=_merged(placement),
        out_specs=placement.rules.spec(("rows", "tokens")),
    )
    return jax.lax.with_sharding_constraint(apart(x), placement.of(("rows",)))  # like other arrays by sampled token


def _merged(placement: Placement) -> PartitionSpec:
    return PartitionSpec((*placement.axes("rows"), *placement.axes("tokens")))


def default_rules(config: ModelConfig, mesh: Mesh | AbstractMesh) -> ShardingRules:
    """The rules for a model on a mesh: experts that do not divide over it are split along the hidden size."""
    rules = ShardingRules()
    if config.experts is None or config.experts.count % Placement(mesh, rules).ways("experts") == 0:
        return rules
    return ShardingRules(experts="expert", expert_embed=("fsdp", "sequence"))


def make_mesh(
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    expert: int = 1,
    sequence: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over all devices; one of the sizes may be -1 and takes the rest.

    Raises:
        ModelError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    stated = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert, "sequence": sequence}
    sizes = resolve_mesh(stated, len(devices))
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), MESH_AXES)


def resolve_mesh(stated: Mapping[str, int], device_count: int) -> dict[str, int]:
    """All mesh sizes in the order of MESH_AXES: 1 where nothing is stated, -1 replaced by the devices that are left."""
    sizes = {name: stated.get(name, 1) for name in MESH_AXES}
    words = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1 or name in ("data", "fsdp"))
    if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ModelError(f"config.mesh is {words}: sizes are positive, and at most one of them may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if device_count % fixed == 0:
        sizes = {name: device_count // fixed if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != device_count:
        filled = -1 in sizes.values()
        remedy = "let the product of the others divide that" if filled else "make the product equal to it"
        remedy += "" if filled else ", or set one size to -1"
        raise ModelError(f"config.mesh is {words}, which does not fit {device_count} devices: {remedy}")
    return sizes


def place(tree: Any, mesh: Mesh) -> Any:
    """Put host arrays on the devices, their first axis split over `ROW_AXES`.

    Every process has the whole arrays and takes its own part of them.
    """
    sharding = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    # Local data that has the global shape is taken as the whole array: each process keeps its devices' part of it.
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf), np.shape(leaf)), tree
    )


def on_mesh(array: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
    """The array as it is if it lies on the mesh already, else a copy on each of its devices."""
    if isinstance(array.sharding, NamedSharding):
        return array
    everywhere = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(array, everywhere)
    return jax.make_array_from_process_local_data(everywhere, np.asarray(array), array.shape)
