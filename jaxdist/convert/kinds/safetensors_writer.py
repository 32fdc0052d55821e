"""Safetensors files to be filled with tensors in any order; the library's own writer wants all at once.

The format (https://github.com/huggingface/safetensors): the header's length as 8 bytes, the header as JSON padded with
spaces to a multiple of 8, then the tensors' bytes without gaps.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxdist.convert.content import Leaf
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.safetensors_files import DTYPES, Tensor

FRAMEWORK = {"format": "pt"}  # transformers refuses files whose metadata does not name one
EMPTY: Mapping[str, Any] = MappingProxyType({})
SHARD_BYTES = 5_000_000_000
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
Described = Mapping[str, Tensor | Leaf]
Places = Mapping[str, tuple[Path, int]]  # name -> file, and where in it the tensor's bytes begin


def lay_out(
    folder: Path,
    described: Described,
    metadata: Mapping[str, str] = FRAMEWORK,
    of_index: Mapping[str, Any] = EMPTY,
) -> Places:
    """Files with room for the described tensors in `folder`: one, or shards of at most SHARD_BYTES and their index.

    A tensor larger than a shard has one of its own. `of_index`: what the index says besides.
    """
    shards = _shards(described)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    else:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = {"total_size": sum(t.bytes for t in described.values())}
        index = {"metadata": {**of_index, **size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    places: dict[str, tuple[Path, int]] = {}
    for file, names in zip(files, shards, strict=True):
        places |= lay_out_file(folder / file, {name: described[name] for name in names}, metadata)
    return places


def lay_out_file(file: Path, described: Described, metadata: Mapping[str, str] = FRAMEWORK) -> Places:
    """The same, as one file whatever its size."""
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
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: (file, 8 + len(text) + start) for name, start in starts.items()}


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
