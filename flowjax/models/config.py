"""Hugging Face's config.json <-> the shape of a decoder, family by family."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowjax.models.shape import (
    AnyScaling,
    Experts,
    LinearScaling,
    ModelConfig,
    ModelError,
    RopeScaling,
    YarnScaling,
)
from flowjax.run import Run

# Fields that count as absent, so that the family's defaults hold, where they are null.
_ABSENT = ("rope_theta", "rope_local_base_freq", "rope_parameters", "head_dim", "sliding_window_pattern")
SLIDING, FULL = "sliding_attention", "full_attention"  # Hugging Face's names in layer_types


@dataclass(frozen=True)
class Family:
    """A model_type: its class in transformers, switches, and values that its config.json may leave out."""

    class_name: str
    switches: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json
    window_switch: bool = False  # a window only where use_sliding_window is true
    gemma: bool = False


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA_SWITCHES = {"norm_offset": 1.0, "post_norms": True}
_GEMMA2 = _GEMMA | {
    "vocab_size": 256000,
    "rope_theta": 1e4,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 8192,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}
_QWEN = {"rope_theta": 1e6, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES: dict[str, Family] = {
    "gemma2": Family("Gemma2ForCausalLM", _GEMMA_SWITCHES | {"qk_norm": False}, _GEMMA2, gemma=True),
    "gemma3_text": Family("Gemma3ForCausalLM", _GEMMA_SWITCHES | {"qk_norm": True}, _GEMMA3, gemma=True),
    "llama": Family("LlamaForCausalLM", {"qk_norm": False}, {"rope_theta": 1e4}),
    "mistral": Family("MistralForCausalLM", {"qk_norm": False}, {"rope_theta": 1e4, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True}, _QWEN, window_switch=True),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, _QWEN | {"head_dim": 128}, window_switch=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"qk_norm": True}, _QWEN, window_switch=True),
}


# Shapes of models that may not be downloaded yet, as their config.json gives them: a plan needs no weights.
_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
_SHAPES: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3": {
        "Qwen3-0.6B": (1024, 28, 16, 8, 3072, 151936, True),
        "Qwen3-1.7B": (2048, 28, 16, 8, 6144, 151936, True),
        "Qwen3-4B": (2560, 36, 32, 8, 9728, 151936, True),
        "Qwen3-8B": (4096, 36, 32, 8, 12288, 151936, False),
        "Qwen3-14B": (5120, 40, 40, 8, 17408, 151936, False),
        "Qwen3-32B": (5120, 64, 64, 8, 25600, 151936, False),
    },
    "qwen2": {
        "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
        "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
        "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
        "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
        "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False),
        "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
    },
    "llama": {
        "Llama-3.2-1B": (2048, 16, 32, 8, 8192, 128256, True),
        "Llama-3.2-3B": (3072, 28, 24, 8, 8192, 128256, True),
        "Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128256, False),
    },
}
_VARIANTS = ("-Instruct", "-Base")  # endings of names, of models with the same shape


def known_shape(name: str) -> ModelConfig | None:
    """The model that a folder or repository of that name holds; None where its shape is not built in."""
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    for kind, shapes in _SHAPES.items():
        if name in shapes:
            fields = dict(zip(_SHAPE, shapes[name], strict=True))
            return parse_config({"model_type": kind, **fields}, source=name)
    return None


def read_config(folder: str | Path) -> ModelConfig:
    """The model that `<folder>/config.json` describes.

    Raises:
        ModelError: there is no such file, it lacks a field, or it asks for something this decoder does not do.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(
            f"model folder {str(folder)!r} does not exist: give the path of a downloaded Hugging Face model "
            "(config.json, tokenizer.json, *.safetensors)"
        )
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: a Hugging Face model folder has one") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download the model again") from error
    return parse_config(raw, source=str(path))


def vocabulary_sizes(run: Run) -> dict[str, int]:
    """Vocabulary size of each policy's model, and of each base model by its name. Those whose folder is not on this
    machine are left out, as where engines and trainers run on others."""
    sizes: dict[str, int] = {}
    for name, base in run.bases.items():
        with contextlib.suppress(ModelError):
            sizes[name] = read_config(base.model.path).vocab_size
    bases = {name: policy.base.name for name, policy in run.policies.items()}
    return sizes | {name: sizes[base] for name, base in bases.items() if base in sizes}


