"""The process's memory, as the C library keeps it."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_LARGE_BYTES = 128 * 1024


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
