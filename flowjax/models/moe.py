"""A mixture of experts without capacity: every token reaches every expert it chose, and none is dropped."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flowjax.models.shape import Experts
from flowjax.models.sharding import Placement

Activate = Callable[[jax.Array], jax.Array]


def route(
    x: Float[Array, "*tokens hidden"], router: Float[Array, "hidden experts"], experts: Experts
) -> tuple[Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]]:
    """Weights and numbers of each token's `per_token` likeliest experts, by a softmax over all of them in float32."""
    scores = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(scores, experts.per_token)
    if experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(x.dtype), chosen


def mix_experts(
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens chosen"],
    chosen: Int[Array, "tokens chosen"],
    gate: Float[Array, "experts hidden ffn"],
    up: Float[Array, "experts hidden ffn"],
    down: Float[Array, "experts ffn hidden"],
    *,
    activate: Activate,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "tokens hidden"]:
    """sum over a token's chosen experts e of weight_e * (activate(x G_e) * x U_e) D_e, for the experts at hand.

    Those are `first` and the following; choices of others add nothing. Tokens are sorted by expert and each map is one
    grouped matrix product (jax.lax.ragged_dot), so that the work is that of the chosen experts.
    """
    tokens, choices = chosen.shape
    count = gate.shape[0]
    local = chosen.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)  # others come last, in no group
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)
    grouped = x[order // choices]  # a token stands in the flat list once for each of its choices
    inner = activate(jax.lax.ragged_dot(grouped, gate, sizes)) * jax.lax.ragged_dot(grouped, up, sizes)
    outer = jax.lax.ragged_dot(inner, down, sizes)
    here = jnp.arange(tokens * choices) < sizes.sum()
    outer = jnp.where(here[:, None], outer, 0)  # what lies in no group is not defined
    back = outer[jnp.argsort(order, stable=True)].reshape(tokens, choices, -1)  # the inverse of a permutation sorts it
    return jnp.einsum("tc,tch->th", weights, back)


def mixture(
    x: Float[Array, "rows tokens hidden"],
    router: Float[Array, "hidden experts"],
    gate: Float[Array, "experts hidden ffn"],
    up: Float[Array, "experts hidden ffn"],
    down: Float[Array, "experts ffn hidden"],
    *,
    experts: Experts,
    activate: Activate,
    placement: Placement | None,
) -> Float[Array, "rows tokens hidden"]:
    """The feed-forward map of a layer with experts, on any mesh.

    On a mesh each device holds some experts: it gathers the tokens of its neighbours along `expert`, adds what its
    experts make of them, and the sums are scattered back.
    """
    matrices = (gate, up, down)
    if placement is None or placement.mesh.size == 1:
        flat = x.reshape(-1, x.shape[-1])
        return mix_experts(flat, *route(flat, router, experts), *matrices, activate=activate).reshape(x.shape)
    rules = placement.rules

    def local(x: jax.Array, router: jax.Array, *matrices: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        arrays = (flat, *route(flat, router, experts))
        if rules.expert_ffn is not None:  # each part of the maps has its own gradient of x: they are summed here
            arrays = tuple(jax.lax.pcast(array, rules.expert_ffn, to="varying") for array in arrays)
        gathered = (jax.lax.all_gather(array, "expert", tiled=True) for array in arrays)
        first = jax.lax.axis_index("expert") * matrices[0].shape[0]
        mixed = mix_experts(*gathered, *matrices, activate=activate, first=first)
        mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return (mixed if rules.expert_ffn is None else jax.lax.psum(mixed, rules.expert_ffn)).reshape(x.shape)

    by_token = rules.spec(("rows", "tokens", None))
    outward, inward = rules.spec(("experts", None, "expert_ffn")), rules.spec(("experts", "expert_ffn", None))
    specs = (by_token, rules.spec((None, None)), outward, outward, inward)
    return jax.shard_map(local, mesh=placement.mesh, in_specs=specs, out_specs=by_token)(x, router, *matrices)
