"""Token ids in files: .npy, raw .bin, .bin with llm.c's header, Megatron's .bin with its .idx.

The type of ids in a .bin without header is found from its content; data.bin_dtype is used only where that agrees.
"""

import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxdist.config import ConfigError
from jaxdist.data.blocks import read_blocks
from jaxdist.data.number_types import (
    NAMES,
    Header,
    certain_type,
    header_length,
    header_of,
    like_bytes,
    likely_type,
    only_at_the_start,
)
from jaxdist.data.signatures import UNPACK, begins_with_record, is_text, signature
from jaxdist.formats import llmc
from jaxdist.formats.foreign import Foreign

OPEN_FILES = 64  # mapped at a time: each holds a file descriptor, and a corpus may have thousands of files
WIDE = ("int64", "int32")  # types whose upper half is nearly always zero, the wider first
LOOKED_AT = 64  # blocks of a .bin that are sampled to find the type of its ids
TELLING = 32  # ids that are enough to find their width
MOST_WIDE = 2**22  # above all ids of tokenizers, also where the model has fewer
LLM_C_HEADER = 4 * llmc.HEADER  # bytes
# NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, entries of the documents' index
MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
PICKLE = Foreign(
    "a pickle, which is never opened", "save the ids by numpy.save, as a 1-D array of integers in a .npy file"
)
OTHERS = {  # first bytes of files that are not raw ids, beside those of `signatures`
    b"\x1f\x8b\x08": Foreign("packed by gzip", UNPACK), b"\x28\xb5\x2f\xfd": Foreign("packed by zstd", UNPACK),
}  # fmt: skip
# The start of a pickle (CPython, Lib/pickletools.py): protocol 2 to 5, from 4 on a frame, then the opcodes of a list,
# dict or set, of a tuple, of a call of module.name, of a string or bytes with their length; or protocol 0 or 1, without
# a number of its own: a list or dict, a tuple of small numbers, a call of a module that holds arrays or dicts.
PICKLED = re.compile(
    rb"""\x80[\4\5]\x95.{3}\0{5}
    | \x80[\2-\5](?: [\]}\x8f](?:q\0|[\x94(]) | \((?:[KN\]}X\x8a\x8c] | [MJ].[^\0]? | c\w)
        | c\w[\w.]*\n\w+\n | [BXT].{3}[\0-\x0f] | \x8c.[\w.]+\x94 )
    | [\]}]q\0[(KXc] | \(K.K. | \([ldt]p0\n
    | c(?:numpy|array|collections|copy_?reg|builtins|__builtin__)[\w.]*\n\w+\n""",
    re.VERBOSE | re.DOTALL,
)
PAIR = "move the index elsewhere, to read the ids without documents, or make the pair again by Megatron"
IF_IDS = "or, if these are ids, save them as .npy"
TEXT, JSON = (
    Foreign("text", f"give it the ending .txt, {IF_IDS}"),
    Foreign("JSON", f"give it the ending .jsonl, {IF_IDS}"),
)


class Mapped(NamedTuple):
    """Token ids in a file, which is memory-mapped when they are read."""

    file: Path
    dtype: np.dtype
    offset: int
    size: int
    written: int  # modification time in ns: a file that was replaced is mapped again


class Located(NamedTuple):
    """The ids of a file; the sizes of its documents, where the format has them; and how the type is known."""

    part: Mapped
    documents: NDArray[np.int64] | None
    source: str


@lru_cache(maxsize=OPEN_FILES)
def mapped(part: Mapped) -> NDArray:
    """The ids of the file."""
    return np.memmap(part.file, part.dtype, "r", part.offset, (part.size,))


