"""Tensors of torch's files as arrays: read when they are asked for, bit by bit as they are."""

import math
from pathlib import Path

import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import numpy as np
import torch
from torch import Tensor

from jaxdist.config import ConfigError
from jaxdist.convert import buffers
from jaxdist.convert.atoms import Shape
from jaxdist.convert.content import Leaf
from jaxdist.convert.torch_records import place

PIECE = 16_000_000  # bytes that are read at a time of a tensor between whose numbers others lie


def leaf(path: Path, name: str, tensor: Tensor) -> Leaf:
    """A tensor that was read from a file. Raises ConfigError for one beyond the end of its record, or larger than the
    file, and for numbers that numpy does not know."""
    try:
        dtype = dtype_of(tensor.dtype)
    except TypeError:
        raise ConfigError(f"{path}: tensor {name} is {tensor.dtype}, which is not read; leave it out") from None
    if tensor.numel() * dtype.itemsize > path.stat().st_size:
        raise ConfigError(f"{path}: tensor {name} {tuple(tensor.shape)} is larger than the file; use a whole copy")
    if not tensor.is_meta:
        return Leaf(tuple(tensor.shape), dtype, lambda: to_numpy(tensor))
    try:
        begin, size = place(tensor)
    except ValueError as error:
        raise ConfigError(f"{path}: tensor {name}: {error}; leave it out") from None
    offset = int(tensor.storage_offset()) * dtype.itemsize
    spans = [max(0, size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    count = 1 + sum(spans) if tensor.numel() else 0
    if min(offset, *spans, 0) < 0 or offset + count * dtype.itemsize > size:
        raise ConfigError(f"{path}: tensor {name} {tuple(tensor.shape)} is larger than its record; use a whole copy")
    start = begin + offset

    def read() -> np.ndarray:
        try:
            shown = strided(path, start, tuple(tensor.shape), tensor.stride(), dtype)
        except (OSError, MemoryError, ValueError) as error:
            raise ConfigError(f"{path}: tensor {name}: {error}; use a whole copy") from None
        shown = shown.conj() if tensor.is_conj() else shown
        return -shown if tensor.is_neg() else shown

    place_of = path, start, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return Leaf(tuple(tensor.shape), dtype, read, place_of)


def strided(path: Path, start: int, shape: Shape, strides: Shape, dtype: np.dtype) -> np.ndarray:
    """Numbers of a file that lie so many apart, from the byte `start` on. Where most of what is between the first and
    the last is not theirs, as of some columns of a matrix, it is read in pieces. Raises OSError and ValueError."""
    spans = [max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    count = 1 + sum(spans) if math.prod(shape) else 0
    if count * dtype.itemsize <= max(PIECE, 2 * math.prod(shape) * dtype.itemsize):
        raw = buffers.read(path, start, (count,), dtype)
        return np.lib.stride_tricks.as_strided(raw, shape, [stride * dtype.itemsize for stride in strides])
    found, axis = buffers.empty(shape, dtype), int(np.argmax(spans))
    step = strides[axis] * dtype.itemsize
    rows = max(1, min(PIECE // step, shape[axis] // 2))  # less than all: spans of several axes may add up
    for first in range(0, shape[axis], rows):
        piece = min(rows, shape[axis] - first)
        part = strided(path, start + first * step, (*shape[:axis], piece, *shape[axis + 1 :]), strides, dtype)
        found[(*[slice(None)] * axis, slice(first, first + piece))] = part
    return found


def dtype_of(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def empty(leaf: Leaf) -> Tensor:
    """A tensor for it, without its numbers."""
    return torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name))


def to_torch(array: np.ndarray) -> Tensor:
    """The same bits, of any dtype."""
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The same bits, of any dtype."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(dtype_of(tensor.dtype)).reshape(tensor.shape)
