"""Reads and writes of files are complete."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.formats import buffers

F32 = np.dtype(np.float32)


def test_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"head" + bytes(60))
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffers.write(file, 8, numbers)
    assert np.array_equal(buffers.read(file, 8, (3, 4), F32), numbers)
    assert file.read_bytes() == b"head" + bytes(4) + numbers.tobytes() + bytes(8)
    with pytest.raises(ValueError, match="it ends 4 bytes early"):
        buffers.read(file, 20, (12,), F32)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening or writing may refuse direct I/O; all is written nevertheless. Other errors are raised."""
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