def raw(file: Path, dtype: np.dtype, offset: int = 0) -> Mapped:
    """A file of numbers from `offset` on."""
    status = file.stat()
    return Mapped(file, dtype, offset, (status.st_size - offset) // dtype.itemsize, status.st_mtime_ns)


def locate_npy(file: Path, vocab: int) -> Located:
    """The ids of a .npy file. Raises ConfigError, also for a type of 16 bits that cannot hold `vocab` ids."""
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except ValueError as error:
        raise ConfigError(f"data.path = {str(file)!r}: {error}; write it with numpy.save") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"data.path = {str(file)!r}: an array of {array.dtype} with shape {array.shape}; "
            "save token ids as a 1-D array of integers, with numpy.save"
        )
    part = Mapped(file, array.dtype, array.offset, array.size, file.stat().st_mtime_ns)
    return _holding(Located(part, None, "as the .npy header says"), vocab)


def locate_bins(files: Sequence[Path], declared: str, vocab: int) -> list[Located]:
    """The ids of .bin files, all of one type. Raises ConfigError where content, header and `declared`, which is
    data.bin_dtype, contradict one another, or where the type cannot hold every id of a vocabulary of `vocab`."""
    found = [_megatron(file) or _llm_c(file) or _raw(file, declared, vocab) for file in files]
    known = {located.part.dtype.name for located in found if located}
    if not known and any(file.stat().st_size for file in files):
        raise ConfigError(
            f"data.path = {str(files[0])!r}: holds only zeros, or too few ids to find their type; set data.bin_dtype = "
            "uint16, uint32, int32 or int64, whichever they were written in"
        )
    if len(known) > 1:
        listed = ", ".join(f"{located.part.file.name} {located.part.dtype.name}" for located in found if located)
        raise ConfigError(f"data.path = {str(files[0].parent)!r}: files of several types ({listed}); {_alike(found)}")
    dtype = np.dtype(known.pop() if known else "uint16").newbyteorder("<")
    located_files = [
        located or Located(raw(file, dtype), None, "as the other files")
        for located, file in zip(found, files, strict=True)
    ]
    for located in located_files:
        file = located.part.file
        if declared not in ("auto", dtype.name):
            raise ConfigError(
                f"data.bin_dtype = {declared}: the ids of {str(file)!r} are {dtype.name}, {located.source}; set "
                "data.bin_dtype = auto"
            )
    return [_holding(located, vocab) for located in located_files]


def _holding(located: Located, vocab: int) -> Located:
    """The same. Raises ConfigError where 16 bits cannot hold every id of a vocabulary of `vocab`: bytes are not ids of
    it, but these may be."""
    dtype = located.part.dtype
    if dtype.itemsize == 2 and vocab > (most := np.iinfo(dtype).max + 1):
        auto = " and set data.bin_dtype = auto" * (located.part.file.suffix == ".bin")
        raise ConfigError(
            f"data.path = {str(located.part.file)!r}: its ids are {dtype.name}, {located.source}, and hold {most} "
            f"tokens at most where model.vocab = {vocab}: ids above were cut when it was written; write it as "
            f"uint32{auto}, or set model.vocab = {most} where no id is above"
        )
    return located


