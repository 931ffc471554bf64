"""Every family says what transformers and PEFT say, for every way that rows are laid out, and goes back to them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peft import PeftModel
from safetensors.numpy import save_file
from tiny_models import HF_SIZES, TINY, make_hf_folder, randomise_adapter
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from flowjax.models import hf
from flowjax.models.decoder import Decoder
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.lora import ALL_TARGETS, Lora, adapter_specs, peft_tensors
from flowjax.models.shape import ModelError
from flowjax.records import TokenRow
from flowjax.trainer.batch import MicroBatch, pack
from flowjax.trainer.update import sampled_logprobs
from flowjax.weights.hand_over import peft_config

TEMPERATURE = 0.8
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 8}),
    "mistral_types": ("mistral", {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": PATTERN}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 6}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "num_hidden_layers": 3, "layer_types": PATTERN, "sliding_window": 6}
        | {"rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1], "num_hidden_layers": 4},
    ),
}


def token_row(sampled: str, seed: int) -> TokenRow:
    """A random row; "." is a token of the prompt or the world, "s" one that was sampled."""
    random, count = np.random.default_rng(seed), len(sampled)
    nothing = np.zeros(count, np.float32)
    mask = np.array([mark == "s" for mark in sampled])
    return TokenRow(
        "", random.integers(3, 64, count, dtype=np.int32), mask, nothing, nothing, np.zeros(count, np.int32)
    )


PATTERNS = {
    "single_turn": ["........ssssss", "............ssss"],
    "append": ["......sss....ssss..sss", ".....ss...ss...ss...ss"],
    "window": ["....ss", "......sss", "...s", ".....ssss", "..s", "........ss"],
}


@dataclass
class Pair:
    """One model twice: here with a random adapter, and in transformers without (base) and with it (adapted)."""

    decoder: Decoder
    lora: Lora
    folder: Path
    base: Any
    adapted: Any


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory) -> Pair:
    model_type, fields = FAMILIES[request.param]
    folder = make_hf_folder(tmp_path_factory.mktemp(request.param) / "model", model_type, **fields)
    experts = model_type == "qwen3_moe"
    lora = Lora(3, 4.0, rslora=experts, targets=(*ALL_TARGETS, "router") if experts else ALL_TARGETS)
    decoder = load_decoder(folder, lora=lora, dtype=jnp.float32)
    randomise_adapter(decoder)
    if request.param == "qwen3_moe_mixed":  # PEFT 0.21 drops the adapters of its layers without experts
        save_decoder(decoder, folder.parent / "merged")
        return Pair(decoder, lora, folder, in_transformers(folder), in_transformers(folder.parent / "merged"))
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    save_file(peft_tensors(decoder.adapter, decoder.config, lora), str(adapter / "adapter_model.safetensors"))
    (adapter / "adapter_config.json").write_text(json.dumps(peft_config(lora, str(folder))))
    adapted = PeftModel.from_pretrained(in_transformers(folder), adapter)
    return Pair(decoder, lora, folder, in_transformers(folder), adapted)


def in_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference(model: Any, rows: list[TokenRow]) -> np.ndarray:
    """Log-probabilities of the sampled tokens, sequence after sequence, each by itself."""
    found = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor(row.tokens[None], dtype=torch.long)).logits[0] / TEMPERATURE
        places = np.flatnonzero(row.sampled)
        found.append(torch.log_softmax(logits, dim=-1)[places - 1, row.tokens[places].astype(np.int64)].numpy())
    return np.concatenate(found)


@jax.jit
def _sampled(split: Any, batch: MicroBatch, scale: jax.Array) -> jax.Array:
    options: dict[str, Any] = {"temperature": TEMPERATURE, "chunk_tokens": 5, "adapter_scale": scale}
    return sampled_logprobs(nnx.merge(*split), batch, **options)[0]


def ours(decoder: Decoder, rows: list[TokenRow], scale: float) -> np.ndarray:
    """The same from packed rows; the order of sequences is that of `rows`."""
    (batch,) = pack(rows, row_tokens=48, micro_batch_rows=2)
    found = np.asarray(_sampled(nnx.split(decoder), batch, jnp.float32(scale)))
    by_tokens = {}
    for i in range(found.shape[0]):
        for sequence in np.unique(batch.sequences[i][batch.mask[i]]):
            own = batch.mask[i] & (batch.sequences[i] == sequence)
            by_tokens[tuple(batch.tokens[i][batch.places[i][own]].tolist())] = found[i][own]
    return np.concatenate([by_tokens[tuple(row.tokens[row.sampled].tolist())] for row in rows])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_packed_rows_give_what_transformers_and_peft_give_for_each_sequence(pair, pattern):
    rows = [token_row(sampled, seed) for seed, sampled in enumerate(PATTERNS[pattern])]
    base, adapted = reference(pair.base, rows), reference(pair.adapted, rows)
    assert np.abs(base - adapted).max() > 0.05
    np.testing.assert_allclose(ours(pair.decoder, rows, 0.0), base, atol=1e-4)
    np.testing.assert_allclose(ours(pair.decoder, rows, 1.0), adapted, atol=1e-4)


def test_the_merged_model_is_read_by_transformers_and_here(pair, tmp_path):
    rows = [token_row(sampled, seed) for seed, sampled in enumerate(PATTERNS["append"])]
    save_decoder(pair.decoder, tmp_path)
    wanted = ours(pair.decoder, rows, 1.0)
    np.testing.assert_allclose(reference(in_transformers(tmp_path), rows), wanted, atol=1e-4)
    merged = load_decoder(tmp_path, lora=pair.lora, dtype=jnp.float32)  # its fresh adapter changes nothing
    assert merged.config == pair.decoder.config
    np.testing.assert_allclose(ours(merged, rows, 1.0), wanted, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_of_an_image_model_is_read(tmp_path, tied):
    _, fields = FAMILIES["gemma3"]
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(
        text_config=HF_SIZES | fields,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=tied,  # that of its text part stays true
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    if not tied:
        torch.nn.init.normal_(model.lm_head.weight, 0, 0.2)
    model.save_pretrained(tmp_path / "image")
    lora = Lora(3, 6.0)
    decoder = load_decoder(tmp_path / "image", lora=lora, dtype=jnp.float32)
    save_decoder(decoder, tmp_path / "text")
    rows = [token_row(sampled, seed) for seed, sampled in enumerate(PATTERNS["append"])]
    np.testing.assert_allclose(ours(decoder, rows, 1.0), reference(model, rows), atol=1e-4)
    assert load_decoder(tmp_path / "text", dtype=jnp.float32).config == decoder.config


def test_older_names_of_an_image_model_are_known_too():
    names = {
        "language_model.model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.language_model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.embed_tokens.weight": "model.embed_tokens.weight",
    }
    assert {name: hf._text_name(name) for name in names} == names


def test_an_adapter_that_the_model_cannot_have_is_refused(tmp_path):
    sparse = make_hf_folder(tmp_path / "sparse", *FAMILIES["qwen3_moe"][:1], **FAMILIES["qwen3_moe"][1])
    with pytest.raises(ModelError, match=r"dropout is 0\.1, but .* set it to 0, or leave gate_proj, router out of"):
        load_decoder(sparse, lora=Lora(2, 4.0, targets=("q_proj", "gate_proj", "router"), dropout=0.1))
    load_decoder(sparse, lora=Lora(2, 4.0, targets=("q_proj",), dropout=0.1))
    with pytest.raises(ModelError, match=r"targets has router, which a qwen3 model does not have: leave it out"):
        adapter_specs(TINY, Lora(2, 4.0, targets=("router",)))
