"""Arrays from files and into them, in memory that is used again: a fresh page costs more than copying one does."""

import errno
import math
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.formats.tables import Shape

ENOUGH = 400_000_000  # bytes: beyond them and the largest tensor, what is free goes to the system
DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
PASSAGE = 1 << 20  # bytes per write, few enough to stay in the processor's cache


class Loan:
    """Memory of a buffer, which goes back when the last array that shows it is gone."""

    def __init__(self, buffers: "Buffers", memory: np.ndarray) -> None:
        self.buffers, self.memory = buffers, memory
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        self.buffers.give(self.memory)


class Buffers:
    """Arrays like those of `np.empty`, in memory that earlier ones of their size have left."""

    def __init__(self, enough: int) -> None:
        self.lock, self.held, self.enough = threading.Lock(), 0, enough
        self.returned, self.free = deque[np.ndarray](), list[np.ndarray]()

    def empty(self, size: int) -> np.ndarray:
        """Bytes of any value. Raises MemoryError."""
        return np.asarray(Loan(self, self._take(size)))

    def give(self, memory: np.ndarray) -> None:
        """Back. Without the lock: the garbage collector may run this wherever a thread is, also within it."""
        self.returned.append(memory)

    def _take(self, size: int) -> np.ndarray:
        """A free buffer of that size, or a new one."""
        with self.lock:
            while self.returned:
                self.free.append(self.returned.popleft())
            if (found := next((i for i, memory in enumerate(self.free) if memory.size == size), None)) is not None:
                return self.free.pop(found)
            while self.free and self.held + size > self.enough:  # first what has been free for longest
                self.held -= self.free.pop(0).size
            memory = np.empty(size, np.uint8)
            self.held += size
            return memory


_lock = threading.Lock()
_users = 0
_buffers: Buffers | None = None


@contextmanager
def reuse(largest: int) -> Iterator[None]:
    """In this block, in all threads, `empty` and `read` use memory again; after the last one it goes to the system.

    `largest`: bytes of the largest tensor that is read or made.
    """
    global _users, _buffers
    with _lock:
        _users += 1
        _buffers = _buffers or Buffers(ENOUGH)
        _buffers.enough = max(_buffers.enough, ENOUGH + largest)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _buffers = None


def empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An array of any numbers. Raises MemoryError."""
    if (found := _buffers) is None:
        return np.empty(shape, dtype)
    return found.empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def read(path: Path, start: int, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Numbers that lie in a file one after the other. Raises OSError, MemoryError, and ValueError at the file's end."""
    array = empty(shape, dtype)
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