def _raw(file: Path, declared: str, vocab: int) -> Located | None:
    """The ids of a file without header; None where its content does not show their type."""
    size = file.stat().st_size
    content = b"".join(read_blocks([file], [size], LOOKED_AT))
    other = next((what for begin, what in OTHERS.items() if content.startswith(begin)), None)
    if PICKLED.match(content):
        other = PICKLE
    text = (JSON if begins_with_record(content.decode("utf-8", "ignore"), True) else TEXT) if is_text(content) else None
    if what := signature(content) or other or text:
        raise ConfigError(f"data.path = {str(file)!r}: no raw token ids: it is {what.title}; {what.fix}")
    least = 2 if declared == "auto" else np.dtype(declared).itemsize
    if size % least:
        field = "the smallest type of ids" if declared == "auto" else f"the size of data.bin_dtype = {declared}"
        fix = "set data.bin_dtype = auto"
        if declared == "auto" and like_bytes(content, vocab, readable=False):
            fix = f"its ids are uint8 by their content: write them as uint16, as by {_rewriting('|u1', wanted='<u2')}"
        elif declared == "auto":
            fix = (
                "it is cut, or begins with a header: copy it again, or write the ids alone, as by "
                f"{_rewriting('uint16', ', offset=HEADER')}, HEADER being the header's length in bytes"
            )
        raise ConfigError(f"data.path = {str(file)!r}: its {size} bytes are not a multiple of {least}, {field}; {fix}")
    found = width(content, size, vocab)
    if declared == "auto":
        if found is None:
            return None
        checked = found == "uint16"  # as which other types are read
        if checked:
            _check_type(file, content, declared, vocab, likely=False)
        _check_complete(file, content, found, vocab)
        _check_header(file, content, found, declared, vocab)
        if checked:
            _check_type(file, content, declared, vocab, likely=True)
        ids = _view(content, found)
        begin = ", ".join(map(str, ids[:4]))
        source = f"as the content shows (they begin {begin}; the greatest seen is {ids.max()})"
        return Located(raw(file, np.dtype(found).newbyteorder("<")), None, source)
    ids = _view(content, declared)
    fits = bool(((ids >= 0) & (ids < vocab)).all())
    wider = found is not None and np.dtype(found).itemsize > np.dtype(declared).itemsize
    if found and np.dtype(found).itemsize != np.dtype(declared).itemsize and (wider or not fits):
        why = "every second number is the upper half of an id" if wider else f"as {declared} they reach {ids.max()}"
        raise ConfigError(
            f"data.bin_dtype = {declared}: the ids of {str(file)!r} are {found} by their content: {why}; set "
            f"data.bin_dtype = {found}, or auto; or, if they are {declared}, save them as .npy, which names its type"
        )
    _check_type(file, content, declared, vocab, likely=False)
    _check_header(file, content, declared, declared, vocab)
    _check_type(file, content, declared, vocab, likely=True)
    return Located(raw(file, np.dtype(declared).newbyteorder("<")), None, "by data.bin_dtype")


def width(content: bytes, size: int, vocab: int) -> str | None:
    """The type of the ids in a file of `size` bytes, of which `content` is a sample; None where that is not enough."""
    for wide in WIDE:
        wide_ids = _holds(content, wide, vocab)
        if wide_ids is None and size % np.dtype(wide).itemsize == 0:
            return None
        if wide_ids:
            return wide if wide == "int64" or _view(content, wide).min() < 0 else "uint32"
    return "uint16" if any(content) else None


def _holds(content: bytes, wide: str, vocab: int) -> bool | None:
    """Whether ids are of this type or of half its size; None where there are too few to decide.

    An id has an upper half that is zero, or nearly so, and a lower one that is not. With ids half as wide, both halves
    are ids, and look alike: that n of them above all others lie in lower halves alone is a chance of 2^-n. Where all
    upper halves are zero, n counts the others; else it counts the different ones, as a text may repeat itself.
    """
    half, high = {"int64": ("int32", 2**31), "int32": ("int16", max(vocab, MOST_WIDE))}[wide]
    ids, halves = _view(content, wide), _view(content, half)
    halves = halves[: 2 * len(ids)]
    unsigned = halves.view(f"<u{np.dtype(half).itemsize}")
    lower, upper = unsigned[::2], halves[1::2]
    if not ids.size or ids.min() < -(2**15) or ids.max() >= high or not lower.any():
        return False
    greatest = int(np.abs(upper).max())
    if greatest and lower.max() < 16 * (greatest + 1):
        return False
    above = lower[lower > greatest]
    telling = len(np.unique(above)) if greatest else len(above)
    return True if telling >= TELLING or _view(content, "uint16").max() >= vocab else None


