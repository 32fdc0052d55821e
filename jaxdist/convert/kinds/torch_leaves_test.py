"""Tensors whose numbers are interleaved with others in a file: read in pieces, for any strides."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
torch_leaves = importlib.import_module("jaxdist.convert.kinds.torch_leaves")

SHOWN = {
    "a column": lambda x: x[:, 5],
    "some columns": lambda x: x[:, 3:9],
    "some columns, turned": lambda x: x[:, 3:9].T,
    "every seventh row": lambda x: x[::7],
    "one number of each block": lambda x: x.reshape(4, 16, 8, 8)[:, 3, :, 1],
    "four of two axes alike": lambda x: x.as_strided((2, 2), (140, 140)),
    "all": lambda x: x,
    "all, turned": lambda x: x.T,
    "nothing": lambda x: x[:0, :3],
    "one number": lambda x: x[3, 4],
    "one row, many times": lambda x: x[:1].expand(9, 64),
}


@pytest.mark.parametrize("case", SHOWN)
def test_interleaved_numbers_are_read_in_pieces(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SHOWN[case](torch.arange(4096.0).reshape(64, 64))
    torch.save(shown, tmp_path / "a.pt")
    counts: list[int] = []
    right = torch_leaves.buffers.read

    def read(path: Path, start: int, shape: tuple[int, ...], dtype: Any) -> Any:
        counts.append(math.prod(shape) * dtype.itemsize)
        return right(path, start, shape, dtype)

    monkeypatch.setattr(torch_leaves.buffers, "read", read)
    monkeypatch.setattr(torch_leaves, "PIECE", 600)
    leaf = torch_leaves.leaf(tmp_path / "a.pt", "a", torch_files.load(tmp_path / "a.pt"))
    found = leaf.read()
    assert np.array_equal(found, shown.numpy()) and found.dtype == np.float32 and found.flags.c_contiguous
    assert max(counts) <= (leaf.besides or leaf.bytes) and leaf.besides <= 600


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 6), (3, 2, 9), (2, 1, 3, 5)])
@pytest.mark.parametrize("size", [1, 4, 30, 1000])
def test_blocks_are_all_of_an_array(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], size: int) -> None:
    monkeypatch.setattr(torch_leaves, "PIECE", size)
    seen = np.zeros(shape, np.uint8)
    for block in torch_leaves.blocks(shape, seen.nbytes):
        assert seen[block].nbytes <= size
        seen[block] += 1
    assert (seen == 1).all()
