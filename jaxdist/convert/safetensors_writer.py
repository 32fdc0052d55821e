"""Safetensors files whose tensors come one at a time and in any order; the library's own writer wants all at once.

The format (https://github.com/huggingface/safetensors): the header's length as 8 bytes, the header as JSON padded with
spaces to a multiple of 8, then the tensors' bytes without gaps.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxdist.config.foreign import INDEX, SINGLE
from jaxdist.convert.content import Leaf
from jaxdist.convert.safetensors_files import DTYPES, Tensor

FRAMEWORK = {"format": "pt"}  # transformers refuses files whose metadata does not name one
SHARD_BYTES = 5_000_000_000
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
Described = Mapping[str, Tensor | Leaf]


def write(
    folder: Path,
    described: Described,
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: Mapping[str, str] = FRAMEWORK,
) -> None:
    """Write the described tensors into `folder`: one file, or shards of at most SHARD_BYTES and their index.

    `tensors` are all of them, contiguous. A tensor larger than a shard has one of its own.
    """
    shards = _shards(described)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    with ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file, names in zip(files, shards, strict=True):
            opened = stack.enter_context((folder / file).open("wb"))
            places |= _begin(opened, {name: described[name] for name in names}, metadata)
        _fill(places, tensors)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(t.bytes for t in described.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(
    file: Path, described: Described, tensors: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str] = FRAMEWORK
) -> None:
    """The same as one file, whatever its size."""
    with file.open("wb") as opened:
        _fill(_begin(opened, described, metadata), tensors)


def _shards(described: Described) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in described.items():
        if shards[-1] and held + tensor.bytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.bytes
    return shards


def _begin(file: BinaryIO, described: Described, metadata: Mapping[str, str]) -> dict[str, tuple[BinaryIO, int]]:
    """Write the header; returns name -> file and where in it the tensor's bytes begin."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    end = 0
    # The widest dtypes first, so that each tensor begins at a multiple of its own width.
    for name, tensor in sorted(described.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name], end = end, end + tensor.bytes
        offsets = [starts[name], end]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: (file, 8 + len(text) + start) for name, start in starts.items()}


def _fill(places: Mapping[str, tuple[BinaryIO, int]], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    for name, array in tensors:
        file, start = places[name]
        file.seek(start)
        file.write(array.reshape(-1).view(np.uint8).data)
        del array
