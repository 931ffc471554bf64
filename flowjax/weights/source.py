"""The run that a node plays for, seen from the node: requests to its dataflow, and downloads of its files.

A file comes over HTTP in pieces, many at once: on a long line that loses packets each connection is slow, whatever the
bandwidth. Pieces that have come are noted beside the unfinished file, so that a transfer that is cut, or whose process
is killed, goes on with the rest. A file counts only when its digest is right.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from absl import logging

from flowjax.files import digest_of
from flowjax.monitor.token import VARIABLE, bearer, of_run
from flowjax.monitor.trouble import telling_socket
from flowjax.records import WireError, unpack

_MADE_EVERY_S = 0.5  # between requests for a file that the run is still making
_AT_ONCE = 32  # pieces on their way: where a packet in a hundred is lost, one connection has a fiftieth of 50 Mbit/s
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 64 * 1024, 1024 * 1024
_CONNECT_S, _SILENT_S = 10.0, 30.0  # longest time to connect, and longest silence of a connection
_CHUNK_BYTES = 256 * 1024


class OriginError(RuntimeError):
    """A file is not available from the run; the message names it, the cause and the remedy."""


@contextlib.asynccontextmanager
async def source(url: str, token: str, run_id: str = "") -> AsyncIterator["RunSource"]:
    """The run whose dataflow is at `url`. With `run_id` any other run at that address refuses the requests."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_S)
    headers, connector = {**bearer(token), **of_run(run_id)}, aiohttp.TCPConnector(socket_factory=telling_socket)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield RunSource(url.rstrip("/"), session)


class RunSource:
    """Requests to a run, and downloads of its files."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url, self._session = url, session
        self.received_bytes = 0  # of files
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(self, path: str) -> dict[str, Any]:
        """The answer to a GET request.

        Raises:
            OriginError: the run refuses, or the answer is not a dataflow's.
            aiohttp.ClientError, OSError: nobody answers.
        """
        async with self._get(path) as response:
            body = await response.read()
            if response.status == 401:
                raise OriginError(f"{self.url} wants a key: set {VARIABLE} to what --invite=<node> printed at the run")
            if response.status != 200:
                try:
                    reason = unpack(body)["error"]
                except (WireError, KeyError, TypeError):
                    reason = body.decode(errors="replace")[:500]
                raise OriginError(f"{self.url}{path} is refused (HTTP {response.status}): {reason}")
        try:
            return unpack(body)
        except WireError as error:
            raise OriginError(f"whoever answers at {self.url} is no dataflow of this version: {error}") from error

    async def copy(self, path: str, folder: Path) -> None:
        """Make `folder` hold the files that are listed at `path` and no others; those that it has already are kept.

        Raises:
            OriginError, aiohttp.ClientError, OSError: a file did not come whole. Its pieces stay for the next try.
        """
        files = (await self.ask(path))["files"]
        for name, _, _ in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise OriginError(f"{self.url}{path} lists {name[:200]!r}, which lies outside: it is no dataflow")
        listed = [folder / name for name, _, _ in files]
        known = {place for each in listed for place in (each, _unfinished(each), _notes(each))}
        for other in [place for place in folder.rglob("*") if place.is_file() and place not in known]:
            other.unlink()  # left by a download of another model that was broken off
        await _all_of([self.fetch(f"{path}/{quote(name)}", folder / name, size, sha) for name, size, sha in files])

    async def fetch(self, path: str, target: Path, size_bytes: int, digest: str) -> None:
        """Fetch the file at `path` to `target`, whose folder is made if missing.

        Raises:
            OriginError, aiohttp.ClientError, OSError: it did not come whole, or its digest is wrong.
        """
        if target.exists():
            if await asyncio.to_thread(digest_of, target) == digest:
                return
            target.unlink()  # of an earlier file with that name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _Coming(target, size_bytes) as coming:
            pieces = iter(coming.lacking())
            await _all_of([self._download(path, coming, pieces) for _ in range(_AT_ONCE)])
        if await asyncio.to_thread(digest_of, _unfinished(target)) != digest:
            coming.forget()
            _unfinished(target).unlink()  # the wrong part is not known: all of it comes again
            raise OriginError(f"{self.url}{path} did not come as it is there: it is fetched again")
        coming.forget()
        _unfinished(target).rename(target)

    async def _download(self, path: str, coming: "_Coming", pieces: Iterator[tuple[int, int]]) -> None:
        """Fetch one piece after another from the iterator that all downloads of the file share, until it is empty."""
        for start, end in pieces:
            async with self._slots:
                await self._download_piece(path, coming, start, end)

    async def _download_piece(self, path: str, coming: "_Coming", start: int, end: int) -> None:
        # "identity": a server may otherwise send the file x.gz that lies beside x, or compress a part of it.
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        at = start
        async with self._get(path, headers) as response:
            whole = response.status == HTTPStatus.OK and (start, end) == (0, coming.size_bytes)
            if response.status != HTTPStatus.PARTIAL_CONTENT and not whole:
                raise OriginError(f"{self.url}{path} cannot be had in pieces (HTTP {response.status})")
            try:
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    self.received_bytes += len(chunk)
                    at += coming.write(chunk[: end - at], at)
            finally:
                coming.note(start, at)
        if at < end:
            raise OriginError(f"{self.url}{path} ends after {at} bytes, though {coming.size_bytes} were listed")

    @contextlib.asynccontextmanager
    async def _get(self, path: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a GET request; waits while the run still makes it (HTTP 202)."""
        while True:
            async with self._session.get(f"{self.url}{path}", headers=headers) as response:
                if response.status != HTTPStatus.ACCEPTED:
                    yield response
                    return
            logging.info("the run is making %s", path)
            await asyncio.sleep(_MADE_EVERY_S)


