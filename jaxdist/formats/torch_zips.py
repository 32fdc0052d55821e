"""The records of a file of `torch.save`, which is a zip: their offsets, and the pickle among them.

torch computes the offsets of tensors on the meta device from its own layout, which another program's zip of the same
records need not have. So each offset is taken from the header of its record.
"""

import io
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdist.config import ConfigError

BEGIN, HEADER = b"PK\x03\x04", "<4s22x2H"  # of a record: lengths of its name, and of what else precedes its bytes
PICKLE, ORDER, STORAGES, ENCRYPTED = "data.pkl", "byteorder", "data/", 1
VERSIONS = ("version", ".data/version")  # records of the layout's version, one of which torch needs: 1 to 10
VERSION = rb"\s*\+?0*([1-9]|10)(?!\d)"
# Records of a text -> what torch reads.
TEXTS = {
    ORDER: rb"(little|big)\Z",
    **dict.fromkeys(VERSIONS, VERSION),
    ".storage_alignment": rb"\s*[+-]?\d+\s*\Z",
}
MOST_BYTES = 100_000_000  # of a pickle: of half a million tensors


class Place(NamedTuple):
    """A range of bytes in a file."""

    start: int
    size: int


class Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: io.FileIO, place: Place) -> None:
        self.file, self.place, self.at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.place.size}[whence])
        return self.at

    def readinto(self, memory: Any) -> int:
        self.file.seek(self.place.start + self.at)
        count = self.file.readinto(memoryview(memory)[: max(0, self.place.size - self.at)])
        self.at += count
        return count


def is_zip(path: Path) -> bool:
    """Whether it is a zip, as torch writes since 1.6: torch looks no further either. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(BEGIN)) == BEGIN


def begin_of(file: IO[bytes], record: zipfile.ZipInfo) -> int:
    """Offset of a record's bytes, by its own header. Raises ValueError."""
    file.seek(record.header_offset)
    head = file.read(struct.calcsize(HEADER))
    if len(head) < struct.calcsize(HEADER) or not head.startswith(BEGIN):
        raise ValueError(f"its record {record.filename} is not where its directory says")
    return record.header_offset + len(head) + sum(struct.unpack(HEADER, head)[1:])


def records(file: IO[bytes]) -> dict[str, Place]:
    """The records of a zip by their names within its folder. Raises ValueError, or BadZipFile, where they are
    compressed, and so may be huge, or share bytes."""
    with zipfile.ZipFile(file) as archive:
        listed, after, found = archive.infolist(), archive.start_dir, dict[str, Place]()
    folder = listed[0].filename.partition("/")[0] if listed else ""
    for record in sorted(listed, key=lambda record: record.header_offset, reverse=True):
        if record.compress_type or record.flag_bits & ENCRYPTED or record.compress_size != record.file_size:
            raise ValueError("its records are compressed, as torch writes none")
        begin, name = begin_of(file, record), record.filename.removeprefix(f"{folder}/")
        if begin + record.file_size > after or name in found:
            raise ValueError(f"its record {name} occurs twice, or shares bytes with another")
        after, found[name] = record.header_offset, Place(begin, record.file_size)
    return found


def storage_of(places: Mapping[str, Place], key: Any, dtype: str, itemsize: int, count: Any) -> Place:
    """Place of a storage that a pickle describes so. Raises ValueError where its record is missing, or holds fewer
    numbers: behind its end lie those of others."""
    there = places.get(f"{STORAGES}{key}") if type(key) is str else None
    if type(count) is not int or not there or not 0 <= count * itemsize <= there.size:
        has = f"{there.size:,} bytes" if there else "none"
        raise ValueError(f"its record {STORAGES}{key!s:.50} is to have {count!s:.50} {dtype}, and has {has}")
    return Place(there.start, count * itemsize)


def _content(file: IO[bytes], places: dict[str, Place], name: str) -> bytes:
    """Content of a record. Raises ValueError for a huge one, which may be sparse, and KeyError without one."""
    start, size = places[name]
    if size > MOST_BYTES:
        raise ValueError(f"its record {name} has {size:,} bytes, more than {MOST_BYTES:,}")
    file.seek(start)
    return file.read(size)


def open_zip(path: Path, part: Place | None = None) -> tuple[bytes, dict[str, Place]]:
    """The pickle of a file, or of a part of it, and the places of all records in the file.

    Raises OSError, ValueError or BadZipFile, and ConfigError for numbers of another byte order.
    """
    part = part or Place(0, path.stat().st_size)
    with path.open("rb", buffering=0) as raw:
        file = io.BufferedReader(Part(raw, part))
        found = records(file)
        contents = {name: _content(file, found, name) for name in (PICKLE, *TEXTS) if name in found}
    for name, pattern in TEXTS.items():
        if name in contents and not re.match(pattern, contents[name]):
            raise ValueError(f"its record {name} is {contents[name][:20]!r}, which torch does not read")
    if contents.keys().isdisjoint(VERSIONS):
        raise ValueError("its record version is missing")
    if contents.get(ORDER) == b"big":
        raise ConfigError(
            f"{path}: its {ORDER} is 'big', and 'little' alone is read; load it by torch, and save it again on a "
            "little-endian machine"
        )
    return contents.get(PICKLE, b""), {
        name: Place(part.start + place.start, place.size) for name, place in found.items()
    }
