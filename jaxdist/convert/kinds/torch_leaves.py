"""Tensors of torch's files as arrays: read when they are asked for, bit by bit as they are."""

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import numpy as np
import torch
from torch import Tensor

from jaxdist.config import ConfigError
from jaxdist.convert.content import Leaf
from jaxdist.convert.kinds.torch_records import place
from jaxdist.convert.mappings.atoms import Shape, copy
from jaxdist.formats import buffers
from jaxdist.formats.torch_files import dtype_of as checked_dtype
from jaxdist.formats.torch_files import without_numbers

PIECE = 16_000_000  # bytes that are read at a time of a tensor between whose numbers others lie


def leaf(path: Path, name: str, tensor: Tensor) -> Leaf:
    """A tensor that was read from a file. Raises ConfigError for one beyond the end of its record, or larger than the
    file, and for numbers that numpy does not know."""
    dtype = checked_dtype(path, name, tensor)
    if not tensor.is_meta:
        return Leaf(tuple(tensor.shape), dtype, lambda: to_numpy(tensor))
    try:
        begin, size = place(tensor)
    except ValueError as error:
        raise without_numbers(path, name, str(error)) from None
    offset = int(tensor.storage_offset()) * dtype.itemsize
    count, spans = extent(tuple(tensor.shape), tensor.stride())
    if min(offset, *spans, 0) < 0 or offset + count * dtype.itemsize > size:
        raise ConfigError(f"{path}: tensor {name} {tuple(tensor.shape)} is larger than its record; use an intact copy")
    start = begin + offset

    def read() -> np.ndarray:
        try:
            if tensor.is_contiguous():
                shown = buffers.read(path, start, tuple(tensor.shape), dtype)
            else:
                shown = np.empty(tuple(tensor.shape), dtype)
                gather(shown, path, start, tensor.stride())
        except (OSError, MemoryError, ValueError) as error:
            raise ConfigError(f"{path}: tensor {name}: {error}; use an intact copy") from None
        shown = np.conj(shown, out=shown) if tensor.is_conj() else shown
        return np.negative(shown, out=shown) if tensor.is_neg() else shown

    place_of = path, start, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    besides = 0 if tensor.is_contiguous() else min(PIECE, count * dtype.itemsize)
    return Leaf(tuple(tensor.shape), dtype, read, place_of, besides)


def extent(shape: Shape, strides: Shape) -> tuple[int, list[int]]:
    """Number of elements that a tensor spans in its storage, and the stride of each axis."""
    spans = [max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return 1 + sum(spans) if 0 not in shape else 0, spans


def gather(into: np.ndarray, path: Path, start: int, strides: Shape) -> None:
    """Fill an array with strided numbers of a file, from the byte `start` on, as for some columns of a matrix. The
    numbers between them are read too, a PIECE at a time. Raises OSError and ValueError."""
    count, spans = extent(into.shape, strides)
    if count * into.itemsize <= PIECE:
        raw = buffers.read(path, start, (count,), into.dtype)
        copy(into, np.lib.stride_tricks.as_strided(raw, into.shape, [stride * into.itemsize for stride in strides]))
        return
    axis = int(np.argmax(spans))
    size, step = into.shape[axis], strides[axis] * into.itemsize
    rows = max(1, min(PIECE // step, size // 2))  # less than all: spans of several axes may add up
    for first in range(0, size, rows):
        gather(into[(*[slice(None)] * axis, slice(first, first + rows))], path, start + first * step, strides)


def blocks(shape: Shape, size: int) -> Iterator[tuple[slice, ...]]:
    """Bounds of the blocks of an array of `size` bytes, each of at most about PIECE."""
    if size <= PIECE or not shape:
        yield ()
    elif rows := PIECE * shape[0] // size:
        yield from ((slice(start, start + rows),) for start in range(0, shape[0], rows))
    else:
        for i in range(shape[0]):
            yield from ((slice(i, i + 1), *rest) for rest in blocks(shape[1:], size // shape[0]))


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
