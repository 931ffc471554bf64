"""Plays leases of held-out episodes in one process. Each episode is kept as it ends, so that a second start plays what
is missing."""

import asyncio
import logging
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from flowjax.records import COUNTED_STATUSES, Episode, Lease, WireError, pack, unpack
from flowjax.rollout.client import EngineError

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
_PAUSE_S = 1.0  # before an episode is asked for again of what was away
_FRUITLESS_ROUNDS = 4  # of all slots without one episode that counts, after which there is no sense in more


class EvaluationStopped(RuntimeError):
    """An evaluation that cannot go on now; the message says why. What it has played is kept."""


class EpisodeFile:
    """Episodes of an evaluation in a file, in the order in which they ended.

    Every record has its length before it: one that a crash cut short is overwritten.
    """

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> dict[str, Episode]:
        """The whole episodes, by id."""
        found, end = self._whole()
        if self._path.exists() and self._path.stat().st_size > end:
            with self._path.open("r+b") as file:
                file.truncate(end)
        return found

    def add(self, episode: Episode) -> None:
        """Keep an episode.

        Raises:
            OSError: it cannot be written.
        """
        data = pack(episode)
        with self._path.open("ab") as file:
            file.write(_LENGTH.pack(len(data)) + data)

    def _whole(self) -> tuple[dict[str, Episode], int]:
        """The episodes, and the place where the last of them ends."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}, 0
        found: dict[str, Episode] = {}
        start = 0
        while start + _LENGTH.size <= len(data):
            end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
            if end > len(data):
                break
            try:
                episode = unpack(data[start + _LENGTH.size : end])
            except WireError:  # of another version of flowjax: it and what follows is played again
                break
            found[episode.episode_id] = episode
            start = end
        return found, start


async def play_missing(
    leases: Sequence[Lease],
    file: EpisodeFile,
    play: Callable[[Lease], Awaitable[Episode]],
    *,
    slots: int,
    attempts: int,
    patience_s: float,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Episode]:
    """Play those leases whose episodes the file does not have. Returns all that there are then, by id.

    Args:
        play: one episode; an `EngineError` is a failure of what answers, which says nothing about the episode.
        slots: episodes at a time.
        attempts: plays of an episode that its world breaks, after which it is left out; a second start tries again.
        patience_s: longest time in which nothing is answered.
        report: called with the number of episodes that are in, and of all.

    Raises:
        EvaluationStopped: what answers has been away for longer, or episode after episode comes to nothing.
    """
    wanted = {lease.episode_id: lease for lease in leases}
    kept = {
        name: episode
        for name, episode in file.read().items()
        if name in wanted and episode.task_id == wanted[name].task.task_id
    }
    waiting = iter([lease for lease in leases if lease.episode_id not in kept])
    answered_s, fruitless = time.monotonic(), 0
    report(len(kept), len(wanted))

    async def one(lease: Lease) -> None:
        nonlocal answered_s, fruitless
        failed = 0
        while failed < attempts:
            asked_s = time.monotonic()
            try:
                episode = await play(lease)
            except EngineError as error:
                episode = str(error)
            if isinstance(episode, str) or episode.status == "executor_error":
                if time.monotonic() - answered_s > patience_s:
                    away = episode if isinstance(episode, str) else episode.error
                    raise EvaluationStopped(f"nothing has answered for {patience_s:.0f} s, the last because: {away}")
                failed += answered_s > asked_s  # others are answered, this one is not
                await asyncio.sleep(_PAUSE_S)
                continue
            answered_s = time.monotonic()
            if episode.status in COUNTED_STATUSES:
                fruitless = 0
                file.add(episode)
                kept[lease.episode_id] = episode
                report(len(kept), len(wanted))
                return
            failed, fruitless = failed + 1, fruitless + 1
            _log.warning("episode %s: %s: %s", lease.episode_id, episode.status, episode.error)
            if fruitless >= _FRUITLESS_ROUNDS * slots:
                text = f"{fruitless} episodes in a row came to nothing, the last because: {episode.error}"
                raise EvaluationStopped(text)

    async def slot() -> None:
        for lease in waiting:
            await one(lease)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(slots, len(wanted) - len(kept))):
                group.create_task(slot())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return kept