def parse_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The model that a Hugging Face config describes, in the layout of transformers 4 or 5.

    Raises:
        ModelError: an unknown model_type, a missing field, or a switch that this decoder does not have.
    """
    kind = raw.get("model_type")
    if raw.get("quantization_config"):
        raise ModelError(f"{source} has quantization_config: quantised models are not read, take the one before that")
    if kind == "gemma3" and isinstance(raw.get("text_config"), Mapping):  # an image model: its text part alone
        ids = {name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in raw}
        tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}  # the text part's own is not looked at
        raw, kind = ids | dict(raw["text_config"]) | tied, "gemma3_text"
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{source}: model_type is {kind!r}, which is not one of {', '.join(sorted([*FAMILIES, 'gemma3']))}"
        )
    family = FAMILIES[kind]
    raw = {
        **family.defaults,
        **{name: value for name, value in raw.items() if value is not None or name not in (*_ABSENT, *_SHAPE)},
    }
    try:
        _refuse_unsupported(raw, kind, source)
        hidden_size, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        layers = int(raw["num_hidden_layers"])
        rope = _rope(raw, FULL)
        window, full_layers = _window(raw, family, layers)
        switches: dict[str, Any] = dict(family.switches)
        if family.gemma:
            switches |= _gemma(raw, kind, hidden_size, source)
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden_size // heads),
            ffn_size=int(raw["intermediate_size"]),
            architecture=kind,
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_scaling(rope, source),
            norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            sliding_window_tokens=window,
            full_attention_layers=full_layers,
            experts=_experts(raw, layers) if kind == "qwen3_moe" else None,
            max_positions=int(raw.get("max_position_embeddings", 32768)),
            bos_token_id=next(iter(_ids(raw, "bos_token_id")), None),
            eos_token_ids=_ids(raw, "eos_token_id"),
            pad_token_id=next(iter(_ids(raw, "pad_token_id")), None),
            **switches,
        )
    except KeyError as error:
        raise ModelError(f"{source} lacks the field {error.args[0]!r}: it is not a complete {kind} config") from error
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{source} has a field of another kind than {kind} configs have ({error})") from error


def _refuse_unsupported(raw: Mapping[str, Any], kind: str, source: str) -> None:
    gemma = FAMILIES[kind].gemma
    activation = ("gelu_pytorch_tanh",) if gemma else ("silu", "swish")
    wanted = {
        "hidden_activation" if gemma else "hidden_act": activation,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_bidirectional_attention": (False, None),
        "partial_rotary_factor": (1, None),
    }
    if kind == "qwen2":
        wanted.pop("attention_bias")
    for name, accepted in wanted.items():
        if name in raw and raw[name] not in accepted:
            raise ModelError(f"{source}: {name} is {raw[name]!r}; for {kind} only {accepted[0]!r} is implemented")
    types = raw.get("layer_types") or ()
    if unknown := [each for each in types if each not in (SLIDING, FULL)]:
        raise ModelError(f"{source}: layer_types has {unknown[0]!r}; only {FULL!r} and {SLIDING!r} are implemented")
    if kind == "llama" and raw.get("sliding_window") and SLIDING in types:
        raise ModelError(f"{source}: layer_types has {SLIDING!r}; for llama only {FULL!r} is implemented")
    # transformers has the window on all layers of this family, whatever the types say, and vLLM then on none.
    if kind == "qwen3_moe" and raw.get("use_sliding_window") and raw.get("sliding_window") and FULL in types:
        raise ModelError(
            f"{source}: layer_types has {FULL!r}; for qwen3_moe with a window only {SLIDING!r} is implemented"
        )


def _window(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, and the layers without it: by `layer_types`, or by the rule of older configs."""
    window = raw.get("sliding_window") or None  # some configs have 0 for none
    if window is None or (family.window_switch and not raw.get("use_sliding_window")):
        return None, ()
    types = raw.get("layer_types")
    if types:
        full = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    elif family.gemma:  # the last layer of each period has no window
        period = int(raw["sliding_window_pattern"])
        full = tuple(range(period - 1, layers, period))
    elif family.class_name == "MistralForCausalLM" or family.class_name == "Qwen3MoeForCausalLM":
        full = ()
    else:  # Qwen: the first `max_window_layers` layers have none, whatever the name says
        full = tuple(range(min(int(raw["max_window_layers"]), layers)))
    if len(full) == layers or family.class_name == "LlamaForCausalLM":
        return None, ()
    return int(window), full


def _gemma(raw: Mapping[str, Any], kind: str, hidden_size: int, source: str) -> dict[str, Any]:
    """Settings that only Gemma has."""
    switches = {
        "activation": "gelu_tanh",
        "embedding_scale": hidden_size**0.5,
        "attention_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        # Gemma 3's configs may have it, but neither transformers nor vLLM applies it there.
        "attention_soft_cap": raw.get("attn_logit_softcapping") if kind == "gemma2" else None,
        "logit_soft_cap": raw.get("final_logit_softcapping"),
    }
    if "rope_local_base_freq" in raw:
        local = _rope(raw, SLIDING)
        if _scaling(local, source) is not None:
            raise ModelError(f"{source}: the layers with a window have scaled rotary positions, which are not known")
        switches["window_rope_theta"] = float(local["rope_theta"])
    return switches


