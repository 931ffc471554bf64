"""Copies of the planner's library, each with a state of its own."""

import functools
import os
import struct
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward import interface

ELF64 = b"\x7fELF\x02\x01"  # little-endian
PROGRAM_HEADERS, HEADER_SIZE_AND_COUNT = 32, 54  # where an ELF file says where its program headers are, and how many


def loaded_bytes(image: bytes) -> int:
    """How far a shared library's file reaches that is ever loaded; what follows is for debuggers."""
    if not image.startswith(ELF64):
        return len(image)
    (start,) = struct.unpack_from("<Q", image, PROGRAM_HEADERS)
    size, count = struct.unpack_from("<HH", image, HEADER_SIZE_AND_COUNT)
    headers = [struct.unpack_from("<IIQQQQ", image, start + index * size) for index in range(count)]
    return max(offset + length for _, _, offset, _, _, length in headers)


@functools.cache
def _source() -> str:
    """The library without what only debuggers read: a megabyte instead of 34, of which every environment has a copy."""
    path = str(interface.DOWNWARD_LIB_PATH)
    if not hasattr(os, "memfd_create"):
        return path
    image = Path(path).read_bytes()
    file = os.memfd_create("libdownward")
    os.write(file, image[: loaded_bytes(image)])
    return f"/proc/self/fd/{file}"


def load_library() -> Any:
    """A copy of the planner's library; fast_downward makes it, from a file that is named to it for so long."""
    whole = interface.DOWNWARD_LIB_PATH
    interface.DOWNWARD_LIB_PATH = _source()
    try:
        return fast_downward.load_lib()
    finally:
        interface.DOWNWARD_LIB_PATH = whole