def _check_complete(file: Path, content: bytes, found: str, vocab: int) -> None:
    """Raises ConfigError for wide ids of which the last is cut, or that begin within an id or behind a header."""
    size, width = file.stat().st_size, np.dtype(found).itemsize
    if size % width:
        raise ConfigError(
            f"data.path = {str(file)!r}: its ids are {found} by their content, and its {size} bytes no multiple of "
            f"{width}: it is cut; copy it again, or drop the last id, as by {_rewriting(found)}"
        )
    body = content[min(LLM_C_HEADER, len(content) // 16 * 8) :]  # without a header of an unknown format
    misplaced = _view(body, found)
    if width > 2 and misplaced.any() and not (misplaced & 255).any():
        why = f"all {found} behind it are multiples of 256, as where they begin within an id"
        raise _headed(
            file,
            Header(why, header_length(content, size, found)),
            found,
            f"set data.bin_dtype = {found} if it has none",
        )
    for wide in WIDE:
        half = np.dtype(wide).itemsize // 2
        if half >= width and any(_holds(body[place:], wide, vocab) for place in (0, half)):
            header = Header(f"the ids behind it are {wide} by their content", header_length(content, size, wide))
            raise _headed(file, header, wide.replace("int32", "uint32"), f"set data.bin_dtype = {found} if it has none")


def _headed(file: Path, header: Header, dtype: str, otherwise: str) -> ConfigError:
    """The error for ids of this type behind a header of an unknown format."""
    offset = header.length or "HEADER"
    what = "" if header.length else ", HEADER being its length in bytes"
    return ConfigError(
        f"data.path = {str(file)!r}: it seems to begin with a header of an unknown format: {header.why}; write the ids "
        f"alone, as by {_rewriting(dtype, f', offset={offset}')}{what}, or {otherwise}"
    )


def _alike(found: Sequence[Located | None]) -> str:
    """Instructions to write the ids of files of several types in the widest of these."""
    parts = [located.part for located in found if located]
    widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    ways = {}
    for part in parts:
        if part.dtype != widest:
            offset = f", offset={part.offset}" * (part.offset > 0)
            ways[_rewriting(part.dtype, offset, np.dtype(widest).str)] = part.file.name
    return f"write all as {widest.name}, as by {', '.join(f'{code} for {name}' for code, name in ways.items())}"


def _rewriting(dtype: str | np.dtype, offset: str = "", wanted: str = "") -> str:
    """Python code that rewrites a file of numbers of type `dtype`, from `offset` on, as type `wanted`."""
    code = np.dtype(dtype).str
    return f"numpy.fromfile(path, {code!r}{offset}){wanted and f'.astype({wanted!r})'}.tofile(path)"


def _view(content: bytes, name: str) -> NDArray:
    dtype = np.dtype(name).newbyteorder("<")
    return np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)


def _check_type(file: Path, content: bytes, declared: str, vocab: int, likely: bool) -> None:
    """Raises ConfigError for ids of a type that is not read: one that the content proves, or one that is `likely`.
    `declared`, which is data.bin_dtype, is believed against what is likely, unless numbers are not ids in it."""
    auto = declared == "auto"
    seen = _view(content, "uint16" if auto else declared)
    fits = bool(((seen >= 0) & (seen < vocab)).all())
    if likely and fits and not auto:
        return
    if dtype := (likely_type if likely else certain_type)(content, vocab, fits):
        narrow = np.dtype(dtype).itemsize <= 2 and vocab <= 65_536  # wider ids may reach beyond 16 bits somewhere
        code = _rewriting(dtype, wanted="<u2" if narrow else "<u4")
        otherwise = ", or set data.bin_dtype = uint16 if they are that" * (likely and fits)
        raise ConfigError(
            f"data.path = {str(file)!r}: its ids are {NAMES[dtype]} by their content; write them in another type, as "
            f"by {code}{otherwise}"
        )
    if likely and not fits and like_bytes(content, vocab, fits):
        raise ConfigError(
            f"data.path = {str(file)!r}: its ids are uint16 up to {seen.max()}, beyond model.vocab = {vocab}, or "
            f"uint8: raise model.vocab above {seen.max()} if they are uint16; write them in another type, as by "
            f"{_rewriting('|u1', wanted='<u2')}, if they are uint8"
        )


def _check_header(file: Path, content: bytes, dtype: str, declared: str, vocab: int) -> None:
    """Raises ConfigError for ids behind a header of an unknown format. `declared`, which is data.bin_dtype, says that
    there is none, unless numbers in it are not ids."""
    header = header_of(content, file.stat().st_size, dtype)
    beyond = only_at_the_start(content, dtype, vocab)
    if beyond is not None:
        why = f"{beyond}, which is not an id of model.vocab = {vocab}, is there, and no such number behind"
        header = Header(why, header_length(content, file.stat().st_size, dtype))
        raise _headed(file, header, dtype, f"raise model.vocab above {beyond} if it is an id")
    if header and declared == "auto":
        raise _headed(file, header, dtype, f"set data.bin_dtype = {dtype} if all of it are ids")


def _llm_c(file: Path) -> Located | None:
    """The ids of a file with llm.c's header."""
    with file.open("rb") as stream:
        head = stream.read(LLM_C_HEADER)
    if len(head) < 12:
        return None
    magic, version, count = struct.unpack_from("<3i", head)
    if what := llmc.OTHERS.get(magic):
        raise ConfigError(f"data.path = {str(file)!r}: llm.c's {what} ({magic}), not its token ids; give those")
    if magic not in llmc.TOKENS:
        return None
    known, name = llmc.TOKENS[magic]
    dtype, size = np.dtype(name).newbyteorder("<"), file.stat().st_size
    if version != known or LLM_C_HEADER + count * dtype.itemsize != size:
        raise ConfigError(
            f"data.path = {str(file)!r}: llm.c's header {magic} of version {version} for {count} ids of {name}, where "
            f"version {known} is known and the file has {size} bytes: it is cut, or of another format; copy it "
            f"again, or write the ids alone, as by {_rewriting(name, f', offset={LLM_C_HEADER}')}"
        )
    return Located(raw(file, dtype, LLM_C_HEADER), None, f"as llm.c's header {magic} says")


def _megatron(file: Path) -> Located | None:
    """The ids of a .bin with Megatron's .idx beside it."""
    index = file.with_suffix(".idx")
    if not index.is_file():
        return None
    content = index.read_bytes() if index.stat().st_size < MEGATRON_HEADER.size else np.memmap(index, mode="r")
    head = bytes(content[: MEGATRON_HEADER.size])
    what = f"data.path = {str(file)!r}: its index {index.name}"
    if not head.startswith(MEGATRON) or len(head) < MEGATRON_HEADER.size:
        raise ConfigError(f"{what} is not Megatron's (MMIDIDX); {PAIR}")
    _, version, code, sequences, entries = MEGATRON_HEADER.unpack(head)
    name = MEGATRON_TYPES.get(code, f"type {code}")
    if version != 1 or not name.startswith(("int", "uint")):
        raise ConfigError(f"{what} is of version {version} for {name}; {PAIR} with version 1 for integers")
    if len(content) < MEGATRON_HEADER.size + 12 * sequences + 8 * entries:
        raise ConfigError(f"{what} is cut: it lacks entries of {sequences} sequences; {PAIR}")
    lengths = np.frombuffer(content, "<i4", sequences, MEGATRON_HEADER.size)
    starts = np.frombuffer(content, "<i8", sequences, MEGATRON_HEADER.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", entries, MEGATRON_HEADER.size + 12 * sequences)
    dtype = np.dtype(name).newbyteorder("<")
    before = np.append(0, np.cumsum(lengths, dtype=np.int64))
    rising = bool((np.diff(documents) >= 0).all()) and entries > 0 and documents[0] == 0 and documents[-1] == sequences
    if (
        before[-1] * dtype.itemsize != file.stat().st_size
        or (starts != before[:-1] * dtype.itemsize).any()
        or not rising
    ):
        raise ConfigError(f"{what} and its ids do not belong together; {PAIR}")
    sizes = np.diff(before[documents])
    return Located(raw(file, dtype), sizes, f"as Megatron's {index.name} says")
