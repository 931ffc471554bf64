"""Retrievers, which find an environment's passages: by an index in its process, or by asking a retrieval server."""

import functools
import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from flowjax.envs.base import WorldError
from flowjax.envs.search.corpus import CORPUS, Corpus, Document, document, encyclopedia
from flowjax.envs.search.index import BM25Index, Index
from flowjax.records import state_key

Wire = Literal["query", "queries", "search"]  # the three request formats, see server.py
WIRES: tuple[Wire, ...] = ("query", "queries", "search")
KEY_VARIABLE = "FLOWJAX_SEARCH_KEY"  # environment variable with the X-API-Key of servers that want one
LOCAL_LIMIT_BYTES = 1 << 30  # of a corpus that is indexed in the environment's own process
FIRST_PAUSE_S = 0.1  # between attempts, doubled each time


class RetrievalError(RuntimeError):
    """No passages can be had; it costs the episode."""


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


def pages(documents: Sequence[Document]) -> dict[str, int]:
    """Row of the first passage at each address."""
    found: dict[str, int] = {}
    for row, passage in enumerate(documents):
        found.setdefault(passage.url, row)
    return found


@functools.lru_cache(maxsize=2)
def local(path: str, documents: int, seed: int) -> LocalRetriever:
    """The retriever that all environments of this process share: over a folder's corpus, or the generated one."""
    file = Path(path) / CORPUS
    if path and file.is_file() and file.stat().st_size > LOCAL_LIMIT_BYTES:
        raise WorldError(
            f"{file} has {file.stat().st_size / 1e9:.1f} GB, too much to index in every environment process: start "
            f"`python -m flowjax.envs.search.server --corpus={file}` and name its address in env.options.retriever"
        )
    corpus = Corpus(file) if path else encyclopedia(documents, seed).documents()
    return LocalRetriever(corpus, BM25Index([passage.contents for passage in corpus]))


class RemoteRetriever:
    """One of several retrieval servers, another one after a failure.

    Server errors and failed connections are tried again until `timeout_s` has passed since the request began; then,
    and at once where the server calls the request wrong, `RetrievalError` is raised.
    """

    def __init__(self, urls: Sequence[str], *, wire: Wire, timeout_s: float, choose: str = ""):
        self._servers = [_address(url) for url in urls]
        self._wire: Wire = wire
        self._timeout_s = timeout_s
        self._turn = state_key(choose) % len(urls)
        self._connections: dict[tuple[str, int], http.client.HTTPConnection] = {}

    def search(self, query: str, count: int) -> list[Document]:
        if self._wire == "search":
            body = {"query": query, "n_docs": count, "backend": "faiss", "nprobe": 128, "min_words": 0}
            found = self._post("/search", body, _read_passages)
        else:
            asked = {"query": query} if self._wire == "query" else {"queries": [query]}
            found = self._post("/retrieve", {**asked, "topk": count, "return_scores": True}, _read_result)
        return [document(fields, -1) if "id" in fields else _nameless(fields) for fields in found][:count]

    def access(self, url: str) -> Document | None:
        [page] = self._post("/access", {"urls": [url]}, lambda answer: [answer["result"][0]])
        return None if page is None else document({"url": url, "id": url, **page}, -1)

    def _post(self, path: str, body: Mapping[str, Any], read: Any) -> list[Any]:
        until = time.monotonic() + self._timeout_s
        pause_s, problem = FIRST_PAUSE_S, "no attempt was made"
        while (left_s := until - time.monotonic()) > 0:
            server = self._servers[self._turn % len(self._servers)]
            try:
                status, answer = self._exchange(server, path, body, left_s)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    try:
                        return read(json.loads(answer))
                    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                        raise RetrievalError(f"{_url(server)}{path} answered {answer[:200]!r} ({error})") from error
                problem = f"status {status}: {answer[:200].decode(errors='replace')}"
                if status < 500 and status != 429:
                    raise RetrievalError(f"{_url(server)}{path} refuses the request: {problem}")
            self._turn += 1
            time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
            pause_s *= 2
        raise RetrievalError(f"no retrieval server answered within {self._timeout_s:g} s; the last problem: {problem}")

    def _exchange(
        self, server: tuple[str, int], path: str, body: Mapping[str, Any], timeout_s: float
    ) -> tuple[int, bytes]:
        connection = self._connections.pop(server, None) or http.client.HTTPConnection(*server)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["X-API-Key"] = key
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()
            raise
        self._connections[server] = connection  # kept alive for the next search
        return response.status, answer


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        parts, port = None, 80
    if parts is None or parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise WorldError(
            f"env.options retriever={url!r}: give local, or the address of a server without a path, for example "
            "http://127.0.0.1:8000"
        )
    return parts.hostname, port


def _url(server: tuple[str, int]) -> str:
    return f"http://{server[0]}:{server[1]}"


def _read_result(answer: Mapping[str, Any]) -> list[Any]:
    """The passages of the first query, with scores around them or without."""
    return [item.get("document", item) for item in answer["result"][0]]


def _read_passages(answer: Mapping[str, Any]) -> list[Any]:
    found = answer["results"]["passages"]
    named = [("id", "passage_id"), ("contents", "text"), ("url", "filename")]
    return [{ours: fields[theirs] for ours, theirs in named if theirs in fields} for fields in found[0] if found]


def _nameless(fields: Mapping[str, Any]) -> Document:
    """A passage of a server that gives no ids is named by its contents."""
    return document({**fields, "id": f"{state_key(fields.get('contents') or fields['text']):016x}"}, -1)
