"""A nano folder is an ordinary Hugging Face folder."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import hf_logprobs, logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowjax.models.hf import load_decoder
from flowjax.models.nano import build_tokenizer, create_nano, nano_config
from flowjax.models.shape import ModelError

WORDS = ["#", "@", ".", "$", "up", "down", "wall,", "push(1)"]


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    shape: dict[str, Any] = {"hidden_size": 32, "layers": 2, "ffn_size": 64, "head_dim": 32}
    return folder, create_nano(WORDS, folder, key=jax.random.key(0), **shape)


def test_default_shape_is_the_documented_size():
    assert nano_config(60).parameter_count() == 796_032
    assert nano_config(60).vocab_size == 64
    assert nano_config(65).vocab_size == 128


def test_auto_tokenizer_splits_at_whitespace_only(nano):
    tokenizer = AutoTokenizer.from_pretrained(nano[0])
    assert tokenizer("@ wall,  push(1)\nup")["input_ids"] == [4, 9, 10, 7]
    assert tokenizer("@ nothing <eos>")["input_ids"] == [4, 2, 1]
    assert tokenizer.decode([4, 9, 10], skip_special_tokens=False) == "@ wall, push(1)"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_chat_template_joins_the_contents(nano):
    tokenizer = AutoTokenizer.from_pretrained(nano[0])
    messages = [{"role": "system", "content": "@ #"}, {"role": "user", "content": "up"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "@ # up"
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids == [4, 3, 7]


def test_model_loads_in_transformers_and_back(nano, tokens):
    folder, decoder = nano
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine = logprobs(decoder, tokens)
    np.testing.assert_allclose(hf_logprobs(model, tokens), mine, atol=1e-4)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    again = load_decoder(folder, dtype=jnp.float32, remat="none")
    assert again.config == decoder.config
    np.testing.assert_array_equal(logprobs(again, tokens), mine)


def test_initial_model_is_nearly_uniform(nano, tokens):
    entropy = -(np.exp(logprobs(nano[1], tokens)) * logprobs(nano[1], tokens)).sum(-1)
    assert entropy.min() > 0.98 * math.log(64)


PIECES = (
    "Solve this: step by step.",
    "\n\n",
    " +",
    " =",
    "4",
    " 3",
    " 4",
    "Ana",
    " Ana",
    " has",
    "x",
    "x * x",
    ".",
    "```\n",
)


def test_pieces_are_found_longest_first_and_put_together_again(tmp_path):
    build_tokenizer(PIECES, tmp_path, pieces=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Solve this: step by step.\n\nAna has 34. Ana has 4 + 3 =x * x"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "Solve this: step by step.", "\n\n", "Ana", " has", " 3", "4", ".", " Ana", " has", " 4", " +", " 3", " =",
        "x * x",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "".join(tokenizer.decode([token]) for token in ids) == text
    assert tokenizer("Bob 3")["input_ids"] == [2, PIECES.index(" 3") + 3], "a word that it lacks is unknown as a whole"


def test_messages_of_pieces_are_paragraphs(tmp_path):
    build_tokenizer(PIECES, tmp_path, pieces=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Ana"}, {"role": "assistant", "content": "4"}]
    shown = tokenizer.apply_chat_template([*messages, messages[0]], tokenize=False, add_generation_prompt=True)
    assert shown == "Ana\n\n4\n\nAna\n\n"


@pytest.mark.parametrize("word", ["", "two words", "tab\t"])
def test_words_hold_no_whitespace(tmp_path, word):
    with pytest.raises(ModelError, match=r"vocabulary word .* is empty or holds whitespace, at which text is split"):
        build_tokenizer(["a", word], tmp_path)


@pytest.mark.parametrize("word", ["a", "<eos>"])
def test_words_are_distinct(tmp_path, word):
    with pytest.raises(ModelError, match=f"vocabulary word '{word}' appears twice or is a special token"):
        build_tokenizer(["a", word], tmp_path)


def test_unknown_shape_field_is_refused():
    with pytest.raises(ModelError, match=r"config.model.nano is \{'width': 3\}: its fields are hidden_size, layers"):
        nano_config(10, width=3)
    with pytest.raises(ModelError, match=r"config.model.nano is \{'heads': 3\}: heads is 3 and kv_heads is 2"):
        nano_config(10, heads=3)


SERVE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True,
          gpu_memory_utilization=0.1, kv_cache_memory_bytes=2**26, distributed_executor_backend="uni")
out = llm.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])],
                   SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0))
print(json.dumps([[next(iter(place.values())).logprob for place in o.prompt_logprobs[1:]] for o in out]))
print(json.dumps(llm.get_tokenizer()("@ wall, up")["input_ids"]))
"""


@pytest.mark.integration
def test_vllm_serves_it_with_the_same_log_probabilities(nano, tokens):
    folder, decoder = nano
    command = [sys.executable, "-c", SERVE, str(folder), json.dumps(tokens.tolist())]
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    run = subprocess.run(command, env=os.environ | in_process, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    served, ids = (json.loads(line) for line in run.stdout.splitlines()[-2:])
    mine = np.take_along_axis(logprobs(decoder, tokens)[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(served, mine, atol=1e-4)
    assert ids == [4, 9, 7]
