"""Files that are replaced in one step: who reads one sees all of it or what was there before, also after a crash."""

import contextlib
import os
import threading
from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write `text` beside `path` and rename it into place.

    Args:
        mode: of the file, less what the process's umask takes away; 0o600 is its owner's alone from the first byte on.
        durable: flush it to the disk before and after it is renamed, so that it survives a power cut. What is written
            every second, and made anew after one, does without.

    Raises:
        OSError: it cannot be written; `path` is as it was, and nothing is left beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        # Whatever a killed writer with the same number has left is not gone on with, nor is its mode.
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    if durable:  # the name, too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
