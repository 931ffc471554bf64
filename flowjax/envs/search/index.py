"""Indices over passages: BM25 by words, dense by vectors of a sentence encoder; and the in-process retriever.

Each index answers a batch of queries with the best rows of each. Equal scores are ordered by row, so that BM25 gives
the same passages for a query on every machine. In a dense index passages with nearly equal scores may change places:
faiss rounds products of a batch of queries differently from those of one query.
"""

import contextlib
import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Float, Int

from flowjax.envs import NotReady, WorldError
from flowjax.envs.search.corpus import CORPUS, Corpus, Document, encyclopedia, pages
from flowjax.fields import load_named
from flowjax.files import new_file, new_folder, replace_file, sampled_digest_of

Scored = list[tuple[int, float]]  # rows and their scores, best first
Encoder = Callable[[Sequence[str], Literal["query", "passage"]], Float[np.ndarray, "texts width"]]
Vectors = Callable[[int, int], Float[np.ndarray, "passages width"]]  # (start, end) -> vectors of passages [start, end)
# Two letters or digits or more; of Chinese and Japanese, which leave no space between words, each character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]{2,}")
_BLOCK = 1024  # passages encoded at once
ADDED_AT_ONCE = 16_384  # vectors in memory while an index is compressed
SAMPLED = 16  # of these blocks, or up to twice as many, spread over all passages, train its cells and codes
_TIED = 16  # further passages asked of faiss, so that ties at the end can be ordered by row
MAX_TOKENS = 256  # of a passage that a folder's encoder reads
_ENCODED_AT_ONCE = 64


class Index(Protocol):
    """An index, as the server and the in-process retriever use it."""

    kind: str

    def search(self, queries: Sequence[str], count: int) -> list[Scored]:
        """At most `count` rows for each query; fewer where fewer match it."""
        ...


class BM25Index:
    """BM25 (k1 1.5, b 0.75, Lucene's idf) over lower-case English stems without stop words, by bm25s."""

    kind = "bm25"

    def __init__(self, texts: Sequence[str]):
        bm25s, self._stop_words, self._stemmer = import_bm25s()
        tokens = bm25s.tokenize(
            list(texts), token_pattern=_WORD.pattern, stopwords="en", stemmer=self._stemmer, show_progress=False
        )
        if not any(tokens.ids):
            raise WorldError("no passage of the corpus has a word to search for: all are empty, or of stop words alone")
        self._bm25: Any = bm25s.BM25()
        self._bm25.index(tokens, show_progress=False)
        self._read()

    @classmethod
    def load(cls, folder: str | Path) -> "BM25Index":
        """The index that `save` wrote, with its postings memory-mapped."""
        index = cls.__new__(cls)
        bm25s, index._stop_words, index._stemmer = import_bm25s()
        index._bm25 = bm25s.BM25.load(str(folder), mmap=True)
        index._read()
        return index

    def save(self, folder: str | Path, made: Mapping[str, Any] | None = None) -> None:
        """Save to a folder, atomically, with what it was made of. One that another process made meanwhile stays."""
        with contextlib.suppress(FileExistsError), new_folder(Path(folder)) as unfinished:
            self._bm25.save(str(unfinished), show_progress=False)
            _keep_how_made(unfinished, made, unfinished)

    def _read(self) -> None:
        scores = self._bm25.scores
        self._weights, self._rows, self._starts = scores["data"], scores["indices"], scores["indptr"]
        self._rank: dict[str, int] = self._bm25.vocab_dict
        self.passages = int(scores["num_docs"])

    def search(self, queries: Sequence[str], count: int) -> list[Scored]:
        return [self._scored(self._terms(query), count) for query in queries]

    def _terms(self, query: str) -> list[int]:
        words = [word for word in _WORD.findall(query.lower()) if word not in self._stop_words]
        return [self._rank[stem] for stem in self._stemmer.stemWords(words) if stem in self._rank]

    def _scored(self, terms: Sequence[int], count: int) -> Scored:
        spans = [slice(self._starts[term], self._starts[term + 1]) for term in terms]
        if not spans:
            return []
        # A word's postings are passages and its weights in them: a passage's score is the sum over the query's words.
        rows = np.concatenate([self._rows[span] for span in spans])
        return _best(np.bincount(rows, np.concatenate([self._weights[span] for span in spans])), count, 0.0)


