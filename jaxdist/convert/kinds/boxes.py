"""The boxes that an array is cut into: those that many ranks wrote, those that are read one after the other."""

import math
import secrets
from collections.abc import Iterator, Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from jaxdist.convert.kinds.torch_leaves import PIECE
from jaxdist.convert.mappings.atoms import Shape

PRIME = 2**61 - 1


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

    Each place (i, j, ...) stands for the monomial x^i y^j ... The sum of those of a box is a product of geometric sums,
    so at a random point, modulo a prime, chunks that tile the shape add up to its own sum; others do so with a chance
    of the largest i + j + ... to the prime.
    """
    point = [2 + secrets.randbelow(PRIME - 2) for _ in shape]

    def total(starts: Sequence[int], sizes: Sequence[int]) -> int:
        sums = (_geometric(x, start, n) for x, start, n in zip(point, starts, sizes, strict=True))
        return math.prod(sums) % PRIME

    within = all(start + n <= size for c in chunks for start, n, size in zip(c.offsets, c.sizes, shape, strict=True))
    return within and sum(total(c.offsets, c.sizes) for c in chunks) % PRIME == total([0] * len(shape), shape)


def _geometric(x: int, start: int, n: int) -> int:
    """x^start + ... + x^(start + n - 1) modulo PRIME."""
    return (pow(x, start + n, PRIME) - pow(x, start, PRIME)) * pow(x - 1, -1, PRIME) % PRIME
