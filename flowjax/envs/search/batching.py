"""Queries of many requests answered by the index together, in one thread beside the event loop."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flowjax.envs.search.index import Index, Scored


class Busy(RuntimeError):
    """More queries wait than the server wants to hold."""


@dataclass(frozen=True, slots=True)
class _Request:
    queries: Sequence[str]
    count: int
    answer: "asyncio.Future[list[Scored]]"


class Batcher:
    """While one batch is searched, the next gathers; `window_s` lets a first query wait for company."""

    def __init__(self, index: Index, *, max_batch: int, window_s: float, max_waiting: int):
        self._index = index
        self._max_batch, self._window_s, self._max_waiting = max_batch, window_s, max_waiting
        self._requests: deque[_Request] = deque()
        self._waiting = 0  # queries
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "index")
        self.batches = self.queries = 0  # answered so far

    async def search(self, queries: Sequence[str], count: int) -> list[Scored]:
        """The best `count` rows for each query.

        Raises:
            Busy: too many queries wait already.
        """
        if self._waiting and self._waiting + len(queries) > self._max_waiting:
            raise Busy(f"{self._waiting} queries wait already")
        request = _Request(queries, count, asyncio.get_running_loop().create_future())
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
            count = max(request.count for request in batch)
            try:
                found = await loop.run_in_executor(self._thread, self._index.search, queries, count)
            except Exception as error:  # whatever the index raises is told to those who asked
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

    def _take(self) -> list[_Request]:
        batch: list[_Request] = []
        taken = 0
        while self._requests and (not batch or taken + len(self._requests[0].queries) <= self._max_batch):
            request = self._requests.popleft()
            self._waiting -= len(request.queries)
            if not request.answer.done():
                batch.append(request)
                taken += len(request.queries)
        if not self._requests:
            self._wake.clear()
        return batch
