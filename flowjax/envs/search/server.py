"""A retrieval server: `python -m flowjax.envs.search.server --corpus=corpus.jsonl --port=8000`.

It speaks the request formats of three published systems, all POST and JSON:

    /retrieve  {"query": text, "topk": 3, "return_scores": true}        one query: RewardFlow, verl-agent, SkyRL
    /retrieve  {"queries": [text, ...], "topk": 3, "return_scores"}     many: Search-R1, ASearcher
               -> {"result": [[{"document": {"id", "contents", "url"}, "score": 1.5}, ...], ...]}, a list per query;
                  without scores the bare documents; for "query" they are always scored, as its clients expect
    /access    {"urls": [address, ...]} -> {"result": [{"url", "contents"} or null, ...]}
    /search    {"query": text, "n_docs": 5, "min_words": 20, "backend", "nprobe"}, X-API-Key    AstraFlow
               -> {"results": {"passages": [[{"text", "source", "passage_id", "filename"}]], "scores": [[1.5]]}}

and GET /health. A wrong request is answered 400, 401, 413 or 503 with {"error": reason}. Where the environment variable
FLOWJAX_SEARCH_KEY is set, every POST must bring it as X-API-Key; an address that is not loopback needs it or --open.
"""

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from flowjax.envs import WorldError
from flowjax.envs.search.corpus import HOW_TO_GET, Corpus, Document, encyclopedia, identity, pages
from flowjax.envs.search.index import (
    BM25Index,
    DenseIndex,
    Encoder,
    Index,
    Scored,
    compress,
    encode_passages,
    kept,
    load_encoder,
    read_vectors,
    try_writing,
)
from flowjax.envs.search.protocol import KEY_VARIABLE

MAX_WAITING = 16_384  # queries
MAX_BODY_BYTES = 1 << 20
MAX_QUERIES, MAX_URLS = 1024, 64  # in one request
MAX_TOPK = 100
MAX_QUERY_CHARACTERS = 4000
TRIED = 16  # passages that a dense index is tried with: of one without a letter an encoder may make no numbers
DEFAULT_TOPK, DEFAULT_MIN_WORDS = 3, 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class QueueFull(RuntimeError):
    """More queries wait than the server's limit."""


@dataclass(frozen=True, slots=True)
class _Queued:
    queries: Sequence[str]
    count: int
    answer: "asyncio.Future[list[Scored]]"


