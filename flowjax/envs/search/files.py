"""Corpora and questions on disk, in the formats of the published data sets.

A folder holds `corpus.jsonl` (wiki-18: one `{"id": "0", "contents": "\\"Title\\"\\ntext"}` a line) and the questions of
the two splits, `train` and `test`, as `.parquet` or `.jsonl` (Search-R1's nq_hotpotqa_train, or ASearcher's).
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowjax.envs.base import NotReady, Split, WorldError
from flowjax.envs.search.corpus import Document, Question

CORPUS = "corpus.jsonl"
_FILES: dict[Split, str] = {"train": "train", "held_out": "test"}
HOW_TO_GET = (
    "make small data with `python -m data.search.build --out=FOLDER`, or put PeterJinGo/wiki-18-corpus (as "
    "corpus.jsonl) and PeterJinGo/nq_hotpotqa_train (train.parquet, test.parquet) from Hugging Face into a folder; "
    "see docs/worlds/search.md"
)


class Corpus(Sequence[Document]):
    """Documents of a JSONL file, read when asked for: only the places of the lines are kept in memory.

    Raises:
        WorldError: there is no such file, it is empty, or its first line is no document.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        if not path.is_file() or not path.stat().st_size:
            raise NotReady(f"the corpus {path} is missing or empty: {HOW_TO_GET}")
        self._path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = _line_starts(self._bytes)
        self[0]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> Document:  # pyright: ignore[reportIncompatibleMethodOverride] (no slices)
        if not 0 <= row < len(self):
            raise IndexError(row)
        try:
            fields = json.loads(self._bytes[self._starts[row] : self._starts[row + 1]])
            return document(fields, row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorldError(
                f'{self._path}, line {row + 1}, is no document ({type(error).__name__}: {error}): each line is {{"id": '
                '"0", "contents": "\\"Title\\"\\ntext"}'
            ) from error


def document(fields: Mapping[str, Any], row: int) -> Document:
    """A document from its fields; corpora that keep title and text apart are put together."""
    contents = fields["contents"] if "contents" in fields else f'"{fields.get("title", "")}"\n{fields["text"]}'
    if not isinstance(contents, str):
        raise TypeError(f"contents is {type(contents).__name__}")
    found = Document(str(fields.get("id", row)), contents, str(fields.get("url") or ""))
    return found if found.url else Document(found.id, contents, f"/wiki/{found.title.replace(' ', '_')}")


def _line_starts(data: mmap.mmap) -> np.ndarray:
    """Offsets of the lines that hold something, and of the end."""
    starts, position, block = [0], 0, 1 << 26
    places = []
    while position < len(data):
        piece = np.frombuffer(data[position : position + block], np.uint8)
        places.append(np.flatnonzero(piece == ord("\n")) + position + 1)
        position += block
    starts = np.unique(np.concatenate([np.array([0]), *places, np.array([len(data)])]))
    return starts[np.concatenate([np.diff(starts) > 1, [True]])]


def write_corpus(path: Path, documents: Iterable[Document]) -> None:
    """In the format of wiki-18, with the address of each document beside it."""
    with path.open("w", encoding="utf-8") as file:
        for found in documents:
            fields = {"id": found.id, "contents": found.contents, "url": found.url}
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def write_questions(path: Path, questions: Iterable[Question], source: str) -> None:
    """In Search-R1's format, with the documents that lead to the answer under `metadata`."""
    with path.open("w", encoding="utf-8") as file:
        for number, question in enumerate(questions):
            fields = {
                "id": f"{path.stem}_{number}",
                "question": question.text,
                "golden_answers": list(question.answers),
                "data_source": source,
                "metadata": {"chain": list(question.chain)},
            }
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def read_questions(folder: str | Path, split: Split) -> list[Question]:
    """The questions of a split, each once. A training question that is also a test question is left out.

    Raises:
        WorldError: a file is missing or a row cannot be read; the message says which.
    """
    found = _read_split(Path(folder), split)
    if split == "train":
        held_out = {canonical(question.text) for question in _read_split(Path(folder), "held_out")}
        found = [question for question in found if canonical(question.text) not in held_out]
    return list({canonical(question.text): question for question in reversed(found)}.values())[::-1]


def canonical(text: str) -> str:
    """A question without what does not make it another one: case, white space, a closing question mark."""
    return " ".join(text.lower().split()).rstrip("? .")


def _read_split(folder: Path, split: Split) -> list[Question]:
    name = _FILES[split]
    for path in (folder / f"{name}.parquet", folder / f"{name}.jsonl"):
        if path.is_file():
            break
    else:
        raise NotReady(f"{folder} holds neither {name}.parquet nor {name}.jsonl: {HOW_TO_GET}")
    questions = []
    for number, row in enumerate(_rows(path), 1):
        try:
            questions.append(_question(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WorldError(
                f"{path}, row {number}, is no question ({type(error).__name__}: {error}): it needs `question` and "
                "`golden_answers`, `answer` or `reward_model.ground_truth.target`"
            ) from error
    return questions


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise NotReady(f'{path} needs pyarrow: pip install -e ".[search]", or convert it to JSONL') from error
        wanted = ("question", "golden_answers", "answer", "aug_answer", "reward_model", "metadata")
        table = parquet.ParquetFile(path)
        names = [name for name in wanted if name in table.schema_arrow.names]
        for batch in table.iter_batches(columns=names):
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _question(row: Mapping[str, Any]) -> Question:
    text = " ".join(row["question"].split())
    answers = row.get("golden_answers")
    if answers is None:
        answers = row["answer"] if "answer" in row else row["reward_model"]["ground_truth"]["target"]
    chain = (row.get("metadata") or {}).get("chain") or ()
    if not text or not _strings(answers):
        raise ValueError("the question or its answers are empty")
    return Question(text, _strings(answers), tuple(chain), _strings(row.get("aug_answer") or ()))


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(str(part) for part in ([value] if isinstance(value, str) else value))