class DenseIndex:
    """Inner products of unit vectors: exact (by faiss if installed, else numpy), or those of a given faiss index."""

    kind = "dense"

    def __init__(self, encode: Encoder, vectors: Float[np.ndarray, "passages width"] | Any):
        """`vectors`: one row per passage, or a faiss index of them."""
        self._encode = encode
        self._index: Any = None
        self._vectors: Any = None
        if not isinstance(vectors, np.ndarray):
            self._index = vectors
        elif (faiss := _faiss()) is not None:
            self._index = faiss.IndexFlatIP(vectors.shape[1])
            self._index.add(np.ascontiguousarray(vectors, np.float32))
        else:
            self._vectors = np.ascontiguousarray(vectors, np.float32)
        self.passages = int(len(vectors) if isinstance(vectors, np.ndarray) else vectors.ntotal)

    @classmethod
    def build(
        cls, texts: Sequence[str], encode: Encoder, save_to: Path | None = None, made: Mapping[str, Any] | None = None
    ) -> "DenseIndex":
        """Encode every text; with `save_to`, a .npy file, save the vectors there, and beside them what they are of."""
        if save_to is not None and save_to.suffix != ".npy":
            raise WorldError(f"--index_path={save_to} is not there and can be made only as a .npy file: name it so")
        vectors = encode_passages(texts, encode)
        if save_to is not None:
            with new_file(save_to) as unfinished:
                np.save(unfinished, vectors)
                _keep_how_made(save_to, made, unfinished)
        return cls(encode, vectors)

    @classmethod
    def load(cls, path: str | Path, encode: Encoder) -> "DenseIndex":
        """Vectors from a .npy file; from any other, such as the published e5_Flat.index, a faiss index, mapped."""
        if Path(path).suffix == ".npy":
            return cls(encode, np.load(path))
        faiss = read_faiss(str(path))
        return cls(encode, faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY))

    def search_with(self, options: str) -> None:
        """Set faiss's search parameters, such as nprobe=64: for an index with cells (IVF), the number of cells that are
        searched for each query. More take longer and miss less.

        Raises:
            WorldError: the index has no such parameter.
        """
        faiss = read_faiss(f"--search_with={options}")
        try:
            faiss.ParameterSpace().set_index_parameters(self._index, options)
        except (RuntimeError, TypeError) as error:
            raise WorldError(f"--search_with={options}: the index has no such parameter ({error})") from error

    def search(self, queries: Sequence[str], count: int) -> list[Scored]:
        wanted = np.ascontiguousarray(self._encode(queries, "query"), np.float32)
        if self._index is not None:
            if wanted.shape[1] != self._index.d:
                raise ValueError(f"it makes {wanted.shape[1]} numbers of a text, the index has {self._index.d}")
            # Of equal scores faiss may keep any: `_TIED` more are asked for, so that the lowest rows are among them.
            scores, rows = self._index.search(wanted, min(count + _TIED, self.passages))
            return [_ordered(row[row >= 0], score[row >= 0])[:count] for row, score in zip(rows, scores, strict=True)]
        # As with faiss, a passage or a query whose numbers are NaN is not found: `fmax` takes the other number.
        return [_best(np.fmax(scores, -np.inf), count, -np.inf) for scores in wanted @ self._vectors.T]


def encode_passages(texts: Sequence[str], encode: Encoder) -> Float[np.ndarray, "passages width"]:
    """Vectors of the texts, encoded `_BLOCK` at a time."""
    blocks = [encode(texts[start : start + _BLOCK], "passage") for start in range(0, len(texts), _BLOCK)]
    return np.concatenate(blocks).astype(np.float32)


def _best(scores: Float[np.ndarray, "rows"], count: int, floor: float) -> Scored:
    """The `count` best rows above `floor`, ties by row. Overwrites `scores`. For a small `count`, repeated scans are
    faster than sorting."""
    best: Scored = []
    for _ in range(min(count, len(scores))):
        row = int(scores.argmax())
        if scores[row] <= floor:
            break
        best.append((row, float(scores[row])))
        scores[row] = floor
    return best


def _ordered(rows: Int[np.ndarray, "found"], scores: Float[np.ndarray, "found"]) -> Scored:
    order = np.lexsort((rows, -scores))
    return list(zip(rows[order].tolist(), scores[order].tolist(), strict=True))


