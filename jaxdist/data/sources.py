"""From data.path to one stream of token ids, memory-mapped wherever the file already holds them."""

import codecs
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from jaxdist.config import ConfigError, Data
from jaxdist.data.blocks import BLOCKS, Earlier, fingerprint_by_names, fingerprint_of
from jaxdist.data.documents import BARE, Documents, text_start
from jaxdist.data.encoding import Encoder, check_ids, encode, make_encoder
from jaxdist.data.files import PACKED, Files, find_files, library_files, missing_shards, names
from jaxdist.data.ids import Located, Mapped, locate_bins, locate_npy, mapped, raw
from jaxdist.runs.display import console

CHUNK = 1 << 22  # ids looked at together when a file is checked
SHOW_BAR_FROM = 20_000_000  # bytes
LIBRARY_BLOCKS = 16  # sampled of the library, which Python's version and the files' sizes identify as well


class Stream:
    """Token ids of many files or arrays, end to end; documents lie between `bounds` [documents + 1].

    Where names of files say the splits, the first `training` ids are the training split; else that is None.
    `fingerprint` and `earlier`: see `blocks`. `rows` are the start-up table's, on what was found.
    """

    fingerprint: str = ""
    earlier: Earlier = Earlier()

    def __init__(
        self, parts: Sequence[Mapped | NDArray], bounds: NDArray[np.int64], training: int | None = None
    ) -> None:
        self._parts = [part for part in parts if part.size]
        self._starts = np.cumsum([0, *(part.size for part in self._parts)], dtype=np.int64)
        self.bounds, self.training = bounds, training
        self.rows: dict[str, str] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Ids [stop - start]."""
        found = np.empty(stop - start, np.int32)
        number, done = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while done < len(found):
            part = self._parts[number]
            skip = max(0, start - int(self._starts[number]))
            piece = (mapped(part) if isinstance(part, Mapped) else part)[skip : skip + len(found) - done]
            found[done : done + len(piece)] = piece
            number, done = number + 1, done + len(piece)
        return found


def open_stream(data: Data, vocab: int) -> Stream:
    """The ids of data.path, every one of them checked to be in range(vocab). Raises ConfigError.

    .npy (1-D integers), .bin (see `ids`) and, under the tokenizer "bytes", text files are mapped: opening reads them
    once, in pieces, to check them. Data to encode, that is JSON, CSV, Arrow, packed text and any text under a
    tokenizer (see `documents`), are encoded here and held in memory: one byte per id for "bytes", two for a vocabulary
    of up to 65,536, four above, and eight per document.

    Packed, an encoded document is followed by the tokenizer's end-of-text token (see `encoding.end_of`), by a newline
    under "bytes"; mapped files are joined without a separator. Padded, nothing is added. Empty texts are dropped, and
    long ones are encoded in pieces (see `documents.LINE_START`).
    """
    library = data.path == ""
    root = Path(sysconfig.get_path("stdlib")) if library else Path(data.path)
    files = Files(library_files(root), [], "text", []) if library else find_files(root, data.split == "auto")
    if not data.text_field and files.kind in ("JSON", "CSV"):
        files = files._replace(kind="text")
    encoder = None if files.kind in (".npy", ".bin") else make_encoder(data.tokenizer, data.end_of_text)
    joined = encoder is None or (files.kind == "text" and data.tokenizer == "bytes")  # as the files have their ids
    separator = encoder.separator if encoder and not joined and data.documents == "packed" else []
    located = _locate(files, data, vocab, library)
    documents = Documents(data.text_field)
    with _progress(sum(file.stat().st_size for file in files.all)) as advance:

        def encoded(some: Sequence[Path], ends: Sequence[int]) -> tuple[list[NDArray], list[int]]:
            assert encoder is not None
            pieces = chain.from_iterable(documents.read(file, files.kind) for file in some)
            return encode(pieces, encoder, ends, vocab, advance)

        def as_it_lies(file: Path, there: Located | None) -> tuple[Sequence[Mapped | NDArray], list[int]]:
            if there is None:  # text that is packed, or not in UTF-8
                return encoded([file], [])
            # As bytes, the library may keep whatever encoding Python gave it.
            _check(there.part, vocab, files.kind == "text" and not library, advance)
            own = [there.part.size] * (there.part.size > 0)
            return [there.part], own if there.documents is None else there.documents.tolist()

        if joined:
            read = [as_it_lies(file, there) for file, there in zip(files.all, located, strict=True)]
            first = len(files.train)
        else:
            read, first = [encoded(split, separator) for split in (files.train, files.validation)], 1
    parts = [part for found, _ in read for part in found]
    sizes = [size for _, found in read for size in found]
    training = sum(sum(found) for _, found in read[:first])
    stream = Stream(parts, np.cumsum([0, *sizes], dtype=np.int64), training if files.validation else None)
    kind = f"{files.kind}, tokenizer {data.tokenizer}"
    if not encoder and located and located[0]:
        kind = f"{located[0].part.dtype.name} ids, {located[0].source}"
    kind += f", {documents.nulls:,} records of null passed over" if documents.nulls else ""
    whose = "the library of this Python" if library else names(files.train)
    whose += f", for validation {names(files.validation)}" if files.validation else ""
    stream.rows = {"data": f"{len(stream):,} tokens: {kind}; {whose}"}
    stream.rows["end of document"] = _end(data, encoder, joined)
    if missing := missing_shards(files.all):
        stream.rows["not there"] = f"{len(missing)} of the files that names count: {names(map(Path, missing))}"
    if files.aside:
        stream.rows["left alone"] = ", ".join(files.aside)
    identity = (
        encoder.identity if encoder else [(there.part.dtype.str, there.part.offset) for there in located if there]
    )
    above = len(root.as_posix()) + 1  # `relative_to` would take 0.04 s of a start for all of the library
    named = [file.as_posix()[above:] if library else file.name for file in files.all]
    version = platform.python_version() if library else None
    stream.fingerprint = fingerprint_of(
        files.all, named, identity, separator, len(files.train), version,
        blocks=LIBRARY_BLOCKS if library else BLOCKS,
    )  # fmt: skip
    if data.fingerprint not in ("", stream.fingerprint):
        stream.earlier = _earlier(data, files, encoder, located, version)
    return stream


def _end(data: Data, encoder: Encoder | None, joined: bool) -> str:
    """Text of the start-up table on the end of documents."""
    if encoder and not joined:
        return encoder.end if data.documents == "packed" else "nothing is added (data.documents = padded)"
    joining = "files are joined without a separator" if encoder else "as the ids have it"
    return joining + ("" if data.end_of_text == "auto" else "; data.end_of_text applies to text that is encoded here")


def _earlier(
    data: Data, files: Files, encoder: Encoder | None, located: Sequence[Located | None], version: str | None
) -> Earlier:
    """Fingerprint that earlier versions recorded for the same files, if they read them alike."""
    endings = {file.suffix.lower() for file in files.all}
    marks = files.kind == "text" and any(there and there.part.offset for there in located)
    if (
        files.kind in ("Arrow", "CSV")
        or (files.kind == "JSON" and endings != {".jsonl"})
        or endings & {*PACKED}
        or marks
    ):
        return Earlier()
    if encoder:
        identities = [encoder.identity]
    elif files.kind == ".bin":
        width = next(there for there in located if there).part.dtype.itemsize
        identities = [name for name in ("uint16", "uint32", "int32") if np.dtype(name).itemsize == width]
    else:
        identities = ["uint16" if data.bin_dtype == "auto" else data.bin_dtype]
    fields = {"split": "share"} if files.validation else {}
    joined = files.kind == "text" and data.tokenizer == "bytes"
    if encoder and encoder.earlier and data.documents == "packed" and not joined:
        fields["end_of_text"] = encoder.earlier
    root = Path(data.path or sysconfig.get_path("stdlib"))
    named = [(file.relative_to(root).as_posix() if version else file.name, file) for file in sorted(files.all)]
    if root.is_file():
        named = [(root.name, root)]
    return Earlier(
        frozenset(fingerprint_by_names(named, identity, version) for identity in identities),
        tuple(fields.items()),
    )


def _locate(files: Files, data: Data, vocab: int, library: bool) -> Sequence[Located | None]:
    """Place of each file's ids, or None where it must be encoded; empty where all must be."""
    match files.kind:
        case ".bin":
            return locate_bins(files.all, data.bin_dtype, vocab)
        case ".npy":
            return [locate_npy(file, vocab) for file in files.all]
        case "text" if data.tokenizer == "bytes":
            starts = [BARE if library else text_start(file, data.text_field) for file in files.all]
            return [
                Located(raw(file, np.dtype(np.uint8), start.mark), None, "") if start.bare else None
                for file, start in zip(files.all, starts, strict=True)
            ]
    return []


def _check(part: Mapped, vocab: int, utf8: bool, advance: Callable[[float], None]) -> None:
    """Every id is in range(vocab), and text is UTF-8."""
    limits = np.iinfo(part.dtype)
    if part.size == 0 or (not utf8 and limits.min >= 0 and limits.max < vocab):
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, part.size, CHUNK):
        ids = mapped(part)[start : start + CHUNK]
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


@contextmanager
def _progress(total: int) -> Iterator[Callable[[float], None]]:
    """A bar over bytes, where there are enough to wait for; call what it yields with the bytes done."""
    with Progress(console=console, disable=total < SHOW_BAR_FROM or not console.is_terminal) as bar:
        task = bar.add_task("reading data", total=total)
        yield lambda size: bar.advance(task, size)
