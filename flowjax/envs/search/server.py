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
import ipaddress
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from flowjax.envs.base import WorldError
from flowjax.envs.search.batching import Batcher
from flowjax.envs.search.client import KEY_VARIABLE
from flowjax.envs.search.corpus import Document, encyclopedia
from flowjax.envs.search.encoders import load_encoder
from flowjax.envs.search.files import HOW_TO_GET, Corpus
from flowjax.envs.search.index import BM25Index, DenseIndex, Index
from flowjax.envs.search.service import Service

MAX_WAITING = 16_384  # queries


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m flowjax.envs.search.server", allow_abbrev=False)
    parser.add_argument("--corpus", default="", help="JSONL file in the wiki-18 format")
    parser.add_argument("--documents", type=int, default=0, help="instead of a corpus: so many generated documents")
    parser.add_argument("--corpus_seed", type=int, default=0, help="of the generated documents")
    parser.add_argument("--index", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--index_path", default="", help="load the index from here; if nothing is there, save it")
    parser.add_argument("--encoder", default="", help="dense: a Hugging Face folder or package.module:function")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one")
    parser.add_argument("--open", action="store_true", help="serve other machines without a key")
    parser.add_argument("--max_batch", type=int, default=256, help="queries searched at once")
    parser.add_argument("--batch_window_ms", type=float, default=1.0, help="wait of a query for company")
    return parser.parse_args(argv)


def load(arguments: argparse.Namespace) -> tuple[Sequence[Document], Index]:
    """Corpus and index.

    Raises:
        WorldError: something that was named is missing, or nothing was named.
    """
    if bool(arguments.corpus) == bool(arguments.documents):
        raise WorldError(f"give either --corpus=FILE or --documents=N (generated): {HOW_TO_GET}")
    if arguments.index == "dense" and not arguments.encoder:
        raise WorldError("--index=dense needs --encoder: a Hugging Face folder or package.module:function")
    documents: Sequence[Document] = (
        Corpus(arguments.corpus)
        if arguments.corpus
        else encyclopedia(arguments.documents, arguments.corpus_seed).documents()
    )
    index = _load_index(arguments, documents)
    if index.passages != len(documents):
        raise WorldError(
            f"--index_path={arguments.index_path} holds {index.passages} passages and the corpus {len(documents)}: "
            "remove the index to have it made anew, or name the corpus that it was made of"
        )
    return documents, index


def _load_index(arguments: argparse.Namespace, documents: Sequence[Document]) -> BM25Index | DenseIndex:
    path = Path(arguments.index_path) if arguments.index_path else None
    if arguments.index == "bm25":
        if path is not None and path.is_dir():
            return BM25Index.load(path)
        index = BM25Index([passage.contents for passage in documents])
        if path is not None:
            index.save(path)
        return index
    encode = load_encoder(arguments.encoder)
    if path is not None and path.is_file():
        return DenseIndex.load(path, encode)
    return DenseIndex.build([passage.contents for passage in documents], encode, save_to=path)


def check_exposure(host: str, key: str, open_to_all: bool) -> None:
    """Refuse to serve other machines without a key unless that is asked for."""
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
    runner = web.AppRunner(Service(documents, index, batcher, key).app(), access_log=None)
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
    arguments = read_arguments(argv)
    try:
        asyncio.run(serve(arguments))
    except WorldError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
