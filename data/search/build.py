"""Small data for the search world, in the format of the real: `python -m data.search.build --out=FOLDER --seed=0`.

Writes corpus.jsonl (wiki-18's format), train.jsonl and test.jsonl (Search-R1's), which `env.options.path` takes.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from flowjax.envs import Split, WorldError
from flowjax.envs.search.corpus import CORPUS, Questions, encyclopedia, write_corpus, write_questions


def build(out: Path, *, seed: int, documents: int, train: int, held_out: int, hops: Sequence[int]) -> None:
    """Write a corpus and at most so many questions of each split; the same seed writes the same bytes."""
    book = encyclopedia(documents, seed)
    out.mkdir(parents=True, exist_ok=True)
    write_corpus(out / CORPUS, book.documents())
    wanted: list[tuple[str, Split, int]] = [("train", "train", train), ("test", "held_out", held_out)]
    for name, split, count in wanted:
        questions = islice(Questions(book, split, seed, hops), count)
        write_questions(out / f"{name}.jsonl", questions, "generated")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m data.search.build")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--train", type=int, default=5000, help="training questions, at most")
    parser.add_argument("--held_out", type=int, default=500, help="test questions, at most")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args(argv)
    counts = {"documents": given.documents, "train": given.train, "held_out": given.held_out}
    try:
        build(given.out, seed=given.seed, hops=given.hops, **counts)
    except WorldError as error:
        sys.exit(str(error))
    print(f"{given.documents} documents and their questions are in {given.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
