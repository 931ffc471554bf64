"""Sentence encoders for dense retrieval: a Hugging Face folder, or any function named by its dotted path."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowjax.envs.base import WorldError
from flowjax.envs.search.index import Encoder

MAX_TOKENS = 256
_ENCODED_AT_ONCE = 64


def load_encoder(name: str) -> Encoder:
    """`package.module:function`, called with texts and "query" or "passage", or the folder of a Hugging Face encoder.

    A folder's model is mean-pooled and its vectors scaled to length one, as E5 and MiniLM want it; texts get E5's
    prefixes where the folder's name holds `e5`.

    Raises:
        WorldError: there is no such folder or function.
    """
    if Path(name).is_dir():
        return _FolderEncoder(name)
    module, separator, function = name.partition(":")
    try:
        if not separator:
            raise ImportError("neither a folder nor package.module:function")
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise WorldError(
            f"the encoder {name!r} cannot be loaded ({error}): give the folder of a Hugging Face sentence encoder, for "
            "example intfloat/e5-base-v2 downloaded, or package.module:function"
        ) from error


class _FolderEncoder:
    def __init__(self, folder: str):
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise WorldError(f"an encoder folder needs torch and transformers ({error}): install them") from error
        self._torch: Any = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True).to(self._device).eval()
        prefixed = "e5" in Path(folder).resolve().name.lower()
        self._prefixes = {"query": "query: ", "passage": "passage: "} if prefixed else {"query": "", "passage": ""}

    def __call__(self, texts: Sequence[str], role: Literal["query", "passage"]) -> np.ndarray:
        prefixed = [self._prefixes[role] + text for text in texts]
        blocks = range(0, len(prefixed), _ENCODED_AT_ONCE)
        return np.concatenate([self._encode(prefixed[start : start + _ENCODED_AT_ONCE]) for start in blocks])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        torch = self._torch
        settings = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
        inputs = self._tokenizer(list(texts), **settings).to(self._device)
        with torch.inference_mode():
            states = self._model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None].float()
            mean = (states * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
