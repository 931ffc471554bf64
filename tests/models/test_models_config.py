"""Hugging Face configs of both layouts become the same model; what is not implemented is refused by name."""

import dataclasses
import json
import math

import jax.numpy as jnp
import pytest
from tiny_models import TINY

from flowjax.models.config import hf_config, parse_config, read_config
from flowjax.models.decoder import base_specs
from flowjax.models.nano import nano_config
from flowjax.models.shape import ModelError, RopeScaling, YarnScaling

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 40960,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_qwen3_0_6b():
    config = parse_config(QWEN3)
    assert config.parameter_count() == 596_049_920  # as published
    assert (config.qk_norm, config.qkv_bias, config.eos_token_ids) == (True, False, (151645,))


def test_old_and_new_layout_of_rotary_fields_agree():
    old = {**QWEN3, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": SCALING}
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**SCALING, "rope_theta": 5e5}
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert parse_config(old).rope_theta == 5e5


def test_what_is_left_out_is_as_in_transformers():
    without = {name: value for name, value in QWEN3.items() if name != "head_dim"}
    assert parse_config(without).head_dim == 128
    assert parse_config(without | {"model_type": "qwen2"}).head_dim == 64
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    assert parse_config(QWEN3 | {"rope_parameters": yarn}).rope_scaling == YarnScaling(4.0, 40960)
    yarn["original_max_position_embeddings"] = 32768
    assert parse_config(QWEN3 | {"rope_parameters": yarn}).rope_scaling == YarnScaling(4.0, 32768)


@pytest.mark.parametrize("changes", [{}, {"architecture": "qwen2", "qk_norm": False, "qkv_bias": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_is_read(tmp_path, changes, tied):
    config = dataclasses.replace(TINY, **changes, tie_embeddings=tied, eos_token_ids=(1, 2))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, "float32")))
    assert read_config(tmp_path) == config
    count = sum(math.prod(spec.shape) for spec in base_specs(config, jnp.float32).values())
    assert config.parameter_count() == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', which is not one of gemma2, gemma3, gemma3_text, llama, "),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; for qwen3 only 'silu' is implemented"),
        ({"attention_bias": True}, "attention_bias is True; for qwen3 only False is implemented"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'; only 'default', 'linear'"),
        ({"hidden_size": None}, "config.json lacks the field 'hidden_size': it is not a complete qwen3 config"),
        ({"intermediate_size": []}, r"config.json has a field of another kind than qwen3 configs have \(int\(\) arg"),
        ({"eos_token_id": "</s>"}, r"another kind than qwen3 configs have \(eos_token_id is '</s>'\)"),
        ({"pad_token_id": "<pad>"}, r"another kind than qwen3 configs have \(pad_token_id is '<pad>'\)"),
        ({"rope_scaling": 4}, r"another kind than qwen3 configs have \("),
        ({"num_key_value_heads": 3}, "heads is 16 and kv_heads is 3: heads must be a multiple of it"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "has 'chunked_attention'; only 'full_attention' and",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "config.json has quantization_config: quantised models are",
        ),
        ({"head_dim": 65}, "head_dim is 65: rotary positions need an even one"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ModelError, match=message):
        parse_config(QWEN3 | changes)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_what_an_engine_would_do_otherwise_is_refused(kind: str):
    described = QWEN3 | {"model_type": kind}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    assert parse_config(described | {"rope_parameters": rope | {"partial_rotary_factor": 1.0}})
    for changes in ({"rope_parameters": rope | {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5}):
        with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5; .*only 1 is implemented"):
            parse_config(described | changes)
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention"] * int(QWEN3["num_hidden_layers"])}
    if kind == "llama":
        with pytest.raises(ModelError, match="layer_types has 'sliding_attention'; for llama only 'full_attention'"):
            parse_config(described | windows)


def test_experts_have_one_window_for_all_layers():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    described = QWEN3 | sizes | {"model_type": "qwen3_moe", "sliding_window": 8, "use_sliding_window": True}
    kinds = ["sliding_attention"] * int(QWEN3["num_hidden_layers"])
    config = parse_config(described | {"layer_types": kinds})
    assert config.sliding_window_tokens == 8
    assert parse_config(hf_config(config, "bfloat16")) == config
    mixed = {"layer_types": ["full_attention", *kinds[1:]]}
    with pytest.raises(ModelError, match="has 'full_attention'; for qwen3_moe with a window only 'sliding_attention'"):
        parse_config(described | mixed)
    assert parse_config(described | mixed | {"use_sliding_window": False}).sliding_window_tokens is None


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_a_window_of_no_tokens_is_none(kind: str):
    """As engines read it."""
    described = QWEN3 | {"model_type": kind, "use_sliding_window": True, "max_window_layers": 0}
    assert parse_config(described | {"sliding_window": 8}).sliding_window_tokens == 8
    assert parse_config(described | {"sliding_window": 0}).sliding_window_tokens is None


def test_a_window_that_is_not_named_is_that_of_transformers():
    described = {name: value for name, value in QWEN3.items() if name not in ("sliding_window", "hidden_act")}
    for kind in ("mistral", "gemma2"):
        assert parse_config(described | {"model_type": kind}).sliding_window_tokens == 4096
        without = parse_config(described | {"model_type": kind, "sliding_window": None})
        assert without.sliding_window_tokens is None
        assert parse_config(hf_config(without, "bfloat16")) == without


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gemma2"])
def test_layers_without_the_window_are_written(kind: str):
    kinds = ["sliding_attention", "full_attention"] * (int(QWEN3["num_hidden_layers"]) // 2)
    described = {name: value for name, value in QWEN3.items() if name != "hidden_act"}
    described |= {"model_type": kind, "use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    config = parse_config(described)
    written = hf_config(config, "bfloat16")
    assert written["layer_types"] == kinds
    assert parse_config(written) == config


@pytest.mark.parametrize("name", ["hidden_size", "layers", "heads", "kv_heads", "ffn_size"])
def test_sizes_are_at_least_one(name):
    with pytest.raises(ModelError, match=f"config.model.nano is .*{name} is 0: it must be at least 1"):
        nano_config(64, **{name: 0})


def test_missing_field_is_named():
    with pytest.raises(ModelError, match=r"config.json lacks the field 'hidden_size': it is not a complete qwen3"):
        parse_config({key: value for key, value in QWEN3.items() if key != "hidden_size"})


def test_unreadable_folders(tmp_path):
    with pytest.raises(ModelError, match="does not exist: give the path of a downloaded Hugging Face model"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json is missing: a Hugging Face model folder has one"):
        read_config(tmp_path)
    for written in ("{", "[]"):
        (tmp_path / "config.json").write_text(written)
        with pytest.raises(ModelError, match=r"config.json cannot be read .*: download the model again"):
            read_config(tmp_path)
