"""Boxes of an array: whether they are all of it, and each number in one of them."""

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
boxes = importlib.import_module("jaxdist.convert.kinds.boxes")


def test_parts_are_a_tensor_where_each_number_is_in_one_of_them() -> None:
    """Two halves of a tensor, one of them left out, or given another place or size: told apart as by counting."""
    random, found = np.random.default_rng(0), []
    for _ in range(500):
        shape = random.integers(1, 4, random.integers(1, 4))
        cut = random.integers(0, shape[0] + 1)
        starts = np.zeros((2, len(shape)), int)
        sizes = np.array([shape, shape])
        starts[1, 0], sizes[0, 0], sizes[1, 0] = cut, cut, shape[0] - cut
        kept = random.permutation(2)[: random.integers(1, 3)]
        changed = random.choice([starts, sizes])
        changed += (random.random(changed.shape) < 0.1) * random.integers(0, 2, changed.shape)
        count = np.zeros([8] * len(shape), int)
        for part in kept:
            count[tuple(map(slice, starts[part], starts[part] + sizes[part]))] += 1
        inside = (starts[kept] + sizes[kept] <= shape).all()
        found.append(bool(inside and (count[tuple(map(slice, shape))] == 1).all()))
        chunks = [boxes.ChunkStorageMetadata(*(torch.Size(a[part].tolist()) for a in (starts, sizes))) for part in kept]
        assert boxes.tiled(tuple(shape.tolist()), chunks) == found[-1], chunks
    assert 100 < sum(found) < 400


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 6), (3, 2, 9), (2, 1, 3, 5)])
@pytest.mark.parametrize("size", [1, 4, 30, 1000])
def test_blocks_are_all_of_an_array(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], size: int) -> None:
    monkeypatch.setattr(boxes, "PIECE", size)
    seen = np.zeros(shape, np.uint8)
    for block in boxes.blocks(shape, seen.nbytes):
        assert seen[block].nbytes <= size
        seen[block] += 1
    assert (seen == 1).all()
