"""From data.path to one stream of token ids, memory-mapped wherever the file already holds them."""

import codecs
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from jaxdist.config import ConfigError, Data
from jaxdist.config.display import console
from jaxdist.data.encoding import Piece, check_ids, encode, json_lines, make_encoder, text_file

CHUNK = 1 << 22  # ids looked at together when a file is checked
OPEN_FILES = 64  # mapped at a time: each holds a file descriptor, and a corpus may be thousands of files
SHOW_BAR_FROM = 20_000_000  # bytes
# Tests are half of the library and dull to learn from.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Mapped(NamedTuple):
    """Token ids that lie in a file, mapped when they are read."""

    file: Path
    dtype: np.dtype
    offset: int
    size: int
    written: int  # when, in ns: a file that was replaced is mapped anew


@lru_cache(maxsize=OPEN_FILES)
def _map(part: Mapped) -> NDArray:
    return np.memmap(part.file, part.dtype, "r", part.offset, (part.size,))


class Stream:
    """Token ids of many files or arrays, end to end; documents lie between `bounds` [documents + 1]."""

    def __init__(self, parts: Sequence[Mapped | NDArray], bounds: NDArray[np.int64] | None, fingerprint: str) -> None:
        """Without `bounds` each part is a document."""
        self._parts = [part for part in parts if part.size]
        self._starts = np.cumsum([0, *(part.size for part in self._parts)], dtype=np.int64)
        self.bounds = self._starts if bounds is None else bounds
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Ids [stop - start]."""
        found = np.empty(stop - start, np.int32)
        number, done = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while done < len(found):
            part = self._parts[number]
            skip = max(0, start - int(self._starts[number]))
            piece = (_map(part) if isinstance(part, Mapped) else part)[skip : skip + len(found) - done]
            found[done : done + len(piece)] = piece
            number, done = number + 1, done + len(piece)
        return found


def open_stream(data: Data, vocab: int) -> Stream:
    """The ids of data.path, every one of them checked to be in range(vocab). Raises ConfigError.

    .npy (1-D integers), .bin (raw data.bin_dtype, little-endian) and, under the tokenizer "bytes", text files
    are mapped: opening reads them once, in pieces, to check them. What must be encoded, that is .jsonl and
    any text under a tokenizer, is encoded here and held in memory: one byte per id for "bytes", two for a
    vocabulary of up to 65,536, four above, and eight per document.

    Packed, an encoded document is followed by the tokenizer's end-of-text token if it has one, by a newline
    under "bytes"; mapped files are joined as they are. Padded, nothing is added. Empty texts are dropped,
    and long ones encoded in pieces, see `encoding.LINE_START`.
    """
    library = data.path == ""
    root = Path(sysconfig.get_path("stdlib")) if library else Path(data.path)
    files = library_files(root) if library else find_files(root)
    kind = kind_of(files[0])
    encoder = None if kind in (".npy", ".bin") else make_encoder(data.tokenizer)
    fingerprint = _fingerprint(files, root, library, encoder.identity if encoder else data.bin_dtype)
    with _progress(sum(file.stat().st_size for file in files)) as advance:
        if encoder is None or (kind == "text" and data.tokenizer == "bytes"):
            parts = [_locate(file, kind, data.bin_dtype) for file in files]
            for part in parts:
                # As bytes, the library may keep whatever encoding Python gave it.
                _check(part, vocab, kind == "text" and not library, advance)
            return Stream(parts, None, fingerprint)
        pieces: Iterable[Piece]
        if kind == "text":
            pieces = chain.from_iterable(map(text_file, files))
        else:
            pieces = chain.from_iterable(json_lines(file, data.text_field) for file in files)
        separator = encoder.separator if data.documents == "packed" else []
        arrays, sizes = encode(pieces, encoder, separator, vocab, advance)
        return Stream(arrays, np.cumsum([0, *sizes], dtype=np.int64), fingerprint)


def library_files(root: Path) -> list[Path]:
    """Every .py of the standard library at `root`, by path, without tests and packages: about 12 MB.

    Raises ConfigError where Python came without its source.
    """
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        # _sysconfigdata spells out the paths of the machine that built this Python.
        names = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [Path(folder, name) for name in names]
    if not found:
        raise ConfigError(f"data.path = '': this Python has no source at {root}; give a file or folder of text")
    return sorted(found, key=Path.as_posix)


def find_files(path: Path) -> list[Path]:
    """The file; or the folder's own files by name, all of one kind, none hidden. Raises ConfigError."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data.path = {str(path)!r}: no such file or folder; give one that exists")
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ConfigError(f"data.path = {str(path)!r}: the folder holds no files; put text or token ids in it")
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise ConfigError(f"data.path = {str(path)!r}: the folder mixes {', '.join(kinds)} files; keep one kind in it")
    return files