def _experts(raw: Mapping[str, Any], layers: int) -> Experts:
    every, dense = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or ()
    return Experts(
        count=int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        ffn_size=int(raw["moe_intermediate_size"]),
        normalise=bool(raw.get("norm_topk_prob", False)),
        # Experts are in every `every`-th layer, counted from 1, unless it is listed as dense.
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % every),
    )


def _ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = raw.get(name)
    ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    if not all(isinstance(each, int) for each in ids):
        raise TypeError(f"{name} is {value!r}")
    return ids


def _rope(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Rotary fields of the layers of one kind: `rope_parameters` of transformers 5, or the older `rope_theta` etc."""
    new = raw.get("rope_parameters") or {}
    if FULL in new or SLIDING in new:
        rope = dict(new.get(kind) or {})
    elif kind == SLIDING:
        rope = {}
    else:
        rope = dict(new or raw.get("rope_scaling") or {})
    default = raw["rope_local_base_freq"] if kind == SLIDING else raw["rope_theta"]
    left_out = {"original_max_position_embeddings": raw.get("max_position_embeddings")}
    left_out["rope_type"] = rope.get("type", "default")
    return left_out | rope | {"rope_theta": rope.get("rope_theta") or default}


def _scaling(rope: Mapping[str, Any], source: str) -> AnyScaling | None:
    if (part := rope.get("partial_rotary_factor")) not in (1, None):
        raise ModelError(f"{source}: the rope's partial_rotary_factor is {part!r}; only 1 is implemented")
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind == "llama3":
        return RopeScaling(
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    if kind == "yarn" and not rope.get("mscale"):
        return YarnScaling(
            factor=float(rope["factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
            fast_turns=float(rope.get("beta_fast") or 32),
            slow_turns=float(rope.get("beta_slow") or 1),
            attention_factor=rope.get("attention_factor"),
            truncate=bool(rope.get("truncate", True)),
        )
    known = "'default', 'linear', 'llama3' and 'yarn' (without mscale)"
    raise ModelError(f"{source}: rope_type is {kind!r}; only {known} are implemented")


def _scaling_fields(scaling: AnyScaling | None) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case RopeScaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnScaling():
            attention = {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "beta_fast": scaling.fast_turns,
                "beta_slow": scaling.slow_turns,
                "truncate": scaling.truncate,
            } | attention


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of `config`, readable by transformers 4 and 5 and by vLLM."""
    family = FAMILIES[config.architecture]
    scaled = _scaling_fields(config.rope_scaling)
    rope = {"rope_theta": config.rope_theta, **scaled}
    eos = config.eos_token_ids
    # Both names of some fields: transformers 5 reads rope_parameters and dtype, transformers 4 rope_theta, rope_scaling
    # and torch_dtype.
    fields = {
        "architectures": [family.class_name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": rope if config.rope_scaling else None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.pad_token_id,
        **_window_fields(config, family),
    }
    if config.architecture not in ("mistral", "qwen2"):
        fields["attention_bias"] = False
    if family.gemma:
        fields.pop("hidden_act")
        fields |= _gemma_fields(config, rope)
    if config.experts:
        fields |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.ffn_size,
            "norm_topk_prob": config.experts.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.experts.dense_layers),
        }
    return fields


def _window_fields(config: ModelConfig, family: Family) -> dict[str, Any]:
    window = config.sliding_window_tokens
    # Where the field is missing, these families have a window by default: without one, null must be written.
    if (config.architecture == "mistral" and not config.full_attention_layers) or (family.gemma and window is None):
        return {"sliding_window": window}
    if window is None:
        return {}
    switch = {"use_sliding_window": True} if family.window_switch else {}
    if config.architecture == "qwen3_moe":
        return switch | {"sliding_window": window}
    kinds = [FULL if layer in config.full_attention_layers else SLIDING for layer in range(config.layers)]
    older = {"max_window_layers": len(config.full_attention_layers)} if family.window_switch else {}
    return switch | older | {"sliding_window": window, "layer_types": kinds}


def _gemma_fields(config: ModelConfig, rope: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2),  # inverse of `_gemma`
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    if config.window_rope_theta is not None:
        local = {"rope_theta": config.window_rope_theta, "rope_type": "default"}
        fields |= {"rope_local_base_freq": config.window_rope_theta, "rope_parameters": {FULL: rope, SLIDING: local}}
    return fields
