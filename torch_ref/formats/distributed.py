"""Folders of torch.distributed.checkpoint, read by torch; nothing in them is unpickled freely."""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from jaxdist.config import ConfigError
from jaxdist.formats.dcp import check_part, check_parts, part_prefixes
from jaxdist.formats.dcp_index import read_index
from jaxdist.formats.leaves import Leaf, Leaves
from torch_ref.formats.arrays import dtype_of, to_numpy
from torch_ref.runtime.compat import FakeTensorMode, read_part

DAMAGE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, AttributeError, UnpicklingError,
    CheckpointException,
)  # fmt: skip


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError for any error of torch on a damaged checkpoint."""
    try:
        yield
    except DAMAGE as error:  # a CheckpointException has those of the ranks, with their tracebacks
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(first, ConfigError):
            raise first from None
        reason = textwrap.shorten(repr(first), 200)
        raise ConfigError(f"checkpoint {path} is damaged: {reason}; use another, or a copy of it") from None


class Reader(dcp.FileSystemReader):
    """Reads complete tensors alone: neither the index nor an entry is unpickled freely. `index`: that of some tensors,
    if it has been read, and their parts checked, before."""

    def __init__(self, folder: Path, index: Metadata | None = None) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self.index:
            return self.index
        folder = Path(self.path)
        index: Metadata = read_index(folder)
        entries = index.state_dict_metadata.items()
        tensors: dict[str, Any] = {name: e for name, e in entries if isinstance(e, TensorStorageMetadata)}
        for name in tensors:
            places_of(folder, name, index)
        return replace(index, state_dict_metadata=tensors)


def places_of(folder: Path, name: str, index: Metadata) -> list[Any]:
    """Where the parts of a tensor lie in files. Raises ConfigError where they overlap or are not all of it."""
    entry: Any = index.state_dict_metadata[name]
    places = [index.storage_data.get(MetadataIndex(name, chunk.offsets)) for chunk in entry.chunks]
    check_parts(folder, name, entry, places)
    return places


def load(path: Path, state: dict[str, Any], index: Metadata | None = None, **options: Any) -> None:
    """Fill `state` from the checkpoint at `path`, by the `index` of a Reader. Raises ConfigError."""
    with reading(path):
        dcp.load(state, storage_reader=Reader(path, index), **options)


def weights(folder: Path) -> Leaves:
    """The weights of a checkpoint of any program, by its names for them. Raises ConfigError."""
    index: Metadata = read_index(folder)
    entries = index.state_dict_metadata
    files: dict[str, dict[MetadataIndex, Any]] = {}
    for place, part in index.storage_data.items():
        files.setdefault(place.fqn, {})[place] = part
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    prefixes, found = part_prefixes({name: tuple(tensors[name].size) if name in tensors else None for name in entries})
    return {
        name.removeprefix(prefixes["model"]): _leaf(
            folder, name, replace(index, state_dict_metadata={name: tensors[name]}, storage_data=files.get(name, {}))
        )
        for name in found
    }


def _leaf(folder: Path, name: str, index: Metadata) -> Leaf:
    """A tensor; `index`: its part of the folder's."""
    entry: Any = index.state_dict_metadata[name]
    return Leaf(tuple(entry.size), dtype_of(entry.properties.dtype), partial(_read, folder, name, index))


def _read(folder: Path, name: str, index: Metadata) -> np.ndarray:
    entry: Any = index.state_dict_metadata[name]
    for part in places_of(folder, name, index):  # before torch says it in other words than jaxdist
        check_part(folder, name, part)
        _check_dtype(folder, name, part, dtype_of(entry.properties.dtype))
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_full(folder, {name: tensor}, index)
    return to_numpy(tensor)


def _check_dtype(folder: Path, name: str, part: Any, dtype: np.dtype) -> None:
    """Raises ConfigError where a part of a tensor has another dtype than the index says, to which torch would cast it.
    Its numbers are not read."""
    file = folder / part.relative_path
    with reading(folder), file.open("rb") as stream, FakeTensorMode():
        held = torch.load(read_part(Reader(folder), stream, part), weights_only=True)
    if (there := dtype_of(held.dtype)) != dtype:
        shape = list(held.shape)
        raise ConfigError(
            f"{folder}: tensor {name}: {part.relative_path} has {there}{shape} of it, not {dtype}{shape}; use another "
            "checkpoint, or a copy"
        )


def read_full(folder: Path, tensors: dict[str, Any], index: Metadata | None = None) -> None:
    """Fill full tensors from a checkpoint, as `load`, by this process alone. Raises ConfigError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is what is asked for
        load(folder, tensors, index, no_dist=True)