def _faiss() -> Any:
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it logs at length how it is loaded
    try:
        import faiss
    except ImportError:
        return None
    return faiss


def read_faiss(needed_for: str) -> Any:
    """The module faiss.

    Raises:
        WorldError: it is not installed.
    """
    if (faiss := _faiss()) is None:
        raise WorldError(f'{needed_for} needs faiss: pip install -e ".[search-dense]"')
    return faiss


def read_vectors(path: Path) -> tuple[Vectors, int]:
    """The vectors of a .npy file or of an exact faiss index, memory-mapped, and their number.

    Raises:
        WorldError: the file holds something else.
    """
    remedy = "give a .npy file with a row of numbers for each passage, or an exact faiss index"
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, EOFError, OSError) as error:
            raise WorldError(f"--vectors={path} cannot be read ({error}): {remedy}") from error
        if array.ndim != 2 or array.dtype.kind != "f":
            raise WorldError(f"--vectors={path} holds {array.dtype} of shape {array.shape}: {remedy}")
        return lambda start, end: array[start:end], len(array)
    faiss = read_faiss(f"--vectors={path}")
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise WorldError(f"--vectors={path} cannot be read ({error}): {remedy}") from error
    return lambda start, end: index.reconstruct_n(start, end - start), int(index.ntotal)


