"""The boxes that an array is cut into, of which each rank wrote some."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from jaxdist.formats.tables import Shape

MOST_AXES = 6  # along which a tensor is split
MOST_CORNERS = 2**21  # of all chunks of a tensor: a million of them along one axis


def tiled(shape: Shape, chunks: Sequence[Any]) -> bool:
    """Whether each number of a tensor is in one of the chunks, which have `offsets` and `sizes`, and in one alone.

    The corners of a box, with signs that alternate along each axis, are the differences of its indicator function:
    summed over chunks that tile the tensor, all cancel except the tensor's own. It takes a second for 100,000 chunks in
    any arrangement; comparing sorted neighbours is as short for grids alone, and quadratic for others.

    Raises ValueError for more axes or corners than any program writes.
    """
    if any(not len(shape) == len(c.offsets) == len(c.sizes) for c in chunks):
        return False
    ends = [[start + n for start, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    if any(end > size for stops in ends for end, size in zip(stops, shape, strict=True)):
        return False
    split = [axis for axis, size in enumerate(shape) if not size or any(c.sizes[axis] != size for c in chunks)]
    if len(split) > MOST_AXES or len(chunks) << len(split) > MOST_CORNERS:
        raise ValueError(f"it has {len(chunks):,} parts that are split along {len(split)} axes, too many to compare")
    left: Counter[tuple[int, ...]] = Counter()
    boxes = [(c.offsets, stops, 1) for c, stops in zip(chunks, ends, strict=True)]
    for starts, stops, count in (([0] * len(shape), shape, -1), *boxes):
        for corner in product(*(((starts[axis], 1), (stops[axis], -1)) for axis in split)):
            left[tuple(place for place, _ in corner)] += math.prod((sign for _, sign in corner), start=count)
    return not any(left.values())
