"""Files and folders that are written in one step, so that a reader sees all of the new one or the old one, also after a
crash; lock files; digests; and names for the machine's start and a folder on it."""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOOK_EVERY_S = 0.1
_PIECES, _PIECE_BYTES = 1000, 4096


class FileHeldError(Exception):
    """Another process holds a file; the message is that process, in words."""


@contextlib.contextmanager
def held(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold a lock file, made if missing, which names the process that holds it.

    The kernel frees it with its process, however that dies. Children that the process forked do not hold it: it is a
    POSIX lock, which also means that a process which holds a file twice frees it with the first of them.

    Args:
        path: of the file; its folder is there.
        wait_s: how long to wait for another process to end.

    Raises:
        FileHeldError: another one still holds it.
        OSError: the file cannot be opened or written.
    """
    until = time.monotonic() + wait_s
    with path.open("a+") as file:  # to append: opening it must not erase the name of the process that holds it
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, as the system likes
                if time.monotonic() > until:
                    raise FileHeldError(path.read_text().strip() or "one that has not said its name yet") from error
            time.sleep(_LOOK_EVERY_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def remove_folder(folder: Path, *, first: str = "") -> None:
    """Delete a folder as far as that can be done, the file `first` in it before all others. Of a link to a folder only
    the link: where it leads is somebody's own."""
    if folder.is_symlink():
        folder.unlink()
        return
    if first:
        (folder / first).unlink()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed into place once all of it is on disk.

    `folder` either does not exist or is complete, also after a crash or a power cut. An existing one is never touched:
    engines may have its bytes cached under its path.

    Raises:
        FileExistsError: it is there, or another process has made it meanwhile.
    """
    there = f"folder {folder} exists already, and folders of versions never change"
    if folder.exists():
        raise FileExistsError(there)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # `mkdtemp` made it readable for this user alone
        for path in unfinished.iterdir():
            _sync(path)
        unfinished.rename(folder)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOTEMPTY:  # from `rename`: the folder has files by now
            raise FileExistsError(there) from error
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path of the same suffix to write to, which is renamed to `path`, and replaces it, once all is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}-{threading.get_ident()}{path.suffix}")
    try:
        yield unfinished
        _sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def shared_like_others(path: Path) -> Iterator[None]:
    """Give the file that the block writes at `path` the mode of any new file: safetensors, which writes beside it and
    renames, leaves it to its owner alone, and engines may run as another user."""
    path.touch()  # a process cannot read its umask without setting it, in all of its threads
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content in hexadecimal; processors have instructions for it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_digest_of(path: Path) -> str:
    """SHA-256 of a file's length and of pieces of its content, spread over all of it, to recognise a large file."""
    length = path.stat().st_size
    sampled = hashlib.sha256(str(length).encode())
    with path.open("rb") as file:
        for start in range(0, length, max(length // _PIECES, _PIECE_BYTES)):
            file.seek(start)
            sampled.update(file.read(_PIECE_BYTES))
    return sampled.hexdigest()


def replace_file(path: Path, text: str | bytes | Iterable[bytes], *, mode: int = 0o644, durable: bool = True) -> None:
    """Write `text` beside `path` and rename it into place.

    Args:
        text: or pieces of it, which may be made as they are written.
        mode: of the file, less what the process's umask takes away; 0o600 is its owner's alone from the first byte on.
        durable: flush it to the disk before and after it is renamed, so that it survives a power cut. Not needed for
            files that are written every second.

    Raises:
        OSError: it cannot be written; `path` is as it was, and nothing is left beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        # Left by a killed writer with the same process id: O_EXCL below makes a new file, with the mode given here.
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            text = text.encode() if isinstance(text, str) else text
            file.writelines([text] if isinstance(text, bytes) else text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:  # also one raised while the pieces are made
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    if durable:  # the name, too, which the folder holds
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def boot_id() -> str:
    """Id of the machine's start, from which its monotonic clock counts; a random one where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(8)


def place(folder: Path) -> str:
    """Text that identifies a folder and this start of its machine; a copy of them, as on a cloned machine, differs."""
    return f"{socket.gethostname()} {boot_id()} {folder.resolve()}"
