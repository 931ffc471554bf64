"""What a decoder looks like, and how Hugging Face's config.json says so."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A model that cannot be built, read or placed; the message names what is wrong and the remedy."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths: long ones by `factor`, short ones not, a ramp between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer with RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    architecture: str = "qwen3"  # Hugging Face's model_type
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True  # RMSNorm over each head of q and k, before RoPE
    qkv_bias: bool = False
    sliding_window_tokens: int | None = None
    max_positions: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ModelError(f"heads is {self.heads} and kv_heads is {self.kv_heads}: heads must be a multiple of it")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary positions need an even one")

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def parameter_count(self) -> int:
        """Number of base parameters."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        small = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        small += (self.query_size + 2 * self.kv_size) * self.qkv_bias
        per_layer = attention + 3 * self.hidden_size * self.ffn_size + small
        tables = 1 if self.tie_embeddings else 2
        return self.layers * per_layer + tables * self.vocab_size * self.hidden_size + self.hidden_size


# model_type -> (class name, default rope_theta, default norm epsilon, qk_norm, qkv_bias)
_ARCHITECTURES: dict[str, tuple[str, float, float, bool, bool]] = {
    "qwen3": ("Qwen3ForCausalLM", 1e6, 1e-6, True, False),
    "qwen2": ("Qwen2ForCausalLM", 1e6, 1e-6, False, True),
    "llama": ("LlamaForCausalLM", 1e4, 1e-6, False, False),
    "mistral": ("MistralForCausalLM", 1e4, 1e-6, False, False),
}


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
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: a Hugging Face model folder has one") from error
    except (OSError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download the model again") from error
    return parse_config(raw, source=str(path))


def parse_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The model that a Hugging Face config describes, in the layout of transformers 4 or 5."""
    kind = raw.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ModelError(f"{source}: model_type is {kind!r}, which is not one of {', '.join(sorted(_ARCHITECTURES))}")
    _, rope_theta, norm_epsilon, qk_norm, qkv_bias = _ARCHITECTURES[kind]
    _refuse_unsupported(raw, kind, source)
    try:
        hidden_size, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        rope_theta, rope_scaling = _rope(raw, rope_theta, source)
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden_size,
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden_size // heads),
            ffn_size=int(raw["intermediate_size"]),
            architecture=kind,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_epsilon=float(raw.get("rms_norm_eps", norm_epsilon)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            sliding_window_tokens=_sliding_window(raw, kind),
            max_positions=int(raw.get("max_position_embeddings", 32768)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_id_tuple(raw.get("eos_token_id")),
            pad_token_id=raw.get("pad_token_id"),
        )
    except KeyError as error:
        raise ModelError(f"{source} lacks the field {error.args[0]!r}: it is not a complete {kind} config") from error


def _refuse_unsupported(raw: Mapping[str, Any], kind: str, source: str) -> None:
    wanted = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)}
    if kind == "qwen2":
        wanted.pop("attention_bias")
    for name, accepted in wanted.items():
        if name in raw and raw[name] not in accepted:
            raise ModelError(f"{source}: {name} is {raw[name]!r}; for {kind} only {accepted[0]!r} is implemented")
    if kind in ("qwen2", "qwen3") and raw.get("use_sliding_window"):
        raise ModelError(f"{source}: use_sliding_window is true; for {kind} only full attention is implemented")


def _sliding_window(raw: Mapping[str, Any], kind: str) -> int | None:
    return raw.get("sliding_window") if kind == "mistral" else None


def _id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(raw: Mapping[str, Any], default_theta: float, source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or default_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{source}: rope_type is {kind!r}; only 'default' and 'llama3' are implemented")
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of `config`, readable by transformers 4 and 5 and by vLLM."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling := config.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    eos = config.eos_token_ids
    fields = {
        "architectures": [_ARCHITECTURES[config.architecture][0]],
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
    }
    if config.architecture == "mistral":
        fields["sliding_window"] = config.sliding_window_tokens
    elif config.architecture != "qwen2":
        fields["attention_bias"] = False
    return fields
