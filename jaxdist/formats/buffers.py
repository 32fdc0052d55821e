"""Arrays from files and into them, past the page cache where the system allows it."""

import errno
import os
from io import FileIO
from mmap import PAGESIZE, mmap
from pathlib import Path

import numpy as np

from jaxdist.formats.tables import Shape

DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
PASSAGE = 1 << 20  # bytes per write, few enough to stay in the processor's cache


def read(path: Path, start: int, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Numbers that lie in a file one after the other. Raises OSError, MemoryError, and ValueError at the file's end."""
    array = np.empty(shape, dtype)
    left = raw(array)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left:
            if not (count := file.readinto(left)):
                raise ValueError(f"it ends {len(left):,} bytes early")
            left = left[count:]
    return array


def write(path: Path, start: int, array: np.ndarray) -> None:
    """Write numbers into a file that is there, one after the other. Raises OSError.

    Whole pages go past the page cache where the system allows it: to fill it would take longer than the disk does.
    """
    data = raw(array)
    first = min(-start % PAGESIZE, len(data))
    last = first + (len(data) - first) // PAGESIZE * PAGESIZE
    try:
        _past_the_cache(path, start + first, data[first:last])
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that the file system knows no such way, or other pages
            raise
        first = last
    with path.open("r+b", buffering=0) as file:
        for begin, end in (0, first), (last, len(data)):
            _put(file, start + begin, data[begin:end])


def _past_the_cache(path: Path, start: int, pages: memoryview) -> None:
    aligned = mmap(-1, PASSAGE)  # not to be closed here: what is raised still refers to it
    with open(path, "r+b", buffering=0, opener=lambda name, flags: os.open(name, flags | DIRECT)) as file:
        for begin in range(0, len(pages), PASSAGE):
            part = pages[begin : begin + PASSAGE]
            aligned[: len(part)] = part
            _put(file, start + begin, memoryview(aligned)[: len(part)])


def _put(file: FileIO, start: int, left: memoryview) -> None:
    file.seek(start)
    while left:
        left = left[file.write(left) :]


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
