"""The boxes that an array is cut into: those that many ranks wrote, those that are read one after the other."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from jaxdist.convert.kinds.torch_leaves import PIECE
from jaxdist.convert.mappings.atoms import Shape

MOST_AXES = 6  # along which a tensor is split
MOST_CORNERS = 2**21  # of all chunks of a tensor: a million of them along one axis


def blocks(shape: Shape, size: int) -> Iterator[tuple[slice, ...]]:
    """Bounds of the blocks of an array of `size` bytes, each of at most about PIECE."""
    if size <= PIECE or not shape:
        yield ()
    elif rows := PIECE * shape[0] // size:
        yield from ((slice(start, start + rows),) for start in range(0, shape[0], rows))
    else:
        for i in range(shape[0]):
            yield from ((slice(i, i + 1), *rest) for rest in blocks(shape[1:], size // shape[0]))


def tiled(shape: Shape, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether each number of a tensor is in one of the chunks, and in one alone.

    The corners of a box, with signs that alternate along each axis, are the differences of its indicator function:
    summed over chunks that tile the tensor, all cancel except the tensor's own. It takes a second for 100,000 chunks in
    any arrangement; comparing sorted neighbours is as short for grids alone, and quadratic for others.

    Raises ValueError for more axes or corners than any program writes.
    """
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
