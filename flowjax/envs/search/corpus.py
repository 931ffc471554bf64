"""Documents and questions: a generated encyclopedia of invented things, or files in the published formats.

Everything generated is drawn from one seed. The things are in two parts that never mention each other: training
questions are about one part, held-out questions about the other, so that training needs no fact of a held-out question.

A folder of files holds `corpus.jsonl` (wiki-18: one `{"id": "0", "contents": "\\"Title\\"\\ntext"}` a line) and the
questions of the two splits, `train` and `test`, as `.parquet` or `.jsonl` (Search-R1's nq_hotpotqa_train, or
ASearcher's).
"""

import functools
import hashlib
import json
import logging
import math
import mmap
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from flowjax.envs import NotReady, Split, WorldError, check_characters
from flowjax.grading.answers import normalise_answer
from flowjax.records import state_key

# Every syllable has three letters and ends in one that English stemming leaves alone, so that a name can be split into
# its syllables, and no two names share a stem.
SYLLABLES = tuple(onset + rime for onset in "bdghlmnrstvz" for rime in ("ak", "em", "op", "ux"))
_KNOWN = frozenset(SYLLABLES)
LETTERS = 3  # of a syllable
SHARE_OF_NAMES = 2  # at most one in so many possible names is used

# Facts of a document, by its kind: relations, each with the kind of thing that it leads to.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "book": (("author", "person"), ("publisher", "company"), ("hero", "person")),
    "person": (("birthplace", "town"), ("teacher", "person"), ("employer", "company")),
    "company": (("founder", "person"), ("seat", "town"), ("rival", "company")),
    "town": (("mayor", "person"), ("waterway", "river"), ("twin", "town")),
    "river": (("source", "town"), ("ferryman", "person"), ("tributary", "river")),
}
RELATIONS = tuple(dict.fromkeys(relation for facts in KINDS.values() for relation, _ in facts))

HELD_OUT_ONE_IN = 8  # things
FACTS = 3  # in a document
MIN_DOCUMENTS = HELD_OUT_ONE_IN * len(KINDS) * (FACTS + 1)  # enough for the facts of a thing to have different targets
MAX_HOPS = 4
MAX_WALKS = 20_000_000  # need 1 GB of memory while they are drawn
_KIND_NAMES = tuple(KINDS)
_LISTED = re.compile(r"\[\s*(['\"]).*\1\s*\]", re.DOTALL)  # a list of texts, printed
_BLOCK = 1 << 26  # bytes of a corpus that are scanned at once
_DIGESTED = 1000  # passages in a digest, or up to twice as many, spread over all of them

