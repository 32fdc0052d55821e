"""The index of a checkpoint of torch.distributed.checkpoint, a pickle, read without running what it may say.

A pickle can name any function of any module, and call it. Here a name that is none of the index's own types is refused
(https://docs.python.org/3/library/pickle.html#restricting-globals). The types are torch's: this imports torch when an
index is read, and not before.
"""

import io
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config.bounded import file_within, read_bytes
from jaxdist.config.errors import ConfigError
from jaxdist.formats.pickles import Careful

INDEX = ".metadata"
MOST_BYTES = 200_000_000  # of it: a million shards have as many
EXPERIMENT = "experiment.json"  # beside it, of the run
_STATE, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # whose properties of tensors older torch wrote
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip
# Those that the opcode BUILD gives their attributes: a dict of them, or what their own __setstate__ takes.
BUILT = {
    *((_STATE, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *((_STATE, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *((_FILES, name) for name in ("_StorageInfo", "_StoragePrefix")),
    (_OLD, "TensorProperties"),
}
ALLOWED = {
    *BUILT,
    (_STATE, "_MEM_FORMAT_ENCODING"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    *(("torch", name) for name in ("Size", *_DTYPES)),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    ("collections", "OrderedDict"),
}


class Index(Careful):
    """Unpickles an index."""

    def inside(self, value: Any) -> Iterable[Any]:
        """The index's own types are hashed by their attributes, and a dict made of a list by what that holds."""
        kind = type(value)
        if (kind.__module__, kind.__qualname__) in BUILT:
            return list(vars(value).values())
        return value if isinstance(value, tuple | list) else ()

    def load_build(self) -> None:
        """Set attributes of the index's own types alone: those of a class, or in slots, would be set for good."""
        instance, state = self.stack[-2:]
        kind = type(instance)
        built = (kind.__module__, kind.__qualname__) in BUILT
        if not built or not (type(state) is dict or hasattr(kind, "__setstate__")):
            raise pickle.UnpicklingError(f"it changes {instance!r:.100}, which is nothing of an index")
        super().load_build()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which belongs to no index of a checkpoint")
        return super().find_class(module, name)


def read_index(folder: Path) -> Any:
    """The `Metadata` of the checkpoint in `folder`. Raises ConfigError for a damaged or hostile one."""
    try:
        content = read_bytes(folder / INDEX, MOST_BYTES)
        index = Index(io.BytesIO(content), len(content)).load()  # a file would read any length
        for place in index.storage_data.values():
            file_within(folder, place.relative_path)
            _check_counts(place.offset, place.length)
        for name, entry in index.state_dict_metadata.items():
            _check_entry(name, entry)
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error) or repr(error)  # some say no more than their class
        raise ConfigError(
            f"checkpoint {folder}: its {INDEX} is refused: {reason}; use another, or a copy of it"
        ) from None
    return index


def _check_entry(name: str, entry: Any) -> None:
    """A damaged pickle may leave out any attribute, or put anything in its place. Raises whatever that leads to."""
    if not isinstance(name, str):
        raise TypeError(f"an entry is called {name!r}")
    if type(entry).__name__ == "TensorStorageMetadata":
        _check_counts(*entry.size, *(n for chunk in entry.chunks for n in (*chunk.sizes, *chunk.offsets)))
        if (dtype := str(entry.properties.dtype).removeprefix("torch.")) not in _DTYPES:
            raise TypeError(f"{name} is of dtype {dtype}")


def _check_counts(*numbers: int) -> None:
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a size or an offset is not a whole number from 0")


def nesting(ways: Any) -> dict[str, list[str | int]]:
    """Path in the saved tree of each entry that an index names by its path."""
    found = ways.items() if isinstance(ways, dict) else ()
    return {name: [*way] for name, way in found if isinstance(way, tuple | list) and _leads(way, name)}


def _leads(way: Sequence[Any], name: Any) -> bool:
    """Whether its steps are the name. A hostile one could be long to go, or to write out, or nothing to be written."""
    if not isinstance(name, str) or not name.isprintable() or not 1 < len(way) <= len(name):
        return False
    steps = [str(step) for step in way if type(step) is str or (type(step) is int and 0 <= step < 2**31)]
    return sum(map(len, steps)) + len(way) == len(name) + 1 and ".".join(steps) == name