def kind_of(file: Path) -> str:
    """.npy, .bin, .jsonl or text, by the file's ending."""
    suffix = file.suffix.lower()
    if suffix == ".npz":
        raise ConfigError(
            f"data.path = {str(file)!r}: .npz holds images, and this model.family takes tokens; give text or "
            "token ids, or model.family = resnet"
        )
    return suffix if suffix in (".npy", ".bin", ".jsonl") else "text"


def _locate(file: Path, kind: str, bin_dtype: str) -> Mapped:
    """Where in a file its ids lie."""
    status = file.stat()
    if kind == ".npy":
        try:
            array = np.lib.format.open_memmap(file, mode="r")
        except ValueError as error:
            raise ConfigError(f"data.path = {str(file)!r}: {error}; write it with numpy.save") from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ConfigError(
                f"data.path = {str(file)!r}: an array of {array.dtype} with shape {array.shape}; "
                "save token ids as a 1-D array of integers"
            )
        return Mapped(file, array.dtype, array.offset, array.size, status.st_mtime_ns)
    dtype = np.dtype(bin_dtype if kind == ".bin" else np.uint8).newbyteorder("<")
    if status.st_size % dtype.itemsize:
        raise ConfigError(
            f"data.path = {str(file)!r}: its {status.st_size} bytes are no multiple of {dtype.itemsize}, "
            f"the size of data.bin_dtype = {bin_dtype}; set the type that it was written with"
        )
    return Mapped(file, dtype, 0, status.st_size // dtype.itemsize, status.st_mtime_ns)


def _check(part: Mapped, vocab: int, utf8: bool, advance: Callable[[float], None]) -> None:
    """Every id is in range(vocab), and text is UTF-8."""
    limits = np.iinfo(part.dtype)
    if part.size == 0 or (not utf8 and limits.min >= 0 and limits.max < vocab):
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, part.size, CHUNK):
        ids = _map(part)[start : start + CHUNK]
        if utf8:
            try:
                decoder.decode(ids.tobytes(), final=start + CHUNK >= part.size)
            except UnicodeDecodeError as error:
                place = start + ids.size - len(error.object) + error.start
                raise ConfigError(
                    f"data.path = {str(part.file)!r}: not UTF-8 at byte {place}; convert it to UTF-8"
                ) from None
        check_ids(ids, part.file, vocab)
        advance(ids.nbytes)


def _fingerprint(files: Sequence[Path], root: Path, library: bool, ids: str) -> str:
    """Names and sizes, not where the files lie nor when written; an edit that keeps the size is missed."""
    above = len(root.as_posix()) + 1  # `relative_to` would take 0.04 s of a start for all of the library
    named = [(file.as_posix()[above:] if library else file.name, file.stat().st_size) for file in files]
    facts = [named, ids, platform.python_version() if library else None]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[float], None]]:
    """A bar over bytes, where there are enough to wait for; call what it yields with the bytes done."""
    with Progress(console=console, disable=total < SHOW_BAR_FROM or not console.is_terminal) as bar:
        task = bar.add_task("reading data", total=total)
        yield lambda size: bar.advance(task, size)
