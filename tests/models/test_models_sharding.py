"""Rules and meshes, and that a model on eight devices computes what it computes on one."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from sharded_check import CASES, CHUNK, PLACES, ROWS, TOKENS
from tiny_models import TINY

from flowjax.models.decoder import Decoder, base_specs, make_placement
from flowjax.models.lora import Lora, adapter_specs
from flowjax.models.shape import Experts, ModelConfig, ModelError
from flowjax.models.sharding import MESH_AXES, Placement, ShardingRules, make_mesh, resolve_mesh


@pytest.mark.integration
@pytest.mark.timeout(1800)  # four minutes of work, which a busy machine makes many
def test_the_same_on_eight_devices(tmp_path):
    script = Path(__file__).with_name("sharded_check.py")
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=1750
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.splitlines()[-1])
    assert answer.pop("same_initial_values") and answer.pop("quantized")
    assert answer.pop("kernels") == {"cudnn": True, "flash": True, "splash": True}
    shares = answer.pop("shares_of_keys")
    for name, most in (("one", [1.88, 1.11]), ("undivided", [1.88, 1.88]), ("packed", [2.4, 1.23])):
        assert shares[name]["in_order"] and shares[name]["and_back"], name
        assert shares[name]["most"] == pytest.approx(most, rel=0.05), name
    assert answer.keys() == CASES.keys()
    for name, found in answer.items():
        assert found["parts"] == (4 if "data2" in name else 8), name
        assert found.get("expert_parts", 8) == 8, name
        assert found["same_layout"], name
        assert found["gradient_size"] > 1e-5, name
        assert found["loss"] < 1e-5, name
        assert found["gradient"] < 1e-4, name
        _check_collectives(found["collectives"], *CASES[name])
        if "sequence4" in name:  # each of eight devices has its share of a chunk's logits
            assert max(math.prod(shape[:-1]) for shape in found["logits"]) == CHUNK // 8


def _check_collectives(
    found: list[tuple[str, list[int]]], config: ModelConfig, lora: Lora | None, mesh: dict[str, int]
) -> None:
    """Parameters are gathered, and of the activations only what the mesh calls for; gradients alone are reduced."""
    arrays = list(base_specs(config, jnp.float32).values())
    arrays += [spec for parts in adapter_specs(config, lora).values() for spec in parts.values()] if lora else []
    parameters = {
        shape for spec in arrays for shape in (spec.shape, spec.shape[::-1], spec.shape[1:], spec.shape[:0:-1])
    }
    if mesh.get("tensor", 1) > 1:
        return  # parts of parameters, and sums of activations: too many shapes to name
    local = (ROWS // mesh["fsdp"] // mesh.get("data", 1) // mesh.get("expert", 1), TOKENS)
    gathered, summed = set(parameters), parameters | {()}
    if mesh.get("data", 1) > 1:  # gradients already scattered over fsdp are summed over data
        summed |= {
            (*shape[:axis], shape[axis] // mesh["fsdp"], *shape[axis + 1 :])
            for shape in parameters
            for axis in range(len(shape))
        }
    exchanged: set[tuple[int, ...]] = set()
    if (parts := mesh.get("sequence", 1)) > 1:
        # Keys, values, and in the backward pass what the sampled tokens' hidden states get: never all hidden states.
        gathered |= {(*local, config.kv_heads, config.head_dim), (local[0], PLACES, config.hidden_size)}
        piece = (local[0], TOKENS // parts**2)
        exchanged = {piece, (*piece, config.heads, config.head_dim)}
    if config.experts and mesh.get("expert", 1) > 1:
        tokens = ROWS * TOKENS // mesh["fsdp"]
        gathered |= {(tokens, config.hidden_size), (tokens, config.experts.per_token)}
        # Each device gathers and sums the weights of its own experts alone.
        own = config.experts.count // mesh["expert"]
        per_expert = {(own, *shape[-2:]) for shape in parameters if len(shape) >= 3}
        gathered, summed = gathered | per_expert, summed | per_expert
    for kind, shape in found:
        by_kind = {"all-gather": gathered, "all-reduce": summed, "reduce-scatter": summed, "all-to-all": exchanged}
        assert kind in by_kind, (kind, shape, mesh)
        planned = {_sizes(shape) for shape in by_kind[kind]}
        assert kind == "reduce-scatter" or _sizes(shape) in planned, (kind, shape, mesh)


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """Dimensions above 1, whatever their order."""
    return tuple(sorted(size for size in shape if size > 1))


def test_specs_follow_the_rules():
    rules = ShardingRules()
    assert rules.spec(("layers", "embed", "heads")) == PartitionSpec(None, ("fsdp", "expert", "sequence"), "tensor")
    assert rules.spec(("rows", None)) == PartitionSpec(("data", "fsdp", "expert"), None)
    assert ShardingRules(embed=None).spec(("vocab", "embed")) == PartitionSpec("tensor", None)


def test_collision_is_refused():
    with pytest.raises(ModelError, match=r"split two dimensions of an array with axes \('embed', 'ffn'\) .*'fsdp'"):
        ShardingRules(ffn="fsdp").spec(("embed", "ffn"))
    with pytest.raises(ModelError, match="over mesh axis 'tensor'"):
        ShardingRules(embed=("fsdp", "tensor")).spec(("embed", "heads"))


def test_unknown_names_are_refused():
    with pytest.raises(ModelError, match=r"logical axis 'width' has no sharding rule; known are act_embed"):
        ShardingRules().spec(("width",))
    with pytest.raises(ModelError, match=r"sharding rule ffn names \['model'\]; mesh axes are"):
        ShardingRules(ffn="model")


@pytest.mark.parametrize(
    ("stated", "devices", "resolved"),
    [
        ((1, -1), 8, (1, 8, 1, 1, 1)),
        ((2, -1, 1, 1, 2), 8, (2, 2, 1, 1, 2)),
        ((-1, 1), 1, (1, 1, 1, 1, 1)),
        ((1, 2, 2, 2), 8, (1, 2, 2, 2, 1)),
    ],
)
def test_mesh_sizes(stated, devices, resolved):
    assert tuple(resolve_mesh(dict(zip(MESH_AXES, stated, strict=False)), devices).values()) == resolved


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ((1, -1, 3), "data=1, fsdp=-1, expert=3, which does not fit 8 devices: let the product of the others divide"),
        ((1, 4), "data=1, fsdp=4, which does not fit 8 devices"),
        ((1, -1, 1, 1, -1), "data=1, fsdp=-1, tensor=-1: sizes are positive, and at most one of them may be -1"),
        ((0, -1), "data=0, fsdp=-1: sizes are positive"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(stated, message):
    with pytest.raises(ModelError, match=message):
        resolve_mesh(dict(zip(MESH_AXES, stated, strict=False)), 8)


def _placement(**sizes: int) -> Placement:
    mesh = AbstractMesh(tuple(sizes.get(name, 1) for name in MESH_AXES), MESH_AXES)
    return Placement(mesh)


def test_mesh_that_does_not_divide_the_model_is_refused():
    _placement(data=3, fsdp=4, tensor=2).check(TINY)
    with pytest.raises(ModelError, match=r"kv_heads is 2, which does not divide over the 4 devices of .* tensor"):
        _placement(tensor=4).check(TINY)
    with pytest.raises(ModelError, match=r"expert is 4, but a qwen3 model has no experts: set it to 1 and give"):
        _placement(expert=4).check(TINY)
    experts = dataclasses.replace(TINY, experts=Experts(6, 2, 8))
    with pytest.raises(
        ModelError, match=r"number of experts is 6, .* 4 devices of mesh axis expert: lower config.mesh"
    ):
        _placement(expert=4).check(experts)
    with pytest.raises(ModelError, match=r"a batch has 12 rows, .* 8 devices .*: make config.trainer.micro_batch_rows"):
        _placement(data=2, fsdp=4).check_batch(12, 64)
    with pytest.raises(
        ModelError, match=r"a batch has 30 tokens, .* 4 devices .* sequence: make config.trainer.row_tok"
    ):
        _placement(sequence=4).check_batch(12, 30)
    with pytest.raises(ModelError, match=r"hidden_size is 24, .* 5 devices .* lower config.mesh.fsdp to a divisor"):
        _placement(fsdp=5).check(TINY)


def test_experts_are_whole_where_they_divide_and_split_along_the_hidden_size_elsewhere():
    config = dataclasses.replace(TINY, hidden_size=48, experts=Experts(8, 2, 8))
    axes = base_specs(config, jnp.float32)["expert_up_proj"].axes
    for sizes, expected in (
        ({"fsdp": 2, "expert": 2, "sequence": 2, "tensor": 2}, (("expert", "fsdp", "sequence"), None, "tensor")),
        ({"data": 3, "fsdp": 4, "expert": 4}, ("expert", ("fsdp", "sequence"), "tensor")),
    ):
        placement = make_placement(config, _placement(**sizes).mesh)
        assert placement is not None
        assert placement.rules.spec(axes) == PartitionSpec(None, *expected)
    with pytest.raises(
        ModelError, match=r"number of experts is 8, .* 3 devices of mesh axis expert: lower config.mesh"
    ):
        make_placement(config, _placement(expert=3).mesh)


def test_one_device_mesh_is_an_ordinary_mesh():
    mesh = make_mesh(devices=jax.devices()[:1])
    decoder = Decoder(TINY, key=jax.random.key(0), mesh=mesh)
    assert decoder.layers["up_proj"].get_value().sharding == NamedSharding(mesh, PartitionSpec())


def test_a_layout_has_the_shortest_name():
    """As JAX names what a program returns: two names of one layout are two programs."""
    for sizes, expected in (
        ({"data": 2, "fsdp": 2}, (None, ("fsdp",))),
        ({"tensor": 2}, (None, None, ("tensor",))),
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, (None, ("fsdp", "sequence"), ("tensor",))),
        ({"data": 8}, ()),
    ):
        assert tuple(_placement(**sizes).of(("layers", "embed", "heads")).spec) == tuple(PartitionSpec(*expected))
