"""Boxes that tile an array cover each number exactly once."""

from typing import NamedTuple

import numpy as np
import pytest

from jaxdist.formats import boxes


class Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def test_parts_form_a_tensor_if_each_number_is_in_exactly_one() -> None:
    """Halves of a tensor, one of them missing, moved or resized: judged as by counting numbers."""
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
        chunks = [Chunk(*(tuple(a[part].tolist()) for a in (starts, sizes))) for part in kept]
        assert boxes.tiled(tuple(shape.tolist()), chunks) == found[-1], chunks
    assert 100 < sum(found) < 400


def chunk(*bounds: tuple[int, int]) -> Chunk:
    """A chunk of (start, end) along each axis."""
    starts, ends = zip(*bounds, strict=True)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return Chunk(tuple(starts), tuple(sizes))


def test_an_overlap_and_a_gap_of_one_volume_are_found() -> None:
    size = 2**40  # too large for memory or counting number by number
    halves = [chunk((0, size // 2), (0, size)), chunk((size // 2, size), (0, size))]
    assert boxes.tiled((size, size), halves)
    moved = chunk((size // 2 - 1, size - 1), (0, size))
    assert not boxes.tiled((size, size), [halves[0], moved])
    grid = [chunk((i, i + 1), (j, j + 1), (0, 5)) for i in range(3) for j in range(4)]
    assert boxes.tiled((3, 4, 5), grid)
    for missing in range(len(grid)):
        assert not boxes.tiled((3, 4, 5), [grid[i] if i != missing else grid[i - 1] for i in range(len(grid))])


def test_hostile_parts_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of corners doubles with each axis that is split, and with nothing else."""
    assert boxes.tiled((1,) * 40, [chunk(*((0, 1),) * 40)])
    with pytest.raises(ValueError, match="it has 2 parts that are split along 40 axes, too many to compare"):
        boxes.tiled((2,) * 40, [chunk(*((i, i + 1),) * 40) for i in range(2)])
    monkeypatch.setattr(boxes, "MOST_CORNERS", 7)
    assert boxes.tiled((3,), [chunk((i, i + 1)) for i in range(3)])
    with pytest.raises(ValueError, match="it has 4 parts that are split along 1 axes, too many to compare"):
        boxes.tiled((4,), [chunk((i, i + 1)) for i in range(4)])
