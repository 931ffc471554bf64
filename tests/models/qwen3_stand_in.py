"""A stand-in for Qwen3 of some 10 M parameters, as a folder that trainer and engine read like the real one:

    python tests/models/qwen3_stand_in.py FOLDER

Architecture, files and tokenizer are Qwen3's in kind: byte-level BPE with its splitting and its marks, merges learnt
from the worlds' own prompts, a generation_config.json that asks for other sampling than we do. The chat template is
not the original, but written anew after its published behaviour (without tools): thoughts of earlier turns are left
out, and `enable_thinking=False` opens the reply with an empty one. Weights are random: it shows that everything fits,
not that anything learns.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
VOCABULARY = 8192  # rows of the embedding, some without a token, as in Qwen3
END, PAD = "<|im_end|>", "<|endoftext|>"
MARKS = (PAD, "<|im_start|>", END)  # left out of decoded text
TEXT_MARKS = ("<think>", "</think>")  # kept in it
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- set last = namespace(question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if last.question == messages|length - 1 and message.role == 'user' %}
        {%- set last.question = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {%- set content = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def make_stand_in(folder: Path, *, seed: int = 0) -> Path:
    """Write the model to `folder`; equal for equal seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "model_max_length": 40960,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "pad_token": PAD,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        bos_token_id=ids[PAD],
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    Qwen3ForCausalLM(config).float().save_pretrained(str(folder))
    both = [ids[END], ids[PAD]]
    _write(
        folder / "generation_config.json",
        {"do_sample": True, "eos_token_id": both, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    )
    return folder


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    room = VOCABULARY - len(MARKS) - len(TEXT_MARKS) - 64
    trainer = trainers.BpeTrainer(
        vocab_size=room, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TEXT_MARKS])
    return tokenizer


def _texts() -> Iterator[str]:
    """Prompts of every world, and the pages about them."""
    yield from _inside(json.loads((ROOT / "tests" / "envs" / "golden_prompts.json").read_text()))
    for page in sorted((ROOT / "docs" / "worlds").glob("*.md")):
        yield page.read_text()


def _inside(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inside(inner)


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")


if __name__ == "__main__":
    print(make_stand_in(Path(sys.argv[1])))
