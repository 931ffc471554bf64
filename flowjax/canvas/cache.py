"""Cache of operators' results, by all that went into them: after an edit, only the changed part runs again.

    cache = Cache(path=Path("results.sqlite"))     # without a path it ends with the process

Everything that can change a result is in the key: the operator and its code, the instruction, the inputs, the problem,
the backend's identity, the sampling and its seed. Failures are never kept, nor are results of operators that declare
themselves not cacheable.
"""

import asyncio
import functools
import hashlib
import inspect
import json
import logging
import sqlite3
import sys
import threading
from abc import ABC
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowjax.canvas.operators import Operator
from flowjax.canvas.values import Problem, State, Value

_log = logging.getLogger(__name__)
_SCHEMA_VERSION = 1
_PLAIN = (str, int, float, tuple, list, dict)
_BUSY_S = 2.0  # how long another process may hold the file


class CacheError(ValueError):
    """A cache file that cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an operator's run, or its error. `keep` says whether a cache may keep it."""

    outputs: State = field(default_factory=dict)
    error: str = ""
    keep: bool = False


class Cache:
    """Drops the least recently used results first. Any number of runs, event loops and threads may share one.

    Args:
        max_entries: most results in memory.
        max_bytes: most memory for their values.
        path: an SQLite file that outlives the process; several processes may share it.
        max_file_entries: most results in the file; the oldest are dropped when it is opened.

    Raises:
        CacheError: the file is no cache of this version, or cannot be read or written.
    """

    def __init__(
        self,
        max_entries: int = 100_000,
        max_bytes: int = 256 << 20,
        *,
        path: Path | None = None,
        max_file_entries: int = 1_000_000,
    ):
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[str, State] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        # Results that are being computed. By event loop: a future of one loop cannot be awaited in another.
        self._flights: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Outcome | None]] = {}
        self._file = None if path is None else _open(path, max_file_entries)
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Results in memory."""
        return len(self._entries)

    def close(self) -> None:
        """Close the file; results stay in memory."""
        if self._file is not None:
            self._file.close()
            self._file = None

    async def through(self, key: str, compute: Callable[[], Awaitable[Outcome]]) -> tuple[Outcome, bool]:
        """The outcome, and True where it was not computed by this call. Equal calls at the same time compute once.

        They share a failure, too, which is not kept. If the computing call is cancelled or raises (out of budget, say),
        one of those that wait computes instead.
        """
        loop = asyncio.get_running_loop()
        while True:
            if (kept := self._get(key)) is not None:
                self.hits += 1
                return Outcome(kept), True
            if (flight := self._flights.get((loop, key))) is None:
                break
            # Shielded: a waiter that is cancelled must not cancel the future, which others await as well.
            if (outcome := await asyncio.shield(flight)) is not None:
                self.hits += 1
                return outcome, True
        self.misses += 1
        flight = self._flights[loop, key] = loop.create_future()
        made: Outcome | None = None
        try:
            outcome = made = await compute()
            if outcome.keep and not outcome.error:
                self._put(key, outcome.outputs)
        finally:
            # Also when this call was cancelled or raised: None makes one of the waiting calls compute.
            del self._flights[loop, key]
            flight.set_result(made)
        return outcome, False

    def _get(self, key: str) -> State | None:
        with self._lock:
            if (outputs := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return outputs
            if self._file is None:
                return None
            try:
                row = self._file.execute("SELECT outputs FROM results WHERE key = ?", (key,)).fetchone()
                outputs = None if row is None else _read(row[0])
            except (sqlite3.Error, ValueError) as error:
                _log.warning("The cache file could not be read: %s", error)
                return None
            if outputs is None:
                return None
            self._remember(key, outputs)
            return outputs

    def _put(self, key: str, outputs: State) -> None:
        with self._lock:
            self._remember(key, outputs)
            if self._file is not None:
                try:
                    # Overwrites an entry that is there: it is damaged, or another process made it meanwhile.
                    self._file.execute(
                        "INSERT INTO results VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET outputs = excluded.outputs",
                        (key, json.dumps(dict(outputs))),
                    )
                except sqlite3.Error as error:
                    _log.warning("The cache file could not be written: %s", error)

    def _remember(self, key: str, outputs: State) -> None:
        size = _size_bytes(outputs)
        if key in self._entries or size > self._max_bytes:
            return
        self._entries[key] = outputs
        self._bytes += size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= _size_bytes(dropped)


def key_of(
    operator: type[Operator], instruction: str, inputs: State, *, problem: str, backend: str, sampling: str, seed: int
) -> str:
    """The key of a result, from the problem's digest, the backend's identity and all sampling settings as a text."""
    parts = [fingerprint(operator), instruction, dict(inputs), problem, backend, sampling, seed]
    return _digest(json.dumps(parts, sort_keys=True))


def problem_digest(problem: Problem) -> str:
    """Equal for equal problems. Of all fields, since an operator may read any of them."""
    options = list(problem.options.items())
    return _digest(
        json.dumps(
            [
                *(problem.text, problem.kind, problem.context, options),
                *(problem.entry_point, list(problem.public_tests), problem.part),
            ]
        )
    )


@functools.lru_cache(maxsize=1024)
def fingerprint(operator: type[Operator]) -> str:
    """Identity of an operator: the source of its modules and its plain attributes, so that changed code runs again."""
    parts: list[Any] = [operator.name]
    for base in operator.__mro__:
        if base in (Operator, ABC, object):
            continue
        try:
            parts.append(inspect.getsource(inspect.getmodule(base) or base))
        except (OSError, TypeError):  # defined in an interactive session, so without a source: its name must do
            parts.append(f"{base.__module__}.{base.__qualname__}")
        plain = {name: value for name, value in vars(base).items() if isinstance(value, _PLAIN)}
        parts.append(sorted((name, repr(value)) for name, value in plain.items() if not name.startswith("__")))
    return _digest(json.dumps(parts))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _read(text: str) -> State:
    """Outputs as they stand in the file.

    Raises:
        ValueError: they are damaged.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text[:60]!r} holds no outputs")
    # JSON has made lists of the tuples.
    outputs = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    if damaged := [name for name, value in outputs.items() if not isinstance(value, str | bool | tuple)]:
        raise ValueError(f"{damaged[0]} holds no value of an output")
    return outputs


def _size_bytes(outputs: State) -> int:
    return sum(sys.getsizeof(name) + _value_bytes(value) for name, value in outputs.items())


def _value_bytes(value: Value) -> int:
    return sys.getsizeof(value) + (sum(map(sys.getsizeof, value)) if isinstance(value, tuple) else 0)


def _open(path: Path, max_entries: int) -> sqlite3.Connection:
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        file.execute("BEGIN IMMEDIATE")  # another process may be making the same file
        (version,) = file.execute("PRAGMA user_version").fetchone()
        (tables,) = file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version != _SCHEMA_VERSION and tables:
            raise sqlite3.DatabaseError("it is of another kind or version")
        file.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        file.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, outputs TEXT NOT NULL)")
        file.execute("DELETE FROM results WHERE rowid <= (SELECT max(rowid) FROM results) - ?", (max_entries,))
        file.execute("COMMIT")
        # After the transaction: inside one, SQLite changes neither. NORMAL may lose the newest results in a power
        # failure, but does not damage the file.
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, OSError) as error:
        if file is not None:
            file.close()
        raise CacheError(f"the cache file {path} cannot be used ({error}): delete it or name another path") from error
    return file