class Batcher:
    """Batches the queries of many requests for the index, which searches in one thread beside the event loop.

    While one batch is searched, the next one fills; `window_s` is how long a first query waits for others to join it.
    """

    def __init__(self, index: Index, *, max_batch: int, window_s: float, max_waiting: int):
        self._index = index
        self._max_batch, self._window_s, self._max_waiting = max_batch, window_s, max_waiting
        self._requests: deque[_Queued] = deque()
        self._waiting = 0  # queries
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "index")
        self.batches = self.queries = 0  # answered so far

    async def search(self, queries: Sequence[str], count: int) -> list[Scored]:
        """The best `count` rows for each query.

        Raises:
            QueueFull: too many queries wait already.
        """
        if self._waiting and self._waiting + len(queries) > self._max_waiting:
            raise QueueFull(f"{self._waiting} queries wait already")
        request = _Queued(queries, count, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._waiting += len(queries)
        self._wake.set()
        return await request.answer

    async def run(self) -> None:
        """Answer requests for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._window_s)
            batch = self._take()
            if not batch:
                continue
            queries = [query for request in batch for query in request.queries]
            count = max(request.count for request in batch)  # one search for all; each keeps its own `count` of it
            try:
                found = await loop.run_in_executor(self._thread, self._index.search, queries, count)
            except Exception as error:  # of the index: passed on to the requests of this batch
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            self.batches, self.queries = self.batches + 1, self.queries + len(queries)
            rest = iter(found)
            for request in batch:
                answer = [next(rest)[: request.count] for _ in request.queries]
                if not request.answer.done():  # its client may have gone
                    request.answer.set_result(answer)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> list[_Queued]:
        batch: list[_Queued] = []
        queries = 0
        # At least one request, however many queries it has. Requests whose client has gone are dropped unsearched.
        while self._requests and (not batch or queries + len(self._requests[0].queries) <= self._max_batch):
            request = self._requests.popleft()
            self._waiting -= len(request.queries)
            if not request.answer.done():
                batch.append(request)
                queries += len(request.queries)
        if not self._requests:
            self._wake.clear()
        return batch


class Refused(Exception):
    """A refused request: it is answered with this status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class RetrievalService:
    """The endpoints over one corpus and its index."""

    def __init__(self, documents: Sequence[Document], index: Index, batcher: Batcher, key: str):
        self._documents, self._index, self._batcher = documents, index, batcher
        self._key = key.encode(errors="surrogateescape")
        self._pages: Mapping[str, int] | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        for path, handler in (("/retrieve", self._retrieve), ("/access", self._access), ("/search", self._search)):
            app.router.add_post(path, handler)
        app.cleanup_ctx.append(self._batching)
        return app

    async def _batching(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._batcher.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._batcher.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key; word every refusal as JSON."""
        try:
            given = request.headers.get("X-API-Key", "").encode(errors="surrogateescape")  # it may hold any bytes
            if self._key and request.method == "POST" and not hmac.compare_digest(given, self._key):
                raise Refused(401, "X-API-Key is missing or wrong")
            return await handler(request)
        except Refused as refused:
            return web.json_response({"error": str(refused)}, status=refused.status)
        except QueueFull as busy:
            return web.json_response({"error": str(busy)}, status=503, headers={"Retry-After": "1"})
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": f"the body is over {MAX_BODY_BYTES} bytes"}, status=413)
        except web.HTTPException as error:
            return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)

    async def _health(self, request: web.Request) -> web.Response:
        served = {"status": "ok", "index": self._index.kind, "documents": len(self._documents)}
        return web.json_response({**served, "queries": self._batcher.queries, "batches": self._batcher.batches})

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if ("query" in body) == ("queries" in body):
            raise Refused(400, 'give either "query" (a text) or "queries" (a list of texts)')
        single = "query" in body
        queries = [_text(body["query"], "query")] if single else _texts(body, "queries", MAX_QUERIES)
        count = _whole(body, "topk", DEFAULT_TOPK, 1, MAX_TOPK)
        scored = single or _flag(body, "return_scores")
        found = await self._batcher.search(queries, count)
        return _answer({"result": [[self._item(row, score, scored) for row, score in rows] for rows in found]})

    def _item(self, row: int, score: float, scored: bool) -> dict[str, Any]:
        return {"document": self._page(row), "score": score} if scored else self._page(row)

    async def _access(self, request: web.Request) -> web.Response:
        urls = _texts(await _body(request), "urls", MAX_URLS)
        if self._pages is None:
            self._pages = await asyncio.to_thread(pages, self._documents)
        rows = [self._pages.get(url) for url in urls]
        return _answer({"result": [None if row is None else self._page(row) for row in rows]})

    def _page(self, row: int) -> dict[str, str]:
        passage = self._documents[row]
        return {"id": passage.id, "contents": passage.contents, "url": passage.url}

    async def _search(self, request: web.Request) -> web.Response:
        """`backend` and `nprobe` have no effect, since there is one index. `min_words` drops shorter passages, out of
        twice as many as are asked for."""
        body = await _body(request)
        query = _text(body.get("query"), "query")
        count = _whole(body, "n_docs", DEFAULT_TOPK, 1, MAX_TOPK)
        least = _whole(body, "min_words", DEFAULT_MIN_WORDS, 0, 1 << 20)
        [rows] = await self._batcher.search([query], count * 2 if least else count)
        found = [(self._documents[row], score) for row, score in rows]
        kept = [(passage, score) for passage, score in found if len(passage.contents.split()) >= least][:count]
        passages = [{"text": p.contents, "source": "corpus", "passage_id": p.id, "filename": p.url} for p, _ in kept]
        return _answer({"results": {"passages": [passages], "scores": [[score for _, score in kept]]}})


def _answer(value: Mapping[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(value, ensure_ascii=False).encode(), content_type="application/json")


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a JSON {type(body).__name__}, not an object")
    return body


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused(400, f'"{name}" must be a text that is not empty')
    if len(value) > MAX_QUERY_CHARACTERS:
        raise Refused(400, f'"{name}" has {len(value)} characters, the limit is {MAX_QUERY_CHARACTERS}')
    return value


def _texts(body: Mapping[str, Any], name: str, most: int) -> list[str]:
    values = body.get(name)
    if not isinstance(values, list) or not 0 < len(values) <= most:
        raise Refused(400, f'"{name}" must be a list of 1 to {most} texts')
    return [_text(value, f"{name}[{number}]") for number, value in enumerate(values)]


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(400, f'"{name}" must be a whole number from {least} to {most}')
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Refused(400, f'"{name}" must be true or false')
    return value


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m flowjax.envs.search.server", allow_abbrev=False)
    parser.add_argument("--corpus", default="", help="JSONL file in the wiki-18 format")
    parser.add_argument("--documents", type=int, default=0, help="instead of a corpus: so many generated documents")
    parser.add_argument("--corpus_seed", type=int, default=0, help="of the generated documents")
    parser.add_argument("--index", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--index_path", default="", help="load the index from here; if nothing is there, save it")
    parser.add_argument("--encoder", default="", help="dense: a Hugging Face folder or package.module:function")
    parser.add_argument("--compress", default="", help="dense: form of a faiss index to be made, such as IVF4096,SQ8")
    parser.add_argument("--vectors", default="", help="that it is made of: .npy, or an exact faiss index")
    parser.add_argument("--search_with", default="", help="of a compressed index, as faiss writes it: nprobe=64")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one")
    parser.add_argument("--open", action="store_true", help="serve other machines without a key")
    parser.add_argument("--max_batch", type=int, default=256, help="queries searched at once")
    parser.add_argument("--batch_window_ms", type=float, default=1.0, help="wait of a query for company")
    given = parser.parse_args(argv)
    bounds = {"documents": (0, 10**9), "corpus_seed": (0, 1 << 63), "port": (0, 65535), "max_batch": (1, MAX_WAITING)}
    for name, (least, most) in {**bounds, "batch_window_ms": (0, 60_000)}.items():
        if not least <= getattr(given, name) <= most:  # nan is between no two numbers
            parser.error(f"--{name}={getattr(given, name)}: give a number from {least} to {most}")
    return given


def load(arguments: argparse.Namespace) -> tuple[Sequence[Document], Index]:
    """Corpus and index.

    Raises:
        WorldError: flags contradict each other or are missing, or a file is missing or of another corpus.
    """
    if bool(arguments.corpus) == bool(arguments.documents):
        raise WorldError(f"give either --corpus=FILE or --documents=N (generated): {HOW_TO_GET}")
    if arguments.index == "dense" and not arguments.encoder:
        raise WorldError("--index=dense needs --encoder: a Hugging Face folder or package.module:function")
    if arguments.index != "dense" and (arguments.compress or arguments.vectors or arguments.search_with):
        raise WorldError("--compress, --vectors and --search_with are for --index=dense")
    if arguments.vectors and not (arguments.compress and Path(arguments.vectors).is_file()):
        raise WorldError(f"--vectors={arguments.vectors} is the file that --compress makes an index of: give both")
    if arguments.vectors:
        read_vectors(Path(arguments.vectors))  # refused here, before the corpus is read
    book = None if arguments.corpus else encyclopedia(arguments.documents, arguments.corpus_seed)
    documents: Sequence[Document] = book.documents() if book else Corpus(arguments.corpus)
    index = _load_index(arguments, documents)
    if index.passages != len(documents):
        raise WorldError(
            f"--index_path={arguments.index_path} holds {index.passages} passages and the corpus {len(documents)}: "
            "remove the index to have it made anew, or name the corpus that it was made of"
        )
    return documents, index


def _load_index(arguments: argparse.Namespace, documents: Sequence[Document]) -> BM25Index | DenseIndex:
    path = Path(arguments.index_path) if arguments.index_path else None
    encode = load_encoder(arguments.encoder) if arguments.index == "dense" else None
    if path is not None and path.exists():
        read = BM25Index.load if encode is None else lambda path: DenseIndex.load(path, encode)
        index = kept(path, _how_made(arguments, documents), read)
    else:
        if path is not None:
            try_writing(path)
        index = _make_index(arguments, documents, encode, path)
    if isinstance(index, DenseIndex):
        if arguments.search_with:
            index.search_with(arguments.search_with)
        _try_search(arguments, index, [documents[row].contents for row in range(min(TRIED, len(documents)))])
    return index


def _how_made(arguments: argparse.Namespace, documents: Sequence[Document]) -> dict[str, Any]:
    """The flags that an index depends on, with what its corpus is recognised by. Empty flags are left out, so that a
    compressed index may be loaded without the flags that made it."""
    given = {"index": arguments.index, "compress": arguments.compress, "vectors": Path(arguments.vectors).name}
    if arguments.index == "dense":  # without an encoder its path would be the working folder
        encoder = Path(arguments.encoder)
        given["encoder"] = encoder.resolve().name if encoder.is_dir() else arguments.encoder
    return identity(documents) | {k: v for k, v in given.items() if v}


def _try_search(arguments: argparse.Namespace, index: DenseIndex, texts: Sequence[str]) -> None:
    try:
        why = "" if any(index.search(texts, 1)) else "nothing is found"
    except Exception as error:  # of a user's encoder, or of faiss
        why = f"{type(error).__name__}: {error}"
    if why:
        raise WorldError(
            f"--encoder={arguments.encoder} cannot search the index with --search_with={arguments.search_with!r} "
            f"({why}): give the encoder that its vectors are of, and faiss's parameters in their range"
        )


def _make_index(
    arguments: argparse.Namespace, documents: Sequence[Document], encode: Encoder | None, path: Path | None
) -> BM25Index | DenseIndex:
    if encode is not None and arguments.compress:
        return _compressed(arguments, documents, encode, path)
    made = _how_made(arguments, documents)
    texts = [passage.contents for passage in documents]
    if encode is not None:
        return DenseIndex.build(texts, encode, path, made)
    index = BM25Index(texts)
    if path is not None:
        index.save(path, made)
    return index


def _compressed(
    arguments: argparse.Namespace, documents: Sequence[Document], encode: Encoder, path: Path | None
) -> DenseIndex:
    if path is None or path.suffix == ".npy":
        raise WorldError("--compress needs --index_path: a file that is not .npy, where the index is kept")

    def encoded(start: int, end: int) -> np.ndarray:
        return encode_passages([documents[row].contents for row in range(start, end)], encode)

    vectors, count = read_vectors(Path(arguments.vectors)) if arguments.vectors else (encoded, len(documents))
    if count != len(documents):
        raise WorldError(f"--vectors={arguments.vectors} holds {count} passages and the corpus {len(documents)}")
    compress(vectors, count, arguments.compress, path, _how_made(arguments, documents))
    return DenseIndex.load(path, encode)


def check_exposure(host: str, key: str, open_to_all: bool) -> None:
    """Raise WorldError for a host that serves other machines, without a key and without `--open`."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not (loopback or key or open_to_all):
        raise WorldError(
            f"--host={host} serves other machines: set {KEY_VARIABLE} to a key that requests must bring as X-API-Key, "
            "or add --open"
        )


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    key = os.environ.get(KEY_VARIABLE, "")
    check_exposure(arguments.host, key, arguments.open)
    documents, index = load(arguments)
    window_s = arguments.batch_window_ms / 1000
    batcher = Batcher(index, max_batch=arguments.max_batch, window_s=window_s, max_waiting=MAX_WAITING)
    runner = web.AppRunner(RetrievalService(documents, index, batcher, key).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise WorldError(f"--port={arguments.port} on {arguments.host} is not free ({error}): give another") from error
    host, port = runner.addresses[0][:2]
    print(f"{index.kind} over {len(documents)} documents on http://{host}:{port}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()


def main(argv: Sequence[str]) -> None:
    try:
        asyncio.run(serve(read_arguments(argv)))
    except WorldError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