async def _all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end, even if one fails: pieces that have come need not come again at the next try."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _unfinished(target: Path) -> Path:
    """File that holds the pieces of `target` that have come so far, each at its place."""
    return target.with_name(f".{target.name}.part")


def _notes(target: Path) -> Path:
    """File that says which bytes have come: on each line the first, and the one after the last."""
    return target.with_name(f".{target.name}.came")


class _Coming:
    """A download in pieces, in any order. Use as a context manager.

    Args:
        target: path of the whole file; until then it has another name.
        size_bytes: size of the whole file.
    """

    def __init__(self, target: Path, size_bytes: int):
        self.size_bytes = size_bytes
        self._part, self._notes = _unfinished(target), _notes(target)
        if not self._part.exists():
            self.forget()

    def __enter__(self) -> "_Coming":
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def lacking(self) -> list[tuple[int, int]]:
        """Pieces that have not come, each as (first byte, byte after the last); none is empty."""
        least = -(-self.size_bytes // _AT_ONCE)
        piece_bytes = min(max(least, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)
        holes, at = [], 0
        for start, end in sorted(self._came()):
            holes.append((at, start))
            at = max(at, end)
        holes.append((at, self.size_bytes))
        return [
            (first, min(first + piece_bytes, end)) for start, end in holes for first in range(start, end, piece_bytes)
        ]

    def write(self, content: bytes, at: int) -> int:
        """Write all of `content` at byte `at`; returns its length."""
        left, place = memoryview(content), at  # a view: `pwrite` may write less, and slices of it copy nothing
        while left:
            written = os.pwrite(self._file, left, place)
            left, place = left[written:], place + written
        return len(content)

    def note(self, start: int, end: int) -> None:
        """Write down that these bytes are in the file."""
        if start < end:
            with self._notes.open("a") as notes:
                print(start, end, file=notes)

    def forget(self) -> None:
        """Delete the notes."""
        self._notes.unlink(missing_ok=True)

    def _came(self) -> list[tuple[int, int]]:
        """Ranges of bytes that have come, by the notes."""
        if not self._notes.exists():
            return []
        try:
            fields = [line.split() for line in self._notes.read_text().splitlines()]
            came = [(int(start), int(end)) for start, end in fields]
            if not all(0 <= start < end <= self.size_bytes for start, end in came):
                raise ValueError("half a line, and a whole one behind it")
            return came
        except ValueError:  # a power cut or a full disk has left half a line: all of it comes again
            self.forget()
            return []
