"""Run by test_models_sharding.py under eight simulated devices; prints one JSON object."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowjax.models.decoder import Decoder
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.logprobs import token_logprobs
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.sharding import make_mesh

CONFIG = nano_config(64, hidden_size=32, layers=2, heads=8, kv_heads=4, head_dim=8, ffn_size=64)
LORA = Lora(4, 8.0)
MESHES = {"fsdp8": (1, 8, 1), "data2_fsdp4": (2, 4, 1), "fsdp2_tensor4": (1, 2, 4)}


def loss_and_gradients(folder: Path, mesh, lora: Lora | None):
    remat = "none" if lora else "layer"
    decoder = load_decoder(folder, lora=lora, dtype=jnp.float32, mesh=mesh, remat=remat, key=jax.random.key(1))
    for parts in decoder.adapter.values():
        parts["b"].set_value(parts["b"].get_value() + 0.05)
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 64, (8, 24)))
    positions = jnp.tile(jnp.arange(12), (8, 2))
    segments = jnp.tile(jnp.repeat(jnp.array([1, 2]), 12), (8, 1))
    if decoder.placement:
        rows = decoder.placement.of(("rows", "tokens"))
        tokens, positions, segments = jax.device_put((tokens, positions, segments), rows)
    graph, trained, frozen = nnx.split(decoder, LoraParam if lora else nnx.Param, ...)

    @jax.jit
    def step(trained, frozen):
        def loss(trained):
            model = nnx.merge(graph, trained, frozen)
            hidden = model(tokens, positions, segments).reshape(-1, CONFIG.hidden_size)
            logprobs, entropy = token_logprobs(hidden, model.head(), tokens.reshape(-1), chunk_tokens=64, entropy=True)
            return (entropy - logprobs).mean()

        return jax.value_and_grad(loss)(trained)

    loss, gradients = step(trained, frozen)
    same_layout = [
        gradient.sharding.is_equivalent_to(array.sharding, array.ndim)
        for gradient, array in zip(jax.tree.leaves(gradients), jax.tree.leaves(trained), strict=True)
    ]
    return float(loss), [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)], decoder, all(same_layout)


def main(folder: Path) -> None:
    save_decoder(Decoder(CONFIG, dtype=jnp.float32, key=jax.random.key(0)), folder)
    answer = {}
    for kind, lora in (("lora", LORA), ("full", None)):
        loss, gradients, _, _ = loss_and_gradients(folder, None, lora)
        for name, sizes in MESHES.items():
            if lora is None and name != "fsdp2_tensor4":
                continue
            mesh = make_mesh(*sizes)
            sharded_loss, sharded_gradients, decoder, same_layout = loss_and_gradients(folder, mesh, lora)
            matrix = decoder.layers["q_proj"].get_value()
            answer[f"{name}_{kind}"] = {
                "loss": abs(loss - sharded_loss),
                "gradient": max(
                    float(np.abs(a - b).max() / np.abs(a).max())
                    for a, b in zip(gradients, sharded_gradients, strict=True)
                ),
                "gradient_size": min(float(np.abs(a).max()) for a in gradients),
                "parts": matrix.size // matrix.addressable_shards[0].data.size,
                "same_layout": same_layout,
            }
    abroad = Decoder(CONFIG, lora=LORA, dtype=jnp.float32, key=jax.random.key(3), mesh=make_mesh(1, 2, 4))
    at_home = Decoder(CONFIG, lora=LORA, dtype=jnp.float32, key=jax.random.key(3))
    answer["same_initial_values"] = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(nnx.state(abroad)), jax.tree.leaves(nnx.state(at_home)), strict=True)
    )
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
