"""A generated encyclopedia: documents about invented things, and questions that take several of them to answer.

Everything is drawn from one seed. The things fall into two parts that never mention each other; training questions are
about one, held-out questions about the other, so that no fact needed for a held-out question is of use in training.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from flowjax.envs.base import Split, WorldError
from flowjax.envs.search.names import KINDS, draw_names

HELD_OUT_ONE_IN = 8  # things
FACTS = 3  # a document tells
MIN_DOCUMENTS = HELD_OUT_ONE_IN * len(KINDS) * (FACTS + 1)  # leaves every fact something of its own to point at
MAX_HOPS = 4
MAX_WALKS = 20_000_000  # 1 GB while they are drawn
_KIND_NAMES = tuple(KINDS)


@dataclass(frozen=True, slots=True)
class Document:
    """A passage as retrieval servers hand it out; `contents` is the quoted title, a newline, and the text."""

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
    """Things by index: name, kind, part, and for each of its relations the thing that it leads to."""

    names: Sequence[str]
    kinds: Int[np.ndarray, "things"]
    held_out: Bool[np.ndarray, "things"]
    facts: Int[np.ndarray, "things 3"]

    def relations(self, thing: int) -> tuple[str, ...]:
        return tuple(relation for relation, _ in KINDS[_KIND_NAMES[self.kinds[thing]]])

    def document(self, thing: int) -> Document:
        name, kind = self.names[thing], _KIND_NAMES[self.kinds[thing]]
        pairs = zip(self.relations(thing), self.facts[thing].tolist(), strict=True)
        told = [f"The {relation} of this {kind} is {self.names[target]}." for relation, target in pairs]
        text = " ".join([f"{name} is a {kind}.", *told])
        return Document(str(thing), f'"{name}"\n{text}', f"https://encyclopedia.invalid/wiki/{name}")

    def documents(self) -> list[Document]:
        return [self.document(thing) for thing in range(len(self.names))]


@functools.lru_cache(maxsize=2)
def encyclopedia(documents: int, seed: int) -> Encyclopedia:
    """The encyclopedia of `documents` things that `seed` fixes.

    Raises:
        WorldError: so many are too few, or too many to be named.
    """
    if documents < MIN_DOCUMENTS:
        raise WorldError(f"env.options documents={documents}: questions need at least {MIN_DOCUMENTS}")
    rng = np.random.default_rng([seed, documents])
    names = draw_names(documents, rng)
    things = np.arange(documents)
    held_out = things % HELD_OUT_ONE_IN == HELD_OUT_ONE_IN - 1
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
    """A target from each pool for each source; neither the source itself nor one target twice."""
    facts = np.full((len(sources), len(pools)), -1)
    wrong = np.ones(len(sources), bool)
    while wrong.any():
        count = int(wrong.sum())
        facts[wrong] = np.stack([rng.choice(pool, count) for pool in pools], axis=1)
        row = np.sort(np.concatenate([facts, sources[:, None]], axis=1), axis=1)
        wrong = (row[:, 1:] == row[:, :-1]).any(axis=1)
    return facts


class Questions(Sequence[Question]):
    """Every question of a split whose chain visits no thing twice, in an order that the data seed draws.

    Raises:
        WorldError: there are too many to be listed.
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
        for thing, way in zip(chain[:-1], ways, strict=False):
            text = f"the {self._book.relations(thing)[way]} of {text}"
        names = tuple(self._book.names[thing] for thing in chain)
        return Question(f"What is {text}?", names[-1:], names)


def _walk(
    book: Encyclopedia, starts: Int[np.ndarray, "starts"], hops: int
) -> tuple[Int[np.ndarray, "walks things"], Int[np.ndarray, "walks hops"]]:
    """All walks of so many hops that visit nothing twice: the things on them, and which fact led on."""
    ways = np.stack(np.meshgrid(*[np.arange(FACTS)] * hops, indexing="ij"), axis=-1).reshape(-1, hops)
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
