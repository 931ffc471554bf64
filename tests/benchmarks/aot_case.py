"""One recipe's update, compiled for devices that are only described: nothing runs, nothing is timed.

    .venv-compilers/bin/python -m tests.benchmarks.aot_case configs/sokoban.py:qwen3_8b a100x8

prints what the compiler says, as JSON. Everything is abstract: shapes with shardings, from the recipe's own config,
through the trainer's own functions.
"""

import dataclasses
import json
import math
import os
import sys
import time
from typing import Any

from tests.benchmarks.aot_program import collectives, largest_buffers, overlapped, read_program, square_buffers

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # libtpu asks for one where no TPU is
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A data sheet, as XLA's compiler wants it."""

    name: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    shared_bytes: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int

    def text(self) -> str:
        """The description in XLA's text form (GpuTargetConfigProto)."""
        major, minor = self.capability
        return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {self.shared_bytes} threads_per_core_limit: 2048 core_count: {self.cores}
          fpus_per_core: {self.fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_bytes} clock_rate_ghz: {self.clock_ghz}
          device_memory_size: {self.memory_bytes} shared_memory_per_block_optin: {self.shared_bytes - 1024}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
        device_description_str: "{self.name}" """


A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 41943040, 1.41, 85094825984, 2039000000000)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 52428800, 1.98, 84929347584, 3352320000000)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 233472, 52428800, 1.98, 150754820096, 4800000000000)
# Name -> accelerators of the machine, and the description of its kind. TPU slices are named by the compiler's names.
MACHINES: dict[str, tuple[int, Gpu | str, float]] = {
    "a100x8": (8, A100, 80.0),
    "h100x8": (8, H100, 80.0),
    "h200x8": (8, H200, 141.0),
    "v5e-8": (4, "v5e:2x2", 16.0),  # a host of eight, of which the engine has the other half
    "v5e-16": (16, "v5e:4x4", 16.0),
    "v5p-8": (4, "v5p:2x2x1", 95.0),
    "v6e-8": (8, "v6e:2x4", 32.0),
}
# Of a recipe for GPUs on a TPU slice, whose engines are elsewhere: the base is split over all chips.
TPU_FLAGS = ("--config.model.remat=layer",)


def described_devices(machine: str, count: int) -> list[Any]:
    """`count` devices of a machine that is not there."""
    from jax.experimental import topologies

    _, kind, _ = MACHINES[machine]
    if isinstance(kind, str):
        return topologies.get_topology_desc(platform="tpu", topology_name=kind).devices[:count]
    _describe_to_cudnn(kind)
    topology = topologies.get_topology_desc(platform="cuda", target_config=kind.text(), topology=f"1x1x{count}")
    return topology.devices


def _describe_to_cudnn(gpu: Gpu) -> None:
    """JAX's call of cuDNN asks the local device for its capability, and there is none."""
    from types import SimpleNamespace

    from flowjax.models.cudnn import CUDNN

    cudnn: Any = CUDNN

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    cudnn.cuda_versions = SimpleNamespace(cudnn_get_version=lambda: 90800)
    cudnn.check_compute_capability = lambda wanted: gpu.capability >= number(wanted)
    cudnn.is_cuda_compute_capability_equal = lambda wanted: gpu.capability == number(wanted)


def compile_update(recipe: str, machine: str, *overrides: str) -> dict[str, Any]:
    """Compile the gradient of a micro-batch and the optimiser's step of a recipe's first policy for a machine.

    `overrides` are flags as the launcher takes them, such as `--config.mesh.fsdp=8`.
    """
    from flowjax.launch.command_line import parse
    from flowjax.launch.devices import memory_plan
    from flowjax.models.config import known_shape
    from flowjax.models.lora import Lora
    from flowjax.models.sharding import ROW_AXES, make_mesh
    from flowjax.run import resolve

    total, kind, _ = MACHINES[machine]
    run = resolve(parse([f"--config={recipe}", *(TPU_FLAGS if isinstance(kind, str) else ()), *overrides])[0])
    policy = next(iter(run.policies.values()))
    settings, trainer = policy.base.model, policy.trainer
    shape = known_shape(settings.path.rsplit("/", 1)[-1])
    assert shape is not None, settings.path
    sizes = run.config.mesh.to_dict()
    if isinstance(kind, str):
        sizes |= {"data": 1, "fsdp": total}
    mesh = make_mesh(**sizes, devices=described_devices(machine, math.prod(sizes.values())))
    ways = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    rows = math.ceil(trainer.micro_batch_rows / ways) * ways
    lora = Lora(**policy.lora.to_dict()) if policy.train == "lora" else None
    started_s = time.perf_counter()
    gradient, update, resident = _lowered(run, policy, shape, lora, mesh, rows)
    lowered_s = time.perf_counter()
    compiled, applied = gradient.compile(), update.compile()
    compiled_s = time.perf_counter()
    memory, program = compiled.memory_analysis(), read_program(compiled.as_text())
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + resident
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    plan = memory_plan(policy, shape, lora, dict(mesh.shape), rows=rows)
    analysis = compiled.cost_analysis() or {}
    return {
        "recipe": recipe,
        "machine": machine,
        "model": settings.path,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "rows": rows,
        "tokens": trainer.row_tokens,
        "remat": settings.remat,
        "attention": _attention(compiled.as_text()),
        "plan": plan,
        "plan_bytes": sum(plan.values()),
        "compiled_bytes": used,
        "arguments_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "moments_bytes": resident,
        "update_temporary_bytes": applied.memory_analysis().temp_size_in_bytes,
        "collectives": collectives(program),
        "overlapped": overlapped(program),
        "largest": largest_buffers(program, 4),
        "scores": _scores(program, shape, trainer.row_tokens),
        "flops": analysis.get("flops"),
        "lower_s": lowered_s - started_s,
        "compile_s": compiled_s - lowered_s,
    }


