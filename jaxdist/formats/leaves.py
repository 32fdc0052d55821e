"""Tensors of a source of weights that are read one at a time, and what each side brings to read them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import Model
from jaxdist.formats.tables import Shape

BLOCK = 1 << 20  # bytes that are compared at a time


@dataclass(frozen=True)
class Leaf:
    """A tensor that is read when it is asked for."""

    shape: Shape
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    place: Any = None  # where it lies, if that is known
    besides: int = 0  # bytes that are in memory beside it while it is read
    pieces: "Mapping[str, Leaf]" = field(default_factory=dict)  # of the file's arrays, that it is made of, by name

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def contiguous(self) -> np.ndarray:
        """The array, read into contiguous memory."""
        return np.asarray(self.read(), order="C")

    def equals(self, other: "Leaf") -> bool:
        """Whether both are bitwise equal. Leaves of one place in a file are not read, others not copied in full."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if self is other or (self.place is not None and self.place == other.place):
            return True
        a, b = (np.atleast_1d(leaf.read()) for leaf in (self, other))
        rows = max(1, BLOCK * len(a) // max(1, self.bytes))
        blocks = (slice(start, start + rows) for start in range(0, len(a), rows))
        return all(a[block].tobytes() == b[block].tobytes() for block in blocks)


Leaves = Mapping[str, Leaf]
ToLeaf = Callable[[Path, str, Any], Leaf]


class Reader(NamedTuple):
    """Functions of a side that read what numpy cannot. `load` returns a tree with the side's own tensors, which `leaf`
    takes.

    `load`: the tree that a file of `torch.save` holds. `leaf`: a tensor of such a tree, given its file and name.
    `distributed`: the weights in a folder of torch.distributed.checkpoint. `shapes`: those of a model's parameters, as
    jaxdist has them. All raise ConfigError.
    """

    load: Callable[[Path], Any]
    leaf: ToLeaf
    distributed: Callable[[Path], Leaves]
    shapes: Callable[[Model], Mapping[str, Shape]]
