"""Faults of the machine in words: a full disk, a folder that may not be written, too many open files.

A run waits while a disk is full or read-only (`unwritable`), and goes on by itself once there is room. Also: memory of
a burst is returned to the machine (`return_freed_memory`), sockets raise an error where a connection is lost or cannot
be made (`telling_socket`), and Orbax's repetition of one error for each array is silenced (`quiet_orbax`).
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
import sysconfig
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
_XLA_MEMORY = "RESOURCE_EXHAUSTED"  # status in the text of XLA's error for a failed allocation
_PROBE_BYTES = 64 * 1024
_UNHEARD_S = 10.0
_LONGEST_ERROR = 2000  # characters of an error of a user's code that are passed on
_FLOWJAX = Path(__file__).parents[1]


def explain(error: BaseException) -> str:
    """Cause and remedy of a fault of the machine; "" for any other error. Also looks at the error's causes."""
    number = _number(error)
    return f"{os.strerror(number)}: {_REMEDIES[number]}" if number in _REMEDIES else ""


def in_words(error: OSError) -> str:
    """File, cause and, where there is one, remedy of an error of the system."""
    return f"{f'{error.filename}: ' if error.filename else ''}{explain(error) or error.strerror or error}"


def with_place(error: BaseException) -> str:
    """An error in a line, with the file and line of code outside flowjax, such as a user's world, where it came."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f", at {Path(frame.filename).name} line {frame.lineno}" for frame in frames if _is_users(frame.filename)]
    said = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return f"{said}{places[-1] if places else ''}".encode(errors="replace").decode()


def _is_users(filename: str) -> bool:
    path = Path(filename)
    libraries = (_FLOWJAX, Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib")))
    return path.is_file() and "site-packages" not in path.parts and not any(map(path.is_relative_to, libraries))


def is_machine_fault(error: BaseException) -> bool:
    """True if an error is no fault of the data that was processed: too little memory, or a fault of the system."""
    return isinstance(error, OSError | MemoryError) or bool(explain(error)) or _XLA_MEMORY in str(error)


class _TellingSocket(socket.socket):
    """A socket that raises an error when the system cannot connect because ports or memory are short.

    connect(2) reports that by EAGAIN, for which Python raises BlockingIOError as for EINPROGRESS. asyncio expects the
    latter and believes the connection to be made: a role then waited for minutes, and its log had nothing but broken
    pipes. So another class of error is raised.
    """

    def connect(self, address: Any) -> None:
        try:
            super().connect(address)
        except BlockingIOError as error:
            if error.errno != errno.EAGAIN:
                raise
            raise ConnectionError(*error.args) from error


def telling_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for asyncio and aiohttp that raises an error when its connection cannot be made or is lost.

    `ConnectionError` where the system can make none; and an error after 10 s in which nobody acknowledges what was
    sent. By default TCP retries ever more rarely: a link that was down for a minute stayed unused for up to another.

    Args:
        address: an entry of `socket.getaddrinfo`.
    """
    family, kind, protocol, *_ = address
    made = _TellingSocket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; counts for a connection that is being made, too
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _UNHEARD_S))
    return made


def allow_many_files() -> None:
    """Raise this process's soft limit of open files and connections, often 1,024, to its hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system may not grant the hard limit that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def unwritable(error: BaseException) -> str:
    """Cause and remedy where a disk is full or read-only, which may pass; "" for any other error."""
    return explain(error) if _number(error) in _OF_FOLDERS else ""


def unwritable_in(text: str) -> str:
    """As `unwritable`, from the last lines of a process's log."""
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
        # With too many files open this process cannot tell: the folder may be fine.
        return "" if error.errno in (errno.EMFILE, errno.ENFILE) else f"{folder}: {explain(error) or error}"
    return ""


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of `data`. On a disk that fills up `os.write` writes a part of it, and only its next call fails.

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
        # The low byte is SQLite's primary code; the others make an extended one of it.
        return _OF_SQLITE.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
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

    From a threshold on, glibc gives a block pages of its own (mmap), which go back to the machine when it is freed. It
    raises this threshold as large blocks are freed. Smaller blocks lie on the heap, where one that is still used keeps
    all pages below it: a process stays as large as it ever was. Setting the threshold ends its adaptation. Other C
    libraries are left alone.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno == logging.CRITICAL


def _not_of_an_array(record: logging.LogRecord) -> bool:
    """False for asyncio's record of an exception that nobody awaited, if it passed through Orbax's code."""
    trace = record.exc_info[2] if record.exc_info else None
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return not ("never retrieved" in record.getMessage() and any("orbax" in name for name in files))


@functools.cache
def quiet_orbax() -> None:
    """Silence, in this process, the tracebacks that a failed save or restore leaves behind.

    Orbax logs an error once per array before it raises it. After the first failed array it closes its event loop while
    TensorStore still answers for the others: asyncio logs the errors that come before the end, and each later answer
    prints "Event loop is closed". The error that is raised has all of this information.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_an_array)
    shown = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        late_answer = isinstance(unraisable.exc_value, RuntimeError) and unraisable.object is None
        if not (late_answer and str(unraisable.exc_value) == "Event loop is closed"):
            shown(unraisable)

    sys.unraisablehook = hook
