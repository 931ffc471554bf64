"""What the compiled step of a policy holds, read from its HLO."""

import math
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.shape import ModelConfig
from flowjax.trainer.batch import MicroBatch
from flowjax.trainer.update import sampled_logprobs

VOCABULARY, HIDDEN, ROWS, TOKENS, SAMPLED, CHUNK = 4999, 32, 4, 64, 32, 16
CONFIG = ModelConfig(VOCABULARY, HIDDEN, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_size=48)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_no_buffer_holds_the_logits_of_all_tokens(train):
    lora = Lora(4, 8.0) if train == "lora" else None
    model = nnx.eval_shape(lambda: Decoder(CONFIG, lora=lora, dtype=jnp.float32, key=jax.random.key(0)))
    graph, trained, frozen = nnx.split(model, LoraParam if lora else nnx.Param, ...)

    def loss(trained: Any, frozen: Any, arrays: dict[str, jax.Array]) -> jax.Array:
        model, batch = nnx.merge(graph, trained, frozen), MicroBatch(**arrays)
        options: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": CHUNK}
        found = [(x * batch.advantages).sum() for x in sampled_logprobs(model, batch, **options)]
        return jnp.stack(found).sum()

    by_token, kinds = ("tokens", "positions", "segments"), {"mask": np.bool_}
    kinds |= dict.fromkeys(("behaviour_logprobs", "advantages"), np.float32)
    arrays = {
        name: jax.ShapeDtypeStruct((ROWS, TOKENS if name in by_token else SAMPLED), kinds.get(name, np.int32))
        for name in MicroBatch.__dataclass_fields__
    }
    text = jax.jit(jax.grad(loss)).lower(trained, frozen, arrays).compile().as_text()
    beside = [math.prod(shape) // VOCABULARY for shape in hlo.shapes(text or "") if VOCABULARY in shape]
    assert max(beside) == max(HIDDEN, CHUNK)  # the head itself, and one chunk of logits
