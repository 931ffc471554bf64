"""Shape of a decoder: sizes and switches, whatever family it comes from."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


class ModelError(ValueError):
    """A model that cannot be built, read or placed; the message names what is wrong and the remedy."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary wavelengths: long ones times `factor`, short ones kept, a ramp between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LinearScaling:
    """All wavelengths times `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp between scaled and kept wavelengths, and sharper attention."""

    factor: float
    original_max_positions: int
    fast_turns: float = 32.0  # dimensions that turn more often than this over the original length are kept
    slow_turns: float = 1.0  # those that turn less often have their wavelength times `factor`
    attention_factor: float | None = None  # multiplies cosine and sine; None is 0.1 ln(factor) + 1
    truncate: bool = True  # round the ramp's ends to whole dimensions


AnyScaling = RopeScaling | LinearScaling | YarnScaling


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward map of some layers."""

    count: int
    per_token: int
    ffn_size: int
    normalise: bool = True  # the weights of a token's chosen experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with an ordinary feed-forward map


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder with RMSNorm, RoPE, grouped-query attention and a gated feed-forward map."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    architecture: str = "qwen3"  # Hugging Face's model_type
    rope_theta: float = 1e6
    rope_scaling: AnyScaling | None = None
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True  # RMSNorm over each head of q and k, before RoPE
    qkv_bias: bool = False
    sliding_window_tokens: int | None = None
    full_attention_layers: tuple[int, ...] = ()  # layers without the sliding window
    window_rope_theta: float | None = None  # rotary base of the layers with a window, if it differs; never scaled
    activation: Activation = "silu"
    norm_offset: float = 0.0  # Gemma's norms multiply by 1 + weight
    post_norms: bool = False  # Gemma also normalises the results of attention and feed-forward map
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # factor of q . k; None is 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_soft_cap: float | None = None
    experts: Experts | None = None
    max_positions: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "ffn_size", "max_positions")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"heads is {self.heads} and kv_heads is {self.kv_heads}: heads must be a multiple of it")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary positions need an even one")
        if self.experts and not 1 <= self.experts.per_token <= self.experts.count:
            raise ModelError(
                f"experts per token is {self.experts.per_token} and there are {self.experts.count} experts: "
                "choose at least one and no more than there are"
            )

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        if self.experts is None:
            return ()
        return tuple(layer for layer in range(self.layers) if layer not in self.experts.dense_layers)

    @cached_property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with an ordinary feed-forward map."""
        sparse = self.sparse_layers
        return tuple(layer for layer in range(self.layers) if layer not in sparse)

    def window(self, layer: int) -> int | None:
        """Most keys that a query of the layer sees, its own token included; None: all earlier ones."""
        return None if layer in self.full_attention_layers else self.sliding_window_tokens

    @property
    def longest_context(self) -> int:
        """Most tokens that an engine serves in one sequence: the positions, times their scaling's factor if they lack
        it."""
        match self.rope_scaling:
            case LinearScaling(factor) if self.window_rope_theta is None:  # Gemma 3's positions have the factor in them
                return int(self.max_positions * factor)
            case YarnScaling():  # some folders give the scaled number of positions, others the original one
                return max(self.max_positions, int(self.rope_scaling.original_max_positions * self.rope_scaling.factor))
        return self.max_positions

    def parameter_count(self) -> int:
        """Number of base parameters."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        small = (4 if self.post_norms else 2) * self.hidden_size + 2 * self.head_dim * self.qk_norm
        small += (self.query_size + 2 * self.kv_size) * self.qkv_bias
        count = self.layers * (attention + small) + len(self.dense_layers) * 3 * self.hidden_size * self.ffn_size
        if self.experts:
            sparse = self.experts.count * self.hidden_size * (1 + 3 * self.experts.ffn_size)
            count += len(self.sparse_layers) * sparse
        tables = 1 if self.tie_embeddings else 2
        return count + tables * self.vocab_size * self.hidden_size + self.hidden_size
