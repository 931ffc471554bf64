"""Run by test_models_sharding.py under eight simulated devices; prints one JSON object."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from packing import packed

from flowjax.models import attention as kernels
from flowjax.models import decoder as decoder_module
from flowjax.models.cudnn import CUDNN
from flowjax.models.decoder import Decoder
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.lora import ALL_TARGETS, Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.quantize import quantized_matrix
from flowjax.models.shape import Experts, ModelConfig
from flowjax.models.sharding import MESH_AXES, make_mesh
from flowjax.trainer.update import sampled_logprobs

VOCABULARY = 128
SHAPE = nano_config(VOCABULARY, hidden_size=32, layers=2, heads=8, kv_heads=4, head_dim=8, ffn_size=96)
DENSE = dataclasses.replace(SHAPE, sliding_window_tokens=5, full_attention_layers=(1,))
SPARSE = dataclasses.replace(SHAPE, architecture="qwen3_moe", experts=Experts(4, 2, ffn_size=16))
SOFT = dataclasses.replace(
    DENSE,
    architecture="gemma2",
    qk_norm=False,
    norm_offset=1.0,
    post_norms=True,
    activation="gelu_tanh",
    embedding_scale=32**0.5,
    attention_soft_cap=0.5,
    logit_soft_cap=1.0,
)
ROWS, TOKENS, SAMPLED, CHUNK = 8, 64, 30, 16
PLACES = 32  # SAMPLED, made to divide over `sequence`
LORA = Lora(4, 8.0)
EXPERTS_LORA = Lora(4, 8.0, targets=(*ALL_TARGETS, "router"))
# name -> (model, adapter, mesh sizes)
CASES: dict[str, tuple[ModelConfig, Lora | None, dict[str, Any]]] = {
    "fsdp8": (DENSE, LORA, {"fsdp": 8}),
    "data2_fsdp4": (DENSE, LORA, {"data": 2, "fsdp": 4}),
    "fsdp2_tensor4": (DENSE, LORA, {"fsdp": 2, "tensor": 4}),
    "fsdp2_sequence4": (SOFT, LORA, {"fsdp": 2, "sequence": 4}),
    "fsdp2_sequence2_tensor2_full": (DENSE, None, {"fsdp": 2, "sequence": 2, "tensor": 2}),
    "fsdp2_expert4": (SPARSE, EXPERTS_LORA, {"fsdp": 2, "expert": 4}),
    "fsdp2_expert2_tensor2": (SPARSE, EXPERTS_LORA, {"fsdp": 2, "expert": 2, "tensor": 2}),
    "expert2_sequence2_tensor2_full": (SPARSE, None, {"fsdp": 1, "expert": 2, "sequence": 2, "tensor": 2}),
}


def loss_and_gradients(folder: Path, mesh: Any, lora: Lora | None) -> tuple[float, list[Any], Any, dict[str, Any]]:
    """Loss, gradients, the decoder, and what the compiled step looks like."""
    remat = "none" if lora else "layer"
    decoder = load_decoder(folder, lora=lora, dtype=jnp.float32, mesh=mesh, remat=remat, key=jax.random.key(1))
    random = np.random.default_rng(0)
    for parts in decoder.adapter.values():
        b = parts["b"].get_value()  # of random numbers: equal ones in the router's would change no choice
        parts["b"].set_value(b + jnp.asarray(random.normal(0.05, 0.05, b.shape), b.dtype))
    arrays = _batch(random)
    if decoder.placement:
        arrays = jax.device_put(arrays, decoder.placement.of(("rows", None)))
    batch: Any = SimpleNamespace(**arrays)
    graph, trained, frozen = nnx.split(decoder, LoraParam if lora else nnx.Param, ...)

    @jax.jit
    def step(trained, frozen):
        def loss(trained):
            model = nnx.merge(graph, trained, frozen)
            logprobs, entropy = sampled_logprobs(model, batch, temperature=0.9, chunk_tokens=CHUNK)
            return ((entropy - logprobs) * jnp.linspace(0.5, 1.5, SAMPLED)).mean()

        return jax.value_and_grad(loss)(trained)

    compiled = step.lower(trained, frozen).compile()
    loss, gradients = compiled(trained, frozen)
    same_layout = [
        gradient.sharding.is_equivalent_to(array.sharding, array.ndim)
        for gradient, array in zip(jax.tree.leaves(gradients), jax.tree.leaves(trained), strict=True)
    ]
    text = compiled.as_text() or ""
    looks = {
        "same_layout": all(same_layout),
        "collectives": list(hlo.collectives(text)),
        "logits": [s for s in hlo.shapes(text) if s[-1:] == (VOCABULARY,) and s[0] != SHAPE.hidden_size],
    }
    return float(loss), [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)], decoder, looks


def _batch(random: np.random.Generator) -> dict[str, jax.Array]:
    """Rows of sequences of random lengths, padding behind some, and places of theirs."""
    rows = []
    for _ in range(ROWS):
        cuts = np.sort(random.choice(np.arange(1, TOKENS), random.integers(1, 6), replace=False))
        rows.append([int(length) for length in np.diff([0, *cuts, TOKENS][: None if random.integers(2) else -1])])
    segments, positions = packed(rows, TOKENS)
    # Of the first place of all nothing is predicted; there are fewer in a row than a mesh divides, and some twice.
    ends = [max(2, sum(lengths)) for lengths in rows]
    places = np.stack([np.sort(random.integers(1, end, SAMPLED)) for end in ends])
    tokens = random.integers(0, VOCABULARY, (ROWS, TOKENS))
    arrays = {"tokens": tokens, "positions": positions, "segments": segments, "places": places}
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def shares_of_keys() -> dict[str, Any]:
    """What the queries of each of eight devices see of a row, before and after they are exchanged: the most of one
    device over the mean of all, on average over rows."""
    mesh = make_mesh(sequence=8, fsdp=1)
    spec = PartitionSpec(None, "sequence")
    exchange = functools.partial(kernels.exchange_queries, axes=("sequence",))
    exchange = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))
    random, packings = np.random.default_rng(0), []
    while len(packings) < 64:  # the longest first, as rows are packed
        lengths = 1 + random.exponential(1024, 100).astype(int)
        packings.append(sorted(lengths[np.cumsum(lengths) <= 8192], reverse=True))
    cases = {
        "one": np.arange(1024)[None],
        "undivided": np.arange(1000)[None],  # parts of 125 tokens are not eight pieces
        "packed": packed(packings, 8192)[1],
    }

    def most(seen: np.ndarray) -> float:
        shares = seen.reshape(len(seen), 8, -1).sum(axis=2)
        return float((shares.max(axis=1) / shares.mean(axis=1)).mean())

    found = {}
    for name, positions in cases.items():
        seen, place = positions + 1, np.arange(positions.shape[1])[None]
        there = exchange(place)
        found[name] = {
            "in_order": bool((np.diff(np.asarray(there).reshape(8, -1)) > 0).all()),
            "and_back": bool(np.array_equal(exchange(there), place)),
            "most": [most(seen), most(np.asarray(exchange(seen)))],
        }
    return found


def kernels_on_a_mesh() -> dict[str, bool]:
    """Whether the gradient of a model on a mesh calls cuDNN and Triton, for CUDA, and a Pallas kernel, for TPU."""
    cudnn: Any = CUDNN
    cudnn.cuda_versions = SimpleNamespace(cudnn_get_version=lambda: 91300)
    cudnn.check_compute_capability = lambda capability: capability == "9.0"
    cudnn.is_cuda_compute_capability_equal = lambda capability: False
    config = dataclasses.replace(DENSE, head_dim=64)
    build = functools.partial(Decoder, config, lora=LORA, dtype=jnp.bfloat16, key=jax.random.key(0))
    ids = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    found = {}
    for form, platform, call in (
        ("cudnn", "cuda", "__cudnn$fmhaSoftmaxBackward"),
        ("flash", "cuda", "__gpu$xla.gpu.triton"),
        ("splash", "tpu", "tpu_custom_call"),
    ):
        decoder_module.choose_attention = lambda *args, form=form, **options: form
        mesh: Any = hlo.described_mesh(platform, (1, 4, 1, 1, 2), MESH_AXES)
        model = nnx.eval_shape(functools.partial(build, mesh=mesh))
        graph, trained, frozen = nnx.split(model, LoraParam, ...)

        def loss(trained, frozen, *places, graph=graph):
            return nnx.merge(graph, trained, frozen)(*places).astype(jnp.float32).sum()

        traced = jax.jit(jax.grad(loss)).trace(trained, frozen, ids, ids, ids)
        found[form] = call in traced.lower(lowering_platforms=(platform,)).as_text()
    return found


def quantized_on_a_mesh() -> bool:
    """Scales of blocks lie where the blocks do, and codes and scales are those of one device."""
    matrix = jax.random.normal(jax.random.key(5), (2, 8 * 64, 16))
    rows = NamedSharding(make_mesh(fsdp=8), PartitionSpec(None, "fsdp", None))
    alone, spread = quantized_matrix(matrix, "nf4"), quantized_matrix(jax.device_put(matrix, rows), "nf4")
    parts = [x.size // x.addressable_shards[0].data.size for x in (spread.codes, spread.scales)]
    return parts == [8, 8] and all(
        np.array_equal(a, b) for a, b in ((alone.codes, spread.codes), (alone.scales, spread.scales))
    )


def main(folder: Path) -> None:
    answer: dict[str, Any] = {}
    alone: dict[tuple[Any, Any], Any] = {}
    for name, (config, lora, sizes) in CASES.items():
        home = folder / config.architecture
        if not home.exists():
            save_decoder(Decoder(config, dtype=jnp.float32, key=jax.random.key(0)), home)
        if (config, lora) not in alone:
            alone[config, lora] = loss_and_gradients(home, None, lora)[:2]
        loss, gradients = alone[config, lora]
        sharded_loss, sharded_gradients, decoder, looks = loss_and_gradients(home, make_mesh(**sizes), lora)
        matrix = decoder.layers["q_proj"].get_value()
        answer[name] = looks | {
            "loss": abs(loss - sharded_loss),
            "gradient": max(
                float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(gradients, sharded_gradients, strict=True)
            ),
            "gradient_size": min(float(np.abs(a).max()) for a in gradients),
            "parts": matrix.size // matrix.addressable_shards[0].data.size,
        }
        if "expert_up_proj" in decoder.layers:
            expert = decoder.layers["expert_up_proj"].get_value()
            answer[name]["expert_parts"] = expert.size // expert.addressable_shards[0].data.size
    abroad = Decoder(DENSE, lora=LORA, dtype=jnp.float32, key=jax.random.key(3), mesh=make_mesh(fsdp=2, tensor=4))
    at_home = Decoder(DENSE, lora=LORA, dtype=jnp.float32, key=jax.random.key(3))
    answer["same_initial_values"] = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(nnx.state(abroad)), jax.tree.leaves(nnx.state(at_home)), strict=True)
    )
    answer["kernels"] = kernels_on_a_mesh()
    answer["quantized"] = quantized_on_a_mesh()
    answer["shares_of_keys"] = shares_of_keys()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
