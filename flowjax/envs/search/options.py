"""Options of the search world."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flowjax.envs.base import WorldError
from flowjax.envs.search.client import WIRES, RemoteRetriever, Retriever, Wire, local
from flowjax.envs.search.corpus import MAX_HOPS, MIN_DOCUMENTS
from flowjax.envs.search.names import syllables_for
from flowjax.envs.search.protocol import ProtocolName

LOCAL = "local"
_served = itertools.count()  # environments of this process that ask servers


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What can be chosen; a wrong value is a `WorldError` that names it."""

    path: str = ""  # folder with corpus.jsonl and the two question files; "" for the generated encyclopedia
    documents: int = 1000  # generated
    corpus_seed: int = 0  # fixes the generated documents, whatever the data seed is
    hops: Sequence[int] | int = 2  # documents a generated question takes, or several such numbers
    retriever: Sequence[str] | str = LOCAL  # local, or addresses of servers (several: a list, or with commas)
    wire: Wire | Literal[""] = ""  # request format of the servers; "" is that of the protocol's own system
    topk: int = 3  # documents shown after a search
    document_characters: int = 5000  # longest text shown of one
    search_timeout_s: float = 8.0  # of one search, all attempts together; keep it under config.env.step_timeout_s
    protocol: ProtocolName = "rewardflow"
    access: bool = False  # asearcher: pages can be opened by their address
    score: Literal["em", "f1"] = "em"  # reward of an answer; success is exact match in either case

    def __post_init__(self):
        allowed: Mapping[str, Any] = {"protocol": get_args(ProtocolName), "wire": ("", *WIRES), "score": ("em", "f1")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                known = ", ".join(repr(value) for value in values)
                raise WorldError(f"env.options {name}={getattr(self, name)!r}: use one of {known}")
        for name, least, most in (("topk", 1, 100), ("document_characters", 1, 1 << 20), ("corpus_seed", 0, 1 << 63)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise WorldError(f"env.options {name}={value!r}: give a whole number from {least} to {most}")
        if not isinstance(self.documents, int) or self.documents < MIN_DOCUMENTS:
            raise WorldError(f"env.options documents={self.documents!r}: questions need at least {MIN_DOCUMENTS}")
        syllables_for(self.documents)
        if not self.hop_counts or not set(self.hop_counts) <= set(range(1, MAX_HOPS + 1)):
            raise WorldError(f"env.options hops={self.hops!r}: give numbers from 1 to {MAX_HOPS}")
        if not self.search_timeout_s > 0:
            raise WorldError(f"env.options search_timeout_s={self.search_timeout_s}: give a time above 0")
        if self.access and self.protocol != "asearcher":
            raise WorldError("env.options access=True needs protocol=asearcher: RewardFlow's protocol opens no pages")

    @property
    def hop_counts(self) -> tuple[int, ...]:
        return (self.hops,) if isinstance(self.hops, int) else tuple(dict.fromkeys(self.hops))

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the retrieval servers; () for an index in this process."""
        if self.retriever == LOCAL:
            return ()
        given = self.retriever.split(",") if isinstance(self.retriever, str) else self.retriever
        return tuple(url.strip() for url in given)

    def open_retriever(self) -> Retriever:
        if not self.servers:
            return local(self.path, self.documents, self.corpus_seed)
        wire: Wire = self.wire or ("queries" if self.protocol == "asearcher" else "query")
        choose = f"{os.getpid()} {next(_served)}"
        return RemoteRetriever(self.servers, wire=wire, timeout_s=self.search_timeout_s, choose=choose)
