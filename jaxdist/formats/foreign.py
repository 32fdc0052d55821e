"""Files that others wrote, and in which nothing is believed: JSON, the index of a Hugging Face folder, a header.

Both sides read them by these functions, so that what one refuses no other takes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxdist.config.bounded import (
    FETCH,
    LFS,
    MOST_BYTES,
    POINTER,
    check_fetched,
    file_within,
    parse,
    read_json,
    size_of,
)
from jaxdist.config.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Foreign(NamedTuple):
    """A file of another kind than its name says: what it is, and what to do about it."""

    title: str
    fix: str


GGUF = "GGUF of llama.cpp, whose weights are mostly quantized"
AGAIN, SAFELY = "download it again", "give the weights as safetensors, in a Hugging Face folder"
MODELS = {b"GGUF": GGUF, b"\x89HDF": "a file of HDF5, as Keras writes it"}  # first bytes of a format -> its name
BEGINNINGS = {  # first bytes of files of other formats that are found where weights are expected
    LFS: Foreign(POINTER, FETCH),
    b"<!DOCTYPE": Foreign("a page of HTML, as a download that failed leaves it", AGAIN),
    b"<html": Foreign("a page of HTML, as a download that failed leaves it", AGAIN),
    **{start: Foreign(title, SAFELY) for start, title in MODELS.items()},
}


def foreign_content(path: Path) -> Foreign | None:
    """Foreign format of a file by its first bytes, including safetensors for readers of torch files. None if it is not
    recognized. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(64)
    if start[8:9] == b"{" and 0 < int.from_bytes(start[:8], "little") < path.stat().st_size:
        return Foreign("a safetensors file", f"rename it to {SINGLE}, next to config.json, and give the folder")
    return next((found for beginning, found in BEGINNINGS.items() if start.startswith(beginning)), None)


def check_files(folder: Path) -> None:
    """Check a folder before a library opens its files. Raises OSError, and ValueError if an entry of `folder` is
    neither file nor folder, or a link that leads outside."""
    for entry in folder.rglob("*"):
        name = entry.relative_to(folder).as_posix()
        if not file_within(folder, name).is_dir():
            try:
                size_of(entry)
            except ValueError as error:
                raise ValueError(f"{name[:100]!r}: {error}") from None


def indexed(folder: Path, name: str = INDEX) -> dict[str, Path] | None:
    """Tensor -> file in `folder`, as its index of that `name` has it; None without an index.

    Raises ConfigError, also where a file is not there."""
    index = folder / name
    if not index.exists():
        return None
    try:
        places = read_json(index)["weight_map"]
        files = {file: file_within(folder, file) for file in set(places.values())}
        if missing := sorted(name for name, file in files.items() if not file.exists()):
            those = f"{missing[0]} and {len(missing) - 1} more, which are" if missing[1:] else f"{missing[0]}, which is"
            raise ConfigError(f"{folder}: {name} names {those} missing; copy that there, or download it again")
        return {name: files[file] for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index}: {error!r}; give an index with a weight_map of names to files in its folder"
        ) from None


def check_index(folder: Path, places: Mapping[str, Path] | None, found: Mapping[str, Path], index: str = INDEX) -> None:
    """Raises ConfigError where the index of `folder` has a tensor in another file than it was `found` in, or in none.

    None is the index of a folder without one.
    """
    for name, file in (places or {}).items():
        if found.get(name) != file:
            there = f"it is in {found[name].name}" if name in found else "no file of the folder has it"
            raise ConfigError(
                f"{folder / index}: its weight_map has tensor {name[:200]} in {file.name}, and {there}; "
                "give the index that belongs to these files"
            )


def check_header(path: Path) -> dict[str, int]:
    """Tensor -> where its bytes begin in a safetensors file, once the library has opened it too.

    Raises ConfigError where the file gives a tensor twice, or a header that is longer than itself.

    The library refuses all else: overlaps and gaps, offsets and shapes beyond the file, and what is not of the format.
    """
    try:
        size = size_of(path)
        with path.open("rb") as file:
            check_fetched(file.read(len(LFS)))
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MOST_BYTES):
                if found := foreign_content(path):
                    raise ConfigError(f"{path} is {found.title}; {found.fix}")
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = parse(file.read(length))
        return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path}: {error}; give an intact safetensors file") from None
