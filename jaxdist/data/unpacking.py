"""Decompresses files of gzip, zstd, bzip2 and xz, recognized by their first bytes."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxdist.config import ConfigError

CHUNK = 1 << 14  # packed bytes of zstd unpacked together


@contextmanager
def unpacked(file: Path) -> Iterator[tuple[str, BinaryIO, Callable[[], int]]]:
    """The name of a file's compression ("" for none), its decompressed stream, and a function that returns how many
    bytes of the file have been read. Raises ConfigError where a package is missing."""
    with file.open("rb") as raw:
        head = raw.read(LONGEST)
        raw.seek(0)
        packed = next((name for begin, name in PACKED.items() if head.startswith(begin)), "")
        yield packed, UNPACK[packed](raw), raw.tell


class _Frames(io.RawIOBase):
    """The concatenated content of all zstd frames. The package's own reader does not report a truncated file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._ready = raw, memoryview(b"")
        self._new = needed("zstandard", "zstd").ZstdDecompressor().decompressobj
        self._frame = self._new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._raw.read(CHUNK)
            if not packed:
                if not self._frame.eof:
                    raise EOFError("a frame of zstd ends before its end")
                return 0
            if self._frame.eof:
                self._frame = self._new()
            self._ready = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


# After the magic and level of bzip2, which text may begin with too: the first block, or the end of an empty stream.
BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
PACKED = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz",
    **{b"BZh%d%b" % (level, block): "bzip2" for level in range(1, 10) for block in BLOCKS},
    # Skippable frames of zstd: files of pzstd begin with one.
    **{bytes([number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(0x50, 0x60)},
}  # fmt: skip
LONGEST = max(map(len, PACKED))
UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    "": lambda raw: raw, "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "zstd": lambda raw: io.BufferedReader(_Frames(raw)), "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile,
}  # fmt: skip


def needed(package: str, what: str) -> Any:
    """A package that only some data need. Raises ConfigError without it."""
    try:
        return __import__(package)
    except ModuleNotFoundError:
        raise ConfigError(
            f"data.path: to read {what} needs {package}, which is not installed; pip install 'jaxdist[data]'"
        ) from None
