"""The endpoints of the retrieval server: requests checked, answered in the formats that `server` describes."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from flowjax.envs.search.batching import Batcher, Busy
from flowjax.envs.search.client import pages
from flowjax.envs.search.corpus import Document
from flowjax.envs.search.index import Index

MAX_BODY_BYTES = 1 << 20
MAX_QUERIES = 1024  # in one request
MAX_URLS = 64
MAX_TOPK = 100
MAX_QUERY_CHARACTERS = 4000
DEFAULT_TOPK, DEFAULT_MIN_WORDS = 3, 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A request that is answered with a status and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Service:
    """The endpoints over one corpus and its index."""

    def __init__(self, documents: Sequence[Document], index: Index, batcher: Batcher, key: str):
        self._documents, self._index, self._batcher, self._key = documents, index, batcher, key
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
            given = request.headers.get("X-API-Key", "")
            if self._key and request.method == "POST" and not hmac.compare_digest(given.encode(), self._key.encode()):
                raise Refused(401, "X-API-Key is missing or wrong")
            return await handler(request)
        except Refused as refused:
            return web.json_response({"error": str(refused)}, status=refused.status)
        except Busy as busy:
            return web.json_response({"error": str(busy)}, status=503, headers={"Retry-After": "1"})
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": f"the body is over {MAX_BODY_BYTES} bytes"}, status=413)
        except web.HTTPException as error:
            return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)

    async def _health(self, request: web.Request) -> web.Response:
        told = {"index": self._index.kind, "documents": len(self._documents)}
        counts = {"queries": self._batcher.queries, "batches": self._batcher.batches}
        return web.json_response({"status": "ok", **told, **counts})

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
        passage = self._documents[row]
        fields = {"id": passage.id, "contents": passage.contents, "url": passage.url}
        return {"document": fields, "score": score} if scored else fields

    async def _access(self, request: web.Request) -> web.Response:
        urls = _texts(await _body(request), "urls", MAX_URLS)
        if self._pages is None:
            self._pages = await asyncio.to_thread(pages, self._documents)
        rows = [self._pages.get(url) for url in urls]
        return _answer({"result": [None if row is None else self._page(row) for row in rows]})

    def _page(self, row: int) -> dict[str, str]:
        passage = self._documents[row]
        return {"id": passage.id, "url": passage.url, "contents": passage.contents}

    async def _search(self, request: web.Request) -> web.Response:
        """`backend` and `nprobe` are read and change nothing: there is one exact index. `min_words` drops shorter
        passages, out of twice as many as are asked for."""
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
