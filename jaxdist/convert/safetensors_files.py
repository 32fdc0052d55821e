"""The tensors of a Hugging Face folder: model.safetensors, or shards and their index; as numpy arrays."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdist.config import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FRAMEWORK = {"format": "pt"}  # transformers refuses files whose metadata does not name one
SHARD_BYTES = 5_000_000_000
# The format's names of dtypes; what holds no weights is here to be listed.
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip


class Tensor(NamedTuple):
    """What a file says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors:
    """The tensors of a folder or a file by name: `described` all at once, `read` one at a time. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when a file is missing or damaged, or a dtype unknown."""
        self.folder, self._stack = folder, ExitStack()
        self._files: dict[str, Any] = {}
        self.described: dict[str, Tensor] = {}
        try:
            for path in self._paths():
                self._add(path)
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ConfigError(f"{folder}: {error}; give a folder with whole safetensors files") from None
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole."""
        return self._files[name].get_tensor(name)

    def _paths(self) -> list[Path]:
        if self.folder.is_file():
            return [self.folder]
        index = self.folder / INDEX
        if not index.exists():
            return [self.folder / SINGLE]
        try:
            return [
                self.folder / file for file in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: {error!r}; give an index with a weight_map of names to files") from None

    def _add(self, path: Path) -> None:
        file = self._stack.enter_context(safe_open(path, framework="numpy"))
        for name in file.keys():  # noqa: SIM118 - no mapping
            view = file.get_slice(name)
            if name in self._files:
                raise ConfigError(f"{path}: tensor {name} is in another file of the folder too; give each tensor once")
            if (dtype := view.get_dtype()) not in DTYPES:
                raise ConfigError(f"{path}: tensor {name} is {dtype}; give one of {', '.join(DTYPES)}")
            self._files[name] = file
            self.described[name] = Tensor(tuple(view.get_shape()), np.dtype(DTYPES[dtype]))


def write(folder: Path, described: Mapping[str, Tensor], read: Callable[[str], np.ndarray]) -> None:
    """Write the described tensors into `folder` as one file, or as shards of at most SHARD_BYTES and their index.

    A shard at a time is in memory. A tensor larger than a shard has one of its own.
    """
    shards: list[list[str]] = [[]]
    for name, tensor in described.items():
        if shards[-1] and sum(described[n].bytes for n in shards[-1]) + tensor.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        save_file({name: read(name) for name in shard}, folder / file, metadata=FRAMEWORK)
    if len(shards) > 1:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(t.bytes for t in described.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
