"""Dense retrieval at size, by a compressed index beside the exact one:

    python -m tests.benchmarks.search_size [--passages=1000000] [--compress=IVF4096,SQ8] [--search_with=nprobe=64]

Passages are made: unit vectors of 768 numbers around `--topics` centres, of which a few dozen directions carry most of
what varies, as in embeddings of texts. A query is the vector of a passage that has moved a good way. Prints, for each
way of searching, which share of the exact three best are among the three found, and queries per second of the
index alone, in batches and one at a time; then bytes for each passage, and what wiki-18's 21 million of them take.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from flowjax.envs.search.index import DenseIndex, compress

WIDTH, VARYING, WIKI_PASSAGES = 768, 64, 21_015_324
BATCH, TOPK = 256, 3


def made(path: Path, passages: int, topics: int, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors of passages, on the disk."""
    directions = rng.normal(size=(VARYING, WIDTH)).astype(np.float32) / np.sqrt(WIDTH)
    centres = rng.normal(size=(topics, VARYING)).astype(np.float32)
    vectors = np.lib.format.open_memmap(path, "w+", np.float32, (passages, WIDTH))
    for start in range(0, passages, 65_536):
        count = min(65_536, passages - start)
        inner = centres[rng.integers(topics, size=count)] + 0.7 * rng.normal(size=(count, VARYING)).astype(np.float32)
        block = inner @ directions + 0.05 * rng.normal(size=(count, WIDTH)).astype(np.float32) / np.sqrt(WIDTH)
        vectors[start : start + count] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return vectors


def asked(vectors: np.ndarray, queries: int, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors between two passages, nearer to one of them."""
    near = vectors[np.sort(rng.choice(len(vectors), queries, replace=False))]
    mixed = near + 0.6 * vectors[np.sort(rng.choice(len(vectors), queries, replace=False))]
    return mixed / np.linalg.norm(mixed, axis=1, keepdims=True)


def exact(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The rows of the best passages of each query."""
    best = np.full((len(queries), TOPK), -np.inf, np.float32)
    rows = np.zeros((len(queries), TOPK), int)
    for start in range(0, len(vectors), 65_536):
        scores = queries @ vectors[start : start + 65_536].T
        found = np.argpartition(scores, -TOPK, axis=1)[:, -TOPK:]
        both = np.concatenate([best, np.take_along_axis(scores, found, 1)], axis=1)
        order = np.argsort(-both, axis=1)[:, :TOPK]
        best = np.take_along_axis(both, order, 1)
        rows = np.take_along_axis(np.concatenate([rows, found + start], axis=1), order, 1)
    return rows


def main(argv: Sequence[str]) -> None:
    del argv
    given, rng = flags.FLAGS, np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=given.folder or None) as name:
        folder = Path(name)
        vectors = made(folder / "vectors.npy", given.passages, given.topics, rng)
        queries = asked(vectors, given.queries, rng)
        started_s = time.monotonic()
        truth = exact(vectors, queries)
        flat_s = time.monotonic() - started_s
        started_s = time.monotonic()
        compress(lambda start, end: vectors[start:end], given.passages, given.compress, folder / "made.index")
        built_s = time.monotonic() - started_s
        index = DenseIndex.load(folder / "made.index", lambda texts, role: queries[[int(text) for text in texts]])
        names = [str(row) for row in range(len(queries))]
        print(f"{given.passages:,} passages, {given.compress}, made in {built_s:.0f} s on {os.cpu_count()} cores\n")
        print("| searched with | recall at 3 | queries/s, 256 at once | one at a time |\n|---|---|---|---|")
        print(f"| all, exactly | 1.000 | {len(queries) / flat_s:,.0f} | |", flush=True)
        for options in given.search_with:
            index.search_with(options)
            index.search(names[:BATCH], TOPK)  # whatever is read for the first time
            started_s = time.monotonic()
            found = [each for at in range(0, len(names), BATCH) for each in index.search(names[at : at + BATCH], TOPK)]
            batched_s = time.monotonic() - started_s
            started_s = time.monotonic()
            for query in names[:BATCH]:
                index.search([query], TOPK)
            single_s = time.monotonic() - started_s
            hits = [len({row for row, _ in rows} & set(true.tolist())) for rows, true in zip(found, truth, strict=True)]
            print(
                f"| {options} | {np.mean(hits) / TOPK:.3f} | {len(names) / batched_s:,.0f} | {BATCH / single_s:,.0f} |",
                flush=True,
            )
        each_bytes = (folder / "made.index").stat().st_size / given.passages
        print(
            f"\n{each_bytes:,.0f} bytes a passage: {each_bytes * WIKI_PASSAGES / 1e9:.1f} GB for wiki-18's 21 million"
        )


if __name__ == "__main__":
    flags.DEFINE_integer("passages", 1_000_000, "Passages.", lower_bound=1000)
    flags.DEFINE_integer("topics", 20_000, "Centres that they lie around.", lower_bound=1)
    flags.DEFINE_integer("queries", 2048, "Queries.", lower_bound=BATCH)
    flags.DEFINE_string("compress", "IVF4096,PQ128x4fs,Refine(SQ8)", "Form of the index, as faiss writes it.")
    probes = [f"nprobe={cells},k_factor_rf=16" for cells in (32, 64, 128, 192)]
    flags.DEFINE_multi_string("search_with", probes, "Search parameters of faiss; may be repeated.")
    flags.DEFINE_string("folder", "", "Where vectors and index are kept meanwhile; the system's own folder by default.")
    app.run(main)