def compress(vectors: Vectors, passages: int, form: str, path: Path, made: Mapping[str, Any] | None = None) -> None:
    """Write a faiss index of the given form, a faiss factory string, adding a block of vectors at a time; and beside it
    what it was made of.

    Raises:
        WorldError: faiss is not installed, or cannot make an index of that form from so many passages.
    """
    faiss = read_faiss(f"--compress={form}")

    def block(start: int) -> np.ndarray:
        return np.ascontiguousarray(vectors(start, min(start + ADDED_AT_ONCE, passages)), np.float32)

    starts = range(0, passages, ADDED_AT_ONCE)
    try:
        index = faiss.index_factory(vectors(0, 1).shape[1], form, faiss.METRIC_INNER_PRODUCT)
        index.train(np.concatenate([block(start) for start in starts[:: max(len(starts) // SAMPLED, 1)]]))
    except RuntimeError as error:
        raise WorldError(f"--compress={form}: faiss makes no such index of {passages} passages ({error})") from error
    for start in starts:
        index.add(block(start))
    with new_file(path) as unfinished:
        faiss.write_index(index, str(unfinished))
        _keep_how_made(path, made, unfinished)


def kept(path: Path, wanted: Mapping[str, Any], load: Callable[[Path], Any]) -> Any:
    """The index at a path. The file that `_keep_how_made` wrote must agree with `wanted`; an index made by other
    programs has no such file, and is accepted.

    Raises:
        WorldError: it was made otherwise, or cannot be read, for which each library has other exceptions.
    """
    note = _how_made_at(path)
    try:
        of_file = _of_file(path)
        wanted = {**wanted, **of_file}
        lacking = of_file | {"lines": wanted.get("lines")}  # in older notes
        made = lacking | json.loads(note.read_text()) if note.exists() else wanted
        others = [
            f"{name} {made.get(name)!r}, here {value!r}" for name, value in wanted.items() if made.get(name) != value
        ]
        if others:
            raise WorldError(
                f"--index_path={path} was made of, or with, something else ({'; '.join(others)}): remove it "
                "to have it made anew, or start the server as it was started then"
            )
        return load(path)
    except WorldError:  # the above, or a library is missing
        raise
    except Exception as error:
        remedy = "remove it to have it made anew, or give another"
        raise WorldError(f"--index_path={path} cannot be read ({error!r}): {remedy}") from error


def try_writing(path: Path) -> None:
    """Check that a path can be written, before hours of encoding.

    Raises:
        WorldError: it cannot.
    """
    try:
        with new_file(path.with_name(f"{path.name}.trial")) as trial:
            trial.touch()
        path.with_name(f"{path.name}.trial").unlink(missing_ok=True)  # another server that starts has taken it away
    except OSError as error:
        raise WorldError(f"--index_path={path} cannot be written ({error}): give another") from error


def _keep_how_made(path: Path, made: Mapping[str, Any] | None, unfinished: Path) -> None:
    """Write, in an index's folder or beside its file, from what and how it was made, before it has its name `path`."""
    if made is not None:
        replace_file(_how_made_at(path), json.dumps({**made, **_of_file(unfinished)}, indent=1))


def _of_file(path: Path) -> dict[str, str]:
    """Digest of an index's file: of two servers that make one at once, one may write it, the other its note."""
    return {} if path.is_dir() else {"file_digest": sampled_digest_of(path)[:16]}


def _how_made_at(path: Path) -> Path:
    return path / "made.json" if path.is_dir() else path.with_name(f"{path.name}.made.json")


def import_bm25s() -> tuple[Any, frozenset[str], Any]:
    """The module bm25s, its English stop words, and a stemmer.

    Raises:
        WorldError: they are not installed.
    """
    try:
        with _without("jax", "jax.lax", "numba"):
            import bm25s
            from bm25s.stopwords import STOPWORDS_EN
        import Stemmer
    except ImportError as error:
        raise NotReady(f'BM25 needs bm25s and PyStemmer ({error}): pip install -e ".[search]"') from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s, frozenset(STOPWORDS_EN), Stemmer.Stemmer("english")


@contextlib.contextmanager
def _without(*modules: str) -> Iterator[None]:
    """Hide modules during an import: bm25s would start a jax backend, and with it take GPU memory, for a top-k that is
    not used here."""
    hidden: dict[str, Any] = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(modules))  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        for name, module in hidden.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def load_encoder(name: str) -> Encoder:
    """The encoder at `package.module:function` (of texts and "query" or "passage"), or in a Hugging Face folder.

    A folder's model is mean-pooled and its vectors scaled to length one, as E5 and MiniLM require; texts get E5's
    prefixes where the folder's name contains `e5`.

    Raises:
        WorldError: there is no such folder or function, or torch or transformers, which a folder needs, is missing.
    """
    if Path(name).is_dir():
        return _FolderEncoder(name)
    remedy = "give the folder of a Hugging Face sentence encoder, for example intfloat/e5-base-v2 downloaded, or \
package.module:function"
    return load_named("the encoder", name, WorldError, remedy)


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


# ----------------------------------------------------------------------------------------------------------- retrievers

# They find an environment's passages: by an index in its process, or by asking a retrieval server (`protocol`).

# Of a corpus that is indexed in the environment's process: 40 s at 3 MB/s, while a worker's limit to open one is 120 s.
LOCAL_LIMIT_BYTES = 128_000_000


class Retriever(Protocol):
    """A source of passages and pages."""

    def search(self, query: str, count: int) -> list[Document]:
        """The `count` best passages, the best first."""
        ...

    def access(self, url: str) -> Document | None:
        """The page at an address; None where there is none."""
        ...


class LocalRetriever:
    """Passages and their index in this process."""

    def __init__(self, documents: Sequence[Document], index: Index):
        self._documents, self._index = documents, index

    def search(self, query: str, count: int) -> list[Document]:
        return [self._documents[row] for row, _ in self._index.search([query], count)[0]]

    def access(self, url: str) -> Document | None:
        row = self._pages.get(url)
        return None if row is None else self._documents[row]

    @functools.cached_property
    def _pages(self) -> Mapping[str, int]:
        return pages(self._documents)


@functools.lru_cache(maxsize=2)
def local(path: str, documents: int, seed: int) -> LocalRetriever:
    """The retriever that all environments of this process share: over a folder's corpus, or the generated one.

    Raises:
        WorldError: the corpus is missing, or larger than `LOCAL_LIMIT_BYTES`.
    """
    file = Path(path) / CORPUS
    if path and file.is_file() and file.stat().st_size > LOCAL_LIMIT_BYTES:
        raise WorldError(
            f"{file} has {file.stat().st_size / 1e6:,.0f} MB, and each environment process would index it "
            f"({LOCAL_LIMIT_BYTES / 1e6:,.0f} MB at most): start "
            f"`python -m flowjax.envs.search.server --corpus={file}` and name its address in env.options.retriever"
        )
    corpus = Corpus(file) if path else encyclopedia(documents, seed).documents()
    return LocalRetriever(corpus, BM25Index([passage.contents for passage in corpus]))
