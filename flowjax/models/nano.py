"""Nano models: a small Qwen3 with a tokenizer of the world's own vocabulary, as a Hugging Face folder.

The vocabulary is words, and texts are split at white space: for a policy, whose prompts are made of such words. Or it
is pieces, spaces included, which joined give the text again: for a model that is asked in ordinary sentences.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from flowjax.models.decoder import Decoder
from flowjax.models.hf import save_decoder
from flowjax.models.shape import ModelConfig, ModelError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN)  # ids 0, 1, 2
VOCAB_MULTIPLE = 64
# The prompt is the contents of the messages and nothing else: every token counts at this size.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"
PIECES_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\\n\\n' }}{% endfor %}"
# Pieces of a text where none of the vocabulary's longer ones begins: words and digits with the space before, signs.
_SMALL_PIECE = r" ?[A-Za-z_]+| ?[0-9]|\n+|[^\n]"
_SPECIAL_SIGN = re.compile(r"([\\.^$|?*+()\[\]{}/#&~-])")


@dataclass(frozen=True)
class NanoShape:
    """Sizes of a nano model; the defaults are 0.8 M parameters."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32  # vLLM's CPU attention takes no 8; 32 and 64 are safe
    ffn_size: int = 384
    max_positions: int = 2048
    rope_theta: float = 1e4


def nano_config(vocab_size: int, **shape: Any) -> ModelConfig:
    """A tied Qwen3 of `NanoShape(**shape)`, its vocabulary padded to a multiple of 64.

    Raises:
        ModelError: `shape` has a field that NanoShape lacks, or sizes that do not go together.
    """
    try:
        sizes = NanoShape(**shape)
    except TypeError as error:
        known = ", ".join(NanoShape.__dataclass_fields__)
        raise ModelError(f"config.model.nano is {shape}: its fields are {known}") from error
    try:
        return ModelConfig(
            vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            hidden_size=sizes.hidden_size,
            layers=sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            ffn_size=sizes.ffn_size,
            rope_theta=sizes.rope_theta,
            max_positions=sizes.max_positions,
            eos_token_ids=(SPECIAL_TOKENS.index(EOS),),
            pad_token_id=SPECIAL_TOKENS.index(PAD),
        )
    except ModelError as error:
        raise ModelError(f"config.model.nano is {shape}: {error}") from error


def build_tokenizer(words: Sequence[str], folder: str | Path, *, pieces: bool = False) -> int:
    """Write a tokenizer that splits at whitespace and knows exactly `words`; returns the number of tokens.

    With `pieces` it takes at each place the longest of `words` that begins there, which may be a whole sentence, and
    otherwise a word, digit or sign. A text of known pieces is the same after encoding and decoding.

    Ids are <pad> 0, <eos> 1, <unk> 2, then the words in order. transformers' AutoTokenizer and vLLM read the files.

    Raises:
        ModelError: a word is empty, holds whitespace (as a piece may), is a special token or appears twice.
    """
    seen: set[str] = set(SPECIAL_TOKENS)
    for word in words:
        if not word or (word.split() != [word] and not pieces):
            raise ModelError(f"the vocabulary word {word!r} is empty or holds whitespace, at which text is split")
        if word in seen:
            raise ModelError(f"the vocabulary word {word!r} appears twice or is a special token")
        seen.add(word)
    vocab = {word: i for i, word in enumerate((*SPECIAL_TOKENS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    if pieces:
        longer = sorted((word for word in words if not re.fullmatch(_SMALL_PIECE, word)), key=len, reverse=True)
        # Longest first: a regular expression takes the first alternative that fits.
        patterns = [*(_SPECIAL_SIGN.sub(r"\\\1", word) for word in longer), _SMALL_PIECE]
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": PIECES_TEMPLATE if pieces else CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return len(vocab)


def create_nano(
    words: Sequence[str], folder: str | Path, *, key: jax.Array, pieces: bool = False, **shape: Any
) -> Decoder:
    """Write tokenizer and random float32 weights to `folder`; returns the decoder, all of it trainable."""
    config = nano_config(len(words) + len(SPECIAL_TOKENS), **shape)
    build_tokenizer(words, folder, pieces=pieces)
    decoder = Decoder(config, dtype=jnp.float32, remat="none", key=key)
    save_decoder(decoder, folder)
    return decoder