def _lowered(run: Any, policy: Any, shape: Any, lora: Any, mesh: Any, rows: int) -> tuple[Any, Any, int]:
    """The lowered programs of a gradient that is added to the sum, and of the update; bytes of the moments a device."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from flowjax.models.decoder import Decoder
    from flowjax.models.lora import LoraParam
    from flowjax.trainer import update
    from flowjax.trainer.optimizer import make_optimizer
    from flowjax.trainer.train import make_objective

    settings, trainer = policy.base.model, policy.trainer
    model = nnx.eval_shape(
        lambda: Decoder(
            shape,
            lora=lora,
            dtype=settings.dtype,
            remat=settings.remat,
            attention=settings.attention,
            key=jax.random.key(0),
            mesh=mesh,
        )
    )
    _lay_out(model)
    graph, trained, frozen = nnx.split(model, LoraParam if lora else nnx.Param, ...)
    objective = make_objective(run, policy, graph, trained)
    trained = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), trained)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def replicated(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    optimizer = make_optimizer(policy.optimizer, trainer.steps * trainer.updates_per_step, trained)
    state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding),
        jax.eval_shape(optimizer.init, trained),
        trained,
        transform_non_params=replicated,
    )
    batch = _micro_batch(trainer, run.config.rollout.max_new_tokens, mesh, rows)
    known, seed = update.FirstPass(), None
    first = jax.eval_shape(
        lambda *arrays: update._gradient_of(objective, *arrays, known, seed, None)[0], trained, frozen, batch
    )
    total = update.GradientSum(trained, jax.tree.map(replicated, first.sums))
    platforms = ("tpu",) if mesh.devices.flat[0].platform == "tpu" else ("cuda",)
    lowered = update._gradient_of.trace(objective, trained, frozen, batch, known, seed, total)
    layout = tuple(leaf.sharding for leaf in jax.tree.leaves((trained, state)))
    applied = update._apply.trace(optimizer, layout, trained, state, total)
    resident = sum(_local_bytes(leaf) for leaf in jax.tree.leaves(state))
    return lowered.lower(lowering_platforms=platforms), applied.lower(lowering_platforms=platforms), resident


def _lay_out(model: Any) -> None:
    """Give every abstract parameter the sharding that it has on the mesh."""
    import jax

    from flowjax.models.decoder import base_specs
    from flowjax.models.lora import adapter_specs

    def laid_out(param: Any, axes: Any) -> None:
        value = param.get_value()
        param.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=model.placement.of(axes)))

    for name, spec in base_specs(model.config, model.dtype).items():
        laid_out(model.parameter(name), spec.axes)
    if model.lora is not None:
        for target, parts in adapter_specs(model.config, model.lora).items():
            for part, spec in parts.items():
                laid_out(model.adapter[target][part], spec.axes)


def _micro_batch(trainer: Any, reply_tokens: int, mesh: Any, rows: int) -> Any:
    """A micro-batch of full rows, half of each sampled where a reply may be as long, as shapes."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from flowjax.models.sharding import ROW_AXES
    from flowjax.records import TokenRow
    from flowjax.trainer.batch import pack

    tokens = trainer.row_tokens
    sampled = np.arange(tokens) >= max(tokens - max(reply_tokens, tokens // 2), 1)
    nothing = np.zeros(tokens, np.float32)
    row = TokenRow("", nothing.astype(np.int32), sampled, nothing, nothing, np.full(tokens, -1, np.int32))
    (batch,) = pack([row] * rows, row_tokens=tokens, micro_batch_rows=rows)
    sharding = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def _local_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _scores(program: Any, shape: Any, tokens: int) -> list[str]:
    """Arrays of [tokens, tokens], or a remark where these cannot be told from a row's hidden states."""
    if tokens in (shape.hidden_size, shape.query_size, shape.kv_size, shape.ffn_size):
        return ["rows as long as the model is wide"]
    return square_buffers(program, tokens)


def _attention(text: str) -> str:
    names = {"fmhaSoftmax": "cudnn", "flash_attention": "flash", "splash": "splash"}
    return " and ".join(name for found, name in names.items() if found in text) or "xla"


if __name__ == "__main__":
    print(json.dumps(compile_update(*sys.argv[1:])))