CORPUS = "corpus.jsonl"
_FILES: dict[Split, str] = {"train": "train", "held_out": "test"}
HOW_TO_GET = (
    "make small data with `python -m data.search.build --out=FOLDER`, or put PeterJinGo/wiki-18-corpus (as "
    "corpus.jsonl) and PeterJinGo/nq_hotpotqa_train (train.parquet, test.parquet) from Hugging Face into a folder; "
    "see docs/worlds/search.md"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A passage as retrieval servers return it; `contents` is the quoted title, a newline, and the text."""

    id: str
    contents: str
    url: str = ""

    @property
    def title(self) -> str:
        return self.contents.split("\n", 1)[0].strip().strip('"')


@dataclass(frozen=True, slots=True)
class Question:
    """`chain` names the documents that lead to the answer, the first one named by the question; () if unknown."""

    text: str
    answers: tuple[str, ...]
    chain: tuple[str, ...] = ()
    augmented: tuple[str, ...] = ()  # rewordings of the answers, which ASearcher's score knows


@dataclass(frozen=True, slots=True, eq=False)
class Encyclopedia:
    """Things by index: names, kinds, parts, and for each relation of a thing the thing that it leads to."""

    names: Sequence[str]
    kinds: Int[np.ndarray, "things"]
    held_out: Bool[np.ndarray, "things"]
    facts: Int[np.ndarray, "things 3"]

    def relations(self, thing: int) -> tuple[str, ...]:
        return tuple(relation for relation, _ in KINDS[_KIND_NAMES[self.kinds[thing]]])

    def document(self, thing: int) -> Document:
        name, kind = self.names[thing], _KIND_NAMES[self.kinds[thing]]
        pairs = zip(self.relations(thing), self.facts[thing].tolist(), strict=True)
        facts = [f"The {relation} of this {kind} is {self.names[target]}." for relation, target in pairs]
        text = " ".join([f"{name} is a {kind}.", *facts])
        return Document(str(thing), f'"{name}"\n{text}', f"https://encyclopedia.invalid/wiki/{name}")

    def documents(self) -> list[Document]:
        return [self.document(thing) for thing in range(len(self.names))]


@functools.lru_cache(maxsize=2)
def encyclopedia(documents: int, seed: int) -> Encyclopedia:
    """The encyclopedia of `documents` things, the same for the same seed.

    Raises:
        WorldError: `documents` is too small, or more than there are names for (`syllables_for`).
    """
    if documents < MIN_DOCUMENTS:
        raise WorldError(f"env.options documents={documents}: questions need at least {MIN_DOCUMENTS}")
    rng = np.random.default_rng([seed, documents])
    names = draw_names(documents, rng)
    things = np.arange(documents)
    held_out = things % HELD_OUT_ONE_IN == HELD_OUT_ONE_IN - 1
    # Eight things in a row are of one kind, and one of the eight is held out: both parts have every kind.
    kinds = things // HELD_OUT_ONE_IN % len(KINDS)
    facts = np.zeros((documents, FACTS), np.int64)
    for part in (False, True):
        members = [np.flatnonzero((held_out == part) & (kinds == kind)) for kind in range(len(KINDS))]
        for kind, sources in enumerate(members):
            pools = [members[_KIND_NAMES.index(target)] for _, target in KINDS[_KIND_NAMES[kind]]]
            facts[sources] = _draw_facts(sources, pools, rng)
    return Encyclopedia(names, kinds, held_out, facts)


def _draw_facts(
    sources: Int[np.ndarray, "things"], pools: Sequence[Int[np.ndarray, "pool"]], rng: np.random.Generator
) -> Int[np.ndarray, "things 3"]:
    """A random target from each pool for each source, never the source itself, and all of a source different.

    Rows that break this are drawn again until none is left (rejection sampling).
    """
    facts = np.full((len(sources), len(pools)), -1)
    wrong = np.ones(len(sources), bool)
    while wrong.any():
        count = int(wrong.sum())
        facts[wrong] = np.stack([rng.choice(pool, count) for pool in pools], axis=1)
        row = np.sort(np.concatenate([facts, sources[:, None]], axis=1), axis=1)
        wrong = (row[:, 1:] == row[:, :-1]).any(axis=1)  # sorted, so equal things are neighbours
    return facts


class Questions(Sequence[Question]):
    """Every question of a split whose chain visits no thing twice, in a random order by the data seed.

    Raises:
        WorldError: there are more than `MAX_WALKS` chains, those that visit a thing twice included.
    """

    def __init__(self, book: Encyclopedia, split: Split, data_seed: int, hops: Sequence[int]):
        self._book = book
        starts = np.flatnonzero(book.held_out == (split == "held_out"))
        walks = len(starts) * sum(FACTS**count for count in hops)
        if walks > MAX_WALKS:
            raise WorldError(
                f"env.options documents={len(book.names)}, hops={tuple(hops)}: {walks:,} questions to draw from, over "
                f"{MAX_WALKS:,}; lower one of the two"
            )
        chains, ways = zip(*(_walk(book, starts, count) for count in hops), strict=True)
        self._chains = np.concatenate([_pad(chain) for chain in chains])
        self._ways = np.concatenate([_pad(way) for way in ways])
        order = np.random.default_rng([data_seed, split == "held_out"]).permutation(len(self._chains))
        self._chains, self._ways = self._chains[order], self._ways[order]

    def __len__(self) -> int:
        return len(self._chains)

    def __getitem__(self, index: int) -> Question:  # pyright: ignore[reportIncompatibleMethodOverride] (no slices)
        chain: list[int] = [thing for thing in self._chains[index].tolist() if thing >= 0]
        ways: list[int] = self._ways[index].tolist()
        text = self._book.names[chain[0]]
        for thing, way in zip(chain[:-1], ways, strict=False):  # shorter ways are padded, too
            text = f"the {self._book.relations(thing)[way]} of {text}"
        names = tuple(self._book.names[thing] for thing in chain)
        return Question(f"What is {text}?", names[-1:], names)


def _walk(
    book: Encyclopedia, starts: Int[np.ndarray, "starts"], hops: int
) -> tuple[Int[np.ndarray, "walks things"], Int[np.ndarray, "walks hops"]]:
    """All walks of `hops` hops that visit no thing twice: the things on them, and the index of each fact followed."""
    ways = np.stack(np.meshgrid(*[np.arange(FACTS)] * hops, indexing="ij"), axis=-1).reshape(-1, hops)
    # Rows: every sequence of facts from the first start, then from the second, and so on.
    ways = np.tile(ways, (len(starts), 1))
    chain = [np.repeat(starts, len(ways) // len(starts))]
    for hop in range(hops):
        chain.append(book.facts[chain[-1], ways[:, hop]])
    walks = np.stack(chain, axis=1)
    ordered = np.sort(walks, axis=1)
    simple = (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
    return walks[simple], ways[simple]


def _pad(rows: Int[np.ndarray, "rows width"]) -> Int[np.ndarray, "rows padded"]:
    return np.pad(rows, ((0, 0), (0, MAX_HOPS + 1 - rows.shape[1])), constant_values=-1)


def syllables_for(count: int) -> int:
    """Number of syllables that `count` names need, at least two.

    Raises:
        WorldError: four are not enough.
    """
    for syllables in (2, 3, 4):
        if count * SHARE_OF_NAMES <= len(SYLLABLES) ** syllables:
            return syllables
    raise WorldError(
        f"env.options documents={count}: there are names for {len(SYLLABLES) ** 4 // SHARE_OF_NAMES}; give fewer"
    )


def draw_names(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different names of the same length, in random order."""
    syllables = syllables_for(count)
    numbers = rng.permutation(len(SYLLABLES) ** syllables)[:count]
    parts = []
    for _ in range(syllables):
        parts.append([SYLLABLES[digit] for digit in (numbers % len(SYLLABLES)).tolist()])
        numbers = numbers // len(SYLLABLES)
    return ["".join(name).capitalize() for name in zip(*parts, strict=True)]


@functools.lru_cache(maxsize=1 << 16)
def split_name(word: str) -> tuple[str, ...] | None:
    """The syllables of an invented name, None for any other word."""
    if len(word) < 2 * LETTERS or len(word) % LETTERS or not word[0].isupper():
        return None
    parts = tuple(word.lower()[start : start + LETTERS] for start in range(0, len(word), LETTERS))
    return parts if _KNOWN.issuperset(parts) else None


class Corpus(Sequence[Document]):
    """Documents of a JSONL file, read on demand: only the offsets of the lines are kept in memory.

    Raises:
        NotReady: there is no such file, or it is empty.
        WorldError: its first line is no document.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        if not path.is_file() or not path.stat().st_size:
            raise NotReady(f"the corpus {path} is missing or empty: {HOW_TO_GET}")
        self._path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = _line_starts(self._bytes)
        if not len(self):
            raise NotReady(f"the corpus {path} is empty: {HOW_TO_GET}")
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
                f"{self._path}, line {self._line(row)}, is no document ({type(error).__name__}: {error}): each line is "
                '{"id": "0", "contents": "\\"Title\\"\\ntext"}'
            ) from error

    def digest_of_lines(self) -> str:
        """Digest of where each document's line begins."""
        return hashlib.blake2b(self._starts.tobytes(), digest_size=8).hexdigest()

    def _line(self, row: int) -> int:
        """Number of a document's line in the file, from 1, empty lines included."""
        end = int(self._starts[row])
        return 1 + sum(self._bytes[at : min(at + _BLOCK, end)].count(b"\n") for at in range(0, end, _BLOCK))


def document(fields: Mapping[str, Any], row: int) -> Document:
    """A document from its fields; a separate title and text are joined."""
    contents = fields["contents"] if "contents" in fields else f'"{fields.get("title") or ""}"\n{fields["text"]}'
    if not isinstance(contents, str):
        raise TypeError(f"contents is {type(contents).__name__}")
    contents = contents.encode(errors="replace").decode()  # replaces lone surrogates, which JSON can spell
    found = Document(str(row if fields.get("id") is None else fields["id"]), contents, str(fields.get("url") or ""))
    return found if found.url else Document(found.id, contents, f"/wiki/{found.title.replace(' ', '_')}")


def pages(documents: Sequence[Document]) -> dict[str, int]:
    """Row of the first passage of each address."""
    found: dict[str, int] = {}
    for row, passage in enumerate(documents):
        found.setdefault(passage.url, row)
    return found


def identity(documents: Sequence[Document]) -> dict[str, int | str]:
    """Marks of a corpus: its number of passages, a digest of a sample of them, spread over all, and, of a file, one of
    the lengths of all lines. An edit that keeps a line's length is seen only in the sample."""
    rows = range(0, len(documents), max(len(documents) // _DIGESTED, 1))
    sample = state_key(*(documents[row].contents for row in rows))
    lines: dict[str, int | str] = {"lines": documents.digest_of_lines()} if isinstance(documents, Corpus) else {}
    return {"passages": len(documents), "contents": f"{sample:016x}"} | lines


def _line_starts(data: mmap.mmap) -> np.ndarray:
    """Offsets of the lines that are not blank, and of the end."""
    places = []
    for at in range(0, len(data), _BLOCK):
        piece = np.frombuffer(data[at : at + _BLOCK], np.uint8)
        places.append(np.flatnonzero(piece == ord("\n")) + at + 1)
    starts = np.unique(np.concatenate([np.array([0]), *places, np.array([len(data)])]))
    # A blank line is read as white space at the end of the line before. Only too short lines can be blank ones.
    short = np.flatnonzero(np.diff(starts) < len('{"text":""}'))
    return np.delete(starts, [row for row in short if data[starts[row] : starts[row + 1]].isspace()])


def write_corpus(path: Path, documents: Iterable[Document]) -> None:
    """Write documents in the format of wiki-18, with an added field for each one's address."""
    with path.open("w", encoding="utf-8") as file:
        for found in documents:
            fields = {"id": found.id, "contents": found.contents, "url": found.url}
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def write_questions(path: Path, questions: Iterable[Question], source: str) -> None:
    """Write questions in Search-R1's format, with the documents that lead to the answer under `metadata`."""
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
    """The questions of a split, each once, with the answers of all of its rows. Training questions that are also test
    questions are left out, and so are questions whose answers are empty once normalised, as "The" is.

    Raises:
        WorldError: a file is missing (`NotReady`), a row cannot be read, or no question is left.
    """
    found = _read_split(Path(folder), split)
    if split == "train":
        held_out = {canonical(question.text) for question in _read_split(Path(folder), "held_out")}
        found = [question for question in found if canonical(question.text) not in held_out]
    if not found:
        besides = " that are not among the test questions" if split == "train" else ""
        raise WorldError(f"{folder} has no {split} questions with an answer{besides}: {HOW_TO_GET}")
    once: dict[str, Question] = {}
    for question in found:
        first = once.setdefault(canonical(question.text), question)
        if new := tuple(answer for answer in question.answers if answer not in first.answers):
            once[canonical(question.text)] = replace(first, answers=first.answers + new)  # a row for each answer
    return list(once.values())


def canonical(text: str) -> str:
    """A question without case, extra white space and closing marks: equal for the same question."""
    return " ".join(unicodedata.normalize("NFC", text).lower().split()).rstrip("? .")


def _read_split(folder: Path, split: Split) -> list[Question]:
    name = _FILES[split]
    for path in (folder / f"{name}.parquet", folder / f"{name}.jsonl"):
        if path.is_file():
            break
    else:
        raise NotReady(f"{folder} holds neither {name}.parquet nor {name}.jsonl: {HOW_TO_GET}")
    questions: list[Question] = []
    unanswerable = 0
    for place, row in _rows(path):
        try:
            question = _question(json.loads(row) if isinstance(row, bytes) else row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WorldError(
                f"{path}, {place}, is no question ({type(error).__name__}: {error}): it needs `question` and "
                "`golden_answers`, `answer` or `reward_model.ground_truth`"
            ) from error
        texts = (question.text, *question.answers, *question.chain, *question.augmented)
        check_characters(f"{path}, {place}", *texts)
        if question.answers:
            questions.append(question)
        else:
            unanswerable += 1
    if unanswerable:
        logging.warning("%s: %d questions without an answer that can be compared are left out", path, unanswerable)
    return questions


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | bytes]]:
    """The rows of a file, those of JSONL as bytes, each with its place in words for messages."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise NotReady(f'{path} needs pyarrow: pip install -e ".[search]", or convert it to JSONL') from error
        wanted = ("question", "golden_answers", "answer", "aug_answer", "reward_model", "metadata")
        try:
            table = parquet.ParquetFile(path)
            names = [name for name in wanted if name in table.schema_arrow.names]
            rows = (row for batch in table.iter_batches(columns=names) for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        except (ValueError, OSError) as error:  # of pyarrow
            raise WorldError(f"{path} cannot be read as parquet ({error}): fetch it again") from error
        return
    with path.open("rb") as file:
        yield from ((f"line {number}", line) for number, line in enumerate(file, 1) if line.strip())


def _question(row: Mapping[str, Any]) -> Question:
    text = " ".join(row["question"].split())
    rule = row.get("reward_model")
    truth = rule.get("ground_truth") if isinstance(rule, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else truth
    given = [each for each in (row.get("golden_answers"), row.get("answer"), target) if each is not None]
    chain = (row.get("metadata") or {}).get("chain") or []
    if not text:
        raise ValueError("the question is empty")
    if not given:
        raise ValueError("no answer is given")
    comparable = (tuple(filter(normalise_answer, _strings(each))) for each in given)
    return Question(text, next(filter(None, comparable), ()), _strings(chain), _strings(row.get("aug_answer") or []))


def _strings(value: Any) -> tuple[str, ...]:
    """A text or number, or each of a list, in NFC, as tokenizers have it. A column with gaps makes 1724.0 of 1724."""
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise TypeError(f"{part!r} is no text and no number")
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError(f"{part} is no number: leave the field out where there is none")
        if isinstance(part, str) and _LISTED.fullmatch(part.strip()):
            raise ValueError(f"{part[:100]!r} is a list that was written as a text: give the list")
    texts = (str(int(part) if isinstance(part, float) and part.is_integer() else part) for part in parts)
    return tuple(unicodedata.normalize("NFC", text) for text in texts)
