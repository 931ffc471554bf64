"""Faults of the machine in words: a full disk, a folder that may not be written, too many open files.

A run waits for those that may pass (`unwritable`): whoever makes room finds it going on. Memory that a burst took goes
back to the machine (`return_freed_memory`). Connections say when they come to nothing (`telling_socket`). Orbax,
which repeats an error for each array, is quiet about it (`quiet_orbax`).
"""

import contextlib
import ctypes
import errno
import functools
import logging
import os
import resource
import socket
import sqlite3
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_LARGE_BYTES = 128 * 1024
_ROOM = "make room on its disk"
_WRITABLE = "see that its disk works and is mounted for writing"
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: _WRITABLE,
    errno.EIO: "the disk may be broken: see dmesg",
    errno.EACCES: "give its owner the right to read and write it",
    errno.EPERM: "give its owner the right to read and write it",
    errno.EADDRINUSE: "another process has its port: end that one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole machine has too many files open: close some",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or end some that hold processes or ports",
    errno.ENOMEM: "the machine is out of memory: end something",
}
_OF_FOLDERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_SQLITE = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_IOERR: errno.EIO}
# As Python, SQLite, Orbax and vLLM word them in their logs.
_WORDINGS = {
    "no space left on device": errno.ENOSPC,
    "database or disk is full": errno.ENOSPC,
    "disk quota exceeded": errno.EDQUOT,
    "read-only file system": errno.EROFS,
    "attempt to write a readonly database": errno.EROFS,
}
_XLA_MEMORY = "RESOURCE_EXHAUSTED"  # as XLA says that it could not allocate
_PROBE_BYTES = 64 * 1024
_UNHEARD_S = 10.0


def explain(error: BaseException) -> str:
    """Cause and remedy of a fault of the machine; "" for any other error. Looks through what it was raised from."""
    number = _number(error)
    return f"{os.strerror(number)}: {_REMEDIES[number]}" if number in _REMEDIES else ""


def is_machine_fault(error: BaseException) -> bool:
    """True of what says nothing about the data that was worked on: too little memory, or a fault of the system."""
    return isinstance(error, OSError | MemoryError) or bool(explain(error)) or _XLA_MEMORY in str(error)


class _TellingSocket(socket.socket):
    """A socket that says when the system makes no connection for want of a port or memory.

    connect(2) says so by EAGAIN. asyncio takes that for EINPROGRESS and believes the connection to be made: a role then
    waited for minutes, and its log had nothing but broken pipes. As another class of error it is raised.
    """

    def connect(self, address: Any) -> None:
        try:
            super().connect(address)
        except BlockingIOError as error:
            if error.errno != errno.EAGAIN:
                raise
            raise ConnectionError(*error.args) from error


def telling_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket, as asyncio and aiohttp make them, that says what has become of a connection.

    Raises `ConnectionError` where the system can make none, and fails after 10 s in which nobody acknowledges what was
    sent. TCP would try again ever more rarely: a line that was cut for a minute was not used for up to another one.

    Args:
        address: an entry of `socket.getaddrinfo`.
    """
    family, kind, protocol, *_ = address
    made = _TellingSocket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; counts for a connection that is being made, too
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _UNHEARD_S))
    return made


def allow_many_files() -> None:
    """Let this process open as many files and connections as it may allow itself: often 1,024 are the default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system's own bound is another
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def unwritable(error: BaseException) -> str:
    """Cause and remedy where a disk is full or read-only, which may pass; "" for any other error."""
    return explain(error) if _number(error) in _OF_FOLDERS else ""


def unwritable_in(text: str) -> str:
    """The same of the words in which a process has ended."""
    found = next((number for wording, number in _WORDINGS.items() if wording in text.lower()), None)
    return "" if found is None else f"{os.strerror(found)}: {_REMEDIES[found]}"


def probe(folder: Path) -> str:
    """Cause and remedy where `folder` cannot be written now, "" where it can."""
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    try:
        try:
            with path.open("wb", buffering=0) as file:
                write_whole(file.fileno(), bytes(_PROBE_BYTES))
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    except OSError as error:
        # One that has too many files open knows nothing of the folder.
        return "" if error.errno in (errno.EMFILE, errno.ENFILE) else f"{folder}: {explain(error) or error}"
    return ""


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of `data`: on a disk that fills up, the system writes a part of it and says so only at the next call.

    Raises:
        OSError: as `os.write`.
    """
    while data:
        data = data[os.write(descriptor, data) :]


def _number(error: BaseException) -> int | None:
    """The system's number of the first fault of the machine among an error and its causes."""
    return next((number for cause in _causes(error) if (number := _number_of_one(cause)) in _REMEDIES), None)


def _number_of_one(error: BaseException) -> int | None:
    if isinstance(error, sqlite3.Error):
        return _OF_SQLITE.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)  # the rest tells sub-causes
    return error.errno if isinstance(error, OSError) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def return_freed_memory() -> None:
    """Let the process shrink again after a burst of large messages.

    glibc keeps raising the size from which a block gets pages of its own, which go back when it is freed. Smaller ones
    lie on the heap, where any block that is still used keeps the pages below it: a process stays as large as it ever
    was. A threshold that is set stays where it is. Other C libraries are left alone.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno == logging.CRITICAL


def _not_of_an_array(record: logging.LogRecord) -> bool:
    """False for asyncio's record of an error that nobody waited for, where Orbax raised it while it wrote or read."""
    trace = record.exc_info[2] if record.exc_info else None
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return not ("never retrieved" in record.getMessage() and any("orbax" in name for name in files))


@functools.cache
def quiet_orbax() -> None:
    """Silence, in this process, the tracebacks that a failed save or restore leaves behind.

    Orbax logs an error once per array before it raises it. After the first failed array it closes its event loop while
    TensorStore still answers for the others: asyncio logs the errors that come before the end, and each later answer
    prints "Event loop is closed". All of it says nothing that the raised error does not.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_an_array)
    shown = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        late_answer = isinstance(unraisable.exc_value, RuntimeError) and unraisable.object is None
        if not (late_answer and str(unraisable.exc_value) == "Event loop is closed"):
            shown(unraisable)

    sys.unraisablehook = hook
