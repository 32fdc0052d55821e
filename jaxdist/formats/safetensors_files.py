"""The tensors of a Hugging Face folder: model.safetensors, or shards and their index; as numpy arrays."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import numpy as np

from jaxdist.config import ConfigError
from jaxdist.formats import buffers
from jaxdist.formats.headers import DTYPES as NAMES
from jaxdist.formats.headers import Headers
from jaxdist.formats.leaves import Leaf

DTYPES = {theirs: np.dtype(name) for theirs, name in NAMES.items()}


class Tensor(NamedTuple):
    """A tensor's entry in a file's header."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors(Headers):
    """The tensors of a folder or a file by name: `described` all at once, `read` one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when a file is missing or damaged, or a dtype unknown."""
        super().__init__(folder)
        self.described = {name: Tensor(shape, np.dtype(dtype)) for name, (shape, dtype) in self.headers.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole. Raises ConfigError for one that the memory cannot hold.

        Not by the library: it maps files into memory, where what was read stays, and lets no other thread run.
        """
        tensor, (path, start) = self.described[name], self.places[name]
        try:
            return buffers.read(path, start, tensor.shape, tensor.dtype)
        except (OSError, MemoryError, ValueError) as error:
            raise ConfigError(
                f"{self.folder}: tensor {name}, {tensor.dtype}{list(tensor.shape)}: {error}; "
                "give a tensor that fits into memory, in an intact file"
            ) from None


def read(path: Path) -> tuple[dict[str, Leaf], set[str]]:
    """The tensors of a folder and the names of the files that hold them. Raises ConfigError."""
    tensors = Tensors(path)
    return leaves(tensors), tensors.files


def leaves(tensors: Tensors) -> dict[str, Leaf]:
    """All of them, to be read."""
    return {name: Leaf(t.shape, t.dtype, partial(tensors.read, name)) for name, t in tensors.described.items()}
