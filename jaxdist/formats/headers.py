"""Headers of safetensors files: of one file, or of a folder with model.safetensors or shards."""

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from jaxdist.config import ConfigError
from jaxdist.config.bounded import file_within
from jaxdist.formats.folders import part_of
from jaxdist.formats.foreign import INDEX, SINGLE, check_header, check_index, indexed
from jaxdist.formats.tables import Shape

# The format's names of dtypes and numpy's; what holds no weights is here to be listed.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip


class Header(NamedTuple):
    """A tensor's entry in a header; `dtype` by numpy's name."""

    shape: Shape
    dtype: str


class Place(NamedTuple):
    """Offset of a tensor's bytes."""

    file: Path
    start: int


class Headers:
    """The tensors of a folder or a file by name: their headers and places."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when a file is missing or damaged, or a dtype unknown."""
        self.folder = folder
        self.headers: dict[str, Header] = {}
        self.places: dict[str, Place] = {}
        self.metadata: dict[str, str] = {}  # of all files together
        self.differing: set[str] = set()  # keys that have one value in one file, and another in another
        self.files: set[str] = set()  # that were read, or their folders
        try:
            index = self._index()
            if index is None and not self.single.exists():
                raise self._unnamed()
            for path in [self.single] if index is None else sorted(set(index.values())):
                self._add(path)
                self.files.update(path.parts[len(folder.parts) :][:1])
            self.files |= {INDEX} if index else set()
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{folder}: {error}; give a folder with intact safetensors files") from None
        self.metadata = {key: value for key, value in self.metadata.items() if key not in self.differing}
        check_index(folder, index, {name: place.file for name, place in self.places.items()})

    def _unnamed(self) -> ConfigError:
        """The error of a folder whose files have other names than those that weights are looked for under."""
        there = sorted(file.name for file in self.folder.glob("*.safetensors"))
        named = f"it has {', '.join(there[:3])}{', ...' if there[3:] else ''}, and " if there else "it has "
        fix = (
            f"rename {there[0]} to {SINGLE} if it is the complete model"
            if len(there) == 1
            else "give a complete folder"
        )
        if any(part.title.startswith("one of several") for name in there if (part := part_of(self.folder / name))):
            fix = f"put {INDEX} there, which lists the files of its tensors"
        return ConfigError(f"{self.folder}: {named}neither {SINGLE} nor {INDEX}; {fix}")

    @property
    def single(self) -> Path:
        """The file with all tensors, where there is no index."""
        return self.folder if self.folder.is_file() else file_within(self.folder, SINGLE)

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
                if name in self.headers:
                    raise ConfigError(
                        f"{path}: tensor {name} is in another file of the folder too; give each tensor once"
                    )
                if (dtype := view.get_dtype()) not in DTYPES:
                    raise ConfigError(f"{path}: tensor {name} is {dtype}; give one of {', '.join(DTYPES)}")
                self.headers[name] = Header(tuple(view.get_shape()), DTYPES[dtype])
                self.places[name] = Place(path, starts[name])
