"""The tensors of a Hugging Face folder: model.safetensors, or shards and their index; as numpy arrays."""

import math
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxdist.config import ConfigError
from jaxdist.config.foreign import INDEX, SINGLE, check_header, check_index, indexed, within
from jaxdist.convert import buffers

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
    """The tensors of a folder or a file by name: `described` all at once, `read` one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when a file is missing or damaged, or a dtype unknown."""
        self.folder = folder
        self.described: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}  # of all files together
        self.differing: set[str] = set()  # keys that have one value in one file, and another in another
        self.files: set[str] = set()  # that were read, or their folders
        self._places: dict[str, tuple[Path, int]] = {}
        try:
            index = self._index()
            for path in [self.single] if index is None else sorted(set(index.values())):
                self._add(path)
                self.files.update(path.parts[len(folder.parts) :][:1])
            self.files |= {INDEX} if index else set()
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{folder}: {error}; give a folder with whole safetensors files") from None
        self.metadata = {key: value for key, value in self.metadata.items() if key not in self.differing}
        check_index(folder, index, {name: path for name, (path, _) in self._places.items()})

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole. Raises ConfigError for one that the memory cannot hold.

        Not by the library: it maps files into memory, where what was read stays, and lets no other thread run.
        """
        tensor, (path, start) = self.described[name], self._places[name]
        try:
            return buffers.read(path, start, tensor.shape, tensor.dtype)
        except (OSError, MemoryError, ValueError) as error:
            raise ConfigError(
                f"{self.folder}: tensor {name}, {tensor.dtype}{list(tensor.shape)}: {error}; "
                "give a tensor that fits into memory, in a whole file"
            ) from None

    @property
    def single(self) -> Path:
        """The file with all tensors, where there is no index."""
        return self.folder if self.folder.is_file() else within(self.folder, SINGLE)

    def _index(self) -> dict[str, Path] | None:
        """Tensor -> file, where the folder goes by its index: transformers takes the single file before it, too."""
        return None if self.folder.is_file() or (self.folder / SINGLE).exists() else indexed(self.folder)

    def _add(self, path: Path) -> None:
        starts = check_header(path)
        with safe_open(path, framework="numpy") as file:
            for key, value in (file.metadata() or {}).items():
                if self.metadata.setdefault(key, value) != value:
                    self.differing.add(key)
            for name in file.keys():  # noqa: SIM118 - no mapping
                view = file.get_slice(name)
                if name in self.described:
                    raise ConfigError(
                        f"{path}: tensor {name} is in another file of the folder too; give each tensor once"
                    )
                if (dtype := view.get_dtype()) not in DTYPES:
                    raise ConfigError(f"{path}: tensor {name} is {dtype}; give one of {', '.join(DTYPES)}")
                self.described[name] = Tensor(tuple(view.get_shape()), np.dtype(DTYPES[dtype]))
                self._places[name] = path, starts[name]
