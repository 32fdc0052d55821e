"""Memory is used again when nothing shows it any more, and not before; what lies in files is read and written whole."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.formats import buffers

F32 = np.dtype(np.float32)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again() -> None:
    with buffers.reuse(0):
        first = buffers.empty((3, 5), F32)
        place, part = address(first), first.T[2:]
        del first
        second = buffers.empty((15,), F32)
        assert address(second) != place  # a part of it is still shown
        del part
        larger = buffers.empty((20,), F32)
        assert address(larger) != place
        assert address(buffers.empty((30,), np.dtype(np.int16))) == place


def test_beyond_enough_free_memory_goes_to_the_system() -> None:
    """First what has been free for longest; what is in use stays."""
    found = buffers.Buffers(enough=100)
    lent = [found.empty(size) for size in (40, 30, 20)]
    assert found.held == 90
    del lent[0]
    del lent[0]
    lent.append(found.empty(50))  # in place of the 40
    assert found.held == 100
    assert [memory.size for memory in found.free] == [30]
    lent.append(found.empty(80))
    assert found.held == 150
    assert not found.free


def test_after_the_block_memory_is_fresh() -> None:
    with buffers.reuse(0):
        array = buffers.empty((4,), F32)
    assert isinstance(array.base, np.ndarray)
    assert buffers.empty((4,), F32).base is None


def test_blocks_may_overlap() -> None:
    """Those of two threads, of which the first to begin ends first."""
    first, second = buffers.reuse(0), buffers.reuse(0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert buffers.empty((4,), F32).base is not None
    second.__exit__(None, None, None)
    assert buffers.empty((4,), F32).base is None


def test_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"head" + bytes(60))
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffers.write(file, 8, numbers)
    assert np.array_equal(buffers.read(file, 8, (3, 4), F32), numbers)
    assert file.read_bytes() == b"head" + bytes(4) + numbers.tobytes() + bytes(8)
    with pytest.raises(ValueError, match="it ends 4 bytes early"):
        buffers.read(file, 20, (12,), F32)


def test_a_file_system_that_knows_no_way_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may say so where a file is opened, or at a write; all is written all the same. Other errors are errors."""
    numbers, put = np.arange(2_000_000, dtype=np.float32), buffers._put

    def fails(number: int, first: int) -> None:
        calls = iter(range(100))

        def planted(*arguments: Any) -> None:
            if next(calls) == first:
                raise OSError(number, "planted")
            put(*arguments)

        monkeypatch.setattr(buffers, "_put", planted)

    for first in (0, 3):
        (tmp_path / str(first)).touch()
        fails(errno.EINVAL, first)
        buffers.write(tmp_path / str(first), 0, numbers)
        assert (tmp_path / str(first)).read_bytes() == numbers.tobytes()
    fails(errno.ENOSPC, 3)
    with pytest.raises(OSError, match="planted"):
        buffers.write(tmp_path / "0", 0, numbers)
