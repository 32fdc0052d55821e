"""Arrays of Zarr 2, uncompressed: a folder each, in which a chunk is a file of its numbers and nothing else.

TensorStore describes an array, in `.zarray`, and reads it. The numbers are written here: they go past the page cache,
by several threads, and their checksums are taken while they are in memory.
https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

import math
from pathlib import Path

import numpy as np
import tensorstore as ts
import xxhash

from jaxdist.convert.mappings.atoms import Shape
from jaxdist.formats import buffers
from jaxdist.formats.orbax import CHUNK


def rows_of(shape: Shape, dtype: np.dtype) -> Shape:
    """Equal numbers of full rows, of CHUNK bytes at most unless one row has more."""
    if not shape:
        return shape
    rows, row = shape[0], math.prod(shape[1:]) * dtype.itemsize
    chunks = max(1, -(-rows // max(1, CHUNK // max(1, row))))
    return (max(1, -(-rows // chunks)), *(max(1, size) for size in shape[1:]))


class ZarrFiles:
    """The files of one array, of which `outer` axes are of parts that come one at a time."""

    def __init__(self, folder: Path, shape: Shape, outer: int, dtype: np.dtype) -> None:
        """Describes it in a new `folder`. Raises ValueError as TensorStore does."""
        self.folder, self.rows = folder, rows_of(shape[outer:], dtype)
        self.sums: dict[str, str] = {}  # checksums by file
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": {"chunks": [*(1,) * outer, *self.rows], "compressor": None},
        }
        ts.open(spec, shape=shape, dtype=dtype, create=True, delete_existing=True).result()

    def put(self, place: tuple[int, ...], part: np.ndarray) -> None:
        """Write the part that lies at `place`, one index for each of the outer axes. Raises OSError."""
        if self.rows:
            size, *others = self.rows
            for number, start in enumerate(range(0, len(part), size)):
                rows = part[start : start + size]
                if len(rows) < size:  # a chunk at the edge is as large as the others
                    rows = np.concatenate([rows, np.zeros((size - len(rows), *others), part.dtype)])
                self._put((*place, number, *(0 for _ in others)), rows)
        else:
            self._put(place or (0,), part)

    def _put(self, chunk: tuple[int, ...], numbers: np.ndarray) -> None:
        name = ".".join(map(str, chunk))
        (self.folder / name).touch()
        buffers.write(self.folder / name, 0, numbers)
        self.sums[name] = xxhash.xxh3_128_hexdigest(buffers.raw(numbers))
