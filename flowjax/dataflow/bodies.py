"""Bodies of requests, read within bounds of size, time and memory: senders that are slow or many hold up nobody else.

A body is read whole before anything waits for it, so that a slow sender holds no place that another needs. It has to
keep a least pace. All bodies together have a share of memory; where that is used up, the slowest one is sent away.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from flowjax.dataflow.messages import MOST_SLOTS
from flowjax.record_checks import LONGEST_SHOWN, Bounds

_SMALL_BYTES = 128 * 1024
_LEASE_BYTES = 40  # of a lease's id on the wire
_NAMES_BYTES = 2048  # of the names and numbers of a turn
_EPISODE_BYTES, _EPISODE_ELEMENTS = 64 * 1024, 4096  # beside its turns: outcomes, names, an error
_TURN_ELEMENTS = 64
_EPISODES = 64  # of the longest that there can be, in one message
_LEAST_MEMORY_BYTES = 64 * 1024**2
_AT_FIRST_S = 10.0  # until a body has to have kept its least pace
_LEAST_BYTES_PER_S = 16 * 1024
_LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest message of one name: bytes on the wire, and elements of all its lists and maps together."""

    size_bytes: int
    elements: int


def limits(bounds: Bounds, *, most_bytes: int) -> dict[str, Limit]:
    """The limit of each message that has one of its own, by name; "" is that of all others.

    Args:
        bounds: of the run's episodes, from which the limit of `episodes` follows.
        most_bytes: of any message (config.dataflow.max_message_bytes).
    """
    turn_bytes = 4 * bounds.prompt_tokens + 8 * bounds.new_tokens + LONGEST_SHOWN + _NAMES_BYTES
    episodes = Limit(
        _EPISODES * (bounds.turns * turn_bytes + _EPISODE_BYTES),
        _EPISODES * (bounds.turns * _TURN_ELEMENTS + _EPISODE_ELEMENTS),
    )
    leases = Limit(_SMALL_BYTES + MOST_SLOTS * _LEASE_BYTES, 2 * MOST_SLOTS)
    small = Limit(_SMALL_BYTES, _SMALL_BYTES // 8)
    found = {"": small, "episodes": episodes, "renew": leases, "give_back": leases, "refuse": leases}
    return {name: Limit(min(limit.size_bytes, most_bytes), limit.elements) for name, limit in found.items()}


class BodyError(Exception):
    """A body that cannot be read; says why, and with which HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(eq=False, slots=True)
class _Body:
    """One that is on its way, or read and not answered yet."""

    timer: asyncio.Timeout
    started_s: float = field(default_factory=time.monotonic)
    parts: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    sent_away: bool = False
    whole: bool = False

    @property
    def latest_s(self) -> float:
        """By when more of it has to be in."""
        allowed_s = min(_AT_FIRST_S + self.size_bytes / _LEAST_BYTES_PER_S, _LONGEST_S)
        return self.started_s + allowed_s

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / (time.monotonic() - self.started_s + 1e-3)


class Bodies:
    """The bodies that are in memory.

    Args:
        memory_bytes: the most that they may take together before they are decoded.
    """

    def __init__(self, memory_bytes: int = _LEAST_MEMORY_BYTES):
        self._memory_bytes = max(memory_bytes, _LEAST_MEMORY_BYTES)
        self._held: set[_Body] = set()

    @asynccontextmanager
    async def read(self, request: web.Request, limit: Limit):
        """The body of a request, which counts as in memory until the context is left.

        Raises:
            BodyError: it is larger than `limit` (413), compressed (415), broken on the way (400), slower than a sender
                may be, or the slowest where there is no more room (503: it may be sent again).
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise BodyError(415, "the body is compressed: send it as it is")
        if (request.content_length or 0) > limit.size_bytes:
            raise BodyError(413, _too_large(limit))
        with self._place(_Body(asyncio.timeout(None))) as body:
            yield await self._receive(request, body, limit)

    @contextmanager
    def _place(self, body: _Body) -> Iterator[_Body]:
        self._held.add(body)
        try:
            yield body
        finally:
            self._held.discard(body)

    async def _receive(self, request: web.Request, body: _Body, limit: Limit) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            async with body.timer:
                while True:
                    if body.timer.expired():  # as more came in: the cancellation waits at the next await
                        await asyncio.sleep(0)
                    body.timer.reschedule(loop.time() + body.latest_s - time.monotonic())
                    if not (part := await request.content.readany()):
                        break
                    body.parts.append(part)
                    body.size_bytes += len(part)
                    if body.size_bytes > limit.size_bytes:
                        raise BodyError(413, _too_large(limit))
                    self._make_room()
                    if body.sent_away:
                        raise TimeoutError
        except TimeoutError as error:
            reason = "there was no room for all bodies, and this was the slowest" if body.sent_away else _too_slow(body)
            raise BodyError(503, f"{reason}: send it again") from error
        except (BodyError, ConnectionError):  # who has gone needs no answer
            raise
        except Exception as error:  # whatever aiohttp makes of a broken transfer
            raise BodyError(400, f"the body cannot be read ({type(error).__name__}: {error})") from error
        body.whole = True
        whole = b"".join(body.parts)
        body.parts.clear()
        return whole

    def _make_room(self) -> None:
        """Send away the slowest bodies that are still on their way, while all together are too large."""
        on_their_way = {body for body in self._held if not body.whole and not body.sent_away}
        while on_their_way and sum(body.size_bytes for body in self._held) > self._memory_bytes:
            slowest = min(on_their_way, key=lambda body: body.bytes_per_s)
            on_their_way.discard(slowest)
            slowest.sent_away, slowest.size_bytes = True, 0
            slowest.parts.clear()
            if not slowest.timer.expired():
                slowest.timer.reschedule(asyncio.get_running_loop().time())


def _too_large(limit: Limit) -> str:
    return (
        f"the body is over {limit.size_bytes:,} bytes, the most that a message of this name may have in this run: send "
        "less at once, or raise config.dataflow.max_message_bytes where that is the limit"
    )


def _too_slow(body: _Body) -> str:
    waited_s = time.monotonic() - body.started_s
    return (
        f"the body was not in after {waited_s:.0f} s ({body.size_bytes:,} bytes of it were): it may take "
        f"{_LONGEST_S:g} s and, after {_AT_FIRST_S:g} s, has to keep {_LEAST_BYTES_PER_S:,} bytes a second"
    )
